"""A row of a data source as a prompt: which column is the prompt, which the answer, and what goes into the task."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from distflow.data.sources import PromptText
from distflow.errors import UserError, nearest

PROMPT, MESSAGES, ANSWER, TOOLS = "prompt", "messages", "answer", "tools"
CHOSEN, REJECTED = "chosen", "rejected"
"""Responses to compare; where there is no prompt, two conversations that differ in their last turn."""
GROUND_TRUTH = "reward_model.ground_truth"
"""Where data sets in verl's layout have the answer."""


def check_columns(columns: Sequence[str], fields: Mapping[str, str]) -> None:
    """Raises UserError unless rows with these columns have a prompt, and all columns that `fields` names."""
    for name, column in fields.items():
        if column not in columns and column.partition(".")[0] not in columns:
            raise UserError(_missing(column, columns, f"data.fields.{name}"))
    known = {*fields, *columns}
    if known.isdisjoint((PROMPT, MESSAGES)) and not known >= {CHOSEN, REJECTED}:
        raise UserError(_missing(PROMPT, columns, ""))


def prompt_of(row: Mapping[str, Any], fields: Mapping[str, str]) -> PromptText:
    """The prompt in a row, and its task: all other columns. `fields`: names of columns by what they are.

    A list of messages that ends with an assistant's turn is answered by that turn. Raises UserError.
    """
    check_columns(list(row), fields)
    named = {name: _column(row, column, name) for name, column in fields.items()}
    rest = {key: value for key, value in row.items() if key not in fields.values()}
    task = {**rest, **named}
    prompt = task.pop(PROMPT) if PROMPT in task else task.pop(MESSAGES) if MESSAGES in task else _compared(task, row)
    truth = task.get("reward_model")
    if ANSWER not in task and isinstance(truth, Mapping) and "ground_truth" in truth:
        task[ANSWER] = truth["ground_truth"]
    if isinstance(prompt, str):
        return PromptText(prompt, task, (), _tools(task))
    if not isinstance(prompt, Sequence) or not prompt:
        raise UserError(f"the prompt is {str(prompt)[:60]!r}; expected text, or a list of chat messages")
    messages = [_message(number, message) for number, message in enumerate(prompt)]
    if messages[-1]["role"] == "assistant":
        task.setdefault(ANSWER, _content(messages.pop()))
    if not messages:
        raise UserError("the prompt is one assistant's turn alone; expected a user's turn before it")
    return PromptText(as_text(messages), task, messages, _tools(task))


def _compared(task: Mapping[str, Any], row: Mapping[str, Any]) -> Any:
    """What two conversations have in common that are to be compared."""
    chosen, rejected = task[CHOSEN], task[REJECTED]
    if not all(isinstance(one, Sequence) and not isinstance(one, str) and len(one) > 1 for one in (chosen, rejected)):
        raise UserError(_missing(PROMPT, list(row), ""))
    if chosen[:-1] != rejected[:-1]:
        raise UserError("the columns 'chosen' and 'rejected' differ before their last turns; expected the same prompt")
    return chosen[:-1]


def last_turn(value: object, name: str) -> str:
    """A response in a column: text, or the last turn of chat messages, an assistant's. Raises UserError."""
    if isinstance(value, str):
        return value
    if isinstance(value, Sequence) and value:
        last = _message(len(value) - 1, value[-1])
        if last["role"] == "assistant":
            return _content(last)
    if isinstance(value, (bool, int, float)):
        return str(value)
    raise UserError(
        f"the column {name!r} is {str(value)[:60]!r}; expected text, or chat messages that end with an assistant's turn"
    )


def as_text(messages: Sequence[Mapping[str, Any]]) -> str:
    """A conversation as reward functions and readers see it: a single turn as it is, several with their roles."""
    if len(messages) == 1:
        return _content(messages[0])
    return "\n\n".join(f"{message['role']}: {_content(message)}" for message in messages)


def _content(message: Mapping[str, Any]) -> str:
    content = message.get("content") or ""
    return content if isinstance(content, str) else "".join(str(part["text"]) for part in content)


def _message(number: int, message: object) -> dict[str, Any]:
    if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
        raise UserError(f"message {number} is {str(message)[:60]!r}; expected {{role: user, content: …}}")
    content = message.get("content")
    parts = content if isinstance(content, list) else []
    if not (content is None or isinstance(content, (str, list))) or any(
        not isinstance(part, Mapping) or not isinstance(part.get("text"), str) for part in parts
    ):
        raise UserError(f"message {number} has content that is no text: {str(content)[:60]!r}")
    # Columns of a table give every message all keys; templates ask whether a key is there.
    return {key: value for key, value in message.items() if value is not None}


def _tools(task: Mapping[str, Any]) -> Sequence[Mapping[str, Any]]:
    given = task.get(TOOLS)
    if isinstance(given, str):
        try:
            given = json.loads(given)
        except ValueError as error:
            raise UserError(f"the column {TOOLS!r} is text, but no JSON: {error}") from error
    if given is None:
        return ()
    if not isinstance(given, Sequence) or not all(isinstance(tool, Mapping) for tool in given):
        raise UserError(f"the column {TOOLS!r} is {str(given)[:60]!r}; expected a list of function schemas")
    return given


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
