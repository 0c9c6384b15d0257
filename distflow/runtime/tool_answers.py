"""What tools have answered in an episode, in the form in which it is recorded: `ctx.once` of generate steps.

A sample that is replayed elsewhere gets the answers that its tools gave before: nothing is bought, sent or deleted
twice. Each is known by its call number, as what the model has written is, and by the name and the arguments that it
was asked with.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import msgspec
from xxhash import xxh3_64_intdigest

from distflow.exchange.partials import ANSWER_BYTES

MOST_BYTES = 16 << 10
"""Of one answer."""
_VALUES = (bool, float, str, bytes, type(None))


def packed(name: str, value: object, had: int) -> bytes:
    """Write an answer for the record; `had`: bytes of the sample's other answers. Raises TypeError for what no record
    can hold, ValueError for what is too long."""
    for place, what in _wrong(value, "the answer"):
        raise TypeError(
            f"ctx.once({name!r}): {place} is a {what}; expected None, bool, numbers, text, bytes, and lists and dicts "
            "of them: return the part of it that the step needs"
        )
    try:
        data = msgspec.msgpack.encode(value)
    except (ValueError, OverflowError) as error:
        raise TypeError(f"ctx.once({name!r}): the answer cannot be recorded: {error}") from error
    if len(data) > MOST_BYTES or had + len(data) > ANSWER_BYTES:
        raise ValueError(
            f"ctx.once({name!r}): the answer has {len(data)} bytes, after {had} of the sample's earlier ones; expected "
            f"at most {MOST_BYTES}, and {ANSWER_BYTES} in all: return less, or the name of where it is kept"
        )
    return data


def unpacked(data: bytes) -> Any:
    """Read an answer. Tuples have become lists."""
    return msgspec.msgpack.decode(data)


def question(name: str, args: Sequence[object], kwargs: Mapping[str, object]) -> int:
    """Tell questions apart by name and arguments, those that are no values by their types: 62 bits."""
    given = [("", value) for value in args] + sorted(kwargs.items())
    shown = [(key, type(value).__qualname__ if any(_wrong(value, "")) else repr(value)) for key, value in given]
    return xxh3_64_intdigest(repr((name, shown)).encode(errors="surrogatepass")) >> 2


def _wrong(value: object, place: str) -> Iterator[tuple[str, str]]:
    """What is no plain value in here: where, and its type."""
    if type(value) in _VALUES:
        return
    if type(value) is int:
        if not -(1 << 63) <= value < 1 << 64:
            yield place, "number of more than 64 bits"
    elif isinstance(value, list | tuple) and type(value) in (list, tuple):
        for number, entry in enumerate(value):
            yield from _wrong(entry, f"{place}[{number}]")
    elif isinstance(value, dict) and type(value) is dict:
        for key, entry in value.items():
            if type(key) is str:
                yield from _wrong(entry, f"{place}[{key!r}]")
            else:
                yield f"key {key!r} of {place}", type(key).__name__
    else:
        yield place, type(value).__name__
