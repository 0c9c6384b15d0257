"""Recipes made of other tools' configurations: every key is accounted for, and what comes out can be planned."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from distflow.config.check import key_of, section_at
from distflow.config.conversion import Converted, convert, read_foreign, written
from distflow.config.other_tools import TRL, VERL, WORDS, Meaning
from distflow.flow.recipe_check import plan_recipe
from distflow.flow.resolve import find_source
from distflow.flow.step_declaration import read_declaration, read_parameters

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
LACKING = {"actor_rollout_ref.actor.clip_ratio_c", "trainer.mystery"}
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
    assert (update["clip"], update["kl_coef"], update["kl"]) == ([0.2, 0.28], 0.003, "k2")
    assert steps["sample"].with_["max_new_tokens"] == 1024
    assert steps["reward"].with_["function"]["score"]["strict"] is True
    assert (recipe.layout.pools["worker"].count, recipe.run.trackers) == (2, {"tensorboard": True})
    assert yaml.safe_load(text)["data"]["source"] == "${oc.env:HOME}/train.parquet"


@pytest.mark.parametrize(("nodes", "prompts", "ledgers"), [(1, 64, 8), (2, 64, 16), (3, 96, 24), (2, 16, 16)])
def test_ledgers_suffice_all_training_workers(
    converted: Any, tmp_path: Path, nodes: int, prompts: int, ledgers: int
) -> None:
    words = f"trainer.nnodes={nodes} trainer.n_gpus_per_node=8 data.train_batch_size={prompts}"
    _, text = converted("run.sh", f"python3 -m verl.trainer.main_ppo {words} actor_rollout_ref.rollout.name=vllm\n")
    recipe = yaml.safe_load(text)
    assert (recipe["batch"]["ledgers"], recipe["layout"]["pools"]["worker"]["count"]) == (ledgers, 8 * nodes)
    assert "# To do: vllm shares no worker with several that train: layout.pools.worker.engine=sglang, or" in text


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
            section = section_at(tuple(path[:-1]))
            assert section is not None, key
            assert path[-1] in {key_of(section, name) for name in section.model_fields}, key


def table(meanings: dict[str, str]) -> list[str]:
    """Rows of words that mean the same, in one; NAME stands for the word itself."""
    by_text: dict[str, list[str]] = {}
    for word, text in meanings.items():
        by_text.setdefault(re.sub(rf"\b{re.escape(word)}\b", "NAME", text), []).append(f"`{word}`")
    return [f"| {', '.join(words)} | {text} |" for text, words in by_text.items()]


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
