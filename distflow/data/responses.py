"""Responses that the data itself gives: what read steps make of a row. Imports no torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from distflow.data.rows import last_turn
from distflow.errors import PluginError, UserError
from distflow.types import GivenResponse


@dataclass(frozen=True, slots=True)
class DataRow:
    """One row of the data as a read step gets it: all columns but the prompt; and the row at the next position."""

    task: Mapping[str, Any]
    following: Callable[[], DataRow]
    """Of another prompt, unless the data have only one."""
    label: str = "a row"
    """Where it stands, for messages."""

    def response(self, *names: str) -> str:
        """The text in the first of these columns that the row has; of chat messages, the assistant's last turn.

        Raises UserError where there is none of them, or it is empty.
        """
        name = next((name for name in names if self.task.get(name) is not None), None)
        null = [name for name in names if name in self.task]
        if name is None and null:
            raise UserError(f"the column {null[0]!r} is null; expected a response — leave the row out of the source")
        if name is None:
            there = ", ".join(self.task) or "none besides the prompt"
            wanted = " or ".join(map(repr, names))
            raise UserError(f"there is no column {wanted}; there are {there} — data.fields.{names[0]}=COLUMN")
        text = last_turn(self.task[name], name)
        if not text.strip():
            raise UserError(f"the column {name!r} is empty; expected a response — leave the row out of the source")
        return text


@dataclass(frozen=True, slots=True)
class Reading:
    """How responses are made of rows: a read step with its settings, and the longest that a response may be."""

    make: Callable[[DataRow], Sequence[RowResponse]]
    name: str
    """Of the step, for messages."""
    samples: int
    """Most of a row."""
    max_response_tokens: int
    writes: Sequence[str] = ()
    """Its own fields, of which each response has a number."""

    def of(self, row: DataRow) -> Sequence[RowResponse]:
        """The responses of a row; raises PluginError for what no read step may return, and what the step raises."""
        made = self.make(row)
        whole = isinstance(made, Sequence) and all(isinstance(one, RowResponse) for one in made)
        if not whole or not 1 <= len(made) <= self.samples:
            shown = f"{len(made)} values" if isinstance(made, Sequence) else f"a {type(made).__name__}"
            raise PluginError(
                f"step {self.name!r} returned {shown}; expected a list of 1 to {self.samples} RowResponse(text, …), as "
                "its @step(samples=…) says"
            )
        for response in made:
            if set(response.fields) != set(self.writes):
                given, expected = ", ".join(response.fields) or "none", ", ".join(self.writes) or "none"
                raise PluginError(
                    f"step {self.name!r} returned a response with the fields {given}; expected those that it declares "
                    f"to write: {expected}"
                )
        return made


@dataclass(frozen=True, slots=True)
class RowResponse:
    """A response as text. `fields`: numbers that the read step writes for it; `trains`: its tokens are trained on."""

    text: str
    fields: Mapping[str, float] = field(default_factory=dict)
    trains: bool = True


def in_tokens(response: RowResponse, encode: Callable[[str], Sequence[int]], end: int | None) -> GivenResponse:
    """The response with the end token behind it, with which a model stops. Raises UserError without such a token."""
    if end is None:
        raise UserError("the tokenizer has no end token, by which a model could learn to stop — one that has")
    return GivenResponse((*encode(response.text), end), response.text, dict(response.fields), response.trains)
