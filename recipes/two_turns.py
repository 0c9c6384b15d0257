"""A generate step of two turns, used by two_turns.yaml beside this file, and a step over all sequences of a sample."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from distflow import Batch, Episode, Generate, SamplingParams, StepContext, step
from distflow.data.samples import by_sample, to_rows
from distflow.workers.reward_functions import digits_copied


@step(
    role="generate",
    reads=[],
    writes=["reward", "score", "rewards/second"],
    environment=["replay", "repeatable"],
    choices={"temperature": ">= 0", "max_new_tokens": ">= 1", "max_tokens": ">= 1"},
)
async def copy_twice(
    episode: Episode,
    generate: Generate,
    ctx: StepContext,
    *,
    temperature: float = 1.0,
    max_new_tokens: int = 4,
    max_tokens: int = 12,
    strip: bool = False,
) -> dict[str, float]:
    """Copy the number of the prompt, then one that the environment names: `407=` 407 `58=` 58.

    The environment's tokens are part of the response and of `max_tokens`, but not trained on. The second number is the
    same for all samples of the group, wherever they are made: so the environment can be replayed. `strip`: the second
    turn has nothing of the first before it, `58=` 58, and is a sequence of its own.
    """
    params = SamplingParams(temperature, max_new_tokens=max_new_tokens, stop_token_ids=ctx.end_tokens)
    first = await generate(episode.prompt_ids, params)
    number = str(ctx.rng(episode.uid).integers(10, 100))
    before = () if strip else (*episode.prompt_ids, *first.response_ids)
    prefix = (*before, *_encoded(ctx, f"{number}="))
    second = await generate(prefix, params)
    turns = [digits_copied(first), digits_copied(replace(second, task={"answer": number}))]
    reward, score = (sum(turn[name] for turn in turns) / len(turns) for name in ("reward", "score"))
    return {"reward": reward, "score": score, "rewards/second": turns[1]["reward"]}


@step(role="score", reads=["response_ids", "response_mask", "sequence"], writes=["rewards/written"])
def written(batch: Batch, ctx: StepContext) -> Batch:
    """How many tokens the model wrote in all sequences of a sample, [B]: the same on each row of a sample."""
    samples = by_sample(batch).ragged("response_mask")
    counts = torch.tensor([float(mask.sum()) for mask in samples.rows()])
    return batch.with_columns(**{"rewards/written": to_rows(batch, counts)})


def _encoded(ctx: StepContext, text: str) -> Sequence[int]:
    assert ctx.tokenizer is not None, "a worker with a generate step has a tokenizer"
    return ctx.tokenizer.encode(text)
