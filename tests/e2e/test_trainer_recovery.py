"""A training worker is killed: its pool goes on from the last checkpoint, rollouts stay, nothing is lost or doubled."""

from __future__ import annotations

import os
import signal
import time

import pytest

from tests.e2e.runs import SMALL, Launch, Run, check_trained_once
from tests.e2e.test_layout_invariance import norms, tokens

STEPS = 40
TWO = ["layout=split", "layout.pools.trainer.count=2", "run.save_every=5"]
ZERO_2 = ["layout.pools.trainer.backend=deepspeed", "models.policy.dtype=float32"]
BACK_S = 15.0


def kill(run: Run, worker: str) -> None:
    os.kill(run.pid_of(worker), signal.SIGKILL)


def steps_of_term(run: Run, term: int) -> set[int]:
    return {int(line["step"]) for line in run.metrics() if line["term"] == term}


@pytest.mark.parametrize(
    ("layout", "victims", "stays"),
    [
        (TWO, ["trainer/1"], "rollout/0"),
        pytest.param([*TWO, "layout.max_staleness=1"], ["trainer/0", "trainer/1"], "rollout/1", marks=pytest.mark.long),
        pytest.param(["layout=async", "run.save_every=5"], ["trainer/0"], "rollout/0", marks=pytest.mark.long),
        ([*TWO, "layout.pools.trainer.backend=fsdp"], ["trainer/0"], "rollout/1"),
        pytest.param([*TWO, *ZERO_2], ["trainer/0"], "rollout/1", marks=pytest.mark.long),
        (["layout=colocated", "layout.pools.worker.count=2", "run.save_every=5"], ["worker/0"], None),
    ],
    ids=["one of two", "both", "the only one", "of a divided model", "with ZeRO 2", "colocated"],
)
def test_a_killed_training_worker_comes_back(
    launch: Launch, layout: list[str], victims: list[str], stays: str | None
) -> None:
    if layout[-2:] == ZERO_2:
        pytest.importorskip("deepspeed")
    run = launch("quickstart", *SMALL, *layout, f"run.training_steps={STEPS}")
    run.until(lambda: run.steps_done() >= 8 * (1 + ("count=2" in str(layout))), "the eighth training step")
    run.until(run.saved, "a checkpoint, which a busy disk may hold up")
    pids = [run.pid_of(victim) for victim in victims]  # all before the first is killed: its peers end in answer to it
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
    killed = time.monotonic()
    run.until(lambda: run.record()["term"] == 1 and steps_of_term(run, 1), "a step of the next term")
    seen_s = time.monotonic() - killed
    again = min(steps_of_term(run, 1))
    assert run.wait() == 0, run.output
    assert stays is None or run.lives_of(stays) == 1
    assert f"the training workers go on from training step {again - 1}, as term 1" in run.output
    check_trained_once(run, STEPS)
    assert again % 5 == 1, "it goes on behind a checkpoint"
    (first,) = [line for line in run.metrics() if "recovery/seconds/max" in line]
    assert first["step"] == again
    assert first["recovery/seconds/max"] < min(BACK_S, seen_s + 1.0)
    assert first["recovery/repeated_steps/max"] <= 5, "no more than the steps since the last checkpoint, and one"
    assert f"training step {again} was done {first['recovery/seconds/max']:.1f} s after that" in run.output
    print(f"back in {first['recovery/seconds/max']:.1f} s, repeated {first['recovery/repeated_steps/max']:.0f}")
    assert any("timing_s/gen" in line for line in run.metrics() if line["step"] > again), "of the generating workers"
    assert run.leftovers() == []


def kill_for_good(run: Run, worker: str) -> None:
    """Kill it, and once more before its pool has written another checkpoint."""
    kill(run, worker)
    run.until(lambda: run.record()["term"] == 1, "the next term")
    again = time.monotonic()
    run.until(lambda: run.pids_of(worker), f"{worker} once more")
    kill(run, worker)
    assert time.monotonic() - again < BACK_S


SHRINKING = [*TWO, "layout.pools.rollout.count=1", "layout.on_failure=shrink", "run.training_steps=14"]


def test_a_pool_goes_on_without_a_training_worker_that_cannot_come_back(launch: Launch) -> None:
    run = launch("quickstart", *SMALL, *SHRINKING)
    run.until(lambda: run.steps_done() >= 12, "the sixth training step")
    kill_for_good(run, "trainer/1")
    run.until(lambda: run.record()["term"] == 2 and steps_of_term(run, 2), "a step of the next term but one")
    assert run.wait() == 0, run.output
    assert run.lives_of("rollout/0") == 1
    assert "trainer/1 cannot come back (1 training workers are left)" in run.output
    assert [worker["name"] for worker in run.record()["workers"]] == ["rollout/0", "trainer/0"]
    check_trained_once(run, 14)
    assert run.leftovers() == []


@pytest.mark.long
@pytest.mark.parametrize("backend", ["torch", "fsdp", "deepspeed"])
def test_a_pool_that_shrank_trains_as_one_of_any_size(launch: Launch, backend: str) -> None:
    three = ["layout.pools.trainer.count=3", f"layout.pools.trainer.backend={backend}", "models.policy.dtype=float64"]
    if backend == "deepspeed":
        pytest.importorskip("deepspeed")
        three[-1] = "models.policy.dtype=float32"
    run = launch("quickstart", *SMALL, *SHRINKING, *three)
    run.until(lambda: run.steps_done() >= 18, "the sixth training step")
    kill_for_good(run, "trainer/1")
    assert run.wait() == 0, run.output
    check_trained_once(run, 14)
    if backend == "deepspeed":
        return
    whole = launch("quickstart", *SMALL, "layout=split", "run.training_steps=14", "models.policy.dtype=float64")
    assert whole.wait() == 0, whole.output
    assert tokens(run) == tokens(whole)
    assert norms(run) == pytest.approx(norms(whole), rel=1e-6)


def test_the_last_training_worker_is_not_done_without(launch: Launch) -> None:
    refused = launch("quickstart", *SMALL, "layout=split", "layout.on_failure=shrink")
    assert refused.wait() == 2
    assert "shrink continues without a training worker, and pool 'trainer' has only one" in refused.output


@pytest.mark.long
def test_a_training_worker_that_stands_still_for_twenty_seconds_is_not_dead(launch: Launch) -> None:
    run = launch("quickstart", *SMALL, *TWO, "layout.on_failure=shrink", f"run.training_steps={STEPS}")
    run.until(lambda: run.steps_done() >= 8, "the fourth training step of two")
    pid = run.pid_of("trainer/1")
    os.kill(pid, signal.SIGSTOP)
    thaw = time.monotonic() + 20.0
    run.until(lambda: time.monotonic() > thaw, "the end of the pause")
    os.kill(pid, signal.SIGCONT)
    assert run.wait() == 0, run.output
    assert run.record()["term"] == 0
    check_trained_once(run, STEPS)
