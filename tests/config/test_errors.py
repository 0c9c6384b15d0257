"""Everything wrong is reported at once, with place, key, cause and cure."""

from __future__ import annotations

import contextlib
import re
from pathlib import Path

import pytest
import yaml
from omegaconf import OmegaConf

from distflow.config.check import key_of, section_at
from distflow.config.load import load_recipe
from distflow.config.other_tools import WORDS
from distflow.config.plugins import TRACKERS
from distflow.config.trl_keys import TRL
from distflow.errors import RecipeError
from distflow.flow.chosen_function import chosen_function
from distflow.flow.step_declaration import read_declaration
from distflow.launch.cli import run

BASE = "defaults: [quickstart, _self_]\n"
AFTER = "defaults:\n- quickstart\n"


def mine(folder: Path, text: str) -> str:
    path = folder / "mine.yaml"
    path.write_text(text)
    return str(path)


def refused(name: str, *overrides: str) -> str:
    with pytest.raises(RecipeError) as caught:
        load_recipe(name, overrides)
    assert caught.value.exit_code == 2
    return str(caught.value)


def test_a_typo_in_a_key(tmp_path: Path) -> None:
    path = mine(tmp_path, BASE + "batch:\n  promts: 16\n")
    with pytest.raises(RecipeError, match=r"mine\.yaml:3: batch\.promts — unknown key — did you mean 'prompts'\?"):
        load_recipe(path)


def test_a_wrong_type(tmp_path: Path) -> None:
    path = mine(tmp_path, BASE + "run: {seed: many}\n")
    with pytest.raises(RecipeError, match=r"mine\.yaml:2: run\.seed — expected a whole number, got 'many'"):
        load_recipe(path)


@pytest.mark.parametrize(
    ("first", "removed"),
    [
        ("layout.pools.rollout.engine=fake", "layout.pools.rollout.engine_options"),
        ("layout.pools.rollout.engine=fake", "layout.pools.rollout.engine_options.graphs"),
        ("flow.steps.reward.call=distflow.workers.shaping:overlong", "flow.steps.reward.with.function"),
        ("models.policy.path=/tmp/none", "models.policy.init"),
    ],
)
def test_what_naming_another_function_removes_already_may_be_removed(tmp_path: Path, first: str, removed: str) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text("defaults: [quickstart, _self_]\nlayout: {pools: {rollout: {engine_options: {graphs: false}}}}\n")
    for overrides in ([first, f"~{removed}"], [f"~{removed}", first]):
        with contextlib.suppress(RecipeError):
            load_recipe(str(file), overrides)
            continue
        with pytest.raises(RecipeError) as caught:
            load_recipe(str(file), overrides)
        assert "cannot be removed" not in str(caught.value)
    with pytest.raises(RecipeError, match="cannot be removed: there is no such key"):
        load_recipe(str(file), [first, f"~{removed}x"])


