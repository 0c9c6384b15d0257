"""Composition: groups, overrides, interpolations, origins, files made absolute."""

from __future__ import annotations

import math
import os
from pathlib import Path

import pytest

from distflow.config.load import load_recipe, recipe_from_mapping
from distflow.config.paths import recipes_folder, shipped_recipes
from distflow.config.yamlfile import read_yaml, yaml_text
from distflow.errors import RecipeError


def write(folder: Path, text: str, name: str = "mine.yaml") -> str:
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return str(path)


@pytest.mark.parametrize("name", shipped_recipes())
@pytest.mark.parametrize("layout", ["split", "async", "colocated"])
@pytest.mark.parametrize("flow", ["grpo", "grpo_kl"])
def test_shipped_recipes_load_with_every_layout_and_flow(name: str, layout: str, flow: str) -> None:
    loaded = load_recipe(name, [f"layout={layout}", f"flow={flow}"])
    assert loaded.recipe.run.name == name
    assert recipe_from_mapping(loaded.resolved, lambda key: "here") == loaded.recipe


def test_the_quickstart_is_the_recipe_that_learns() -> None:
    recipe = load_recipe("quickstart").recipe
    optimizer = recipe.models["policy"].optimizer
    assert (recipe.batch.prompts, recipe.batch.samples_per_prompt, recipe.run.training_steps) == (32, 8, 600)
    assert (optimizer.lr, optimizer.betas, optimizer.max_grad_norm) == (1e-3, (0.9, 0.95), 1.0)
    assert recipe.flow.steps["sample"].with_["max_new_tokens"] == 4


def test_values_and_groups_are_overridden_without_a_plus() -> None:
    overrides = ["layout=async", "batch.prompts=64", "layout.pools.rollout.each.1.threads=2", "limits.restarts=0"]
    recipe = load_recipe("quickstart", overrides).recipe
    assert recipe.layout.max_staleness == 1
    assert recipe.batch.prompts == 64
    assert recipe.layout.pools["rollout"].each["1"].threads == 2
    assert recipe.limits.restarts == 0


def test_a_group_that_no_defaults_list_chose_is_added() -> None:
    recipe = load_recipe("quickstart", ["model@models.reference=smollm2"]).recipe
    assert recipe.models["reference"].path is not None
    assert recipe.models["policy"].init is not None


def test_a_group_may_go_to_any_section(tmp_path: Path) -> None:
    path = write(tmp_path, "defaults: [quickstart, {model@models.judge: smollm2}, _self_]\n")
    assert load_recipe(path).recipe.models["judge"].path is not None
    assert load_recipe(path, ["model@models.judge=tiny"]).recipe.models["judge"].path is None
    for taken_back in ("~model@models.judge", "model@models.judge=null", "models.judge=null"):
        assert list(load_recipe(path, [taken_back]).recipe.models) == ["policy"]


def test_a_choice_may_be_one_that_another_choice_brings() -> None:
    for order in (["flow=ppo", "model@models.critic=tiny"], ["model@models.critic=tiny", "flow=ppo"]):
        recipe = load_recipe("quickstart", order).recipe
        assert recipe.models["critic"].init is not None
        assert recipe.models["critic"].head == "tokens"


def test_null_is_no_list_and_no_mapping(tmp_path: Path) -> None:
    """What an earlier layer says is taken away: an empty mapping would leave it."""
    path = write(
        tmp_path,
        "defaults: [quickstart, _self_]\n"
        "run: {trackers: {tensorboard: {logdir: here}}}\n"
        "data: {with: {digits: 2}}\n"
        "val: {sampling: {temperature: 0.0}}\n"
        "layout: {pools: {trainer: {hosts: [a], each: {0: {threads: 2}}}}}\n"
        "models: {policy: {optimizer: {groups: [{match: bias, weight_decay: 0.0}]}}}\n",
    )
    given = load_recipe(path).recipe
    pool = given.layout.pools["trainer"]
    assert all([given.run.trackers, given.data.with_, pool.hosts, pool.each, given.models["policy"].optimizer.groups])
    keys = ["run.trackers", "data.with", "val.sampling", "layout.pools.trainer.hosts", "layout.pools.trainer.each"]
    nothing = load_recipe(path, [f"{key}=null" for key in (*keys, "models.policy.optimizer.groups")]).recipe
    pool = nothing.layout.pools["trainer"]
    assert (nothing.run.trackers, nothing.data.with_, pool.hosts, pool.each) == ({}, {}, [], {})
    assert nothing.val is not None
    assert nothing.val.sampling == {}
    assert nothing.models["policy"].optimizer.groups == []
    assert load_recipe(path, ["run.trackers=null", "run.trackers.wandb.project=x"]).recipe.run.trackers == {
        "wandb": {"project": "x"}
    }


