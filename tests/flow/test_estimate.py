"""The memory that the plan estimates: what it follows from, and when it warns."""

from __future__ import annotations

import json

import pytest

from distflow.flow.check import plan_recipe
from distflow.flow.estimate import GPU_PROCESS, PUBLISHED, Estimate, estimate, micro_batch
from distflow.flow.fitting import Capacity, memory_data, memory_lines, placed
from distflow.flow.memory import MIB
from distflow.flow.page import plan_data, render_page
from distflow.flow.plan import Plan
from distflow.flow.sizes import model_size
from distflow.weights.shm import KEEP

GIB = 1 << 30
LARGE = (
    "models.policy.init={model_type: qwen3, hidden_size: 2048, intermediate_size: 6144, num_hidden_layers: 28, "
    "num_attention_heads: 16, num_key_value_heads: 8, head_dim: 128, vocab_size: 151936, tie_word_embeddings: true, "
    "max_position_embeddings: 40960}"
)
"""Qwen3-1.7B."""
WORKER = "layout.pools.worker"


def planned(*overrides: str) -> Plan:
    return plan_recipe("quickstart", [LARGE, "models.policy.dtype=bfloat16", *overrides])[1]


def one(plan: Plan, worker: int = 0, *, on_gpu: bool = True) -> Estimate:
    return estimate(plan, plan.workers[worker], on_gpu=on_gpu)


def parameters(plan: Plan) -> int:
    return model_size(plan.recipe.models["policy"]).parameters


def test_it_counts_with_what_the_runtime_does() -> None:
    assert PUBLISHED == KEEP
    plan = planned("layout.pools.trainer.sample_memory_mb=1", "layout.max_staleness=3")
    assert one(plan, 2).samples == MIB
    assert one(planned("data.max_prompt_tokens=4", "layout=async"), 2).samples == 64 * 8 * (1024 + 48 * 8)


def test_what_a_whole_model_holds() -> None:
    """Half precision: weights in it; gradients, masters and moments in float32."""
    plan = planned("layout=colocated")
    count = parameters(plan)
    assert count == 1_720_574_976
    found = one(plan)
    assert (found.weights, found.gradients, found.optimizer, found.engine) == (
        2 * count,
        4 * count,
        12 * count,
        2 * count,
    )
    longest = plan.recipe.data.max_prompt_tokens + 4
    assert found.kv == 256 * longest * 28 * 2 * 1024 * 2


@pytest.mark.parametrize(
    ("backend", "weights", "optimizer"),
    [("torch", 2.0, 12.0), ("fsdp", 1.0, 2.0), ("deepspeed zero=2", 2.0, 3.0), ("deepspeed zero=3", 0.5, 3.0)],
)
def test_what_is_divided_by_four(backend: str, weights: float, optimizer: float) -> None:
    """Bytes of each parameter."""
    kind, *stage = backend.split()
    pool = "layout.pools.trainer"
    plan = planned(f"{pool}.count=4", f"{pool}.backend={kind}", *(f"{pool}.{setting}" for setting in stage))
    found, count = one(plan, worker=2), parameters(plan)
    assert found.worker == "trainer/0"
    assert found.weights == pytest.approx(weights * count)
    assert found.optimizer == pytest.approx(optimizer * count)


def test_phases_with_and_without_offload() -> None:
    stays, moves = one(planned("layout=colocated")), one(planned("layout=colocated", f"{WORKER}.offload=true"))
    models = moves.weights + moves.gradients + moves.optimizer
    engine = moves.engine + moves.kv
    assert moves.training == GPU_PROCESS + models + moves.activations + moves.logits
    assert moves.generating == GPU_PROCESS + engine + moves.drawing
    assert stays.training == moves.training + engine
    assert stays.generating == moves.generating + models - moves.gradients
    assert moves.host == stays.host + models + moves.kv, "what is away lies in the host's memory"


