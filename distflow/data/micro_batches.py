"""Cuts a batch into what is computed at once, and into what is trained on at once.

A micro-batch is one forward and backward, within a budget of tokens as the model computes them: for one that packs,
rows with one prompt lie together as far as they fit; for another, rows of similar length, so that little is computed on
padding (`distflow.parts`). Replicas that compute in rounds have agreed on theirs before (field `MICRO_BATCH`), so
that a round takes all of them equally long. A mini-batch is one update of the weights.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import pairwise

import torch
from torch import Tensor

from distflow.data.batch import Batch, group_ranges, part_lengths
from distflow.parts import CostRule, Lengths, sorted_pieces, take, unshared

MICRO_BATCH = "micro_batch"
"""[B] int64: the number of each row's micro-batch, where the replicas have agreed on it."""


def micro_batches(
    batch: Batch,
    tokens: int,
    fields: Sequence[str] | None = None,
    *,
    whole_groups: bool = False,
    packs: bool = False,
) -> Iterator[tuple[Tensor, Batch]]:
    """The parts of a batch that are computed one after another; yields (row numbers, part with just these `fields`).

    Rows for which the replicas have agreed on parts are cut by these. Others so that a part is at most `tokens`, as a
    model computes it that packs or does not (`distflow.parts.tokens_of`): the largest come first, equal ones in
    their order, and a row that is more is a part of its own; 0 means no limit. Every row is in exactly one part. A
    batch that fits is yielded unchanged. `whole_groups`: the rows of a group are in the same part, side by side.
    Replicas that agree do so where the train step has scope group.
    """
    wanted = batch if fields is None else batch.only(fields)
    rule = CostRule(tokens, whole_groups=whole_groups, packs=packs)
    for rows in (
        _agreed_rows(batch) if MICRO_BATCH in batch else _split(part_lengths(batch), _bounds(batch, rule), rule)
    ):
        yield rows, wanted if len(rows) == len(batch) else wanted.select(rows)


def with_agreed(batch: Batch, numbers: Mapping[int, Sequence[int]]) -> Batch:
    """The batch with the micro-batch on which the replicas have agreed for each row; `numbers`: by the group's prompt
    position.
    """
    found = [number for position in group_ranges(batch) for number in numbers[position]]
    return batch.with_columns(**{MICRO_BATCH: torch.tensor(found, dtype=torch.int64)})


def split_rows(lengths: Tensor, tokens: int) -> list[Tensor]:
    """The row numbers of each micro-batch for rows of these lengths [B] that are padded; see `micro_batches`."""
    return _split(unshared(lengths.tolist()), [0, len(lengths)], CostRule(tokens))


def split_groups(batch: Batch, tokens: int, lengths: Tensor) -> list[Tensor]:
    """The row numbers of each micro-batch of whole groups, whose rows have these lengths [B] and are padded."""
    return _split(unshared(lengths.tolist()), batch.group_bounds(), CostRule(tokens, whole_groups=True))


def _bounds(batch: Batch, rule: CostRule) -> list[int]:
    """Find where rows begin that may have to stay together."""
    return batch.group_bounds() if rule.whole_groups else [0, len(batch)]


def _split(lengths: Lengths, bounds: Sequence[int], rule: CostRule) -> list[Tensor]:
    if rule.budget < 0:
        raise ValueError(f"a micro-batch budget of {rule.budget} tokens; expected ≥ 1, or 0 for no limit")
    if not lengths:
        return []
    if rule.budget == 0 or rule.tokens(lengths) <= rule.budget:
        return [torch.arange(len(lengths))]
    groups = [lengths[first:end] for first, end in pairwise(bounds)]
    pieces, parts = sorted_pieces(groups, rule), []
    while pieces:
        parts.append(torch.tensor([row for piece in take(pieces, rule) for row in piece.rows]))
    return parts


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