def test_settings_of_steps_that_the_chosen_flow_lacks(tmp_path: Path) -> None:
    """Shipped ones are left out; own ones are refused with the line to remove them by."""
    sample = "flow:\n  steps:\n    sample: {with: {max_new_tokens: 8}}\n"
    path = write(tmp_path, f"defaults: [quickstart, _self_]\n{sample}")
    told = r"mine\.yaml:4: flow\.steps\.sample — flow sft has no step 'sample' — flow\.steps\.sample=null removes"
    with pytest.raises(RecipeError, match=told):
        load_recipe(path, ["flow=sft"])
    assert "sample" not in load_recipe(path, ["flow=sft", "flow.steps.sample=null"]).recipe.flow.steps
    with pytest.raises(RecipeError, match=r"flow grpo has no step 'samle' — did you mean 'sample'\?"):
        load_recipe("quickstart", ["flow.steps.samle.with.max_new_tokens=8"])
    with pytest.raises(RecipeError, match=r"own\.cal — unknown key — did you mean 'call'"):
        load_recipe("quickstart", ["flow.steps.own.cal=f"])


def test_origins_name_file_and_line(tmp_path: Path) -> None:
    path = write(tmp_path, "defaults: [quickstart, _self_]\nbatch:\n  prompts: 16\n")
    loaded = load_recipe(path, ["run.seed=3"])
    assert loaded.origin("batch.prompts") == f"{path}:3"
    assert loaded.origin("run.seed") == "command line"
    assert loaded.origin("models.policy.tokenizer").endswith("recipes/model/tiny.yaml:13")
    assert loaded.origin("batch.ledgers").endswith("recipes/quickstart.yaml:11")


def test_a_file_may_use_groups_of_its_own_folder(tmp_path: Path) -> None:
    write(tmp_path, "defaults: [split, _self_]\npools: {rollout: {count: 5}}\n", "layout/five.yaml")
    path = write(tmp_path, "defaults: [quickstart, {override /layout: five}, _self_]\n")
    assert load_recipe(path).recipe.layout.pools["rollout"].count == 5
    assert load_recipe(path, ["layout=colocated"]).recipe.layout.pools.keys() == {"worker"}


def test_the_name_of_a_run_defaults_to_the_file(tmp_path: Path) -> None:
    path = write(tmp_path, "defaults: [quickstart, _self_]\nrun: {name: null}\n", "other.yaml")
    assert load_recipe(path).recipe.run.name == "other"


