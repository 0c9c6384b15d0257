"""A model divided over the training workers trains as one that each of them holds whole, and stops and fails alike."""

import os
import signal

import pytest

from tests.e2e.runs import SMALL, Launch, Run, check_trained_once, cli

SPLIT = ["layout=split", "layout.pools.trainer.count=2"]
COLOCATED = ["layout=colocated", "layout.pools.worker.count=2", "flow=grpo_kl", "batch.tokens_per_microbatch=256"]
"""With a frozen reference, and with several rounds a step."""


def divided(pool: str, backend: str = "fsdp") -> str:
    return f"layout.pools.{pool}.backend={backend}"


def norms(run: Run) -> list[float]:
    return [line["actor/grad_norm"] for line in run.metrics()]


@pytest.mark.parametrize(("layout", "pool"), [(SPLIT, "trainer"), (COLOCATED, "worker")], ids=["split", "colocated"])
def test_a_divided_model_trains_as_a_whole_one(launch: Launch, layout: list[str], pool: str) -> None:
    settings = [*layout, "run.training_steps=6"]
    whole = launch("quickstart", *SMALL, *settings, divided(pool, "torch"))
    assert whole.wait() == 0, whole.output
    run = launch("quickstart", *SMALL, *settings, divided(pool))
    assert run.wait() == 0, run.output
    assert norms(run)[:3] == pytest.approx(norms(whole)[:3], rel=1e-3)
    dealt = [line["dealing/groups/count"] for line in run.metrics() if "dealing/groups/count" in line]
    assert dealt, "no worker trained on groups of the other"
    check_trained_once(run, 6)
    assert run.leftovers() == []


def test_ctrl_c_in_the_middle_saves_and_another_division_goes_on(launch: Launch) -> None:
    settings = [*SPLIT, divided("trainer"), "run.training_steps=24"]
    first = launch("quickstart", *SMALL, *settings)
    first.until(lambda: first.steps_done() >= 10, "five training steps of two replicas")
    os.kill(first.process.pid, signal.SIGINT)
    assert first.wait() == 130, first.output
    assert first.leftovers() == []
    (saved,) = first.folder.glob("checkpoints/step_*/COMMIT")
    assert len(list(saved.parent.glob("model-policy-trainer-*"))) == 2
    more = ["layout.pools.trainer.count=3", "--resume"]
    second = launch("quickstart", *SMALL, *settings, *more, name=first.name)
    assert second.wait() == 0, second.output
    check_trained_once(second, 24)


def test_a_frozen_replica_is_named_and_a_killed_one_ends_the_run_where_that_is_wished(launch: Launch) -> None:
    run = launch("quickstart", *SMALL, *SPLIT, divided("trainer"), "run.training_steps=600", "layout.on_failure=stop")
    run.until(lambda: run.steps_done() >= 4, "two training steps of two replicas")
    os.kill(run.pid_of("trainer/1"), signal.SIGSTOP)

    def waiting() -> bool:
        status = cli("status", run.name, "--runs-dir", str(run.folder.parent)).stdout
        return "the other training replicas from trainer/1" in status

    run.until(waiting, "a wait for the frozen replica")
    os.kill(run.pid_of("trainer/1"), signal.SIGKILL)
    assert run.wait() == 3, run.output
    assert "trainer/1 was killed by signal 9" in run.output
    assert "--resume" in run.output
    assert run.leftovers() == []
