"""Options of the engines and backends here are checked by the plan: no worker is started for a mistake in them."""

from __future__ import annotations

import pytest

from distflow.config.plugins import BACKENDS, EMULATED, ENGINES, OPTIONS
from distflow.errors import RecipeError
from distflow.flow.recipe_check import plan_recipe
from distflow.flow.resolve import resolve

ROLLOUT, TRAINER = "layout.pools.rollout", "layout.pools.trainer"


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            [f"{ROLLOUT}.engine=sglang", f"{ROLLOUT}.engine_options={{stream_intervall: 4}}"],
            f"command line: {ROLLOUT}.engine_options — engine_options.stream_intervall 4: engine sglang has no such "
            "option — did you mean 'stream_interval'?",
        ),
        ([f"{ROLLOUT}.engine_options={{prefill_tokens: 0}}"], "prefill_tokens 0: expected 1 or more"),
        (
            [f"{ROLLOUT}.each={{1: {{engine_options: {{colour: red}}}}}}"],
            f"{ROLLOUT}.each.1.engine_options — engine_options.colour 'red': engine torch has no such option",
        ),
        ([f"{TRAINER}.backend=fsdp", f"{TRAINER}.backend_options={{zero: 7}}"], "zero 7: backend fsdp has no such"),
        (
            [f"{TRAINER}.backend=deepspeed", f"{TRAINER}.backend_options={{zero: 7}}"],
            f"{TRAINER}.backend_options — backend_options.zero 7: expected a ZeRO stage, 0, 1, 2 or 3",
        ),
    ],
)
def test_wrong_options_of_our_own_plug_ins(overrides: list[str], message: str) -> None:
    with pytest.raises(RecipeError) as refused:
        plan_recipe("quickstart", ["layout=split", *overrides])
    assert message in str(refused.value)


DEEPSPEED, SGLANG, VLLM = f"{TRAINER}.backend=deepspeed", f"{ROLLOUT}.engine=sglang", f"{ROLLOUT}.engine=vllm"
CPU = f"{ROLLOUT}.device=cpu"
IN_CONFIG = f"command line: {TRAINER}.backend_options — backend_options.ds_config."


def tuned(ds_config: str) -> list[str]:
    return [DEEPSPEED, f"{TRAINER}.backend_options={{ds_config: {{{ds_config}}}}}"]


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            tuned("gradient_clipping: 5"),
            f"{IN_CONFIG}gradient_clipping 5: models.policy.optimizer.max_grad_norm is 1.0; remove it from ds_config, "
            "write auto, or set models.policy.optimizer.max_grad_norm",
        ),
        (tuned("gradient_clipping: abc"), f"{IN_CONFIG}gradient_clipping 'abc': models.policy.optimizer.max_grad_norm"),
        (tuned("train_batch_size: 7"), f"{IN_CONFIG}train_batch_size 7: the recipe decides what a step consumes"),
        (
            tuned("optimizer: {type: AdamW, params: {lr: 0.1}}"),
            f"{IN_CONFIG}optimizer.params.lr 0.1: models.policy.optimizer.lr is 0.001",
        ),
        (tuned("scheduler: {type: WarmupLR}"), f"{IN_CONFIG}scheduler.type 'WarmupLR': models.policy.optimizer.sched"),
        (tuned("bf16: true"), f"{IN_CONFIG}bf16 True: this backend does not pass it on"),
        (tuned("zero_optimization: 3"), f"{IN_CONFIG}zero_optimization 3: this backend does not pass it on"),
        (tuned("foo: 1"), f"{IN_CONFIG}foo 1: this backend does not pass it on"),
        (
            tuned("zero_optimization: {reduce_bucket_size: -5}"),
            f"{IN_CONFIG}zero_optimization.reduce_bucket_size -5: expected a whole number",
        ),
        (
            [DEEPSPEED, "models.policy.dtype=float16"],
            "command line: models.policy.dtype — float16 for a model that is trained: its gradients need a scale",
        ),
        (
            ["models.policy.dtype=float16"],
            "command line: models.policy.dtype — float16 for a model that is trained: its gradients need a scale",
        ),
        (
            [f"{TRAINER}.backend=fsdp", "models.policy.dtype=float16"],
            "command line: models.policy.dtype — float16 for a model that is trained: its gradients need a scale",
        ),
        (
            [f"{TRAINER}.backend=distflow.testing.fakes:FakeBackend", "models.policy.dtype=float16"],
            "command line: models.policy.dtype — float16 for a model that is trained: its gradients need a scale",
        ),
        (
            ["flow=ppo", "models.critic.dtype=float16"],
            "command line: models.critic.dtype — float16 for a model that is trained: its gradients need a scale",
        ),
        (
            [DEEPSPEED, "models.policy.dtype=bfloat16", f"{TRAINER}.zero=0"],
            f"command line: models.policy.dtype — bfloat16 with zero 0 of {TRAINER}: without ZeRO",
        ),
        (
            [f"{TRAINER}.backend=fsdp", "models.policy.optimizer.name=muon"],
            "models.policy.optimizer.name — muon with backend fsdp: it needs whole matrices, and a replica has a part",
        ),
        (
            ["models.policy.optimizer.name=adamw_8bit", DEEPSPEED],
            "models.policy.optimizer.name — adamw_8bit with backend deepspeed: it needs blocks of whole tensors",
        ),
        (
            ["models.policy.optimizer.name=adamw_8bit", "models.policy.dtype=float64"],
            "models.policy.optimizer.name — adamw_8bit steps float32, bfloat16 and float16, and models.policy.dtype is",
        ),
        (
            [f"{TRAINER}.backend=fsdp", f"{TRAINER}.backend_options={{cpu_offload: true}}", f"{TRAINER}.device=cpu"],
            f"command line: {TRAINER}.backend_options — backend_options.cpu_offload true on device cpu: parameters",
        ),
        (
            [SGLANG, f"{ROLLOUT}.engine_options={{args: {{tp_size: 2}}}}"],
            f"command line: {ROLLOUT}.engine_options — engine_options.args: tp_size is set by distflow; leave it out",
        ),
        (
            [SGLANG, f"{ROLLOUT}.engine_options={{context_length: 2}}"],
            "engine_options.context_length 2 is less than the longest sample of 20 tokens",
        ),
        (
            [SGLANG, f"{ROLLOUT}.engine_options={{tensor_parallel: 3}}"],
            "engine_options.tensor_parallel 3: the model has 4 attention heads, which cannot be divided by it; "
            "of use are 1, 2, 4",
        ),
        ([SGLANG, "models.policy.dtype=float64"], "command line: models.policy.dtype — float64, which SGLang cannot"),
        ([SGLANG, CPU, f"{ROLLOUT}.engine_options={{quantization: fp8}}"], "engine_options.quantization fp8 needs a G"),
        (
            [SGLANG, CPU, f"{ROLLOUT}.engine_options={{memory_fraction: 0.5}}"],
            "memory_fraction is a fraction of a GPU's",
        ),
        (
            [SGLANG, f"{ROLLOUT}.engine_options={{memory_fraction: 0.5}}", f"{ROLLOUT}.each={{1: {{device: cpu}}}}"],
            f"{ROLLOUT}.engine_options — engine_options.memory_fraction is a fraction of a GPU's memory",
        ),
        (
            [VLLM, f"{ROLLOUT}.engine_options={{args: {{dtype: auto}}}}"],
            "engine_options.args: dtype is set by distflow",
        ),
        ([VLLM, f"{ROLLOUT}.engine_options={{max_model_len: 2}}"], "max_model_len 2 is less than the longest sample"),
        ([VLLM, f"{ROLLOUT}.engine_options={{tensor_parallel_size: 3}}"], "the model has 4 attention heads, which"),
        ([VLLM, "models.policy.dtype=float64"], "command line: models.policy.dtype — float64, which vLLM cannot"),
        ([VLLM, CPU, f"{ROLLOUT}.engine_options={{tensor_parallel_size: 2}}"], "tensor_parallel_size 2 needs GPUs"),
    ],
)
def test_options_that_do_not_go_with_the_rest_of_the_recipe(overrides: list[str], message: str) -> None:
    with pytest.raises(RecipeError) as refused:
        plan_recipe("quickstart", ["layout=split", *overrides])
    assert message in str(refused.value)
    assert len(refused.value.problems) == 1


