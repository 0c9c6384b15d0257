"""`distflow watch`: the page of a run that was started elsewhere, to its end, any number of times."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from distflow.launch.cli import run as distflow
from distflow.launch.record import read_record
from tests.launch.conftest import WAIT_S, FakeRun, await_that, environment
from tests.launch.many import Hosts


def watch(runs_dir: Path, *arguments: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-u", "-m", "distflow.launch", "watch", *arguments, "--runs-dir", str(runs_dir)]
    pipe = subprocess.PIPE
    return subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True, env=environment())


def test_a_run_is_watched_to_its_end_by_any_number_and_not_disturbed_by_who_leaves(fake_run) -> None:
    run: FakeRun = fake_run({"rollout/0": {}, "trainer/0": {"steps": 60, "step_s": 0.1}})
    run.start()
    run.await_up("rollout/0", "trainer/0")
    first, second, leaves = (watch(run.run_dir.parent, *name) for name in ([], ["fake-0"], []))
    assert leaves.stdout is not None
    assert leaves.stdout.readline().startswith("step ")
    leaves.send_signal(signal.SIGINT)
    out, _ = leaves.communicate(timeout=WAIT_S)
    assert out.splitlines()[-1] == "no longer watching; fake-0 goes on — `distflow stop fake-0` ends it"
    assert leaves.returncode == 0
    for watcher in (first, second):
        out, err = watcher.communicate(timeout=WAIT_S)
        assert (watcher.returncode, err) == (0, "")
        assert "step 60/100  score 0.500" in out
        assert re.search(r"^fake-0: done after \d+ s, 60 of 100 training steps$", out, re.MULTILINE)
    assert run.record().state == "done"


def test_watching_a_run_that_is_over_shows_how_it_ended(fake_run, capsys: pytest.CaptureFixture[str]) -> None:
    run: FakeRun = fake_run({"trainer/0": {"steps": 9, "fail_at": 3, "how": "raise"}})
    code = run.run()
    assert distflow(["watch", "--runs-dir", str(run.run_dir.parent)]) == code == 3
    out = capsys.readouterr().out
    assert "step 3/100" in out
    assert "trainer/0 failed (StepError): step 'bonus' raised" in out


def test_who_watches_a_run_that_is_killed_is_told(fake_run) -> None:
    run: FakeRun = fake_run({"rollout/0": {}, "trainer/0": {"steps": 10_000}})
    agent = run.start()
    run.await_up("rollout/0", "trainer/0")
    watcher = watch(run.run_dir.parent)
    assert watcher.stdout is not None
    assert watcher.stdout.readline().startswith("step ")
    for name in sorted(run.record().pids):
        os.kill(run.pid(name), signal.SIGKILL)
    agent.wait()
    out, _ = watcher.communicate(timeout=WAIT_S)
    assert watcher.returncode == 3
    assert "the host agent ended before the run did" in out


def test_a_run_on_two_hosts_is_watched_from_either(tmp_path: Path) -> None:
    trainer = {"steps": 60, "step_s": 0.1}
    run = Hosts(tmp_path, {"trainer/0": (0, trainer), "rollout/0": (1, {}), "trainer/1": (1, trainer)}, shared=False)
    try:
        run.start()
        run.await_up()
        watchers = [watch(folder.parent) for folder in run.folders]
        for watcher in watchers:
            out, _ = watcher.communicate(timeout=2 * WAIT_S)
            assert watcher.returncode == 0
            assert re.search(r"^step \d+/100  score 0.500", out, re.MULTILINE)
            assert re.search(r"^many: done after \d+ s, \d+ of 100 training steps$", out, re.MULTILINE)
        for host in (0, 1):
            await_that(lambda host=host: read_record(run.folders[host]).over, "the end")
    finally:
        run.end()
