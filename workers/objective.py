"""The objective that an update minimises: a policy loss, corrected for the policy that sampled, plus a KL penalty.

Shapes: B rows, T response tokens of the longest row.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from distflow.algorithms import TokenTerms, corrections
from distflow.algorithms.aggregation import Aggregation, weighted_sum
from distflow.algorithms.corrections import behaviour_ratio
from distflow.algorithms.losses import LOG_RATIO_LIMIT, TokenLoss
from distflow.comm.users_code import UsersCode
from distflow.errors import UserError, did_you_mean
from distflow.metrics.learning_signal import KEPT
from distflow.runtime.metrics import MetricStore

LossFunction = Callable[..., TokenLoss]
Divergence = Callable[[Tensor, Tensor], Tensor]
Weights = Callable[..., Tensor]

WITHIN_BOUNDS: dict[str, Weights] = {
    "icepop": corrections.icepop,
    "mis": corrections.mis,
    "sequence_tis": corrections.sequence_tis,
    "sequence_mis": corrections.sequence_mis,
    "geometric_mask": corrections.geometric_mask,
}
MASKS = ("geometric_mask",)
"""Those that leave tokens out and do not weight the others, so that they go with anything."""
TIS_CAP = 2.0
"""Cap of the truncated importance weights, if a recipe chooses no correction."""
ROLLOUT = "rollout_logprobs"


@dataclass(frozen=True, slots=True)
class Correction:
    """How the loss is weighted by π_old/π_b, the policy before the update over the one that sampled.

    `tis`: cap of truncated importance weights; None for none; "auto" is 2, or none where `within` weights tokens itself
    or the loss reads π_b itself. `within`: bounds [lo, hi] by the name of a correction in
    `distflow.algorithms.corrections`. Raises UserError for unknown names, or two that weight each token.
    """

    tis: float | str | None
    within: Mapping[str, Sequence[float]]

    def __post_init__(self) -> None:
        if isinstance(self.tis, str) and self.tis != "auto":
            raise UserError(f"tis={self.tis!r}: expected a cap > 0, auto, or null for none")
        for name, bounds in self.within.items():
            if name not in WITHIN_BOUNDS:
                raise UserError(f"correction={dict(self.within)}: {did_you_mean(name, WITHIN_BOUNDS)}")
            if not isinstance(bounds, Sequence) or len(bounds) != 2:
                raise UserError(f"correction: {name} is {bounds!r}, expected the bounds [lo, hi] of π_old/π_b")
        weighing = [*self._weighing, *(["tis"] if isinstance(self.tis, int | float) else [])]
        if len(weighing) > 1:
            raise UserError(f"{' and '.join(weighing)} both weight each token by π_old/π_b: keep one of them")

    @property
    def _weighing(self) -> list[str]:
        return [name for name in self.within if name not in MASKS]

    def weights(self, terms: TokenTerms, *, in_loss: bool) -> Tensor | None:
        """[B, T] factors of the loss; None for none. `in_loss`: the loss has read π_b itself. Raises UserError."""
        cap = self.tis
        if cap == "auto":
            cap = None if in_loss or self._weighing else TIS_CAP
        if in_loss and (cap is not None or self._weighing):
            raise UserError(
                "the loss itself corrects for the policy that sampled (it reads terms.rollout_logprobs): with "
                f"{' and '.join(['tis'] if cap is not None else self._weighing)} that would be done twice; leave it out"
            )
        given = (terms.old_logprobs, terms.rollout_logprobs, terms.mask)
        factors = [WITHIN_BOUNDS[name](*given, lo=lo, hi=hi) for name, (lo, hi) in self.within.items()]
        if cap is not None:
            factors.append(corrections.tis(*given, cap=float(cap)))
        return torch.stack(factors).prod(0) if factors else None


@dataclass(frozen=True, slots=True)
class Objective:
    """The settings of an update step, checked, with its functions looked up."""

    loss: LossFunction
    loss_settings: Mapping[str, Any]
    aggregation: Aggregation
    divergence: Divergence
    kl_coef: float
    correction: Correction
    loss_name: str = "loss"
    divergence_name: str = "kl"

    def evaluate(self, terms: TokenTerms, share_B: Tensor | None = None) -> tuple[Tensor, TokenReport]:
        """The loss sum to accumulate (with gradient), and what to report about it; `share_B` as in `Aggregation`."""
        loss = self._token_loss(terms)
        weights_BT = self.correction.weights(terms, in_loss=terms.was_read(ROLLOUT))
        loss_BT = loss.loss_BT if weights_BT is None else loss.loss_BT * weights_BT
        factors_BT = self.aggregation.weights(terms.mask, loss_BT, share_B)
        sums = [weighted_sum(loss_BT, factors_BT)]
        total = sums[0] if loss.added_BT is None else sums[0] + weighted_sum(loss.added_BT, factors_BT)
        if self.kl_coef:
            with UsersCode():
                kl_BT = self.divergence(terms.logprobs, terms.ref_logprobs)
            if not _is_per_token(kl_BT, terms):
                raise UserError(
                    f"kl function {self.divergence_name!r} returned {_shown(kl_BT)}; expected one value per token, "
                    f"{list(terms.logprobs.shape)}"
                )
            sums.append(weighted_sum(kl_BT, factors_BT))
            total = total + self.kl_coef * sums[1]
        return total, _report(terms, loss, weights_BT, [total, *sums])

    def _token_loss(self, terms: TokenTerms) -> TokenLoss:
        """The loss function's result; raises UserError unless it is a `TokenLoss` of the right shapes."""
        with UsersCode():
            given: object = self.loss(terms, **self.loss_settings)
        if isinstance(given, tuple) and 2 <= len(given) <= 4:
            result = TokenLoss(*given)
            metrics = result.metrics.values() if isinstance(result.metrics, Mapping) else (result.metrics,)
            added = () if result.added_BT is None else (result.added_BT,)
            if all(_is_per_token(part, terms) for part in (result.loss_BT, result.clipped_BT, *metrics, *added)):
                return result
        # What was left out has a default, which is nobody's mistake.
        shown = f"({', '.join(map(_shown, given[:2]))})" if isinstance(given, tuple) else _shown(given)
        own = given[2] if isinstance(given, tuple) and len(given) > 2 and isinstance(given[2], Mapping) else {}
        wrong = [f"metric {name!r}: {_shown(part)}" for name, part in own.items() if not _is_per_token(part, terms)]
        shown = ", and ".join((shown, *wrong))
        raise UserError(
            f"loss function {self.loss_name!r} returned {shown}; expected TokenLoss(loss_BT, clipped_BT): the loss of "
            f"each token and where it was clipped, both of shape {list(terms.logprobs.shape)}, and so are its metrics; "
            "do not sum or average, `aggregate` does"
        )


