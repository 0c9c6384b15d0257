"""A metric ends a run: on all replicas and homes after the same training step, and it can be gone on with."""

from __future__ import annotations

import pytest

from tests.e2e.runs import SMALL, Launch, Run, check_trained_once
from tests.e2e.test_validation import validation

STEPS = 12
VALIDATED = ("val.every=2", "val.prompts=8", "val.at_start=false")
BY_VALIDATION = (*VALIDATED, "run.stop_when={metric: val/avg@1, at_most: 1}")
BY_TRAINING = ("run.stop_when={metric: critic/rewards, at_least: -9}",)


def check_ended(run: Run, *, early: range) -> int:
    """The training step that was the last."""
    assert run.wait() == 0, run.output
    (last,) = run.saved()[-1:]
    assert last in early
    check_trained_once(run, last)
    assert "run.stop_when is met" in run.output
    assert run.leftovers() == []
    return last


@pytest.mark.parametrize(
    "layout",
    [["layout=split", "layout.pools.trainer.count=2"], ["layout=colocated", "layout.pools.worker.count=2"]],
    ids=lambda layout: layout[0],
)
def test_a_value_of_validation_ends_it(launch: Launch, layout: list[str]) -> None:
    run = launch("quickstart", *layout, *SMALL, *BY_VALIDATION, f"run.training_steps={STEPS}")
    last = check_ended(run, early=range(3, STEPS - 1))
    assert sorted(validation(run)) == list(range(2, last + 1, 2))
    again = launch("quickstart", "--resume", name=run.name)
    assert again.wait() == 0
    assert "nothing is left to train" in again.output
    assert again.saved()[-1] == last
    on = launch("quickstart", "--resume", "run.stop_when=null", name=run.name)
    assert on.wait() == 0, on.output
    check_trained_once(on, STEPS)


@pytest.mark.parametrize("more", [["run.save_every=1"], ["batch.ledgers=4", "batch.minibatches=2"]], ids=str)
def test_the_home_of_a_further_model_ends_with_its_owners(launch: Launch, more: list[str]) -> None:
    run = launch("quickstart", "flow=ppo", "layout=critic", *SMALL, *BY_TRAINING, f"run.training_steps={STEPS}", *more)
    assert check_ended(run, early=range(1, 2)) == 1


def test_a_metric_that_nobody_measures_is_told(launch: Launch) -> None:
    run = launch("quickstart", "layout=split", *SMALL, "run.stop_when={metric: critic/skore, at_least: 1}")
    assert run.wait() != 0
    assert "run.stop_when.metric: no training worker measured a mean 'critic/skore'" in run.output
    assert "critic/score/mean" in run.output
