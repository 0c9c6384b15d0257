"""On-policy distillation: what a teacher makes of the student's own samples.

Shapes: B samples, T response tokens of the longest sample, N of all samples, K candidates for each.
"""

from __future__ import annotations

import torch
from torch import Tensor

from distflow.data.batch import Batch
from distflow.flow.step import step
from distflow.runtime.steps import StepContext
from distflow.workers.within_memory import columns_in_micro_batches


@step(
    role="forward",
    reads=["prompt_ids", "response_ids"],
    writes=["teacher_logprobs", "candidate_ids", "teacher_candidate_logprobs"],
    scope="sample",
    head="tokens",
    own_model=True,
    widths={"candidate_ids": "top_k", "teacher_candidate_logprobs": "top_k"},
    choices={"top_k": ">= 0"},
)
def teacher(batch: Batch, ctx: StepContext, *, top_k: int = 16) -> Batch:
    """Write the teacher's log-probs of the response tokens, `teacher_logprobs`, at the temperature at which the flow
    samples; and in `candidate_ids` the `top_k` tokens that it finds likeliest at each place, with their log-probs in
    `teacher_candidate_logprobs`: [N, K], where K is at most the size of its vocabulary.
    """

    def compute(part: Batch) -> tuple[Tensor, ...]:
        scores = ctx.backend.score(part, temperature=ctx.temperature, grad=False, entropy=False, candidates=top_k)
        logprobs_N = scores.logprobs_BT[scores.mask_BT].cpu()
        ids_BTK, logprobs_BTK = scores.candidate_ids_BTK, scores.candidate_logprobs_BTK
        if ids_BTK is None or logprobs_BTK is None:
            nothing_NK = logprobs_N.new_empty(len(logprobs_N), 0)
            return logprobs_N, nothing_NK.to(torch.int32), nothing_NK
        # Half the bytes of int64: these fields are most of what crosses between workers.
        return logprobs_N, ids_BTK[scores.mask_BT].cpu().to(torch.int32), logprobs_BTK[scores.mask_BT].cpu()

    logprobs, ids, of_candidates = columns_in_micro_batches(batch, ctx, compute)
    return batch.with_columns(teacher_logprobs=logprobs, candidate_ids=ids, teacher_candidate_logprobs=of_candidates)
