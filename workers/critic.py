"""The steps of an actor-critic flow: values, advantages from them and `token_rewards`, and the critic's own update.

Shapes: B samples, T response tokens of the longest.
"""

from __future__ import annotations

import torch
from torch import Tensor

from distflow.algorithms import advantages
from distflow.algorithms.aggregation import Aggregation, weighted_sum
from distflow.algorithms.losses import value as value_loss
from distflow.data.batch import Batch
from distflow.data.samples import SHARE, by_sample, sequence_ends, with_share, with_shares
from distflow.errors import UserError
from distflow.flow.step import step
from distflow.runtime.metrics import MetricStore
from distflow.runtime.steps import StepContext
from distflow.workers.within_memory import PartLoss, accumulate, cut_by, in_micro_batches


@step(role="forward", reads=["prompt_ids", "response_ids"], writes=["values"], scope="sample", head="value")
def values(batch: Batch, ctx: StepContext) -> Batch:
    """Write `values`: what the step's model, which has a value head, expects before each response token."""

    def compute(part: Batch) -> Tensor:
        found = ctx.backend.values(part, grad=False)
        return found.values_BT[found.mask_BT].cpu()

    return batch.with_columns(values=in_micro_batches(batch, ctx, compute))


@step(
    role="train",
    reads=["token_rewards", "values", "response_ids", "response_mask"],
    writes=["token_advantage", "return"],
    scope="sample",
    choices={"gamma": ">= 0, <= 1", "lam": ">= 0, <= 1"},
)
def gae(batch: Batch, ctx: StepContext, *, gamma: float = 1.0, lam: float = 1.0) -> Batch:
    """Write `token_advantage` and `return` of each response token; see `distflow.algorithms.advantages.gae`.

    A sequence that is not its sample's last ends with the return of those behind it, and with no value of theirs: with
    `gamma` 1, each ends with the sample's reward.
    """
    responses, samples, ends = batch.ragged("response_ids"), by_sample(batch), sequence_ends(batch)
    given = (samples.padded("token_rewards"), samples.padded("values"), samples.padded("response_mask"))
    ends_BT = None if ends is None else ends.padded()
    advantages_BT, returns_BT = advantages.gae(*given, gamma=gamma, lam=lam, ends_BT=ends_BT)
    places_BT = samples.ragged("response_ids").mask()
    found = {
        "token_advantage": responses.like(advantages_BT[places_BT]),
        "return": responses.like(returns_BT[places_BT]),
    }
    return batch.with_columns(**found)


@step(
    role="train",
    reads=["token_advantage", "token_rewards", "response_ids", "response_mask"],
    writes=["advantage"],
    scope="batch",
)
def whiten(batch: Batch, ctx: StepContext) -> Batch:
    """Write `advantage`: `token_advantage` whitened over all tokens of the training step, on all training replicas.

    The critic's error is not whitened as if rewards told of it: see `distflow.algorithms.advantages.least_by_rewards`.
    """
    responses, samples = batch.ragged("response_ids"), by_sample(batch)
    mask_BT, rewards_BT = samples.padded("response_mask"), samples.padded("token_rewards")
    x_BT = samples.padded("token_advantage")
    totals_BT = (rewards_BT.double() * mask_BT).sum(1, keepdim=True).expand_as(x_BT)
    sums = torch.cat([advantages.token_sums(x_BT, mask_BT), advantages.token_sums(totals_BT, mask_BT)])
    found, told = map(advantages.Moments.of_sums, *ctx.all_reduce(sums).view(2, 3).t().tolist())
    least = advantages.least_by_rewards(found, told)
    found_BT = advantages.whiten(x_BT, mask_BT, moments=found, least=least)
    return batch.with_columns(advantage=responses.like(found_BT[samples.ragged("response_ids").mask()]))


@step(
    role="train",
    reads=["prompt_ids", "response_ids", "response_mask", "values", "return"],
    writes=[],
    scope="sample",
    head="value",
    choices={
        "aggregate": ["token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm/N"],
        "clip": "> 0",
    },
)
def critic_update(batch: Batch, ctx: StepContext, *, clip: float | None = 0.5, aggregate: str = "token-mean") -> Batch:
    """Accumulate the gradient of the clipped value loss over the batch, in micro-batches.

    `clip`: bound of a value's change from `values`, null for none; `aggregate`: see `Aggregation`. Adds the divisor of
    the gradient to `ctx.denominators`. Raises UserError for invalid settings.
    """
    aggregation = Aggregation.parse(aggregate)
    if not aggregation.additive:
        raise UserError(f"aggregate={aggregate!r}: a value loss is divided by a count; expected for example token-mean")
    shared = with_shares(batch)
    needed = with_share(["prompt_ids", "response_ids", "response_mask", "values", "return"], shared)
    accumulate(shared, ctx, lambda part: _loss(part, ctx, clip, aggregation), cut_by(needed), of="critic")
    return batch


def _loss(part: Batch, ctx: StepContext, clip: float | None, aggregation: Aggregation) -> PartLoss | None:
    mask_BT = part.padded("response_mask")
    if not bool(mask_BT.any()):
        return None
    now_BT = ctx.backend.values(part, grad=True).values_BT

    def field(name: str) -> Tensor:
        return part.padded(name).to(device=now_BT.device, dtype=now_BT.dtype)

    here_BT, returns_BT = mask_BT.to(now_BT.device), field("return")
    share_B = part.dense(SHARE) if SHARE in part else None
    loss = value_loss(now_BT, field("values"), returns_BT, clip=clip)
    total = weighted_sum(loss.loss_BT, aggregation.weights(here_BT, loss.loss_BT, share_B))
    denominator = aggregation.denominator(mask_BT, share_B)

    def note() -> None:
        ctx.metrics.mean("critic/vf_loss", float(total.detach()) / denominator, denominator)
        _token_mean(ctx.metrics, "critic/vf_clipfrac", loss.clipped_BT, here_BT)
        _token_mean(ctx.metrics, "critic/values/mean", now_BT.detach(), here_BT)
        _token_mean(ctx.metrics, "critic/returns/mean", returns_BT, here_BT)
        _explained(ctx.metrics, (returns_BT - now_BT.detach())[here_BT], returns_BT[here_BT])

    return PartLoss(total, denominator, note)


def _token_mean(metrics: MetricStore, name: str, values_BT: Tensor, mask_BT: Tensor) -> None:
    tokens = float(mask_BT.sum())
    if tokens:
        metrics.mean(name, float(values_BT[mask_BT].double().mean()), tokens)


def _explained(metrics: MetricStore, errors_N: Tensor, returns_N: Tensor) -> None:
    """1 − Var(R − V) / Var(R) of the training step: 1 for a perfect critic, 0 for one that knows only the mean."""
    columns = (returns_N.double(), errors_N.double())
    total, squares, error, squared = (float(x) for one in columns for x in (one.sum(), one.square().sum()))
    metrics.explained("critic/vf_explained_var", (float(len(returns_N)), total, squares, error, squared))
