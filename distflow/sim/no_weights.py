"""Versions of a model without tensors: workers learn of them and load them by the same code as of a real one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from distflow.types import Version
from distflow.weights.manifest import Manifest

if TYPE_CHECKING:
    from torch import Tensor


class NoWeights:
    """Empty weights that stay readable, even after the term in which they were published."""

    def fetch(self, manifest: Manifest) -> Sequence[tuple[str, Tensor]]:
        """No tensors."""
        return ()

    def intact(self, manifest: Manifest) -> bool:
        """Always: nothing overwrites them."""
        return True

    def doubt(self, manifest: Manifest) -> None:
        """Nothing to do: nothing was found out about them."""

    def begin_term(self, term: int) -> None:
        """Nothing to do: they stay readable."""

    def close(self) -> None:
        """Nothing to release."""


def manifest_of(version: Version) -> Manifest:
    """What is announced of a version."""
    return Manifest("policy", version, "", 0, (), ())
