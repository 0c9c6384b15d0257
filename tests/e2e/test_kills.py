"""Processes are killed in mid-run; nothing is lost, nothing is trained on twice."""

import os
import signal
import time

import pytest

from tests.e2e.runs import PACED, SMALL, Launch, check_trained_once

STEPS = 60


def test_a_killed_rollout_is_replaced_and_no_position_lost(launch: Launch) -> None:
    run = launch("quickstart", *SMALL, f"run.training_steps={STEPS}")
    run.until(lambda: run.steps_done() >= 5, "the fifth training step")
    first = run.pid_of("rollout/1")
    os.kill(first, signal.SIGKILL)
    assert run.wait() == 0, run.output
    assert "rollout/1" in (run.folder / "logs" / "agent-0.log").read_text()
    check_trained_once(run, STEPS)
    assert run.leftovers() == []


@pytest.mark.long
def test_both_rollouts_killed_in_turn(launch: Launch) -> None:
    run = launch("quickstart", *SMALL, f"run.training_steps={2 * STEPS}")
    for at, worker in ((5, "rollout/0"), (40, "rollout/1")):
        run.until(lambda at=at: run.steps_done() >= at, f"training step {at}")
        os.kill(run.pid_of(worker), signal.SIGKILL)
    assert run.wait() == 0, run.output
    check_trained_once(run, 2 * STEPS)


def test_the_run_completes_without_its_head(launch: Launch) -> None:
    run = launch("quickstart", *SMALL, f"run.training_steps={STEPS}")
    run.until(lambda: run.steps_done() >= 1, "the first training step")
    os.kill(run.process.pid, signal.SIGKILL)
    run.until(lambda: not run.processes(), "the end of the run")
    assert run.record()["state"] == "done"
    assert run.record()["exit_code"] == 0
    assert run.steps_done() == STEPS
    assert run.leftovers() == []


def test_the_run_completes_without_its_agent(launch: Launch) -> None:
    run = launch("quickstart", *SMALL, f"run.training_steps={STEPS}")
    run.until(lambda: run.steps_done() >= 1, "the first training step")
    os.kill(run.pid_of("agent/0"), signal.SIGKILL)
    run.until(lambda: not run.processes(), "the end of the run")
    assert run.steps_done() == STEPS
    check_trained_once(run, STEPS)


def test_a_killed_trainer_ends_the_run_with_the_cure_where_that_is_wished(launch: Launch) -> None:
    run = launch("quickstart", *SMALL, f"run.training_steps={10 * STEPS}", "layout.on_failure=stop")
    run.until(lambda: run.steps_done() >= 2, "the second training step")
    os.kill(run.pid_of("trainer/0"), signal.SIGKILL)
    assert run.wait() == 3, run.output
    assert "trainer/0" in run.output
    assert "--resume" in run.output
    assert run.leftovers() == []


@pytest.mark.long
@pytest.mark.parametrize(("pause_s", "steps"), [(6.0, 200), (20.0, 600)])
def test_a_stopped_rollout_is_slow_and_not_dead(launch: Launch, pause_s: float, steps: int) -> None:
    """Longer than the silence after which its process is looked at."""
    run = launch("quickstart", *PACED, f"run.training_steps={steps}")
    run.until(lambda: run.steps_done() >= 3, "the third training step")
    pid = run.pid_of("rollout/0")
    os.kill(pid, signal.SIGSTOP)
    thaw = time.monotonic() + pause_s
    run.until(lambda: time.monotonic() > thaw, "the end of the pause")
    assert run.steps_done() < steps
    os.kill(pid, signal.SIGCONT)
    assert run.wait() == 0, run.output
    check_trained_once(run, steps)
    assert run.lives_of("rollout/0") == 1
    assert "its process is gone" not in (run.folder / "logs" / "trainer-0.log").read_text()
