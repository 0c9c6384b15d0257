"""Children for tests of kept processes and of trackers."""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
import time
from pathlib import Path

from distflow.comm.kept_process import KeptProcess


def tell(reports: str, **report: object) -> None:
    os.write(int(reports), json.dumps(report).encode() + b"\n")


def _stray(folder: Path, name: str) -> None:
    """A helper in a session of its own, whose parent has ended: neither title nor group tells where it is from."""
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            subprocess.Popen([sys.executable, "-c", f"import time; open({str(folder / name)!r}, 'w'); time.sleep(600)"])
            time.sleep(600)
        os._exit(0)
    os.wait()


def with_helpers(folder: str, ends: str, reports: str) -> int:
    """Start helpers; then end with code 7, or wait."""
    _stray(Path(folder), "helper")
    while not (Path(folder) / "helper").exists():
        time.sleep(0.01)
    tell(reports, pid=os.getpid())
    if ends == "yes":
        return 7
    time.sleep(600)
    return 0


def parent_of_helpers(folder: str) -> None:
    """Runs `with_helpers` until it is killed."""
    process = KeptProcess(
        "tests.comm.kept_children:with_helpers", [folder, "no"], f"test {folder}", Path(folder) / "output"
    )
    while not process.read():
        time.sleep(0.01)
    print("started", flush=True)
    time.sleep(600)


def floods(reports: str) -> int:
    """Prints without end."""
    tell(reports, ready=True)
    while True:
        print("x" * 10000)


def finishes(reports: str) -> int:
    """Ends when it is told to."""
    tell(reports, done=True)
    select.select([0], [], [])
    return 3


def echoes(reports: str) -> int:
    """Reports how much it has read, once there is a line's end, then reads no more."""
    read = b""
    while not read.endswith(b"\n"):
        read += os.read(0, 1 << 16)
    tell(reports, read=len(read))
    time.sleep(600)
    return 0


def tracker(start: str, reports: str) -> int:
    """A tracker's process that does what its start file says, life by life; it notes each life in `lives`."""
    lives = Path(start).with_name("lives")
    life = lives.read_text().count("\n") if lives.exists() else 0
    with lives.open("a") as file:
        file.write("life\n")
    plan = json.loads(Path(start).read_text())
    what = plan[min(life, len(plan) - 1)]
    if what == "begins late":
        time.sleep(3)
    if what == "refuses":
        tell(reports, why="no such option")
        return 2
    tell(reports, busy="training step 4", rows=1, behind=3)
    if what == "crashes":
        os.abort()
    if what == "hangs":
        time.sleep(600)
    if what == "raises":
        tell(reports, lost=1, why="training step 4: ValueError: no")
    tell(reports, done=True, behind=0)
    select.select([0], [], [])
    if what == "never ends":
        tell(reports, busy="its end", rows=0, behind=2)
        time.sleep(600)
    return 0
