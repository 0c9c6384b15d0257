"""The reward step of a learned reward model."""

from __future__ import annotations

import torch

from distflow.data.batch import Batch, Ragged
from distflow.errors import UserError
from distflow.flow.step import step
from distflow.runtime.protocols import TextScorer
from distflow.runtime.steps import StepContext


@step(
    role="score",
    reads=["prompt_text", "response_text"],
    writes=["reward", "score"],
    may_write=["drop_reason"],
    scope="sample",
    head="score",
)
def judge(batch: Batch, ctx: StepContext, *, scale: float = 1.0) -> Batch:
    """Write `reward` and `score` [B]: `scale` times what the step's model gives a prompt and its response.

    The model has `head: score`, and reads the two texts by its own tokenizer and chat template. A group with a text
    that is longer than the model takes is replaced; `reward/too_long` counts such texts. Raises UserError where the
    backend cannot do that.
    """
    backend = ctx.backend
    if not isinstance(backend, TextScorer):
        raise UserError(f"models.{ctx.model}: this backend cannot score whole texts — backend: torch, head: score")
    texts = zip(batch.texts("prompt_text"), batch.texts("response_text"), strict=True)
    rows = [backend.encode(prompt, response) for prompt, response in texts]
    longest = backend.longest_text()
    too_long = [longest is not None and len(row) > longest for row in rows]
    fitting = [number for number, over in enumerate(too_long) if not over]
    reward_B = torch.zeros(batch.rows)
    if fitting:
        reward_B[fitting] = scale * backend.score_texts([rows[n] for n in fitting], tokens=ctx.tokens_per_microbatch)
    judged = batch.with_columns(reward=reward_B, score=reward_B)
    if not any(too_long):
        return judged
    ctx.metrics.add("reward/too_long", sum(too_long))
    reasons = [f"longer than the reward model's {longest} tokens" if over else "" for over in too_long]
    return judged.with_columns(drop_reason=Ragged.from_texts(reasons))
