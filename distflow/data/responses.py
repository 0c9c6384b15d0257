"""Responses that the data itself gives: what read steps make of a row. Imports no torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Self

from distflow.data.chat_template import ChatTemplate
from distflow.data.conversation import Conversation, ResponsePart
from distflow.data.gold import ANSWER
from distflow.data.messages import as_text, calls_of, last_turn, trains
from distflow.data.sources import PromptText
from distflow.data.tokenizer import Tokenizer
from distflow.errors import PluginError, UserError
from distflow.log import logger
from distflow.types import GivenResponse

log = logger(__name__)


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
    ends: str = ""
    """The role of the turn with which it ends else; empty where it is no conversation."""

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
            spoken = ANSWER in names and self.ends
            also = f", and the conversation ends with the turn of {self.ends!r}, not of 'assistant'" if spoken else ""
            raise UserError(f"there is no column {wanted}; there are {there}{also} — data.fields.{names[0]}=COLUMN")
        found = self.reply if name == ANSWER and self.reply is not None else last_turn(self.task[name], name)
        if not as_text([found]).strip() and not calls_of(found):
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


def in_tokens(
    response: RowResponse,
    given: PromptText,
    prompt: Sequence[int],
    tokenizer: Tokenizer,
    template: ChatTemplate,
    label: str,
) -> GivenResponse:
    """Encode the response to a prompt, with what a model ends it with: the last token of its turn in the chat template,
    or of what the template writes next, or the tokenizer's end token. `prompt`: its tokens.

    Raises UserError without an end token, and for what cannot be written, or has nothing to be trained on.
    """
    turn = response.turn or {"role": "assistant", "content": response.text}
    before = prompt[-1] if prompt else None
    if not given.messages:
        if calls_of(turn):
            raise UserError("it calls tools, and the prompt is a text, which no chat template writes — data.chat=true")
        text, parts = response.text, [ResponsePart(response.text, answers=True, trains=trains(turn))]
        ids, trained = _joined(parts, str, before, tokenizer)
    else:
        written = Conversation(template, given, turn, label)
        text = as_text([*given.spoken, turn])
        ids, trained = _joined(written.parts(), written.behind, before, tokenizer)
    _check_end(ids[-1], tokenizer)
    if response.trains and not any(trained):
        raise UserError("nothing of it is trained on: its turns have weight: 0 — leave the row out of the source")
    mask = tuple(trained) if response.trains and not all(trained) else ()
    return GivenResponse(tuple(ids), text, dict(response.fields), response.trains, mask)


_told_ends: set[int] = set()
"""End tokens that were warned of."""


def _check_end(token: int, tokenizer: Tokenizer) -> None:
    """Warn once if a model would learn to end its responses with a token at which none of them ends."""
    if token in tokenizer.end_tokens or token in _told_ends:
        return
    _told_ends.add(token)
    written = tokenizer.decode_batch([[token]], skip_special=False)[0]
    log.warning(
        "data: the chat template ends responses with %r, at which the sampling of responses does not end — add %d to "
        "eos_token_id in generation_config.json of the model's folder",
        written,
        token,
    )


def _joined(
    parts: Sequence[ResponsePart], behind: Callable[[], str], before: int | None, tokenizer: Tokenizer
) -> tuple[list[int], list[bool]]:
    """The tokens of the parts, and which of them are trained on. `behind`: what would follow the last one; `before`:
    the last token of the prompt."""
    ids: list[int] = []
    trained: list[bool] = []
    following: list[int] | None = None
    """The next part, less the marker in it that ends the one before."""
    for number, part in enumerate(parts):
        own = tokenizer.encode(part.text, behind=ids[-1] if ids else before) if following is None else following
        following = None
        ids += own
        trained += [part.trains] * len(own)
        if not part.answers or (own and tokenizer.closes(own[-1])):
            continue
        # The template writes no end of its own: what a model stops with is the marker of whoever speaks next.
        last = number == len(parts) - 1
        follows = tokenizer.encode(behind() if last else parts[number + 1].text, behind=ids[-1] if ids else before)
        end = _marker(follows, tokenizer)
        if end and not last:
            following = follows[len(end) :]
        end = end or [_end_token(tokenizer)]
        ids += end
        trained += [part.trains] * len(end)
    return ids, trained


def _marker(follows: Sequence[int], tokenizer: Tokenizer) -> list[int]:
    """The tokens up to the first that may end a turn, if white space alone is before it; else none."""
    place = next((place for place, token in enumerate(follows) if tokenizer.closes(token)), None)
    if place is None or tokenizer.decode_batch([follows[:place]], skip_special=False)[0].strip():
        return []
    return list(follows[: place + 1])


def _end_token(tokenizer: Tokenizer) -> int:
    if tokenizer.eos_token_id is None:
        raise UserError("the tokenizer has no end token, by which a model could learn to stop — one that has")
    return tokenizer.eos_token_id
