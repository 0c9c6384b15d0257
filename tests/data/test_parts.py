"""Tokens of rows that are computed together, and how they are cut into micro-batches: packed, or padded."""

from __future__ import annotations

import random
from functools import reduce
from itertools import groupby

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from distflow.data.batch import Batch, Ragged, part_lengths
from distflow.data.micro_batches import micro_batches
from distflow.exchange.dealing import Offer, in_rounds
from distflow.parts import (
    MOST_VISIBLE,
    CostRule,
    Lengths,
    PartSize,
    part_of,
    sorted_pieces,
    take,
    tokens_of,
    whole_lengths,
)


def group(prompt: int, responses: list[int]) -> Lengths:
    return list(zip([prompt, *[0] * len(responses)], responses, strict=False))


def batch_of(groups: list[Lengths]) -> Batch:
    """Rows of these lengths; the prompts of two groups differ."""
    rows = [(number, prompt, r) for number, (rows, prompt) in enumerate((g, g[0][0]) for g in groups) for _, r in rows]
    return Batch(
        {
            "group": torch.tensor([number for number, _, _ in rows]),
            "prompt_ids": Ragged.from_rows([[number] * prompt for number, prompt, _ in rows], torch.int64),
            "response_ids": Ragged.from_rows([[7] * response for *_, response in rows], torch.int64),
        }
    )


@pytest.mark.parametrize(
    ("lengths", "packed", "padded"),
    [
        (group(512, [500] * 16), 512 + 16 * 500, 16 * 1012),
        ([*group(100, [10, 20]), *group(50, [5])], 100 + 30 + 55, 3 * 120),
        ([(7, 0), (9, 0)], 16, 18),
        (group(3, [0, 0, 1]), 4, 12),
        ([], 0, 0),
    ],
)
def test_a_shared_prompt_counts_once_and_padding_not_at_all(lengths: Lengths, packed: int, padded: int) -> None:
    assert tokens_of(lengths, packs=True) == packed
    assert tokens_of(lengths, packs=False) == padded


@pytest.mark.parametrize(
    ("lengths", "fits"),
    [
        (group(512, [500] * 16), True),
        (group(4096, [1]), True),
        (group(4097, [1]), False),
        (group(1, [4096]), True),
        (group(1, [4098]), False),
        (group(500, [2000] * 4), False),
    ],
)
def test_where_masks_would_be_too_large_rows_are_padded(lengths: Lengths, fits: bool) -> None:
    part = part_of(lengths)
    assert part.fits_masks == fits
    visible = part.prompts * part.prompt**2 + part.rows * (part.response - 1) * (part.longest - 1)
    assert fits == (visible <= MOST_VISIBLE)
    assert tokens_of(lengths, packs=True) == (part.packed if fits else part.rows * part.longest)


def test_a_group_that_fits_when_packed_is_one_micro_batch_wherever_it_is_cut() -> None:
    """16 · (512 + 500) tokens within 8,704, of which padded rows would fill 8."""
    lengths = group(512, [500] * 16)
    batch = batch_of([lengths])
    assert part_lengths(batch) == lengths
    assert [len(rows) for rows, _ in micro_batches(batch, 8704, packs=True)] == [16]
    assert [len(rows) for rows, _ in micro_batches(batch, 8704)] == [8, 8]
    offers = {position: Offer(position, lengths) for position in range(2)}
    assert in_rounds([[0], [1]], offers, CostRule(8704, packs=True)) == [{0: (0,) * 16}, {1: (0,) * 16}]


def test_groups_stay_together_as_far_as_they_fit() -> None:
    """Of 12 groups of 700 tokens two fit in each part; one of 2,300 has to be cut, and its prompt is paid for twice."""
    small, large = group(100, [200, 200, 200]), group(300, [500] * 4)
    batch = batch_of([*[small] * 6, large, *[small] * 6])
    parts = [part.dense("group").tolist() for _, part in micro_batches(batch, 1450, packs=True)]
    assert [numbers for numbers in parts if 6 in numbers] == [[6, 6], [6, 6]]
    others = [[number for number, _ in groupby(numbers)] for numbers in parts if 6 not in numbers]
    assert sorted(map(len, others)) == [2] * 6
    assert sorted(number for numbers in others for number in numbers) == [n for n in range(13) if n != 6]


