"""What the system says about a process that does not speak for itself. Linux: /proc."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

PROC = Path("/proc")
STATES: Mapping[str, str] = {
    "R": "running",
    "S": "sleeping",
    "D": "in uninterruptible sleep (state D): it waits for a device or a file system",
    "T": "stopped (state T)",
    "t": "stopped by a debugger (state t)",
    "Z": "dead and not reaped yet (state Z)",
    "I": "idle",
}
HALTED = frozenset("TtD")
"""In these states a process can neither answer nor take a signal."""


def state_of(pid: int) -> str | None:
    """The letter that `ps` shows; None if there is no such process."""
    try:
        text = (PROC / str(pid) / "stat").read_text(encoding="utf-8", errors="replace")
    except (FileNotFoundError, ProcessLookupError):
        return None
    return text[text.rindex(")") + 2]


def describe_state(pid: int) -> str:
    """In words, with the place in the kernel if it hangs there and the system tells it."""
    state = state_of(pid)
    if state is None:
        return "gone"
    words = STATES.get(state, f"in state {state}")
    place = _kernel_place(pid) if state == "D" else ""
    return f"{words}, in {place}" if place else words


def catches(pid: int, number: int) -> bool:
    """Whether a process has a handler for a signal; without one the signal might end it."""
    try:
        lines = (PROC / str(pid) / "status").read_text().splitlines()
    except (FileNotFoundError, ProcessLookupError):
        return False
    mask = next(int(line.split()[1], 16) for line in lines if line.startswith("SigCgt:"))
    return bool(mask >> (number - 1) & 1)


def _kernel_place(pid: int) -> str:
    try:
        place = (PROC / str(pid) / "wchan").read_text().strip()
    except OSError:
        # Not every system lets others read it.
        return ""
    return "" if place == "0" else place