@pytest.mark.parametrize(
    "override, message",
    [
        ("run.sed=1", "command line: run.sed — unknown key — did you mean 'seed'?"),
        ("run.training_steps=-1", "run.training_steps — -1 should be greater than or equal to 0"),
        ("run.seed=1.5", "run.seed — expected a whole number, got 1.5"),
        ("layout.pools.rollout.count=1000000000", "rollout.count — 1000000000 should be less than or equal to 4096"),
        ("run.seed=18446744073709551616", "run.seed — 18446744073709551616 should be less than 18446744073709551616"),
        ("models.policy.optimizer.betas=[0.9,1.0]", "optimizer.betas.1 — 1.0 should be less than 1"),
        ("models.policy.optimizer.betas=[-0.1,0.9]", "betas.0 — -0.1 should be greater than or equal to 0"),
        ("run.save_every_s=inf", "run.save_every_s — inf is not allowed — for never give a large number of seconds"),
        ("limits.no_progress_s=inf", "limits.no_progress_s — inf is not allowed — for never give a large number"),
        ("limits.drain_s=1e300", "limits.drain_s — 1e+300 should be less than or equal to 1000000000"),
        ("models.policy.optimizer.lr=inf", "models.policy.optimizer.lr — inf should be a finite number"),
        ("models.policy.optimizer.lr=1e26", "optimizer.lr — 1e+26 should be less than or equal to 1000"),
        ("models.policy.optimizer.eps=1e26", "optimizer.eps — 1e+26 should be less than or equal to 1"),
        (f"models.policy.lora.rank={10**26}", "lora.rank — 1.000000e+26 does not fit into 64 bits — write a smaller"),
        (f"val.sampling.max_new_tokens={10**26}", "val.sampling.max_new_tokens — 1.000000e+26 does not fit into 64"),
        ("models.policy.lora.rank=100000000", "lora.rank — 100000000 should be less than or equal to 65536"),
        ("val.samples_per_prompt=100000000", "samples_per_prompt — 100000000 should be less than or equal to 1048576"),
        ("data.source=''", "data.source — '' should have at least 1 character — source: A file of prompts"),
        ("run.trackers.tensorboard=1", "tensorboard — expected a mapping of its options, or true, got 1"),
        ("models.policy.lora.targets=5", "lora.targets — expected all-linear or a list of names, got 5"),
        ("models.policy.optimizer.lr=nan", "models.policy.optimizer.lr — nan is not a number"),
        ("models.policy.optimizer.betas=[0.9,nan]", "models.policy.optimizer.betas.1 — nan is not a number"),
        ("data.with.rate=nan", "data.with.rate — nan is not a number — write the number that is meant"),
        ("models.policy.init.rope_theta=nan", "models.policy.init.rope_theta — nan is not a number"),
        ("layout.pools.rollout.engine_options.x=[1,nan]", "engine_options.x.1 — nan is not a number"),
        ("run.deterministic=1", "run.deterministic — expected true or false, got 1"),
        ("batch=3", "batch — expected a mapping, got 3"),
        ("layout.pools.rollout.roles=[genrate]", "'genrate' is not allowed — did you mean 'generate'?"),
        ("layout.pools.rollout.device=gpu", "'gpu' is not allowed — device: auto (a GPU if there is one), cpu"),
        (
            "layout.max_staleness=unbound",
            "layout.max_staleness — 'unbound' is not allowed — allowed: 0, 1, 2",
        ),
        ("layout.max_staleness=1.5", "layout.max_staleness — 1.5 is not allowed — allowed: 0, 1, 2 …, or unbounded"),
        ("layout.max_staleness=-1", "layout.max_staleness — -1 should be greater than or equal to 0 — allowed: 0, 1"),
        ("layout.refresh=lazy", "layout.refresh — 'lazy' is not allowed — allowed: at_bound, eager, when_idle"),
        ("layout.pools.trainer.parallel.tp=2", "layout.pools.trainer.parallel — not built yet"),
        ("models.policy.dtype=float33", "'float33' is not allowed — did you mean 'float32'?"),
        ("models.policy.optimizer.schedule=linaer", "did you mean 'linear'? allowed: constant, cosine, linear"),
        ("models.policy.optimizer.betas=[0.9]", "models.policy.optimizer.betas.1 — required"),
        ("~models.policy.tokenizer", "models.policy.tokenizer — a new model needs a tokenizer"),
        ("~models.policy.init.model_type", "models.policy.init.model_type — required"),
        ("~models.policy.init", "models.policy — neither `path` nor `init` is given — give exactly one of them"),
        ("~run.training_steps", "run.training_steps — required, but not given"),
        ("~run.nothing", "run.nothing — cannot be removed: there is no such key"),
        ("run.trackers=[]", "run.trackers — expected a mapping, got [] — null for none; trackers: What"),
        ("layout.pools.trainer.hosts=none", "hosts — expected a list, got 'none' — null for none; hosts: Hosts"),
        ("limits=null", "limits — expected a mapping, got null — leave it out for its defaults; its keys: bad_steps"),
        ("flow.steps=null", "flow.steps — expected a mapping, got null — choose a flow, such as flow=grpo, or give"),
        ("run.keep_best_mode=min", "run.keep_best_mode — min of nothing: run.keep_best is null — run.keep_best="),
        ("layout=spilt", "command line: layout — there is no layout 'spilt' — did you mean 'split'?"),
        ("model@models.policy=tini", "there is no model 'tini' — did you mean 'tiny'?"),
        ("modle@models.policy=tiny", "there is no group 'modle' — did you mean 'model'?"),
        ("model@models.judge=tini", "there is no model 'tini' — did you mean 'tiny'?"),
        ("model=tiny", "model=tiny — it is not said which model this is — name it: model@models.policy=NAME"),
        ("layout@lay=split", "layout@lay=split — a recipe has no section 'lay' — did you mean 'layout'?"),
        ("~model@models.polcy", "model@models.polcy — cannot be removed: nothing chooses it — did you mean 'model@mod"),
        ("model@models.judge=null", "model@models.judge — cannot be removed: nothing chooses it"),
        ("~run.sed", "run.sed — cannot be removed: there is no such key — did you mean 'seed'?"),
        ("batch.prompts", "command line: batch.prompts — cannot be read as an override — expected KEY=VALUE"),
        ('layout.pools.rollout.each={"1": {threads: 2}}', "'KEY=\"a, b\"'; keys within braces stand without quotes"),
        ("batch.prompts=1,2", "several values for one key — give one value; write a list as KEY=[a,b]"),
        ("run.seed=${oc.env:DISTFLOW_NO_SUCH}", "the environment variable DISTFLOW_NO_SUCH is not set"),
        ("run.seed=${run.sede}", "run.seed — the interpolation cannot be resolved: Interpolation key 'run.sede'"),
        ("run.seed=???", "run.seed — required, but not given — give it on the command line: run.seed=…"),
    ],
)
def test_one_mistake(override: str, message: str) -> None:
    assert message in refused("quickstart", override)


