"""Recipes made of other tools' configurations: every key is accounted for, and what comes out can be planned."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import yaml
from transformers import TrainingArguments

from distflow.config.check import key_of, section_at
from distflow.config.conversion import Converted, convert, written
from distflow.config.foreign import read_foreign
from distflow.config.meanings import ALWAYS, NOT_BUILT, NOTHING, Meaning
from distflow.config.other_tools import VERL, WORDS
from distflow.config.trl_keys import TRL
from distflow.flow.recipe_check import plan_recipe
from distflow.flow.resolve import find_source
from distflow.flow.step_declaration import read_declaration, read_parameters
from distflow.workers.backends.backend_options import FsdpBackendOptions
from distflow.workers.engines.sglang_options import SGLangOptions
from distflow.workers.engines.vllm_options import VLLMOptions

VERL_SCRIPT = """
set -x
MODEL=Qwen/Qwen2-7B-Instruct
export SIZE=256
python3 -m verl.trainer.main_ppo \\
    algorithm.adv_estimator=grpo \\
    algorithm.use_kl_in_reward=False \\
    data.train_files=$HOME/train.parquet \\
    data.val_files=$HOME/test.parquet \\
    data.train_batch_size=$SIZE \\
    data.max_prompt_length=${LONGEST:-384} \\
    data.max_response_length=1024 \\
    data.filter_overlong_prompts=True \\
    actor_rollout_ref.model.path="$MODEL" \\
    actor_rollout_ref.model.lora_rank=32 \\
    actor_rollout_ref.model.lora_alpha=64 \\
    actor_rollout_ref.actor.optim.lr=1e-6 \\
    actor_rollout_ref.actor.ppo_mini_batch_size=64 \\
    actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=4 \\
    actor_rollout_ref.actor.use_kl_loss=True \\
    actor_rollout_ref.actor.kl_loss_coef=0.003 \\
    actor_rollout_ref.actor.kl_loss_type=mse \\
    actor_rollout_ref.actor.clip_ratio_high=0.28 \\
    actor_rollout_ref.actor.clip_ratio_c=10.0 \\
    actor_rollout_ref.rollout.n=5 \\
    actor_rollout_ref.rollout.gpu_memory_utilization=0.6 \\
    +custom_reward_function.path=score.py \\
    +custom_reward_function.reward_kwargs.strict=true \\
    trainer.logger='["console","tensorboard"]' \\
    trainer.n_gpus_per_node=2 trainer.total_training_steps=40 trainer.test_freq=-1 \\
    trainer.mystery=7 $@  # what follows is no override: a=b.c
"""
LACKING = {"trainer.mystery"}
SAYING = {
    *("algorithm.use_kl_in_reward", "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu", "trainer.test_freq"),
    "actor_rollout_ref.rollout.gpu_memory_utilization",
}
TRL_SCRIPT = """
import functools
from datasets import Dataset
from peft import LoraConfig
from trl import GRPOConfig, GRPOTrainer
raise SystemExit("this is never run")

