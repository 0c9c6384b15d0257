"""Recipes made of TRL's scripts and commands: every argument is accounted for, and nothing is run."""

from __future__ import annotations

import math
import re
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import yaml
from transformers import TrainingArguments

from distflow.config.trl_keys import TRL
from tests.config.conftest import planned

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


@pytest.mark.parametrize(
    ("epochs", "rows", "config", "steps"),
    [
        (2, 70, {"num_generations": 4, "num_processes": 1, **FOUR_IN_EIGHT, "warmup_ratio": 0.1}, 8),
        (1.5, 65, {"num_generations": 4, "num_processes": 2, "num_iterations": 2, "warmup_ratio": 0.25}, 24),
        (None, 40, {"num_processes": 4, "warmup_steps": 0.5}, 30),
    ],
)
def test_passes_are_counted_in_rows(
    converted: Any, tmp_path: Path, epochs: float | None, rows: int, config: dict[str, Any], steps: int
) -> None:
    """As TRL's sampler does, which leaves out what is no whole generation batch; three passes by default."""
    (tmp_path / "x.jsonl").write_text('{"prompt": "1="}\n' * rows)
    given = config if epochs is None else {**config, "num_train_epochs": epochs}
    _, text = converted("a.py", grpo(data="load_dataset('json', data_files='x.jsonl')", **given))
    recipe = yaml.safe_load(text)
    assert recipe["run"]["training_steps"] == steps
    share = config.get("warmup_ratio") or config["warmup_steps"]
    assert recipe["models"]["policy"]["optimizer"]["warmup_steps"] == math.ceil(share * steps)
    assert "run.training_steps" not in "".join(line for line in text.splitlines() if line.startswith("# To do"))


@pytest.mark.parametrize(
    "data", ["data", "load_dataset('org/prompts')", "load_dataset('json', data_files='none.json')"]
)
def test_passes_over_rows_that_are_not_known_are_to_do(converted: Any, data: str) -> None:
    _, text = converted("a.py", grpo(data=data, num_train_epochs=2))
    assert re.search(r"# To do: num_train_epochs=2: write run.training_steps, 2 .*: rows are not known here\n", text)
    assert "not said as a number" not in text
    assert "# To do: run.training_steps is 100, since rows are not known here\n" in text


def test_a_part_of_a_file_is_a_data_set_of_the_script(converted: Any, tmp_path: Path) -> None:
    (tmp_path / "x.jsonl").write_text('{"prompt": "1="}\n' * 64)
    _, text = converted("a.py", grpo(data="load_dataset('json', data_files='x.jsonl', split='train[:8]')"))
    assert yaml.safe_load(text)["data"]["source"].startswith("./a_parts.py:")
    assert "rows are not known here" in text


@pytest.mark.parametrize(
    ("argument", "told"),
    [
        ("tools=[search]", "a generate step of your own"),
        ("environment_factory=Maze", "a generate step of your own"),
        ("rollout_func=play", "a generate step of your own"),
        ("callbacks=[Stop()]", "run.trackers, run.stop_when"),
        ("max_step=10", "did you mean max_steps?"),
        ("lr=0.5", "did you mean models.policy.optimizer.lr?"),
        ("epsilonhigh=0.3", "did you mean epsilon_high?"),
        ("loss_type='sapo'", "sapo is not built"),
        ("xyzzy=1", "see whether these change the training"),
    ],
)
def test_what_would_train_otherwise_is_to_do(converted: Any, argument: str, told: str) -> None:
    _, text = converted("a.py", f"GRPOTrainer('m', [f], GRPOConfig('out'), data, {argument})\n")
    (line,) = [line for line in text.splitlines() if line.startswith("# To do: ") and told in line]
    assert argument.partition("=")[0] in line


def test_options_and_files_that_would_train_otherwise_are_to_do(converted: Any) -> None:
    _, text = converted("a.sh", "trl grpo --model_name_or_path m --max_tool_calling_iterations 5 --lora_dropout 0.1\n")
    assert "# To do: max_tool_calling_iterations=5: a generate step of your own" in text
    assert "# To do: lora_dropout=0.1: adapters have no dropout" in text
    converted("b.py", grpo())
    _, text = converted("b.sh", "accelerate launch --config_file zero2.yaml b.py\n")
    assert "# To do: config_file=zero2.yaml: zero2.yaml is neither here nor beside b.sh" in text


def test_what_does_nothing_there_needs_nothing(converted: Any) -> None:
    found, _ = converted(
        "a.py", "GRPOTrainer('m', [f], GRPOConfig('out', max_steps=5), data, tools=None, callbacks=[])\n"
    )
    assert not [one for one in found.accounts if one.kind == "lacks"]


def test_trls_defaults_that_are_others_here_are_written(converted: Any) -> None:
    _, text = converted("a.py", grpo(beta=0.1, use_vllm=True, importance_sampling_level="sequence"))
    defaults = set(re.findall(r"^ *(\w+):.*# TRL's default", text, re.M))
    assert defaults == {
        *("samples_per_prompt", "max_new_tokens", "lr", "schedule", "gradient_checkpointing", "seed", "save_every"),
        *("aggregate", "clip", "kl", "correction", "dtype", "keep_checkpoints"),
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
            **{"loss_type": "dapo", "use_bias_correction_kl": False, "save_total_limit": 2},
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
    assert "correctness first" in found.notes["flow.steps.reward.with.function"]


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


@pytest.mark.parametrize("value", [None, 0, -1, 1.5, "x", [], {}, True])
def test_values_that_no_argument_takes_are_accounted_for(converted: Any, value: Any) -> None:
    keys = ("loss_type", "num_generations", "report_to", "per_device_train_batch_size", "vllm_importance_sampling_mode")
    for key in keys:
        found, _ = converted("a.py", f"GRPOTrainer('m', [], GRPOConfig(use_vllm=True, **{ ({key: value})!r}))\n")
        assert key in {one.key for one in found.accounts}


@pytest.mark.parametrize(
    ("sizes", "each"), [("per_device_train_batch_size=2", "0.25"), ("gradient_accumulation_steps=3", "3")]
)
def test_the_batch_of_one_process_is_told_as_it_is(converted: Any, sizes: str, each: str) -> None:
    """Of several processes it may be a whole number that is not a multiple of one that was rounded."""
    _, text = converted("a.py", f"args = GRPOConfig({sizes})\nGRPOTrainer(model='org/model', args=args)\n")
    assert f"# To do: batch.prompts is that of one process: write {each} × the number of processes" in text


def test_as_many_checkpoints_are_kept_as_by_trl(converted: Any, tmp_path: Path) -> None:
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "1=", "answer": "1"}\n')
    for limit, kept in (("", None), ("save_total_limit=None", None), ("save_total_limit=3", 3)):
        _, text = converted("a.py", f"GRPOTrainer(model='org/model', args=GRPOConfig({limit}))\n")
        assert planned(tmp_path, text).recipe.run.keep_checkpoints == kept


def test_a_model_that_the_script_loads_is_told_once(converted: Any) -> None:
    loading = "model = AutoModelForCausalLM.from_pretrained('org/model', torch_dtype=torch.float32)\n"
    found, text = converted("a.py", f"{loading}GRPOTrainer(model=model, args=GRPOConfig())\n")
    (model,) = [one for one in found.accounts if one.key == "model"]
    assert (model.kind, model.text) == ("maps", "models.policy.path=org/model")
    assert "dtype: bfloat16  # TRL's default: the optimizer's weights are float32, as the script loads them" in text
