"""What a client has claimed: whole groups, until it acknowledges them, gives them back, or writes a step's fields."""

from __future__ import annotations

from collections.abc import Sequence
from types import TracebackType
from typing import Any, Self

import torch
from torch import Tensor

from distflow.client.reading import ConsumerReading, Part
from distflow.client.settling import Settling, StaleRows
from distflow.data.batch import Batch, Column, Ragged
from distflow.errors import UserError


class Samples:
    """Whole groups, claimed for this client until it acknowledges them or gives them back.

    As a context: acknowledged at its end, given back if that is an exception.
    """

    def __init__(self, settling: Settling, reading: ConsumerReading, parts: Sequence[Part]) -> None:
        self.batch = Batch.concat([part.batch.only(reading.fields) for part in parts])
        """The fields that were asked for, a row for each sample; rows of one group lie side by side."""
        self.missed = reading.missed
        """Groups that this consumer has lost so far because it fell behind; always 0 if it is lossless."""
        self._settling = settling
        self._consumer = reading.consumer
        self._parts = tuple(parts)
        self._settled = False

    def acknowledge(self) -> None:
        """They are used. Raises StaleRows if some were not this client's any more: they were or will be seen twice.

        The same if the run ends before all owners have confirmed it.
        """
        self._settle(used=True)

    def give_back(self) -> None:
        """They are not used: another client of this consumer, or this one, gets them again."""
        self._settle(used=False)

    def put(self, **fields: Any) -> None:
        """Write the fields of the step that this consumer is, all of them, with a value for each row; then it is done.

        Values are numbers, texts, or a row of numbers for each response, as the recipe says. Each sample gets them
        once: raises StaleRows for those that are not this client's any more, which somebody else writes, and the others
        are written. Raises UserError for values that the step does not take, and nothing of these samples is written
        then. What is written is not written again: if anything else interrupts it, values of a second `put` count for
        those samples alone that the first one had not reached.
        """
        self._check_open()
        if not fields:
            raise UserError("put: expected fields with a value for each row, such as reward=[0.0, 1.0]")
        columns = {name: _column(name, values, len(self)) for name, values in fields.items()}
        try:
            self._settling.put(self._consumer, self._parts, Batch(columns))
        except StaleRows:
            self._settled = True
            raise
        self._settled = True

    def __len__(self) -> int:
        return self.batch.rows

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._settled:
            return
        try:
            self._settle(used=kind is None)
        except UserError:
            # A step's samples, of which nothing was written.
            self._settle(used=False)
            raise

    def _settle(self, *, used: bool) -> None:
        self._check_open()
        self._settling.settle(self._consumer, self._parts, used=used)
        self._settled = True

    def _check_open(self) -> None:
        if self._settled:
            raise UserError("these samples were acknowledged or given back already: ask for others with Client.get")


def _column(name: str, values: Any, rows: int) -> Column:
    """A column of these values; what its step expects is checked by the owners."""
    try:
        column = _made(values)
    except (TypeError, ValueError, RuntimeError) as error:
        raise UserError(
            f"put: {name}: expected a number, a text or a row of numbers for each sample: {error}"
        ) from None
    count = len(column) if isinstance(column, Ragged) else (column.shape[0] if column.dim() else 1)
    if count != rows:
        raise UserError(f"put: {name}: {count} values for {rows} samples")
    return column


def _made(values: Any) -> Column:
    if isinstance(values, Ragged):
        return values
    if isinstance(values, Tensor):
        return values.detach().cpu()
    found = list(values)
    if found and all(isinstance(value, str) for value in found):
        return Ragged.from_texts(found)
    if found and all(hasattr(value, "__len__") and not isinstance(value, str) for value in found):
        return Ragged.from_rows([torch.as_tensor(value, dtype=torch.float64) for value in found], torch.float64)
    return torch.tensor(found, dtype=torch.float64)
