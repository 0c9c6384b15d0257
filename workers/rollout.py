"""The generate step: how to sample, and the batch of the groups that are finished."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from distflow.data.batch import Batch, Ragged
from distflow.exchange.rollout_core import FinishedGroup
from distflow.flow.step import step
from distflow.runtime.generate_step import Generate
from distflow.runtime.protocols import Tokenizer
from distflow.runtime.steps import StepContext
from distflow.types import FINISH_REASONS, SampleOutput, SamplingParams


@step(
    role="generate",
    reads=[],
    writes=[
        "uid",
        "group",
        "sample",
        "prompt_ids",
        "prompt_text",
        "task",
        "response_ids",
        "response_mask",
        "response_text",
        "rollout_logprobs",
        "policy_versions",
        "finish_reason",
    ],
    scope="group",
    choices={"temperature": ">= 0", "top_p": "> 0, <= 1", "top_k": ">= 0", "max_new_tokens": ">= 1"},
)
async def sample(
    generate: Generate,
    ctx: StepContext,
    *,
    temperature: float = 1.0,
    top_p: float = 1.0,
    top_k: int = 0,
    max_new_tokens: int = 16,
    stop_token_ids: Sequence[int] = (),
) -> Batch:
    """Sample the responses to the prompts of this worker's leases; returns the groups that are finished.

    A response ends with the tokenizer's end token, one of `stop_token_ids`, or after `max_new_tokens` tokens. Newer
    weights are loaded between two decode steps; `policy_versions` [n, 4] records each token's version (term, version,
    first token, end).
    """
    tokenizer = ctx.tokenizer
    assert tokenizer is not None, "a worker with a generate step has a tokenizer"
    ends = () if tokenizer.eos_token_id is None else (tokenizer.eos_token_id,)
    groups = await generate(SamplingParams(temperature, top_p, top_k, max_new_tokens, (*ends, *stop_token_ids)))
    return assemble(groups, tokenizer, torch.float64 if ctx.dtype == "float64" else torch.float32)


def assemble(groups: Sequence[FinishedGroup], tokenizer: Tokenizer, dtype: torch.dtype) -> Batch:
    """Finished groups as one batch, in the given order; log-probs in `dtype`."""
    leases = [group.lease for group in groups for _ in group.samples]
    samples = [out for group in groups for out in group.samples]
    ids = [out.token_ids for out in samples]
    response_ids = Ragged.from_rows(ids, torch.int64)
    return Batch(
        {
            "uid": torch.tensor([lease.uid for lease in leases], dtype=torch.int64),
            "group": torch.tensor([lease.position for lease in leases], dtype=torch.int64),
            "sample": torch.tensor([out.sample for out in samples], dtype=torch.int64),
            "prompt_ids": Ragged.from_rows([lease.prompt_ids for lease in leases], torch.int64),
            "prompt_text": Ragged.from_texts([lease.prompt_text for lease in leases]),
            "task": Ragged.from_texts([lease.task for lease in leases]),
            "response_ids": response_ids,
            "response_mask": response_ids.like(torch.ones_like(response_ids.values, dtype=torch.bool)),
            "response_text": Ragged.from_texts(tokenizer.decode_batch(ids, skip_special=True)),
            "rollout_logprobs": Ragged.from_rows([out.logprobs for out in samples], dtype),
            "policy_versions": _spans(samples),
            "finish_reason": torch.tensor([FINISH_REASONS.index(out.finish_reason) for out in samples]),
        }
    )


def _spans(samples: Sequence[SampleOutput]) -> Ragged:
    rows = [out.spans for out in samples]
    counts = torch.tensor([0, *map(len, rows)], dtype=torch.int64)
    values = torch.tensor([tuple(span) for row in rows for span in row], dtype=torch.int64).view(-1, 4)
    return Ragged(values, counts.cumsum(0))
