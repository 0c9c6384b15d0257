"""A row of a data source as a prompt: which column is the prompt, which the answer, and what goes into the task."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from distflow.data.sources import PromptText
from distflow.errors import UserError, nearest

PROMPT, MESSAGES, ANSWER, TOOLS = "prompt", "messages", "answer", "tools"
CHOSEN, REJECTED, RESPONSE = "chosen", "rejected", "response"
"""Responses; as conversations they have the prompt before their last turns."""
GROUND_TRUTH = "reward_model.ground_truth"
"""Where data sets in verl's layout have the answer."""


def check_columns(columns: Sequence[str], fields: Mapping[str, str]) -> None:
    """Raises UserError unless rows with these columns have a prompt, and all columns that `fields` names."""
    for name, column in fields.items():
        if column not in columns and column.partition(".")[0] not in columns:
            raise UserError(_missing(column, columns, f"data.fields.{name}"))
    left = [column for column in columns if column not in fields.values()]
    known = {*fields, *left}
    if known.isdisjoint((PROMPT, MESSAGES)) and not known >= {CHOSEN, REJECTED}:
        taken = [f"data.fields.{name}={column}" for name, column in fields.items() if column in (PROMPT, MESSAGES)]
        raise UserError(_missing(PROMPT, left, "") + (f", or remove {taken[0]}" if taken else ""))


def prompt_of(row: Mapping[str, Any], fields: Mapping[str, str]) -> PromptText:
    """The prompt in a row, and its task: all other columns. `fields`: names of columns by what they are.

    A list of messages that ends with an assistant's turn is answered by that turn. Conversations say what the prompt
    is, whatever text stands beside them: `messages`, unless `fields` names the prompt, and responses. Raises UserError.
    """
    check_columns(list(row), fields)
    named = {name: _column(row, column, name) for name, column in fields.items()}
    rest = {key: value for key, value in row.items() if key not in fields.values()}
    task = {**rest, **named}
    prompt = _prompt(task, row, named=PROMPT in fields)
    truth = task.get("reward_model")
    if ANSWER not in task and isinstance(truth, Mapping) and "ground_truth" in truth:
        task[ANSWER] = truth["ground_truth"]
    if isinstance(prompt, str):
        return PromptText(prompt, task, (), _tools(task))
    if not _is_chat(prompt):
        found = f"{str(prompt)[:60]!r}, a {type(prompt).__name__}"
        raise UserError(f"the prompt is {found}; expected text, or a list of chat messages")
    messages = _messages(prompt)
    reply = messages.pop() if messages[-1]["role"] == "assistant" else None
    if reply is not None:
        task.setdefault(ANSWER, _content(reply))
    if not messages:
        raise UserError("the prompt is one assistant's turn alone; expected a user's turn before it")
    return PromptText(as_text(messages), task, messages, _tools(task), reply)


def _prompt(task: dict[str, Any], row: Mapping[str, Any], *, named: bool) -> Any:
    """What the prompt is, taken out of the task. `named`: by data.fields."""
    prompt = task.pop(PROMPT, None)
    if not named and _is_chat(task.get(MESSAGES)) and not _is_chat(prompt):
        return task.pop(MESSAGES)
    before = _before_responses(task)
    if before and _is_chat(prompt) and _messages(prompt) != before:
        raise UserError("the turns before the response are not those of the prompt; expected the same conversation")
    if before:
        return before
    if prompt is None:
        prompt = task.pop(MESSAGES, None)
    if prompt is None:
        raise UserError(_missing(PROMPT, list(row), ""))
    if isinstance(prompt, str) and any(_is_chat(task.get(name)) for name in (CHOSEN, REJECTED, RESPONSE)):
        return [{"role": "user", "content": prompt}]
    return prompt


def _before_responses(task: Mapping[str, Any]) -> list[dict[str, Any]]:
    """What the responses that are whole conversations have before their last turns; empty where there are none."""
    given = {name: task[name] for name in (CHOSEN, REJECTED, RESPONSE) if _is_chat(task.get(name))}
    found = {name: _messages(one[:-1]) for name, one in given.items() if len(one) > 1}
    first, *others = found or [""]
    for other in others:
        if found[other] != found[first]:
            raise UserError(
                f"the columns {first!r} and {other!r} differ before their last turns; expected the same prompt"
            )
    return found.get(first, [])


def _is_chat(value: object) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, (str, bytes)) and bool(value)


def last_turn(value: object, name: str) -> dict[str, Any]:
    """A response in a column as a chat message: a text, or the last turn of some, an assistant's. Raises UserError."""
    if isinstance(value, str):
        return {"role": "assistant", "content": value}
    if isinstance(value, Sequence) and value:
        last = _message(len(value) - 1, value[-1])
        if last["role"] == "assistant":
            return last
    if isinstance(value, (bool, int, float)):
        return {"role": "assistant", "content": str(value)}
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


def _messages(given: Sequence[object]) -> list[dict[str, Any]]:
    return [_message(number, message) for number, message in enumerate(given)]


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
