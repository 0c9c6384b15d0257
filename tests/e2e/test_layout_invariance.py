"""The same recipe on any layout: the same prompts, the same tokens, the same gradients."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.branching_turns import BRANCHES
from tests.e2e.runs import PROMPTS, SAMPLES, SMALL, Launch, Run

LAYOUTS = {
    "colocated": ["layout=colocated"],
    "colocated ×2": ["layout=colocated", "layout.pools.worker.count=2"],
    "1+1": ["layout=split", "layout.pools.rollout.count=1", "layout.pools.trainer.count=1"],
    "2+2": ["layout=split", "layout.pools.rollout.count=2", "layout.pools.trainer.count=2"],
    "1+3": ["layout=split", "layout.pools.rollout.count=1", "layout.pools.trainer.count=3"],
    "2+2, 1 critic": ["layout=critic", "layout.pools.trainer.count=2", "layout.pools.critic.count=1"],
    "2+1, 2 critics": ["layout=critic", "layout.pools.critic.count=2"],
    "2+2, 3 critics": ["layout=critic", "layout.pools.trainer.count=2", "layout.pools.critic.count=3"],
    "2+2, divided critics": [
        "layout=critic",
        "layout.pools.trainer.count=2",
        "layout.pools.critic.backend=fsdp",
    ],
    "colocated ×2, 1 critic": [
        "layout=colocated",
        "layout.pools.worker.count=2",
        "layout.pools.critic={count: 1, steps: [values, critic_update], backend: torch}",
    ],
    "1+1, few slots": ["layout=split", "layout.pools.rollout.count=1", "layout.pools.rollout.slots=3"],
    "3+2": ["layout=split", "layout.pools.rollout.count=3", "layout.pools.trainer.count=2"],
}
"""Rollouts + training replicas; critics of their own, where the flow trains one."""


def tokens(run: Run) -> dict[tuple[Any, ...], tuple[Any, ...]]:
    """By prompt, sample, and sequence, where samples have several."""
    lines = run.dumps()
    found = {
        (*line["uid"], line["sample"], line.get("sequence", 0)): (line["step"], line["prompt"], *line["response_ids"])
        for line in lines
    }
    assert len(found) == len(lines), "a sample was trained on twice"
    return found


def norms(run: Run) -> list[float]:
    return [line["actor/grad_norm"] for line in run.metrics()]


def compare(launch: Launch, layouts: Iterable[str], steps: int, tolerance: float, *settings: str) -> list[Run]:
    """The first layout is what the others are measured by."""
    runs = {}
    for layout in layouts:
        runs[layout] = launch("quickstart", *settings, f"run.training_steps={steps}", *LAYOUTS[layout])
        assert runs[layout].wait() == 0, runs[layout].output
    reference, *_ = runs.values()
    prompts = PROMPTS if SMALL[0] in settings else 32
    assert len({key[:4] for key in tokens(reference)}) == steps * prompts * SAMPLES
    for layout, run in runs.items():
        assert tokens(run) == tokens(reference), layout
        assert norms(run) == pytest.approx(norms(reference), rel=tolerance), layout
    return list(runs.values())


@pytest.mark.parametrize(
    "layouts", [["colocated ×2", "1+1", "2+2", "3+2"], pytest.param([*LAYOUTS], marks=pytest.mark.long)]
)
def test_one_worker_or_several_give_the_same_run(launch: Launch, layouts: list[str]) -> None:
    compare(launch, layouts, 10, 1e-6, *SMALL, "models.policy.dtype=float64")


@pytest.mark.parametrize(
    "layouts", [["colocated", "2+2", "1+1, few slots"], pytest.param([*LAYOUTS], marks=pytest.mark.long)]
)
def test_they_do_so_nearly_in_single_precision(launch: Launch, layouts: list[str]) -> None:
    compare(launch, layouts, 3, 1e-3, *SMALL, "models.policy.dtype=float32")


@pytest.mark.long
def test_a_hundred_training_steps_are_the_same_too(launch: Launch) -> None:
    compare(launch, ["1+1", "2+2"], 100, 1e-6, "models.policy.dtype=float64")


def test_steps_of_batch_scope_see_the_batch_of_all_replicas(launch: Launch) -> None:
    whole = ["flow.steps.advantage.call=distflow.workers.trainer:batch_advantage", "models.policy.dtype=float64"]
    compare(launch, ["1+1", "1+3"], 5, 1e-6, *SMALL, *whole)


def test_who_computes_a_micro_batch_does_not_matter(launch: Launch) -> None:
    """Micro-batches so small that replicas take groups from each other all the time."""
    small = ["models.policy.dtype=float64", "batch.tokens_per_microbatch=128"]
    runs = compare(launch, ["1+1", "1+3", "colocated ×2"], 3, 1e-6, *small)
    stolen = sum(line["stealing/groups/count"] for line in runs[1].metrics() if "stealing/groups/count" in line)
    assert stolen > 0, "nothing was stolen"
    kept = launch("quickstart", *small, "run.training_steps=3", "layout.stealing=false", *LAYOUTS["1+3"])
    assert kept.wait() == 0, kept.output
    assert not any("stealing/groups/count" in line for line in kept.metrics())
    assert tokens(kept) == tokens(runs[0])


def test_branches_of_an_episode_draw_the_same_everywhere_and_not_the_same_as_each_other(launch: Launch) -> None:
    """They wait for other times than they were made in; what they draw depends on neither."""
    call = f"flow.steps.sample.call={Path(__file__).with_name('branching_turns.py')}:branches"
    settings = ["flow.steps.sample.with.max_new_tokens=3", "models.policy.dtype=float64"]
    run, _ = compare(launch, ["colocated", "2+2"], 2, 1e-6, *SMALL, call, *settings)
    found: dict[tuple[Any, ...], list[tuple[int, ...]]] = {}
    for line in run.dumps():
        found.setdefault((*line["uid"], line["sample"]), []).append(tuple(line["response_ids"][:3]))
    assert {len(firsts) for firsts in found.values()} == {BRANCHES}
    assert sum(len(set(firsts)) == BRANCHES for firsts in found.values()) > 0.9 * len(found)