@pytest.mark.parametrize(
    "overrides",
    [
        tuned("train_batch_size: auto, gradient_clipping: 1.0, optimizer: {params: {lr: 0.001}}, steps_per_print: 9"),
        [DEEPSPEED, "models.policy.dtype=bfloat16", f"{TRAINER}.zero=1"],
        [f"{TRAINER}.backend=fsdp", f"{TRAINER}.backend_options={{cpu_offload: true}}"],
        [SGLANG, f"{ROLLOUT}.engine_options={{quantization: fp8, memory_fraction: 0.5, tensor_parallel: 2}}"],
        [SGLANG, f"{ROLLOUT}.engine_options={{context_length: 20, args: {{sampling_backend: pytorch}}}}"],
        [
            SGLANG,
            CPU,
            f"{ROLLOUT}={{count: 1, engine_options: {{memory_fraction: 0.5}}, each: {{0: {{device: cuda}}}}}}",
        ],
        [VLLM, f"{ROLLOUT}.engine_options={{tensor_parallel_size: 2, quantization: fp8}}"],
    ],
    ids=str,
)
def test_what_may_be_right_on_the_workers_device_is_left_to_it(overrides: list[str]) -> None:
    plan_recipe("quickstart", ["layout=split", *overrides])


def test_a_frozen_copy_is_told_by_its_original() -> None:
    """The reference, which is spelled nowhere, stands where it can be scored before the samples cross."""
    moved = [f"{ROLLOUT}.roles=[generate, score, forward]", f"{TRAINER}.roles=[train]"]
    backend = [f"{ROLLOUT}.backend=deepspeed", f"{ROLLOUT}.zero=1"]
    with pytest.raises(RecipeError, match=r"^command line: models.policy.dtype — float64 with backend deepspeed"):
        plan_recipe("quickstart", ["layout=split", "flow=grpo_kl", *moved, *backend, "models.policy.dtype=float64"])


def test_a_frozen_model_may_have_float16() -> None:
    plan_recipe("quickstart", ["layout=split", "flow=grpo_kl", "models.reference.dtype=float16"])


def test_options_of_others_are_left_to_them() -> None:
    engine = "distflow.testing.fakes:FakeEngine"
    plan = plan_recipe("quickstart", [f"{ROLLOUT}.engine={engine}", f"{ROLLOUT}.engine_options={{colour: red}}"])[1]
    assert plan.workers[0].engine_options == {"colour": "red"}


def test_all_of_ours_have_a_check() -> None:
    assert OPTIONS.keys() == {*ENGINES.values(), *BACKENDS.values(), *EMULATED}
    for call in OPTIONS.values():
        assert resolve(call).parse({}) == resolve(call)()
