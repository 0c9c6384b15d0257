"""A run with trackers: they never hold it up, they go on after a restart, and nothing of them is left."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import psutil

from tests.e2e.runs import PACED, Launch, Run, cli

STEPS = 30
ODD = Path(__file__).with_name("odd_trackers.py")


def helpers_of(run: Run) -> list[psutil.Process]:
    """The helpers that trackers of a run have started, whoever their parents are."""
    told = [process for process in psutil.process_iter(["cmdline"]) if process.info["cmdline"]]
    return [process for process in told if f"helper of {run.folder}" in " ".join(process.info["cmdline"])]


def given(run: Run, what: str) -> list[Any]:
    lines = (run.folder / "trackers" / "forks" / "given.jsonl").read_text().splitlines()
    return [entry[1:] for entry in map(json.loads, lines) if entry[0] == what]


def test_a_killed_trainer_takes_its_trackers_along_and_the_next_one_goes_on(launch: Launch) -> None:
    tracker = f"run.trackers.forks.call={ODD}:Forks"
    run = launch("quickstart", *PACED, f"run.training_steps={STEPS}", "run.save_every=3", tracker)
    run.until(lambda: run.saved() and helpers_of(run), "a checkpoint, and the tracker's helper")
    (helper,) = helpers_of(run)
    os.kill(run.pid_of("trainer/0"), signal.SIGKILL)
    run.until(lambda: not helper.is_running(), "the end of the helper")
    assert run.wait() == 0, run.output
    assert helpers_of(run) == []
    assert run.leftovers() == []

    # All rows once, by one identity, with the values of all workers; and what it was told at the end.
    steps = [step for step, _ in given(run, "step")]
    assert steps == sorted(set(steps))
    # One that was under way at the kill may be missing: nobody knows whether it was given.
    assert len(steps) >= STEPS - 1
    assert steps[-1] == STEPS
    lives = given(run, "life")
    assert len(lives) >= 2
    assert len({identity for (identity,) in lives}) == 1
    last = given(run, "step")[-1][1]
    assert {"critic/score/mean", "timing_s/step", "timing_s/gen"} <= set(last)
    assert given(run, "samples")[-1] == [STEPS, 8]
    assert len(given(run, "close")) == 1


def test_one_that_hangs_and_floods_stops_nobody(launch: Launch) -> None:
    options = [f"run.trackers.hangs.call={ODD}:Hangs", "run.trackers.hangs.timeout_s=1"]
    run = launch("quickstart", *PACED, "run.training_steps=2000", *options)
    metrics = run.folder / "metrics" / "trainer-0.jsonl"
    lost = "trackers/hangs/dropped"
    run.until(lambda: metrics.exists() and lost in metrics.read_text(), "a row that the tracker has lost")
    steps = run.steps_done()
    run.until(lambda: run.steps_done() > steps + 2, "further training steps")
    status = cli("status", run.name, "--runs-dir", str(run.folder.parent)).stdout
    assert "tracker hangs on trainer/0: failed" in status
    log = (run.folder / "logs" / "trainer-0.log").read_text()
    assert log.count("tracker hangs: training step") == 1
    assert "took longer than timeout_s=1" in log
    assert cli("stop", run.name, "--runs-dir", str(run.folder.parent)).returncode == 0
    assert run.wait() != 3, run.output
    assert run.leftovers() == []
    assert (run.folder / "trackers" / "hangs" / "output.log").stat().st_size < 2 << 20


def test_a_stopped_run_ends_its_trackers_and_a_resumed_one_goes_on_in_the_same(launch: Launch) -> None:
    tracker = f"run.trackers.forks.call={ODD}:Forks"
    run = launch("quickstart", *PACED, "run.training_steps=200", tracker, name=None)
    run.until(lambda: run.steps_done() >= 5 and helpers_of(run), "some training steps, and the tracker's helper")
    assert cli("stop", run.name, "--runs-dir", str(run.folder.parent)).returncode == 0
    run.wait()
    stopped = run.steps_done()
    assert helpers_of(run) == []
    assert run.leftovers() == []
    assert [step for step, _ in given(run, "step")] == list(range(1, stopped + 1))
    again = launch("quickstart", "--resume", f"run.stop_after={stopped + 2}", name=run.name)
    again.wait()
    assert [step for step, _ in given(run, "step")] == list(range(1, stopped + 3))
    assert len({identity for (identity,) in given(run, "life")}) == 1
    assert len(given(run, "close")) == 2
