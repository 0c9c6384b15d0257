"""The training steps: advantages, and the update that accumulates the gradient of a policy loss."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from distflow.algorithms.advantages import grpo
from distflow.algorithms.aggregation import Aggregation
from distflow.algorithms.losses import read_clip
from distflow.data.batch import Batch, micro_batches
from distflow.errors import UserError
from distflow.flow.step import step
from distflow.runtime.context import StepContext
from distflow.runtime.protocols import TokenScores
from distflow.workers.batch_metrics import describe
from distflow.workers.named_functions import named_function
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
    batch_std call `distflow.workers.trainer:batch_advantage`, since this step is handed a few groups at a time.
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
    """`advantage`, seeing the whole batch of a training step: rewards are divided by the deviation of all of them.

    The batch is that of all training replicas: `function` gets the rewards and groups of every one of them.
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
            f"advantage function {function!r} returned {what}; expected a tensor with one value a sample, "
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

    π_old is field `old_logprobs`, or else the policy as it is now (one update a batch). `loss`: ppo, or a plug-in
    `(logprobs_BT, old_logprobs_BT, advantages_BT, *, clip) -> TokenLoss`; `clip` [lo, hi] or [lo, hi, dual];
    `aggregate`: see `Aggregation`; `tis`: cap of π_old/π_b, null to leave samples uncorrected; `kl_coef` > 0 adds that
    much of the divergence `kl` (k1, k2, k3) to `ref_logprobs`. Adds what the gradient is to be divided by to
    `ctx.denominators`. Raises UserError for settings that make no sense.
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
