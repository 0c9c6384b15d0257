"""The training steps: advantages, and the update that accumulates the gradient of a policy loss."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import pad

from distflow.algorithms import TokenTerms
from distflow.algorithms.advantages import Moments, token_sums, zero_std_fraction
from distflow.algorithms.aggregation import Aggregation
from distflow.data.batch import Batch, Ragged
from distflow.data.samples import (
    SHARE,
    by_sample,
    compared,
    counts,
    lack_others,
    left_out,
    sample_bounds,
    to_rows,
    with_share,
    with_shares,
)
from distflow.errors import UserError
from distflow.flow.resolve import chosen
from distflow.flow.step import step
from distflow.runtime.metrics import MetricStore
from distflow.runtime.protocols import TokenScores
from distflow.runtime.steps import StepContext
from distflow.types import FINISH_REASONS, REWARD_PARTS, SEQUENCE
from distflow.workers.objective import Correction, Objective
from distflow.workers.within_memory import PartLoss, accumulate, cut_by


@step(
    role="train",
    reads=["response_ids", "response_mask"],
    reads_if_there=["left_out"],
    writes=["advantage"],
    reads_when={"token_rewards": ["token_rewards"]},
    scope="group",
    plugins={
        "function": {
            "rewards_B": "reward",
            "group_B": "group",
            "lengths_B": "response_ids",
            "baselines_B": "baseline",
            "mask_BT": "response_mask",
            "token_rewards_BT": "token_rewards",
        }
    },
    choices={
        "function": [
            "distflow.algorithms.advantages:grpo",
            "distflow.algorithms.advantages:rloo",
            "distflow.algorithms.advantages:opo",
            "distflow.algorithms.advantages:remax",
        ],
        "normalize": ["group_std", "none"],
    },
)
def advantage(
    batch: Batch, ctx: StepContext, *, function: str = "grpo", token_rewards: bool = False, **settings: Any
) -> Batch:
    """Advantage of each sample within its group, written to all tokens of its response, or of each token.

    `function`: grpo (`normalize`: group_std or none), rloo, opo, remax, or a plug-in that takes any of the arguments
    named above and returns [B] or [B, T]; its keyword parameters are settings of this step. It gets the samples that
    count (`distflow.data.samples.counts`): not those without a token trained on, nor those left out, whose advantage is
    0; so is that of a sample whose others are all left out, from a function that takes `group_B`. With `token_rewards`
    the reward of a sample is the sum of its `token_rewards`: with a KL term, or a penalty of overlong responses (see
    `distflow.workers.shaping:token_rewards`). This step gets a few groups at a time: what normalises over the batch of
    a training step needs `distflow.workers.trainer:batch_advantage`.
    """
    if settings.get("normalize") == "batch_std":
        raise UserError(
            "normalize=batch_std needs all groups of the training step at once; set the step's call to "
            "distflow.workers.trainer:batch_advantage"
        )
    call = chosen(advantage, "function", function)
    compared = _Compared.of(batch, call)
    given = _arguments(call, compared.samples, function, token_rewards)
    found = call(**given, **settings) if len(compared.samples) else torch.zeros(0)
    return _with_advantage(batch, function, compared, found)


@step(
    role="train",
    reads=["response_ids", "response_mask"],
    reads_if_there=["left_out"],
    writes=["advantage"],
    reads_when={"token_rewards": ["token_rewards"]},
    scope="batch",
    plugins={
        "function": {
            "rewards_B": "reward",
            "group_B": "group",
            "lengths_B": "response_ids",
            "baselines_B": "baseline",
            "mask_BT": "response_mask",
            "token_rewards_BT": "token_rewards",
            "moments": None,
        }
    },
    choices={
        "function": [
            "distflow.algorithms.advantages:grpo",
            "distflow.algorithms.advantages:rloo",
            "distflow.algorithms.advantages:opo",
            "distflow.algorithms.advantages:remax",
            "distflow.algorithms.advantages:reinforce_plus_plus",
            "distflow.algorithms.advantages:reinforce_plus_plus_baseline",
        ],
        "normalize": ["group_std", "batch_std", "none"],
    },
)
def batch_advantage(
    batch: Batch, ctx: StepContext, *, function: str = "grpo", token_rewards: bool = False, **settings: Any
) -> Batch:
    """`advantage` over the whole batch of a training step, of all training replicas.

    `function`: those of `advantage`, grpo also with `normalize` batch_std; reinforce_plus_plus (`gamma`),
    reinforce_plus_plus_baseline, or a plug-in. One that takes `moments` or an argument [B, T] gets the rows of this
    replica, whole groups, and with `moments` finds mean and variance over all replicas (see
    `distflow.algorithms.advantages.whiten`); one that takes only arguments [B] gets those of all replicas. All get the
    samples that count alone, as in `advantage`.
    """
    call = chosen(batch_advantage, "function", function)
    compared = _Compared.of(batch, call)
    samples = compared.samples
    given = _arguments(call, samples, function, token_rewards)
    if _MOMENTS in inspect.signature(call).parameters:
        return _with_advantage(batch, function, compared, call(**given, moments=partial(_moments, ctx), **settings))
    if any(name.endswith("_BT") for name in given):
        return _with_advantage(batch, function, compared, call(**given, **settings))
    gathered = {name: ctx.all_gather(tensor) for name, tensor in given.items()}
    sizes = [len(part) for part in next(iter(gathered.values()))]
    first = sum(sizes[: ctx.replica])
    whole = call(**{name: torch.cat(parts) for name, parts in gathered.items()}, **settings)
    own = _a_sample(whole, function, sum(sizes))[first : first + len(samples)]
    return _with_advantage(batch, function, compared, own)


@step(
    role="train",
    reads=["reward", "group", "response_ids", "response_mask"],
    reads_if_there=["left_out"],
    writes=["baseline"],
    scope="group",
)
def baseline(batch: Batch, ctx: StepContext) -> Batch:
    """For each sample the reward of that one of its group that is not trained on.

    `distflow.workers.rollout:sample_with_baseline` makes one. In a group of which that one is left out, nothing can be
    compared: each sample's own reward is its baseline, and its advantage 0. Raises UserError for a group with none, or
    several.
    """
    samples = by_sample(batch)
    reward, masks, out = samples.dense("reward"), samples.ragged("response_mask"), left_out(samples)
    untrained = torch.tensor([not bool(row.any()) for row in masks.rows()]) & ~out
    found = torch.empty_like(reward)
    for first, end in pairwise(samples.group_bounds()):
        (rows,) = untrained[first:end].nonzero(as_tuple=True)
        if not len(rows) and bool(out[first:end].any()):
            found[first:end] = reward[first:end]
            continue
        if len(rows) != 1:
            raise UserError(
                f"{len(rows)} of the {end - first} samples of a group are not trained on; expected one, whose reward "
                "is the baseline — let distflow.workers.rollout:sample_with_baseline generate, as flow=remax does"
            )
        found[first:end] = reward[first + int(rows)]
    return batch.with_columns(baseline=to_rows(batch, found))


_MOMENTS = "moments"
"""Argument of functions that whiten over all tokens of the training step."""


@dataclass(frozen=True, slots=True)
class _Compared:
    """The samples that an advantage function gets, and their places among all S of the batch."""

    samples: Batch
    places: Tensor | None
    """Of `samples`; None: all."""
    alone_S: Tensor
    """Of all, those whose advantage is 0 since there is nothing left to compare them with."""

    @classmethod
    def of(cls, batch: Batch, call: Callable[..., Tensor]) -> _Compared:
        samples, counted_S = by_sample(batch), counts(batch)
        compares = "group_B" in inspect.signature(call).parameters and "group" in samples
        alone_S = lack_others(batch) if compares else torch.zeros_like(counted_S)
        if bool(counted_S.all()):
            return cls(samples, None, alone_S)
        places = counted_S.nonzero().flatten()
        return cls(samples.select(places), places, alone_S)

    def put_back(self, given: Tensor, shape: Sequence[int]) -> Tensor:
        """`given`, [B] or [B, T], in a tensor of this shape, [S] or [S, T], with 0 elsewhere."""
        found = given
        if self.places is not None:
            found = given.new_zeros(*shape)
            found[self.places] = given if given.dim() == 1 else pad(given, (0, shape[1] - given.shape[1]))
        return found.masked_fill(self.alone_S.view(-1, *[1] * (found.dim() - 1)), 0.0)


def _arguments(call: Callable[..., Tensor], samples: Batch, function: str, token_rewards: bool) -> dict[str, Tensor]:
    """The arguments that a function takes, of those that the steps above offer, a row for each sample."""
    width = int(samples.ragged("response_ids").lengths.max()) if len(samples) else 0
    offered: dict[str, Callable[[], Tensor]] = {
        "rewards_B": lambda: _summed(samples) if token_rewards else samples.dense("reward"),
        "group_B": lambda: samples.dense("group"),
        "lengths_B": lambda: samples.ragged("response_ids").lengths,
        "baselines_B": lambda: samples.dense("baseline"),
        "mask_BT": lambda: samples.padded("response_mask", length=width),
        "token_rewards_BT": lambda: samples.padded("token_rewards", length=width),
    }
    taken = inspect.signature(call).parameters
    if token_rewards and "rewards_B" not in taken:
        raise UserError(f"token_rewards is for functions that take rewards_B, and {function!r} does not: remove it")
    return {name: column() for name, column in offered.items() if name in taken}


def _summed(samples: Batch) -> Tensor:
    """[B]: the sum of `token_rewards`."""
    return samples.padded("token_rewards").sum(1).to(samples.dense("reward").dtype)


def _moments(ctx: StepContext, x_BT: Tensor, mask_BT: Tensor) -> Moments:
    return Moments.of_sums(*ctx.all_reduce(token_sums(x_BT, mask_BT)).tolist())


def _a_sample(given: object, function: str, rows: int) -> Tensor:
    if isinstance(given, Tensor) and given.shape == (rows,):
        return given
    what = f"shape {list(given.shape)}" if isinstance(given, Tensor) else f"a {type(given).__name__}"
    raise UserError(
        f"advantage function {function!r} returned {what}; expected a tensor with one value per sample, {[rows]}"
    )


def _with_advantage(batch: Batch, function: str, compared: _Compared, given: object) -> Batch:
    """The batch with the advantages that a function returned: one for each sample, or for each token of the samples;
    0 for samples that it did not get."""
    responses = batch.ragged("response_ids")
    seen, whole = compared.samples.ragged("response_ids"), by_sample(batch).ragged("response_ids")
    if isinstance(given, Tensor) and given.dim() == 2:
        expected = seen.mask().shape
        if given.shape != expected:
            raise UserError(
                f"advantage function {function!r} returned shape {list(given.shape)}; expected one value per sample, "
                f"{[len(seen)]}, or per token, {list(expected)}"
            )
        places_ST = whole.mask()
        return batch.with_columns(advantage=responses.like(compared.put_back(given, places_ST.shape)[places_ST]))
    advantages_S = compared.put_back(_a_sample(given, function, len(seen)), [len(whole)])
    return batch.with_columns(advantage=responses.like(advantages_S.repeat_interleave(whole.lengths)))


@step(
    role="train",
    reads=["prompt_ids", "response_ids", "response_mask", "rollout_logprobs"],
    reads_if_there=["advantage"],
    reads_when={
        "kl_coef": ["ref_logprobs"],
        "several_updates": ["old_logprobs"],
        # Metrics compare these in any case; here they are weights.
        "tis": ["rollout_logprobs"],
        "correction": ["rollout_logprobs"],
    },
    writes=[],
    scope="sample",
    head="tokens",
    plugins={
        "loss": {
            "terms": {
                "ref_logprobs": "ref_logprobs",
                "rollout_logprobs": "rollout_logprobs",
                "advantages": "advantage",
                "candidate_logprobs": "candidate_ids",
            }
        },
        "kl": ["logprobs_BT", "ref_logprobs_BT"],
    },
    choices={
        "loss": [
            "distflow.algorithms.losses:ppo",
            "distflow.algorithms.losses:gspo",
            "distflow.algorithms.losses:cispo",
            "distflow.algorithms.losses:aipo",
            "distflow.algorithms.losses:decoupled_ppo",
            "distflow.algorithms.losses:reverse_kl",
        ],
        "kl": ["distflow.algorithms.kl:k1", "distflow.algorithms.kl:k2", "distflow.algorithms.kl:k3"],
        "aggregate": [
            "token-mean",
            "token-sum",
            "seq-mean-token-sum",
            "seq-mean-token-mean",
            "seq-mean-token-sum-norm/N",
        ],
        "kl_coef": ">= 0",
        "entropy_coef": ">= 0",
        "tis": "> 0",
        "cap": "> 0",
    },
    only_with={"kl": "kl_coef"},
)
def update(
    batch: Batch,
    ctx: StepContext,
    *,
    loss: str = "ppo",
    aggregate: str = "token-mean",
    kl_coef: float = 0.0,
    kl: str = "k3",
    tis: float | str | None = "auto",
    correction: Mapping[str, Sequence[float]] | None = None,
    **settings: Any,
) -> Batch:
    """Accumulate the gradient of the policy loss over the batch, in micro-batches of `ctx.tokens_per_microbatch`.

    π_old is field `old_logprobs`, or else the current policy, while there is one update a batch. `loss`: ppo, gspo,
    cispo (with `clip`), aipo (`cap`), decoupled_ppo (both), all with `entropy_coef`, reverse_kl (to a teacher, without
    advantages), or a plug-in `(terms: TokenTerms, *, …) -> TokenLoss`; its keyword parameters are settings of this
    step. `aggregate`: see `Aggregation`; `tis`, `correction`: see `Correction`; `kl_coef`: weight of the divergence
    `kl` (k1, k2, k3) to `ref_logprobs`. Adds the divisor of the gradient to `ctx.denominators`. Raises UserError for
    invalid settings.
    """
    objective = Objective(
        loss=chosen(update, "loss", loss),
        loss_settings=settings,
        aggregation=Aggregation.parse(aggregate),
        divergence=chosen(update, "kl", kl),
        kl_coef=kl_coef,
        correction=Correction(tis, correction or {}),
        loss_name=loss,
        divergence_name=kl,
    )
    if ctx.update_epoch == 0:
        describe(batch, ctx.metrics)
    if ctx.rests:
        return batch
    shared = with_shares(batch)
    accumulate(shared, ctx, lambda part: _loss(part, ctx, objective), cut_by(_needed(shared, ctx, objective)))
    return batch


_READ = ("prompt_ids", "response_ids", "response_mask", "rollout_logprobs")
_IF_THERE = ("advantage", "old_logprobs")
_CANDIDATES = "candidate_ids"


def _needed(batch: Batch, ctx: StepContext, objective: Objective) -> list[str]:
    wanted = [*_READ, *(["ref_logprobs"] if objective.kl_coef else []), *ctx.reads]
    wanted += [name for name in _IF_THERE if name in batch]
    return with_share(list(dict.fromkeys(wanted)), batch)


def _loss(part: Batch, ctx: StepContext, objective: Objective) -> PartLoss | None:
    mask_BT = part.padded("response_mask")
    tokens = float(mask_BT.sum())
    if not tokens:
        return None
    given = part.ragged(_CANDIDATES) if _CANDIDATES in part else None
    candidates = 0 if given is None or not given.values.shape[1] else given
    scores = ctx.backend.score(part, temperature=ctx.temperature, grad=True, entropy=True, candidates=candidates)
    share_B = part.dense(SHARE) if SHARE in part else None
    loss_sum, report = objective.evaluate(_terms(part, mask_BT, scores), share_B)
    denominator, additive = objective.aggregation.denominator(mask_BT, share_B), objective.aggregation.additive

    def note() -> None:
        moved = report.write(ctx.metrics, additive=additive, tokens=tokens, denominator=denominator)
        ctx.report_moved(moved, tokens)

    return PartLoss(loss_sum, denominator, note, additive)


def _terms(part: Batch, mask_BT: Tensor, scores: TokenScores) -> TokenTerms:
    like = scores.logprobs_BT

    def field(name: str) -> Tensor | None:
        return part.padded(name).to(device=like.device, dtype=like.dtype) if name in part else None

    old = field("old_logprobs")
    return TokenTerms(
        mask=mask_BT.to(like.device),
        logprobs=like,
        old_logprobs=like.detach() if old is None else old,
        rollout_logprobs=field("rollout_logprobs"),
        ref_logprobs=field("ref_logprobs"),
        entropy=scores.entropy_BT,
        advantages=field("advantage"),
        further=lambda name: (
            scores.candidate_logprobs_BTK if name == "candidate_logprobs" else at_tokens(part, name, like)
        ),
    )


def at_tokens(part: Batch, name: str, like_BT: Tensor) -> Tensor | None:
    """A field for a loss: its value at each token, [B, T], where it has one, else that of the row at all its tokens."""
    if name not in part:
        return None
    column = part[name]
    if not isinstance(column, Ragged):
        values_B = column.to(device=like_BT.device, dtype=like_BT.dtype)
        return values_B[:, None].expand(-1, like_BT.shape[1], *column.shape[1:])
    tokens = part.ragged("response_mask").lengths
    if not torch.equal(column.lengths, tokens):
        row = int((column.lengths != tokens).nonzero()[0])
        raise UserError(
            f"the loss reads terms[{name!r}], which has {column.lengths[row]} values in a row of {tokens[row]} "
            "response tokens — expected one value a token, or a dense field [B] with one a row"
        )
    return column.padded().to(device=like_BT.device, dtype=like_BT.dtype)


_NAMES = {"score": "critic/score", "reward": "critic/rewards"}


def describe(batch: Batch, metrics: MetricStore) -> None:
    """Metrics of the samples given to an update: lengths of all; scores, rewards and advantages of those that count
    (`distflow.data.samples.counts`), as far as they are present."""
    if not len(batch):
        return
    samples, counted_S = by_sample(batch), counts(batch)
    _spread(metrics, "response_length", samples.ragged("response_ids").lengths.numpy())
    _spread(metrics, "prompt_length", batch.ragged("prompt_ids").lengths.numpy())
    if "advantage" in batch:
        of_tokens = counted_S.repeat_interleave(samples.ragged("response_ids").lengths)
        _spread(metrics, "critic/advantages", batch.ragged("advantage").values[of_tokens].numpy())
    if SEQUENCE in batch:
        _spread(metrics, "sequences", np.diff(np.array(sample_bounds(batch), dtype=np.float64)))
    if "finish_reason" in samples:
        cut = samples.dense("finish_reason").numpy() == FINISH_REASONS.index("length")
        metrics.mean("response_length/clip_ratio", float(cut.mean()), len(cut))
    names = _NAMES | {field: field for field in samples.columns if field.startswith(REWARD_PARTS)}
    for field, name in names.items():
        if field in samples:
            _spread(metrics, name, samples.dense(field)[counted_S].numpy())
    compared_S = compared(batch, baseline="baseline" in batch)
    if "reward" in samples and "group" in samples and bool(compared_S.any()):
        fraction, groups = zero_std_fraction(samples.dense("reward")[compared_S], samples.dense("group")[compared_S])
        metrics.mean("group/zero_std_frac", fraction, groups)


def _spread(metrics: MetricStore, name: str, values: NDArray[np.float64]) -> None:
    # NaN marks a part of the reward that a failed sample does not have.
    known = values[~np.isnan(values)]
    if known.size:
        metrics.mean(f"{name}/mean", float(known.mean(dtype=np.float64)), known.size)
        metrics.max(f"{name}/max", float(known.max()))
        metrics.min(f"{name}/min", float(known.min()))
