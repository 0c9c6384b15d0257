"""No shipped flow on any layout has pools that wait for one another; where they would, the plan says who for whom."""

from __future__ import annotations

from itertools import product
from pathlib import Path

import pytest

from distflow.config.load import load_recipe
from distflow.errors import Problems
from distflow.flow.structure import Structure, build_structure
from distflow.flow.wait_order import check_waits, find_cycle, wait_order
from distflow.flow.wiring import wire
from tests.flow.conftest import Folder

RECIPES = Path(__file__).parents[2] / "recipes"
FLOWS = sorted(path.stem for path in (RECIPES / "flow").glob("*.yaml"))
LAYOUTS = sorted(path.stem for path in (RECIPES / "layout").glob("*.yaml"))
OWN_POOLS = {
    "judge": ["+layout.pools.judge.steps=[reward]"],
    "critic": ["+layout.pools.critic.steps=[values,critic_update]"],
    "reference": ["+layout.pools.reference.steps=[reference]"],
    "solver": ["+layout.pools.solver.steps=[solve,solver_old_logprobs,solver_update]"],
    "solver_rollout": ["+layout.pools.solver.steps=[solve]"],
    "solver_trainer": ["+layout.pools.solver.steps=[solver_old_logprobs,solver_update]"],
}


def structure_of(recipe: Path | str, overrides: list[str]) -> Structure:
    given = load_recipe(recipe, overrides).recipe
    problems = Problems(lambda key: "recipe")
    structure = build_structure(given.flow, given.layout, given.models, problems, given.run, given.batch)
    assert structure is not None, problems
    return structure


@pytest.mark.parametrize(("flow", "layout"), list(product(FLOWS, LAYOUTS)))
@pytest.mark.parametrize("staleness", [0, 1, 2])
def test_no_shipped_flow_on_any_layout_stands_still(flow: str, layout: str, staleness: int) -> None:
    structure = structure_of("quickstart", [f"flow={flow}", f"layout={layout}"])
    assert find_cycle(wait_order(structure, wire(structure), staleness)) == []


@pytest.mark.parametrize("pool", list(OWN_POOLS))
@pytest.mark.parametrize("layout", ["split", "colocated"])
def test_neither_does_one_with_a_pool_for_some_steps(pool: str, layout: str) -> None:
    flow = "self_play" if pool.startswith("solver") else "grpo_kl" if pool == "reference" else "ppo"
    structure = structure_of("quickstart", [f"flow={flow}", f"layout={layout}", *OWN_POOLS[pool]])
    for staleness in (0, 1):
        assert find_cycle(wait_order(structure, wire(structure), staleness)) == []


def test_a_reward_elsewhere_that_reads_what_owners_write_waits_for_itself(folder: Folder) -> None:
    folder.change('reads=["response_ids"]', 'reads=["response_ids", "values"]')
    values = "flow.steps.values={call: ./steps.py:values, model: critic}"
    overrides = [values, "+layout.pools.judge.steps=[reward]"]
    structure = structure_of(folder.recipe, overrides)
    problems = Problems(lambda key: "recipe")
    check_waits(load_recipe(folder.recipe, overrides).recipe, structure, problems)
    [problem] = problems
    for event in ("judge has run reward of", "trainer has run values of", "the samples of training step"):
        assert event in str(problem)


def test_a_further_model_generates_with_a_version_of_its_own() -> None:
    structure = structure_of("quickstart", ["flow=self_play", "layout=self_play"])
    graph = wait_order(structure, wire(structure), 1)
    event = "solver_rollout has run solve of training step 3"
    assert graph[event] == {
        "rollout has run propose of training step 3",
        "rollout has run sample of training step 3",
        "solver_trainer has trained on training step 1",
    }


def test_a_later_training_step_waits_for_the_version_that_its_staleness_asks_for() -> None:
    structure = structure_of("quickstart", ["layout=split"])
    for staleness in (0, 1, 2):
        graph = wait_order(structure, wire(structure), staleness)
        last = staleness + 3
        assert graph[f"rollout has run sample of training step {last}"] == {"trainer has trained on training step 2"}
