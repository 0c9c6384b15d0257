"""The step whose fields clients write: programs outside the run, such as a labeller (docs/service.md)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from distflow.data.batch import Batch, Column, Ragged
from distflow.errors import UserError, did_you_mean
from distflow.flow.step import step
from distflow.types import TOKENS

MOST_TEXT = 1 << 16
"""Bytes of a text, so that what owners keep of a group stays bounded."""


@step(role="client", reads=[], writes=[])
def by_client(batch: Batch, *, writes: Mapping[str, str], reads: Sequence[str]) -> Batch:
    """What clients have written for these rows, in the form that samples have.

    `reads`: the fields that clients see. `writes`: those that they write, each with its kind: number (one for a sample,
    [B]), text, or number_per_token (one for each response token). Raises UserError for what is of another kind, of
    another length, or no finite number, and for fields that are missing or not among them.
    """
    wrong = [name for name in batch.columns if name not in writes and name != TOKENS]
    if wrong:
        raise UserError(f"field {wrong[0]!r} is not written here; {did_you_mean(wrong[0], writes)}")
    missing = [name for name in writes if name not in batch]
    if missing:
        raise UserError(f"field {missing[0]!r} is missing: expected {', '.join(writes)}, all at once")
    return Batch({name: _checked(name, kind, batch) for name, kind in writes.items()})


def _checked(name: str, kind: str, batch: Batch) -> Column:
    column = batch[name]
    values = column.values if isinstance(column, Ragged) else column
    if kind == "text":
        return _text(name, column)
    if isinstance(column, Ragged) != (kind == "number_per_token") or values.dim() != 1 or _is_text(column):
        expected = "one number for each sample" if kind == "number" else "a number for each response token"
        raise UserError(f"field {name!r}: expected {expected}, got {_shown(column)}")
    finite = values.isfinite()
    if not bool(finite.all()):
        raise UserError(f"field {name!r}: expected finite numbers, got {values[~finite][0].item()}")
    if not isinstance(column, Ragged):
        return column.to(torch.float32)
    tokens = batch.ragged(TOKENS)
    if not torch.equal(column.offsets, tokens.offsets):
        row = int((column.lengths != tokens.lengths).nonzero()[0])
        given, expected_tokens = int(column.lengths[row]), int(tokens.lengths[row])
        raise UserError(f"field {name!r}: row {row} has {given} numbers for {expected_tokens} response tokens")
    return tokens.like(values.to(torch.float32))


def _text(name: str, column: Column) -> Ragged:
    if not (isinstance(column, Ragged) and _is_text(column)):
        raise UserError(f"field {name!r}: expected a text for each sample, got {_shown(column)}")
    longest = int(column.lengths.max()) if len(column.lengths) else 0
    if longest > MOST_TEXT:
        raise UserError(f"field {name!r}: a text of {longest} bytes; expected at most {MOST_TEXT}")
    try:
        Batch({name: column}).texts(name)
    except UnicodeDecodeError:
        raise UserError(f"field {name!r}: expected UTF-8") from None
    return column


def _is_text(column: Column) -> bool:
    return isinstance(column, Ragged) and column.values.dtype == torch.uint8


def _shown(column: Column) -> str:
    if isinstance(column, Ragged):
        return "texts" if _is_text(column) else "several numbers for each"
    return f"a tensor of shape {list(column.shape)}"
