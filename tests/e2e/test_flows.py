"""Every shipped flow trains, and the layout does not matter to it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from distflow.types import written
from tests.e2e.runs import SMALL, TEACHER, Launch

FLOWS = [
    path.stem
    for path in sorted((Path(__file__).parents[2] / "recipes" / "flow").glob("*.yaml"))
    if "  read:" not in path.read_text()
]
"""Those that generate; of the others, test_offline.py."""
LIKE_GRPO = ("aipo", "cispo", "dr_grpo", "gspo", "opo", "reinforce_plus_plus_baseline", "rloo")
"""Those that differ from another one by a function of a batch alone: they run with the long tests."""
STEPS = 3
RESULTS = ("actor/loss", "actor/grad_norm", "critic/rewards/mean", "critic/advantages/max", "response_length/mean")
NEEDS = {"distill": [TEACHER]}
METRICS = Path(__file__).parents[2] / "docs" / "metrics.md"


def documented() -> list[str]:
    """Patterns of the names in the page about metrics: what is written in capitals stands for any name."""
    found = []
    for line in METRICS.read_text().splitlines():
        first = ""
        for name in re.findall(r"`([^`]+)`", line.split(" | ")[0]) if line.startswith("| `") else ():
            first = name if "…" not in name else first
            whole = name.replace("…", first.rpartition("/")[0])
            found.append(re.sub(r"[A-Z]{4,}", "*", whole))
    return [*found, "step", "term"]


def is_documented(name: str) -> bool:
    """A further model's name or prefix stands before a name, or in the place of `actor` or `critic`."""
    own, _, rest = name.partition("/")
    names = [name, *(f"{base}{rest}" for base in ("", "actor/", "critic/") if own == "solver")]
    return any(written(one, documented()) for one in names)


@pytest.mark.parametrize("flow", [pytest.param(flow, marks=[pytest.mark.long] * (flow in LIKE_GRPO)) for flow in FLOWS])
def test_three_training_steps_are_the_same_in_one_process_and_in_several(launch: Launch, flow: str) -> None:
    results = []
    for layout in ("colocated", "split"):
        recipe = (f"flow={flow}", f"layout={layout}", *SMALL, *NEEDS.get(flow, []))
        run = launch("quickstart", *recipe, f"run.training_steps={STEPS}")
        assert run.wait() == 0, run.output
        lines = run.metrics()
        assert [line["step"] for line in lines] == [1, 2, 3]
        assert all(line["actor/grad_norm"] > 0 for line in lines)
        assert [name for line in lines for name in line if not is_documented(name)] == []
        results.append([line[name] for line in lines for name in RESULTS if name in line])
        assert run.leftovers() == []
    assert results[0] == pytest.approx(results[1], rel=1e-4, abs=1e-6)


def test_dapo_trains_on_replacements_of_groups_that_teach_nothing(launch: Launch) -> None:
    """Nobody copies three digits at first, so all rewards are 0: of each ledger every fifth group is trained on."""
    few = ("batch.prompts=4", "batch.ledgers=2", "batch.samples_per_prompt=2", f"run.training_steps={STEPS}")
    rewarded = ("flow.steps.reward.with.function=exact_match", "flow.steps.token_rewards.with.overlong_share=0")
    run = launch("quickstart", "flow=dapo", "layout=colocated", *few, *rewarded)
    assert run.wait() == 0, run.output
    trained = [{line["uid"][2] for line in run.dumps() if line["step"] == step} for step in (1, 2, 3)]
    assert trained == [{0, 1, 10, 11}, {20, 21, 30, 31}, {40, 41, 50, 51}]
    assert sum(line["group/dropped"] for line in run.metrics()) == 2 * 5 * 4
