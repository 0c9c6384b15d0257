"""Whole groups as ranges of rows of the batches that they came in."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from distflow.data.batch import RowRange
from distflow.types import REWARD_PARTS


def with_same_parts(ranges: Sequence[RowRange]) -> list[RowRange]:
    """Rows whose worker has not met a part of the reward yet have NaN there: not every sample need have all parts."""
    batches = {id(piece.batch): piece.batch for piece in ranges}
    parts = {name for batch in batches.values() for name in batch.columns if name.startswith(REWARD_PARTS)}
    for key, batch in batches.items():
        lacking = {name: torch.full((batch.rows,), torch.nan) for name in sorted(parts - batch.columns.keys())}
        batches[key] = batch.with_columns(**lacking) if lacking else batch
    return [RowRange(batches[id(piece.batch)], piece.start, piece.stop) for piece in ranges]


def padded_tokens(group: RowRange) -> int:
    """Tokens of a group when its rows are padded to the longest."""
    begin, end = group.start, group.stop
    lengths = [group.batch.ragged(name).offsets[begin : end + 1].diff() for name in ("prompt_ids", "response_ids")]
    return (end - begin) * int((lengths[0] + lengths[1]).max())
