"""What surrounds users' code, whatever it is: a copy of the process that it forks ends where the code does, and nothing
that it calls ends an event loop which many share.

A copy that becomes another program (`exec`), or ends by itself, as those of `subprocess`, `pty` and `multiprocessing`
do, is none of ours. One that comes back would go on as a second worker, with the sockets of the first: so does one
whose `exec` has failed. It ends where it comes back, and says so on standard error; the first one goes on.
"""

from __future__ import annotations

import asyncio
import os
import selectors
import sys
import traceback
from collections.abc import Callable
from contextlib import suppress
from contextvars import Context
from types import TracebackType
from typing import Any, NoReturn, Self, TypeVarTuple, Unpack

from distflow import log

Ts = TypeVarTuple("Ts")
_BACK = (
    "a process that your code has forked came back from it into distflow, and is ended: let it end by os._exit, or "
    "start it by subprocess or multiprocessing"
)


def end_copy(process: int, error: BaseException | None = None) -> None:
    """End this process if it is a copy of `process`, with what has been raised there; else return."""
    if os.getpid() != process:
        _end(error)


def _end(error: BaseException | None) -> NoReturn:
    code, text = 0, _BACK
    try:
        if isinstance(error, SystemExit) and (error.code is None or isinstance(error.code, int)):
            code, text = error.code or 0, ""  # It has said how it ends.
        elif error is not None:
            code = 1
            text = f"{''.join(traceback.format_exception(error))}{text}"
        # Not by sys.stderr, whose lock another thread may have held: there is no other thread now.
        if text:
            os.write(2, f"{text}\n".encode(errors="backslashreplace"))
    finally:
        os._exit(code)


class UsersCode:
    """A context in which users' code is called: a copy of this process ends where that has come to its end."""

    __slots__ = ("_process",)

    def __enter__(self) -> Self:
        self._process = os.getpid()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        end_copy(self._process, error)


class _WatchedSelector(selectors.DefaultSelector):
    """Tells when its loop waits."""

    def __init__(self, waits: Callable[[], None]) -> None:
        super().__init__()
        self._process = os.getpid()
        self._waits = waits

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        """As any selector's."""
        # Whatever woke a copy would be lost to the first.
        end_copy(self._process)
        if timeout is None or timeout > 0:
            self._waits()
        return super().select(timeout)


class UsersLoop(asyncio.SelectorEventLoop):
    """An event loop for users' coroutines. In a copy, which has its sockets in common with the first, nothing else of
    it runs once the coroutine that has forked waits or ends. `waits` is called when it has nothing left to run: then it
    waits, for a socket, for a time, or for another thread."""

    def __init__(self, waits: Callable[[], None] = lambda: None) -> None:
        self._process = os.getpid()
        super().__init__(_WatchedSelector(waits))

    def run_forever(self) -> None:
        """As any loop's."""
        log.note_origins()
        super().run_forever()

    def call_soon(
        self, callback: Callable[[Unpack[Ts]], object], *args: *Ts, context: Context | None = None
    ) -> asyncio.Handle:
        """As any loop's."""
        return super().call_soon(self._run_here, callback, args, context=context)

    def _run_here(self, callback: Callable[..., object], args: tuple[Any, ...]) -> None:
        """Run what may be a step of a user's task."""
        end_copy(self._process)
        try:
            callback(*args)
        finally:
            if os.getpid() != self._process:
                _end(sys.exception() or _error_of(callback))


def _error_of(callback: Callable[..., object]) -> BaseException | None:
    """What a task has raised in its last step, if that was one."""
    task = callback.__self__ if hasattr(callback, "__self__") else None
    with suppress(asyncio.CancelledError):
        return task.exception() if isinstance(task, asyncio.Task) and task.done() else None
    return None


class SharedLoop(UsersLoop):
    """One on which the coroutines of many live, of whom none may end it."""

    def __init__(self, waits: Callable[[], None]) -> None:
        super().__init__(waits)
        self.over = False
        """It was ended by whom it belongs to."""

    def end(self) -> None:
        """End it."""
        self.over = True
        super().stop()

    def stop(self) -> None:
        """Raises RuntimeError."""
        raise RuntimeError(_SHARED.format("stop()"))

    async def shutdown_default_executor(self, timeout: float | None = None) -> None:
        """Raises RuntimeError."""
        raise RuntimeError(_SHARED.format("shutdown_default_executor()"))


_SHARED = (
    "loop.{} would end the event loop for all episodes of this worker, which share it: let a step return, or raise "
    "something, to end its own episode"
)
