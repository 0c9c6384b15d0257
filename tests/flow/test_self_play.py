"""Several models that generate: what a prefix does to the fields of a step, and where a further model may generate."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from distflow.errors import RecipeError
from distflow.flow.estimate import estimate
from distflow.flow.memory import group_bytes
from distflow.flow.plan import Plan
from distflow.flow.recipe_check import plan_recipe
from distflow.flow.script import render_script
from distflow.types import WorkerName
from tests.flow.conftest import Folder

PLAY = "flow=self_play"
SOLVER = "layout.pools.solver={steps: [solve, solver_old_logprobs, solver_update], backend: torch}"
GIVEN = ("uid", "group", "sample", "solver/prompt_ids", "solver/prompt_text", "solver/task")


def planned(*overrides: str) -> Plan:
    return plan_recipe("quickstart", [PLAY, *overrides])[1]


def complaints(*overrides: str) -> str:
    with pytest.raises(RecipeError) as caught:
        planned(*overrides)
    return str(caught.value)


def script(plan: Plan, worker: str) -> str:
    return render_script(plan, WorkerName.parse(worker)).partition("def script(w):\n")[2]


def test_a_prefix_goes_before_all_fields_but_those_that_say_which_sample() -> None:
    steps = {step.name: step for step in planned().steps}
    assert steps["solve"].reads == GIVEN
    assert steps["solve"].writes == tuple(
        f"solver/{name}"
        for name in (
            *("response_ids", "response_mask", "response_text"),
            *("rollout_logprobs", "policy_versions", "finish_reason"),
        )
    )
    assert steps["reward"].writes == ("solver/reward", "solver/score")
    assert steps["reward"].may_write == ("solver/rewards/*", "solver/extra/*", "drop_reason", "left_out")
    assert steps["solver_advantage"].reads == (
        *("solver/response_ids", "solver/response_mask", "solver/reward", "group"),
        "left_out",
    )
    assert steps["solver_update"].as_it_sees().reads == steps["update"].reads
    assert steps["solve"].as_it_sees().reads == ("uid", "group", "sample", "prompt_ids", "prompt_text", "task")


def test_fields_read_because_of_a_setting_have_it_too() -> None:
    plan = planned("batch.minibatches=2", "batch.epochs=2", "batch.ledgers=4")
    steps = {step.name: step for step in plan.steps}
    assert steps["solver_old_logprobs"].writes == ("solver/old_logprobs",)
    assert "solver/old_logprobs" in steps["solver_update"].reads
    text = complaints("flow.steps.solver_update.with.kl_coef=0.1")
    assert "step 'solver_update' reads the field 'solver/ref_logprobs' because kl_coef is 0.1" in text
    line = '{call: "distflow.workers.reference:ref_logprobs", model: reference, prefix: solver}'
    assert f"add to flow.steps:  solver_reference: {line}" in text


@pytest.mark.parametrize(
    ("override", "told"),
    [
        (
            "flow.steps.solve.prefix=sovler",
            "command line: flow.steps.solve.prefix — step 'solver_update' reads fields under 'solver', which this "
            "takes away — flow.steps.solve.prefix=solver, or",
        ),
        (
            "flow.steps.solver_advantage.prefix=sovler",
            "command line: flow.steps.solver_advantage.prefix — step 'solver_advantage' reads the field "
            "'sovler/response_ids', which no step of the flow writes — did you mean prefix 'solver'?",
        ),
        (
            "flow.steps.solve=null",
            'solver_sample: {call: "distflow.workers.rollout:sample", model: solver, prefix: solver}',
        ),
        ("flow.steps.solve.prefix=a/b", "'a/b' is not allowed — lower-case letters, digits and '_', of which"),
    ],
)
def test_a_wrong_prefix_is_told_where_it_was_written(override: str, told: str) -> None:
    text = complaints(override)
    assert told in text
    assert "recipes/flow/self_play.yaml" not in text


def test_a_model_that_is_not_trained_on_what_it_generates_is_warned_of() -> None:
    assert not planned().warnings
    (told,) = planned("flow.steps.solver_update.prefix=null").warnings
    assert told.startswith("warning: step 'solve' generates with 'solver', and 'solver_update', which trains it, reads")


def test_both_models_have_edges_of_their_own() -> None:
    plan = planned("layout=self_play")
    edges = {(edge.kind, edge.name): edge for edge in plan.edges}
    call = edges["call", "solve"]
    assert (call.source, call.target, call.version, call.when) == (
        *("rollout", "solver_rollout"),
        *("at least", "before custody"),
    )
    assert set(call.fields) == set(GIVEN)
    rows = edges["rows", "solver_rows"]
    assert (rows.source, rows.target, rows.model) == ("trainer", "solver_trainer", "solver")
    assert {"solver/advantage", "solver/rollout_logprobs", "solver/score"} <= set(rows.fields)
    assert "response_ids" not in rows.fields, "the proposer's"
    weights = [(edge.name, edge.source, edge.target) for edge in plan.edges if edge.kind == "weights"]
    assert weights == [("policy", "trainer", "rollout"), ("solver", "solver_trainer", "solver_rollout")]
    assert {"solver/policy_versions", "solver/reward", "solver/rewards/*"} <= set(edges["lease", "samples"].fields)
    assert plan.serves("solver_rollout")
    assert not plan.serves("solver_trainer")


@pytest.mark.parametrize(
    ("overrides", "worker", "lines"),
    [
        (
            ["layout=split"],
            "rollout/0",
            'for groups in w.ask("solve", w.each("propose", w.generate("sample", w.leases()))):',
        ),
        (["layout=self_play"], "solver_rollout/0", 'for groups in w.generate("solve", w.requests("solve")):'),
        (["layout=split", SOLVER], "solver/0", 'w.receive("solver_rows", t):  # answers solve meanwhile'),
        (["layout=split", SOLVER], "solver/0", 'w.publish("solver", t + 1)'),
        (["layout=colocated"], "worker/0", 'w.publish("solver", t + 1)\n        w.publish("policy", t + 1)'),
    ],
)
def test_scripts_say_who_generates_for_whom(overrides: list[str], worker: str, lines: str) -> None:
    assert lines in script(planned(*overrides), worker)


def test_memory_is_reserved_for_what_both_write() -> None:
    alone, both = plan_recipe("quickstart", [])[1], planned()
    assert alone.response_tokens == 4
    assert both.response_tokens > 4 + 16 + 4, "the solver's prompt and response"
    assert group_bytes(8, 16, both.response_tokens) >= 2 * group_bytes(8, 16, 4)
    assert (both.longest_sample("policy"), both.longest_sample("solver")) == (20, 20)
    longer = planned("flow.steps.solve.with.max_new_tokens=40")
    assert longer.longest_sample("solver") == 56


def test_each_engine_is_counted() -> None:
    def rollout(plan: Plan) -> tuple[int, int]:
        found = estimate(plan, plan.worker(WorkerName("rollout", 0)), on_gpu=False)
        return found.engine, found.kv

    one, two, own = (plan_recipe("quickstart", [])[1], planned("layout=split"), planned("layout=self_play"))
    assert rollout(two) == tuple(2 * size for size in rollout(one))
    assert rollout(own) == rollout(one)
    shared = [estimate(plan, plan.workers[-1], on_gpu=False).shared for plan in (one, two)]
    assert shared[1] == 2 * shared[0], "versions of both are published"


def test_samples_of_both_are_dumped() -> None:
    fields = planned().dump_fields
    assert {"solver/prompt_text", "solver/response_text", "solver/reward", "solver/policy_versions"} <= set(fields)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["flow.steps.solve.prefix=null"], "flow.steps.solve.prefix — generates, as step 'sample' does"),
        (["flow.steps.solve.model=policy"], "flow.steps.solve.model — generates with 'policy', as step 'sample' does"),
        (["flow.steps.sample.prefix=first"], "flow.steps.sample.prefix — the policy's samples come from prompts of"),
        (["flow.steps.solve.prefix=Solver"], "flow.steps.solve.prefix — 'Solver' is not allowed"),
        (["flow.steps.solve.prefix=rewards"], "flow.steps.solve.prefix — fields rewards/… are parts of the reward"),
        (
            ["~flow.steps.solver_update", "~flow.steps.solver_advantage"],
            "no train step trains 'solver', which step 'solve' generates with: engines get their weights from training",
        ),
        (
            ["models.solver.head=value"],
            "models.solver.head — step 'solve' generates with it, and a model with `head: value` has no next tokens",
        ),
        (
            ["layout=self_play", "layout.pools.rollout.steps=[solve]"],
            "layout.pools.rollout.steps — the pools rollout, solver_rollout all take step 'solve' (role 'generate')",
        ),
        (["batch.critic_warmup=5"], "batch.critic_warmup — this flow trains no critic"),
        (
            ["layout=split", "layout.pools.trainer.steps=[solve]"],
            "step 'solve' generates with 'solver' on pool 'trainer', which trains and does not generate: not built yet",
        ),
        (
            ["layout=split", "layout.pools.both={steps: [solve, reward]}"],
            "step 'solve' generates with 'solver' on a pool that runs reward for others too: not built yet",
        ),
        (
            ["layout=split", "layout.pools.rollout.engine=sglang"],
            "layout.pools.rollout.engine — sglang with policy and solver in one worker is not built yet",
        ),
        (
            ["layout=colocated", "layout.pools.worker.offload=true"],
            "layout.pools.worker.offload — it generates with policy and solver: not built yet for several engines",
        ),
        (
            ["layout=split", SOLVER, "layout.pools.solver.offload=true"],
            "layout.pools.solver.offload — it generates with solver, a further model: not built yet",
        ),
    ],
)
def test_what_cannot_work_is_refused_by_name(overrides: list[str], message: str) -> None:
    assert message in complaints(*overrides)


def test_environments_are_refused_beside_a_further_model(folder: Folder, refused: Callable[..., str]) -> None:
    folder.change('@step(role="generate", reads=[]', '@step(role="generate", environment=["replay"], reads=[]')
    folder.change("max_new_tokens: int = 4)", "max_new_tokens: int = 4, max_tokens: int = 8)")
    folder.step('@step(role="score", reads=[], writes=["b/prompt_ids", "b/prompt_text", "b/task"])\ndef ask(b, c): ...')
    further = "flow.steps.again={call: 'distflow.workers.rollout:sample', model: b, prefix: b}"
    train = "flow.steps.train={call: './steps.py:update', model: b, prefix: b}"
    adv = "flow.steps.adv={call: './steps.py:advantage', prefix: b}"
    rewarded = "flow.steps.rewarded={call: './steps.py:reward', prefix: b}"
    text = refused("flow.steps.ask={call: './steps.py:ask'}", further, train, adv, rewarded)
    assert "flow.steps.sample — has an environment, and beside a further model that generates" in text
