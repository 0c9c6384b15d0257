"""Optimizer steps of several passes over a batch, as far as one worker decides about them."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from distflow.data.batch import Batch, Ragged
from distflow.errors import ReplicaLost, UserError, WorkerFailed
from distflow.runtime.metrics import MetricStore
from distflow.runtime.steps import StepContext
from distflow.runtime.updates import Updates
from distflow.testing.fakes import FakeBackend
from distflow.types import FINISH_REASONS
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


class Sick(FakeBackend):
    """Its norms are given."""

    def __init__(self, norms: Sequence[float]) -> None:
        super().__init__()
        self.norms = iter(norms)

    def apply(self, denominator: float) -> float:
        return next(self.norms)


NAN = float("nan")


def updated(norms: Sequence[float], steps: int, *, minibatches: int = 1, epochs: int = 1, leads: bool = True) -> Any:
    """Training steps in which a backend gives these norms; yields what decides, the metrics, and what `end` says."""
    backend, metrics = Sick(norms), MetricStore()
    context = StepContext("update", model="policy", models={"policy": backend}, metrics=metrics)
    plan = dataclasses.replace(BATCH, epochs=epochs, minibatches=minibatches)
    updates = Updates(
        {"policy": backend}, {"policy": "actor"}, ["policy"], {"update": context}, metrics, plan, leads=leads
    )
    for t in range(steps):
        updates.begin(t, t)
        groups = [torch.tensor([10 * t + m, 10 * t + m]) for m in range(minibatches)]
        for _ in updates.epochs([Batch({"group": one}) for one in groups]):
            context.denominators["policy"] = 2.0
            account = updates.account()
            updates.apply("policy", lambda account=account: [account], lambda: None)  # type: ignore[misc]
        ended = updates.end()
        yield updates, metrics.drain(), ended


def test_a_skipped_update_is_counted_and_its_groups_are_lost() -> None:
    """Of four mini-batches the second; the mean of the norms is that of the others."""
    ((updates, measured, ended),) = updated([1.0, NAN, 2.0, 3.0], 1, minibatches=4)
    assert measured["actor/skipped_updates"] == 1
    assert measured["actor/grad_norm"] == 2.0
    assert updates.lost("policy") == {1}
    assert ended == {"policy": ""}


def test_a_group_is_lost_only_if_no_pass_over_it_was_learnt_from() -> None:
    """Two passes over two mini-batches: the first one is skipped in one pass, the second in both."""
    ((updates, measured, _ended),) = updated([float("inf"), NAN, 1.0, NAN], 1, minibatches=2, epochs=2)
    assert measured["actor/skipped_updates"] == 3
    assert updates.lost("policy") == {1}


def test_one_replica_counts_for_all() -> None:
    ((updates, measured, _ended),) = updated([NAN], 1, leads=False)
    assert "actor/skipped_updates" not in measured
    assert math.isnan(measured["actor/grad_norm"])
    assert updates.lost("policy") == {0}


def test_what_has_moved_a_model_is_known_at_the_end_of_a_step() -> None:
    """Of two mini-batches one finite norm is enough."""
    norms = [NAN, NAN, NAN, 1.0, float("inf"), NAN]
    found = [ended["policy"].partition(";")[0] for _, _, ended in updated(norms, 3, minibatches=2)]
    assert found == ["no norm of its gradients was finite", "", "no norm of its gradients was finite"]


@pytest.mark.parametrize("how", ["left out", "cut off"])
def test_a_model_without_a_token_to_train_on_is_left_out(how: str) -> None:
    """In one of two mini-batches, beside one that has some. A step that accumulates nothing is an error still."""
    models, metrics = {"policy": FakeBackend(), "solver": FakeBackend()}, MetricStore()
    contexts = {
        model: StepContext("update", model=model, models=models, metrics=metrics, prefix=prefix)
        for model, prefix in (("policy", ""), ("solver", "solver"))
    }
    plan = dataclasses.replace(BATCH, minibatches=2, mask_truncated="loss" if how == "cut off" else None)
    trained = {"policy": "actor", "solver": "solver"}
    updates = Updates(models, trained, [*models], contexts, metrics, plan, leads=True)
    updates.begin(0, 0)
    reason, stop, length = "reward error", FINISH_REASONS.index("stop"), FINISH_REASONS.index("length")
    empty = _row("", how == "cut off", "" if how == "cut off" else reason, length)
    batches = [Batch(policy | _row("solver/", True, "", stop)) for policy in (empty, _row("", True, "", stop))]
    for part, accumulated in zip(updates.epochs(batches), [0.0, 1.0], strict=True):
        assert part is not None
        contexts["policy"].denominators["policy"] = accumulated
        contexts["solver"].denominators["solver"] = 1.0
        accounts = [updates.account()]
        for model in models:
            updates.apply(model, lambda accounts=accounts: [accounts.pop()], lambda: None)  # type: ignore[misc]
    assert (models["policy"].steps, models["solver"].steps) == (1, 2)
    assert updates.end() == {"policy": "", "solver": ""}
    counted = metrics.drain()
    assert counted["actor/empty_updates"] == 1
    assert "solver/empty_updates" not in counted
    updates.begin(1, 1)
    for _ in updates.epochs(batches[1:]):
        account = updates.account()
        with pytest.raises(WorkerFailed, match=r"training step 2: nothing to train 'policy' on — no step accumulated"):
            updates.apply("policy", lambda account=account: [account], lambda: None)  # type: ignore[misc]


def _row(lead: str, trained: bool, reason: str, finished: int) -> dict[str, Any]:
    """One sample of one token, as the model whose fields begin with `lead` has it."""
    return {
        "group": torch.tensor([0]),
        f"{lead}response_ids": Ragged.from_rows([[5]], torch.int64),
        f"{lead}response_mask": Ragged.from_rows([[trained]], torch.bool),
        f"{lead}left_out": Ragged.from_texts([reason]),
        f"{lead}finish_reason": torch.tensor([finished]),
    }


@pytest.mark.parametrize(("divergence", "steps"), [(0.3, 1), (0.1, 3), (None, 3)])
def test_a_policy_rests_once_it_has_moved_further_than_the_limit(divergence: float | None, steps: int) -> None:
    """By the mean over the tokens of the pass."""
    assert epochs_done(divergence, 0.1 if divergence is not None else None) == steps


def test_a_limit_that_nothing_is_measured_for_is_an_error() -> None:
    with pytest.raises(UserError, match=r"batch\.target_kl: no step that trains 'policy' has said.*ctx\.report_moved"):
        epochs_done(None, 0.1)
