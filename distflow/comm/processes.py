"""Processes of this machine: told from later ones with the same number, whatever the clock does; named; measured."""

from __future__ import annotations

import os
from pathlib import Path

from setproctitle import setproctitle, setthreadtitle

_TICKS = os.sysconf("SC_CLK_TCK")
_STARTED = 19
"""Place of the start time in /proc/<pid>/stat, counted from the state, which follows the name in brackets."""


def started_at(pid: int) -> float | None:
    """When a process started, in seconds since the machine did; None if there is none, or only its zombie.

    Seconds since 1970, which the system can tell as well, shift with every correction of the clock: then a process
    that lives would look like a stranger.
    """
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except (FileNotFoundError, ProcessLookupError):
        return None
    fields = text[text.rindex(")") + 1 :].split()
    return None if fields[0] in "ZX" else int(fields[_STARTED]) / _TICKS


def name_process(title: str) -> None:
    """Give this process a title for ps.

    Its short name has no blank: Slurm may read /proc/<pid>/stat to find a job's processes, and takes one with a blank
    in its name for another's child, which it then neither signals nor kills.
    """
    setproctitle(title)
    setthreadtitle("distflow")


def resident_mb() -> float:
    """Memory of this process that is in use, shared pages included, in MiB."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return round(pages * os.sysconf("SC_PAGE_SIZE") / 2**20, 1)


def process_alive(pid: int, started: float) -> bool:
    """Whether the process with this number that started at `started` (as `started_at` said) still runs."""
    return started_at(pid) == started
