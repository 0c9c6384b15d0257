"""Losses, one value per token, of `TokenTerms`; `aggregation` sums them, and the division comes once, at `apply`.

Shapes: B samples, T response tokens, K candidates for each of them. Masks and weights are applied by the caller.
`entropy_coef` of the policy losses subtracts so many times the entropy of each token's distribution.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple

import torch
from torch import Tensor

from distflow.errors import UserError, did_you_mean

LOG_RATIO_LIMIT = 20.0
"""|log π − log π_old| is clamped to this: beyond it exp() overflows, and 0 · inf would make the gradient NaN."""


_SUPPLIED_BY = {
    "old_logprobs": "log-probs of the policy before this training step's updates: the step "
    "distflow.workers.reference:old_logprobs writes them",
    "rollout_logprobs": "log-probs of the engine that sampled: every generate step writes them",
    "ref_logprobs": "log-probs of a frozen reference: the step distflow.workers.reference:ref_logprobs writes them",
    "entropy": "the entropy of the policy at each token: step distflow.workers.trainer:update computes it",
    "advantages": "one advantage a token: a step such as distflow.workers.trainer:advantage writes them",
    "candidate_logprobs": "the policy's log-probs of the tokens in field candidate_ids: a step such as "
    "distflow.workers.distillation:teacher writes that",
}
_TERMS = ("mask", "logprobs", "lengths", *_SUPPLIED_BY)


class TokenTerms:
    """Terms of one micro-batch, [B, T] each, on one device; `mask` is True on the tokens trained on.

    `logprobs` and `candidate_logprobs`, [B, T, K], have a gradient, `entropy` has one where a loss asks for it, all
    others are constants. Reading a term that is not there raises UserError naming the step to add; `terms.has(name)`
    asks. `terms[name]` gives a further field of the batch with one value a token, or several; one with a value a row is
    given as that value at each token of the row.
    """

    __slots__ = ("_further", "_given", "_read", "logprobs", "mask")

    def __init__(
        self,
        mask: Tensor,
        logprobs: Tensor,
        old_logprobs: Tensor | None = None,
        rollout_logprobs: Tensor | None = None,
        ref_logprobs: Tensor | None = None,
        entropy: Tensor | None = None,
        advantages: Tensor | None = None,
        *,
        further: Callable[[str], Tensor | None] = lambda name: None,
    ) -> None:
        """`further` looks `candidate_logprobs` and other fields up by name; None where there is no such field."""
        self.mask = mask
        self.logprobs = logprobs
        self._given = {
            "old_logprobs": old_logprobs,
            "rollout_logprobs": rollout_logprobs,
            "ref_logprobs": ref_logprobs,
            "entropy": entropy,
            "advantages": advantages,
        }
        self._further = further
        self._read: set[str] = set()

    @property
    def old_logprobs(self) -> Tensor:
        """[B, T]: log π_old, of the policy before this training step's updates."""
        return self._term("old_logprobs")

    @property
    def rollout_logprobs(self) -> Tensor:
        """[B, T]: log π_b, as the engine reported them when it sampled."""
        return self._term("rollout_logprobs")

    @property
    def ref_logprobs(self) -> Tensor:
        """[B, T]: log π_ref, of the frozen reference."""
        return self._term("ref_logprobs")

    @property
    def entropy(self) -> Tensor:
        """[B, T]: entropy of the policy in nats."""
        return self._term("entropy")

    @property
    def advantages(self) -> Tensor:
        """[B, T]: advantage of each token."""
        return self._term("advantages")

    @property
    def candidate_logprobs(self) -> Tensor:
        """[B, T, K]: log π of the tokens in field `candidate_ids`, which could have stood at each place."""
        return self._term("candidate_logprobs")

    @property
    def lengths(self) -> Tensor:
        """[B]: how many tokens of each row are trained on: of a sample, or of one of its sequences."""
        return self.mask.sum(1)

    def has(self, name: str) -> bool:
        """Whether a term or further field is there."""
        return name in ("mask", "logprobs", "lengths") or self._found(name) is not None

    def was_read(self, name: str) -> bool:
        """Whether somebody has read this term."""
        return name in self._read

    def __getitem__(self, name: str) -> Tensor:
        return self._term(name)

    def __getattr__(self, name: str) -> Tensor:
        raise AttributeError(f"terms has no {name!r} — {did_you_mean(name, _TERMS)}, and terms['name'] for a field")

    def _term(self, name: str) -> Tensor:
        found = self._found(name)
        self._read.add(name)
        if found is not None:
            return found
        if name in _SUPPLIED_BY:
            raise UserError(f"the loss reads terms.{name}, which is not there — {_SUPPLIED_BY[name]}")
        raise UserError(f"the loss reads terms[{name!r}], but no step writes {name!r} with a value a token, or a row")

    def _found(self, name: str) -> Tensor | None:
        given = self._given.get(name)
        return self._further(name) if given is None and name not in self._given else given


