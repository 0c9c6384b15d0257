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


@pytest.mark.parametrize(
    ("engine", "given", "message"),
    [
        ("sglang", "min_new_tokens=2", "SGLang asks a tokenizer for end tokens .* engine torch or vllm"),
        ("sglang", "repetition_penalty=1.2", "none of the prompt, .* engine torch or vllm"),
        (
            "sglang",
            "logit_bias={5: 2.0}",
            "weights tokens by .*SGLang tells log-probs of logits with their bias — .*torch",
        ),
        ("vllm", "min_p=0.1", "weights tokens by .*min-p, top-p and top-k.* engine torch or sglang"),
        ("vllm", "min_new_tokens=2", "weights tokens by .*leave min_new_tokens out, or engine torch"),
        ("vllm", "logit_bias={5: 2.0}", "weights tokens by .*leave logit_bias out, or engine torch"),
        ("vllm", "repetition_penalty=1.2", "weights tokens by .*leave repetition_penalty out, or engine torch"),
        ("distflow.testing.emulated:EmulatedEngine", "stop='='", "draws how long samples are.* torch, sglang or vllm"),
        ("distflow.testing.emulated:EmulatedEngine", "min_new_tokens=2", "draws how long samples are"),
    ],
)
def test_an_engine_that_does_not_take_a_setting_is_named(engine: str, given: str, message: str) -> None:
    with pytest.raises(RecipeError, match=rf"sample\.with\.{given.partition('=')[0]} — .*{message}"):
        planned(f"layout.pools.rollout.engine={engine}", f"{SAMPLE}.{given}")
    planned("layout.pools.rollout.engine=torch", f"{SAMPLE}.{given}")
    if engine == "vllm" or "logit_bias" in given:
        planned(f"layout.pools.rollout.engine={engine}", f"{SAMPLE}.{given}", f"{UPDATE}.tis=null")
        planned(f"layout.pools.rollout.engine={engine}", "val.every=5", f"val.sampling.{given}")


def test_validation_is_refused_what_an_engine_never_takes() -> None:
    with pytest.raises(RecipeError, match=r"val\.sampling\.min_new_tokens — SGLang asks a tokenizer"):
        planned("layout.pools.rollout.engine=sglang", "val.every=5", "val.sampling.min_new_tokens=2")


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (f"{SAMPLE}.min_p=1.5", r"min_p — 1.5 is not allowed — expected a number >= 0, <= 1"),
        (f"{SAMPLE}.repetition_penalty=0", r"repetition_penalty — 0 is not allowed — expected a number > 0"),
        (f"{SAMPLE}.min_new_tokens=-1", r"min_new_tokens — -1 is not allowed"),
        (f"{SAMPLE}.min_new_tokens=400", r"min_new_tokens — 400 is more than max_new_tokens, \d+ — at most"),
        (f"{SAMPLE}.stop=[3]", r"sample\.with\.stop — expected text, or a list of texts, got \[3\]"),
        (f"{SAMPLE}.stop=3", r"sample\.with\.stop — expected text, or a list of texts, got 3"),
        (f"{SAMPLE}.logit_bias={{x: 1}}", r"logit_bias — expected a mapping of whole numbers to numbers, got \{"),
        (f"{SAMPLE}.logit_bias=[1]", r"logit_bias — expected a mapping of whole numbers to numbers, got \[1\]"),
    ],
)
def test_what_no_request_can_have_is_refused(given: str, message: str) -> None:
    with pytest.raises(RecipeError, match=message):
        planned(given)


def test_the_settings_are_those_of_every_generate_step(folder: Folder) -> None:
    """One whose function has such a setting itself keeps its own default."""
    plan = plan_recipe(folder.recipe, ["flow.steps.sample.with.stop=[x,y]"])[1]
    assert plan.generate_step.settings["stop"] == ["x", "y"]
    assert plan.generate_step.settings["min_p"] == 0.0
    folder.change("max_new_tokens: int = 4)", "max_new_tokens: int = 4, min_p: float = 0.25)")
    assert plan_recipe(folder.recipe)[1].generate_step.settings["min_p"] == 0.25
