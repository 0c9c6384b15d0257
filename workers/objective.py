"""The objective that an update minimises: a policy loss, corrected for the behaviour policy, plus a KL penalty.

Shapes: B rows, T response tokens of the longest row.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from distflow.algorithms import kl as divergences
from distflow.algorithms.aggregation import Aggregation
from distflow.algorithms.corrections import behaviour_ratio, tis
from distflow.algorithms.losses import TokenLoss, ppo
from distflow.errors import UserError
from distflow.runtime.metrics import MetricStore

LossFunction = Callable[..., TokenLoss]
Divergence = Callable[[Tensor, Tensor], Tensor]

LOSSES: dict[str, LossFunction] = {"ppo": ppo}
DIVERGENCES: dict[str, Divergence] = {"k1": divergences.k1, "k2": divergences.k2, "k3": divergences.k3}


@dataclass(frozen=True, slots=True)
class TokenTerms:
    """Per-token inputs of one micro-batch, [B, T] each, on the device; `mask` is True on the tokens trained on."""

    mask: Tensor
    logprobs: Tensor
    entropy: Tensor
    old_logprobs: Tensor
    rollout_logprobs: Tensor
    advantages: Tensor
    ref_logprobs: Tensor | None


@dataclass(frozen=True, slots=True)
class Objective:
    """The settings of an update step, checked, with its functions looked up."""

    loss: LossFunction
    clip: tuple[float, ...]
    aggregation: Aggregation
    divergence: Divergence
    kl_coef: float
    tis: float | None
    loss_name: str = "loss"
    divergence_name: str = "kl"

    def evaluate(self, terms: TokenTerms) -> tuple[Tensor, TokenReport]:
        """The loss sum to accumulate (with gradient), and what to report about it."""
        loss_BT, clipped_BT = self._token_loss(terms)
        ratio_BT = behaviour_ratio(terms.old_logprobs, terms.rollout_logprobs)
        if self.tis is not None:
            loss_BT = loss_BT * tis(ratio_BT, cap=self.tis)
        weights_BT = self.aggregation.weights(terms.mask, loss_BT)
        pg_sum = (loss_BT * weights_BT).sum()
        if terms.ref_logprobs is None:
            return pg_sum, _report(terms, ratio_BT, clipped_BT, (pg_sum,))
        kl_BT = self.divergence(terms.logprobs, terms.ref_logprobs)
        if not _is_per_token(kl_BT, terms):
            raise UserError(
                f"kl function {self.divergence_name!r} returned {_shown(kl_BT)}; expected one value per token, "
                f"{list(terms.logprobs.shape)}"
            )
        kl_sum = (kl_BT * weights_BT).sum()
        return pg_sum + self.kl_coef * kl_sum, _report(terms, ratio_BT, clipped_BT, (pg_sum, kl_sum))

    def _token_loss(self, terms: TokenTerms) -> TokenLoss:
        """The loss function's result; raises UserError unless it is a `TokenLoss` of the right shape."""
        given: object = self.loss(terms.logprobs, terms.old_logprobs, terms.advantages, clip=self.clip)
        if isinstance(given, tuple) and len(given) == 2 and all(_is_per_token(part, terms) for part in given):
            return TokenLoss(*given)
        shown = f"({', '.join(map(_shown, given))})" if isinstance(given, tuple) else _shown(given)
        raise UserError(
            f"loss function {self.loss_name!r} returned {shown}; expected TokenLoss(loss_BT, clipped_BT): the loss of "
            f"each token and where it was clipped, both of shape {list(terms.logprobs.shape)}; "
            "do not sum or average, `aggregate` does"
        )


@dataclass(frozen=True, slots=True)
class TokenReport:
    """Sums over the tokens of a micro-batch, still on the device; read them once the backward pass is queued."""

    loss_sums: Tensor
    token_sums: Tensor
    largest_ratio: Tensor

    def write(self, metrics: MetricStore, objective: Objective, tokens: float, denominator: float) -> None:
        """Add weighted means under the usual metric names."""
        values = torch.cat([self.loss_sums, self.token_sums, self.largest_ratio[None]]).tolist()
        losses, rest = values[: len(self.loss_sums)], values[len(self.loss_sums) :]
        names = ("actor/pg_loss", "actor/kl_loss")[: len(losses)]
        total = losses[0] + (objective.kl_coef * losses[1] if len(losses) > 1 else 0.0)
        for name, value in zip(("actor/loss", *names), (total, *losses), strict=True):
            if objective.aggregation.additive:
                metrics.mean(name, value / denominator, denominator)
            else:
                metrics.add(name, value)
        entropy, clipped, moved, mismatch, ratio, squared, largest = rest
        per_token = {
            "actor/entropy": entropy,
            "actor/pg_clipfrac": clipped,
            "actor/ppo_kl": moved,
            "rollout_corr/kl": mismatch,
            "rollout_corr/k3_kl": ratio - tokens + mismatch,
            "rollout_corr/ratio/mean": ratio,
            # Kish's effective sample size of the weights π_old/π_b, as a share of the tokens.
            "rollout_corr/ess": ratio * ratio / squared,
        }
        for name, value in per_token.items():
            metrics.mean(name, value / tokens, tokens)
        metrics.max("rollout_corr/ratio/max", largest)


def _is_per_token(given: object, terms: TokenTerms) -> bool:
    return isinstance(given, Tensor) and given.shape == terms.logprobs.shape


def _shown(given: object) -> str:
    return f"a tensor of shape {list(given.shape)}" if isinstance(given, Tensor) else f"a {type(given).__name__}"


@torch.no_grad()
def _report(terms: TokenTerms, ratio_BT: Tensor, clipped_BT: Tensor, losses: Sequence[Tensor]) -> TokenReport:
    old = terms.old_logprobs
    rows = (terms.entropy, clipped_BT, old - terms.logprobs, terms.rollout_logprobs - old, ratio_BT, ratio_BT.square())
    kept_BT = terms.mask.to(terms.logprobs.dtype)
    return TokenReport(
        loss_sums=torch.stack([loss.detach() for loss in losses]),
        token_sums=(torch.stack([row.to(kept_BT.dtype) for row in rows]) * kept_BT).sum((1, 2)),
        largest_ratio=(ratio_BT * kept_BT).max(),
    )
