"""Micro-batches by token budget: rows of similar length together, so that little is computed on padding."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from distflow.data.batch import Batch


def micro_batches(batch: Batch, tokens: int) -> Iterator[tuple[Tensor, Batch]]:
    """Split rows so that rows · (longest prompt + response) ≤ `tokens` in each part; yields (row numbers, part).

    The longest rows come first, equal ones in their order; a row longer than the budget goes alone; `tokens` 0 means no
    limit. Every row is in exactly one part. A batch that fits is yielded whole and unchanged.
    """
    lengths = batch.ragged("prompt_ids").lengths + batch.ragged("response_ids").lengths
    for rows in split_rows(lengths, tokens):
        yield rows, batch if len(rows) == len(batch) else batch.select(rows)


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
