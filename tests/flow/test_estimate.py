"""The memory that the plan estimates: what it follows from, and when it warns."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from distflow.data.micro_batches import split_rows
from distflow.errors import RecipeError
from distflow.flow.estimate import GPU_PROCESS, PROCESS, SHIFTED_BYTES, Estimate, estimate, micro_batch
from distflow.flow.memory import MIB, NIXL_PROCESS, rows_bytes
from distflow.flow.memory_fit import Capacity, memory_data, memory_lines, placed
from distflow.flow.plan import Plan
from distflow.flow.plan_text import plan_data, render_page
from distflow.flow.recipe_check import plan_recipe
from distflow.flow.sizes import model_size
from distflow.flow.slots_fit import slots_fit
from distflow.launch.deploy.placement import needs_here
from distflow.workers.models import outline
from tests.flow.conftest import TEACHER

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
    plan = planned("layout.pools.trainer.sample_memory_mb=1", "layout.max_staleness=3")
    assert one(plan, 2).samples == MIB
    assert one(planned("data.max_prompt_tokens=4", "layout=async"), 2).samples == 64 * 8 * (1024 + 48 * 8)


def test_the_optimizer_decides_what_is_kept_of_each_parameter() -> None:
    kept = {}
    for name in ("adamw", "adamw_8bit", "muon"):
        plan = planned("layout=colocated", "models.policy.dtype=float32", f"models.policy.optimizer.name={name}")
        kept[name] = one(plan).optimizer / parameters(plan)
    ends = 2 * 151936 * 2048 / parameters(plan)
    assert kept == pytest.approx({"adamw": 8.0, "adamw_8bit": 2 + 8 / 256, "muon": 4 + 4 * ends}, rel=1e-6)


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


def test_shifted_logits_take_memory_of_each_slot() -> None:
    """Of the torch engine, whether the step says so or validation."""
    plain, slots = one(planned("layout=colocated")), planned("layout=colocated").workers[0].slots
    for given in ("flow.steps.sample.with.repetition_penalty=1.1", "val.sampling.logit_bias={5: 1.0}"):
        val = ["val.every=5"] if given.startswith("val") else []
        found = one(planned("layout=colocated", *val, given))
        assert found.drawing - plain.drawing == slots * 151936 * SHIFTED_BYTES
    assert one(planned("layout=colocated", "flow.steps.sample.with.stop=x")).drawing == plain.drawing


def test_phases_with_and_without_offload() -> None:
    stays, moves = one(planned("layout=colocated")), one(planned("layout=colocated", f"{WORKER}.offload=true"))
    models = moves.weights + moves.gradients + moves.optimizer
    engine = moves.engine + moves.kv
    assert moves.training == GPU_PROCESS + models + moves.activations + moves.logits
    assert moves.gathered == moves.weights > moves.drawing, "the trainer's stay until the engine has them"
    assert moves.generating == GPU_PROCESS + engine + moves.gathered
    assert stays.training == moves.training + engine
    assert stays.gathered == 0
    assert stays.generating == GPU_PROCESS + engine + stays.drawing + models - moves.gradients
    assert moves.host == stays.host + models, "what is away lies in the host's memory; no sample is open then"
    late = one(planned("layout=colocated", f"{WORKER}.offload=true", "layout.max_staleness=1"))
    assert late.host == moves.host + late.kv - moves.samples + late.samples, "open samples keep keys and values"


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
    again = one(
        planned("models.policy.gradient_checkpointing=true", "layout.pools.trainer.backend_options={packed: false}"), 2
    )
    assert recomputed.activations < again.activations, "a shared prompt counts once there, too"
    plan = planned("flow.steps.sample.with.max_new_tokens=4096", "batch.tokens_per_microbatch=100000")
    size = model_size(plan.recipe.models["policy"])
    tokens = micro_batch(plan, plan.workers[2], "policy", size)
    # Three groups with prompts of a single token.
    assert (tokens.scored, tokens.computed) == (100_000 - 3, 100_000)
    assert one(plan, 2).logits == (1 << 26) * 22 + 2 * size.vocabulary * size.width * 2, "computed in pieces"


@pytest.mark.parametrize("budget", [320, 1000, 4112, 5000, 8000, 8224, 12_000, 100_000, 200_000])
def test_no_micro_batch_is_larger_than_estimated(budget: int) -> None:
    """Rows of one length after another, cut as training cuts them."""
    overrides = ("flow.steps.sample.with.max_new_tokens=4096", f"batch.tokens_per_microbatch={budget}")
    plan = planned(*overrides, "layout.pools.trainer.backend_options={packed: false}")
    samples, longest = plan.batch.samples, 16 + 4096
    lengths = sorted({2, 16, longest // 2, longest - 1, longest, *(min(longest, budget // n) for n in range(1, 50))})
    cuts = [torch.full((samples,), length) for length in lengths if length > 1]
    parts = [len(rows) * int(cut[0]) for cut in cuts for rows in split_rows(cut, budget)]
    tokens = micro_batch(plan, plan.workers[2], "policy", model_size(plan.recipe.models["policy"]))
    assert max(parts) == tokens.computed
    answers = [len(rows) * min(4096, int(cut[0]) - 1) for cut in cuts for rows in split_rows(cut, budget)]
    assert max(answers) <= tokens.scored


def test_a_frozen_reference_is_held_too() -> None:
    plain, with_reference = one(planned(), 2), one(planned("flow=grpo_kl"), 2)
    assert with_reference.weights == 2 * plain.weights
    assert with_reference.optimizer == plain.optimizer


SEVEN_B = (
    "models.policy.init={model_type: qwen2, hidden_size: 3584, intermediate_size: 18944, num_hidden_layers: 28, "
    "num_attention_heads: 28, num_key_value_heads: 4, vocab_size: 152064, max_position_embeddings: 32768}"
)


def colocated_7b(*overrides: str) -> Plan:
    """8 GPUs, responses of 16k tokens."""
    sizes = [SEVEN_B, "data.max_prompt_tokens=1024", "flow.steps.sample.with.max_new_tokens=16384"]
    worker = [f"{WORKER}.{setting}" for setting in ("count=8", "device=cuda", "backend=fsdp", "offload=true")]
    worker += [f"{WORKER}.slots=256", f"{WORKER}.engine=sglang"]
    return planned("layout=colocated", "batch.prompts=128", "batch.samples_per_prompt=16", *sizes, *worker, *overrides)


def test_the_cache_is_what_the_engines_share_of_the_gpu_leaves() -> None:
    """And not what all slots would take with the longest samples, which nobody has: 238 GiB a worker."""
    plan = colocated_7b()
    found = one(plan)
    size = model_size(plan.recipe.models["policy"])
    assert 256 * 17408 * size.kv_bytes == 238 * GIB
    assert found.kv == int(0.88 * 80 * GIB) - size.weights, "of 80 GiB where no GPU is seen"
    small = estimate(plan, plan.workers[0], on_gpu=True, gpu_bytes=24 * GIB)
    assert small.kv == int(0.88 * 24 * GIB) - size.weights
    half = one(colocated_7b(f"{WORKER}.engine_options.memory_fraction=0.5"))
    assert half.kv == 40 * GIB - size.weights
    assert one(colocated_7b(f"{WORKER}.slots=8")).kv == 8 * 17408 * size.kv_bytes, "where they need less"
    rollout = "layout.pools.rollout"
    split = ["layout=split", f"{rollout}.device=cuda", f"{rollout}.engine=vllm", f"{rollout}.slots=4096", SEVEN_B]
    for engine, share in {"sglang": 0.88, "vllm": 0.9}.items():
        alone = one(planned(*split, f"{rollout}.engine={engine}", f"{rollout}.slots=8"))
        assert alone.kv == int(share * 80 * GIB) - size.weights, "all of it, as nobody else is there"
    limited = planned(*split, f"{rollout}.engine_options={{kv_cache_memory_bytes: 7}}")
    assert one(limited).kv == 7
    two = one(planned(*split, f"{rollout}.engine_options={{tensor_parallel_size: 2, gpu_memory_utilization: 0.3}}"))
    assert two.engine == size.weights // 2
    assert two.engine + two.kv <= 0.3 * 80 * GIB


def test_it_tells_how_many_of_the_longest_samples_the_cache_holds_beside_the_slots() -> None:
    plan = colocated_7b()
    size = model_size(plan.recipe.models["policy"])
    holds = (int(0.88 * 80 * GIB) - size.weights) // (17408 * size.kv_bytes)
    page = render_page(plan, Capacity(None, (80 * GIB,) * 8))
    assert f"SGLangEngine (256 slots, KV memory for {holds} samples of 17,408 tokens)" in page
    assert f"warning: the 256 slots of an engine of worker are more than its KV memory for {holds} samples" in page
    assert "on a GPU of 80.00 GiB: where samples get that long, some wait or are computed again" in page
    assert f"— layout.pools.worker.slots={holds}, or leave it if most are shorter" in page
    few = render_page(colocated_7b(f"{WORKER}.slots={holds}"), Capacity(None, (80 * GIB,) * 8))
    assert f"SGLangEngine ({holds} slots, KV memory for {holds} samples" in few
    assert "slots of an engine" not in few
    rollout = "layout.pools.rollout"
    two = planned(
        "layout=split", SEVEN_B, f"{rollout}={{engine: sglang, device: cuda, engine_options: {{tensor_parallel: 2}}}}"
    )
    fit = slots_fit(two, two.workers[0])
    assert fit is not None
    assert fit.tokens == 2 * (int(0.88 * 80 * GIB) - size.weights // 2) // size.kv_bytes
    # The cache of the torch engine is as large as its slots need.
    torch = planned("layout=split", SEVEN_B, f"{rollout}.device=cuda")
    assert slots_fit(torch, torch.workers[0]) is None
    assert "KV memory" not in render_page(torch)


def test_a_colocated_7b_fits_hosts_that_it_fits() -> None:
    """The cache of SGLang is on the GPU or nowhere; what is counted of the host is staged weights and what is away."""
    plan = colocated_7b()
    found = one(plan)
    count = parameters(plan)
    models = found.weights + found.gradients + found.optimizer
    assert found.host == PROCESS + found.samples + models + 2 * count
    total = sum(where.host_bytes for where in placed(plan, Capacity(None, (80 * GIB,) * 8)))
    assert total < 350 * GIB
    beside = Capacity(512 * GIB, (80 * GIB,) * 8)
    assert not any("this host has" in line for line in memory_lines(plan, beside))


def test_what_a_divided_model_is_read_from_is_on_the_gpu_beside_the_engine() -> None:
    """With offload too: it was put together to be published, and stays until the engine has it."""
    moves, stays = one(colocated_7b()), one(colocated_7b(f"{WORKER}.offload=false"))
    assert moves.gathered == stays.gathered == 2 * parameters(colocated_7b())
    assert moves.generating == GPU_PROCESS + moves.engine + moves.kv + max(moves.drawing, moves.gathered)


def test_checkpoints_are_copied_to_the_host_first() -> None:
    """Each replica's part: weights, masters, and two moments."""
    trainers = ["layout.pools.trainer.count=2"]
    saves, not_yet = one(planned(*trainers, "run.save_every=5"), 2), one(planned(*trainers), 2)
    assert saves.host - not_yet.host == 14 * parameters(planned()) // 2
    narrow = "models.policy.dtype=float32"
    saves, not_yet = one(planned(narrow, "run.hf_every=5"), 2), one(planned(narrow), 2)
    assert saves.host - not_yet.host == 12 * parameters(planned())
    assert one(planned("run.save_every=5"), 0).host == one(planned(), 0).host, "rollouts save nothing"


