"""The side of a script: say who is there, then run whoever is named until standard input ends."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Mapping

Turn = Callable[[], Mapping[str, float]]


def answers() -> Callable[[object], None]:
    """A function that writes answers. From here on everything else that is printed goes to standard error."""
    out = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)

    def answer(value: object) -> None:
        out.write(json.dumps(value) + "\n")
        out.flush()

    return answer


def serve(answer: Callable[[object], None], turns: Mapping[str, Turn], left_out: Mapping[str, str]) -> None:
    """Answer until nobody asks any more."""
    answer({"ready": list(turns), "left_out": dict(left_out)})
    for line in sys.stdin:
        answer(dict(turns[line.strip()]()))
