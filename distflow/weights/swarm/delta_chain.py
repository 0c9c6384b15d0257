"""The deltas between the newest versions of a publisher: which ones are kept, and lead to a version."""

from __future__ import annotations

from typing import Generic, Protocol, TypeVar

from distflow.flow.sizes import CHAINED, MOST_DELTAS
from distflow.weights.manifest import Delta
from distflow.weights.swarm.serve_core import H

H_contra = TypeVar("H_contra", contravariant=True)


class ServesChunks(Protocol[H_contra]):
    """What readers ask for chunks."""

    def hold(self, held: H_contra) -> None:
        """Serve a version or a delta from now on."""

    def forget(self, held: H_contra) -> None:
        """Serve it no more."""


class DeltaChain(Generic[H]):
    """Deltas are served beside the versions, each of which can be had whole: a reader takes what suits what it has.

    All that are kept are together at most CHAINED times as large as a version, and MOST_DELTAS: a reader that would
    need more takes all of the version.
    """

    def __init__(self, server: ServesChunks[H]) -> None:
        self._server = server
        self._chain: list[tuple[Delta, H]] = []

    def lead_to(self, size: int, made: tuple[Delta, H] | None) -> tuple[Delta, ...]:
        """The deltas that lead to a version of `size` bytes, of which `made` is the last; none without that."""
        chain: list[tuple[Delta, H]] = []
        if made is not None:
            # What leads to a version that was never announced leads nowhere.
            chain = [*(one for one in self._chain if one[0].number <= made[0].base), made]
            sizes = [delta.size for delta, _ in chain]
            fits = next(n for n in range(len(sizes)) if sum(sizes[n:]) <= CHAINED * size)
            chain = chain[max(fits, len(chain) - MOST_DELTAS) :]
            self._server.hold(made[1])
        kept = [held for _, held in chain]
        for _, held in self._chain:
            if held not in kept:
                self._server.forget(held)
        self._chain = chain
        return tuple(delta for delta, _ in chain)
