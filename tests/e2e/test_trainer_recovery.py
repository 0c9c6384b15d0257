"""A training worker is killed: its pool goes on from the last checkpoint, rollouts stay, nothing is lost or doubled."""

from __future__ import annotations

import os
import signal
import time

import pytest

from tests.e2e.runs import Launch, Run
from tests.e2e.test_kills import check_every_position_trained_once

STEPS = 40
TWO = ["layout=split", "layout.pools.trainer.count=2", "run.save_every=5"]
BACK_S = 15.0


def kill(run: Run, worker: str) -> float:
    os.kill(run.pid_of(worker), signal.SIGKILL)
    return time.monotonic()


def steps_of_term(run: Run, term: int) -> set[int]:
    return {int(line["step"]) for line in run.metrics() if line["term"] == term}


@pytest.mark.parametrize(
    ("layout", "victims", "stays"),
    [
        (TWO, ["trainer/1"], "rollout/0"),
        ([*TWO, "layout.max_staleness=1"], ["trainer/0", "trainer/1"], "rollout/1"),
        (["layout=async", "run.save_every=5"], ["trainer/0"], "rollout/0"),
        ([*TWO, "layout.pools.trainer.backend=fsdp"], ["trainer/0"], "rollout/1"),
        (["layout=colocated", "layout.pools.worker.count=2", "run.save_every=5"], ["worker/0"], None),
    ],
    ids=["one of two", "both", "the only one", "of a divided model", "colocated"],
)
def test_a_killed_training_worker_comes_back(
    launch: Launch, layout: list[str], victims: list[str], stays: str | None
) -> None:
    run = launch("quickstart", *layout, f"run.training_steps={STEPS}")
    run.until(lambda: run.steps_done() >= 8 * (1 + ("count=2" in str(layout))), "the eighth training step")
    kept = None if stays is None else run.pid_of(stays)
    for victim in victims:
        killed = kill(run, victim)
    run.until(lambda: run.record()["term"] == 1 and steps_of_term(run, 1), "a step of the next term")
    back_s = time.monotonic() - killed
    again = min(steps_of_term(run, 1))
    assert kept is None or run.pid_of(stays or "") == kept
    assert run.wait() == 0, run.output
    assert f"the training workers go on from training step {again - 1}, as term 1" in run.output
    check_every_position_trained_once(run, STEPS)
    assert again % 5 == 1, "it goes on behind a checkpoint"
    assert back_s < BACK_S
    assert run.leftovers() == []