@pytest.mark.parametrize(
    "override, message",
    [
        ("lr=1e-4", "command line: lr — unknown key — did you mean models.policy.optimizer.lr?"),
        ("critic.optim.lr=1e-5", "command line: critic — unknown key — did you mean models.critic.optimizer.lr?"),
        ("run.lr=1e-4", "run.lr — unknown key — did you mean models.policy.optimizer.lr?"),
        ("prompts=8", "prompts — unknown key — did you mean batch.prompts or val.prompts?"),
        ("threads=2", "threads — unknown key — did you mean layout.pools.NAME.threads?"),
        ("trainin_steps=8", "trainin_steps — unknown key — did you mean run.training_steps?"),
        ("dtype=bfloat16", "dtype — unknown key — did you mean models.policy.dtype?"),
        ("wandb=true", "wandb — unknown key — did you mean run.trackers.wandb=true?"),
        ("report_to=wandb", "report_to — unknown key — did you mean run.trackers.wandb=true?"),
        ("logger=[console,trackio]", "logger — unknown key — did you mean run.trackers.trackio=true?"),
        ("trainer.logger=[wandb,mlflow]", "did you mean run.trackers.wandb=true and run.trackers.mlflow=true?"),
        ("report_to=all", "did you mean run.trackers.NAME=true, NAME being wandb, tensorboard"),
        ("report_to=none", "report_to — unknown key — leave it out: nothing is sent to a tracker unless"),
        ("report_to=null", "report_to — unknown key — leave it out: nothing is sent to a tracker unless"),
        ("report_to=[]", "report_to — unknown key — leave it out: nothing is sent to a tracker unless"),
        ("trainer.logger=[console]", "leave it out: nothing is sent to a tracker unless run.trackers names one"),
        (
            "use_vllm=true",
            "did you mean layout.pools.rollout.engine=vllm, or with layout=colocated layout.pools.wor",
        ),
        ("lora.r=8", "lora — unknown key — did you mean models.policy.lora.rank?"),
        ("models.policy.lora.r=8", "models.policy.lora.r — unknown key — did you mean models.policy.lora.rank?"),
        ("lora_alpha=8", "lora_alpha — unknown key — did you mean models.policy.lora.alpha?"),
        ("stop=['</s>']", "stop — unknown key — did you mean flow.steps.sample.with.stop?"),
        (
            "eos_token_id=2",
            "did you mean flow.steps.sample.with.stop_token_ids, as [151643]; shipped steps take the model's end",
        ),
        (
            "tools=[search]",
            "tools — unknown key — a generate step of your own, which calls tools or an environment and",
        ),
        ("max_turns=3", "generates turn by turn: flow.steps.sample.call=./file.py:NAME (docs/generate-steps.md)"),
        ("eval.every=5", "eval — unknown key — did you mean 'val'?"),
        ("lora.rank=8", "lora — unknown key — did you mean models.policy.lora.rank?"),
        (
            "ppo_epochs=4",
            "ppo_epochs — unknown key — did you mean batch.epochs (passes over the samples of a training step)?",
        ),
        ("mini_batch_size=64", "did you mean batch.minibatches (their number: a pass over the samples"),
        ("trainer.total_epochs=3", "trainer — unknown key — did you mean run.training_steps?"),
        ("actor_rollout_ref.rollout.n=8", "actor_rollout_ref — unknown key — did you mean batch.samples_per_prompt?"),
        ("num_generations=8", "did you mean batch.samples_per_prompt?"),
        ("learning_rate=1e-4", "did you mean models.policy.optimizer.lr?"),
        ("temperature=0.5", "did you mean flow.steps.sample.with.temperature?"),
        ("loss_type=dr_grpo", "did you mean flow.steps.update.with.aggregate=seq-mean-token-sum-norm/${flow.steps.sam"),
        ("loss_type=sapo", "flow.steps.update.with.aggregate: sapo is not built; there are dapo, bnpo, cispo, grpo"),
        ("scale_rewards=none", "did you mean flow.steps.advantage.with.normalize=none?"),
        ("scale_rewards=batch", "did you mean flow.steps.advantage.with.normalize=batch_std?"),
        ("optim=paged_adamw_8bit", "did you mean models.policy.optimizer.name=adamw_8bit?"),
        ("per_device_train_batch_size=8", "did you mean batch.prompts (per_device_train_batch_size × steps_per_gene"),
        ("sync_ref_model=true", "sync_ref_model — unknown key — not built: a reference that follows the policy"),
        ("xyzzy=1", "xyzzy — unknown key — allowed: batch, data, flow, layout, limits, models, run, security"),
    ],
)
def test_keys_that_stand_elsewhere_and_words_of_other_tools(override: str, message: str) -> None:
    assert message in refused("quickstart", override)