@pytest.mark.parametrize(
    ("shared", "width"), [({}, 8 * 768), ({"shared_expert_intermediate_size": 20480}, 8 * 768 + 20480)]
)
def test_activations_of_experts_are_those_that_a_token_is_given_to(
    tmp_path: Path, shared: dict[str, int], width: int
) -> None:
    config = {"model_type": "qwen2_moe", "hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 48}
    config |= {"num_attention_heads": 32, "vocab_size": 1000, "num_experts_per_tok": 8, "moe_intermediate_size": 768}
    (tmp_path / "config.json").write_text(json.dumps({**config, **shared}))
    save_file({"w": torch.zeros(4, 4)}, tmp_path / "model.safetensors")
    plan = plan_recipe("quickstart", [f"models.policy.path={tmp_path}", "models.policy.gradient_checkpointing=false"])[
        1
    ]
    size = model_size(plan.recipe.models["policy"])
    assert size.active == width
    tokens = micro_batch(plan, plan.workers[2], "policy", size).computed
    kept = 6 * 2048 + 4 * (size.query + size.key_value + width)
    assert one(plan, 2).activations == tokens * kept * 4 * 49


def test_models_are_whole_while_they_are_loaded() -> None:
    """A divided one on every replica, in float32 where its rows are masters."""
    count = parameters(planned())
    pool = "layout.pools.trainer"
    new = one(planned(f"{pool}.count=4", f"{pool}.backend=fsdp"), 2)
    assert new.loading == PROCESS + 4 * count
    assert new.loading > new.host, "the peak is at the beginning"
    third = one(planned(f"{pool}.count=4", f"{pool}.backend=deepspeed", f"{pool}.zero=3", "flow=grpo_kl"), 2)
    assert third.loading == PROCESS + 2 * 4 * count, "the reference, too, until both are divided"
    whole = one(planned("flow=grpo_kl"), 2)
    assert whole.loading == PROCESS + 4 * count, "one after another, where they move to the GPU"
    shown = placed(planned(f"{pool}.count=4", f"{pool}.backend=fsdp"), Capacity(None, (80 * GIB,) * 6))[2]
    assert shown.host_bytes == new.loading


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        ((), 256),
        (("flow.steps.sample.with.max_new_tokens=4096",), 256),
        (("flow.steps.sample.with.max_new_tokens=32768",), 385),
        (("flow.steps.sample.with.max_new_tokens=32768", "layout.max_staleness=3"), 4 * 385),
        (("flow.steps.sample.with.max_new_tokens=32768", "layout.max_staleness=unbounded"), 2 * 385),
        (("flow.steps.sample.with.max_new_tokens=32768", "layout.max_staleness=3", "run.training_steps=2"), 2 * 385),
        (("flow.steps.sample.with.max_new_tokens=32768", "layout.max_staleness=90"), 8192),
        (("flow.steps.sample.with.max_new_tokens=32768", "batch.prompts=1024"), 12302),
    ],
)
def test_memory_for_results_follows_batch_and_staleness(overrides: tuple[str, ...], expected: int) -> None:
    limit = "models.policy.init.max_position_embeddings=65536"
    assert planned(limit, *overrides).owner_plan.sample_memory_mb == expected


