"""Cuts a batch into what is computed at once, and into what is trained on at once.

A micro-batch is one forward and backward: rows of similar length together, so that little is computed on padding,
within a budget of padded tokens. Replicas that compute in rounds have agreed on theirs before (field `MICRO_BATCH`), so
that a round takes all of them equally long. A mini-batch is one update of the weights.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import pairwise

import torch
from torch import Tensor

from distflow.data.batch import Batch, group_ranges, row_lengths

MICRO_BATCH = "micro_batch"
"""[B] int64: the number of each row's micro-batch, where the replicas have agreed on it."""


def micro_batches(
    batch: Batch, tokens: int, fields: Sequence[str] | None = None, *, whole_groups: bool = False
) -> Iterator[tuple[Tensor, Batch]]:
    """The parts of a batch that are computed one after another; yields (row numbers, part with just these `fields`).

    Rows for which the replicas have agreed on parts are cut by these. Others so that rows · (longest prompt + response)
    ≤ `tokens`: the longest rows come first, equal ones in their order, and a row longer than that is a part of its own;
    0 means no limit. Every row is in exactly one part. A batch that fits is yielded unchanged. `whole_groups`: the rows
    of a group are in the same part, side by side. Replicas that agree do so where the train step has scope group.
    """
    wanted = batch if fields is None else batch.only(fields)
    agreed = MICRO_BATCH in batch
    split = split_groups if whole_groups else _split_rows_of
    for rows in _agreed_rows(batch) if agreed else split(batch, tokens):
        yield rows, wanted if len(rows) == len(batch) else wanted.select(rows)


def with_agreed(batch: Batch, numbers: Mapping[int, Sequence[int]]) -> Batch:
    """The batch with the micro-batch on which the replicas have agreed for each row; `numbers`: by the group's prompt
    position.
    """
    found = [number for position in group_ranges(batch) for number in numbers[position]]
    return batch.with_columns(**{MICRO_BATCH: torch.tensor(found, dtype=torch.int64)})


def split_rows(lengths: Tensor, tokens: int) -> list[Tensor]:
    """The row numbers of each micro-batch for rows of these lengths [B]; see `micro_batches`."""
    if tokens < 0:
        raise ValueError(f"a micro-batch budget of {tokens} tokens; expected ≥ 1, or 0 for no limit")
    if not len(lengths):
        return []
    if tokens == 0 or len(lengths) * int(lengths.max()) <= tokens:
        return [torch.arange(len(lengths))]
    order = torch.argsort(lengths, descending=True, stable=True)
    ordered = lengths[order].tolist()
    parts: list[Tensor] = []
    start = 0
    while start < len(ordered):
        count = max(1, tokens // max(1, ordered[start]))
        parts.append(order[start : start + count])
        start += count
    return parts


def _split_rows_of(batch: Batch, tokens: int) -> list[Tensor]:
    return split_rows(row_lengths(batch), tokens)


def split_groups(batch: Batch, tokens: int, lengths: Tensor | None = None) -> list[Tensor]:
    """The row numbers of each micro-batch of whole groups, padded to the longest row.

    `lengths` [B]: if not those of prompt and response.
    """
    bounds = batch.group_bounds()
    rows_B = row_lengths(batch) if lengths is None else lengths
    padded = [(end - first) * int(rows_B[first:end].max()) for first, end in pairwise(bounds)]
    parts = split_rows(torch.tensor(padded, dtype=torch.int64), tokens)
    return [torch.cat([torch.arange(bounds[group], bounds[group + 1]) for group in part.tolist()]) for part in parts]


def _agreed_rows(batch: Batch) -> list[Tensor]:
    numbers = batch.dense(MICRO_BATCH)
    return [(numbers == number).nonzero().flatten() for number in sorted(set(numbers.tolist()))]


def minibatch_rows(batch: Batch, rank: Callable[[int], int], parts: int) -> list[list[int]]:
    """The row numbers of each mini-batch: part m has the groups whose rank is m modulo `parts`.

    `rank(position)`: the group's number among those that its ledger gives to the training step, by prompt position.
    """
    ranges = group_ranges(batch)
    rows: list[list[int]] = [[] for _ in range(parts)]
    for position in sorted(ranges):
        rows[rank(position) % parts] += range(ranges[position].start, ranges[position].stop)
    return rows
