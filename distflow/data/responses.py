"""Responses that the data itself gives: what read steps make of a row. Imports no torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, Self

from distflow.data.conversation import Part, parts_of
from distflow.data.rows import ANSWER, as_text, last_turn
from distflow.data.sources import PromptText
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
    reply: Mapping[str, Any] | None = None
    """The assistant's turn with which the conversation of the prompt ends in the data, if it does."""

    def response(self, *names: str) -> str:
        """The text in the first of these columns that the row has; of chat messages, the assistant's last turn.

        Raises UserError where there is none of them, or it is empty.
        """
        return as_text([self.turn(*names)])

    def turn(self, *names: str) -> Mapping[str, Any]:
        """The same as a chat message, which may call tools as well; the turn that ends the conversation of the prompt
        goes before a column `answer`."""
        known = self.task if self.reply is None else {**self.task, ANSWER: self.reply}
        name = next((name for name in names if known.get(name) is not None), None)
        null = [name for name in names if name in known]
        if name is None and null:
            raise UserError(f"the column {null[0]!r} is null; expected a response — leave the row out of the source")
        if name is None:
            there = ", ".join(self.task) or "none besides the prompt"
            wanted = " or ".join(map(repr, names))
            raise UserError(f"there is no column {wanted}; there are {there} — data.fields.{names[0]}=COLUMN")
        found = self.reply if name == ANSWER and self.reply is not None else last_turn(self.task[name], name)
        if not as_text([found]).strip() and not found.get("tool_calls"):
            raise UserError(f"the column {name!r} is empty; expected a response — leave the row out of the source")
        return found


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
    all_turns: bool = False
    """All turns of the assistant are the response of a conversation, not the last one alone."""

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
    turn: Mapping[str, Any] | None = None
    """The same as a chat message, where it has more than its text: calls of tools."""

    @classmethod
    def of(cls, turn: Mapping[str, Any], fields: Mapping[str, float] | None = None, *, trains: bool = True) -> Self:
        """The response that a chat message is (see `DataRow.turn`)."""
        return cls(as_text([turn]), fields or {}, trains, turn)


class ResponseTokenizer(Protocol):
    """The part of a tokenizer that encodes responses."""

    @property
    def eos_token_id(self) -> int | None:
        """The end token; None if there is none."""
        ...

    def encode(self, text: str) -> list[int]:
        """Text to token ids, without special tokens being added."""
        ...

    def closes(self, token: int) -> bool:
        """Whether a turn may end with this token: it is a special one, or ends responses."""
        ...


def in_tokens(
    response: RowResponse,
    given: PromptText,
    tokenizer: ResponseTokenizer,
    write: Callable[[Sequence[Mapping[str, Any]], bool], str] | None,
) -> GivenResponse:
    """The response to a prompt, with what a model ends it with: the last token of its turn in the chat template, or the
    tokenizer's end token. `write`: see `parts_of`; None where no chat template writes the prompt.

    Raises UserError without an end token, and for what cannot be written.
    """
    turn = response.turn or {"role": "assistant", "content": response.text}
    text, parts = response.text, [(response.text, True)]
    if write is not None:
        before = given.messages or [{"role": "user", "content": given.text}]
        parts = parts_of(write, before, [*given.spoken, turn])
        text = as_text([*given.spoken, turn])
    elif turn.get("tool_calls"):
        raise UserError("it calls tools, and the prompt is a text, which no chat template writes — data.chat=true")
    return _joined(parts, text, response, tokenizer)


def _joined(parts: Sequence[Part], text: str, response: RowResponse, tokenizer: ResponseTokenizer) -> GivenResponse:
    ids: list[int] = []
    trained: list[bool] = []
    for part, trains in parts:
        encoded = tokenizer.encode(part)
        ids += encoded
        trained += [trains and response.trains] * len(encoded)
    if not ids or not tokenizer.closes(ids[-1]):
        if tokenizer.eos_token_id is None:
            raise UserError("the tokenizer has no end token, by which a model could learn to stop — one that has")
        ids.append(tokenizer.eos_token_id)
        trained.append(response.trains)
    mask = tuple(trained) if response.trains and not all(trained) else ()
    return GivenResponse(tuple(ids), text, dict(response.fields), response.trains, mask)
