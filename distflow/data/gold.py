"""Gold answers: what a row of the data gives as its answer, and whether a text gives the same. Imports no torch.

The answer is `task["answer"]`: a text, a number, true or false, or a list, of which any entry is right. Null is no
answer, and neither are NaN (what pandas makes of null), a blank text (what CSV has for null) and a list of none.

| gold answer | is given by | and not by |
| --- | --- | --- |
| `"7.0"` (text) | `7.0` | `7` |
| `7`, or `7.0` (what a table makes of 7 in a column with a null) | `7`, `7.0`, `7e0` | `07`, `seven` |
| `1e20` | `100000000000000000000`, `1e20` | `1` |
| `true` | `true`, `True` | `1`, `yes` |
| `["12", 12.5, null]` | `12`, `12.5` | `["12", 12.5, null]` |
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from decimal import Decimal
from math import isfinite
from typing import Any, TypeVar

from distflow.errors import UserError

ANSWER = "answer"
FORMS = (
    "{}",
    r"\boxed{{{}}}",
    "<answer>{}</answer>",
    "#### {}",
    "<think></think><answer>{}</answer>",
    r"<think></think><answer>\boxed{{{}}}</answer>",
    "<think></think><answer>#### {}</answer>",
)
"""How a response may give a gold answer: reward functions expect different ones."""
GoldAnswer = str | int | float | bool
FunctionT = TypeVar("FunctionT", bound=Callable[..., Any])

_NUMBER = re.compile(r"-?(0|[1-9]\d*)(\.\d+)?([eE][+-]?\d{1,3})?", re.ASCII)
"""A number as JSON writes it, which has no leading zeros: 007 is no 7."""
_EXACT = 1 << 53
"""Whole numbers from here on are not all floats: of a float, some 16 digits are known."""
_WRITTEN_OUT = range(-5, 22)
"""Decimal places of the first digit, from the point on, within which JavaScript, too, writes numbers without e."""
_NEEDS = "__distflow_needs__"


def needs(*keys: str) -> Callable[[FunctionT], FunctionT]:
    """Declare which keys of a task a reward function cannot do without: rows that lack one are left out."""

    def declare(function: FunctionT) -> FunctionT:
        setattr(function, _NEEDS, keys)
        return function

    return declare


def needed_by(function: Callable[..., Any]) -> tuple[str, ...]:
    """The keys that a reward function declares to need; none if it declares nothing."""
    found: tuple[str, ...] = vars(function).get(_NEEDS, ())
    return found


def has(task: Mapping[str, Any], key: str) -> bool:
    """Tell whether a task has what a reward function needs: a value that is not null, as `answer` a gold answer.

    Raises UserError for an answer of which no text can be the same.
    """
    return bool(gold_answers(task)) if key == ANSWER else task.get(key) is not None


def gold_answers(task: Mapping[str, Any]) -> tuple[GoldAnswer, ...]:
    """The answers of a task, each of them right; none if it has none. Raises UserError for a mapping."""
    return tuple(_entries(task.get(ANSWER)))


def _entries(value: object) -> Iterator[GoldAnswer]:
    if isinstance(value, (list, tuple)):
        for one in value:
            yield from _entries(one)
    elif isinstance(value, float):
        if isfinite(value):
            yield value
    elif isinstance(value, (bool, int)) or (isinstance(value, str) and value.strip()):
        yield value
    elif isinstance(value, Mapping):
        keys = ", ".join(map(str, value)) or "nothing"
        raise UserError(
            f"the answer is a mapping with {keys}; expected text, a number, true or false, or a list of these — "
            "data.fields.answer=COLUMN.KEY says which of its keys it is"
        )


def as_written(value: GoldAnswer) -> str:
    """The text that a person would write for a value of JSON: 11 for 11.0, true, all digits of 1e20.

    Numbers from 1e21 on, and below 1e-6, are written with an e, as JavaScript does.
    """
    if isinstance(value, str):
        return value
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int) or not isfinite(value):
        return str(value)
    # The shortest digits that give this float: 1e23 is no 99999999999999991611392.
    exact = Decimal(repr(value))
    if exact == 0:
        return "0"
    if exact.adjusted() + 1 not in _WRITTEN_OUT:
        return repr(value)
    written = f"{exact:f}"
    return written.rstrip("0").rstrip(".") if "." in written else written


def gives(text: str, answer: GoldAnswer, ignore: str = "") -> bool:
    """Tell whether a text, stripped, is an answer; without the characters in `ignore`, such as `,$`, in both."""
    given = _without(text, ignore)
    if given == _without(as_written(answer), ignore):
        return True
    if isinstance(answer, str):
        return False
    if isinstance(answer, bool):
        return given.lower() == as_written(answer)
    if not _NUMBER.fullmatch(given):
        return False
    if isinstance(answer, float) and not (answer.is_integer() and abs(answer) < _EXACT):
        return float(given) == answer
    return Decimal(given) == int(answer)


def _without(text: str, characters: str) -> str:
    return text.translate(str.maketrans("", "", characters)).strip()
