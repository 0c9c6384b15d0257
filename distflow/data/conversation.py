"""Responses in a conversation: what the chat template writes behind the prompt, and which of it is trained on.

Where a turn begins and ends is found by writing the conversation up to there: with the generation prompt, as a model is
asked for the turn, and with the turn. What the second text has more is the turn, with the token that the template ends
it with. White space behind that token belongs to what follows. Each part is encoded by itself, as the tokens of prompts
and of samples are. Imports no torch.

Example, two answers: <u>1<a> | 2<end> | <u>3<a> | 4<end> is the prompt, a turn, what is between, and the last turn.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from distflow.data.rows import as_text
from distflow.errors import UserError
from distflow.log import logger

log = logger(__name__)

Turn = Mapping[str, Any]
Part = tuple[str, bool]
"""A text, and whether it is trained on."""
ASSISTANT = "assistant"
_told: set[str] = set()
"""What was warned of."""


def first_answer(messages: Sequence[Turn]) -> int:
    """The number of the first assistant's turn that answers something, or of all messages if there is none."""
    asked = False
    for number, message in enumerate(messages):
        if asked and message["role"] == ASSISTANT:
            return number
        asked = asked or message["role"] not in (ASSISTANT, "system")
    return len(messages)


def parts_of(write: Callable[[Sequence[Turn], bool], str], before: Sequence[Turn], turns: Sequence[Turn]) -> list[Part]:
    """What stands behind the prompt `before`, from its first assistant's turn on: `turns`, which end with one.

    `write` gives a conversation as text; with True the generation prompt follows. Raises UserError if the template
    writes an earlier turn in another way once others follow, or no answer behind its generation prompt.
    """
    parts: list[Part] = []
    said, ended = list(before), ""
    for number, turn in enumerate(turns):
        if turn["role"] != ASSISTANT:
            said.append(turn)
            continue
        asked = write(said, True)
        if not asked.startswith(ended):
            raise UserError(_rewritten(len(before) + number))
        if parts:
            parts.append((asked[len(ended) :], False))
        said.append(turn)
        written = write(said, False)
        if not written.startswith(asked):
            if len(turns) > 1:
                raise UserError(_rewritten(len(before) + number))
            return [_alone(turn, asked, written)]
        stripped = written.rstrip()
        ended = stripped if len(stripped) > len(asked) else written
        parts.append((ended[len(asked) :], True))
    return parts


def _alone(turn: Turn, asked: str, written: str) -> Part:
    """The content of an answer whose beginning the template writes in another way than the generation prompt."""
    if turn.get("tool_calls"):
        raise UserError(
            f"the answer calls tools, and the chat template writes it in another way than the generation prompt, which "
            f"ends with {asked[-40:]!r}, begins it — other data.chat_template_args, or another template"
        )
    if asked[-40:] not in _told:
        _told.add(asked[-40:])
        log.warning(
            "data: the chat template writes answers in another way than its generation prompt, which ends with %r, "
            "begins them: their contents are put behind that",
            asked[-40:],
        )
    content = as_text([turn])
    _, found, behind = written.rstrip().rpartition(content.rstrip())
    return content + (behind if found else ""), True


def _rewritten(number: int) -> str:
    return (
        f"the chat template writes message {number}, or what is before it, in another way when others follow (some "
        "leave out earlier thinking), so the turns before the last cannot be trained on as the model would write "
        "them — flow.steps.read.with.turns=last"
    )
