"""Recipes made of other tools' configurations: every key is accounted for, and what comes out can be planned."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from distflow.config.check import key_of, section_at
from distflow.config.conversion import Converted
from distflow.config.foreign import read_foreign
from distflow.config.meanings import ALWAYS, NOT_BUILT, NOTHING, Meaning
from distflow.config.other_tools import VERL, WORDS
from distflow.config.trl_keys import TRL
from distflow.errors import UserError
from distflow.flow.resolve import find_source
from distflow.flow.step_declaration import read_declaration, read_parameters
from distflow.workers.backends.backend_options import FsdpBackendOptions
from distflow.workers.engines.sglang_options import SGLangOptions
from distflow.workers.engines.vllm_options import VLLMOptions
from tests.config.conftest import planned

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
    assert yaml.safe_load(text)["data"]["source"] == f"{tmp_path}/train.parquet"


@pytest.mark.parametrize(("nodes", "prompts", "ledgers"), [(1, 64, 8), (2, 64, 16), (3, 96, 24), (2, 16, 16)])
def test_ledgers_suffice_all_training_workers(
    converted: Any, tmp_path: Path, nodes: int, prompts: int, ledgers: int
) -> None:
    words = f"trainer.nnodes={nodes} trainer.n_gpus_per_node=8 data.train_batch_size={prompts}"
    _, text = converted("run.sh", f"python3 -m verl.trainer.main_ppo {words} actor_rollout_ref.rollout.name=sglang\n")
    recipe = yaml.safe_load(text)
    assert (recipe["batch"]["ledgers"], recipe["layout"]["pools"]["worker"]["count"]) == (ledgers, 8 * nodes)


SCORES = "def compute_score(data_source, solution_str, ground_truth, extra_info=None): return 0.0\n"
VERL_BASE = "algorithm.adv_estimator=grpo data.train_files=x.jsonl actor_rollout_ref.model.path=org/model "


@pytest.fixture
def of_verl(converted: Any, tmp_path: Path) -> Callable[[str], tuple[Converted, str, Any]]:
    """Convert overrides of verl, and plan what comes out as it stands."""

    def make(words: str) -> tuple[Converted, str, Any]:
        for name in ("x", "y"):
            (tmp_path / f"{name}.jsonl").write_text('{"prompt": "1="}\n')
        long = re.sub(r"(?<!\S)(actor|rollout)\.", r"actor_rollout_ref.\1.", VERL_BASE + words)
        (tmp_path / "overrides_parts.py").write_text(SCORES)
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


def test_what_is_known_is_written(of_verl: Any) -> None:
    ppo = "algorithm.adv_estimator=gae algorithm.gamma=0.99 algorithm.lam=0.9 data.seed=7 critic.cliprange_value=0.3 "
    ppo += "actor.optim.lr_warmup_steps_ratio=0.1 critic.optim.lr_warmup_steps_ratio=0.25 trainer.save_freq=5 "
    ppo += "critic.optim.lr=1e-5 critic.optim.min_lr_ratio=0.5 critic.model.fsdp_config.param_offload=true "
    found, _, recipe = of_verl(ppo + "trainer.total_training_steps=50 rollout.name=sglang")
    steps, rates = recipe.flow.steps, {name: one.optimizer for name, one in recipe.models.items()}
    assert (steps["gae"].with_, steps["critic_update"].with_["clip"]) == ({"gamma": 0.99, "lam": 0.9}, 0.3)
    assert (rates["policy"].warmup_steps, rates["critic"].warmup_steps, rates["critic"].min_lr) == (5, 12, 5e-6)
    assert (recipe.run.seed, recipe.run.keep_checkpoints) == (7, None)
    assert recipe.layout.pools["worker"].offload
    assert not [one for one in found.accounts if one.kind == "lacks"]
    assert of_verl("trainer.max_actor_ckpt_to_keep=null")[2].run.keep_checkpoints is None
    assert of_verl("trainer.max_actor_ckpt_to_keep=3 trainer.save_freq=5")[2].run.keep_checkpoints == 3


@pytest.mark.parametrize(
    ("above", "extra"), [("reward_model", ""), ("reward", " reward.reward_kwargs.max_resp_len=800")]
)
def test_long_responses_are_punished_as_there(of_verl: Any, above: str, extra: str) -> None:
    words = f"data.max_response_length=800 {above}.reward_kwargs.overlong_buffer_cfg.len=200{extra} "
    words += f"{above}.reward_kwargs.overlong_buffer_cfg.penalty_factor=0.5 "
    filtered = "algorithm.filter_groups.enable=true algorithm.filter_groups.max_num_gen_batches=10 "
    filtered += "data.gen_batch_size=96 data.train_batch_size=64 "
    on, off = (f"{above}.reward_kwargs.overlong_buffer_cfg.enable={one}" for one in (True, False))
    for flow in (filtered, ""):
        found, _, recipe = of_verl(words + flow + on)
        given = recipe.flow.steps["token_rewards"].with_
        assert given == {"overlong_share": 0.25, "overlong_factor": 0.5, "max_new_tokens": 800}
        assert recipe.flow.steps["advantage"].with_["token_rewards"] is True
        assert not [one for one in found.accounts if one.kind == "lacks"]
        assert "token_rewards" not in of_verl(words + flow + off)[2].flow.steps
    recipe = of_verl(filtered)[2]
    assert "token_rewards" not in recipe.flow.steps
    assert recipe.flow.steps["filter"].with_["keep_every"] == 0
    assert recipe.batch.max_refills == (10 * 96 - 64) / recipe.batch.ledgers


@pytest.mark.parametrize(
    ("key", "value", "idle"),
    [
        ("data.truncation", "left", "error"),
        ("data.truncation", "middle", "error"),
        ("actor_rollout_ref.actor.fsdp_config.fsdp_size", 4, -1),
        ("critic.model.fsdp_config.fsdp_size", 2, 8),
        ("actor_rollout_ref.actor.megatron.tensor_model_parallel_size", 4, 1),
        ("actor_rollout_ref.ref.megatron.pipeline_model_parallel_size", 2, 1),
        ("actor_rollout_ref.actor.ulysses_sequence_parallel_size", 2, 1),
        ("actor_rollout_ref.actor.strategy", "megatron", "fsdp2"),
        ("critic.ppo_epochs", 3, 1),
        ("critic.ppo_mini_batch_size", 128, 256),
    ],
)
def test_what_cannot_be_carried_over_is_to_do(of_verl: Any, key: str, value: Any, idle: Any) -> None:
    ppo = "algorithm.adv_estimator=gae actor_rollout_ref.rollout.name=sglang "
    assert f"# To do: {key}={value}: " in of_verl(f"{ppo}{key}={value}")[1]
    assert f"# To do: {key}" not in of_verl(f"{ppo}{key}={idle}")[1]
    assert not [one for one in of_verl(f"{ppo}{key}={idle}")[0].accounts if one.kind == "lacks"]


def test_a_reward_that_is_not_known_is_to_be_written(converted: Any, tmp_path: Path) -> None:
    (tmp_path / "x.jsonl").write_text('{"prompt": "1="}\n')
    _, text = converted("run.txt", VERL_BASE.replace(" ", "\n"))
    assert "# To do: verl has scored by the column data_source" in text
    with pytest.raises(UserError, match=r"run_parts\.py"):
        planned(tmp_path, text)
    planned(tmp_path, text, "flow.steps.reward.with.function=exact_match")


def test_all_files_of_prompts_are_given(of_verl: Any) -> None:
    _, text, recipe = of_verl("data.train_files=['x.jsonl','y.jsonl'] data.val_files=['y.jsonl'] data.prompt_key=q")
    assert {name: Path(one.source).name for name, one in recipe.data.mix.items()} == {"x": "x.jsonl", "y": "y.jsonl"}
    assert {tuple(one.fields.items()) for one in recipe.data.mix.values()} == {(("prompt", "q"),)}
    assert (Path(recipe.val.data.source).name, recipe.val.data.fields) == ("y.jsonl", {"prompt": "q"})
    assert {one.weight for one in recipe.data.mix.values()} == {1}
    assert "weights are rows: all are drawn alike" in text
    assert "weight of each" not in text


def test_weights_of_files_that_cannot_be_counted_are_to_do(converted: Any) -> None:
    _, text = converted("run.sh", "data.train_files=[nowhere/x.parquet,nowhere/y.parquet] data.train_batch_size=8")
    assert "# To do: weight of each of x, y in data.mix: its rows" in text
    assert "rows are not known here" in text


def test_sources_are_named_by_what_tells_their_files_apart(converted: Any) -> None:
    words = "data.train_files=['a/gsm8k/train.parquet','a/math/train.parquet']"
    assert list(yaml.safe_load(converted("run.sh", words)[1])["data"]["mix"]) == ["gsm8k_train", "math_train"]
    script = "data = load_dataset('json', data_files=['one.jsonl', 'two.jsonl'])\nGRPOTrainer(train_dataset=data)\n"
    assert yaml.safe_load(converted("a.py", script)[1])["data"]["mix"] == {
        "one": {"source": "one.jsonl"},
        "two": {"source": "two.jsonl"},
    }


@pytest.mark.parametrize(
    ("given", "flow", "lacks"),
    [
        ("algorithm.adv_estimator=gae", "ppo", ""),
        ("algorithm.adv_estimator=rloo", "rloo", ""),
        ("algorithm.adv_estimator=grpo\nalgorithm.filter_groups.enable=true", "dapo", ""),
        ("algorithm.adv_estimator=grpo\nactor_rollout_ref.actor.policy_loss.loss_mode=gspo", "gspo", ""),
        ("algorithm.adv_estimator=grpo_passk", "grpo", "grpo_passk: an advantage of your own"),
        ("algorithm.adv_estimator=grpo\ndata.train_batch_size=${SIZE}", "grpo", "line 2: SIZE has no value"),
    ],
)
def test_verls_estimators_are_flows(converted: Any, tmp_path: Path, given: str, flow: str, lacks: str) -> None:
    found, text = converted("overrides.txt", f"{given}\nactor_rollout_ref.model.path=m\ndata.train_files=x.jsonl\n")
    assert yaml.safe_load(text)["defaults"][0] == {"flow": flow}
    assert [one.text.startswith(lacks) for one in found.accounts if one.kind == "lacks"] == [True] * bool(lacks)
    (tmp_path / "overrides_parts.py").write_text(SCORES)
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
        "gae": read_declaration("distflow.workers.critic:gae").parameters.settings,
        "critic_update": read_declaration("distflow.workers.critic:critic_update").parameters.settings,
        "advantage": read_parameters(find_source("distflow.algorithms.advantages:grpo").node).settings,
        "token_rewards": read_declaration("distflow.workers.shaping:token_rewards").parameters.settings,
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
    return [f"| {capped(words)} | {text} |" for text, words in rows.items()]


MOST = 300
"""Characters of a cell: a reader takes in no more, and `distflow convert` says the rest."""


def capped(parts: list[str]) -> str:
    """Join what has one row, up to `MOST` characters, and tell how many words are left."""
    words = [word for part in parts for word in re.split(r", (?=`)", part)]
    kept = words[:1]
    for word in words[1:]:
        if len("; ".join([*kept, word])) > MOST - 50:
            break
        kept.append(word)
    left = len(words) - len(kept)
    return "; ".join(kept) + (f"; and {left} more, which `distflow convert` names" if left else "")


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
    assert max(len(cell) for line in tables().splitlines() for cell in line.split(" | ")) <= MOST


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ("rollout.multi_turn.enable=true rollout.multi_turn.max_assistant_turns=5", "a generate step of your own"),
        ("rollout.agent.default_agent_loop=tool_agent", "a generate step of your own"),
        ("actor_rollout_ref.model.override_config.attention_dropout=0.1", "no dropout is applied here"),
        ("actor.clip_ratoi=0.3", "not in the dictionary: did you mean actor_rollout_ref.actor.clip_ratio?"),
        ("trainer.val_only=true", "this recipe trains"),
        ("trainer.resume_mode=resume_path", "checkpoints of other tools are not read"),
        ("data.reward_fn_key=kind", "functions get the column data_source"),
        ("trainer.total_epochs=15", "run.training_steps = 15 (total_epochs) × (rows of data.train_files // 1024)"),
    ],
)
def test_what_would_train_otherwise_is_to_do(of_verl: Any, words: str, told: str) -> None:
    _, text, _ = of_verl(words)
    (line,) = [line for line in text.splitlines() if line.startswith("# To do: ") and told in line]
    assert words.split("=")[0].rpartition(".")[2] in line


@pytest.mark.parametrize(
    "words",
    [
        "rollout.multi_turn.enable=false rollout.multi_turn.max_assistant_turns=5 trainer.resume_mode=disable",
        "actor_rollout_ref.model.override_config.resid_pdrop=0.0 trainer.device=cuda trainer.resume_mode=auto",
        "trainer.val_only=false data.reward_fn_key=data_source reward_model.launch_reward_fn_async=true",
        "trainer.rollout_data_dir=/x trainer.validation_data_dir=/y trainer.max_critic_ckpt_to_keep=2",
    ],
)
def test_what_does_nothing_there_needs_nothing(of_verl: Any, words: str) -> None:
    assert not [one for one in of_verl(words)[0].accounts if one.kind == "lacks"]


@pytest.mark.parametrize(("rows", "size", "epochs", "steps"), [((70,), 16, 15, 60), ((40, 25), 8, 2, 16)])
def test_passes_are_counted_in_rows(
    converted: Any, tmp_path: Path, rows: tuple[int, ...], size: int, epochs: int, steps: int
) -> None:
    """As the data loader of verl does, which drops what is no whole batch of a pass."""
    for n, count in enumerate(rows):
        (tmp_path / f"t{n}.jsonl").write_text('{"prompt": "1="}\n' * count)
    files = ",".join(f"t{n}.jsonl" for n in range(len(rows)))
    words = f"data.train_files=[{files}] data.train_batch_size={size} trainer.total_epochs={epochs} "
    words += "actor_rollout_ref.actor.optim.lr_warmup_steps_ratio=0.1"
    recipe = yaml.safe_load(converted("run.sh", words)[1])
    assert recipe["run"]["training_steps"] == steps
    assert recipe["models"]["policy"]["optimizer"]["warmup_steps"] == steps // 10
    if len(rows) > 1:
        assert tuple(one["weight"] for one in recipe["data"]["mix"].values()) == rows


def test_an_engine_leaves_the_gpu_as_verls_does(of_verl: Any) -> None:
    for words, offload in (
        ("", True),
        (" rollout.free_cache_engine=true", True),
        (" rollout.free_cache_engine=false", False),
    ):
        recipe = of_verl(f"rollout.name=sglang{words}")[2]
        assert recipe.layout.pools["worker"].offload is offload


def test_trackers_have_the_project(of_verl: Any) -> None:
    words = "trainer.logger=[console,wandb,tensorboard,mlflow] trainer.project_name=sums trainer.experiment_name=one"
    recipe = of_verl(words)[2]
    assert recipe.run.trackers == {"wandb": {"project": "sums"}, "tensorboard": True, "mlflow": {"experiment": "sums"}}
    assert recipe.run.name == "one"


@pytest.mark.parametrize(("flow", "there"), [("gspo", "loss_mode=gspo"), ("cispo", "loss_mode=cispo")])
def test_long_responses_are_punished_with_other_losses(of_verl: Any, flow: str, there: str) -> None:
    at = "reward_model.reward_kwargs."
    words = f"actor.policy_loss.{there} data.max_response_length=800 {at}overlong_buffer_cfg.enable=true "
    words += f"{at}overlong_buffer_cfg.len=200 {at}overlong_buffer_cfg.penalty_factor=0.5 {at}max_resp_len=800"
    found, text, recipe = of_verl(words)
    assert yaml.safe_load(text)["defaults"][0] == {"flow": flow}
    assert recipe.flow.steps["token_rewards"].with_["overlong_share"] == 0.25
    assert not [one for one in found.accounts if one.kind == "lacks"]