class TokenLoss(NamedTuple):
    """Per-token loss [B, T], where clipping changed it [B, T] bool, and metrics by name.

    A metric is a tensor [B, T], of which the mean over the tokens trained on is reported. `added_BT`: a further loss of
    each token, which corrections for the policy that sampled leave alone, such as an entropy bonus.
    """

    loss_BT: Tensor
    clipped_BT: Tensor
    metrics: Mapping[str, Tensor] = MappingProxyType({})
    added_BT: Tensor | None = None


def ppo(terms: TokenTerms, *, clip: Sequence[float] = (0.2, 0.2), entropy_coef: float = 0.0) -> TokenLoss:
    """Clipped surrogate max(−A r, −A clip(r, 1 − lo, 1 + hi)) with r = π / π_old, arXiv 1707.06347.

    `clip` is (lo, hi), or (lo, hi, c): with c the dual clip of arXiv 1912.09729, min(that, −A c) where A < 0.
    Raises UserError for other lengths or values.
    """
    loss = _clipped_surrogate(_ratio(terms.logprobs, terms.old_logprobs), terms.advantages, clip)
    return _with_entropy(loss, terms, entropy_coef)


def gspo(terms: TokenTerms, *, clip: Sequence[float] = (3e-4, 4e-4), entropy_coef: float = 0.0) -> TokenLoss:
    """`ppo` with one ratio for each sequence, s = exp(mean over its tokens of log r), arXiv 2507.18071.

    Its form for tokens: sg[s] · π / sg[π], with the value of s and, at each token, the gradient of its own log-prob.
    The mean is over the tokens trained on. `clip` as in `ppo`, of the order of 3e-4.
    """
    log_ratio_BT = (terms.logprobs - terms.old_logprobs).detach().where(terms.mask.bool(), 0.0)
    mean_B = log_ratio_BT.sum(1) / terms.lengths.clamp(min=1)
    log_BT = mean_B[:, None] + terms.logprobs - terms.logprobs.detach()
    ratio_BT = log_BT.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp()
    return _with_entropy(_clipped_surrogate(ratio_BT, terms.advantages, clip), terms, entropy_coef)


def cispo(terms: TokenTerms, *, clip: Sequence[float] = (1.0, 0.28), entropy_coef: float = 0.0) -> TokenLoss:
    """Policy gradient with a clipped weight, −sg(clip(r, 1 − lo, 1 + hi)) A log π, arXiv 2506.13585.

    No token loses its gradient. lo = 1 bounds the weight from above only, as the paper does. Raises UserError for other
    lengths or values of `clip`.
    """
    bounds = [float(bound) for bound in clip]
    if len(bounds) != 2 or not 0 <= bounds[0] <= 1 or not bounds[1] >= 0:
        raise UserError(f"clip={list(clip)}: cispo expects [lo, hi] with 0 <= lo <= 1 and hi >= 0")
    ratio_BT = _constant_ratio(terms.logprobs, terms.old_logprobs)
    weight_BT = ratio_BT.clamp(1.0 - bounds[0], 1.0 + bounds[1])
    loss = TokenLoss(-weight_BT * terms.advantages * terms.logprobs, weight_BT != ratio_BT)
    return _with_entropy(loss, terms, entropy_coef)


