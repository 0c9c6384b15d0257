"""Rows in the layouts of other tools, as rows with the columns that are read here. Imports no torch.

| layout | a row has | becomes |
| --- | --- | --- |
| ShareGPT | `conversations`, turns with `from` and `value`; `system`, `tools` | `messages`, `tools` |
| Alpaca | `instruction`, and `input` or `output`; `history`, `system` | `prompt`, `response` |
| TRL | `prompt` and `completion`, texts or messages | `prompt`, `response` |
| OpenAI's older one | `functions` | `tools` |
| verl | `reward_model.ground_truth` | `answer` |

A column that is there already under the name that is read here is never replaced: then the row is not in that layout.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from distflow.data.gold import ANSWER
from distflow.data.messages import from_json, from_json_chat, says_training
from distflow.errors import UserError, did_you_mean

CONVERSATIONS, SYSTEM, COMPLETION = "conversations", "system", "completion"
INSTRUCTION, INPUT, OUTPUT, HISTORY = "instruction", "input", "output", "history"
PROMPT, MESSAGES, RESPONSE, TOOLS = "prompt", "messages", "response", "tools"
FUNCTIONS = "functions"
DATA_SOURCE = "data_source"
"""Where a task says which source it is from: the key of data sets in verl's layout."""
_PROMPTS = (PROMPT, MESSAGES, "chosen", "rejected", RESPONSE, COMPLETION)
"""Columns that may be chats."""
_OF_SYSTEM = ("system", "developer")
"""Roles of turns that say what holds for the whole conversation."""
_ROLES = {
    "user": "human user prompter",
    "assistant": "gpt assistant model bot chatgpt bing bard ai",
    "system": "system",
    "tool": "tool tool_response tool_result observation function function_response",
    "call": "function_call tool_call",
}
_ROLE_OF = {name: role for role, names in _ROLES.items() for name in names.split()}
"""What ShareGPT's `from` may be; a call is an assistant's turn."""

Row = dict[str, Any]
Turn = dict[str, Any]


def with_prompt(columns: Collection[str]) -> bool:
    """Tell whether rows with these columns are in a layout of other tools that has the prompt in another column."""
    return CONVERSATIONS in columns or _is_alpaca(columns)


def in_columns(row: Mapping[str, Any], *, named: bool = False) -> Row:
    """The row in the columns that are read here; the same if it is in none of the layouts. `named`: its prompt is by
    data.fields. Raises UserError."""
    found = {name: _turns(from_json_chat(value), name) if name in _PROMPTS else value for name, value in row.items()}
    if MESSAGES not in found and CONVERSATIONS in found:
        found = _of_sharegpt(found)
    elif found.keys().isdisjoint((PROMPT, MESSAGES)) and _is_alpaca(found):
        found = _of_alpaca(found)
    if RESPONSE not in found and PROMPT in found and COMPLETION in found:
        found = _of_completion(found)
    if TOOLS not in found and _are_functions(found.get(FUNCTIONS)):
        found[TOOLS] = found.pop(FUNCTIONS)
    found = _with_system(found, named=named)
    return _with_ground_truth(found)


def _is_alpaca(columns: Collection[str]) -> bool:
    """Alone, `instruction` may stand beside a context of any name, which would be lost."""
    return INSTRUCTION in columns and (INPUT in columns or OUTPUT in columns)


def _are_functions(given: Any) -> bool:
    """Tell whether a column has the schemas of functions."""
    try:
        found = from_json(given, FUNCTIONS)
    except UserError:  # a column of the task
        return False
    return bool(found) and _is_list(found) and all(isinstance(one, Mapping) and "name" in one for one in found)


def _of_sharegpt(row: Row) -> Row:
    given = from_json(row.pop(CONVERSATIONS), CONVERSATIONS)
    if not _is_list(given) or not given:
        raise UserError(f"the column {CONVERSATIONS!r} is {str(given)[:60]!r}; expected a list of turns")
    row[MESSAGES] = _turns(given, CONVERSATIONS)
    return row


