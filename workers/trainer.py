"""The training steps: advantages, and the update that accumulates the gradient of a policy loss."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from distflow.algorithms.advantages import grpo, zero_std_fraction
from distflow.algorithms.aggregation import Aggregation
from distflow.algorithms.losses import read_clip
from distflow.data.batch import Batch, micro_batches
from distflow.errors import UserError
from distflow.flow.resolve import named_function
from distflow.flow.step import step
from distflow.runtime.metrics import MetricStore
from distflow.runtime.protocols import TokenScores
from distflow.runtime.steps import StepContext
from distflow.types import FINISH_REASONS, REWARD_PARTS
from distflow.workers.objective import DIVERGENCES, LOSSES, Objective, TokenTerms

AdvantageFunction = Callable[..., Tensor]

ADVANTAGES: dict[str, AdvantageFunction] = {"grpo": grpo}


@step(
    role="train",
    reads=["reward", "group", "response_ids"],
    writes=["advantage"],
    scope="group",
    plugins={"function": ["rewards_B", "group_B", "*", "normalize"]},
    choices={"function": ["grpo"], "normalize": ["group_std", "none"]},
)
def advantage(batch: Batch, ctx: StepContext, *, function: str = "grpo", normalize: str = "group_std") -> Batch:
    """Advantage of each sample within its group, written to all tokens of its response.

    `function`: grpo, or a plug-in `(rewards_B, group_B, *, normalize) -> [B]`. `normalize`: group_std or none; for
    batch_std call `distflow.workers.trainer:batch_advantage`, since this step gets a few groups at a time.
    """
    if normalize == "batch_std":
        raise UserError(
            "normalize=batch_std needs all groups of the training step at once; set the step's call to "
            "distflow.workers.trainer:batch_advantage"
        )
    return _with_advantage(batch, _advantages(batch.dense("reward"), batch.dense("group"), function, normalize))


@step(
    role="train",
    reads=["reward", "group", "response_ids"],
    writes=["advantage"],
    scope="batch",
    plugins={"function": ["rewards_B", "group_B", "*", "normalize"]},
    choices={"function": ["grpo"], "normalize": ["group_std", "batch_std", "none"]},
)
def batch_advantage(batch: Batch, ctx: StepContext, *, function: str = "grpo", normalize: str = "batch_std") -> Batch:
    """`advantage` over the whole batch of a training step: rewards are divided by their standard deviation in it.

    The batch is that of all training replicas: `function` gets the rewards and groups of all of them.
    """
    rewards, groups = ctx.all_gather(batch.dense("reward")), ctx.all_gather(batch.dense("group"))
    first = sum(len(part) for part in rewards[: ctx.replica])
    advantages_B = _advantages(torch.cat(rewards), torch.cat(groups), function, normalize)
    return _with_advantage(batch, advantages_B[first : first + len(batch)])


def _advantages(rewards_B: Tensor, group_B: Tensor, function: str, normalize: str) -> Tensor:
    given: object = named_function("function", function, ADVANTAGES)(rewards_B, group_B, normalize=normalize)
    if not isinstance(given, Tensor) or given.shape != rewards_B.shape:
        what = f"shape {list(given.shape)}" if isinstance(given, Tensor) else f"a {type(given).__name__}"
        raise UserError(
            f"advantage function {function!r} returned {what}; expected a tensor with one value per sample, "
            f"{list(rewards_B.shape)}"
        )
    return given


def _with_advantage(batch: Batch, advantages_B: Tensor) -> Batch:
    responses = batch.ragged("response_ids")
    return batch.with_columns(advantage=responses.like(advantages_B.repeat_interleave(responses.lengths)))


@step(
    role="train",
    reads=["prompt_ids", "response_ids", "response_mask", "rollout_logprobs", "advantage"],
    reads_when={"kl_coef": ["ref_logprobs"]},
    writes=[],
    scope="sample",
    plugins={
        "loss": ["logprobs_BT", "old_logprobs_BT", "advantages_BT", "*", "clip"],
        "kl": ["logprobs_BT", "ref_logprobs_BT"],
    },
    choices={
        "loss": ["ppo"],
        "kl": ["k1", "k2", "k3"],
        "aggregate": [
            "token-mean",
            "token-sum",
            "seq-mean-token-sum",
            "seq-mean-token-mean",
            "seq-mean-token-sum-norm/N",
        ],
        "kl_coef": ">= 0",
        "tis": "> 0",
    },
)
def update(
    batch: Batch,
    ctx: StepContext,
    *,
    loss: str = "ppo",
    clip: Sequence[float] = (0.2, 0.2),
    aggregate: str = "token-mean",
    kl_coef: float = 0.0,
    kl: str = "k3",
    tis: float | None = 2.0,
) -> Batch:
    """Accumulate the gradient of the policy loss over the batch, in micro-batches of `ctx.tokens_per_microbatch`.

    π_old is field `old_logprobs`, or else the current policy (one update per batch). `loss`: ppo, or a plug-in
    `(logprobs_BT, old_logprobs_BT, advantages_BT, *, clip) -> TokenLoss`; `clip` [lo, hi] or [lo, hi, dual];
    `aggregate`: see `Aggregation`; `tis`: cap of π_old/π_b, null for no correction; `kl_coef`: weight of the divergence
    `kl` (k1, k2, k3) to `ref_logprobs`. Adds the divisor of the gradient to `ctx.denominators`. Raises UserError for
    invalid settings.
    """
    read_clip(clip)
    objective = Objective(
        loss=named_function("loss", loss, LOSSES),
        clip=tuple(clip),
        aggregation=Aggregation.parse(aggregate),
        divergence=named_function("kl", kl, DIVERGENCES),
        kl_coef=kl_coef,
        tis=tis,
        loss_name=loss,
        divergence_name=kl,
    )
    describe(batch, ctx.metrics)
    for _, part in micro_batches(batch.only(_needed(batch, objective)), ctx.tokens_per_microbatch):
        _accumulate(part, ctx, objective)
    return batch


def _needed(batch: Batch, objective: Objective) -> list[str]:
    fields = ["prompt_ids", "response_ids", "response_mask", "rollout_logprobs", "advantage"]
    fields += ["old_logprobs"] if "old_logprobs" in batch else []
    return fields + (["ref_logprobs"] if objective.kl_coef else [])


def _accumulate(part: Batch, ctx: StepContext, objective: Objective) -> None:
    mask_BT = part.padded("response_mask")
    tokens = float(mask_BT.sum())
    if not tokens:
        return
    scores = ctx.backend.score(part, temperature=ctx.temperature, grad=True, entropy=True)
    loss_sum, report = objective.evaluate(_terms(part, mask_BT, scores, objective))
    ctx.backend.accumulate(loss_sum)
    denominator = objective.aggregation.denominator(mask_BT)
    assert ctx.model is not None, "ctx.backend has looked the model up"
    if objective.aggregation.additive:
        ctx.denominators[ctx.model] = ctx.denominators.get(ctx.model, 0.0) + denominator
    else:
        ctx.fixed_denominators[ctx.model] = denominator
    report.write(ctx.metrics, objective, tokens, denominator)


def _terms(part: Batch, mask_BT: Tensor, scores: TokenScores, objective: Objective) -> TokenTerms:
    assert scores.entropy_BT is not None, "entropy was asked for"
    like = scores.logprobs_BT

    def field(name: str) -> Tensor:
        return part.padded(name).to(device=like.device, dtype=like.dtype)

    return TokenTerms(
        mask=mask_BT.to(like.device),
        logprobs=like,
        entropy=scores.entropy_BT,
        old_logprobs=field("old_logprobs") if "old_logprobs" in part else like.detach(),
        rollout_logprobs=field("rollout_logprobs"),
        advantages=field("advantage"),
        ref_logprobs=field("ref_logprobs") if objective.kl_coef else None,
    )


_NAMES = {"score": "critic/score", "reward": "critic/rewards"}


def describe(batch: Batch, metrics: MetricStore) -> None:
    """Metrics of the rows given to an update: lengths, scores, rewards and advantages, as far as they are present."""
    if not len(batch):
        return
    _spread(metrics, "response_length", batch.ragged("response_ids").lengths.numpy())
    _spread(metrics, "prompt_length", batch.ragged("prompt_ids").lengths.numpy())
    _spread(metrics, "critic/advantages", batch.ragged("advantage").values.numpy())
    if "finish_reason" in batch:
        cut = batch.dense("finish_reason").numpy() == FINISH_REASONS.index("length")
        metrics.mean("response_length/clip_ratio", float(cut.mean()), len(cut))
    for field, name in _NAMES.items():
        if field in batch:
            _spread(metrics, name, batch.dense(field).numpy())
    for field in batch.columns:
        if field.startswith(REWARD_PARTS):
            _spread(metrics, field, batch.dense(field).numpy())
    if "reward" in batch and "group" in batch:
        fraction, groups = zero_std_fraction(batch.dense("reward"), batch.dense("group"))
        metrics.mean("group/zero_std_frac", fraction, groups)


def _spread(metrics: MetricStore, name: str, values: NDArray[np.float64]) -> None:
    # NaN marks a part of the reward that a failed sample does not have.
    known = values[~np.isnan(values)]
    if known.size:
        metrics.mean(f"{name}/mean", float(known.mean(dtype=np.float64)), known.size)
        metrics.max(f"{name}/max", float(known.max()))
        metrics.min(f"{name}/min", float(known.min()))