dataset = Dataset.from_list([{"prompt": "1="}])
LR = 5e-6
def by_length(completions, **kwargs): return [0.0] * len(completions)
bounded = functools.partial(by_length, bound=3)
rewards = [by_length, bounded]
args = GRPOConfig(
    output_dir="out", learning_rate=LR, per_device_train_batch_size=16, gradient_accumulation_steps=2,
    steps_per_generation=4, num_generations=4, max_steps=200, beta=0.04, epsilon_high=0.28, loss_type="dr_grpo",
    scale_rewards="none", bf16=True, report_to=["wandb"], logging_steps=10, reward_weights=[1.0, 0.5], min_p=0.1,
    seed=seed_of_today(), top_k=0, xyz=1,
)
trainer = GRPOTrainer(
    model="models/tiny", reward_funcs=rewards, args=args, train_dataset=dataset, peft_config=LoraConfig(r=8)
)
trainer.train()
"""
GRPO_CONFIG = """
learning_rate model_init_kwargs trust_remote_code router_aux_loss_coef disable_dropout cast_lm_head_to_fp32
remove_unused_columns num_generations num_generations_eval max_completion_length ds3_gather_for_generation
shuffle_dataset pad_to_multiple_of generation_batch_size steps_per_generation temperature top_p top_k min_p
generation_kwargs chat_template_kwargs repetition_penalty cache_implementation use_vllm vllm_mode vllm_model_impl
vllm_enable_sleep_mode vllm_structured_outputs_regex vllm_server_base_url vllm_server_host vllm_server_port
vllm_server_timeout vllm_group_port vllm_gpu_memory_utilization vllm_max_model_length vllm_tensor_parallel_size beta
num_iterations epsilon delta epsilon_high sapo_temperature_neg sapo_temperature_pos vespo_k_pos vespo_lambda_pos
vespo_k_neg vespo_lambda_neg importance_sampling_level reward_weights multi_objective_aggregation scale_rewards
loss_type mask_truncated_completions sync_ref_model ref_model_mixup_alpha ref_model_sync_steps top_entropy_quantile
entropy_coef use_adaptive_entropy entropy_coef_min entropy_coef_max entropy_coef_delta entropy_target
max_tool_calling_iterations vllm_importance_sampling_correction vllm_importance_sampling_mode
vllm_importance_sampling_clip_max vllm_importance_sampling_clip_min off_policy_mask_threshold use_bias_correction_kl
log_completions log_multimodal num_completions_to_print log_unique_prompts log_completions_hub_repo
use_transformers_continuous_batching transformers_continuous_batching_config use_transformers_paged
vllm_importance_sampling_cap
"""
"""Fields that GRPOConfig 1.16 has of its own."""
FOUR_IN_EIGHT = {"gradient_accumulation_steps": 4, "steps_per_generation": 8}
DEFAULT_VAL = {"at_start": False, "samples_per_prompt": 8}


@pytest.fixture
def converted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str, str], tuple[Converted, str]]:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))

    def make(name: str, text: str) -> tuple[Converted, str]:
        path = tmp_path / name
        path.write_text(text)
        foreign = read_foreign(path)
        found = convert(foreign)
        return found, written(foreign, found)

    return make


def planned(tmp_path: Path, text: str, *overrides: str) -> Any:
    (tmp_path / "mine.yaml").write_text(text)
    return plan_recipe(str(tmp_path / "mine.yaml"), overrides)[1]


def test_every_key_of_verls_overrides_is_accounted_for(converted: Any, tmp_path: Path) -> None:
    found, text = converted("run.sh", VERL_SCRIPT)
    given = re.findall(r"^ +\+?((?!python3)[\w.]+)=|(trainer\.\w+)=", VERL_SCRIPT, re.M)
    keys = {one or other for one, other in given}
    assert len(keys) >= 25
    by_kind = {kind: {one.key for one in found.accounts if one.kind == kind} for kind in ("maps", "says", "lacks")}
    assert by_kind == {"maps": keys - LACKING - SAYING, "says": SAYING, "lacks": LACKING}
    assert all(f"#   {key}=" in text for key in keys), "each is named in the recipe"
    (tmp_path / "score.py").write_text(
        "def compute_score(data_source, solution_str, ground_truth, extra_info=None, strict=False): return 0.0\n"
    )
    (tmp_path / "train.jsonl").write_text('{"prompt": "1="}\n')
    files = ["data.source=train.jsonl", "val.data.source=train.jsonl"]
    recipe = planned(tmp_path, text, *files, "layout.pools.worker.device=cpu").recipe
    assert (recipe.batch.prompts, recipe.batch.samples_per_prompt, recipe.batch.minibatches) == (256, 5, 4)
    assert (recipe.data.max_prompt_tokens, recipe.data.overlong, recipe.run.training_steps) == (384, "drop", 40)
    policy, steps = recipe.models["policy"], recipe.flow.steps
    assert (policy.path, policy.optimizer.lr) == ("Qwen/Qwen2-7B-Instruct", 1e-6)
    assert policy.lora is not None
    assert (policy.lora.rank, policy.lora.alpha) == (32, 64)
    update = steps["update"].with_
    assert (update["clip"], update["kl_coef"], update["kl"]) == ([0.2, 0.28, 10.0], 0.003, "k2")
    assert steps["sample"].with_["max_new_tokens"] == 1024
    assert steps["reward"].with_["function"]["score"]["strict"] is True
    assert (recipe.layout.pools["worker"].count, recipe.run.trackers) == (2, {"tensorboard": True})
    assert yaml.safe_load(text)["data"]["source"] == "${oc.env:HOME}/train.parquet"


@pytest.mark.parametrize(("nodes", "prompts", "ledgers"), [(1, 64, 8), (2, 64, 16), (3, 96, 24), (2, 16, 16)])
def test_ledgers_suffice_all_training_workers(
    converted: Any, tmp_path: Path, nodes: int, prompts: int, ledgers: int
) -> None:
    words = f"trainer.nnodes={nodes} trainer.n_gpus_per_node=8 data.train_batch_size={prompts}"
    _, text = converted("run.sh", f"python3 -m verl.trainer.main_ppo {words} actor_rollout_ref.rollout.name=sglang\n")
    recipe = yaml.safe_load(text)
    assert (recipe["batch"]["ledgers"], recipe["layout"]["pools"]["worker"]["count"]) == (ledgers, 8 * nodes)


VERL_BASE = "algorithm.adv_estimator=grpo data.train_files=x.jsonl actor_rollout_ref.model.path=org/model "


@pytest.fixture
def of_verl(converted: Any, tmp_path: Path) -> Callable[[str], tuple[Converted, str, Any]]:
    """Convert overrides of verl, and plan what comes out as it stands."""

    def make(words: str) -> tuple[Converted, str, Any]:
        for name in ("x", "y"):
            (tmp_path / f"{name}.jsonl").write_text('{"prompt": "1="}\n')
        long = re.sub(r"(?<!\S)(actor|rollout)\.", r"actor_rollout_ref.\1.", VERL_BASE + words)
        found, text = converted("overrides.txt", long.replace(" ", "\n"))
        return found, text, planned(tmp_path, text).recipe

    return make


@pytest.mark.parametrize(
    ("words", "pools", "width"),
    [
        ("rollout.name=vllm trainer.n_gpus_per_node=8", {"rollout": 4, "trainer": 4}, 1),
        (
            "rollout.name=vllm rollout.tensor_model_parallel_size=2 trainer.n_gpus_per_node=8 trainer.nnodes=2",
            {"rollout": 4, "trainer": 8},
            2,
        ),
        (
            "rollout.name=sglang rollout.tensor_model_parallel_size=4 trainer.n_gpus_per_node=8",
            {"rollout": 1, "trainer": 4},
            4,
        ),
        (
            "rollout.name=sglang rollout.tensor_model_parallel_size=8 trainer.n_gpus_per_node=8",
            {"rollout": 1, "trainer": 4},
            4,
        ),
        ("rollout.name=vllm trainer.n_gpus_per_node=1", {"worker": 1}, 1),
        ("rollout.name=sglang trainer.n_gpus_per_node=8", {"worker": 8}, 1),
        ("rollout.name=hf rollout.tensor_model_parallel_size=1 trainer.nnodes=2", {"worker": 16}, 1),
        ("rollout.name=vllm rollout.nnodes=1 rollout.n_gpus_per_node=4", {"rollout": 4, "trainer": 8}, 1),
        (
            "rollout.name=vllm data.train_batch_size=16 actor.ppo_mini_batch_size=4 trainer.nnodes=4",
            {"rollout": 16, "trainer": 4},
            1,
        ),
    ],
)
def test_gpus_that_verl_uses_in_turns_are_divided_as_here_they_can_be(
    of_verl: Any, words: str, pools: dict[str, int], width: int
) -> None:
    found, text, recipe = of_verl(words)
    assert {name: pool.count for name, pool in recipe.layout.pools.items()} == pools
    split = "rollout" in pools
    (engine,) = re.findall(r"rollout.name=(\w+)", words)
    generating = recipe.layout.pools["rollout" if split else "worker"]
    assert generating.engine == {"hf": "torch"}.get(engine, engine)
    name = {"vllm": "tensor_parallel_size", "sglang": "tensor_parallel"}.get(engine, "")
    assert generating.engine_options.get(name, 1) == width
    assert ("# To do: check how the " in text) == (split and "rollout.nnodes" not in words)
    training = recipe.layout.pools["trainer" if split else "worker"]
    assert training.backend == ("torch" if training.count == 1 else "fsdp")
    assert not [one for one in found.accounts if one.kind == "lacks"]


def test_options_of_engines_and_backends_are_kept(of_verl: Any) -> None:
    options = "rollout.gpu_memory_utilization=0.7 rollout.max_model_len=4096 rollout.enforce_eager=true"
    moved = "actor.fsdp_config.param_offload=true actor.fsdp_config.model_dtype=bf16"
    pools = of_verl(f"rollout.name=vllm {options} {moved} rollout.max_num_seqs=64")[2].layout.pools
    assert pools["rollout"].engine_options == {
        "gpu_memory_utilization": 0.7,
        "max_model_len": 4096,
        "enforce_eager": True,
        "dtype": "bfloat16",
    }
    assert (pools["rollout"].slots, pools["trainer"].backend_options) == (64, {"cpu_offload": True})
    found, _, recipe = of_verl(f"rollout.name=sglang {options} {moved} rollout.dtype=float16")
    worker = recipe.layout.pools["worker"]
    assert worker.engine_options == {"memory_fraction": 0.7, "context_length": 4096, "dtype": "float16"}
    assert (worker.offload, worker.backend_options, recipe.models["policy"].dtype) == (True, {}, "bfloat16")
    (eager,) = [one for one in found.accounts if one.key.endswith("enforce_eager")]
    assert (eager.kind, eager.text) == ("says", "an option of vllm: enforce_eager; engine sglang has none")


def test_what_verl_does_unless_it_is_told_is_written(of_verl: Any) -> None:
    found, text, recipe = of_verl("rollout.name=sglang data.val_files=y.jsonl")
    policy, update = recipe.models["policy"], recipe.flow.steps["update"].with_
    assert (policy.dtype, policy.optimizer.weight_decay, policy.gradient_checkpointing) == ("bfloat16", 0.01, True)
    assert (update["clip"], update["tis"], recipe.val.sampling["temperature"]) == ([0.2, 0.2, 3.0], None, 0)
    assert recipe.flow.steps["sample"].with_["max_new_tokens"] == 512
    told = {one.key.rpartition(".")[2] for one in found.defaults}
    assert {"weight_decay", "dtype", "clip_ratio_c", "rollout_is", "temperature", "lr"} <= told
    assert "# defaults of verl that differ from those here, and are written (" in text
    given = "actor.optim.weight_decay=0.1 actor.fsdp_config.dtype=float32 actor.clip_ratio_c=5 "
    given += "algorithm.rollout_correction.rollout_is=token algorithm.rollout_correction.rollout_is_threshold=4"
    found, _, recipe = of_verl(given)
    policy, update = recipe.models["policy"], recipe.flow.steps["update"].with_
    assert (policy.dtype, policy.optimizer.weight_decay, update["clip"], update["tis"]) == (
        "float32",
        0.1,
        [0.2, 0.2, 5],
        4,
    )
    assert not {"weight_decay", "clip_ratio_c", "rollout_is"} & {one.key.rpartition(".")[2] for one in found.defaults}
    recipe = of_verl("algorithm.adv_estimator=gae critic.optim.weight_decay=0.2")[2]
    critic = recipe.models["critic"]
    assert (critic.optimizer.lr, critic.optimizer.weight_decay, critic.dtype) == (1e-5, 0.2, "bfloat16")
    recipe = of_verl("algorithm.adv_estimator=reinforce_plus_plus")[2]
    assert recipe.flow.steps["token_rewards"].with_["kl_coef"] == 0.0


@pytest.mark.parametrize(
    ("prompts", "size", "parts"), [(128, 60, 2), (90, 40, 2), (1024, 256, 4), (96, 32, 3), (64, 100, 1)]
)
def test_mini_batches_that_do_not_divide_are_told(of_verl: Any, prompts: int, size: int, parts: int) -> None:
    _, text, recipe = of_verl(f"data.train_batch_size={prompts} actor.ppo_mini_batch_size={size}")
    assert recipe.batch.minibatches == parts
    told = f"# To do: batch.minibatches is {parts}, of {prompts // parts} prompts each: {prompts} prompts do not divide"
    assert (f"{told} into mini-batches of {size}, and" in text) == (parts * size != prompts)


def test_all_files_of_prompts_are_given(of_verl: Any) -> None:
    _, text, recipe = of_verl("data.train_files=['x.jsonl','y.jsonl'] data.val_files=['y.jsonl'] data.prompt_key=q")
    assert {name: Path(one.source).name for name, one in recipe.data.mix.items()} == {"x": "x.jsonl", "y": "y.jsonl"}
    assert {tuple(one.fields.items()) for one in recipe.data.mix.values()} == {(("prompt", "q"),)}
    assert (Path(recipe.val.data.source).name, recipe.val.data.fields) == ("y.jsonl", {"prompt": "q"})
    assert "# To do: weight of each of x, y in data.mix: its rows" in text


def test_sources_are_named_by_what_tells_their_files_apart(converted: Any) -> None:
    words = "data.train_files=['a/gsm8k/train.parquet','a/math/train.parquet']"
    assert list(yaml.safe_load(converted("run.sh", words)[1])["data"]["mix"]) == ["gsm8k_train", "math_train"]
    script = "data = load_dataset('json', data_files=['one.jsonl', 'two.jsonl'])\nGRPOTrainer(train_dataset=data)\n"
    assert yaml.safe_load(converted("a.py", script)[1])["data"]["mix"] == {
        "one": {"source": "one.jsonl"},
        "two": {"source": "two.jsonl"},
    }


@pytest.mark.parametrize(
    ("mode", "pools"), [("", {"rollout": 1, "trainer": 2}), ("vllm_mode='server', ", {"rollout": 1, "trainer": 1})]
)
def test_vllm_over_several_gpus_has_a_pool_of_its_own(
    converted: Any, tmp_path: Path, mode: str, pools: dict[str, int]
) -> None:
    vllm = f"use_vllm=True, {mode}vllm_tensor_parallel_size=2, vllm_gpu_memory_utilization=0.4, num_generations=2"
    _, text = converted("a.py", f"args = GRPOConfig({vllm})\nGRPOTrainer(model='org/model', args=args)\n")
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "1=", "answer": "1"}\n')
    recipe = planned(tmp_path, text).recipe
    assert {name: pool.count for name, pool in recipe.layout.pools.items()} == pools
    assert recipe.layout.pools["rollout"].engine_options == {"tensor_parallel_size": 2, "gpu_memory_utilization": 0.4}
    policy = recipe.models["policy"]
    assert (policy.optimizer.schedule, policy.dtype, policy.gradient_checkpointing) == ("linear", "bfloat16", True)


def test_a_trl_script_is_read_and_never_run(converted: Any, tmp_path: Path) -> None:
    found, text = converted("grpo.py", TRL_SCRIPT)
    lacking = {one.key: one.text for one in found.accounts if one.kind == "lacks"}
    assert lacking == {"seed": "run.seed: the script computes it", "xyz": "not in the dictionary"}
    assert "# To do: write grpo_parts.py" in text
    parts = TRL_SCRIPT.partition("args = ")[0].replace('raise SystemExit("this is never run")', "")
    (tmp_path / "grpo_parts.py").write_text(parts)
    recipe = planned(tmp_path, text).recipe
    assert (recipe.batch.prompts, recipe.batch.samples_per_prompt, recipe.batch.minibatches) == (16, 4, 2)
    assert recipe.run.training_steps == 100, "200 optimizer steps, two a generation batch"
    assert recipe.data.source is not None
    assert recipe.data.source.endswith("grpo_parts.py:dataset")
    update = recipe.flow.steps["update"].with_
    assert (update["clip"], update["kl_coef"], update["aggregate"]) == (
        [0.2, 0.28],
        0.04,
        "seq-mean-token-sum-norm/512",
    )
    assert recipe.flow.steps["advantage"].with_["normalize"] == "none"
    assert recipe.flow.steps["sample"].with_["min_p"] == 0.1
    function = recipe.flow.steps["reward"].with_["function"]
    assert {name: part["weight"] for name, part in function.items()} == {"by_length": 1.0, "bounded": 0.5}
    policy = recipe.models["policy"]
    assert (policy.optimizer.lr, policy.dtype, policy.path) == (5e-6, "bfloat16", "models/tiny")


def test_what_trl_hands_to_generate(converted: Any, tmp_path: Path) -> None:
    wanted = {"stop_strings": ["\n\n"], "min_new_tokens": 4, "repetition_penalty": 1.1, "max_tokens": 64}
    script = f"args = GRPOConfig(top_p=0.9, generation_kwargs={wanted})\nGRPOTrainer(model='models/tiny', args=args)\n"
    found, text = converted("a.py", script)
    assert {one.key: one.kind for one in found.accounts} == dict.fromkeys(
        ("top_p", "generation_kwargs", "model"), "maps"
    )
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "1=", "answer": "1"}\n')
    settings = planned(tmp_path, text).recipe.flow.steps["sample"].with_
    assert settings == {
        "stop": ["\n\n"],
        "include_stop_str_in_output": True,
        "min_new_tokens": 4,
        "repetition_penalty": 1.1,
        "max_new_tokens": 64,
        "top_p": 0.9,
        "temperature": 1.0,  # of the flow itself
    }
    found, _ = converted("b.py", "args = GRPOConfig(generation_kwargs={'stop': 'x', 'presence_penalty': 0.5})\n")
    (told,) = [one.text for one in found.accounts if one.kind == "lacks"]
    assert told == "presence_penalty: no setting of sampling here"


def grpo(more: str = "", rewards: str = "[exact]", data: str = "dataset", **config: Any) -> str:
    """A script for TRL."""
    words = ", ".join(f"{key}={value!r}" for key, value in config.items())
    return (
        f"args = GRPOConfig({words})\n"
        f"GRPOTrainer(model='m', reward_funcs={rewards}, args=args, train_dataset={data}{more})\n"
    )


@pytest.mark.parametrize(
    ("held_out", "config", "val", "told"),
    [
        (
            "split['test']",
            {"eval_strategy": "steps", "eval_steps": 4, "max_steps": 40, "steps_per_generation": 2},
            {"data": {"source": "./a_parts.py:eval_dataset"}, "every": 2, "at_start": False, "samples_per_prompt": 8},
            "in a_parts.py write eval_dataset = split['test']",
        ),
        (
            "load_dataset('org/set', 'main')['test']",
            {"eval_strategy": "steps", "eval_on_start": True, "num_generations_eval": 1},
            {
                "data": {"source": "hub:org/set", "with": {"config": "main", "split": "test"}},
                **{"at_start": True, "samples_per_prompt": 1, "every": 10},
            },
            "",
        ),
        (
            "{'a': one, 'b': two}",
            {"eval_strategy": "steps", "eval_steps": 1},
            None,
            "there is no section val, since its prompts are not known (eval_dataset): give val.data.source, and val",
        ),
        ("held", {"eval_steps": 1}, None, ""),
        ("held", {"eval_strategy": "epoch"}, {"data": {"source": "./a_parts.py:held"}, **DEFAULT_VAL}, "write a_parts"),
    ],
)
def test_validation_has_its_own_prompts_or_there_is_none(
    converted: Any, held_out: str, config: dict[str, Any], val: Any, told: str
) -> None:
    found, text = converted("a.py", grpo(f", eval_dataset={held_out}", **config))
    assert yaml.safe_load(text).get("val") == val
    assert any(told in one for one in found.assumed)
    assert "lacks" not in {one.kind for one in found.accounts if one.key != "eval_dataset"}


def test_rewards_without_a_name_get_one_that_is_to_be_written(converted: Any, tmp_path: Path) -> None:
    head = (
        "from functools import partial\nimport trl.rewards as tr\nfrom trl.rewards import think_format_reward\n"
        "from beside import other\nclass K: ...\ndef scaled(completions, by=1.0): return [by] * len(completions)\n"
        "named = K()\nshort = lambda completions, **kw: [0.0]\n"
    )
    rewards = (
        "[scaled, partial(scaled, by=2.0), K(3), lambda completions, **kw: [0.0], tr.accuracy_reward, other, named,"
        " think_format_reward, made['x'], make(4), short, 'org/judge']"
    )
    (tmp_path / "beside.py").write_text("def other(completions): return [0.0] * len(completions)\n")
    _, text = converted("a.py", head + grpo(rewards=rewards, reward_weights=[float(n) for n in range(12)]))
    parts = yaml.safe_load(text)["flow"]["steps"]["reward"]["with"]["function"]
    assert [(part["function"], part["weight"]) for part in parts.values()] == [
        ("./a_parts.py:scaled", 0.0),
        ("./a_parts.py:scaled_reward", 1.0),
        ("./a_parts.py:k", 2.0),
        ("./a_parts.py:reward_4", 3.0),
        ("trl.rewards:accuracy_reward", 4.0),
        ("./beside.py:other", 5.0),
        ("./a_parts.py:named", 6.0),
        ("trl.rewards:think_format_reward", 7.0),
        ("./a_parts.py:reward_9", 8.0),
        ("./a_parts.py:make", 9.0),
        ("./a_parts.py:short", 10.0),
        ("./a_parts.py:judge", 11.0),
    ]
    for line in (
        "scaled_reward = partial(scaled, by=2.0)",
        "k = K(3)",
        "reward_4 = lambda completions, **kw: [0.0]",
        "reward_9 = made['x']",
        "make = make(4)",
    ):
        assert f"# To do: in a_parts.py write {line}\n" in text
    assert "reward_funcs has the reward model org/judge beside functions: in a_parts.py write judge(prompts, " in text
    (tmp_path / "a_parts.py").write_text(
        f"{head}dataset = [{{'prompt': '1='}}]\n".replace("import trl.rewards as tr\n", "")
    )
    with pytest.raises(ValueError, match=r"reward\.with\.function.* — .*scaled_reward"):
        planned(tmp_path, text, "models.policy.path=tiny")


@pytest.mark.parametrize("rewards", ["rewards_of(args)", "[f for f in known]", "a + b"])
def test_rewards_that_only_the_script_knows_are_an_entry_to_replace(converted: Any, rewards: str) -> None:
    _, text = converted("a.py", grpo(rewards=rewards))
    parts = yaml.safe_load(text)["flow"]["steps"]["reward"]["with"]["function"]
    assert parts == {"rewards": {"function": "./a_parts.py:rewards", "weight": 1.0}}
    assert f"# To do: reward_funcs has {rewards}, which only the script can tell: write an entry of flow" in text


def test_a_reward_model_alone_is_a_step(converted: Any, tmp_path: Path) -> None:
    _, text = converted("a.py", grpo(rewards="'org/judge'", data="load_dataset('json', data_files='x.jsonl')"))
    (tmp_path / "x.jsonl").write_text('{"prompt": "1="}\n')
    recipe = planned(tmp_path, text, "models.policy.path=tiny").recipe
    assert (recipe.models["score"].path, recipe.models["score"].head) == ("org/judge", "score")
    assert recipe.flow.steps["reward"].call == "distflow.workers.reward_model:judge"


@pytest.mark.parametrize(
    ("config", "steps", "save", "warmup"),
    [
        ({"max_steps": 500, "save_steps": 50, "warmup_ratio": 0.1, **FOUR_IN_EIGHT}, 250, 25, 25),
        ({"max_steps": 300, "save_steps": 30, "warmup_steps": 5, "num_iterations": 3}, 100, 10, 2),
        ({"max_steps": 60, "save_steps": 0.5, "warmup_steps": 0.25, **FOUR_IN_EIGHT}, 30, 15, 8),
        ({"max_steps": 1000, "generation_batch_size": 32, "per_device_train_batch_size": 8}, 250, 125, None),
        ({"max_steps": 10, "save_strategy": "no", "save_steps": 5}, 10, None, None),
    ],
)
def test_what_trl_counts_in_optimizer_steps(
    converted: Any, config: dict[str, Any], steps: int, save: int | None, warmup: int | None
) -> None:
    recipe = yaml.safe_load(converted("a.py", grpo(**config))[1])
    assert (recipe["run"]["training_steps"], recipe["run"].get("save_every")) == (steps, save)
    assert recipe["models"]["policy"]["optimizer"].get("warmup_steps") == warmup


def test_a_ratio_of_a_length_that_is_not_known_is_to_do(converted: Any) -> None:
    _, text = converted("a.py", grpo(warmup_ratio=0.1))
    assert "# To do: write models.policy.optimizer.warmup_steps, 0.1 × run.training_steps (warmup_ratio)\n" in text


def test_trls_defaults_that_are_others_here_are_written(converted: Any) -> None:
    _, text = converted("a.py", grpo(beta=0.1, use_vllm=True, importance_sampling_level="sequence"))
    defaults = set(re.findall(r"^ *(\w+):.*# TRL's default", text, re.M))
    assert defaults == {
        *("samples_per_prompt", "max_new_tokens", "lr", "schedule", "gradient_checkpointing", "seed", "save_every"),
        *("aggregate", "clip", "kl", "correction", "dtype"),
    }
    recipe = yaml.safe_load(text)
    assert recipe["models"]["policy"]["optimizer"] == {"lr": 1e-6, "schedule": "linear"}
    update = recipe["flow"]["steps"]["update"]["with"]
    assert (update["clip"], update["kl"], update["correction"]) == ([0.2, 0.2], "k2", {"sequence_mis": [0, 3.0]})
    assert (recipe["run"]["seed"], recipe["batch"]["samples_per_prompt"]) == (42, 8)
    _, text = converted(
        "b.py",
        grpo(
            **{"lr_scheduler_type": "constant_with_warmup", "seed": 1, "bf16": False, "gradient_checkpointing": False},
            **{"max_completion_length": 8, "learning_rate": 1e-5, "num_generations": 4, "save_steps": 7, "beta": 0.1},
            **{"loss_type": "dapo", "use_bias_correction_kl": False},
        ),
    )
    assert "TRL's default" not in text
    assert yaml.safe_load(text)["models"]["policy"]["optimizer"]["schedule"] == "constant"


@pytest.mark.parametrize(
    ("optim", "name", "kind"),
    [
        *(("adamw_8bit", "adamw_8bit", "maps"), ("paged_adamw_8bit", "adamw_8bit", "maps")),
        *(("adamw_bnb_8bit", "adamw_8bit", "maps"), ("adamw_torch_fused", None, "says")),
        *(("paged_adamw_32bit", None, "says"), ("lion_8bit", None, "lacks")),
    ],
)
def test_optimizers_of_trl(converted: Any, optim: str, name: str | None, kind: str) -> None:
    found, text = converted("a.py", grpo(optim=optim))
    assert yaml.safe_load(text)["models"]["policy"]["optimizer"].get("name") == name
    assert [one.kind for one in found.accounts if one.key == "optim"] == [kind]


def test_how_trl_loads_the_model(converted: Any) -> None:
    init = "{'torch_dtype': torch.bfloat16, 'attn_implementation': 'flash_attention_2', 'device_map': 'auto'}"
    _, text = converted(
        "a.py", f"init = {init}\nGRPOTrainer('m', [f], GRPOConfig('out', model_init_kwargs=init), data)\n"
    )
    policy = yaml.safe_load(text)["models"]["policy"]
    assert (policy["path"], policy["dtype"], policy["attn_implementation"]) == ("m", "bfloat16", "flash_attention_2")
    assert yaml.safe_load(text)["data"]["source"] == "./a_parts.py:data"
    _, text = converted(
        "b.py",
        "NAME = 'org/m'\nbits = BitsAndBytesConfig(load_in_4bit=True)\n"
        "model = AutoModelForCausalLM.from_pretrained(NAME, dtype='bfloat16', quantization_config=bits, revision='2')\n"
        "GRPOTrainer(model=model, peft_config=LoraConfig(lora_dropout=0.1), reward_funcs=f)\n",
    )
    policy = yaml.safe_load(text)["models"]["policy"]
    assert (policy["path"], policy["dtype"], policy["quantize"]) == ("org/m", "bfloat16", "nf4")
    assert policy["lora"] == {"rank": 8, "alpha": 8}
    assert "# To do: the model is loaded with revision: nothing stands for it in models.policy\n" in text
    assert "# To do: lora_dropout=0.1 of LoraConfig is left out, since adapters have no dropout: log-probs of a" in text


def test_bounds_of_trls_losses(converted: Any) -> None:
    for config, clip in (
        ({"delta": 4.0}, [0.2, 0.2, 4.0]),
        ({"epsilon": 0.1, "epsilon_high": 0.3, "delta": 2}, [0.1, 0.3, 2]),
        ({"loss_type": "cispo", "epsilon_high": 5.0}, [1.0, 4.0]),
        ({}, None),
    ):
        update = yaml.safe_load(converted("a.py", grpo(**config))[1])["flow"]["steps"]["update"]["with"]
        assert update.get("clip") == clip
    _, text = converted("a.py", grpo(loss_type="cispo"))
    assert "# To do: epsilon_high (0.2) bounds the ratio of cispo itself, and flow=cispo takes no bound below 1" in text


def test_a_training_step_that_cannot_be_cut_so_often(converted: Any, tmp_path: Path) -> None:
    for device, held, expected in ((8, 8, (8, 8, 1)), (4, 4, (2, 2, 1)), (16, 2, (4, 2, 2))):
        config = {"per_device_train_batch_size": device, "steps_per_generation": held, "num_generations": 8}
        batch = yaml.safe_load(converted("a.py", grpo(**config))[1])["batch"]
        assert (batch["prompts"], batch["minibatches"], batch["ledgers"]) == expected


OPTIONS = "--model_name_or_path org/m --dataset_name org/set --dataset_config main --learning_rate 1e-5"
REST = "--reward_funcs think_format_reward my.module.other --use_peft --lora_r 4 --no_shuffle_dataset --dtype=bfloat16"


@pytest.mark.parametrize("form", ["line", "config", "yaml", "launched"])
def test_options_of_trls_command_are_those_of_its_script(converted: Any, tmp_path: Path, form: str) -> None:
    options = {
        **{"model_name_or_path": "org/m", "dataset_name": "org/set", "dataset_config": "main", "learning_rate": 1e-5},
        **{"reward_funcs": ["think_format_reward", "my.module.other"], "use_peft": True, "lora_r": 4},
        **{"shuffle_dataset": False, "dtype": "bfloat16"},
    }
    (tmp_path / "x.yaml").write_text(yaml.safe_dump(options | {"lora_r": 64}))
    name, text = {
        "line": ("run.sh", f"LR=1\ntrl grpo {OPTIONS} \\\n  {REST} | tee log\n"),
        "config": ("run.sh", "trl grpo --config x.yaml --lora_r 4\n"),
        "yaml": ("config.yml", yaml.safe_dump(options)),
        "launched": ("run.sh", f"accelerate launch --num_machines 1 trl/scripts/grpo.py {OPTIONS} {REST}\n"),
    }[form]
    found, text = converted(name, text)
    assert {one.key for one in found.accounts} == options.keys()
    assert {one.kind for one in found.accounts} == {"maps"}
    recipe = yaml.safe_load(text)
    policy = recipe["models"]["policy"]
    assert (policy["path"], policy["optimizer"]["lr"], policy["dtype"]) == ("org/m", 1e-5, "bfloat16")
    assert policy["lora"] == {"rank": 4, "alpha": 32}
    assert recipe["data"] == {
        **{"source": "hub:org/set", "with": {"config": "main", "split": "train"}, "shuffle": False},
    }
    functions = recipe["flow"]["steps"]["reward"]["with"]["function"]
    assert [part["function"] for part in functions.values()] == ["trl.rewards:think_format_reward", "my.module:other"]


def test_processes_and_held_out_rows_of_trls_command(converted: Any) -> None:
    _, text = converted("run.sh", f"trl grpo {OPTIONS} --num_processes 4 --eval_strategy steps --eval_steps 20\n")
    recipe = yaml.safe_load(text)
    assert (recipe["batch"]["prompts"], recipe["layout"]["pools"]["worker"]["count"]) == (4, 4)
    assert recipe["val"]["data"] == {"source": "hub:org/set", "with": {"config": "main", "split": "test"}}
    assert recipe["val"]["every"] == 20


def test_other_trainers_of_trl_are_told_their_flow(converted: Any) -> None:
    for name, text, flow in (
        ("a.py", "SFTTrainer(model='m', args=SFTConfig())\n", "sft"),
        ("b.sh", "trl dpo --beta 0.1\n", "dpo"),
    ):
        with pytest.raises(ValueError, match=f"only GRPO of TRL is converted, .* — begin with flow={flow} "):
            converted(name, text)


def test_every_argument_of_trl_is_accounted_for() -> None:
    inherited = {one.name for one in fields(TrainingArguments)}
    assert len(inherited) > 100
    assert sorted((inherited | set(GRPO_CONFIG.split())) - TRL.keys()) == []


@pytest.mark.parametrize(
    ("given", "flow", "lacks"),
    [
        ("algorithm.adv_estimator=gae", "ppo", ""),
        ("algorithm.adv_estimator=rloo", "rloo", ""),
        ("algorithm.adv_estimator=grpo\nalgorithm.filter_groups.enable=true", "dapo", ""),
        ("algorithm.adv_estimator=grpo\nactor_rollout_ref.actor.policy_loss.loss_mode=gspo", "gspo", ""),
        ("algorithm.adv_estimator=grpo_passk", "grpo", "grpo_passk: an advantage of your own"),
        ("algorithm.adv_estimator=grpo\ndata.train_batch_size=${SIZE}", "grpo", "${oc.env:SIZE} is no number: 1024"),
    ],
)
def test_verls_estimators_are_flows(converted: Any, tmp_path: Path, given: str, flow: str, lacks: str) -> None:
    found, text = converted("overrides.txt", f"{given}\nactor_rollout_ref.model.path=m\ndata.train_files=x.jsonl\n")
    assert yaml.safe_load(text)["defaults"][0] == {"flow": flow}
    assert [one.text.startswith(lacks) for one in found.accounts if one.kind == "lacks"] == [True] * bool(lacks)
    (tmp_path / "x.jsonl").write_text('{"prompt": "1="}\n')
    planned(tmp_path, text)


def test_what_is_no_configuration_is_told(converted: Any, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"nothing to convert — expected a Python script"):
        converted("notes.txt", "a = b\nx=1\n")
    with pytest.raises(ValueError, match=r"bad\.py:1: .* — expected a Python script"):
        converted("bad.py", "def (:\n")
    with pytest.raises(ValueError, match="cannot be read"):
        read_foreign(tmp_path / "nowhere.sh")


def test_the_dictionary_names_keys_that_there_are() -> None:
    update = read_declaration("distflow.workers.trainer:update").parameters.settings
    settings = {
        "sample": read_declaration("distflow.workers.rollout:sample").parameters.settings,
        "reward": read_declaration("distflow.workers.reward:verify").parameters.settings,
        "update": {**update, **read_parameters(find_source("distflow.algorithms.losses:ppo").node).settings},
        "advantage": read_parameters(find_source("distflow.algorithms.advantages:grpo").node).settings,
    }
    for key in {meaning.to for meaning in (*TRL.values(), *VERL.values()) if "." in meaning.to}:
        path = key.split(".")
        if path[:2] == ["flow", "steps"]:
            assert path[4] in settings[path[2]], key
        elif path[:2] not in (["data", "fields"], ["val", "sampling"]):
            options, path = (path[-1], path[:-1]) if path[-2] == "backend_options" else ("", path)
            section = section_at(tuple(path[:-1]))
            assert section is not None, key
            assert path[-1] in {key_of(section, name) for name in section.model_fields}, key
            assert not options or options in FsdpBackendOptions.__dataclass_fields__, key
    engines = {"vllm": VLLMOptions, "sglang": SGLangOptions}
    for meaning in (*TRL.values(), *VERL.values()):
        for engine, name in meaning.options.items():
            assert name in engines[engine].__dataclass_fields__, meaning


LEADS = (NOT_BUILT, ALWAYS, NOTHING.removesuffix(": "))
"""What has one row of a table, as a key has that several words share, with what is to be said beside the words."""


def table(meanings: dict[str, str]) -> list[str]:
    """Rows of words that mean the same, in one. Of a text that no other has, NAME stands for the last part of the word,
    where a key here ends so.
    """
    alone = Counter(meanings.values())
    by_text: dict[str, list[str]] = {}
    for word, text in meanings.items():
        last = rf"(?:(?<=[.=])|(?<=: ))\b{re.escape(word.rpartition('.')[2])}\b(?![.:])"
        general = re.sub(last, "NAME", text) if alone[text] == 1 else text
        by_text.setdefault(general, []).append(f"`{word}`")
    keys = Counter(text.partition(": ")[0] for text in by_text)
    rows: dict[str, list[str]] = {}
    for text, words in by_text.items():
        key = text.partition(": ")[0]
        shared = key if key.startswith("`") and keys[key] > 1 else text
        lead = next((lead for lead in LEADS if text.startswith(f"{lead}: ")), shared)
        reason = text.removeprefix(lead).removeprefix(": ")
        rows.setdefault(lead, []).append(", ".join(words) + (f" ({reason})" if reason else ""))
    return [f"| {'; '.join(words)} | {text} |" for text, words in rows.items()]


def said(meaning: Meaning) -> str:
    to = f"`{meaning.to}`" if meaning.to else ""
    return ": ".join(part for part in (to, meaning.text) if part)


def tables() -> str:
    """The tables of the page. A word that is a key of the first two stands there."""
    above = {key.rpartition(".")[2] for key in (*TRL, *VERL)}
    heads = {
        "TRL's arguments": table({key: said(one) for key, one in TRL.items()}),
        "verl's keys": table({key: said(one) for key, one in VERL.items()}),
        "Further words": table({word: text for word, text in WORDS.items() if word not in above}),
    }
    return "\n".join(
        f"## {title}\n\n| there | here |\n| --- | --- |\n" + "\n".join(rows) + "\n" for title, rows in heads.items()
    )


def test_the_page_is_made_of_the_dictionary() -> None:
    page = (Path(__file__).parents[2] / "docs" / "from-other-tools.md").read_text()
    assert page[page.index("## TRL's arguments") :] == tables()
