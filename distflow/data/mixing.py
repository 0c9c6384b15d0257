"""Which prompt belongs to which position: a seeded order of each source, and a mixture of several by weight.

Both are functions of seed and position alone, so that all layouts and every resumed run agree. Imports no torch.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping
from math import gcd, isfinite

import numpy as np
from numpy.typing import NDArray

from distflow.data.randomness import generator, permutation
from distflow.errors import UserError

BLOCK = 5040
"""Most positions over which each source has just its share; so many numbers divide it that most weights need few."""
_KEPT = 2
"""Passes, and blocks, whose order is remembered."""


class Mixture:
    """Prompt position → source, and which prompt of that source it is, counted from 0.

    Positions are cut into blocks in which every source has as many as its weight says, in a seeded order.
    """

    def __init__(self, weights: Mapping[str, float], seed: int) -> None:
        self._seed = seed
        self._counts = _shares(weights)
        self._size = sum(self._counts)
        self._blocks: OrderedDict[int, NDArray[np.int64]] = OrderedDict()

    def at(self, position: int) -> tuple[int, int]:
        """Number of the source, and how many positions before this one belong to it."""
        if len(self._counts) == 1:
            return 0, position
        block, place = divmod(position, self._size)
        order = self._block(block)
        source = int(order[place])
        return source, block * self._counts[source] + int((order[:place] == source).sum())

    def _block(self, block: int) -> NDArray[np.int64]:
        if block not in self._blocks:
            sources = np.repeat(np.arange(len(self._counts)), self._counts)
            self._blocks[block] = generator(self._seed, "mixture", block).permutation(sources)
            _forget(self._blocks)
        return self._blocks[block]


def _shares(weights: Mapping[str, float]) -> list[int]:
    """Whole numbers in the proportion of the weights, at most BLOCK together, by largest remainder."""
    whole = sum(weights.values())
    if not isfinite(whole):
        largest = max(weights, key=lambda name: weights[name])
        raise UserError(f"data.mix.{largest}.weight {weights[largest]}: the sum of all weights is infinite; lower it")
    exact = {name: BLOCK * weight / whole for name, weight in weights.items()}
    counts = {name: int(share) for name, share in exact.items()}
    most_cut = sorted(exact, key=lambda name: counts[name] - exact[name])
    for name in most_cut[: BLOCK - sum(counts.values())]:
        counts[name] += 1
    for name, count in counts.items():
        if count == 0:
            raise UserError(f"data.mix.{name}.weight {weights[name]}: less than 1/{BLOCK} of all prompts; raise it")
    common = gcd(*counts.values())
    return [count // common for count in counts.values()]


class Visits:
    """The order in which the prompts of one source are visited: one pass after another, each seeded anew.

    With `leaves_out`, prompts for which it names a reason are left out. The first pass finds out which those are, as
    far as it is needed; a run that resumes goes over that part of the source again.
    """

    def __init__(
        self, size: int, order: Callable[[int], NDArray[np.int64]], leaves_out: Callable[[int], str] | None
    ) -> None:
        self._size = size
        self._make = order
        self._leaves_out = leaves_out
        self.reasons: Counter[str] = Counter()
        """How many prompts were left out so far, by reason."""
        self._orders: OrderedDict[int, NDArray[np.int64]] = OrderedDict()
        self._seen = 0
        self._kept: list[int] = []
        """Of the first pass, in its order, as far as it was seen."""

    @property
    def left_out(self) -> int:
        """How many prompts were found to be left out so far."""
        return self._seen - len(self._kept)

    @property
    def seen(self) -> int:
        """How many prompts were looked at so far."""
        return self._seen

    @property
    def all_seen(self) -> bool:
        """Whether the whole source has been looked at."""
        return self._seen == self._size

    def end(self, size: int) -> None:
        """The source ends here, earlier than was said, and nothing behind was visited; only without `leaves_out`."""
        assert self._leaves_out is None, "which of them are kept is known of a whole source only"
        self._size = size

    def at(self, ordinal: int) -> tuple[int, int] | None:
        """Pass over the source, and index of the prompt, of a visit counted from 0; None if no prompt is kept."""
        if self._leaves_out is None:
            epoch, place = divmod(ordinal, self._size)
            return epoch, int(self._order(epoch)[place])
        while len(self._kept) <= ordinal and not self.all_seen:
            self._look(self._leaves_out)
        if ordinal < len(self._kept):
            return 0, self._kept[ordinal]
        if not self._kept:
            return None
        epoch, place = divmod(ordinal, len(self._kept))
        return epoch, int(self._order(epoch)[place])

    def count(self) -> int:
        """How many prompts are kept; looks at all that were not looked at."""
        if self._leaves_out is None:
            return self._size
        while not self.all_seen:
            self._look(self._leaves_out)
        return len(self._kept)

    def _look(self, leaves_out: Callable[[int], str]) -> None:
        """Look at the next prompt of the first pass."""
        index = int(self._order(0)[self._seen])
        reason = leaves_out(index)
        self._seen += 1
        if reason:
            self.reasons[reason] += 1
        else:
            self._kept.append(index)

    def _order(self, epoch: int) -> NDArray[np.int64]:
        if epoch not in self._orders:
            order = self._make(epoch)
            self._orders[epoch] = order[np.isin(order, self._kept)] if self.left_out and epoch else order
            _forget(self._orders)
        return self._orders[epoch]


def pass_order(seed: int, name: str, size: int, *, shuffle: bool) -> Callable[[int], NDArray[np.int64]]:
    """The order of each pass over a source of this name, of `size` prompts."""
    if not shuffle:
        return lambda epoch: np.arange(size, dtype=np.int64)
    return lambda epoch: permutation(seed, epoch, size, name)


def _forget(known: OrderedDict[int, NDArray[np.int64]]) -> None:
    while len(known) > _KEPT:
        known.popitem(last=False)