@dataclass(frozen=True, slots=True)
class TokenReport:
    """Sums over the tokens of a micro-batch, still on the device; read them once the backward pass is queued."""

    loss_sums: Tensor
    token_sums: Tensor
    largest_ratio: Tensor
    own: tuple[str, ...]
    """Names of the loss function's own metrics, the last of the token sums."""

    def write(self, metrics: MetricStore, *, additive: bool, tokens: float, denominator: float) -> float:
        """Add weighted means under the usual metric names, and the loss function's own under theirs.

        Returns the sum over the tokens of r - 1 - log r, an estimate of how far the policy has moved (k3 of `kl`).
        """
        values = torch.cat([self.loss_sums, self.largest_ratio[None], self.token_sums]).tolist()
        losses, (largest, *rest) = values[: len(self.loss_sums)], values[len(self.loss_sums) :]
        for name, value in zip(("actor/loss", "actor/pg_loss", "actor/kl_loss"), losses, strict=False):
            if additive:
                metrics.mean(name, value / denominator, denominator)
            else:
                metrics.add(name, value)
        entropy, clipped, moved, apart, mismatch, ratio, squared, kept, advised, *own = rest
        if advised:
            metrics.mean(KEPT, kept / advised, advised)
        per_token = {
            "actor/entropy": entropy,
            "actor/pg_clipfrac": clipped,
            "actor/ppo_kl": moved,
            "actor/approx_kl": apart,
            "rollout_corr/kl": mismatch,
            "rollout_corr/k3_kl": ratio - tokens + mismatch,
            "rollout_corr/ratio/mean": ratio,
            # Kish's effective sample size of the weights π_old/π_b, as a share of the tokens.
            "rollout_corr/ess": ratio * ratio / squared if squared else 0.0,
            **dict(zip(self.own, own, strict=True)),
        }
        for name, value in per_token.items():
            metrics.mean(name, value / tokens, tokens)
        metrics.max("rollout_corr/ratio/max", largest)
        return float(apart)


def _is_per_token(given: object, terms: TokenTerms) -> bool:
    return isinstance(given, Tensor) and given.shape == terms.logprobs.shape


def _shown(given: object) -> str:
    return f"a tensor of shape {list(given.shape)}" if isinstance(given, Tensor) else f"a {type(given).__name__}"


@torch.no_grad()
def _report(terms: TokenTerms, loss: TokenLoss, weights_BT: Tensor | None, sums: Sequence[Tensor]) -> TokenReport:
    old, rollout = terms.old_logprobs, terms.rollout_logprobs
    ratio_BT = behaviour_ratio(old, rollout)
    moved_BT = old - terms.logprobs
    apart_BT = (-moved_BT).clamp(max=LOG_RATIO_LIMIT).exp() - 1 + moved_BT
    rows = [
        terms.entropy,
        loss.clipped_BT,
        moved_BT,
        apart_BT,
        rollout - old,
        ratio_BT,
        ratio_BT.square(),
        *_kept(terms, loss, weights_BT),
    ]
    rows += loss.metrics.values()
    off_BT, dtype = ~terms.mask.bool(), terms.logprobs.dtype
    return TokenReport(
        loss_sums=torch.stack([total.detach() for total in sums]),
        token_sums=torch.stack([row.to(dtype) for row in rows]).masked_fill(off_BT, 0.0).sum((1, 2)),
        largest_ratio=ratio_BT.masked_fill(off_BT, 0.0).max(),
        own=tuple(loss.metrics),
    )


def _kept(terms: TokenTerms, loss: TokenLoss, weights_BT: Tensor | None) -> tuple[Tensor, Tensor]:
    """[B, T] each: how much of a token corrections leave, up to 1, and 1 for the tokens with something to leave."""
    if weights_BT is None:
        return torch.zeros_like(terms.logprobs), torch.zeros_like(terms.logprobs)
    advised_BT = loss.loss_BT != 0
    if terms.has("advantages"):
        advised_BT = advised_BT & (terms.advantages != 0)
    return weights_BT.clamp(max=1.0) * advised_BT, advised_BT
