"""What a user gets wrong: refused before anything starts, with the place, the key, the cause and the cure."""

import re
from pathlib import Path

import pytest

from distflow.comm.addresses import socket_dir
from tests.e2e.runs import Launch, Run, cli

RECIPE = """\
defaults: [quickstart, _self_]
run: {name: mine, training_steps: 2}
"""

PLUGINS = """\
from distflow import Batch, StepContext, step


@step(role="train", reads=["reward", "nonsuch"], writes=["advantage"], scope="group")
def reads_what_nobody_writes(batch: Batch, ctx: StepContext) -> Batch:
    return batch


@step(role="train", reads=["reward", "group"], writes=["advantage"], scope="group")
def lacks_the_context(batch: Batch) -> Batch:
    return batch


def is_no_step(batch: Batch, ctx: StepContext) -> Batch:
    return batch


def two_arguments(prompt: str, response: str) -> float:
    return 0.0
"""

ADVANTAGE = "flow:\n  steps:\n    advantage: {call: './plugins.py:%s'}\n"
REWARD = "flow:\n  steps:\n    reward: {with: {function: './plugins.py:%s'}}\n"

IN_THE_FILE = {
    "a typo in a key": (
        "batch: {promts: 32}\n",
        r"mine\.yaml:3: batch\.promts — unknown key — did you mean 'prompts'\?.*tokens_per_microbatch",
    ),
    "a typo in a section": ("bathc: {prompts: 32}\n", r"mine\.yaml:3: bathc — unknown key — did you mean 'batch'\?"),
    "a wrong type": (
        "batch: {prompts: many}\n",
        r"mine\.yaml:3: batch\.prompts — expected a whole number, got 'many' — prompts: Prompts \(groups\) per",
    ),
    "a value out of range": (
        "layout: {max_staleness: -1}\n",
        r"mine\.yaml:3: layout\.max_staleness — -1 should be greater than or equal to 0",
    ),
    "an unknown base": (
        None,
        r"mine\.yaml:1: defaults — there is no recipe 'quikstart' — did you mean 'quickstart'\?",
    ),
    "no YAML": ("batch: {prompts: 32\ndata: 3\n", r"mine\.yaml:4: YAML — expected ',' or '}'.* — check indentation"),
    "a batch that does not divide": (
        "batch: {prompts: 30}\n",
        r"mine\.yaml:3: batch\.prompts — 30 prompts do not divide into 8 ledgers — nearest prompts: 24 or 32",
    ),
    "a role that no pool takes": (
        "layout:\n  pools:\n    rollout: {roles: [generate]}\n    trainer: {roles: [forward, train]}\n",
        r"mine\.yaml:5: layout\.pools\.rollout\.roles — no pool takes the role 'score' \(step 'reward'\) — add score",
    ),
    "a setting that the step does not have": (
        "flow:\n  steps:\n    sample: {with: {temprature: 0.7}}\n",
        r"mine\.yaml:5: flow\.steps\.sample\.with\.temprature — unknown setting — did you mean 'temperature'\?",
    ),
    "a field that no step writes": (
        ADVANTAGE % "reads_what_nobody_writes",
        r"flow\.steps\.advantage.* — reads the field 'nonsuch', which no step of the flow writes — add a step",
    ),
    "a plug-in that is not in its file": (
        ADVANTAGE % "is_no_stp",
        r"mine\.yaml:5: flow\.steps\.advantage\.call — .*plugins\.py defines no 'is_no_stp'.*did you mean 'is_no_step'",
    ),
    "a plug-in without its file": (
        "flow:\n  steps:\n    advantage: {call: './nowhere.py:mine'}\n",
        r"mine\.yaml:5: flow\.steps\.advantage\.call — .*there is no file /.*nowhere\.py",
    ),
    "a plug-in of no module": (
        "data: {source: 'no_such_module:prompts'}\n",
        r"mine\.yaml:3: data\.source — .*there is no module 'no_such_module' \(a file is named \./file\.py:name",
    ),
    "a step without its decorator": (
        ADVANTAGE % "is_no_step",
        r"mine\.yaml:5: flow\.steps\.advantage\.call — .*plugins\.py:14: 'is_no_step' is not a step; declare it: @step",
    ),
    "a step with a wrong signature": (
        ADVANTAGE % "lacks_the_context",
        r"mine\.yaml:5: flow\.steps\.advantage\.call — .*plugins\.py:10: .*\(batch\); expected def .*\(batch, ctx",
    ),
    "a reward with a wrong signature": (
        REWARD % "two_arguments",
        r"mine\.yaml:5: flow\.steps\.reward\.with\.function — .*\(prompt, response\) — expected def .*\(sample\)",
    ),
    "a model that is not there": (
        "models: {policy: {path: /no/such/folder, init: null}}\n",
        r"mine\.yaml:3: models\.policy\.path — there is no folder /no/such/folder — correct the path",
    ),
    "too little memory for samples": (
        "batch: {prompts: 128}\nlayout: {pools: {trainer: {sample_memory_mb: 1}}}\n",
        r"mine\.yaml:4: layout\.pools\.trainer\.sample_memory_mb — sample_memory_mb 1 is too little .*: at least \d+",
    ),
    "an unknown engine": (
        "layout: {pools: {rollout: {engine: tocrh}}}\n",
        r"mine\.yaml:3: layout\.pools\.rollout\.engine — there is no engine 'tocrh' — did you mean 'torch'\?",
    ),
}