def test_interpolations_are_resolved_at_load(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(os.environ, "MY_SEED", "7")
    path = write(
        tmp_path,
        "defaults: [quickstart, _self_]\nrun: {seed: '${oc.decode:${oc.env:MY_SEED}}'}\n"
        "batch: {tokens_per_microbatch: '${batch.prompts}'}\n",
    )
    recipe = load_recipe(path).recipe
    assert recipe.run.seed == 7
    assert recipe.batch.tokens_per_microbatch == 32


def test_plugins_start_from_the_file_that_names_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write(
        tmp_path / "a",
        "defaults: [custom_step, _self_]\nflow: {steps: {update: {with: {loss: './mine.py:loss'}}}}\n",
    )
    monkeypatch.chdir(tmp_path)
    override = "flow.steps.reward.with.function=./here.py:reward"
    steps = load_recipe(path, [override]).recipe.flow.steps
    assert steps["advantage"].call == f"{recipes_folder()}/custom_step.py:my_advantage"
    assert steps["update"].with_["loss"] == f"{tmp_path}/a/mine.py:loss"
    assert steps["reward"].with_["function"] == f"{tmp_path}/here.py:reward"


def test_models_of_shipped_recipes_start_from_the_current_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert load_recipe("reasoning").recipe.models["policy"].path == f"{tmp_path}/models/smollm2-135m"


def test_models_on_the_command_line_start_from_the_current_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write(tmp_path / "a", "defaults: [quickstart, _self_]\nmodels: {policy: {path: ./mine}}\n")
    monkeypatch.chdir(tmp_path)
    assert load_recipe(path).recipe.models["policy"].path == f"{tmp_path}/a/mine"
    assert load_recipe(path, ["models.policy.path=./mine"]).recipe.models["policy"].path == f"{tmp_path}/mine"


def test_files_of_the_data_start_from_the_file_that_names_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write(
        tmp_path / "a",
        "defaults: [quickstart, _self_]\n"
        "data: {source: './mine.py:lines', with: {path: ./new.jsonl, more: [train.jsonl, sub/b.txt, ../c], "
        "config: {table: table.csv}, split: train, name: owner/name, gone: gone.jsonl, text: 'a b.txt', rate: 1.5}}\n"
        "flow: {steps: {sample: {with: {stop_words: ./words.txt}}}}\n",
    )
    for name in ("train.jsonl", "sub/b.txt", "table.csv", "train", "a b.txt"):
        (tmp_path / "a" / name).parent.mkdir(exist_ok=True)
        (tmp_path / "a" / name).touch()
    monkeypatch.chdir(tmp_path)
    recipe = load_recipe(path).recipe
    folder = tmp_path / "a"
    assert recipe.data.with_ == {
        "path": f"{folder}/new.jsonl",
        "more": [f"{folder}/train.jsonl", f"{folder}/sub/b.txt", f"{tmp_path}/c"],
        "config": {"table": f"{folder}/table.csv"},
        "split": "train",
        "name": "owner/name",
        "gone": "gone.jsonl",
        "text": "a b.txt",
        "rate": 1.5,
    }
    assert recipe.flow.steps["sample"].with_["stop_words"] == f"{folder}/words.txt"
    assert load_recipe(path, ["data.with.path=./x.jsonl"]).recipe.data.with_["path"] == f"{tmp_path}/x.jsonl"


def test_hub_ids_stay_as_they_are() -> None:
    model = load_recipe("quickstart", ["models.policy.path=Qwen/Qwen2.5-0.5B"]).recipe.models["policy"]
    assert model.path == "Qwen/Qwen2.5-0.5B"
    assert (model.init, model.tokenizer) == (None, None)  # they belonged to the model that was replaced


def test_another_function_starts_without_the_settings_of_the_old_one() -> None:
    steps = load_recipe("custom_step", ["flow.steps.update.call=my.module:update"]).recipe.flow.steps
    assert steps["advantage"].with_ == {}
    assert steps["update"].with_ == {}


def test_settings_given_beside_another_function_are_kept() -> None:
    overrides = ["flow.steps.update.with.x=1", "flow.steps.update.call=my.module:update"]
    assert load_recipe("quickstart", overrides).recipe.flow.steps["update"].with_ == {"x": 1}


def test_nothing_is_left_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import logging

    monkeypatch.chdir(tmp_path)
    handlers = list(logging.getLogger().handlers)
    load_recipe("quickstart", ["layout=async"])
    assert list(tmp_path.iterdir()) == []
    assert logging.getLogger().handlers == handlers


def test_yaml_written_is_yaml_read(tmp_path: Path) -> None:
    values = {"a": 1e-8, "b": [1, {"c": None}], "d": "1e-3", "e": "2024-01-01", "f": True, "on": "off"}
    path = tmp_path / "x.yaml"
    path.write_text(yaml_text(values))
    assert read_yaml(path).value == values


def test_infinity_stays_a_number(tmp_path: Path) -> None:
    keys = ("flow.steps.update.with.tis", "data.with.rate", "models.policy.init.rope_theta")
    overrides = [*(f"{key}=inf" for key in keys), "flow.steps.update.with.clip=[0.2,inf]"]
    path = tmp_path / "recipe.yaml"
    path.write_text(yaml_text(load_recipe("quickstart", overrides).resolved))
    recipe = recipe_from_mapping(read_yaml(path).value, lambda key: "here")
    update = recipe.flow.steps["update"].with_
    assert (update["tis"], update["clip"]) == (math.inf, [0.2, math.inf])
    assert recipe.data.with_["rate"] == math.inf
    assert recipe.models["policy"].init is not None
    assert recipe.models["policy"].init["rope_theta"] == math.inf


def test_numbers_with_an_exponent_are_numbers(tmp_path: Path) -> None:
    path = tmp_path / "x.yaml"
    path.write_text("a: 1e-3\nb: 2024-01-01\nc: 0.5\n")
    assert read_yaml(path).value == {"a": 0.001, "b": "2024-01-01", "c": 0.5}
