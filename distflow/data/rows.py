"""A row of a data source as a prompt: which column is the prompt, which the answer, and what goes into the task."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from distflow.data.answers_in_text import is_whole_answer
from distflow.data.formats import (
    COMPLETION,
    CONVERSATIONS,
    FUNCTIONS,
    MESSAGES,
    PROMPT,
    RESPONSE,
    TOOLS,
    in_columns,
    with_prompt,
)
from distflow.data.gold import ANSWER, as_written
from distflow.data.messages import TableRow, as_text, content_text, conversation, last_turn, tools_of, without_nulls
from distflow.data.sources import PromptText
from distflow.errors import UserError, nearest

CHOSEN, REJECTED = "chosen", "rejected"
RESPONSES = (CHOSEN, REJECTED, RESPONSE)
"""Responses; as conversations they have the prompt before their last turns."""
_SPOKEN = (PROMPT, MESSAGES, TOOLS, ANSWER, *RESPONSES)
"""Columns that may hold messages or tools."""
_NOT_OF_TASKS = (PROMPT, MESSAGES, TOOLS, *RESPONSES)
_SEEN_OR_HEARD = ("images", "videos", "audios", "image", "video", "audio")
"""Columns of what no text says."""
_BEGINS = ("prefix", "partial")
"""Keys by which APIs (Mistral, DeepSeek; Moonshot) are told that the last turn is a beginning."""
_FILE = re.compile(
    r"data:.*|.*\.(?:png|jpe?g|webp|gif|bmp|tiff?|mp4|webm|mov|mkv|wav|mp3|flac|ogg|m4a)\s*", re.I | re.S
)


def check_columns(columns: Sequence[str], fields: Mapping[str, str]) -> None:
    """Raises UserError unless rows with these columns have a prompt, and all columns that `fields` names."""
    for name, column in fields.items():
        if column not in columns and column.partition(".")[0] not in columns:
            raise UserError(_missing(column, columns, f"data.fields.{name}"))
    left = [column for column in columns if column not in fields.values()]
    known = {*fields, *left}
    if known.isdisjoint((PROMPT, MESSAGES)) and not known >= {CHOSEN, REJECTED} and not with_prompt(known):
        taken = [f"data.fields.{name}={column}" for name, column in fields.items() if column in (PROMPT, MESSAGES)]
        raise UserError(_missing(PROMPT, left, "") + (f", or remove {taken[0]}" if taken else ""))


def prompt_of(row: Mapping[str, Any], fields: Mapping[str, str]) -> PromptText:
    """Take the prompt out of a row; its task are all other columns. `fields`: names of columns by what they are.

    A column that is named so, and is part of the task, stays there under its own name too: functions ask for either.

    Conversations say what the prompt is, whatever text stands beside them: `messages`, unless `fields` names the
    prompt, and responses. Raises UserError.
    """
    check_columns(list(row), fields)
    named = {name: _column(row, column, name) for name, column in fields.items()}
    rest = {key: value for key, value in row.items() if key not in fields.values()}
    given = {**rest, **named}
    task = in_columns(given, named=PROMPT in fields)
    own = [column for name, column in fields.items() if name not in _NOT_OF_TASKS and column in row]
    task = {**{column: row[column] for column in own}, **task}
    if isinstance(row, TableRow):
        # Nulls that JSON text has were written by somebody.
        texts = {name for name, value in given.items() if isinstance(value, str)}
        of_table = [name for name in _SPOKEN if name in task and _origin(name, given) not in texts]
        task |= {name: without_nulls(task[name]) for name in of_table}
    for name in _SEEN_OR_HEARD:
        if _is_seen_or_heard(task.get(name), alone=not name.endswith("s")):
            raise UserError(
                f"the column {name!r} is {str(task[name])[:60]!r}; images, sound and video are not supported — leave "
                "such rows, or the column, out of the source"
            )
    for name in RESPONSES:
        task |= {name: _chat(task[name])} if name in task else {}
    prompt = _prompt(task, row, named=PROMPT in fields)
    tools = tools_of(task.get(TOOLS))
    if isinstance(prompt, str):
        return PromptText(prompt, task, (), tools)
    if not isinstance(prompt, list) or not prompt:
        found = f"{str(prompt)[:60]!r}, a {type(prompt).__name__}"
        raise UserError(f"the prompt is {found}; expected text, or a list of chat messages")
    return PromptText(as_text(prompt), task, prompt, tools)


def with_answer(given: PromptText, *, reads: bool) -> PromptText:
    """Tell what the assistant's turn is with which a conversation ends: its answer, or the beginning of the response.

    It is the answer (`reply`) if it is a whole one, or none stands beside it: in the column `answer`, or where the data
    give the responses (`reads`) a response of them. What its own key `prefix` or `partial` calls a beginning is one.
    Raises UserError if there is nothing before it, or nothing to go on with where the data give the responses.
    """
    *messages, last = given.messages
    said = content_text(last)
    if not messages:
        raise UserError("the prompt is one assistant's turn alone; expected a user's turn before it")
    if reads:
        others = _responses(given.task)
    else:
        answer = given.task.get(ANSWER)
        entries = answer if isinstance(answer, list) else [answer]
        others = [
            as_written(one) if isinstance(one, (str, int, float)) else str(one) for one in entries if one is not None
        ]
    marked = marked_as_beginning(last)
    if marked and reads and not others:
        raise UserError(
            f"the last assistant's turn is the beginning of an answer ({marked}: true), and no column "
            f"{', '.join(map(repr, RESPONSES))} goes on with it — add one, or remove {marked}"
        )
    same = said.strip() in map(str.strip, others) or is_whole_answer(said, () if reads else others)
    if marked or (others and said.strip() and not same):
        return replace(given, messages=messages, opening=last)
    task = given.task if given.task.get(ANSWER) is not None else {**given.task, ANSWER: said}
    return replace(given, messages=messages, text=as_text(messages), task=task, reply=last)


def marked_as_beginning(turn: Mapping[str, Any]) -> str:
    """The key by which an assistant's turn says that it is the beginning of one; empty if it does not."""
    return next((key for key in _BEGINS if turn.get(key) is True), "")


