"""Which part of the work takes a thread's CPU time: timers around functions, each without those that it calls."""

from __future__ import annotations

import functools
import importlib
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any


class ThreadParts:
    """`parts`: by the name of a part, its functions as "module:function" or "module:Class.method".

    A timer costs 1–2 µs a call, which counts for the part that calls; so the sum is more than without timers.
    """

    def __init__(self, parts: Mapping[str, Sequence[str]]) -> None:
        self._spent: dict[tuple[str, str], int] = defaultdict(int)
        self._local = threading.local()
        for part, functions in parts.items():
            for one in functions:
                module, _, path = one.partition(":")
                *owners, name = path.split(".")
                owner = functools.reduce(getattr, owners, importlib.import_module(module))
                setattr(owner, name, self._timed(part, getattr(owner, name)))

    def clear(self) -> None:
        """Begin to count."""
        self._spent.clear()

    def spent_us(self, groups: int) -> dict[str, dict[str, float]]:
        """µs of each part a group, by thread, the costliest first."""
        found: dict[str, dict[str, float]] = defaultdict(dict)
        for (thread, part), spent in sorted(self._spent.items(), key=lambda item: -item[1]):
            found[thread][part] = round(spent / groups / 1000, 1)
        return dict(found)

    def _timed(self, part: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any, **kwargs: Any) -> Any:
            inner: list[int] = self._local.__dict__.setdefault("inner", [])
            began = time.thread_time_ns()
            inner.append(0)
            try:
                return function(*args, **kwargs)
            finally:
                spent = time.thread_time_ns() - began
                self._spent[threading.current_thread().name, part] += spent - inner.pop()
                if inner:
                    inner[-1] += spent

        return timed
