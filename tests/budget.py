"""Property tests that try as many examples as fit into a budget of seconds, and at least a tenth of them.

`make test-all`, which runs the long tests too, has no such budget: there all examples are tried.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from typing import Any

LEAST = 0.1
unlimited = False
"""Set by tests/conftest.py where the long tests run."""


def within(seconds: float, examples: int) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Skip the remaining examples of a property test (below `@given`) once its seconds are spent.

    `examples` is the test's `max_examples`. Nothing is skipped any more after a failure, since hypothesis repeats and
    reduces what failed.
    """

    def limit(test: Callable[..., None]) -> Callable[..., None]:
        tried, spent, failed = 0, 0.0, False

        @functools.wraps(test)
        def limited(*arguments: Any, **named: Any) -> None:
            nonlocal tried, spent, failed
            if spent > seconds and tried > LEAST * examples and not (failed or unlimited):
                return
            begin = time.monotonic()
            try:
                test(*arguments, **named)
            except BaseException:
                failed = True
                raise
            finally:
                tried, spent = tried + 1, spent + time.monotonic() - begin

        return limited

    return limit
