import os
import subprocess
import sys

from distflow.comm.processes import process_alive, started_at


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