def nothing_stands(run: Run) -> bool:
    """No process, no run folder, no socket, no segment: nothing was started."""
    return not (run.folder.exists() or run.processes() or run.leftovers())


@pytest.mark.parametrize("mistake", IN_THE_FILE)
def test_a_mistake_in_the_recipe_is_refused_with_its_line(launch: Launch, tmp_path: Path, mistake: str) -> None:
    text, message = IN_THE_FILE[mistake]
    recipe = tmp_path / "mine.yaml"
    recipe.write_text(RECIPE.replace("quickstart", "quikstart") if text is None else RECIPE + text)
    (tmp_path / "plugins.py").write_text(PLUGINS)
    run = launch(str(recipe))
    assert run.wait() == 2, run.output
    assert re.search(message, run.output), run.output
    assert "Traceback" not in run.output
    assert nothing_stands(run)


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["qickstart"], r"command line: qickstart — there is no recipe of this name — did you mean 'quickstart'\?"),
        (["./none.yaml"], r"command line: \./none\.yaml — there is no file none\.yaml — give the path"),
        (["quickstart", "run.training_stps=3"], r"command line: run\.training_stps — unknown key — did you mean"),
        (["quickstart", "run.training_steps=few"], r"command line: run\.training_steps — expected a whole number, got"),
        (["quickstart", "run.training_steps"], r"command line: run\.training_steps — .* — expected KEY=VALUE"),
        (["quickstart", "layout=spilt"], r"command line: layout — there is no layout 'spilt' — did you mean 'split'\?"),
        (["quickstart", "batch.prompts=33"], r"command line: batch\.prompts — 33 prompts .* nearest prompts: 32 or 40"),
        (
            ["quickstart", "flow.steps.reward.with.on_error=explode"],
            r"reward\.with\.on_error — there is no 'explode' — ",
        ),
        (
            ["quickstart", "layout.pools.rollout.device=cuda:99"],
            r"rollout\.device — cuda:99, but this host has \d+ GPUs? available .*— set auto or cpu",
        ),
        (["quickstart", "--resume"], r"--resume: there is no run '.*' in .*runs — start it first, without --resume"),
        (["quickstart", "--no-such-option"], r"No such option.*--no-such-option"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "refused",
)
def test_a_mistake_on_the_command_line_is_refused(launch: Launch, arguments: list[str], message: str) -> None:
    run = launch(*arguments)
    assert run.wait() == 2, run.output
    assert re.search(message, run.output), run.output
    assert "Traceback" not in run.output
    assert nothing_stands(run)


