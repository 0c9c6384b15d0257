"""top-p and top-k: which engines may cut them off, and who gets the log-probs of what they leave."""

from __future__ import annotations

import pytest

from distflow.errors import RecipeError
from distflow.flow.plan import Plan
from distflow.flow.recipe_check import plan_recipe
from tests.flow.conftest import Folder

FIELD = "rollout_filtered_logprobs"
SAMPLE, UPDATE = "flow.steps.sample.with", "flow.steps.update.with"
VLLM = "layout.pools.rollout.engine=vllm"
SPLIT = ("layout=split", "layout.pools.rollout.device=cpu")


def planned(*given: str) -> Plan:
    return plan_recipe("quickstart", [*SPLIT, *given])[1]


@pytest.mark.parametrize(
    ("filters", "weighing"),
    [
        ([f"{SAMPLE}.top_p=0.8"], []),
        ([f"{SAMPLE}.top_k=20"], []),
        ([f"{SAMPLE}.top_p=0.9", f"{SAMPLE}.top_k=50"], [f"{UPDATE}.correction={{icepop: [0.5, 5.0]}}"]),
        ([f"{SAMPLE}.top_p=0.8"], [f"{UPDATE}.tis=null", f"{UPDATE}.correction={{geometric_mask: [0.99, 1.01]}}"]),
        ([f"{SAMPLE}.top_p=0.8"], [f"{UPDATE}.tis=null", f"{UPDATE}.loss=aipo"]),
        ([f"{SAMPLE}.top_k=1"], [f"{UPDATE}.tis=null", f"{UPDATE}.loss=decoupled_ppo"]),
    ],
)
def test_weights_by_log_probs_of_a_part_of_the_vocabulary_are_refused(filters: list[str], weighing: list[str]) -> None:
    key = filters[0].partition("=")[0].replace(".", r"\.")
    with pytest.raises(RecipeError, match=rf"{key} — step 'update' weights tokens by .*vLLM tells .*torch or sglang"):
        planned(VLLM, *filters, *weighing)
    for engine in ("torch", "sglang"):
        planned(f"layout.pools.rollout.engine={engine}", *filters, *weighing)


@pytest.mark.parametrize(
    "given",
    [
        [f"{SAMPLE}.temperature=0.7"],
        [f"{SAMPLE}.top_p=0.8", f"{UPDATE}.tis=null"],
        ["val.every=5", "val.sampling.top_p=0.8"],
    ],
)
def test_nothing_is_refused_where_nothing_is_weighted(given: list[str]) -> None:
    assert planned(VLLM, *given).generate_step.weighed == (f"{UPDATE}.tis=null" not in given)


def test_a_pool_for_validation_alone_may_have_filters() -> None:
    pool = "layout.pools.judge={roles: [validate], engine: vllm, device: cpu, count: 1}"
    planned(pool, "val.every=5", f"{SAMPLE}.top_p=0.8")


def test_filtered_log_probs_go_where_a_step_reads_them(folder: Folder) -> None:
    assert FIELD not in planned().generate_step.writes
    folder.write("mine.py", MINE)
    mine = f"{UPDATE}.loss={folder.path / 'mine.py'}:mine"
    plan = planned(mine)
    assert FIELD in plan.generate_step.writes
    assert FIELD in plan.edge("samples").fields
    dumped = planned(f"run.dump_fields=[{FIELD}]")
    assert FIELD in dumped.edge("samples").fields


MINE = """
from distflow.algorithms import TokenLoss

def mine(terms, *, scale: float = 1.0) -> TokenLoss:
    ratio = (terms.logprobs - terms["rollout_filtered_logprobs"]).exp()
    return TokenLoss(-scale * ratio * terms.advantages, ratio > 2)
"""


@pytest.mark.parametrize(
    ("flow", "compares"),
    [
        (["flow=grpo"], True),
        (["flow=dapo"], True),
        (["flow=remax"], True),
        (["flow=grpo", "flow.steps.advantage.with.function=rloo"], True),
        (["flow=grpo", "batch.samples_per_prompt=1"], False),
        (["flow=reinforce_plus_plus"], False),
        (["flow=ppo"], False),
    ],
)
def test_which_flows_compare_the_samples_of_a_prompt(flow: list[str], compares: bool) -> None:
    assert planned(*flow).compares_samples("") == compares