SEVERAL = {
    "verl": {
        "actor_rollout_ref.rollout.n=4": "did you mean batch.samples_per_prompt?",
        "actor_rollout_ref.rollout.val_kwargs.n=2": "did you mean val.samples_per_prompt?",
        "actor_rollout_ref.actor.ppo_mini_batch_size=60": "did you mean batch.minibatches (their number: ",
        "data.train_batch_size=8": "did you mean batch.prompts (",
        "algorithm.adv_estimator=rloo": "did you mean flow=rloo?",
        "algorithm.gamma=0.9": "did you mean flow.steps.gae.with.gamma (of flow=ppo)?",
        "trainer.mystery=3": "nothing here is known to stand for it (docs/from-other-tools.md)",
        "trainer.save_freq=3": "did you mean run.save_every?",
    },
    "OpenRLHF": {
        "rollout.n_samples_per_prompt=8": "did you mean batch.samples_per_prompt?",
        "rollout.temperature=0.7": "did you mean flow.steps.sample.with.temperature?",
        "algo.advantage.estimator=reinforce": "did you mean flow=reinforce_plus_plus?",
        "algo.kl.init_coef_or_so=1": "nothing here is known",
    },
    "TRL": {
        "num_generations=8": "did you mean batch.samples_per_prompt?",
        "learning_rate=1e-5": "did you mean models.policy.optimizer.lr?",
        "vllm_gpu_memory_utilization=0.4": "did you mean layout.pools.NAME.engine_options={gpu_memory_utilization: ",
    },
}


@pytest.mark.parametrize("tool", SEVERAL)
def test_several_words_of_another_tool_have_an_answer_each(tool: str, tmp_path: Path) -> None:
    given = SEVERAL[tool]
    told = refused("quickstart", *given)
    for override, hint in given.items():
        assert f"{override.partition('=')[0]} — unknown key — {hint}" in told
    assert told.count("distflow convert FILE") == (tool == "verl")
    lines = yaml.safe_dump(OmegaConf.to_container(OmegaConf.from_dotlist([*given])))
    (tmp_path / "mine.yaml").write_text(f"defaults: [quickstart, _self_]\n{lines}")
    in_file = refused(str(tmp_path / "mine.yaml"))
    assert all(f"{override.partition('=')[0]} — unknown key — {hint}" in in_file for override, hint in given.items())


