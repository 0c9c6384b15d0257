"""The one door for messages: a conversation as data has it, in the form in which all that follows expects it.

What a row, a data source or a response says of a conversation is read here and nowhere else: its turns, the calls of
tools in them, the tools themselves, and which turns are trained on. Imports no torch.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from math import isfinite
from typing import Any

from distflow.data.gold import as_written
from distflow.errors import UserError

Message = Mapping[str, Any]
ASSISTANT = "assistant"
_FUNCTION = "function"
"""OpenAI's older role for what a tool has returned."""
TRAINS = "train"
"""Key of a message that is not trained on, whose value is False then; no other message has it."""
_TRAINED = frozenset(
    (
        *("weight", "train", "trainable", "training", "trained", "istrained", "dotrain", "trainon", "trainonturn"),
        *("supervise", "supervised", "learn", "learnable", "loss", "lossscale", "lossweight", "lossmask"),
        *("steplossmask", "computeloss", "calculateloss", "withloss", "hasloss"),
    )
)
"""Names, less case and all but letters, under which formats say that a turn is trained on: 1 or true, 0 or false."""
_NOT_TRAINED = frozenset(
    (
        *("ignore", "ignored", "ignoreloss", "maskloss", "noloss", "skiploss", "notrain", "notraining"),
        *("skiptraining", "excludefromloss"),
    )
)
"""Those under which they say that it is not."""
_OF_TRAINING = frozenset(
    (
        *("train", "trained", "training", "trainable", "loss", "losses", "mask", "masked", "unmasked", "masking"),
        *("weight", "weights", "weighted", "label", "labels", "supervise", "supervised", "learn", "learned"),
        *("target", "gradient", "backprop"),
    )
)
"""Names with one of these words may say either; with 0 or 1 they are refused."""
_WORD = re.compile("[A-Z]?[a-z]+|[A-Z]+")
_TRAINED_IN_PART = ("train_detail", "training_detail")
"""Names under which formats say which characters of a turn are trained on."""
_CALLS, _FUNCTION_CALL, _ARGUMENTS = "tool_calls", "function_call", "arguments"
_TEXT_PARTS = ("text", "input_text", "output_text")
"""Types of the parts of a content that are text."""
_REPR = re.compile(r"\[\s*\{\s*'(?:role|content|from|value)'\s*:")
"""How Python writes a list of turns, and pandas a column of such lists in a CSV."""


class TableRow(dict[str, Any]):
    """A row of a table whose structs have the keys of all rows: a null in one may stand for a key that it lacks."""


class TableObject(dict[str, Any]):
    """An object of a table that has keys of its own (Arrow's map): a null in it was written by somebody."""


def without_nulls(value: Any) -> Any:
    """Leave out the keys of objects whose values are null, at every depth; items of lists stay, and so does text."""
    if isinstance(value, TableObject):
        return TableObject({key: without_nulls(inner) for key, inner in value.items()})
    if isinstance(value, Mapping):
        return {key: without_nulls(inner) for key, inner in value.items() if inner is not None}
    if isinstance(value, (list, tuple)):
        return [without_nulls(inner) for inner in value]
    return value


def from_json(value: Any, column: str) -> Any:
    """The value of a column that may be JSON text; None for a blank one. Raises UserError for text that is no JSON."""
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value) if value.strip() else None
    except (ValueError, RecursionError) as error:
        raise UserError(
            f"the column {column!r} is text, but no JSON: {error} — json.dumps(…) writes lists as JSON"
        ) from error


def from_json_chat(value: object) -> Any:
    """The conversation that a text is in JSON; any other value as it is. Raises UserError for one that Python wrote."""
    if not isinstance(value, str) or not value.lstrip().startswith("["):
        return value
    if _REPR.match(value.lstrip()):
        raise UserError(
            f"it has messages as Python writes them, which is no JSON: {value[:60]!r} — json.dumps(messages) before "
            "the file is written"
        )
    found = _decoded(value, list)
    turns = found if isinstance(found, list) else []
    written = all(isinstance(one, Mapping) and isinstance(one.get("role"), str) for one in turns)
    return turns if turns and written else value


