import os
import subprocess
import sys
from pathlib import Path

import pytest

from distflow.comm.processes import module_command, process_alive, started_at


@pytest.mark.parametrize(("first", "options"), [("", []), ("/usr/local/bin", ["-P"])])
def test_the_current_folder_is_searched_for_modules_only_if_it_is_here(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, first: str, options: list[str]
) -> None:
    (tmp_path / "timeit.py").write_text("print('mine')\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [first, *sys.path[1:]])
    command = module_command(sys.executable, "timeit")
    assert command == [sys.executable, *options, "-m", "timeit"]
    told = subprocess.run([*command, "-n1", "-r1"], capture_output=True, text=True, timeout=60, check=True).stdout
    assert (told == "mine\n") == (not options)


def test_a_process_is_known_by_its_number_and_start() -> None:
    started = started_at(os.getpid())
    assert started is not None
    assert process_alive(os.getpid(), started)
    assert not process_alive(os.getpid(), started + 1.0)


def test_the_start_does_not_depend_on_the_clock() -> None:
    """Seconds since the machine started: less than its uptime, whatever the date is."""
    started = started_at(os.getpid())
    with open("/proc/uptime") as file:
        uptime = float(file.read().split()[0])
    assert started is not None
    assert 0 < started <= uptime


def test_a_zombie_and_nobody_are_not_alive() -> None:
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    started = started_at(child.pid)
    assert started is not None
    assert process_alive(child.pid, started)
    child.communicate(b"\n", timeout=60)
    assert started_at(child.pid) is None
    zombie = subprocess.Popen([sys.executable, "-c", ""])
    os.waitid(os.P_PID, zombie.pid, os.WEXITED | os.WNOWAIT)
    assert started_at(zombie.pid) is None
    zombie.wait(timeout=60)
