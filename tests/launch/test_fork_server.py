"""The fork server by itself, over its line."""

from __future__ import annotations

import json
import os
import select
import signal
import socket
import time
from dataclasses import asdict
from pathlib import Path

import pytest

from distflow.cluster.processes import Exit
from distflow.comm.addresses import ensure_socket_dir, remove_socket_dir, socket_dir
from distflow.launch.agent.worker_group import ForkServerLine
from tests.interpreters import make_interpreter
from tests.launch.conftest import REPOSITORY

ENTRY = """
import json, os, signal, subprocess, sys, time
from pathlib import Path
from distflow.runtime.process_record import note_term

def entry(document, incarnation):
    document.write_text(json.dumps([incarnation, len(os.listdir("/proc/self/task")), os.environ["OMP_NUM_THREADS"]]))
    print("hello", flush=True)
    return 7

def where(document, incarnation):
    document.write_text(json.dumps([sys.executable, os.getppid(), os.getpid(), os.environ["OMP_NUM_THREADS"]]))
    return 5

def told_to_terminate(document, incarnation):
    os.kill(os.getpid(), signal.SIGTERM)
    child = subprocess.Popen(["sleep", "60"])
    child.terminate()
    document.write_text(str(child.wait(10)))
    return 0

def leaves_early(document, incarnation):
    os._exit(incarnation)

def ends_in_a_term(document, incarnation):
    note_term(document, 3)
    return 0

def sleeps(document, incarnation):
    time.sleep(600)
"""
THREADED = "import threading, time\nthreading.Thread(target=time.sleep, args=(600,), daemon=True).start()\n"


@pytest.fixture
def modules(tmp_path, monkeypatch):
    (tmp_path / "an_entry.py").write_text(ENTRY)
    (tmp_path / "starts_a_thread.py").write_text(THREADED)
    monkeypatch.setenv("PYTHONPATH", f"{REPOSITORY}:{tmp_path}")
    ensure_socket_dir(tmp_path)
    yield tmp_path
    remove_socket_dir(tmp_path)


def messages(line: ForkServerLine, last: str, times: int = 1) -> list[dict]:
    """What the fork server says, up to a message of this kind, or the second one of it."""
    heard = []
    deadline = time.monotonic() + 30
    while sum(last in message for message in heard) < times:
        assert time.monotonic() < deadline, f"waited in vain for {last!r} after {heard}"
        select.select([line], [], [], 1.0)
        heard += line.read()
    return heard


FORKED_OR_NOT = pytest.mark.parametrize("preload", [[], ["starts_a_thread"]], ids=["forked", "fresh interpreter"])


@FORKED_OR_NOT
def test_a_worker_runs_with_one_thread_its_log_and_its_exit_code(modules: Path, preload):
    line = ForkServerLine(modules, "an_entry:entry", preload)
    line.start("rollout/0", 5, modules / "document", modules / "log", threads=3)
    heard = messages(line, "exited")
    line.dismiss()
    assert [next(iter(message)) for message in heard] == ["ready", "started", "exited"]
    ended = {"exited": "rollout/0", "incarnation": 5, "pid": heard[1]["pid"], **asdict(Exit(7))}
    assert heard[-1] == ended
    assert json.loads((modules / "document").read_text()) == [5, 1, "3"]
    assert (modules / "log").read_text() == "hello\n"


@FORKED_OR_NOT
@pytest.mark.parametrize("in_slurm", [True, False])
def test_sigterm_ends_a_worker_but_in_a_job_of_slurm(modules: Path, monkeypatch, preload, in_slurm):
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    if in_slurm:
        monkeypatch.setenv("SLURM_JOB_ID", "7")
    line = ForkServerLine(modules, "an_entry:told_to_terminate", preload)
    line.start("rollout/0", 0, modules / "document", modules / "log", threads=1)
    ended = messages(line, "exited")[-1]
    assert (ended["code"], ended["signal"]) == ((0, None) if in_slurm else (None, signal.SIGTERM))
    if in_slurm:
        # The fork server outlives it too, and its child's own children do not inherit any of this.
        os.kill(line.pid, signal.SIGTERM)
        line.start("rollout/1", 0, modules / "document", modules / "log", threads=1)
        assert messages(line, "exited")[-1]["code"] == 0
        assert (modules / "document").read_text() == "-15"
    line.dismiss()


def test_a_worker_is_executed_by_the_python_that_is_asked_for(modules: Path):
    """Its parent, its log and its exit code are as those of the others; and one that cannot be executed leaves word."""
    python = str(make_interpreter(modules / "v"))
    (modules / "workers").mkdir()
    line = ForkServerLine(modules, "an_entry:where", [])
    line.start("rollout/0", 0, modules / "document", modules / "log", threads=2, python=python)
    heard = messages(line, "exited")
    assert json.loads((modules / "document").read_text()) == [python, line.pid, heard[-1]["pid"], "2"]
    assert (heard[-1]["code"], heard[-1]["signal"]) == (5, None)
    line.start("rollout/0", 1, modules / "document", modules / "log", threads=2, python=f"{modules}/none")
    assert messages(line, "exited")[-1]["code"] == 2
    told = json.loads((modules / "workers" / "rollout-0.failure.json").read_text())
    assert told["message"].endswith(f"cannot be executed — {modules}/none: No such file or directory")
    line.start("rollout/1", 0, modules / "document", modules / "log", threads=1)
    assert messages(line, "exited")[-1]["code"] == 5
    line.dismiss()