def _turns(given: Any, column: str) -> Any:
    """ShareGPT's turns as messages, one alone too, as they stand in `chosen`; all else as it is."""
    if _is_sharegpt(given):
        given = [given]
    if not _is_list(given) or not any(map(_is_sharegpt, given)):
        return given
    found: list[Any] = []
    for number, turn in enumerate(given):
        made = _message(turn, f"turn {number} of {column!r}") if _is_sharegpt(turn) else turn
        before = found[-1] if found else None
        if isinstance(before, dict) and _may_join(before, made):
            found[-1] = {**before, "tool_calls": [*before.get("tool_calls", []), *made["tool_calls"]]}
        else:
            found.append(made)
    return found


def _is_sharegpt(turn: object) -> bool:
    return isinstance(turn, Mapping) and "from" in turn and "value" in turn and "role" not in turn


def _message(turn: Mapping[str, Any], where: str) -> Turn:
    name, value = turn["from"], turn["value"]
    role = _ROLE_OF.get(name.strip().lower()) if isinstance(name, str) else None
    if role is None:
        raise UserError(f"{where} is from {str(name)[:60]!r}: {did_you_mean(str(name), tuple(_ROLE_OF))}")
    rest = {key: inner for key, inner in turn.items() if key not in ("from", "value")}
    if role != "call":
        return {"role": role, "content": value, **rest}
    return {"role": "assistant", "content": None, "tool_calls": _calls(value, where), **rest}


def _calls(value: Any, where: str) -> list[Turn]:
    """The calls of a function_call turn: a JSON object with name and arguments, or a list of them, mostly as text."""
    try:
        given = from_json(value, CONVERSATIONS)
    except UserError as error:
        raise UserError(f"{where} calls a function, and its value is no JSON: {str(value)[:60]!r}") from error
    calls = given if _is_list(given) else [given]
    if not calls or not all(isinstance(call, Mapping) and isinstance(call.get("name"), str) for call in calls):
        raise UserError(f"{where} calls a function: {str(value)[:60]!r}; expected {{name: …, arguments: …}}")
    return [
        {"type": "function", "function": {"name": call["name"], "arguments": call.get("arguments") or {}}}
        for call in calls
    ]


def _may_join(before: Turn, turn: Any) -> bool:
    """Tell whether two turns of an assistant are one: what it says before it calls, and calls side by side."""
    known = {"role", "content", "tool_calls"}
    calls = isinstance(turn, dict) and turn.keys() <= known and "tool_calls" in turn
    return calls and before.keys() <= known and before.get("role") == "assistant"


def _of_alpaca(row: Row) -> Row:
    parts = [row.pop(name, None) for name in (INSTRUCTION, INPUT)]
    for name, part in zip((INSTRUCTION, INPUT), parts, strict=True):
        if part is not None and not isinstance(part, str):
            raise UserError(f"the column {name!r} is {str(part)[:60]!r}, a {type(part).__name__}; expected text")
    prompt: Any = "\n".join(part for part in parts if part and part.strip())
    if HISTORY in row:
        prompt = [*_history(row.pop(HISTORY)), {"role": "user", "content": prompt}]
    row[PROMPT] = prompt
    if OUTPUT in row and RESPONSE not in row:
        row[RESPONSE] = row.pop(OUTPUT)
    return row


def _history(given: Any) -> list[Turn]:
    """Earlier turns, in pairs of what was said and answered."""
    pairs = given or []
    if not _is_list(pairs) or not all(_is_list(pair) and len(pair) == 2 for pair in pairs):
        raise UserError(f"the column {HISTORY!r} is {str(given)[:60]!r}; expected pairs [instruction, response]")
    return [
        {"role": role, "content": text}
        for pair in pairs
        for role, text in zip(("user", "assistant"), pair, strict=True)
    ]