def test_what_is_said_of_other_tools_words_names_keys_that_there_are() -> None:
    steps = load_recipe("quickstart").recipe.flow.steps
    for text in WORDS.values():
        for key in re.findall(r"\b(?:run|batch|models|layout|data|limits)(?:\.\w+)+", text):
            path = key.split("=")[0].split(".")
            if path[:2] == ["run", "trackers"]:
                assert path[2] in (*TRACKERS, "NAME"), key
                continue
            section = section_at(tuple(path[:-1]))
            assert section is not None, key
            assert path[-1] in {key_of(section, name) for name in section.model_fields}, key
        for step, setting in re.findall(r"flow\.steps\.(\w+)\.with\.(\w+)", text):
            declaration = read_declaration(steps[step].call)
            function = chosen_function(declaration.spec, declaration.parameters, steps[step].with_)
            own = {} if function is None else function.own.settings
            assert setting in {**declaration.parameters.settings, **own}, text


def test_words_of_other_tools_mean_what_trls_dictionary_says() -> None:
    for word in WORDS.keys() & TRL.keys():
        key, text = TRL[word].to, WORDS[word]
        last = key.rpartition(".")[2]
        assert not key or last in text or key.rpartition(".")[0] in text, f"{word}: {key}, but {text}"


def test_a_folder_is_no_recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine").mkdir()
    told = "command line: mine — this is a folder, not a recipe — give the path of a .yaml file, or a shipped recipe: "
    assert refused("mine").startswith(told)
    (tmp_path / "mine" / "a.yaml").touch()
    assert "— give one of its files: a.yaml, or a shipped recipe: custom_step, " in refused("./mine")
    (tmp_path / "mine" / "run.json").touch()
    assert "— it is a run: continue it with --run mine --resume" in refused("mine")


def test_a_batch_that_does_not_divide() -> None:
    with pytest.raises(
        RecipeError, match=r"33 prompts do not divide into 8 ledgers — nearest prompts: 32 or 40 .*3 or 11"
    ):
        load_recipe("quickstart", ["batch.prompts=33"])


def test_unknown_recipes() -> None:
    with pytest.raises(RecipeError, match=r"there is no recipe of this name — did you mean 'quickstart'\?"):
        load_recipe("quikstart")
    with pytest.raises(RecipeError, match=r"there is no file .*nowhere\.yaml"):
        load_recipe("./nowhere.yaml")


def test_all_problems_at_once(tmp_path: Path) -> None:
    path = mine(tmp_path, BASE + "run: {seed: many}\nbatch: {prompts: 33}\nlimit: {}\n")
    lines = refused(path, "run.sed=1", "layout.pools.rollout.count=x", "oops").splitlines()
    assert len(lines) == 6
    assert all(line.count(" — ") >= 1 for line in lines)