@pytest.mark.parametrize("budget", [16384, 32768])
@pytest.mark.parametrize(("prompt", "mean"), [(200, 400), (300, 800), (1000, 1000), (2000, 1500), (2000, 3000)])
def test_long_rows_are_cut_so_that_no_more_is_computed_than_without_packing(
    prompt: int, mean: int, budget: int
) -> None:
    """Sixteen groups of eight, whose lengths differ as those of answers do: masks hold few of them."""
    rng = random.Random(1)
    drawn = [group(prompt, [min(6144, int(rng.lognormvariate(0, 0.6) * mean)) for _ in range(8)]) for _ in range(16)]
    computed = {}
    for packs in (True, False):
        rule = CostRule(budget, packs=packs)
        pieces, taken = sorted_pieces(drawn, rule), []
        while pieces:
            parts = [piece.part for piece in take(pieces, rule)]
            taken.append(reduce(PartSize.joined, parts))
        assert sum(part.rows for part in taken) == 16 * 8
        assert all(part.tokens(packs=packs) <= budget for part in taken)
        computed[packs] = sum(part.tokens(packs=packs) for part in taken)
    assert computed[True] <= 1.03 * computed[False]
    assert computed[True] <= 1.06 * sum(map(sum, map(whole_lengths, drawn)))


groups = st.lists(
    st.tuples(st.integers(1, 40), st.lists(st.integers(0, 40), min_size=1, max_size=5)), min_size=1, max_size=12
)


@given(groups, st.integers(1, 300), st.booleans(), st.booleans())
def test_every_row_is_in_one_part_that_holds_it(
    drawn: list[tuple[int, list[int]]], budget: int, packs: bool, whole: bool
) -> None:
    batch = batch_of([group(*one) for one in drawn])
    parts = list(micro_batches(batch, budget, packs=packs, whole_groups=whole))
    assert sorted(row for rows, _ in parts for row in rows.tolist()) == list(range(len(batch)))
    for _, part in parts:
        numbers = part.dense("group").tolist()
        runs = len(list(groupby(numbers)))
        assert runs == len(set(numbers)) or not (packs or whole), "rows of a group lie side by side"
        alone = len(set(numbers)) == 1 if whole else len(numbers) == 1
        assert alone or tokens_of(part_lengths(part), packs=packs) <= budget


@given(groups, st.integers(1, 300), st.sampled_from([0.0, 0.01, 1.0]))
def test_cost_is_the_same_in_one_part_as_row_by_row_and_less_where_prompts_are_shared(
    drawn: list[tuple[int, list[int]]], budget: int, quadratic: float
) -> None:
    lengths = [row for one in drawn for row in group(*one)]
    packed, padded = CostRule(budget, quadratic, packs=True), CostRule(budget, quadratic)
    assert padded.cost(lengths) == pytest.approx(sum(n + quadratic * n * n for n in whole_lengths(lengths)))
    saved = sum((len(responses) - 1) * (p + quadratic * p * p) for p, responses in drawn)
    assert packed.cost(lengths) == pytest.approx(padded.cost(lengths) - saved)
    assert packed.cost(lengths) == pytest.approx(sum(piece.cost for piece in sorted_pieces([lengths], packed)))


def test_what_a_round_holds_follows_what_the_other_replica_can_do() -> None:
    """A group that is more than that is cut, rather than awaited."""
    rule, lengths = CostRule(1000, packs=True), group(100, [100] * 8)
    pieces = sorted_pieces([lengths], rule)
    assert [piece.rows for piece in take(pieces, rule, most=500)] == [(0, 1, 2, 3)]
    assert [piece.lengths for piece in pieces] == [group(100, [100] * 4)]


def test_rows_without_a_prompt_share_none() -> None:
    rows = Batch(
        {
            "prompt_ids": Ragged.from_rows([[], [], [1]], torch.int64),
            "response_ids": Ragged.from_rows([[2], [3, 4], [5]], torch.int64),
        }
    )
    assert part_lengths(rows) == [(1, 0), (2, 0), (1, 1)]
