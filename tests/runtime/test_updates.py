"""Optimizer steps of several passes over a batch, as far as one worker decides about them."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from distflow.data.batch import Batch
from distflow.errors import ReplicaLost, UserError, WorkerFailed
from distflow.runtime.metrics import MetricStore
from distflow.runtime.steps import StepContext
from distflow.runtime.updates import Updates
from distflow.testing.fakes import FakeBackend
from tests.runtime.test_stealing import BATCH


class Failing(FakeBackend):
    """Its optimizer step raises."""

    def __init__(self, error: Exception) -> None:
        super().__init__()
        self.error = error

    def apply(self, denominator: float) -> float:
        raise self.error


@pytest.mark.parametrize(
    ("error", "expected"),
    [(WorkerFailed("nan"), "model 'critic': nan"), (ReplicaLost("critic/1 is lost"), "critic/1 is lost")],
)
def test_an_error_of_an_optimizer_step_names_the_model(error: Exception, expected: str) -> None:
    """Unless it says that another worker is gone, from which the run recovers."""
    backend = Failing(error)
    context = StepContext("critic_update", model="critic", models={"critic": backend})
    updates = Updates(
        {"critic": backend}, {"critic": "critic"}, (), {"update": context}, context.metrics, BATCH, leads=True
    )
    updates.begin(0, 0)
    context.denominators["critic"] = 2.0
    with pytest.raises(type(error), match=f"^{expected}$"):
        updates.apply("critic", lambda: [updates.account()], lambda: None)


def epochs_done(divergence: float | None, target_kl: float | None) -> int:
    """Passes in which the policy is updated, of three, if each update tells this much for its two tokens."""
    backend, metrics = FakeBackend(), MetricStore()
    context = StepContext("update", model="policy", models={"policy": backend}, metrics=metrics)
    plan = dataclasses.replace(BATCH, epochs=3, target_kl=target_kl)
    updates = Updates(
        {"policy": backend}, {"policy": "actor"}, ["policy"], {"update": context}, metrics, plan, leads=True
    )
    updates.begin(0, 0)
    for _ in updates.epochs([Batch({"group": torch.zeros(1, dtype=torch.int64)})]):
        if not context.rests:
            context.denominators["policy"] = 2.0
            if divergence is not None:
                context.report_moved(divergence, 2.0)
        account = updates.account()
        if not updates.resting("policy"):
            updates.apply("policy", lambda account=account: [account], lambda: None)  # type: ignore[misc]
    return backend.steps


@pytest.mark.parametrize(("divergence", "steps"), [(0.3, 1), (0.1, 3), (None, 3)])
def test_a_policy_rests_once_it_has_moved_further_than_the_limit(divergence: float | None, steps: int) -> None:
    """By the mean over the tokens of the pass."""
    assert epochs_done(divergence, 0.1 if divergence is not None else None) == steps


def test_a_limit_that_nothing_is_measured_for_is_an_error() -> None:
    with pytest.raises(UserError, match=r"batch\.target_kl: no step that trains 'policy' has said.*ctx\.report_moved"):
        epochs_done(None, 0.1)
