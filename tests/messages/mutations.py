"""Valid messages with something wrong in them: at random, repeatable by the seed."""

from __future__ import annotations

import copy
import math
import random
from typing import Any

WRONG: tuple[Any, ...] = (
    None, True, False, -1, 0, 1, 2, 1 << 31, 1 << 40, (1 << 63) - 1, -(1 << 63), (1 << 64) - 1, 1_000_000_000,
    0.5, math.inf, -math.inf, math.nan, "", "0", "x", "no/such/name", "rollout/9", "é\0\n", "x" * 3000, b"",
    b"\xff" * 9, [], [[]], [None], [0] * 50, {}, {"": 0}, {"flow": {"deep": [1]}}, [[[[[[[[]]]]]]]],
)  # fmt: skip


def mutated(value: Any, rng: random.Random) -> Any:
    """A copy in which one to three things are wrong."""
    value = copy.deepcopy(value)
    for _ in range(rng.choice((1, 1, 1, 2, 3))):
        value = _broken(value, rng)
    return value


def _broken(value: Any, rng: random.Random) -> Any:
    """Go down a random way, and change what stands at its end."""
    if isinstance(value, dict) and value and rng.random() < 0.9:
        key = rng.choice(list(value))
        change = rng.random()
        if change < 0.08:
            del value[key]
        elif change < 0.14:
            value[rng.choice(("other", b"bytes", 7, key + "x" if isinstance(key, str) else "y"))] = value[key]
        else:
            value[key] = _broken(value[key], rng)
        return value
    if isinstance(value, list) and value and rng.random() < 0.9:
        place, change = rng.randrange(len(value)), rng.random()
        if change < 0.08:
            del value[place]
        elif change < 0.16:
            value.insert(place, copy.deepcopy(rng.choice([*value, *WRONG])))
        elif change < 0.18:
            value *= 50
        else:
            value[place] = _broken(value[place], rng)
        return value
    return _leaf(value, rng)


def _leaf(value: Any, rng: random.Random) -> Any:
    if rng.random() < 0.5:
        return copy.deepcopy(rng.choice(WRONG))
    if isinstance(value, bytes) and value:
        return garbled(value, rng)
    if isinstance(value, str) and value:
        place = rng.randrange(len(value))
        return value[:place] + rng.choice(("", "/", "\0", "9", "../", "x" * 300)) + value[place + 1 :]
    if type(value) is int:
        return max(-(1 << 63), min((1 << 64) - 1, value + rng.choice((-1, 1, 7, 1 << 20, -value - 1))))
    return copy.deepcopy(rng.choice(WRONG))


def garbled(data: bytes, rng: random.Random) -> bytes:
    """Bytes cut, lengthened, or with some of them changed."""
    found, change = bytearray(data), rng.random()
    if change < 0.25:
        return bytes(found[: rng.randrange(len(found) + 1)])
    if change < 0.4:
        return bytes(found) + rng.randbytes(rng.randrange(1, 20))
    for _ in range(rng.randrange(1, 5)):
        if found:
            found[rng.randrange(len(found))] = rng.choice((0, 0xFF, 0xC1, 0xDD, 0xDF, rng.randrange(256)))
    return bytes(found)