def is_replaced(given: PromptText) -> bool:
    """Tell whether the row of a prompt gives other responses than the turn that ends its conversation."""
    if given.reply is None or not (others := _responses(given.task)):
        return False
    return content_text(given.reply).strip() not in map(str.strip, others)


def _responses(task: Mapping[str, Any]) -> list[str]:
    """The texts of the responses that a row gives."""
    return [as_text([last_turn(task[name], name)]) for name in RESPONSES if task.get(name) is not None]


def _origin(name: str, given: Mapping[str, Any]) -> str:
    """The column that became one which is read here."""
    return name if name in given else {MESSAGES: CONVERSATIONS, RESPONSE: COMPLETION, TOOLS: FUNCTIONS}.get(name, name)


def _is_seen_or_heard(value: Any, *, alone: bool) -> bool:
    """Tell whether a column has images, sound or video. `alone`: a text in it may be the task's own, such as the
    image of a container, if it is no file."""
    if isinstance(value, str):
        return _FILE.fullmatch(value) is not None if alone else value.strip() not in ("", "[]")
    return bool(value) and not isinstance(value, (bool, int, float))


def _prompt(task: dict[str, Any], row: Mapping[str, Any], *, named: bool) -> Any:
    """Take the prompt out of the task: a text, messages, or something else that is refused. `named`: by data.fields."""
    prompt = _chat(task.pop(PROMPT, None))
    if not named and not isinstance(prompt, list) and (chat := conversation(task.get(MESSAGES))) is not None:
        del task[MESSAGES]
        return chat
    before = _before_responses(task)
    if before and isinstance(prompt, list) and prompt not in ([], before):
        raise UserError("the turns before the response are not those of the prompt; expected the same conversation")
    if before:
        return before
    if prompt is None:
        prompt = task.pop(MESSAGES, None)
    if prompt is None:
        raise UserError(_missing(PROMPT, list(row), ""))
    return [{"role": "user", "content": prompt}] if isinstance(prompt, str) and _response_chats(task) else prompt


def _chat(value: Any) -> Any:
    """A conversation as messages, any other value as it is."""
    found = conversation(value)
    return value if found is None else found


def _response_chats(task: Mapping[str, Any]) -> dict[str, list[dict[str, Any]]]:
    """Find the responses that are conversations, which `prompt_of` has made messages of."""
    return {name: task[name] for name in RESPONSES if isinstance(task.get(name), list) and task[name]}


def _before_responses(task: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Find the turns that responses which are whole conversations have before their last ones; empty without any."""
    found = {name: chat[:-1] for name, chat in _response_chats(task).items() if len(chat) > 1}
    first, *others = found or [""]
    for other in others:
        if found[other] != found[first]:
            raise UserError(
                f"the columns {first!r} and {other!r} differ before their last turns; expected the same prompt"
            )
    return found.get(first, [])


def _column(row: Mapping[str, Any], column: str, name: str) -> Any:
    """A column, or with dots one within a column that is a mapping."""
    if column in row:
        return row[column]
    value: Any = row
    for part in column.split("."):
        if not isinstance(value, Mapping) or part not in value:
            there = list(value) if isinstance(value, Mapping) else []
            raise UserError(_missing(column, there, f"data.fields.{name}"))
        value = value[part]
    return value


def _missing(column: str, columns: Sequence[str], key: str) -> str:
    there = ", ".join(columns) or "none"
    close = nearest(column, columns)
    if not key:
        example = close or next(
            (name for name in ("question", "problem", "input", "text") if name in columns), "COLUMN"
        )
        return f"there is no column 'prompt' (or 'messages'); there are {there} — data.fields.prompt={example}"
    guess = f"; did you mean {close!r}?" if close is not None else ""
    return f"there is no column {column!r} ({key}); there are {there}{guess}"
