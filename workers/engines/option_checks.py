"""Checks of `engine_options` that engines of other projects have in common. Plain Python: the plan makes them, too."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from distflow.errors import UserError

DTYPES = ("float32", "bfloat16", "float16")


def check_count(name: str, value: object, *, optional: bool = False) -> None:
    """Raises UserError unless it is a whole number from 1, or none where it is `optional`."""
    whole = isinstance(value, int) and not isinstance(value, bool) and value >= 1
    _check(name, value, whole or (optional and value is None), "1 or more")


def check_flag(name: str, value: object, *, optional: bool = False) -> None:
    """Raises UserError unless it is true or false, or none where it is `optional`."""
    _check(name, value, type(value) is bool or (optional and value is None), "true or false")


def check_share(name: str, value: object) -> None:
    """Raises UserError unless it is none or between 0 and 1."""
    _check(name, value, value is None or (isinstance(value, float) and 0 < value < 1), "a number between 0 and 1")


def check_choice(name: str, value: object, choices: Sequence[str | None], expected: str) -> None:
    """Raises UserError unless it is one of the choices."""
    _check(name, value, value in choices, expected)


def check_args(args: object, title: str) -> None:
    """Raises UserError unless the further arguments, for the engine called `title`, are a mapping."""
    _check("args", args, isinstance(args, Mapping), f"a mapping of {title}'s arguments")


def check_positive(name: str, value: object, expected: str) -> None:
    """Raises UserError unless it is a number above 0."""
    _check(name, value, isinstance(value, int | float) and not isinstance(value, bool) and value > 0, expected)


def check_length(name: str, value: int | None, longest: int) -> None:
    """Raises UserError if samples of `longest` tokens do not fit."""
    if value is not None and value < longest:
        raise UserError(
            f"engine_options.{name} {value} is less than the longest sample of {longest} tokens "
            "(data.max_prompt_tokens + max_new_tokens); raise it or leave it out"
        )


def check_not_taken(args: Mapping[str, Any], taken: Collection[str]) -> None:
    """Raises UserError for arguments among the further ones that distflow sets itself."""
    both = sorted(set(taken) & set(args))
    if both:
        raise UserError(f"engine_options.args: {', '.join(both)} is set by distflow; leave it out")


def supported_dtype(engine: str, title: str, own: str | None, model: Mapping[str, Any]) -> str:
    """The type that the options name, or the model's; raises UserError where the engine cannot compute in it."""
    wanted = own or model.get("dtype") or "float32"
    if wanted not in DTYPES:
        raise UserError(
            f"engine {engine}: models.….dtype is {wanted}, which {title} cannot compute in; use {', '.join(DTYPES)}, "
            "or set engine_options.dtype to one of them"
        )
    return str(wanted)


def _check(name: str, value: object, right: bool, expected: str) -> None:
    if not right:
        raise UserError(f"engine_options.{name} {value!r}: expected {expected}")
