"""What steps write: the shapes and values of the standard fields, and what no step may do to the fields of others."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import torch
from torch import Tensor

from distflow.data.batch import Batch, Column, Ragged
from distflow.data.batch_wire import SENDABLE
from distflow.types import (
    A_TOKEN,
    DROP_REASON,
    LEFT_OUT,
    LOGGED,
    REWARD,
    REWARD_PARTS,
    SEQUENCE,
    SEVERAL_A_TOKEN,
    TOKENS,
)

A_SAMPLE = ("reward", "score", "group", "sample", SEQUENCE, "finish_reason")
"""Fields with one value per sample."""
A_TEXT = (DROP_REASON, LEFT_OUT, "prompt_text", "sequence_prompt", "response_text", "task")


def complaint(batch: Batch, written: Sequence[str]) -> str | None:
    """What a step should have written and what it wrote, for the first of these fields with which something is wrong.

    Fields of one's own may have any shape, and any values, of a type that can be sent.
    """
    for name in written:
        if name in batch:
            found = _unsendable(name, batch[name]) or _misshapen(name, batch) or _not_numbers(name, batch)
            if found is not None:
                return found
    return None


def with_fields(batch: Batch, columns: Mapping[str, Column]) -> Batch:
    """The batch with what a step has written. What is to be dropped or left out stays so: an earlier reason remains."""
    written, new = dict(columns), Batch(columns)
    for name in (DROP_REASON, LEFT_OUT):
        if name in columns and name in batch and batch.ragged(name).values.numel():
            reasons = zip(batch.texts(name), new.texts(name), strict=True)
            written[name] = Ragged.from_texts([earlier or later for earlier, later in reasons])
    return batch.with_columns(**written)


def changed(before: Batch, after: Batch, written: Collection[str]) -> str | None:
    """What is wrong with the first field of `before` that a step has changed and that is not among those it writes."""
    for name, column in before.columns.items():
        if name in after and name not in written and not _same(column, after[name]):
            return (
                f"changed {name!r}, which it does not declare to write; a step keeps all rows in their order, and "
                "writes fields of its own: batch.with_columns(…)"
            )
    return None


def _same(before: Column, after: Column) -> bool:
    if before is after:
        return True
    if isinstance(before, Ragged) and isinstance(after, Ragged):
        return torch.equal(before.offsets, after.offsets) and _same_values(before.values, after.values)
    return isinstance(before, Tensor) and isinstance(after, Tensor) and _same_values(before, after)


def _same_values(before: Tensor, after: Tensor) -> bool:
    if before is after:
        return True
    # A part of the reward that a sample lacks is NaN.
    return before.shape == after.shape and bool(((before == after) | ((before != before) & (after != after))).all())


def _unsendable(name: str, column: Column) -> str | None:
    dtype = column.values.dtype if isinstance(column, Ragged) else column.dtype
    if dtype in SENDABLE:
        return None
    return f"wrote {name!r} as {dtype}; expected one of {', '.join(sorted(map(str, SENDABLE)))}"


def _misshapen(name: str, batch: Batch) -> str | None:
    if name in (*A_TOKEN, *SEVERAL_A_TOKEN) and TOKENS in batch:
        return _a_token(name, batch[name], batch.ragged(TOKENS))
    if name in A_SAMPLE or name.startswith(REWARD_PARTS):
        return _a_sample(name, batch[name], batch.rows)
    return _a_text(name, batch[name]) if name in A_TEXT or name.startswith(LOGGED) else None


def _not_numbers(name: str, batch: Batch) -> str | None:
    """Of fields that are trained on: nothing can be computed with NaN, or the loss would ignore it."""
    if name == REWARD:
        return _endless(batch)
    column = batch[name]
    if (
        name not in (*A_TOKEN, *SEVERAL_A_TOKEN)
        or not isinstance(column, Ragged)
        or not column.values.is_floating_point()
    ):
        return None
    count = int(column.values.isnan().sum())
    return f"wrote nan into {name!r} for {count} of {_counted(column.values.numel())}" if count else None


def _endless(batch: Batch) -> str | None:
    """Samples that are dropped or left out need no reward."""
    finite = batch.dense(REWARD).isfinite()
    if bool(finite.all()):
        return None
    excused = torch.zeros_like(finite)
    for name in (DROP_REASON, LEFT_OUT):
        excused |= (batch.ragged(name).lengths > 0) if name in batch else False
    rows = (~(finite | excused)).nonzero().flatten().tolist()
    if not rows:
        return None
    uid = f", uid (epoch, prompt, position) {tuple(batch.dense('uid')[rows[0]].tolist())}" if "uid" in batch else ""
    return (
        f"wrote {REWARD!r} {batch.dense(REWARD)[rows[0]].item()} for {len(rows)} of {batch.rows} samples{uid}; "
        f"expected finite numbers, or a {DROP_REASON} or {LEFT_OUT} for samples that have none"
    )


def _a_token(name: str, column: Column, responses: Ragged) -> str | None:
    if isinstance(column, Ragged):
        # Most steps write `responses.like(…)`, which shares the offsets.
        same = column.offsets is responses.offsets or torch.equal(column.offsets, responses.offsets)
        if same and column.values.dim() == (2 if name in SEVERAL_A_TOKEN else 1):
            return None
    if name in SEVERAL_A_TOKEN:
        return (
            f"must write the same number of values for each response token into {name!r}, [{responses.values.numel()}, "
            f"K] for this batch; it wrote {_shown(column)} — {name}=responses.like(values) with responses = "
            f"batch.ragged({TOKENS!r})"
        )
    return (
        f"must write one value per response token into {name!r}, {responses.values.numel()} for this batch; it wrote "
        f"{_shown(column)} — {name}=responses.like(values) with responses = batch.ragged({TOKENS!r}), and for one "
        "value per sample values = values_B.repeat_interleave(responses.lengths)"
    )


def _a_sample(name: str, column: Column, rows: int) -> str | None:
    if not isinstance(column, Ragged) and tuple(column.shape) == (rows,):
        return None
    return f"must write one value per sample into {name!r}, a tensor of shape [{rows}]; it wrote {_shown(column)}"


def _a_text(name: str, column: Column) -> str | None:
    if isinstance(column, Ragged) and column.values.dtype == torch.uint8:
        return None
    return f"must write one text per sample into {name!r}; it wrote {_shown(column)} — {name}=Ragged.from_texts(texts)"


def _shown(column: Column) -> str:
    if isinstance(column, Ragged):
        return f"rows of {_counted(column.values.numel())} in all"
    return f"a tensor of shape {list(column.shape)}"


def _counted(count: int) -> str:
    return "1 value" if count == 1 else f"{count} values"
