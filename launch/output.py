"""Standard output that may be closed, full, or read by a program that has ended (`| head`)."""

from __future__ import annotations

import errno
import io
import os
import sys

ACTING = frozenset({"launch", "worker", "scale", "export", "stop"})
"""Commands that do their work even if nobody can read what they print. All others end."""


class OutputLost(Exception):
    """What is printed reaches nobody. No OSError: click would end the process for it."""

    def __init__(self, error: OSError) -> None:
        self.reader_left = error.errno == errno.EPIPE
        super().__init__(f"standard output cannot be written: {error.strerror}")


class Output(io.TextIOWrapper):
    """Standard output. When it cannot be written, the rest is discarded; raises OutputLost unless `acting`."""

    acting = False

    def write(self, text: str) -> int:
        """Write, or discard."""
        try:
            return super().write(text)
        except OSError as error:
            self._lose(error)
        return len(text)

    def flush(self) -> None:
        """Write what is buffered, or discard it."""
        try:
            super().flush()
        except OSError as error:
            self._lose(error)

    def _lose(self, error: OSError) -> None:
        discard(1)
        lost = OutputLost(error)
        if not self.acting:
            raise lost from error
        if not lost.reader_left:
            print(f"{lost}; going on without it", file=sys.stderr)


def discard(descriptor: int) -> None:
    """Let everything that is written to this descriptor vanish."""
    nowhere = os.open(os.devnull, os.O_RDWR)
    if nowhere != descriptor:
        os.dup2(nowhere, descriptor)
        os.close(nowhere)


def prepare_output(arguments: list[str]) -> None:
    """Open closed standard streams, or a file of the run would get their numbers, and watch standard output."""
    for descriptor in (0, 1, 2):
        try:
            os.fstat(descriptor)
        except OSError:
            discard(descriptor)
    given = _stream(1) if sys.stdout is None else sys.stdout
    assert isinstance(given, io.TextIOWrapper), "standard output is text over bytes"
    output = Output(given.detach(), encoding=given.encoding, errors=given.errors, line_buffering=given.line_buffering)
    output.acting = next((word for word in arguments if not word.startswith("-")), "") in ACTING
    sys.stdout = output
    if sys.stderr is None:
        sys.stderr = _stream(2)


def _stream(descriptor: int) -> io.TextIOWrapper:
    return io.TextIOWrapper(io.BufferedWriter(io.FileIO(descriptor, "w", closefd=False)), "utf-8")