def conversation(value: object) -> list[dict[str, Any]] | None:
    """The messages of a value that is a conversation, as a list or as JSON text; None for any other value.

    Raises UserError for a conversation with something that is no message.
    """
    value = from_json_chat(value)
    if not isinstance(value, Sequence) or isinstance(value, (str, bytes)) or not value:
        return None
    return [_message(number, message) for number, message in enumerate(value)]


def tools_of(given: object) -> Sequence[Mapping[str, Any]]:
    """The schemas of functions in a column, which may be JSON text, in the form of OpenAI that chat templates expect.

    Raises UserError for anything else.
    """
    found = from_json(given, "tools")
    if found is None:
        return ()
    if isinstance(found, str) or not isinstance(found, Sequence) or not all(isinstance(one, Mapping) for one in found):
        raise UserError(f"the column 'tools' is {str(given)[:60]!r}; expected a list of function schemas")
    return [_schema(one) for one in found]


def _schema(tool: Mapping[str, Any]) -> Mapping[str, Any]:
    bare = "name" in tool and "function" not in tool and tool.get("type", "function") == "function"
    return {"type": "function", "function": {key: tool[key] for key in tool if key != "type"}} if bare else tool


def last_turn(value: object, name: str) -> dict[str, Any]:
    """A response in a column as a message: a text, or the last turn of some, an assistant's. Raises UserError."""
    found = conversation(value)
    if found is not None and found[-1]["role"] == ASSISTANT:
        return found[-1]
    if isinstance(value, (str, int)) or (isinstance(value, float) and isfinite(value)):
        return {"role": ASSISTANT, "content": as_written(value)}
    raise UserError(
        f"the column {name!r} is {str(value)[:60]!r}; expected text, or chat messages that end with an assistant's turn"
    )


def content_text(message: Message) -> str:
    """The text of a message, that of its parts joined."""
    content = message.get("content") or ""
    return content if isinstance(content, str) else "".join(str(part["text"]) for part in content)


def as_text(messages: Sequence[Message]) -> str:
    """A conversation as reward functions and readers see it: a single turn as it is, several with their roles."""
    if len(messages) == 1:
        return content_text(messages[0])
    return "\n\n".join(f"{message['role']}: {content_text(message)}" for message in messages)


def calls_of(message: Message) -> list[Mapping[str, Any]]:
    """Find the functions that a message calls, each with `name` and `arguments` as far as they are given."""
    calls = message.get(_CALLS) or ()
    return [call["function"] if isinstance(call.get("function"), Mapping) else call for call in calls]


def with_arguments(message: dict[str, Any], *, as_text: bool) -> dict[str, Any]:
    """Write the arguments of a message's calls as objects, or as their JSON text; what is no object stays as it is."""

    def change(call: Mapping[str, Any]) -> dict[str, Any]:
        made = dict(call)
        arguments = made.get(_ARGUMENTS)
        if as_text and isinstance(arguments, Mapping):
            made[_ARGUMENTS] = json.dumps(arguments, ensure_ascii=False)
        elif not as_text:
            made |= {_ARGUMENTS: _decoded(arguments, dict)} if _ARGUMENTS in made else {}
        if isinstance(made.get("function"), Mapping):
            made["function"] = change(made["function"])
        return made

    return message | {_CALLS: [change(call) for call in message[_CALLS]]} if message.get(_CALLS) else message


def says_training(key: str) -> bool:
    """Tell whether a key of a message is a known one for whether its turn is trained on."""
    return _letters(key) in _TRAINED | _NOT_TRAINED


def trains(message: Message) -> bool:
    """Tell whether the data lets a turn be trained on."""
    return bool(message.get(TRAINS, True))


def _message(number: int, given: object) -> dict[str, Any]:
    if not isinstance(given, Mapping) or not isinstance(given.get("role"), str):
        raise UserError(f"message {number} is {str(given)[:60]!r}; expected {{role: user, content: …}}")
    # Templates ask whether a key is there; a null says that it is not.
    message = {key: value for key, value in given.items() if value is not None}
    if "content" in message:
        message["content"] = _content(number, message["content"])
    older = message.pop(_FUNCTION_CALL, None)
    if older or _CALLS in message:
        calls = list(_calls(number, _CALLS, message.get(_CALLS, [])))
        made = {"type": "function", "function": _calls(number, _FUNCTION_CALL, older)} if older else None
        if made is not None and made["function"] not in calls_of({_CALLS: calls}):
            calls.append(made)
        message[_CALLS] = list(map(_with_object, calls))
        if calls:
            message.setdefault("content", None)
    if message["role"] == _FUNCTION:
        message["role"] = "tool"
    if not _lets_train(number, message) and message["role"] == ASSISTANT:
        message[TRAINS] = False
    return message


