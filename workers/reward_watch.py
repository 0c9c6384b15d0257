"""Tells of a reward function that does not come back: in the worker's own process it cannot be ended."""

from __future__ import annotations

import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from distflow.flow.user_frames import user_frames
from distflow.runtime.process_record import current_frames
from distflow.workers import reward_judging

LATE_S = 60.0
"""A call that takes longer is told, once."""
POLL_S = 5.0


@dataclass(slots=True)
class _Call:
    since: float
    tell: Callable[[str], None]
    told: bool = False


class RewardWatch:
    """Looks at all threads of this process that judge samples; its own thread starts with the first of them."""

    def __init__(self, late_s: float = LATE_S, poll_s: float = POLL_S) -> None:
        self._late_s, self._poll_s = late_s, poll_s
        self._calls: dict[int, _Call] = {}
        self._thread: threading.Thread | None = None

    @contextmanager
    def over(self, tell: Callable[[str], None]) -> Iterator[None]:
        """Within it, `tell(stack)` is called by another thread if `begin` is not called for too long."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="reward watch", daemon=True)
            self._thread.start()
        me = threading.get_ident()
        self._calls[me] = _Call(time.monotonic(), tell)
        try:
            yield
        finally:
            del self._calls[me]

    def begin(self) -> None:
        """The next sample begins."""
        call = self._calls.get(threading.get_ident())
        if call is not None:
            call.since = time.monotonic()

    def _run(self) -> None:
        while True:
            time.sleep(self._poll_s)
            for thread, call in list(self._calls.items()):
                if not call.told and time.monotonic() - call.since >= self._late_s:
                    call.told = True
                    call.tell(stack_of(thread))


def stack_of(thread: int) -> str:
    """The frames of the user's function in a thread; empty if it is not there."""
    frames = current_frames()
    if thread not in frames:
        return ""
    found = traceback.extract_stack(frames[thread])
    ours = max((n for n, frame in enumerate(found) if frame.filename == reward_judging.__file__), default=-1)
    return "".join(traceback.format_list(user_frames(found[ours + 1 :]))).rstrip()
