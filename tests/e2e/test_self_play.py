"""Two policies that generate and train: the same run on any layout, whatever becomes of workers of the second one."""

from __future__ import annotations

import os
import signal
import statistics
from typing import Any

import pytest

from tests.e2e.runs import PACED, PROMPTS, SAMPLES, SMALL, Launch, Run, check_trained_once
from tests.e2e.test_critic_home import check_homes_go_back
from tests.e2e.test_scale import scale

STEPS = 20
PLAY = ("flow=self_play", *SMALL)
SLOW = ("flow=self_play", "layout=self_play", *PACED, "flow.steps.update.with.entropy_coef=null")
SOLVER = "{count: 2, steps: [solve, solver_old_logprobs, solver_update], backend: torch}"
LAYOUTS = {
    "colocated": ["layout=colocated"],
    "colocated ×2": ["layout=colocated", "layout.pools.worker.count=2"],
    "split": ["layout=split"],
    "own pools": ["layout=self_play"],
    "own pools, two of each": [
        "layout=self_play",
        *(f"layout.pools.{pool}.count=2" for pool in ("trainer", "solver_rollout", "solver_trainer")),
    ],
    "own pools, divided": [
        "layout=self_play",
        "layout.pools.solver_trainer={count: 2, backend: fsdp}",
    ],
    "both colocated": ["layout=colocated", f"layout.pools.solver={SOLVER}"],
    "colocated solver": ["layout=split", f"layout.pools.solver={SOLVER}"],
    "own rollouts": ["layout=split", "layout.pools.solver={steps: [solve]}"],
    "own trainer": ["layout=split", "layout.pools.solver={steps: [solver_old_logprobs, solver_update]}"],
    "services": ["layout=services"],
    "few slots": ["layout=split", "layout.pools.rollout={count: 1, slots: 3}"],
}


def tokens(run: Run) -> dict[tuple[Any, ...], tuple[Any, ...]]:
    """What both have written, by prompt and sample of the proposer."""
    lines = run.dumps()
    found = {
        (*line["uid"], line["sample"]): (
            line["step"],
            *line["response_ids"],
            line["solver/prompt_text"],
            *line["solver/response_ids"],
        )
        for line in lines
    }
    assert len(found) == len(lines), "a sample was trained on twice"
    return found


def norms(run: Run) -> list[float]:
    return [line[name] for line in run.metrics() for name in ("actor/grad_norm", "solver/grad_norm")]


@pytest.mark.parametrize(
    ("layouts", "updates"),
    [
        (["colocated", "split", "own pools", "both colocated"], []),
        pytest.param(
            ["colocated", "own pools, two of each"],
            ["batch.minibatches=2", "batch.epochs=2", "batch.ledgers=4"],
            marks=pytest.mark.long,
        ),
        pytest.param([*LAYOUTS], [], marks=pytest.mark.long),
        pytest.param([*LAYOUTS], ["batch.minibatches=2", "batch.epochs=2", "batch.ledgers=4"], marks=pytest.mark.long),
    ],
    ids=["some", "several updates", "all", "all, several updates"],
)
def test_both_take_the_same_steps_on_any_layout(launch: Launch, layouts: list[str], updates: list[str]) -> None:
    runs = {}
    for layout in layouts:
        settings = [*PLAY, "run.training_steps=6", "models.policy.dtype=float64", *updates]
        runs[layout] = launch("quickstart", *settings, *LAYOUTS[layout])
        assert runs[layout].wait() == 0, runs[layout].output
        assert runs[layout].leftovers() == []
    reference, *_ = runs.values()
    assert len(tokens(reference)) == 6 * PROMPTS * SAMPLES
    for layout, run in runs.items():
        assert tokens(run) == tokens(reference), layout
        assert norms(run) == pytest.approx(norms(reference), rel=1e-6), layout
        assert all("solver/score/mean" in line for line in run.metrics()), layout


@pytest.mark.parametrize("layout", ["own pools", pytest.param("both colocated", marks=pytest.mark.long)])
def test_neither_model_lags_behind_further_than_it_may(launch: Launch, layout: str) -> None:
    run = launch("quickstart", *PLAY, *LAYOUTS[layout], "layout.max_staleness=1", f"run.training_steps={STEPS}")
    assert run.wait() == 0, run.output
    check_trained_once(run, STEPS)
    lags = {"policy_versions": set[int](), "solver/policy_versions": set[int]()}
    for line in run.dumps():
        for field, seen in lags.items():
            seen.update(line["step"] - 1 - version for _, version, _, _ in line[field])
    assert lags == {"policy_versions": {0, 1}, "solver/policy_versions": {0, 1}}
    for name in ("staleness/max", "solver/staleness/max"):
        assert max(line[name] for line in run.metrics()) == 1


