"""`distflow watch`: the page of a run that was started elsewhere, to its end, any number of times."""

from __future__ import annotations

import os
import re
import select
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from distflow.cluster.processes import Failure
from distflow.launch.cli import run as distflow
from distflow.launch.deploy.stop_run import stop_run
from distflow.launch.run.record import RunRecord, WorkerEntry
from tests.launch.conftest import WAIT_S, FakeRun, environment
from tests.launch.many import Hosts

LONG = {"steps": 10_000, "step_s": 0.1}


def watch(runs_dir: Path, *arguments: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-u", "-m", "distflow.launch", "watch", *arguments, "--runs-dir", str(runs_dir)]
    pipe = subprocess.PIPE
    return subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True, env=environment())


def await_step(watcher: subprocess.Popen[str]) -> None:
    """Until a training step is shown; what goes on before the first one may be shown before it."""
    assert watcher.stdout is not None
    for _ in range(10):
        ready, _, _ = select.select([watcher.stdout], [], [], WAIT_S)
        assert ready, f"nothing was shown within {WAIT_S:g} s"
        if watcher.stdout.readline().startswith("step "):
            return
    raise AssertionError("ten lines, and none about a training step")


def test_a_run_is_watched_to_its_end_by_any_number_and_not_disturbed_by_who_leaves(fake_run) -> None:
    run: FakeRun = fake_run({"rollout/0": {}, "trainer/0": LONG})
    run.start()
    run.await_up("rollout/0", "trainer/0")
    first, second, leaves = watchers = [watch(run.run_dir.parent, *name) for name in ([], ["fake-0"], [])]
    for watcher in watchers:
        await_step(watcher)
    leaves.send_signal(signal.SIGINT)
    out, _ = leaves.communicate(timeout=WAIT_S)
    assert out.splitlines()[-1] == f"no longer watching; fake-0 continues — `distflow stop {run.run_dir}` ends it"
    assert leaves.returncode == 0
    assert run.record().state == "running"
    stop_run(run.run_dir, timeout_s=WAIT_S)
    for watcher in (first, second):
        out, err = watcher.communicate(timeout=WAIT_S)
        assert (watcher.returncode, err) == (130, "")
        assert re.search(r"^fake-0: stopped after \d+ s, \d+ of 100 training steps$", out, re.MULTILINE)


def test_watching_a_run_that_is_over_shows_how_it_ended(fake_run, capsys: pytest.CaptureFixture[str]) -> None:
    run: FakeRun = fake_run({"trainer/0": {"steps": 9, "fail_at": 3, "how": "raise"}})
    code = run.run()
    assert distflow(["watch", "--runs-dir", str(run.run_dir.parent)]) == code == 3
    out, err = capsys.readouterr()
    assert "step 3/100" in out
    assert "trainer/0 failed (StepError): step 'bonus' raised" in err


def test_a_run_that_was_stopped_and_could_not_save_is_told_of_in_full_also_by_watch(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """As `launch` tells it: why it failed, and how far the run came."""
    failure = Failure("trainer/0", 3, "WorkerFailed", "it could not save")
    ended = {"state": "stopped", "exit_code": 130, "failure": failure, "ended": 1.0}
    (tmp_path / "mine").mkdir()
    RunRecord("mine", str(tmp_path / "mine"), 9, (WorkerEntry("trainer/0", True),), {}, 30.0, 3, **ended).write()
    assert distflow(["watch", "--runs-dir", str(tmp_path)]) == 130
    out, err = capsys.readouterr()
    assert "it failed while the run was being stopped" in err
    assert "no checkpoint is here yet: " in err
    assert "mine: stopped" in out
    assert not {"metrics", "rollouts", "--resume"} & set(out.split()), "there is nothing before the first training step"


def test_who_watches_a_run_that_is_killed_is_told(fake_run) -> None:
    run: FakeRun = fake_run({"rollout/0": {}, "trainer/0": {"steps": 10_000}})
    agent = run.start()
    run.await_up("rollout/0", "trainer/0")
    watcher = watch(run.run_dir.parent)
    await_step(watcher)
    for name in sorted(run.record().pids):
        os.kill(run.pid(name), signal.SIGKILL)
    agent.wait()
    _, err = watcher.communicate(timeout=WAIT_S)
    assert watcher.returncode == 3
    assert "the host agent ended before the run did" in err


def test_a_run_on_two_hosts_is_watched_from_either(tmp_path: Path) -> None:
    run = Hosts(tmp_path, {"trainer/0": (0, LONG), "rollout/0": (1, {}), "trainer/1": (1, LONG)}, shared=False)
    try:
        run.start()
        run.await_up()
        watchers = [watch(folder.parent) for folder in run.folders]
        for watcher in watchers:
            await_step(watcher)
        assert run.ask(0, "stop", {"reason": "the test"}) == {"stopping": True}
        for watcher in watchers:
            out, _ = watcher.communicate(timeout=2 * WAIT_S)
            assert watcher.returncode == 130
            assert re.search(r"^many: stopped after \d+ s, \d+ of 100 training steps$", out, re.MULTILINE)
    finally:
        run.end()
