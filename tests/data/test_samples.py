"""Samples of several sequences: what counts samples gives the same, however they are cut into rows."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from distflow.algorithms.aggregation import MODES, Aggregation
from distflow.data.batch import Batch, Ragged
from distflow.data.samples import (
    SHARE,
    by_sample,
    has_several,
    last_rows,
    on_all_rows,
    sample_bounds,
    sequence_ends,
    to_rows,
    with_shares,
)

CUTS = st.lists(st.lists(st.integers(0, 4), min_size=1, max_size=4), min_size=1, max_size=5)
"""Of each sample the lengths of its sequences."""


def cut(samples: list[list[int]], seed: int = 0) -> Batch:
    """Samples with sequences of these lengths."""
    drawn = torch.Generator().manual_seed(seed)
    lengths = [length for sample in samples for length in sample]
    responses = Ragged.from_rows([[5] * length for length in lengths], torch.int64)
    tokens = len(responses.values)
    counts = torch.tensor([len(sample) for sample in samples])
    return Batch(
        {
            "sample": torch.arange(len(samples)).repeat_interleave(counts),
            "sequence": torch.cat([torch.arange(len(sample)) for sample in samples]),
            "reward": torch.rand(len(samples), generator=drawn).repeat_interleave(counts),
            "prompt_ids": Ragged.from_rows([[n] for n in range(len(lengths))], torch.int64),
            "response_ids": responses.like(torch.arange(tokens)),
            "response_text": Ragged.from_texts([str(n) for n in range(len(lengths))]),
            "response_mask": responses.like(torch.rand(tokens, generator=drawn) < 0.7),
            "mine": responses.like(torch.rand(tokens, 2, generator=drawn)),
        }
    )


def test_one_row_a_sample_joins_its_sequences() -> None:
    batch = cut([[2], [1, 0, 3]])
    assert sample_bounds(batch) == [0, 1, 4]
    joined = by_sample(batch)
    assert [row.tolist() for row in joined.ragged("response_ids").rows()] == [[0, 1], [2, 3, 4, 5]]
    assert joined.ragged("mine").lengths.tolist() == [2, 4], "a field of one's own with a value per token"
    assert joined.texts("response_text") == ["0", "3"]
    assert joined.dense("sample").tolist() == [0, 1]
    assert joined.dense("reward").tolist() == batch.dense("reward")[[0, 1]].tolist()
    assert not {"prompt_ids", "sequence"} & joined.columns.keys()
    ends = sequence_ends(batch)
    assert ends is not None
    assert [row.tolist() for row in ends.rows()] == [[False, True], [True, False, False, True]]


@pytest.mark.parametrize("column", [True, False])
def test_where_every_sample_is_one_row_nothing_is_copied(column: bool) -> None:
    batch = cut([[2], [3]])
    batch = batch if column else batch.only([name for name in batch.columns if name != "sequence"])
    assert not has_several(batch)
    assert sample_bounds(batch) == [0, 1, 2]
    assert by_sample(batch) is last_rows(batch) is with_shares(batch) is batch
    assert sequence_ends(batch) is None
    written = batch.with_columns(reward=torch.zeros(2))
    assert on_all_rows(batch, last_rows(batch), written) is written


def test_the_datas_prompt_stands_in_the_first_row() -> None:
    batch = cut([[2, 1], [1]]).with_columns(prompt_text=Ragged.from_texts(["1+1=", "", "2="]))
    assert last_rows(batch).texts("prompt_text") == by_sample(batch).texts("prompt_text") == ["1+1=", "2="]
    assert last_rows(batch).texts("response_text") == ["1", "2"]


def test_what_is_written_for_the_last_sequence_holds_for_all() -> None:
    batch = cut([[2, 1], [1], [1, 1, 2]])
    last = last_rows(batch)
    assert last.texts("response_text") == ["1", "2", "5"]
    written = last.with_columns(score=torch.tensor([1.0, 2.0, 3.0]), said=Ragged.from_texts(["a", "", "c"]))
    found = on_all_rows(batch, last, written)
    assert found.dense("score").tolist() == [1.0, 1.0, 2.0, 3.0, 3.0, 3.0]
    assert found.texts("said") == ["a", "a", "", "c", "c", "c"]
    assert found["response_text"] is batch["response_text"]
    assert to_rows(batch, torch.tensor([1, 2, 3])).tolist() == [1, 1, 2, 3, 3, 3]


@given(CUTS)
def test_the_shares_of_a_sample_add_up_to_one(samples: list[list[int]]) -> None:
    batch = with_shares(cut(samples))
    if SHARE not in batch:
        assert all(len(sample) == 1 for sample in samples)
        return
    shares, mask = batch.dense(SHARE), batch.ragged("response_mask")
    trained = torch.tensor([bool(row.any()) for row in mask.rows()])
    assert (shares[~trained] == 0).all()
    bounds = sample_bounds(batch)
    for a, b in itertools.pairwise(bounds):
        assert float(shares[a:b].sum()) == pytest.approx(1.0 if trained[a:b].any() else 0.0)


def _sums(batch: Batch, losses: Tensor, how: Aggregation) -> tuple[float, float]:
    """Each row a micro-batch of its own."""
    total, denominator = 0.0, 0.0
    places = batch.ragged("response_ids").like(losses)
    for row in range(batch.rows):
        mask_BT, loss_BT = batch.ragged("response_mask").row(row)[None], places.row(row)[None]
        share_B = batch.dense(SHARE)[row : row + 1] if SHARE in batch else None
        total += float((loss_BT * how.weights(mask_BT, loss_BT, share_B)).sum())
        denominator += how.denominator(mask_BT, share_B) if how.additive else 0.0
    return total, denominator


@given(CUTS, st.sampled_from(MODES))
def test_a_sample_counts_the_same_however_it_is_cut(samples: list[list[int]], mode: str) -> None:
    """Weight 1 under seq-mean, for losses that do not change: by the sum of all and by the denominator."""
    how = Aggregation.parse(f"{mode}/7" if mode.endswith("norm") else mode)
    batch = cut(samples)
    losses = torch.rand(len(batch.ragged("response_ids").values), dtype=torch.float64)
    assert _sums(with_shares(batch), losses, how) == pytest.approx(_sums(by_sample(batch), losses, how), abs=1e-12)