@pytest.mark.parametrize("refresh", ["at_bound", pytest.param("when_idle", marks=pytest.mark.long)])
def test_the_second_model_takes_newer_weights_when_the_layout_says_so(launch: Launch, refresh: str) -> None:
    settings = ["layout=self_play", "layout.max_staleness=1", f"layout.refresh={refresh}", "limits.no_progress_s=20"]
    run = launch("quickstart", *PLAY, *settings, "run.training_steps=8")
    assert run.wait() == 0, run.output
    check_trained_once(run, 8)
    assert run.leftovers() == []


def test_one_of_two_that_generate_for_others_dies(launch: Launch) -> None:
    """What it was asked for goes to the other one, and nobody else notices."""
    run = launch("quickstart", *SLOW, "layout.pools.solver_rollout.count=2", f"run.training_steps={STEPS}")
    run.until(lambda: run.steps_done() >= 3, "the third training step")
    os.kill(run.pid_of("solver_rollout/0"), signal.SIGKILL)
    assert run.wait() == 0, run.output
    check_trained_once(run, STEPS)
    lives = {name: run.lives_of(name) for name in ("trainer/0", "solver_trainer/0", "rollout/0", "solver_rollout/0")}
    assert lives == {"trainer/0": 1, "solver_trainer/0": 1, "rollout/0": 1, "solver_rollout/0": 2}
    assert run.leftovers() == []


@pytest.mark.parametrize("victim", ["solver_trainer/0", pytest.param("trainer/0", marks=pytest.mark.long)])
def test_whoever_trains_dies_both_homes_go_back_to_one_step(launch: Launch, victim: str) -> None:
    settings = [*SLOW, f"run.training_steps={STEPS}", "run.save_every=5", "layout.max_staleness=1"]
    run = launch("quickstart", *settings)
    check_homes_go_back(run, victim, ("trainer-0", "solver_trainer-0"), STEPS)
    for line in run.dumps():
        for field in ("policy_versions", "solver/policy_versions"):
            assert all(0 <= line["step"] - 1 - version <= 1 for _, version, _, _ in line[field])
    assert run.lives_of("rollout/0") == run.lives_of("solver_rollout/0") == 1, "those stay"
    assert run.leftovers() == []


@pytest.mark.long
def test_more_workers_that_generate_for_others_join_and_leave(launch: Launch) -> None:
    run = launch("quickstart", *SLOW, f"run.training_steps={4 * STEPS}")
    run.until(lambda: run.steps_done() >= 3, "the third training step")
    assert "solver_rollout: 1 → 2; joining: solver_rollout/1" in scale(run, "solver_rollout=2")
    file = run.folder / "metrics" / "solver_rollout-1.jsonl"
    run.until(lambda: file.exists() and "calls/answered" in file.read_text(), "its first answers")
    assert "solver_rollout: 2 → 1; leaving" in scale(run, "solver_rollout=1")
    assert run.wait() == 0, run.output
    check_trained_once(run, 4 * STEPS)
    assert "Traceback" not in (run.folder / "logs" / "solver_rollout-1.log").read_text()
    assert run.leftovers() == []


@pytest.mark.parametrize("layout", [pytest.param("colocated", marks=pytest.mark.long), "own pools"])
def test_a_resumed_run_equals_an_undisturbed_one(launch: Launch, layout: str) -> None:
    """Both models, their optimizers and their samples, to the last bit."""
    settings = [*PLAY, *LAYOUTS[layout], "run.deterministic=true", "run.training_steps=6"]
    whole, first = launch("quickstart", *settings), launch("quickstart", *settings, "run.stop_after=3")
    assert (whole.wait(), first.wait()) == (0, 0), whole.output + first.output
    second = launch("quickstart", *settings, "--resume", name=first.name)
    assert second.wait() == 0, second.output
    assert tokens(second) == tokens(whole)
    assert norms(second) == norms(whole)


@pytest.mark.long
@pytest.mark.timeout(900)
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_both_learn(launch: Launch, seed: int) -> None:
    """The quickstart as shipped but for the flow."""
    run = launch("quickstart", "flow=self_play", "run.training_steps=450", f"run.seed={seed}")
    assert run.wait(600) == 0, run.output
    lines = run.metrics()[-10:]
    for name in ("critic/score/mean", "solver/score/mean"):
        assert statistics.mean(line[name] for line in lines) >= 0.9, name
