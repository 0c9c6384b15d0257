"""The side of a script: say who is there, then run whoever is named until standard input ends.

From the import of this module on, everything else that is printed goes to standard error: import it first.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Mapping

Turn = Callable[[], Mapping[str, float]]

_ANSWERS = os.fdopen(os.dup(1), "w", encoding="utf-8")
os.dup2(2, 1)


def serve(turns: Mapping[str, Turn], left_out: Mapping[str, str]) -> None:
    """Answer until nobody asks any more."""
    _answer({"ready": list(turns), "left_out": dict(left_out)})
    for line in sys.stdin:
        _answer(dict(turns[line.strip()]()))


def _answer(value: object) -> None:
    _ANSWERS.write(json.dumps(value) + "\n")
    _ANSWERS.flush()