@pytest.mark.parametrize(
    "text, message",
    [
        ("a: [1\n", r"mine\.yaml:2: YAML"),
        ("run: {seed: 1}\nrun: {seed: 2}\n", r"mine\.yaml:2: run — duplicate key, first at line 1"),
        ("- a\n", r"mine\.yaml:1: file — expected a mapping"),
        ("defaults: quickstart\n", r"mine\.yaml:1: defaults — expected a list"),
        ("defaults: [mine, _self_]\n", r"'mine' names this very file"),
        ("defaults: [quikstart, _self_]\n", r"mine\.yaml:1: defaults — there is no recipe 'quikstart' — did you mean"),
        ("defaults:\n- quickstart\n- layout: async\n- _self_\n", r"layout is chosen twice — .*override /layout"),
        ("defaults: [_self_, {override /layout: async}]\n", r"nothing chooses layout that could be overridden"),
        (AFTER + "- model@models.judge: tinny\n", r"mine\.yaml:3: model — there is no model 'tinny' — did you mean"),
        (AFTER + "- modle@models.judge: tiny\n", r"mine\.yaml:3: modle — there is no group 'modle' — did you mean"),
        (AFTER + "- layuot: async\n", r"mine\.yaml:3: layuot — there is no group 'layuot' — did you mean 'layout'"),
        (AFTER + "- model: tiny\n", r"mine\.yaml:3: model — it is not said which .*: model@models\.policy: tiny$"),
        (AFTER + "- layout@lay: split\n", r"mine\.yaml:3: layout@lay — a recipe has no section 'lay'"),
        (
            AFTER + "- model@models.policy: smollm2\n",
            r"mine\.yaml:3: defaults — model@models\.policy is chosen twice — .* /model@models\.policy: NAME`",
        ),
        (
            AFTER + "- override /model@models.judge: tiny\n",
            r"mine\.yaml:3: .*nothing chooses model@models\.judge .* — write `- model@models\.judge: NAME`",
        ),
        (
            AFTER + "- override /layout: async\n- model@models.judge: tiny\n",
            r"mine\.yaml:3: defaults — `override layout` stands before other choices — move it to the end",
        ),
        (AFTER + "- quickstart\n", r"mine\.yaml:3: defaults — 'quickstart' is listed twice"),
        (AFTER + "- 3\n", r"mine\.yaml:3: defaults — 3 is no entry — an entry is a recipe's name"),
        (AFTER + "- {a: b, c: d}\n", r"mine\.yaml:3: defaults — .* is no entry"),
        (AFTER + "- lay out: b\n", r"mine\.yaml:3: defaults — 'lay out' is no group"),
    ],
)
def test_files_that_cannot_be_composed(text: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match=message):
        load_recipe(mine(tmp_path, text))


def test_no_words_of_the_libraries_underneath(tmp_path: Path) -> None:
    path = mine(tmp_path, "defaults:\n- quickstart\n- layout: async\n- _self_\n")
    shown = refused(path) + refused("quickstart", "layout=x", "a.b=1", "c", "run.seed=${run.x}")
    assert not {"hydra", "pydantic", "omegaconf", "Traceback"} & set(shown.replace(".", " ").split())


@pytest.mark.parametrize(
    ("text", "overrides", "message"),
    [
        # The user's key, wherever the rule stands.
        ("", ["batch.ledgers=5"], "command line: batch.ledgers — 32 prompts do not divide into 5 ledgers"),
        ("batch: {ledgers: 5}\n", [], "mine.yaml:2: batch.ledgers — 32 prompts do not divide into 5 ledgers"),
        ("batch: {ledgers: 4}\n", ["batch.prompts=6"], "command line: batch.prompts — 6 prompts do not divide into 4"),
        ("batch: {ledgers: 5}\n", ["batch.prompts=32"], "command line: batch.prompts — 32 prompts do not divide"),
        (
            "batch: {minibatches: 2}\n",
            ["batch.ledgers=32"],
            "command line: batch.ledgers — 2 mini-batches do not divide",
        ),
        (
            "",
            ["batch.prompts=8", "batch.minibatches=2"],
            "the 1 prompts of a ledger — batch.ledgers=4, or batch.prompts=16",
        ),
        (
            "batch: {prompts: 12, ledgers: 6}\n",
            ["batch.minibatches=4"],
            "batch.ledgers=3, or batch.prompts=24 (with 6 ledgers), or batch.minibatches=1 or 2",
        ),
        ("", ["batch.prompts=8", "batch.minibatches=3"], "of a ledger — batch.prompts=24 (with 8 ledgers), or batch.m"),
        ("", ["batch.minibatches=3"], "command line: batch.minibatches — 3 mini-batches do not divide the 4 prompts"),
        (
            "batch: {target_kl: 0.1, epochs: 2}\n",
            ["batch.epochs=1"],
            "command line: batch.epochs — target_kl leaves out",
        ),
        # What the command line removes is the command line's.
        ("", ["~batch.prompts"], "command line: batch.prompts — required, but not given"),
        ("", ["~models.policy.tokenizer"], "command line: models.policy.tokenizer — a new model needs a tokenizer"),
        (
            "",
            ["models.policy=null"],
            "command line: models — it is empty — choose one, such as model@models.policy=tiny",
        ),
        ("", ["~layout"], "layout — required, but not given — choose one, such as layout=split"),
    ],
)
def test_the_key_that_the_user_touched_is_blamed(text: str, overrides: list[str], message: str, tmp_path: Path) -> None:
    assert message in refused(mine(tmp_path, BASE + text), *overrides).replace(f"{tmp_path}/", "")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            BASE + "layout: async\n",
            "layout — expected a mapping, got 'async' — a file is chosen in `defaults`: `- over",
        ),
        (BASE + "models: {policy: tiny}\n", "a file is chosen in `defaults`: `- override /model@models.policy: tiny`"),
        (
            BASE + "flow: {steps: {reward: exact}}\n",
            "flow.steps.reward — expected a mapping, got 'exact' — its keys: call",
        ),
        (
            BASE + "layout: {pools: {trainer: 2}}\n",
            "trainer — expected a mapping, got 2 — its keys: backend, backend_o",
        ),
        (
            BASE + "flow: {steps: {reward: {function: exact_match}}}\n",
            "flow.steps.reward.function — unknown key — did you mean flow.steps.reward.with.function? ",
        ),
        (BASE + "run: {training_steps: }\n", "run.training_steps — expected a whole number, got null"),
        ("", "mine.yaml:1: run — required, but not given — begin the file with `defaults: [quickstart, _self_]`"),
        (
            BASE + "layout: {pools: {trainer: {sample_memory_mb: a}}}\n",
            "(for rows to train on, where they come from other training workers), in MiB; null",
        ),
    ],
)
def test_what_a_recipe_of_another_shape_means(text: str, message: str, tmp_path: Path) -> None:
    assert message in refused(mine(tmp_path, text))


