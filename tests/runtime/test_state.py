"""Shards of a state: shared out, and put together again."""

import pytest
import torch

from distflow.runtime.checkpoint.format import Shard, put_together, share_of


def test_replicas_share_the_bytes_of_their_common_state() -> None:
    tensors = {f"p{i}": torch.zeros(100 * (1 + i % 7)) for i in range(40)}
    shares = [list(share_of(tensors, rank, 3)) for rank in range(3)]
    assert sorted(shard.name for share in shares for shard in share) == sorted(tensors)
    sizes = [sum(shard.data.nbytes for shard in share) for share in shares]
    assert max(sizes) - min(sizes) <= 100 * 7 * 4


def test_runs_of_elements_make_the_whole_whatever_their_order() -> None:
    values = torch.arange(10.0).reshape(2, 5)
    shards = [Shard("w", (2, 5), start, values.reshape(-1)[start:end]) for start, end in [(6, 10), (0, 6)]]
    assert put_together([*shards, Shard("n", (), 0, torch.tensor(3))])["w"].equal(values)


@pytest.mark.parametrize(
    ("runs", "message"),
    [
        ([(0, 4), (5, 10)], "w: element 4 is missing"),
        ([(0, 6), (5, 10)], "w: element 5 is saved twice"),
        ([(0, 9)], "w: 9 elements are saved, its shape .* has 10"),
    ],
)
def test_gaps_and_overlaps_are_named(runs: list[tuple[int, int]], message: str) -> None:
    values = torch.arange(10.0)
    with pytest.raises(ValueError, match=message):
        put_together(Shard("w", (2, 5), start, values[start:end]) for start, end in runs)