@pytest.mark.parametrize(("code", "told"), [(0, (None, None, 0)), (130, (None, None, 130)), (5, (5, None, None))])
def test_an_exit_code_of_success_in_the_midst_of_the_work_is_told_from_an_end(modules: Path, code: int, told: tuple):
    line = ForkServerLine(modules, "an_entry:leaves_early", [])
    line.start("rollout/0", code, modules / "document", modules / "log", threads=1)
    ended = messages(line, "exited")[-1]
    line.dismiss()
    assert (ended["code"], ended["signal"], ended["early"]) == told


def test_an_agent_hears_in_which_term_a_worker_was_done(modules: Path):
    line = ForkServerLine(modules, "an_entry:ends_in_a_term", [])
    line.start("rollout/0", 0, modules / "document", modules / "log", threads=1)
    ended = messages(line, "exited")[-1]
    line.dismiss()
    assert (ended["code"], ended["term"]) == (0, 3)


def test_another_agent_hears_whom_the_nursery_has_and_how_those_ended_that_it_had(modules: Path):
    """The first to connect was killed, say; what it had still asked for is not done twice."""
    first = ForkServerLine(modules, "an_entry:sleeps", [])
    for name in ("rollout/0", "rollout/1"):
        first.start(name, 0, modules / name.replace("/", "-"), modules / "log", threads=1)
    heard = messages(first, "started", times=2)
    pids = {message["started"]: message["pid"] for message in heard if "started" in message}
    os.kill(pids["rollout/1"], signal.SIGKILL)
    messages(first, "exited")
    second = ForkServerLine(modules, "an_entry:sleeps", [])
    assert second.pid is None, "there was a fork server already"
    exited, started, ready = messages(second, "ready")
    assert (exited["exited"], exited["signal"]) == ("rollout/1", signal.SIGKILL)
    assert started == {"started": "rollout/0", "incarnation": 0, "pid": pids["rollout/0"]}
    assert ready["pid"] == first.pid
    for name in ("rollout/0", "rollout/2"):
        second.start(name, 0, modules / name.replace("/", "-"), modules / "log", threads=1)
    # It has read the first of these, too.
    (another,) = messages(second, "started")
    assert another["started"] == "rollout/2"
    os.kill(pids["rollout/0"], signal.SIGKILL)
    assert messages(second, "exited") == [
        {"exited": "rollout/0", "incarnation": 0, "pid": pids["rollout/0"], **asdict(Exit(None, 9))}
    ]
    os.kill(another["pid"], signal.SIGKILL)
    messages(second, "exited")
    second.dismiss()


def test_a_nursery_that_cannot_start_an_agent_goes_on_with_its_workers(modules: Path, capfd):
    """Nothing here says of which run it is; memory or descriptors may be short as well."""
    first = ForkServerLine(modules, "an_entry:sleeps", [])
    first.start("rollout/0", 0, modules / "rollout-0", modules / "log", threads=1)
    pid = messages(first, "started")[-1]["pid"]
    first._socket.close()
    said, deadline = "", time.monotonic() + 30
    while "cannot start a host agent" not in said:
        assert time.monotonic() < deadline, said
        time.sleep(0.1)
        said += capfd.readouterr().out
    assert "is not the folder of a launched run); trying again in 10 s" in said
    second = ForkServerLine(modules, "an_entry:sleeps", [])
    assert second.pid is None, "there was a fork server still"
    assert [message["pid"] for message in messages(second, "ready")] == [pid, first.pid]
    os.kill(pid, signal.SIGKILL)
    messages(second, "exited")
    second.dismiss()


def test_one_that_only_looks_whether_somebody_listens_displaces_no_agent(modules: Path):
    """As `distflow doctor` does."""
    line = ForkServerLine(modules, "an_entry:entry", [])
    messages(line, "ready")
    with socket.socket(socket.AF_UNIX) as visitor:
        visitor.connect(str(socket_dir(modules) / "nursery-0"))
    line.start("rollout/0", 5, modules / "document", modules / "log", threads=3)
    messages(line, "exited")
    assert line.open
    line.dismiss()


def test_what_cannot_be_imported_is_reported(modules: Path):
    line = ForkServerLine(modules, "an_entry:entry", ["no_such_module"])
    (broken,) = messages(line, "broken")
    assert "No module named 'no_such_module'" in broken["broken"]