@pytest.mark.parametrize(
    ("overrides", "fields", "bytes_a_value"),
    [
        ((), 0, 4),
        (("flow=ppo",), 5, 4),
        (("flow=ppo", "models.policy.dtype=float64"), 5, 8),
        (("batch.minibatches=2",), 2, 4),
        (("run.deterministic=true", "layout.pools.trainer.steps=[advantage]"), 1, 4),
        (("flow=distill", TEACHER, "layout=services"), 1 + 2 * 16, 4),
        (("flow=distill", TEACHER, "layout=services", "flow.steps.teacher.with.top_k=100"), 1 + 2 * 100, 4),
        (("flow=distill", TEACHER, "flow.steps.teacher.with.top_k=0", "batch.epochs=2"), 1 + 1, 4),
    ],
)
def test_memory_for_results_includes_what_is_kept_until_the_step_is_over(
    overrides: tuple[str, ...], fields: int, bytes_a_value: int
) -> None:
    """PPO: the values, old log-probs, reference, advantage and return of each token; streamed flows keep nothing.

    A teacher's candidates are several values a token.
    """
    assert planned(*overrides).later_bytes == fields * bytes_a_value


def test_more_fields_bound_staleness_earlier() -> None:
    long = ["flow.steps.sample.with.max_new_tokens=30000", "layout.max_staleness=2", "batch.minibatches=2"]
    one = planned(*long[:2]).owner_plan.sample_memory_mb
    assert one < planned(*long).owner_plan.sample_memory_mb
    assert "it alone bounds staleness" in render_page(planned(*long))
    bounded = render_page(planned(*long, f"layout.pools.trainer.sample_memory_mb={one}"))
    assert re.search(r"2\.[5-9] training steps of the longest samples; this bounds staleness", bounded)


