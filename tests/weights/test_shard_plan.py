"""Parts of tensors from those that have them to those that want them: each element once, and nobody sends most."""

from __future__ import annotations

import math
from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from distflow.weights.shards import plan as shard_plan
from distflow.weights.shards.plan import Box, RankPart, TensorLayout, boxes_of, plan_pieces
from tests.budget import within


def by_rows(size: int, ranks: int, dim: int, shape: tuple[int, ...]) -> list[Box]:
    """A tensor divided evenly over ranks in one dimension; the last may have fewer rows, or none."""
    rows = -(-size // ranks)
    out = []
    for rank in range(ranks):
        begin, end = min(rank * rows, size), min((rank + 1) * rows, size)
        out.append(
            Box(
                (*(0 for _ in shape[:dim]), begin, *(0 for _ in shape[dim + 1 :])),
                (*shape[:dim], end, *shape[dim + 1 :]),
            )
        )
    return out


@st.composite
def divided(draw: st.DrawFn, shape: tuple[int, ...], most: int) -> tuple[RankPart, ...]:
    """A tensor as some ranks have it: divided in one dimension, in flat ranges, or whole at each of them."""
    ranks = draw(st.integers(1, most))
    how = draw(st.sampled_from(["whole", "flat", *range(len(shape))]))
    if how == "whole":
        return tuple(RankPart(rank, Box.whole(shape)) for rank in range(ranks))
    if how == "flat":
        each = -(-math.prod(shape) // ranks)
        starts = [min(rank * each, math.prod(shape)) for rank in range(ranks + 1)]
        return tuple(
            RankPart(rank, box)
            for rank in range(ranks)
            for box in boxes_of(shape, starts[rank], starts[rank + 1] - starts[rank])
        )
    assert isinstance(how, int)
    boxes = by_rows(shape[how], ranks, how, shape)
    return tuple(RankPart(rank, box) for rank, box in enumerate(boxes) if box.elements)


@st.composite
def layouts(draw: st.DrawFn) -> list[TensorLayout]:
    shapes = draw(st.lists(st.lists(st.integers(1, 7), max_size=3).map(tuple), min_size=1, max_size=4))
    return [
        TensorLayout(f"t{n}", shape, 4, draw(divided(shape, 4)), draw(divided(shape, 5)))
        for n, shape in enumerate(shapes)
    ]


@settings(max_examples=200)
@given(layouts())
@within(seconds=2, examples=200)
def test_every_element_comes_once_from_a_rank_that_has_it(given_layouts: list[TensorLayout]) -> None:
    pieces = plan_pieces(given_layouts)
    for layout in given_layouts:
        values = np.arange(math.prod(layout.shape)).reshape(layout.shape)
        for target in layout.targets:
            found, times = np.zeros(target.box.sizes, int), np.zeros(target.box.sizes, int)
            for piece in pieces:
                if (piece.name, piece.target, piece.wanted) != (layout.name, *target):
                    continue
                assert RankPart(piece.source, piece.held) in layout.sources
                held = values[piece.held.within(Box.whole(layout.shape))]
                found[piece.box.within(target.box)] = held[piece.box.within(piece.held)]
                times[piece.box.within(target.box)] += 1
            assert (times == 1).all()
            assert (found == values[target.box.within(Box.whole(layout.shape))]).all()
    assert sum(piece.box.elements for piece in pieces) == sum(
        target.box.elements for layout in given_layouts for target in layout.targets
    )


@settings(max_examples=100)
@given(st.lists(st.integers(1, 5), max_size=4), st.data())
@within(seconds=1, examples=100)
def test_a_flat_range_is_its_boxes(shape: list[int], data: st.DataObject) -> None:
    size = math.prod(shape)
    start = data.draw(st.integers(0, size - 1))
    count = data.draw(st.integers(0, size - start))
    values = np.arange(size).reshape(shape)
    boxes = boxes_of(shape, start, count)
    assert len(boxes) <= max(1, 2 * len(shape) - 1)
    found = [value for box in boxes for value in values[box.within(Box.whole(shape))].reshape(-1)]
    assert found == list(range(start, start + count))


def test_two_trainers_to_three_readers_by_rows() -> None:
    sources = [RankPart(rank, box) for rank, box in enumerate(by_rows(6, 2, 0, (6, 4)))]
    targets = [RankPart(rank, box) for rank, box in enumerate(by_rows(6, 3, 0, (6, 4)))]
    pieces = plan_pieces([TensorLayout("w", (6, 4), 2, tuple(sources), tuple(targets))])
    assert [(piece.source, piece.target, piece.box.begins[0], piece.box.ends[0]) for piece in pieces] == [
        (0, 0, 0, 2),
        (0, 1, 2, 3),
        (1, 1, 3, 4),
        (1, 2, 4, 6),
    ]


@pytest.mark.parametrize("trainers", [2, 3, 5])
def test_those_that_have_the_same_share_what_is_sent(trainers: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shard_plan, "MOST_BYTES", 64)
    shape = (100, 8)
    sources = tuple(RankPart(rank, Box.whole(shape)) for rank in range(trainers))
    targets = tuple(RankPart(rank, Box.whole(shape)) for rank in range(3))
    sent: Counter[int] = Counter()
    for piece in plan_pieces([TensorLayout("w", shape, 4, sources, targets)]):
        sent[piece.source] += 4 * piece.box.elements
    assert max(sent.values()) - min(sent.values()) <= 64
    assert sum(sent.values()) == 3 * 100 * 8 * 4


def test_what_nobody_has_and_what_is_wanted_twice_is_refused() -> None:
    half, whole = Box((0, 0), (2, 4)), Box((0, 0), (4, 4))
    with pytest.raises(ValueError, match="nobody has .* of 'w', which rank 7 wants"):
        plan_pieces([TensorLayout("w", (4, 4), 4, (RankPart(0, half),), (RankPart(7, whole),))])
    with pytest.raises(ValueError, match="rank 7 wants .* of 'w' twice"):
        plan_pieces([TensorLayout("w", (4, 4), 4, (RankPart(0, whole),), (RankPart(7, whole), RankPart(7, half)))])
