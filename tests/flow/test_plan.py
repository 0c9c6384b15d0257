"""What a plan says about workers, edges and batches; golden scripts."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from distflow.config.paths import shipped_recipes
from distflow.errors import RecipeError
from distflow.flow.lanes import Whereabouts, lanes_of
from distflow.flow.plan import Plan
from distflow.flow.plan_svg import render_svg
from distflow.flow.plan_text import plan_data, render_page
from distflow.flow.recipe_check import plan_recipe
from distflow.flow.script import render_script
from distflow.types import WorkerName

GOLDEN = Path(__file__).parent / "golden"
JUDGE_ON_TRAINER = ["layout.pools.trainer.steps=[reward]", "flow.steps.reward.with.on_error=zero"]


def planned(recipe: str, *overrides: str) -> Plan:
    return plan_recipe(recipe, overrides, need_files=False)[1]


@pytest.mark.parametrize("recipe", shipped_recipes())
@pytest.mark.parametrize("layout", ["split", "async", "colocated", "services"])
@pytest.mark.parametrize("flow", ["grpo", "grpo_kl"])
def test_every_flow_fits_every_layout(recipe: str, layout: str, flow: str) -> None:
    plan = planned(recipe, f"layout={layout}", f"flow={flow}")
    assert plan.primary == "policy"
    assert plan.owners == (("worker/0",) if layout == "colocated" else ("trainer/0",))
    assert set(plan.recipe.models) == ({"policy", "reference"} if flow == "grpo_kl" else {"policy"})


@pytest.mark.parametrize(
    "name, overrides",
    [
        ("split", []),
        ("split_kl", ["flow=grpo_kl"]),
        ("colocated", ["layout=colocated"]),
        ("colocated_kl", ["layout=colocated", "flow=grpo_kl"]),
        ("services", ["layout=services"]),
        ("services_kl", ["layout=services", "flow=grpo_kl"]),
        ("judge_on_trainer", JUDGE_ON_TRAINER),
        ("reference_on_rollout", ["flow=grpo_kl", "layout.pools.rollout.steps=[reference]"]),
    ],
)
def test_scripts_are_the_golden_ones(name: str, overrides: list[str]) -> None:
    plan = planned("quickstart", *overrides)
    pools = dict.fromkeys(worker.name.pool for worker in plan.workers)
    text = "\n\n".join(render_script(plan, WorkerName(pool, 0)) for pool in pools)
    path = GOLDEN / f"{name}.py.txt"
    if "UPDATE_GOLDEN" in os.environ:
        path.write_text(text)
    assert text == path.read_text(), "if the change is meant: UPDATE_GOLDEN=1 pytest tests/flow/test_plan.py"
    compile(text, name, "exec")


def test_workers_of_the_split_layout() -> None:
    plan = planned("quickstart", "flow=grpo_kl")
    rollout, trainer = plan.worker(WorkerName("rollout", 1)), plan.worker(WorkerName("trainer", 0))
    assert (rollout.generates, rollout.models, rollout.backend) == (("policy",), (), None)
    assert rollout.engine == "distflow.workers.engines.torch_engine:TorchEngine"
    assert (trainer.generates, trainer.engine) == ((), None)
    assert set(trainer.models) == {"policy", "reference"}
    assert plan.trained_models == ("policy",)
    assert plan.generate_step.settings["max_new_tokens"] == 4
    assert plan.generate_step.settings["top_k"] == 0  # the function's default


def test_the_arithmetic_of_a_batch() -> None:
    batch = planned("quickstart").batch
    assert (batch.samples, batch.groups_per_ledger, batch.max_refills) == (256, 4, 40)
    assert planned("quickstart", "batch.max_refills=3").batch.max_refills == 3


def test_only_fields_that_are_read_or_dumped_cross() -> None:
    fields = planned("quickstart").edge("samples").fields
    assert "task" not in fields
    assert {"rollout_logprobs", "response_text", "reward", "rewards/*"} <= set(fields)
    assert "task" in planned("quickstart", *JUDGE_ON_TRAINER).edge("samples").fields
    colocated = planned("quickstart", "layout=colocated")
    assert lanes_of(colocated, colocated.edge("samples")) == ("inproc",)


def test_settings_of_one_worker() -> None:
    plan = planned(
        "quickstart",
        "layout.pools.rollout.slots=64",
        "layout.pools.rollout.each.1={threads: 3, device: 'cuda:3', slots: 16}",
        "layout.pools.rollout.engine_options.prefill_tokens=4",
    )
    first, second = plan.worker(WorkerName("rollout", 0)), plan.worker(WorkerName("rollout", 1))
    assert (first.threads, first.device, first.slots) == (1, "auto", 64)
    assert (second.threads, second.device, second.slots) == (3, "cuda:3", 16)
    assert second.engine_options == {"prefill_tokens": 4}


def test_a_worker_has_no_more_slots_than_samples_can_be_leased() -> None:
    tiny = ["batch.prompts=8", "batch.samples_per_prompt=2", "layout.pools.rollout.slots=500"]
    assert planned("quickstart", *tiny).worker(WorkerName("rollout", 0)).slots == 16
    assert planned("quickstart", *tiny, "layout=async").worker(WorkerName("rollout", 0)).slots == 32


def test_batch_scope_switches_streaming_off_and_says_so(folder) -> None:
    assert plan_recipe(folder.recipe)[1].streamed
    steps = folder.path / "steps.py"
    steps.write_text(
        steps.read_text().replace('writes=["advantage"], scope="group"', 'writes=["advantage"], scope="batch"')
    )
    plan = plan_recipe(folder.recipe)[1]
    assert not plan.streamed
    assert any("advantage" in note and "batch scope" in note for note in plan.notes)


def test_steps_of_one_worker_fill_their_fields_elsewhere(folder) -> None:
    folder.step(
        "@step(role='score', reads=['response_ids'], writes=['novelty'], fills={'novelty': 0.5})\n"
        "def novelty(batch, ctx): ...\n"
    )
    folder.step("@step(role='train', reads=['novelty'], writes=[])\ndef look(batch, ctx): ...\n")
    own = "layout.pools.rollout.each.1.steps=[+./steps.py:novelty]"
    plan = plan_recipe(folder.recipe, [own, "flow.steps.look.call=./steps.py:look"])[1]
    assert "novelty" in plan.edge("samples").fields
    assert plan.edge("samples").fills == {"novelty": 0.5}
    assert 'w.call("novelty", groups)' in render_script(plan, WorkerName("rollout", 1))
    assert "novelty" not in render_script(plan, WorkerName("rollout", 0))


@pytest.mark.parametrize(
    "declaration, message",
    [
        ("role='score', reads=[], writes=['n']", "writes n without a fill value"),
        ("role='train', reads=[], writes=['n'], fills={'n': 0}", "has the role 'train' — a worker's own steps have"),
        ("role='score', reads=['advantage'], writes=['n'], fills={'n': 0}", "reads 'advantage', which is not"),
    ],
)
def test_own_steps_that_do_not_fit(declaration: str, message: str, folder, refused) -> None:
    folder.step(f"@step({declaration})\ndef own(batch, ctx): ...\n")
    assert message in refused("layout.pools.rollout.each.0.steps=[+./steps.py:own]")


def test_own_steps_begin_with_a_plus(refused) -> None:
    assert "'reward' does not begin with +" in refused("layout.pools.rollout.each.0.steps=[reward]")


def test_a_script_of_the_users_own(folder) -> None:
    folder.write("own.py", "def script(w): ...\n")
    plan = plan_recipe(folder.recipe, ["layout.pools.rollout.each.1.script=own.py"])[1]
    assert render_script(plan, WorkerName("rollout", 1)) == "def script(w): ...\n"
    assert "w.generate" in render_script(plan, WorkerName("rollout", 0))


def test_a_worker_that_does_not_exist() -> None:
    with pytest.raises(
        LookupError, match="there is no worker rollout/9; this layout has rollout/0, rollout/1, trainer/0"
    ):
        planned("quickstart").worker(WorkerName("rollout", 9))


def test_too_little_memory_for_samples_is_refused_with_the_least_that_does() -> None:
    long = "flow.steps.sample.with.max_new_tokens=2000"
    small = "layout.pools.trainer.sample_memory_mb"
    with pytest.raises(
        RecipeError, match=rf"{small} — sample_memory_mb 1 is too little .* 32 groups .*: at least 24, or lower"
    ):
        planned("quickstart", long, f"{small}=1")
    planned("quickstart", long, f"{small}=24")
    own = "layout.pools.trainer.each.0.sample_memory_mb"
    with pytest.raises(RecipeError, match=rf"{own} — sample_memory_mb 1 is too little .*: at least 24, or lower"):
        planned("quickstart", long, f"{small}=24", f"{own}=1")


def test_problems_of_the_flow_are_told_beside_those_of_a_broken_layout() -> None:
    with pytest.raises(RecipeError) as refused:
        planned("quickstart", "layout.pools.rollout.count=two", "flow.steps.reward.with.function=exactmatch")
    keys = {problem.key for problem in refused.value.problems}
    assert keys == {"layout.pools.rollout.count", "flow.steps.reward.with.function"}


def test_the_page_shows_what_matters() -> None:
    page = render_page(planned("quickstart", "flow=grpo_kl"))
    for part in ("rollout/1", "32 prompts × 8 samples = 256", "rollout -> trainer over shm", "rollout_logprobs"):
        assert part in page
    assert "model 'reference' is a copy of 'policy'" in page


def test_the_page_draws_pools_edges_and_models() -> None:
    lines = [" ".join(line.split()) for line in render_page(planned("quickstart", "flow=grpo_kl")).splitlines()]
    for line in (
        "rollout 2 sample, reward generates with policy",
        "trainer 1 advantage, reference, update home of policy; runs frozen reference",
        "samples (lease): rollout -> trainer over shm",
        "policy (weights): trainer -> rollout over shm",
        "policy trainer rollout",
        "reference none: frozen trainer",
    ):
        assert line in lines
    waits = [line for line in lines if line.startswith("waits:")]
    assert [line.partition(" for ")[0] for line in waits] == ["waits: trainer", "waits: rollout"]


def test_the_plan_as_data_names_lanes_and_waits() -> None:
    edges = plan_data(planned("quickstart", "layout=colocated"))["edges"]
    assert [(edge["kind"], edge["lane"], edge["waits"]) for edge in edges] == [
        ("lease", "inproc", "each of worker, before it trains, until every owner has its groups of the training step"),
        ("weights", "inproc", "nobody"),
    ]


@pytest.mark.parametrize(
    ("overrides", "on_b", "samples", "weights"),
    [
        ((), (), ("shm",), ("shm",)),
        ((), ("rollout/1",), ("shm", "zmq"), ("shm", "tcp")),
        ((), ("trainer/0",), ("zmq",), ("tcp",)),
        (("layout=colocated",), (), ("inproc",), ("inproc",)),
        (("layout=colocated", "layout.pools.worker.count=2"), (), ("inproc", "shm"), ("inproc",)),
        (("layout=colocated", "layout.pools.worker.count=2"), ("worker/1",), ("inproc", "zmq"), ("inproc",)),
    ],
)
def test_lanes_follow_from_where_the_workers_are(
    overrides: tuple[str, ...], on_b: tuple[str, ...], samples: tuple[str, ...], weights: tuple[str, ...]
) -> None:
    plan = planned("quickstart", *overrides)
    where = Whereabouts(dict.fromkeys(on_b, 1))
    assert lanes_of(plan, plan.edge("samples"), where) == samples
    assert lanes_of(plan, plan.edge("policy"), where) == weights
    assert plan_data(plan, where=where)["edges"][0]["lane"] == ", ".join(samples)
    assert f" over {', '.join(weights)}\n" in render_page(plan, where=where)
    assert f"weights, {', '.join(weights)}<" in render_svg(plan, where)


def test_the_plan_as_data() -> None:
    import json

    data = json.loads(json.dumps(plan_data(planned("quickstart"))))
    assert [worker["name"] for worker in data["workers"]] == ["rollout/0", "rollout/1", "trainer/0"]
    assert data["batch"]["samples"] == 256


def test_a_run_without_a_bound_says_so() -> None:
    plan = planned("quickstart", "layout=async", "layout.max_staleness=unbounded")
    assert plan.batch.max_staleness is None
    assert "samples of any age, trained as they arrive (max_staleness: unbounded)" in render_page(plan)
    assert plan_data(plan)["batch"]["max_staleness"] is None
    assert plan.worker(WorkerName("rollout", 0)).slots == 128


def test_a_schedule_is_shown_and_does_not_make_another_run() -> None:
    plan = planned("quickstart", "layout.schedule=skew_aware")
    assert "the longest groups, as predicted, first, and on workers of their own where" in render_page(plan)
    assert "predicted" not in render_page(planned("quickstart"))
    assert planned("quickstart", "layout.schedule=longest_first").batch.schedule == "longest_first"
    assert planned("quickstart", "run.deterministic=true").batch.schedule == "fifo"


def test_the_page_says_which_groups_are_copied() -> None:
    slow = "copies of groups that wait or take long on one worker go to half-idle ones (layout.hedging)"
    silent = "groups are copied from silent workers only, not from slow ones: the engine would give a copy other tokens"
    assert slow in render_page(planned("quickstart"))
    vllm = [f"layout.pools.rollout.{word}" for word in ("engine=vllm", "engine_options={seeded: false}", "device=cuda")]
    page = render_page(planned("quickstart", *vllm))
    assert silent in page
    assert slow not in page
    for words in (["layout.hedging=false"], ["flow=sft", "layout=colocated"]):
        page = render_page(planned("quickstart", *words))
        assert slow not in page
        assert silent not in page


@pytest.mark.parametrize(
    "override, message",
    [
        ("layout.refresh=at_bound", "layout.refresh — at_bound never takes newer weights when layout.max_staleness is"),
        (
            "layout.schedule=longest_first",
            "layout.schedule — longest_first would change what is trained on: when layout",
        ),
    ],
)
def test_what_cannot_be_had_without_a_bound(override: str, message: str) -> None:
    planned("quickstart", override)
    with pytest.raises(RecipeError, match=message):
        planned("quickstart", "layout.max_staleness=unbounded", override)


def test_the_page_says_what_is_open_and_what_is_in_the_clear() -> None:
    alone = render_page(planned("quickstart"))
    assert "weights in the clear, checked by digests" in alone
    assert "encrypts them); only what has changed since the version that a host has\n" in alone
    assert "without the run's key" not in alone
    words = ("layout.pools.trainer.count=2", "security.encrypt=all", "weights.encoding=fp8")
    two = render_page(planned("quickstart", *words))
    assert "weights encrypted; rounded to fp8, only what has changed since the version that a host has\n" in two
    assert "; each version in full\n" in render_page(planned("quickstart", "weights.encoding=full"))
    assert "Gloo (on GPUs NCCL) of trainer/0 … trainer/1, at the host's address in the run" in two
    assert "gradients in the clear" in two
    assert "weights encrypted" in two
    engines = planned("quickstart", "layout.pools.rollout.engine=sglang")
    assert plan_data(engines)["library_ports"] == [
        {"name": "SGLang (torch's store, Gloo or NCCL)", "workers": ("rollout/0", "rollout/1"), "local": True}
    ]


def test_a_plan_without_checkpoints_on_the_way_says_so() -> None:
    for overrides, said in (([], True), (["run.save_every=5"], False), (["run.save_every_s=60"], False)):
        page = render_page(plan_recipe("quickstart", overrides)[1])
        assert ("only the last state, at the end and at a stop" in page) == said
