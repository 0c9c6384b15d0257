"""A model divided by ZeRO trains as a whole one, and a backend that divides nothing goes on from its checkpoint."""

import pytest

from tests.e2e.runs import SMALL, Launch, Run, check_trained_once

TRAINER = "layout.pools.trainer"
SETTINGS = ["layout.pools.rollout.count=1", "run.training_steps=6"]


def norms(run: Run) -> list[float]:
    return [line["actor/grad_norm"] for line in run.metrics()]


@pytest.mark.parametrize("stage", [3, pytest.param(1, marks=pytest.mark.long)])
def test_two_zero_workers_train_and_one_torch_worker_goes_on(launch: Launch, stage: int) -> None:
    whole = launch("quickstart", *SMALL, *SETTINGS)
    assert whole.wait() == 0, whole.output
    zero = [f"{TRAINER}.backend=deepspeed", f"{TRAINER}.zero={stage}", f"{TRAINER}.count=2", "run.stop_after=3"]
    first = launch("quickstart", *SMALL, *SETTINGS, *zero)
    assert first.wait() == 0, first.output
    assert norms(first) == pytest.approx(norms(whole)[:3], rel=1e-3)
    (saved,) = first.folder.glob("checkpoints/step_*/COMMIT")
    assert len(list(saved.parent.glob("model-policy-trainer-*"))) == 2
    second = launch("quickstart", *SMALL, *SETTINGS, "--resume", name=first.name)
    assert second.wait() == 0, second.output
    assert norms(second) == pytest.approx(norms(whole), rel=1e-3)
    check_trained_once(second, 6)
    assert second.leftovers() == []
