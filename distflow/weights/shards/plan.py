"""Who sends which part of a tensor to whom, between ranks that hold models in different parts. No socket, no clock.

Each rank that trains holds some boxes of each tensor, each rank that generates wants some. Every element that is wanted
is sent once to each that wants it, straight from one that has it; of several that have it, the one with least to send.
All ranks make the same plan of the same layouts, so they need not tell each other which message is which.

Example, a tensor of 6 rows, two trainers with 3 rows each, three readers with 2 each: 0 -> 0 rows 0-1, 0 -> 1 row 2,
1 -> 1 row 3, 1 -> 2 rows 4-5.
"""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

MOST_BYTES = 4 << 20
"""Of one piece: a message is under way for a short time, and ranks that have the same share what is larger."""


class Box(NamedTuple):
    """Elements of a tensor: those from `begins` to `ends`, without the latter, in each dimension."""

    begins: tuple[int, ...]
    ends: tuple[int, ...]

    @classmethod
    def whole(cls, shape: Sequence[int]) -> Box:
        """All elements."""
        return cls((0,) * len(shape), tuple(shape))

    @property
    def sizes(self) -> tuple[int, ...]:
        """Its shape."""
        return tuple(end - begin for begin, end in zip(self.begins, self.ends, strict=True))

    @property
    def elements(self) -> int:
        """Number of elements."""
        return math.prod(self.sizes)

    def meets(self, other: Box) -> Box | None:
        """The elements of both."""
        begins = tuple(map(max, self.begins, other.begins))
        ends = tuple(map(min, self.ends, other.ends))
        return Box(begins, ends) if all(map(int.__lt__, begins, ends)) else None

    def within(self, outer: Box) -> tuple[slice, ...]:
        """Where it lies in a tensor that holds just `outer`."""
        ranges = zip(self.begins, self.ends, outer.begins, strict=True)
        return tuple(slice(begin - start, end - start) for begin, end, start in ranges)


class RankPart(NamedTuple):
    """What one rank has, or wants, of a tensor."""

    rank: int
    box: Box


@dataclass(frozen=True, slots=True)
class TensorLayout:
    """Where one tensor is, and where it is to be. The parts of one target must not overlap."""

    name: str
    shape: tuple[int, ...]
    itemsize: int
    sources: tuple[RankPart, ...]
    targets: tuple[RankPart, ...]


class ShardPiece(NamedTuple):
    """One thing to send: `held` and `wanted` are the parts, of the two ranks, in which it lies."""

    name: str
    box: Box
    source: int
    held: Box
    target: int
    wanted: Box


def plan_pieces(layouts: Sequence[TensorLayout]) -> list[ShardPiece]:
    """All pieces, in the order in which each pair of ranks sends and receives its own.

    Raises ValueError for elements that are wanted and nobody has, or that a rank wants twice.
    """
    loads: dict[int, int] = defaultdict(int)
    out = []
    for layout in layouts:
        _check_targets(layout)
        for target in layout.targets:
            for cell, owners in _cells(layout, target):
                for box in _cut(cell, max(1, MOST_BYTES // layout.itemsize)):
                    owner = min(owners, key=lambda part: (loads[part.rank], part.rank))
                    loads[owner.rank] += box.elements * layout.itemsize
                    out.append(ShardPiece(layout.name, box, owner.rank, owner.box, target.rank, target.box))
    return out


def boxes_of(shape: Sequence[int], start: int, count: int) -> list[Box]:
    """The boxes of `count` elements from `start` on, in the order in which they lie in memory."""
    if not count:
        return []
    if len(shape) <= 1:
        return [Box((start,), (start + count,)) if shape else Box((), ())]
    row = math.prod(shape[1:])
    first, last = -(-start // row), (start + count) // row
    if first > last:
        # Within one row.
        return _inside(last, boxes_of(shape[1:], start - last * row, count))
    out = _inside(first - 1, boxes_of(shape[1:], start - (first - 1) * row, first * row - start))
    if first < last:
        out.append(Box((first, *(0 for _ in shape[1:])), (last, *shape[1:])))
    return out + _inside(last, boxes_of(shape[1:], 0, start + count - last * row))


def _inside(row: int, boxes: Sequence[Box]) -> list[Box]:
    return [Box((row, *box.begins), (row + 1, *box.ends)) for box in boxes]


def _check_targets(layout: TensorLayout) -> None:
    for one, other in itertools.combinations(layout.targets, 2):
        if one.rank == other.rank and one.box.meets(other.box) is not None:
            raise ValueError(f"rank {one.rank} wants {one.box.meets(other.box)} of {layout.name!r} twice")


def _cells(layout: TensorLayout, target: RankPart) -> Iterator[tuple[Box, list[RankPart]]]:
    """The target in boxes, each of which a source has as a whole or not at all, with those that have it."""
    near = [part for part in layout.sources if part.box.meets(target.box) is not None]
    cuts = []
    for dim, (begin, end) in enumerate(zip(*target.box, strict=True)):
        bounds = {bound for part in near for bound in (part.box.begins[dim], part.box.ends[dim])}
        cuts.append(sorted({begin, end, *(bound for bound in bounds if begin < bound < end)}))
    for ranges in itertools.product(*(itertools.pairwise(cut) for cut in cuts)):
        cell = Box(tuple(begin for begin, _ in ranges), tuple(end for _, end in ranges))
        owners = [part for part in near if part.box.meets(cell) == cell]
        if not owners:
            raise ValueError(f"nobody has {cell} of {layout.name!r}, which rank {target.rank} wants")
        yield cell, owners


def _cut(box: Box, most: int) -> Iterator[Box]:
    """In boxes of at most so many elements, or of one row of the first dimension that has several."""
    if box.elements <= most:
        yield box
        return
    dim = next(n for n, size in enumerate(box.sizes) if size > 1)
    rows = max(1, most * box.sizes[dim] // box.elements)
    for begin in range(box.begins[dim], box.ends[dim], rows):
        end = min(begin + rows, box.ends[dim])
        yield Box((*box.begins[:dim], begin, *box.begins[dim + 1 :]), (*box.ends[:dim], end, *box.ends[dim + 1 :]))