def _of_completion(row: Row) -> Row:
    """Return what a model is to write behind `prompt`. Turns of the prompt are context: only the completion is
    trained on."""
    completion, prompt = row.pop(COMPLETION), row[PROMPT]
    if _is_list(completion) and len(completion) > 1:
        before = prompt if _is_list(prompt) else [{"role": "user", "content": prompt}]
        prompt, completion = [*before, *completion[:-1]], completion[-1:]
        row[PROMPT] = [_as_context(turn) if place < len(before) else turn for place, turn in enumerate(prompt)]
    elif _is_list(prompt):
        row[PROMPT] = [_as_context(turn) for turn in prompt]
    row[RESPONSE] = completion
    return row


def _as_context(turn: Any) -> Any:
    spoken = isinstance(turn, Mapping) and turn.get("role") == "assistant"
    return {**turn, "weight": 0} if spoken and not any(map(says_training, turn)) else turn


def _with_system(row: Row, *, named: bool) -> Row:
    """The row with its column `system` as the first turn of each conversation in it; a text that is the prompt becomes
    a user's turn then."""
    given = _system_of(row)
    if given is None:
        return row
    chats = {name: row[name] for name in _PROMPTS if _is_list(row.get(name)) and _is_conversation(name, row[name])}
    prompt = row.get(PROMPT)
    if isinstance(prompt, str) and (named or not chats):
        chats[PROMPT] = [{"role": "user", "content": prompt}] if given else prompt
    if not chats:
        return row
    rest = {name: value for name, value in row.items() if name != SYSTEM}
    return rest | ({name: _behind(given, turns, name) for name, turns in chats.items()} if given else {})


def _system_of(row: Row) -> Any:
    """The content of the column `system`, a text or parts of one, as it is, as a message or as the only one of a list;
    blank if it says nothing, None if it is none, such as a column of the task."""
    given: Any = row.get(SYSTEM)
    if SYSTEM not in row:
        return None
    if _is_list(given) and len(given) == 1 and isinstance(given[0], Mapping) and "role" in given[0]:
        (given,) = given
    if isinstance(given, Mapping) and given.get("role") in _OF_SYSTEM:
        given = given.get("content")
    parts: Any = given if _is_list(given) else [given]
    texts = [part.get("text") if isinstance(part, Mapping) else part for part in parts]
    if given is None or not texts:
        return ""
    if isinstance(given, Mapping) or not all(isinstance(text, str) for text in texts):
        return None
    parts = [{"type": "text", "text": part} if isinstance(part, str) else part for part in parts]
    return (given if isinstance(given, str) else parts) if "".join(map(str, texts)).strip() else ""


def _is_conversation(name: str, turns: Sequence[Any]) -> bool:
    """Tell whether a column has the beginning of a conversation, and not the response to a prompt alone."""
    return bool(turns) and (name in (PROMPT, MESSAGES) or len(turns) > 1)


def _behind(system: Any, turns: Sequence[Any], name: str) -> list[Any]:
    """The turns behind the system's; raises UserError if they begin with another one."""
    first = turns[0] if isinstance(turns[0], Mapping) else {}
    if first.get("role") not in _OF_SYSTEM:
        return [{"role": "system", "content": system}, *turns]
    if _text_of(first.get("content")) != _text_of(system):
        raise UserError(
            f"the column {SYSTEM!r} and the first turn of {name!r} are two different system turns; keep one"
        )
    return [*turns]


def _text_of(content: Any) -> Any:
    return "".join(str(part.get("text")) for part in content) if _is_list(content) else content


def _with_ground_truth(row: Row) -> Row:
    """The row with the answer of verl's layout, where it has none of its own."""
    truth = row.get("reward_model")
    if row.get(ANSWER) is not None or truth is None:
        return row
    if isinstance(truth, str) and truth.lstrip().startswith("{"):
        truth = from_json(truth, "reward_model")
    if isinstance(truth, Mapping) and "ground_truth" in truth:
        row[ANSWER] = truth["ground_truth"]
    return row


def _is_list(value: object) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, (str, bytes))