def aipo(terms: TokenTerms, *, cap: float = 2.0, entropy_coef: float = 0.0) -> TokenLoss:
    """Policy gradient for asynchronous training, −sg(min(π / π_b, cap)) A log π, arXiv 2505.24034.

    π_b is the policy that sampled; the weight is bounded from above only, usual caps are 2 to 10. It takes the place of
    a correction such as tis. Raises UserError unless cap > 0.
    """
    _check_cap(cap)
    ratio_BT = _constant_ratio(terms.logprobs, terms.rollout_logprobs)
    loss = TokenLoss(-ratio_BT.clamp(max=cap) * terms.advantages * terms.logprobs, ratio_BT > cap)
    return _with_entropy(loss, terms, entropy_coef)


def decoupled_ppo(
    terms: TokenTerms, *, clip: Sequence[float] = (0.2, 0.2), cap: float = 5.0, entropy_coef: float = 0.0
) -> TokenLoss:
    """`ppo` around the proximal policy, weighted by sg(min(π_old / π_b, cap)), arXiv 2505.24298.

    The weight corrects for the policy that sampled, π_b; it takes the place of a correction such as tis. Raises
    UserError for values of `clip` as `ppo` does, and unless cap > 0.
    """
    _check_cap(cap)
    loss = _clipped_surrogate(_ratio(terms.logprobs, terms.old_logprobs), terms.advantages, clip)
    weight_BT = _ratio(terms.old_logprobs, terms.rollout_logprobs).detach().clamp(max=cap)
    return _with_entropy(TokenLoss(weight_BT * loss.loss_BT, loss.clipped_BT), terms, entropy_coef)


def reverse_kl(terms: TokenTerms) -> TokenLoss:
    """KL(π ‖ π_T) to a teacher at each place of the student's own samples, arXiv 2306.13649 and 2306.08543.

    With candidates, the K likeliest tokens of the teacher at each place: the divergence of the two distributions over
    these tokens and one further outcome, any other token. By the log-sum inequality it is at most the whole divergence,
    and equal if beyond the candidates both agree or K is the whole vocabulary. Its gradient is exact: no sampling.

    Without, K = 0: r · sg(log π − log π_T) of the sampled token with r = π / π_old. Value and gradient are unbiased
    estimates of those of the whole divergence, for tokens that π_old sampled; that is a policy gradient whose advantage
    is log π_T − log π. Either way what a token changes about later places is left out.

    Corrections for the policy that sampled weight the second only: the first does not depend on the sampled token.
    """
    gap_BT = terms.logprobs - terms["teacher_logprobs"]
    nowhere_BT = torch.zeros_like(terms.mask)
    theirs_BTK = terms["teacher_candidate_logprobs"]
    if not theirs_BTK.shape[-1]:
        loss_BT = _ratio(terms.logprobs, terms.old_logprobs) * gap_BT.detach()
        return TokenLoss(loss_BT, nowhere_BT, {"distill/reverse_kl": gap_BT.detach()})
    ours_BTK = terms.candidate_logprobs
    tail_BT, their_tail_BT = _log_rest(ours_BTK), _log_rest(theirs_BTK)
    kl_BT = (ours_BTK.exp() * (ours_BTK - theirs_BTK)).sum(-1) + tail_BT.exp() * (tail_BT - their_tail_BT)
    metrics = {"distill/reverse_kl": kl_BT.detach(), "distill/outside_candidates": tail_BT.detach().exp()}
    return TokenLoss(torch.zeros_like(kl_BT), nowhere_BT, metrics, added_BT=kl_BT)


