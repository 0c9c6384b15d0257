"""Looking again and again for what another thread or process does."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

WAIT_S = 20.0


def eventually(what: Callable[[], Any], name: str = "what was waited for") -> Any:
    """What `what` returns as soon as that is true; a failed test after WAIT_S, which says the `name`."""
    deadline = time.monotonic() + WAIT_S
    while not (found := what()):
        assert time.monotonic() < deadline, f"{name}: not within {WAIT_S:g} s"
        time.sleep(0.01)
    return found
