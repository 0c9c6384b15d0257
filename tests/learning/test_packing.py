from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from distflow.data.batch import Batch, Ragged
from distflow.data.micro_batches import MICRO_BATCH, micro_batches, split_rows


@given(st.lists(st.integers(1, 50), max_size=40), st.integers(1, 200))
def test_every_row_once_and_within_the_budget(lengths: list[int], tokens: int) -> None:
    parts = split_rows(torch.tensor(lengths, dtype=torch.int64), tokens)
    assert sorted(row for part in parts for row in part.tolist()) == list(range(len(lengths)))
    for part in parts:
        widest = max(lengths[row] for row in part.tolist())
        assert len(part) == 1 or len(part) * widest <= tokens


@given(st.lists(st.integers(1, 50), min_size=1, max_size=40), st.integers(1, 200))
def test_rows_of_similar_length_lie_together(lengths: list[int], tokens: int) -> None:
    parts = split_rows(torch.tensor(lengths), tokens)
    if len(parts) > 1:
        order = [lengths[row] for part in parts for row in part.tolist()]
        assert order == sorted(order, reverse=True)


def _batch() -> Batch:
    return Batch(
        {
            "prompt_ids": Ragged.from_rows([[1, 2], [1], [1, 2, 3]], torch.int64),
            "response_ids": Ragged.from_rows([[4], [5, 6, 7, 8], []], torch.int64),
            "name": torch.tensor([10, 11, 12]),
        }
    )


def test_micro_batches_carry_their_rows() -> None:
    parts = list(micro_batches(_batch(), 6))
    assert [rows.tolist() for rows, _ in parts] == [[1], [0, 2]]
    assert [part.dense("name").tolist() for _, part in parts] == [[11], [10, 12]]
    assert parts[1][1].ragged("prompt_ids").values.tolist() == [1, 2, 1, 2, 3]


@pytest.mark.parametrize("tokens", [0, 15])
def test_a_batch_that_fits_is_left_alone(tokens: int) -> None:
    batch = _batch()
    [(rows, part)] = micro_batches(batch, tokens)
    assert part is batch
    assert rows.tolist() == [0, 1, 2]


def test_a_single_row_batch_larger_than_the_budget() -> None:
    [(_, part)] = micro_batches(_batch().slice(1, 2), 2)
    assert len(part) == 1


def test_a_negative_budget() -> None:
    with pytest.raises(ValueError, match="budget of -1 tokens; expected ≥ 1"):
        split_rows(torch.tensor([1]), -1)


def test_parts_that_the_replicas_have_agreed_on_are_kept() -> None:
    """Whatever the budget, and without the fields that nobody asked for."""
    batch = _batch()
    numbers = torch.tensor([5, 3, 5])
    parts = list(micro_batches(batch.with_columns(**{MICRO_BATCH: numbers}), 6, ["prompt_ids", "response_ids"]))
    assert [rows.tolist() for rows, _ in parts] == [[1], [0, 2]]
    assert all(sorted(part.columns) == ["prompt_ids", "response_ids"] for _, part in parts)
    for rows, part in parts:
        assert part.ragged("response_ids").lengths.tolist() == batch.ragged("response_ids").lengths[rows].tolist()