def test_in_a_cpus_memory_only_the_engine_leaves() -> None:
    offload = planned("layout=colocated", f"{WORKER}.offload=true")
    stays, moves = one(planned("layout=colocated"), on_gpu=False), one(offload, on_gpu=False)
    assert stays.training - moves.training == moves.engine + moves.kv
    assert stays.generating == moves.generating
    assert stays.host == moves.host


def test_activations_and_logits_follow_the_micro_batch() -> None:
    small, large = (one(planned(f"batch.tokens_per_microbatch={tokens}"), 2) for tokens in (320, 640))
    assert large.activations == 2 * small.activations
    padded = one(planned("layout.pools.trainer.backend_options={packed: false}"), 2)
    recomputed = one(planned("models.policy.gradient_checkpointing=true"), 2)
    assert recomputed.activations < padded.activations / 9
    plan = planned("flow.steps.sample.with.max_new_tokens=4096", "batch.tokens_per_microbatch=100000")
    size = model_size(plan.recipe.models["policy"])
    tokens = micro_batch(plan, plan.workers[2], size)
    # 24 rows, of three prompts of 16 tokens.
    assert (tokens.scored, tokens.computed) == (24 * 4096, 24 * 4096 + 3 * 16)
    assert one(plan, 2).logits == (1 << 26) * 22 + 2 * size.vocabulary * size.width * 2, "computed in pieces"


def test_a_frozen_reference_is_held_too() -> None:
    plain, with_reference = one(planned(), 2), one(planned("flow=grpo_kl"), 2)
    assert with_reference.weights == 2 * plain.weights
    assert with_reference.optimizer == plain.optimizer


def test_it_warns_where_a_gpu_or_the_host_is_too_small() -> None:
    plan = planned("layout=colocated")
    enough = Capacity(64 * GIB, (80 * GIB,))
    assert not any("warning" in line for line in memory_lines(plan, enough))
    (warning,) = memory_data(plan, Capacity(64 * GIB, (24 * GIB,)))["warnings"]
    assert warning.startswith("cuda:0 has 24.00 GiB, and worker/0 may need ")
    assert "a backend that divides the model" in warning
    (warning,) = memory_data(plan, Capacity(16 * GIB))["warnings"]
    assert warning.startswith("this host has 16.00 GiB of memory, and 1 worker(s) here may need ")


def test_workers_are_placed_as_they_will_find_their_devices() -> None:
    plan = planned("layout.pools.rollout.count=3", "layout.pools.rollout.each.1.device=cpu")
    places = [one.place for one in placed(plan, Capacity(None, (GIB, GIB)))]
    assert places == ["cuda:0", "host", "cuda:1", "cuda:0"]
    assert {one.place for one in placed(plan, Capacity())} == {"host"}
    assert [one.place for one in placed(planned("layout.pools.rollout.device=cuda"), Capacity())][:2] == ["cuda"] * 2


def test_the_page_has_a_row_for_each_kind_of_worker() -> None:
    page = render_page(planned())
    (row,) = [line for line in page.splitlines() if "rollout/0 … rollout/1  host  -" in line]
    assert "6.41" in row, "weights of the engine, in GiB, and their copy in the layout of the kernels"
    data = json.loads(json.dumps(plan_data(planned(), Capacity(GIB))))["memory"]
    assert [worker["worker"] for worker in data["workers"]] == ["rollout/0", "rollout/1", "trainer/0"]
    assert data["this_host"] == {"host": GIB, "gpus": []}
    assert len(data["warnings"]) == 1


def test_a_model_that_cannot_be_seen_gets_no_numbers() -> None:
    plan = plan_recipe("quickstart", ["models.policy.path=some-team/some-model"])[1]
    lines = memory_lines(plan, Capacity(1))
    assert [line.split(": ")[1] for line in lines[:2]] == ["not known"] * 2
    assert "some-model has no config.json that can be read here" in lines[0]
