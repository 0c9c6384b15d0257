"""Several training workers: they stop together, save together, and end together when one of them is killed."""

import os
import signal
import time

from tests.e2e.runs import SMALL, Launch, check_trained_once, cli
from tests.e2e.test_stop_and_resume import trained

TWO = ["layout=split", "layout.pools.trainer.count=2", "models.policy.dtype=float64"]


def test_replicas_stop_at_one_training_step_and_go_on_as_three(launch: Launch) -> None:
    whole = launch("quickstart", *SMALL, *TWO, "run.training_steps=30")
    assert whole.wait() == 0, whole.output
    first = launch("quickstart", *SMALL, *TWO, "run.training_steps=30")
    first.until(lambda: first.steps_done() >= 10, "five training steps of two replicas")
    assert cli("stop", first.name, "--runs-dir", str(first.folder.parent)).returncode == 0
    assert first.wait() == 130, first.output
    assert first.leftovers() == []
    (saved,) = first.folder.glob("checkpoints/step_*/COMMIT")
    assert {path.name for path in saved.parent.glob("worker-*")} == {"worker-trainer-0.json", "worker-trainer-1.json"}
    second = launch(
        "quickstart", *SMALL, *TWO, "run.training_steps=30", "layout.pools.trainer.count=3", "--resume", name=first.name
    )
    assert second.wait() == 0, second.output
    assert trained(second) == trained(whole)
    check_trained_once(second, 30)
    pairs = zip(second.metrics(), whole.metrics(), strict=True)
    assert all(abs(a["actor/grad_norm"] / b["actor/grad_norm"] - 1) < 1e-6 for a, b in pairs)


def test_colocated_replicas_stop_in_the_middle_and_lose_nothing(launch: Launch) -> None:
    settings = ["layout=colocated", "layout.pools.worker.count=2", "run.training_steps=40"]
    first = launch("quickstart", *SMALL, *settings)
    first.until(lambda: first.steps_done() >= 10, "five training steps of two replicas")
    os.kill(first.process.pid, signal.SIGINT)
    assert first.wait() == 130, first.output
    assert first.leftovers() == []
    second = launch("quickstart", *SMALL, *settings, "--resume", name=first.name)
    assert second.wait() == 0, second.output
    check_trained_once(second, 40)


def test_ctrl_c_before_the_replicas_have_met_leaves_nothing_behind(launch: Launch) -> None:
    run = launch("quickstart", *SMALL, *TWO)
    run.until(lambda: run.pids_of("trainer/1"), "a second replica")
    os.kill(run.process.pid, signal.SIGINT)
    assert run.wait(60) == 130, run.output
    assert run.leftovers() == []


def test_a_killed_replica_ends_the_run_with_the_cure_where_that_is_wished(launch: Launch) -> None:
    run = launch("quickstart", *SMALL, *TWO, "run.training_steps=600", "layout.on_failure=stop")
    run.until(lambda: run.steps_done() >= 4, "two training steps of two replicas")
    os.kill(run.pid_of("trainer/1"), signal.SIGKILL)
    assert run.wait() == 3, run.output
    assert "trainer/1 was killed by signal 9" in run.output
    assert "--resume" in run.output
    assert run.leftovers() == []


def test_a_stopped_replica_is_slow_and_not_dead(launch: Launch) -> None:
    run = launch("quickstart", *SMALL, *TWO, "run.training_steps=40")
    run.until(lambda: run.steps_done() >= 4, "two training steps of two replicas")
    pid = run.pid_of("trainer/1")
    os.kill(pid, signal.SIGSTOP)
    thaw = time.monotonic() + 6.0
    run.until(lambda: time.monotonic() > thaw, "the end of the pause")
    status = cli("status", run.name, "--runs-dir", str(run.folder.parent)).stdout
    assert "the other training replicas" in status, status
    assert "from trainer/1" in status, status
    os.kill(pid, signal.SIGCONT)
    assert run.wait() == 0, run.output
    check_trained_once(run, 40)
