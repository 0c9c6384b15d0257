"""Stacks of workers that answer, that cannot, and that are held."""

from __future__ import annotations

import os
import signal

import psutil
import pytest

import distflow.launch.observe.run_client as stacking
from distflow.launch.cli import run as distflow
from distflow.launch.run.process_table import catches, describe_state, state_of
from distflow.runtime.process_record import render, thread_stacks
from tests.launch.conftest import await_that

LONG = {"steps": 10_000}


@pytest.fixture(autouse=True)
def impatient(monkeypatch):
    monkeypatch.setattr(stacking, "ANSWER_S", 0.5)


def stacks(run, capsys, *arguments: str) -> str:
    assert distflow(["stacks", run.run_dir.name, "--runs-dir", str(run.run_dir.parent), *arguments]) == 0
    return capsys.readouterr().out


def test_live_workers_tell_their_stacks_and_waits(fake_run, capsys):
    wait = {"name": "leases", "peers": ["trainer/0"], "seconds": 3.0}
    run = fake_run({"rollout/0": {"waits": [wait]}, "trainer/0": LONG})
    run.start()
    run.await_up("rollout/0", "trainer/0")
    out = stacks(run, capsys)
    assert f"rollout/0 (pid {run.pid('rollout/0')}) waits for leases from trainer/0 for 3.0 s\n    MainThread" in out
    assert f"trainer/0 (pid {run.pid('trainer/0')}) not waiting\n" in out
    assert out.count(", in _asked_to_stop") == 2
    assert "    endpoint (most recent call last)" not in out
    assert out.count("1 further threads, shown with --all: endpoint") == 2
    assert "    endpoint (most recent call last)" in stacks(run, capsys, "--all")
    assert "trainer/0" not in stacks(run, capsys, "--worker", "rollout/0").splitlines()[-1]


def test_a_worker_that_holds_the_interpreters_lock_is_asked_by_a_signal(fake_run, capsys):
    run = fake_run({"rollout/0": {"hog": True}, "trainer/0": LONG})
    run.start()
    run.await_up("rollout/0", "trainer/0")
    path = run.run_dir / "logs" / "rollout-0.stacks"
    for dumps in (1, 2):
        out = stacks(run, capsys, "--worker", "rollout/0")
        assert "no answer within 0.5 s; asked by a signal\n" in out
        assert out.count(" in hog_the_lock") == 1, "only what is new is shown"
        assert " in _serve" in out, "the other threads are there too"
        assert path.read_text().count(" in hog_the_lock") == dumps
    assert state_of(run.pid("rollout/0")) == psutil.STATUS_RUNNING, "it goes on"


def test_a_stopped_worker_is_named_so_and_left_alone(fake_run, capsys):
    run = fake_run({"rollout/0": {}, "trainer/0": LONG})
    run.start()
    run.await_up("rollout/0", "trainer/0")
    pid = run.pid("rollout/0")
    os.kill(pid, signal.SIGSTOP)
    try:
        await_that(lambda: state_of(pid) == psutil.STATUS_STOPPED, "a stopped process")
        out = stacks(run, capsys, "--worker", "rollout/0")
    finally:
        os.kill(pid, signal.SIGCONT)
    assert out == (f"rollout/0 (pid {pid}) does not answer: it is stopped (state T) — `kill -CONT {pid}` resumes it\n")
    assert (run.run_dir / "logs" / "rollout-0.stacks").read_text() == ""


def test_workers_that_do_not_run_and_those_that_do_not_exist(fake_run, capsys):
    run = fake_run({"trainer/0": {"steps": 1}})
    run.run()
    assert stacks(run, capsys) == "trainer/0 does not run\n"
    assert distflow(["stacks", str(run.run_dir), "--worker", "critic/0"]) == 2
    assert "has no such worker — there are: trainer/0" in capsys.readouterr().err


def test_no_signal_is_sent_to_a_process_that_would_die_of_it():
    assert not catches(os.getpid(), signal.SIGUSR2)
    before = signal.signal(signal.SIGUSR2, lambda number, frame: None)
    try:
        assert catches(os.getpid(), signal.SIGUSR2)
    finally:
        signal.signal(signal.SIGUSR2, before)
    assert describe_state(os.getpid()) == "running"
    assert (state_of(2**22 + 1), describe_state(2**22 + 1)) == (None, "gone")
    assert not catches(2**22 + 1, signal.SIGUSR2)


def test_the_frames_of_the_users_code_and_of_the_script_come_first():
    mine = {"name": "MainThread", "frames": ["  ours\n", "  script\n", "  ours too\n", "  a reward\n", "  numpy\n"]}
    threads = [
        {**mine, "yours": [False, True, False, True, False]},
        {"name": "endpoint", "frames": ["  ours\n"], "yours": [False]},
        {"name": "mine", "frames": ["  a helper\n"], "yours": [True]},
    ]
    lines = render(threads).splitlines()
    assert lines[:3] == ["MainThread, your code and the script (most recent call last)", "  script", "  a reward"]
    assert "  a helper" in lines
    assert lines[-1] == "1 further threads, shown with --all: endpoint"
    assert "endpoint (most recent call last)" in render(threads, everything=True)


def test_frames_of_this_file_are_the_users_and_those_of_libraries_are_not():
    (main, *_) = thread_stacks()
    own = [frame for frame, yours in zip(main["frames"], main["yours"], strict=True) if yours]
    assert __file__ in own[-1]
    assert not any("site-packages" in frame or "distflow/runtime/process_record.py" in frame for frame in own)