def _content(number: int, content: object) -> str | list[dict[str, Any]]:
    """The content of a message, its parts with the type that templates look for; raises UserError for no text."""
    if isinstance(content, str):
        return content
    if isinstance(content, list) and all(map(_is_text, content)):
        return [{**part, "type": _TEXT_PARTS[0]} for part in content]
    odd = next((part for part in content if not _is_text(part)), content) if isinstance(content, list) else content
    raise UserError(
        f"message {number} has content that is no text: {str(odd)[:60]!r}; expected a text, or a list of parts {{type: "
        "text, text: …}; what was thought is a message's reasoning_content; images, sound and video are not supported"
    )


def _is_text(part: object) -> bool:
    """Tell whether a part of a content is text: one without a type has nothing but its text."""
    if not isinstance(part, Mapping) or not isinstance(part.get("text"), str):
        return False
    kind = part.get("type")
    return kind in _TEXT_PARTS or (kind is None and not any(part[key] for key in part if key != "text"))


def _with_object(call: Mapping[str, Any]) -> dict[str, Any]:
    """A call whose arguments are an object where they are nothing."""
    made = dict(call)
    if isinstance(made.get("function"), Mapping):
        made["function"] = _with_object(made["function"])
    arguments = made.get(_ARGUMENTS, {})
    if arguments is None or (isinstance(arguments, str) and not arguments.strip()):
        made[_ARGUMENTS] = {}
    return made


def _calls(number: int, key: str, given: object) -> Any:
    """The calls of tools in a message, or the one of an older form, which may be JSON text."""
    found = _decoded(given, list if key == _CALLS else dict)
    calls = found if key == _CALLS else [found]
    if not isinstance(calls, Sequence) or isinstance(calls, str) or not all(isinstance(one, Mapping) for one in calls):
        raise UserError(
            f"message {number} has {key} {str(given)[:60]!r}; expected "
            + ("a list of calls {function: {name: …, arguments: …}}" if key == _CALLS else "{name: …, arguments: …}")
        )
    return list(calls) if key == _CALLS else calls[0]


def _decoded(value: object, kind: type) -> Any:
    """The value of this kind that a text is in JSON; any other value as it is."""
    if not isinstance(value, str):
        return value
    try:
        found = json.loads(value)
    except (ValueError, RecursionError):
        return value
    return found if isinstance(found, kind) else value


def _lets_train(number: int, message: dict[str, Any]) -> bool:
    """Take what a message says of training out of it; raises UserError for anything but yes and no."""
    part = next((key for key in _TRAINED_IN_PART if key in message), None)
    if part is not None:
        raise UserError(f"message {number} has {part}; expected weight: 0 or 1: turns are trained on as a whole or not")
    said = {key: message.pop(key) for key in list(message) if says_training(key)}
    for key, value in said.items():
        if isinstance(value, str) or value not in (0, 1):
            raise UserError(
                f"message {number} has {key}: {value!r}; expected 0 or 1 (false or true): turns are trained on or not, "
                "there are no weights between"
            )
    for key, value in message.items() if message["role"] == ASSISTANT else ():
        if isinstance(value, (bool, int, float)) and value in (0, 1) and _is_of_training(key):
            raise UserError(
                f"message {number} has {key}: {value!r}, which may say that its turn is trained on, or that it is not; "
                "expected weight: 0 or 1 — rename it so, or remove it from the data"
            )
    if len({bool(value) == (_letters(key) in _TRAINED) for key, value in said.items()}) > 1:
        raise UserError(f"message {number} says {said}, which contradict each other; expected one of them")
    return all(bool(value) == (_letters(key) in _TRAINED) for key, value in said.items())


def _is_of_training(key: str) -> bool:
    return not _OF_TRAINING.isdisjoint(word.lower() for word in _WORD.findall(key))


def _letters(key: str) -> str:
    return re.sub(r"[\W\d_]", "", key).lower()