def _log_rest(logprobs_BTK: Tensor) -> Tensor:
    """[B, T]: the log of the probability that these leave to all other tokens, at least the rounding error of 1."""
    rest_BT = 1.0 - logprobs_BTK.exp().sum(-1)
    return rest_BT.clamp(min=torch.finfo(logprobs_BTK.dtype).eps).log()


def value(values_BT: Tensor, old_values_BT: Tensor, returns_BT: Tensor, *, clip: float | None = 0.5) -> TokenLoss:
    """Clipped squared error of a critic, max((V − R)², (clip(V, V_old ± clip) − R)²) / 2, arXiv 1707.06347's code.

    `old_values_BT`: the critic's values before this training step's updates; `clip`: None for the plain squared error.
    Raises UserError unless clip > 0.
    """
    plain_BT = (values_BT - returns_BT).square()
    if clip is None:
        return TokenLoss(plain_BT / 2, torch.zeros_like(plain_BT, dtype=torch.bool))
    if not clip > 0:
        raise UserError(f"clip={clip}: the bound of a value's change must be > 0; null turns clipping off")
    bounded_BT = (torch.clamp(values_BT, old_values_BT - clip, old_values_BT + clip) - returns_BT).square()
    return TokenLoss(torch.maximum(plain_BT, bounded_BT) / 2, bounded_BT > plain_BT)


def read_clip(clip: Sequence[float]) -> tuple[float, float, float | None]:
    """(lo, hi, dual clip or None); raises UserError stating what is expected."""
    values = [float(bound) for bound in clip]
    if len(values) not in (2, 3) or not 0 <= values[0] < 1 or not values[1] >= 0:
        raise UserError(f"clip={list(clip)}: expected [lo, hi] or [lo, hi, dual] with 0 <= lo < 1 and hi >= 0")
    if len(values) == 3 and not values[2] > 1:
        raise UserError(f"clip={list(clip)}: the dual clip (third value) must be > 1, usually 3")
    return values[0], values[1], values[2] if len(values) == 3 else None


def _ratio(logprobs_BT: Tensor, base_BT: Tensor) -> Tensor:
    return (logprobs_BT - base_BT).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp()


def _constant_ratio(logprobs_BT: Tensor, base_BT: Tensor) -> Tensor:
    """The ratio without a gradient; 1 also where both policies exclude a token, of which -inf - -inf would be NaN."""
    now_BT = logprobs_BT.detach()
    return torch.where(now_BT == base_BT, 1.0, _ratio(now_BT, base_BT))


def _clipped_surrogate(ratio_BT: Tensor, advantages_BT: Tensor, clip: Sequence[float]) -> TokenLoss:
    low, high, dual = read_clip(clip)
    plain_BT = -advantages_BT * ratio_BT
    bounded_BT = -advantages_BT * ratio_BT.clamp(1.0 - low, 1.0 + high)
    loss_BT = torch.maximum(plain_BT, bounded_BT)
    clipped_BT = bounded_BT > plain_BT
    if dual is not None:
        ceiling_BT = -advantages_BT * dual
        cut_BT = (advantages_BT < 0) & (ceiling_BT < loss_BT)
        loss_BT = torch.where(cut_BT, ceiling_BT, loss_BT)
        clipped_BT = clipped_BT | cut_BT
    return TokenLoss(loss_BT, clipped_BT)


def _with_entropy(loss: TokenLoss, terms: TokenTerms, coef: float) -> TokenLoss:
    if not coef >= 0:
        raise UserError(f"entropy_coef={coef}: the weight of the entropy bonus must be >= 0")
    return loss._replace(added_BT=-coef * terms.entropy) if coef else loss


def _check_cap(cap: float) -> None:
    if not cap > 0:
        raise UserError(f"cap={cap}: the bound of the importance weight must be > 0")