def test_a_recipes_file_of_a_similar_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    mine(tmp_path, BASE)
    for name in ("mine.yml", "mne.yaml"):
        assert refused(name).endswith(f"there is no file {name} — did you mean mine.yaml?")


def test_a_key_and_its_value_apart() -> None:
    message = refused("quickstart", "batch.prompts", "8", "run.seed=1")
    assert message == "command line: batch.prompts — a key and its value are one word — batch.prompts=8"
    assert "batch.prompts — cannot be read as an override" in refused("quickstart", "batch.prompts", "run.seed=1")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--batch.prompts=8"], "No such option '--batch.prompts'. Keys of a recipe have no dashes: batch.prompts=8"),
        (["--run.seed", "3"], "Keys of a recipe have no dashes: run.seed=3"),
        (["--num-generations", "8"], "given as KEY=VALUE, without dashes — did you mean batch.samples_per_prompt?"),
        (["--actor_learning_rate=1e-6"], "without dashes — did you mean models.policy.optimizer.lr?"),
    ],
)
def test_keys_as_options(capsys: pytest.CaptureFixture[str], options: list[str], message: str) -> None:
    assert run(["validate", "quickstart", *options]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("section", ["data", "val.data"])
@pytest.mark.parametrize(("key", "name"), [("fields", "prompt"), ("fields", "answer"), ("with", "split")])
def test_what_a_mixture_does_not_read_is_refused(tmp_path: Path, section: str, key: str, name: str) -> None:
    """Columns and arguments belong to a source; what holds for all sources stands beside the mixture."""
    for file in ("x", "y"):
        (tmp_path / f"{file}.jsonl").write_text('{"prompt": "1=", "q": "2="}\n')
    mix = f"{section}.mix={{a: {{source: {tmp_path}/x.jsonl}}, b: {{source: {tmp_path}/y.jsonl}}}}"
    base = ("quickstart", (mix, "val.every=1", f"{section}.chat=false", f"{section}.shuffle=false"))
    load_recipe(*base)
    with pytest.raises(RecipeError) as caught:
        load_recipe(base[0], (*base[1], f"{section}.{key}.{name}=q"))
    (problem,) = caught.value.problems
    assert problem.key == f"{section}.{key}"
    assert problem.message.endswith(f"{section}.mix has a, b: none reads it")
    assert problem.hint == f"write it for each of them, as {section}.mix.a.{key}.{name}"
