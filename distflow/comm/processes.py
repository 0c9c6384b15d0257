"""Processes of this machine: identified even if their number is reused, titled, and measured."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from setproctitle import setproctitle, setthreadtitle

_TICKS = os.sysconf("SC_CLK_TCK")
_STARTED = 19
"""Place of the start time in /proc/<pid>/stat, counted from the state, which follows the name in brackets."""


def started_at(pid: int) -> float | None:
    """When a process started, in seconds since boot; None if it does not exist or is a zombie.

    Seconds since 1970 would shift with every correction of the clock, and a running process would look like another.
    """
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except (FileNotFoundError, ProcessLookupError):
        return None
    fields = text[text.rindex(")") + 1 :].split()
    return None if fields[0] in "ZX" else int(fields[_STARTED]) / _TICKS


def module_command(python: str, module: str) -> list[str]:
    """The command `python -m module`, to which modules in the current folder matter only if they do here.

    They would come before the standard library's, so a `random.py` that lies there would end the process.
    """
    here = sys.path and sys.path[0] in ("", os.getcwd()) and not sys.flags.safe_path
    return [python, *([] if here or Path("distflow").is_dir() else ["-P"]), "-m", module]


def name_process(title: str) -> None:
    """Give this process a title for ps.

    Its short name contains no blank: Slurm may read /proc/<pid>/stat to find a job's processes, and mistakes one with a
    blank in its name for another's child, which it then neither signals nor kills.
    """
    setproctitle(title)
    setthreadtitle("distflow")


def resident_mb() -> float:
    """Resident memory of this process including shared pages, in MiB."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return round(pages * os.sysconf("SC_PAGE_SIZE") / 2**20, 1)


def process_alive(pid: int, started: float) -> bool:
    """Whether the process `pid` that started at `started` (from `started_at`) still runs."""
    return started_at(pid) == started
