"""Forward steps: log-probs of the responses under a frozen model, or under the policy before it is updated."""

from __future__ import annotations

import torch

from distflow.data.batch import Batch, Ragged
from distflow.data.micro_batches import micro_batches
from distflow.flow.step import step
from distflow.runtime.steps import StepContext


@step(role="forward", reads=["prompt_ids", "response_ids"], writes=["ref_logprobs"], scope="sample", head="tokens")
def ref_logprobs(batch: Batch, ctx: StepContext) -> Batch:
    """Write `ref_logprobs`, one per response token, at the temperature at which the flow samples."""
    return batch.with_columns(ref_logprobs=_logprobs(batch, ctx))


@step(role="forward", reads=["prompt_ids", "response_ids"], writes=["old_logprobs"], scope="sample", head="tokens")
def old_logprobs(batch: Batch, ctx: StepContext) -> Batch:
    """Write `old_logprobs`: those of the policy before this training step's updates, for the ratio of clipped losses.

    Without this step the update takes its own log-probs for them, which are the same while there is one update a batch.
    """
    return batch.with_columns(old_logprobs=_logprobs(batch, ctx))


def _logprobs(batch: Batch, ctx: StepContext) -> Ragged:
    """One value per response token, at the temperature at which the flow samples."""
    responses = batch.ragged("response_ids")
    rows: dict[int, torch.Tensor] = {}
    dtype = torch.float32
    for numbers, part in micro_batches(batch, ctx.tokens_per_microbatch, ["prompt_ids", "response_ids"]):
        scores = ctx.backend.score(part, temperature=ctx.temperature, grad=False, entropy=False)
        flat = scores.logprobs_BT[scores.mask_BT].cpu()
        dtype = flat.dtype
        lengths = part.ragged("response_ids").lengths.tolist()
        rows.update(zip(numbers.tolist(), torch.split(flat, lengths), strict=True))
    values = torch.cat([rows[row] for row in range(len(batch))]) if rows else torch.empty(0, dtype=dtype)
    return Ragged(values, responses.offsets)
