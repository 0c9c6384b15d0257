"""Responses in a conversation: what the chat template writes behind the prompt, and which of it is trained on.

Where a turn begins and ends is found by writing the conversation up to there: with the generation prompt, as a model is
asked for the turn, and with the turn. What the second text has more is the turn, with the token that the template ends
it with. White space behind that token belongs to what follows. Imports no torch.

Example, two answers: <u>1<a> | 2<end> | <u>3<a> | 4<end> is the prompt, a turn, what is between, and the last turn.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from distflow.data.chat_template import ChatTemplate, left_out, open_thought, pieces
from distflow.data.messages import ASSISTANT, Message, calls_of, content_text, trains
from distflow.data.sources import PromptText
from distflow.errors import UserError
from distflow.log import logger

log = logger(__name__)

_told: set[str] = set()
"""What was warned of."""


class ResponsePart(NamedTuple):
    """A text behind the prompt."""

    text: str
    answers: bool
    """Whether it is a turn of the assistant; else it stands between two of them."""
    trains: bool
    """Whether it is trained on."""


def first_answer(messages: Sequence[Message]) -> int:
    """Find the number of the first assistant's turn that answers something; that of all messages if there is none."""
    asked = False
    for number, message in enumerate(messages):
        if asked and message["role"] == ASSISTANT:
            return number
        asked = asked or message["role"] not in (ASSISTANT, "system")
    return len(messages)


class Conversation:
    """A prompt and the turns behind it, the last of which is the response, as a template writes them."""

    def __init__(self, template: ChatTemplate, given: PromptText, turn: Message, label: str) -> None:
        """`turn`: the response to the prompt, or what it goes on with where the prompt begins it; `label`: the row."""
        self._template, self._given, self._label = template, given, label
        opening = given.opening
        whole = turn if opening is None else {**turn, "content": content_text(opening) + content_text(turn)}
        self._turns = [*given.spoken, whole]
        self._said: list[Message] = list(given.messages)
        self._ended = ""

    def parts(self) -> list[ResponsePart]:
        """Write what stands behind the prompt, from its first assistant's turn on; to be called once.

        Raises UserError if the template writes an earlier turn in another way once others follow, or no answer behind
        its generation prompt, and for turns of which there is nothing to be trained on.
        """
        parts: list[ResponsePart] = []
        for turn in self._turns:
            if turn["role"] != ASSISTANT:
                self._said.append(turn)
                continue
            number, opened = len(self._said), turn is self._turns[-1] and self._given.opening is not None
            asked = self._asked(opened)
            if not asked.startswith(self._ended):
                raise UserError(_rewritten(number))
            if parts:
                parts.append(ResponsePart(asked[len(self._ended) :], answers=False, trains=False))
            self._said.append(turn)
            written = self._write()
            rest = self._rest(turn) if opened else ""
            if written.startswith(asked) and written[len(asked) :].lstrip().startswith(rest.lstrip()):
                stripped = written.rstrip()
                if self._template.closing:
                    stripped = stripped.removesuffix(self._template.closing).rstrip()
                self._ended = stripped if len(stripped) > len(asked) else written
                part = ResponsePart(self._ended[len(asked) :], answers=True, trains=trains(turn))
                self._check_written(number, turn, part, opened=opened)
            elif len(self._turns) == 1:
                part = self._alone(turn, asked, written)
                written = asked + part.text
            else:
                raise UserError(_rewritten(number))
            parts.append(part)
        self._template.check(written, self._said, self._given.tools, self._label)
        return parts

    def behind(self) -> str:
        """Write what follows the last answer: the beginning of a tool's turn if it calls one, else of a user's.

        Empty if that cannot be known. To be called after `parts`.
        """
        for role in ("tool", "user") if self._said[-1].get("tool_calls") else ("user",):
            try:
                written = self._write({"role": role, "content": _NEXT})
            except ValueError:  # the template's own: it takes no such turn here
                continue
            if self._ended and written.startswith(self._ended):
                return written[len(self._ended) :].partition(_NEXT)[0]
        # The turn itself may be written in another way once others follow, without its reasoning for one.
        return self._template.behind

    def _write(self, *further: Message) -> str:
        return self._template.write([*self._said, *further], self._given.tools)

    def _asked(self, opened: bool) -> str:
        if not opened or self._given.opening is None:
            return self._template.write(self._said, self._given.tools, asks=True)
        return self._template.begin(self._said, self._given.opening, self._given.tools)

    def _rest(self, turn: Message) -> str:
        """Return what a turn says behind the beginning that is given."""
        return content_text(turn)[len(content_text(self._given.opening or {})) :]

    def _check_written(self, number: int, turn: Message, part: ResponsePart, *, opened: bool) -> None:
        """Raise UserError if a turn is trained on of which there is nothing besides its end."""
        if not part.trains:
            return
        given = list(pieces([turn], ()))
        if not given:
            raise UserError(
                f"message {number}, an assistant's turn, is empty; expected an answer — give it weight: 0, or leave "
                "the row out of the source"
            )
        # A key of a call may stand in the end itself, as `end` does in <|im_end|>.
        said = part.text.removesuffix(self._template.ending)
        nothing = part.text.strip() == self._template.blank.strip() or len(left_out(said, [turn], ())) == len(given)
        if nothing and not opened:
            keys = ", ".join(dict.fromkeys(piece.key for piece in given))
            raise UserError(
                f"the chat template leaves out {keys} of message {number}, so that its end alone would be trained on — "
                "a template that writes it, or weight: 0"
            )

    def _alone(self, turn: Message, asked: str, written: str) -> ResponsePart:
        """Put an answer behind the generation prompt, whose end the template writes in another way before answers."""
        if calls_of(turn):
            raise UserError(
                f"the answer calls tools, and the chat template writes it in another way than the generation prompt, "
                f"which ends with {asked[-40:]!r}, begins it — other data.chat_template_args, or another template"
            )
        opening, content = self._given.opening, content_text(turn)
        thought = open_thought(asked) if opening is None else None
        if opening is not None:
            answer: str | None = self._rest(turn)
        elif thought is not None:
            answer = thought.answer(turn)
        else:
            same = next(end for end in range(len(asked), -1, -1) if written.startswith(asked[:end]))
            answer = content.removeprefix(asked[same:])
        if thought is not None and answer is None:
            self._template.tell(
                "thought",
                self._label,
                f"the generation prompt opens {thought.tag}, and the answer has no {thought.end}, so that it would be "
                f"trained as a thought that does not end: {content[:60]!r} — give it its reasoning_content, put "
                f"{thought.tag}…{thought.end} before it, or take other data.chat_template_args",
            )
        elif thought is None and asked[-40:] not in _told:
            _told.add(asked[-40:])
            log.warning(
                "data: the chat template writes answers in another way than its generation prompt, which ends with %r, "
                "begins them: their contents are put behind that",
                asked[-40:],
            )
        text = content if answer is None else answer
        return ResponsePart(text.rstrip() + self._template.ending, answers=True, trains=trains(turn))


_NEXT = "0"
"""Content of a turn that is written to see what comes before it."""


def _rewritten(number: int) -> str:
    return (
        f"the chat template writes message {number}, or what is before it, in another way when others follow (some "
        "leave out earlier thinking), so the turns before the last cannot be trained on as the model would write "
        "them — flow.steps.read.with.turns=last"
    )
