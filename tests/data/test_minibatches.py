"""Which rows of a training step's batch each mini-batch has."""

from __future__ import annotations

import random

import torch

from distflow.data.batch import Batch
from distflow.data.micro_batches import minibatch_rows
from distflow.exchange.dealing import ranks

LEDGERS, SAMPLES = 4, 3


def batch(positions: list[int]) -> Batch:
    return Batch({"group": torch.tensor(positions).repeat_interleave(SAMPLES)})


def groups(positions: list[int], parts: int) -> list[set[int]]:
    """The prompt positions of each part; all rows of a group are in one part, side by side."""
    given, rank = batch(positions), ranks(positions, LEDGERS)
    found = []
    for rows in minibatch_rows(given, rank.__getitem__, parts):
        part = given.select(rows)
        assert len(part.group_bounds()) - 1 == len(rows) // SAMPLES
        found.append({int(position) for position in part.dense("group")})
    return found


def test_ranks_count_the_groups_of_a_ledger_in_the_order_of_their_positions() -> None:
    # Ledger 1 has dropped position 5 and got 9 for it.
    assert groups([0, 1, 4, 9, 2, 6, 3, 7], 2) == [{0, 1, 2, 3}, {4, 9, 6, 7}]


def test_every_row_is_in_one_part_whatever_the_order_and_the_owners() -> None:
    positions = list(range(8 * LEDGERS))
    whole = groups(positions, 4)
    assert set.union(*whole) == set(positions)
    assert [len(part) for part in whole] == [8] * 4
    shuffled = positions.copy()
    random.Random(3).shuffle(shuffled)
    assert groups(shuffled, 4) == whole
    for owners in (2, 4):
        shares = [[p for p in positions if p % LEDGERS % owners == owner] for owner in range(owners)]
        parts = [groups(share, 4) for share in shares]
        assert [set.union(*column) for column in zip(*parts, strict=True)] == whole


def test_one_part_is_the_whole_batch() -> None:
    assert minibatch_rows(batch([3, 1, 2]), lambda position: 0, 1) == [[3, 4, 5, 6, 7, 8, 0, 1, 2]]