def test_all_mistakes_are_told_at_once(launch: Launch, tmp_path: Path) -> None:
    recipe = tmp_path / "mine.yaml"
    recipe.write_text(RECIPE + "batch: {promts: 3}\ndata: {source: 'no_such_module:prompts'}\n")
    run = launch(str(recipe), "run.sed=3")
    assert run.wait() == 2, run.output
    for message in (r"mine\.yaml:3: batch\.promts", r"mine\.yaml:4: data\.source", r"command line: run\.sed"):
        assert re.search(message, run.output), run.output


IN_A_WORKER = {
    "a value that the step refuses": (
        ["flow.steps.update.with.clip=[1.5,0.2]"],
        r"step 'update' .*on trainer/0: clip=\[1\.5, 0\.2\]: expected \[lo, hi\]",
    ),
}


@pytest.mark.parametrize("mistake", IN_A_WORKER)
def test_what_only_a_worker_can_see_ends_the_run_with_the_users_exit_code(launch: Launch, mistake: str) -> None:
    """Found by a worker (its device, its engine, its data): the message is the same, and nothing is left but files."""
    arguments, message = IN_A_WORKER[mistake]
    run = launch("quickstart", "run.training_steps=2", *arguments)
    assert run.wait() == 2, run.output
    assert re.search(message, run.output), run.output
    assert "Traceback" not in run.output
    assert run.record()["state"] == "failed"
    assert run.leftovers() == []


def test_names_in_use_and_runs_without_a_checkpoint(launch: Launch) -> None:
    """A run that failed before its first training step does not block its name; one that trained does."""
    name = None
    for _ in range(2):
        first = launch("quickstart", "data.with.digits=0", name=name)
        assert first.wait() == 2, first.output
        assert re.search(r"failed \(UserError\): data\.with\.digits 0: expected 1 to 9", first.output), first.output
        name = first.name
    assert (first.folder.parent / ".replaced" / first.name / "logs" / "trainer-0.log").is_file()
    # It died before its first checkpoint: nothing is lost by beginning again, and it says so.
    resumed = launch("quickstart", "run.training_steps=2", "data.with.digits=3", "--resume", name=name)
    assert resumed.wait() == 0, resumed.output
    assert "no complete checkpoint yet: restarting at training step 1" in resumed.output
    assert [line["step"] for line in resumed.metrics()] == [1, 2]
    assert resumed.leftovers() == []
    before = sorted((path, path.stat().st_mtime_ns) for path in first.folder.rglob("*"))
    again = launch("quickstart", name=name)
    assert again.wait() == 2, again.output
    cure = rf"--run {name}: .*{name} exists already — add --resume to continue that run, or choose"
    assert re.search(cure, again.output), again.output
    assert sorted((path, path.stat().st_mtime_ns) for path in first.folder.rglob("*")) == before


def test_an_edited_worker_document_is_checked_like_a_recipe(tmp_path: Path) -> None:
    written = cli("plan", "quickstart", "layout.pools.rollout.count=1", "--write", str(tmp_path))
    assert written.returncode == 0, written.stderr
    document = tmp_path / "rollout-0.yaml"
    lines = document.read_text().splitlines()
    number = next(n for n, line in enumerate(lines, start=1) if line.strip().startswith("threads:"))
    lines[number - 1] = lines[number - 1].replace("threads:", "thraeds:")
    document.write_text("\n".join(lines))
    done = cli("worker", str(document))
    assert done.returncode == 2, done.stdout + done.stderr
    message = rf"rollout-0\.yaml:{number}: settings\.thraeds — unknown key — did you mean 'threads'\?"
    assert re.search(message, done.stdout + done.stderr), done.stdout + done.stderr
    assert not socket_dir(tmp_path).exists()
    assert not list(Path("/dev/shm").glob(f"distflow-{tmp_path.name}-*"))
