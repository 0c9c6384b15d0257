"""What a policy loss is given: the terms of each token of a micro-batch.

Shapes: B samples, T response tokens.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from distflow.errors import UserError

_SUPPLIED_BY = {
    "old_logprobs": "log-probs of the policy before this training step's updates: the step "
    "distflow.workers.reference:old_logprobs writes them",
    "rollout_logprobs": "log-probs of the engine that sampled: every generate step writes them",
    "ref_logprobs": "log-probs of a frozen reference: the step distflow.workers.reference:ref_logprobs writes them",
    "entropy": "the entropy of the policy at each token: step distflow.workers.trainer:update computes it",
    "advantages": "one advantage a token: a step such as distflow.workers.trainer:advantage writes them",
}


class TokenTerms:
    """Terms of one micro-batch, [B, T] each, on one device; `mask` is True on the tokens trained on.

    `logprobs` has a gradient, `entropy` has one where a loss asks for it, all others are constants. Reading a term that
    is not there raises UserError naming the step to add; `terms.has(name)` asks. `terms[name]` gives a further field
    with one value a token, which must then be among the fields of the batch.
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
        """`further` looks other fields up by name; None where there is no such field."""
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
    def lengths(self) -> Tensor:
        """[B]: how many tokens of each sample are trained on."""
        return self.mask.sum(1)

    def has(self, name: str) -> bool:
        """Whether a term or further field is there."""
        return name in ("mask", "logprobs", "lengths") or self._found(name) is not None

    def was_read(self, name: str) -> bool:
        """Whether somebody has read this term."""
        return name in self._read

    def __getitem__(self, name: str) -> Tensor:
        return self._term(name)

    def _term(self, name: str) -> Tensor:
        found = self._found(name)
        self._read.add(name)
        if found is not None:
            return found
        if name in _SUPPLIED_BY:
            raise UserError(f"the loss reads terms.{name}, which is not there — {_SUPPLIED_BY[name]}")
        raise UserError(f"the loss reads terms[{name!r}], but no step writes {name!r} with a value for each token")

    def _found(self, name: str) -> Tensor | None:
        given = self._given.get(name)
        return self._further(name) if given is None and name not in self._given else given
