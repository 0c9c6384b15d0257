"""Ranges of numbers as steps declare them: `>= 0`, or `> 0, <= 1`."""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Mapping

_BOUND = re.compile(r"\s*(>=|<=|>|<)\s*(-?\d+(?:\.\d+)?)\s*")
_HOLDS: Mapping[str, Callable[[float, float], bool]] = {
    ">=": operator.ge,
    "<=": operator.le,
    ">": operator.gt,
    "<": operator.lt,
}


def is_range(text: object) -> bool:
    """Whether it is one: bounds, separated by commas."""
    return isinstance(text, str) and all(_BOUND.fullmatch(bound) for bound in text.split(","))


def within(value: float, text: str) -> bool:
    """Whether a number keeps all bounds; nan keeps none."""
    bounds = [_BOUND.fullmatch(bound) for bound in text.split(",")]
    return all(found is not None and _HOLDS[found[1]](value, float(found[2])) for found in bounds)
