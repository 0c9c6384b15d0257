"""Supervised training on demonstrations: what a row of the data gives, and the update on it.

Shapes: B samples, T response tokens of the longest.
"""

from __future__ import annotations

from distflow.algorithms.aggregation import Aggregation
from distflow.algorithms.supervised import nll
from distflow.data.batch import Batch
from distflow.data.responses import DataRow, RowResponse
from distflow.errors import UserError
from distflow.flow.step import step
from distflow.runtime.steps import StepContext
from distflow.workers.trainer import describe
from distflow.workers.within_memory import PartLoss, accumulate, cut_by


@step(role="read", reads=[], writes=[], choices={"turns": ["all", "last"], "max_response_tokens": ">= 1"})
def demonstration(row: DataRow, *, turns: str = "all", max_response_tokens: int = 1024) -> list[RowResponse]:
    """The column `response`, or else the assistant's turn that ends a conversation, or `answer`.

    `turns`: of a conversation, all turns of the assistant are trained on, or the last one alone. With `all` the prompt
    is what comes before the first of them, and `max_response_tokens` is for all that follows.
    """
    return [RowResponse.of(row.turn("response", "answer"))]


@step(
    role="train",
    reads=["prompt_ids", "response_ids", "response_mask"],
    writes=[],
    scope="sample",
    head="tokens",
    choices={"aggregate": ["token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm/N"]},
)
def sft(batch: Batch, ctx: StepContext, *, aggregate: str = "token-mean") -> Batch:
    """Accumulate the gradient of the negative log-likelihood of the responses, end tokens included, in micro-batches.

    `aggregate`: see `Aggregation`. Adds the divisor of the gradient to `ctx.denominators`. Raises UserError for invalid
    settings.
    """
    aggregation = Aggregation.parse(aggregate)
    if not aggregation.additive:
        raise UserError(f"aggregate={aggregate!r}: this loss is divided by a count; expected for example token-mean")
    if ctx.update_epoch == 0:
        describe(batch, ctx.metrics)
    fields = ["prompt_ids", "response_ids", "response_mask"]
    accumulate(batch, ctx, lambda part: _loss(part, ctx, aggregation), cut_by(fields))
    return batch


def _loss(part: Batch, ctx: StepContext, aggregation: Aggregation) -> PartLoss | None:
    mask_BT = part.padded("response_mask")
    tokens = float(mask_BT.sum())
    if not tokens:
        return None
    logprobs_BT = ctx.backend.score(part, temperature=1.0, grad=True, entropy=False).logprobs_BT
    here_BT = mask_BT.to(logprobs_BT.device)
    loss_BT = nll(logprobs_BT)
    total = (loss_BT * aggregation.weights(here_BT, loss_BT)).sum()

    def note() -> None:
        ctx.metrics.mean("actor/loss", float(loss_BT.detach()[here_BT].double().mean()), tokens)

    return PartLoss(total, aggregation.denominator(mask_BT), note)
