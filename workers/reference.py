"""Forward steps: log-probs of the responses under a frozen model, or under the policy before it is updated."""

from __future__ import annotations

from torch import Tensor

from distflow.data.batch import Batch, Ragged
from distflow.flow.step import step
from distflow.runtime.steps import StepContext
from distflow.workers.within_memory import in_micro_batches


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

    def compute(part: Batch) -> Tensor:
        scores = ctx.backend.score(part, temperature=ctx.temperature, grad=False, entropy=False)
        return scores.logprobs_BT[scores.mask_BT].cpu()

    return in_micro_batches(batch, ctx, compute)