def test_trainers_share_memory_for_results_unless_the_pool_may_shrink() -> None:
    long = ["flow.steps.sample.with.max_new_tokens=30000", "layout.max_staleness=1", "layout.pools.trainer.count=3"]
    alone = planned(*long[:2]).owner_plan.sample_memory_mb
    shared = planned(*long).owner_plan.sample_memory_mb
    assert shared == pytest.approx(alone * 3 / 8, abs=3), "three of eight ledgers"
    assert planned(*long, "layout.on_failure=shrink").owner_plan.sample_memory_mb == alone
    assert planned(*long, "layout.pools.trainer.sample_memory_mb=777").owner_plan.sample_memory_mb == 777


def test_the_page_says_what_bounds_staleness() -> None:
    long = ["flow.steps.sample.with.max_new_tokens=30000", "layout.max_staleness=2"]
    assert "it alone bounds staleness" in render_page(planned(*long))
    less = render_page(planned(*long, "layout.pools.trainer.sample_memory_mb=600"))
    expected = r"600 MiB a training worker .* 1\.7 training steps of the longest samples; this bounds staleness .*\(2\)"
    assert re.search(expected, less)
    assert "not max_staleness (unbounded)" in render_page(planned("layout.max_staleness=unbounded"))


def test_the_home_of_a_critic_reserves_for_rows() -> None:
    """By default for two training steps; each of two replicas gets half of the rows, and one group more."""
    long = ["flow=ppo", "layout=critic", "flow.steps.sample.with.max_new_tokens=30000"]
    (needed,) = [part for part in planned(*long).edges if part.kind == "rows"]
    one = rows_bytes(planned(*long).recipe, planned(*long).edges, needed, 30000) / MIB
    group = 8 * (1024 + 30000 * (48 + 2 * 8)) / MIB
    assert one == pytest.approx((32 + 1) // 2 * group, rel=0.01), "with values and returns"
    (critic, _) = [worker for worker in planned(*long).workers if worker.name.pool == "critic"]
    assert critic.sample_memory_mb == 2 * math.ceil(one)
    assert estimate(planned(*long), critic, on_gpu=False).samples == critic.sample_memory_mb * MIB
    shrinks = [*long, "layout.pools.trainer.count=2", "layout.on_failure=shrink"]
    assert planned(*shrinks).worker(critic.name).sample_memory_mb == pytest.approx(2 * 32 * group, abs=8)
    key = "layout.pools.critic.sample_memory_mb"
    page = render_page(planned(*long, f"{key}={int(1.5 * one)}"))
    assert "1.5 training steps of the longest samples, and what has no room waits at trainer" in page
    least = math.ceil(one)
    too_little = rf"{key} — .* {least - 1} is too little for the rows .*'critic' is trained.*: at least {least},"
    with pytest.raises(RecipeError, match=too_little):
        planned(*long, f"{key}={least - 1}")
    planned(*long, f"{key}={least}")


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
    assert [line.split(": ")[1] for line in lines[:2]] == ["unknown"] * 2
    assert "some-model has no config.json that can be read here" in lines[0]


def test_a_head_of_one_value_has_neither_logits_nor_an_output_layer() -> None:
    critic = ["flow=ppo", "layout=critic", SEVEN_B, "models.policy.init.tie_word_embeddings=false"]
    plan = planned(*critic)
    sizes = {name: model_size(plan.recipe.models[name]) for name in ("policy", "critic")}
    assert sizes["policy"].parameters - sizes["critic"].parameters == (152064 - 1) * 3584
    pool = next(number for number, worker in enumerate(plan.workers) if worker.name.pool == "critic")
    found = one(plan, pool)
    values = micro_batch(plan, plan.workers[pool], "critic", sizes["critic"]).scored
    embeddings = (152064 + 1) * 3584 * sizes["critic"].dtype_bytes
    assert found.logits == values * (sizes["critic"].dtype_bytes + 20) + embeddings


def test_every_gpu_of_an_engine_over_several_is_counted() -> None:
    rollout = "layout.pools.rollout"
    pools = [f"{rollout}.count=1", f"{rollout}.engine=sglang", f"{rollout}.engine_options={{tensor_parallel: 2}}"]
    plan = planned(SEVEN_B, *pools, f"{rollout}.device=cuda", "layout.pools.trainer.count=1")
    text = "\n".join(memory_lines(plan, Capacity(None, (80 * GIB, 80 * GIB))))
    assert "cuda:1" not in text
    assert re.search(
        r"cuda:0 has 80\.00 GiB, and rollout/0, trainer/0 may need .* would take 3, and there are 2: does not fit",
        text,
    )
    text = "\n".join(memory_lines(plan, Capacity(None, (80 * GIB, 8 * GIB, 200 * GIB))))
    assert re.search(r"cuda:1 has 8\.00 GiB, and rollout/0 may need", text)


def test_weights_that_come_in_parts_are_kept_where_they_leave_and_where_they_come() -> None:
    two, link = "layout.pools.trainer.count=2", "weights.link=collective"
    without, plan = planned(two), planned(two, link)
    version = model_size(plan.recipe.models["policy"]).published
    more = {
        str(worker.name): one(plan, number).host - one(without, number).host
        for number, worker in enumerate(plan.workers)
    }
    # Two copies of half of it, and one of all.
    assert more == dict.fromkeys(("rollout/0", "rollout/1", "trainer/0", "trainer/1"), version)
    assert needs_here(plan).memory.warn - needs_here(without).memory.warn >= 4 * version


def test_processes_with_nixl_are_counted() -> None:
    without, plan = planned(), planned("weights.link=nixl")
    more = [one(plan, number).host - one(without, number).host for number in range(len(plan.workers))]
    assert more == [NIXL_PROCESS] * 3


def test_a_critic_without_a_model_of_its_own_recomputes_as_the_policy_does() -> None:
    saved, plain = (
        one(planned("flow=ppo", "layout=critic", f"models.policy.gradient_checkpointing={chosen}"), 3)
        for chosen in ("true", "false")
    )
    assert saved.worker == plain.worker == "critic/0"
    assert saved.activations < plain.activations
    own = one(
        planned(
            "flow=ppo",
            "layout=critic",
            "models.policy.gradient_checkpointing=true",
            "models.critic.gradient_checkpointing=false",
        ),
        3,
    )
    assert own.activations == plain.activations


def test_what_consumers_of_clients_take_is_told() -> None:
    plan = planned("limits.consumer_mb=512", "layout.pools.trainer.count=2")
    lines = "\n".join(memory_lines(plan, Capacity()))
    told = "each consumer that a program outside the run opens takes up to 0.50 GiB of host memory of each of trainer"
    assert told in lines
    assert "0.50 GiB of trainer/0's host memory" in "\n".join(
        memory_lines(planned("limits.consumer_mb=512"), Capacity())
    )
    assert memory_data(plan, Capacity())["each_consumer"] == 512 * MIB


EXPERT_MODELS: list[dict[str, Any]] = [
    {
        **{"model_type": "qwen3_moe", "num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 20},
        **{"head_dim": 8, "decoder_sparse_step": 2, "mlp_only_layers": [1], "num_hidden_layers": 4},
    },
    {
        **{"model_type": "qwen3_moe", "num_experts": 3, "num_experts_per_tok": 1, "moe_intermediate_size": 12},
        **{"head_dim": 16, "attention_bias": True, "tie_word_embeddings": True, "num_hidden_layers": 3},
    },
    {
        **{"model_type": "qwen2_moe", "num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 20},
        **{"shared_expert_intermediate_size": 24, "num_hidden_layers": 2},
    },
    {"model_type": "mixtral", "num_local_experts": 5, "num_experts_per_tok": 2, "num_hidden_layers": 2},
    {
        "model_type": "glm4_moe",
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "num_hidden_layers": 3,
        "head_dim": 8,
        "moe_intermediate_size": 12,
        "n_shared_experts": 1,
        "first_k_dense_replace": 1,
        "use_qk_norm": True,
    },
    *(
        {
            "model_type": family,
            "n_routed_experts": 4,
            "num_experts_per_tok": 2,
            "num_hidden_layers": 3,
            "moe_intermediate_size": 12,
            "n_shared_experts": 2,
            "first_k_dense_replace": 1,
            "kv_lora_rank": 10,
            "q_lora_rank": rank,
            "qk_rope_head_dim": 4,
            "qk_nope_head_dim": 6,
            "v_head_dim": 8,
            "n_group": 1,
            "topk_group": 1,
            "num_key_value_heads": 4,
        }
        for family, rank in (("deepseek_v2", None), ("deepseek_v3", 14))
    ),
]


@pytest.mark.parametrize("config", EXPERT_MODELS, ids=lambda config: str(config["model_type"]))
def test_experts_are_counted_from_the_configuration_alone(tmp_path: Path, config: dict[str, Any]) -> None:
    plain = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4, "num_key_value_heads": 2}
    plain |= {"vocab_size": 100, "tie_word_embeddings": False}
    (tmp_path / "config.json").write_text(json.dumps({**plain, **config}))
    plan = plan_recipe("quickstart", [f"models.policy.path={tmp_path}"], need_files=False)[1]
    size = model_size(plan.recipe.models["policy"])
    built = outline({"path": str(tmp_path)})
    assert size.parameters == sum(parameter.numel() for parameter in built.parameters())
    assert not size.packs
    assert not any("unknown" in line for line in memory_lines(plan, Capacity()))


def test_scales_of_fp8_are_no_parameters_and_what_the_folder_says_is_told(tmp_path: Path) -> None:
    config = {"model_type": "llama", "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 1}
    config |= {"num_attention_heads": 4, "vocab_size": 100, "torch_dtype": "bfloat16"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    weight = torch.zeros(256, 128).to(torch.float8_e4m3fn)
    scales = {"a.weight_scale_inv": torch.ones(2, 1), "b.weight_scale": torch.ones(1), "b.input_scale": torch.ones(1)}
    save_file({"a.weight": weight, "b.weight": weight.clone(), **scales}, tmp_path / "model.safetensors")
    plan, half = (
        plan_recipe("quickstart", [f"models.policy.path={tmp_path}", f"models.policy.dtype={dtype}"])[1]
        for dtype in ("float32", "bfloat16")
    )
    assert model_size(plan.recipe.models["policy"]).parameters == 2 * 256 * 128
    told = [line for line in memory_lines(plan, Capacity()) if line.startswith("models.policy")]
    assert len(told) == 1
    assert "says bfloat16 and the recipe float32, which takes 2 times the memory" in told[0]
    assert "models.policy.dtype=bfloat16" in told[0]
    assert not [line for line in memory_lines(half, Capacity()) if line.startswith("models.policy")]
