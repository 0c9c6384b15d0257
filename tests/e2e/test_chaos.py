"""Whatever is killed, stopped or slow, and whenever: the run goes on, or ends saying why, and nothing is lost."""

import os
import signal
import time
from pathlib import Path

import pytest

from tests.e2e.runs import PACED, SMALL, Launch, Run, check_trained_once

SLOW_LOSS = """
import time
from distflow.algorithms.losses import ppo

def loss(terms, *, clip=(0.2, 0.2)):
    time.sleep(0.5)
    return ppo(terms, clip=clip)
"""


def trained_once(run: Run, steps: int) -> None:
    """Every position of this many training steps was trained exactly once."""
    check_trained_once(run, steps)
    assert [line["step"] for line in run.metrics() if "timing_s/step" in line] == list(range(1, steps + 1))
    assert f"{steps} of " in run.output


def test_a_long_training_step_is_work_and_no_lack_of_progress(launch: Launch, tmp_path: Path) -> None:
    (tmp_path / "slow.py").write_text(SLOW_LOSS)
    slow = [f"flow.steps.update.with.loss={tmp_path}/slow.py:loss", "batch.tokens_per_microbatch=256"]
    run = launch("quickstart", *slow, "run.training_steps=2", "limits.no_progress_s=2")
    assert run.wait() == 0, run.output


def test_a_worker_that_dies_again_and_again_ends_the_run_which_can_be_resumed(launch: Launch) -> None:
    settings = ["run.training_steps=60", "limits.restarts=2"]
    first = launch("quickstart", *PACED, *settings)
    first.until(lambda: first.steps_done() >= 2, "the second training step")
    killed: set[int] = set()

    def kill_again() -> bool:
        pids = set(first.pids_of("rollout/0")) - killed
        for pid in pids:
            killed.add(pid)
            os.kill(pid, signal.SIGKILL)
        return len(killed) == 3

    first.until(kill_again, "the third death")
    assert first.wait() == 3
    assert "rollout/0 was killed by signal 9" in first.output
    assert "--resume" in first.output
    assert first.leftovers() == []
    second = launch("quickstart", *PACED, *settings, "--resume", name=first.name)
    assert second.wait() == 0, second.output
    trained_once(second, 60)


@pytest.mark.parametrize("victim", ["trainer/0", pytest.param("launch", marks=pytest.mark.long)])
def test_ended_in_the_midst_with_stale_samples_and_resumed(launch: Launch, victim: str) -> None:
    """In-flight groups, taken ones of the open step, and those that wait for later steps are all sampled again."""
    settings = ["run.training_steps=30", "layout.max_staleness=2", "run.save_every=5", "layout.on_failure=stop"]
    first = launch("quickstart", *SMALL, *settings)
    first.until(lambda: first.steps_done() >= 8 and first.saved(), "the eighth training step, and a checkpoint")
    if victim == "launch":
        os.kill(first.process.pid, signal.SIGINT)
    else:
        os.kill(first.pid_of(victim), signal.SIGKILL)
    assert first.wait() == (130 if victim == "launch" else 3), first.output
    begin = max(first.saved())
    second = launch("quickstart", *SMALL, *settings, "--resume", f"run.stop_after={begin + 1}", name=first.name)
    assert second.wait() == 0, second.output
    trained_once(second, begin + 1)
    third = launch("quickstart", *SMALL, *settings, "--resume", name=first.name)
    assert third.wait() == 0, third.output
    trained_once(third, 30)


def test_without_agent_a_rollout_dies_and_the_others_finish(launch: Launch) -> None:
    run = launch("quickstart", *SMALL, "run.training_steps=40")
    run.until(lambda: run.steps_done() >= 1, "the first training step")
    os.kill(run.pid_of("agent/0"), signal.SIGKILL)
    os.kill(run.pid_of("rollout/0"), signal.SIGKILL)
    assert run.wait() == 0, run.output
    trained_once(run, 40)
    assert run.leftovers() == []


def test_the_nursery_dies_while_it_starts_and_again_while_its_workers_work(launch: Launch) -> None:
    run = launch("quickstart", *SMALL, "run.training_steps=40")
    run.until(lambda: run.pids_of("nursery/0"), "the fork server")
    os.kill(run.pid_of("nursery/0"), signal.SIGKILL)
    run.until(lambda: run.steps_done() >= 1, "the first training step")
    run.until(lambda: run.pids_of("nursery/0"), "the fork server that follows it")
    os.kill(run.pid_of("nursery/0"), signal.SIGKILL)
    os.kill(run.pid_of("rollout/1"), signal.SIGTERM)
    assert run.wait() == 0, run.output
    trained_once(run, 40)
    assert run.leftovers() == []


@pytest.mark.parametrize("after_s", [0.0, 2.0])
def test_interrupted_while_it_starts(launch: Launch, after_s: float) -> None:
    run = launch("quickstart")
    begin = time.monotonic()
    run.until(lambda: run.processes() and time.monotonic() - begin >= after_s, "the moment")
    os.kill(run.process.pid, signal.SIGINT)
    assert run.wait() == 130, run.output
    assert run.leftovers() == []
    assert "Traceback" not in run.output


def test_a_rollout_killed_before_it_has_met_anybody_is_replaced(launch: Launch) -> None:
    run = launch("quickstart", *SMALL, "run.training_steps=10")
    run.until(lambda: run.pids_of("rollout/0"), "rollout/0")
    os.kill(run.pid_of("rollout/0"), signal.SIGKILL)
    assert run.wait() == 0, run.output
    trained_once(run, 10)
    assert run.leftovers() == []


def test_a_rollout_that_sleeps_from_first_contact_to_the_end_does_not_fail_the_run(launch: Launch) -> None:
    run = launch("quickstart", *SMALL, "run.training_steps=10", "limits.drain_s=4")
    log = run.folder / "logs" / "trainer-0.log"
    run.until(lambda: log.exists() and "rollout/1 joined" in log.read_text(), "first contact")
    sleeper = run.pid_of("rollout/1")
    os.kill(sleeper, signal.SIGSTOP)
    held = time.monotonic() + 5.0
    # If it holds leases by now they are waited for: a sleeping process is slow and not dead.
    run.until(lambda: time.monotonic() > held or run.steps_done() == 10, "the end of its sleep")
    os.kill(sleeper, signal.SIGCONT)
    assert run.wait() == 0, run.output
    assert run.record()["state"] == "done"
    trained_once(run, 10)


def test_two_runs_of_one_name_in_different_folders_do_not_meet(tmp_path: Path) -> None:
    name = f"twins-{os.getpid()}"
    twins = [Run(tmp_path / folder, name, ["quickstart", *SMALL, "run.training_steps=10"]) for folder in ("a", "b")]
    try:
        for run in twins:
            assert run.wait() == 0, run.output
        for run in twins:
            trained_once(run, 10)
            assert run.leftovers() == []
    finally:
        for run in twins:
            run.end()
