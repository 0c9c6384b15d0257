"""`distflow init`: what it writes runs at once, in any folder; nothing is overwritten."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from distflow.config.paths import shipped_recipes
from distflow.flow.recipe_check import check_imports, plan_recipe
from distflow.launch.cli import run

TASKS = ("arithmetic", "chat", "turns")
TEMPLATE = "{% for message in messages %}{{ message['content'] }}{% endfor %}="


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A tiny chat model in Hugging Face format."""
    import string

    from distflow.testing.tiny import tiny_model
    from distflow.workers.models import build_model
    from distflow.workers.tokenizers import build_tokenizer

    section = tiny_model(tokenizer=f"chars:{string.ascii_letters}{string.digits} =?.'", dtype="float32")
    section["init"]["max_position_embeddings"] = 512
    tokenizer = build_tokenizer(section)
    folder = tmp_path / "model"
    build_model(section, device="cpu", seed=0, load_weights=True).save_pretrained(folder)
    tokenizer.pretrained.chat_template = TEMPLATE
    tokenizer.pretrained.save_pretrained(folder)
    return folder


@pytest.mark.parametrize("task", TASKS)
def test_what_is_written_runs(
    task: str, request: pytest.FixtureRequest, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """From outside of the repository, by the command that it names."""
    folder = tmp_path / "mine"
    given = ["--model", str(request.getfixturevalue("model"))] if task == "chat" else []
    assert run(["init", str(folder), "--task", task, *given]) == 0
    said = capsys.readouterr().out
    assert all(f"wrote {path}\n" in said for path in folder.iterdir())
    assert f"next: cd {folder}; distflow launch recipe.yaml" in said
    command = [sys.executable, "-m", "distflow.launch", "launch", "recipe.yaml", "run.training_steps=3"]
    launched = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=240, check=False)
    assert launched.returncode == 0, launched.stdout + launched.stderr
    lines = (folder / "runs" / "mine" / "metrics").glob("*.jsonl")
    steps = [json.loads(line)["step"] for file in lines for line in file.read_text().splitlines()]
    assert max(steps) == 3


@pytest.mark.parametrize("task", TASKS)
def test_its_code_passes_its_tests(task: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from distflow.testing.plugins.child import run_suite
    from distflow.testing.plugins.subjects import subjects_of
    from tests.plugins.test_shipped import Told

    monkeypatch.chdir(tmp_path)
    assert run(["init", "mine", "--task", task]) == 0
    _, plan = plan_recipe("mine/recipe.yaml", need_files=False)
    subjects = subjects_of(plan)
    assert subjects
    for subject in subjects:
        report = Told()
        run_suite(subject, report)
        assert report.of("wrong", "note") == []
    assert "mine" in (plan.run_name, *plan.run_name.split("-"))


def test_a_folder_with_anything_in_it_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "thesis.tex").write_text("mine")
    assert run(["init", str(tmp_path), "--task", "arithmetic"]) == 2
    assert f"{tmp_path} exists already, with thesis.tex — give a folder that is new or empty" in capsys.readouterr().err
    assert run(["init", str(tmp_path / "thesis.tex")]) == 2
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.tex"]
    (tmp_path / "empty").mkdir()
    assert run(["init", str(tmp_path / "empty")]) == 0


def test_a_model_of_the_hub_is_told_with_ways_without_a_network(
    tmp_path: Path, model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["init", str(tmp_path / "hub"), "--task", "chat"]) == 0
    told = capsys.readouterr().out
    assert "--model FOLDER, or models.policy.path=FOLDER behind `launch` (`make smollm2`" in told
    named = re.findall(r"recipe (\w+); .* its twin, (\w+)", told)[0]
    assert set(named) <= set(shipped_recipes())
    assert run(["init", str(tmp_path / "here"), "--task", "chat", "--model", str(model)]) == 0
    assert "make smollm2" not in capsys.readouterr().out


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["x", "--task", "chatt"], "--task chatt: did you mean 'chat'?"),
        (["x" * 300], "File name too long — give a folder that can be written"),
        (["a b"], "'a b' cannot be the name of a run"),
        (["x", "--model", "there"], "--model there: task arithmetic trains a model from scratch"),
    ],
)
def test_mistakes(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    message: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    assert run(["init", *arguments]) == 2
    assert message in capsys.readouterr().err
    assert not [*tmp_path.iterdir()]


def test_the_shipped_files_are_sound(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A hub id is left as it is, and the recipes can be planned where there is no network."""
    monkeypatch.chdir(tmp_path)
    assert run(["init", "mine", "--task", "chat", "--model", "Qwen/Qwen2.5-0.5B-Instruct"]) == 0
    assert "path: Qwen/Qwen2.5-0.5B-Instruct  # " in Path("mine/recipe.yaml").read_text()
    for task in ("arithmetic", "turns"):
        assert run(["init", task, "--task", task]) == 0
        loaded, plan = plan_recipe(f"{task}/recipe.yaml")
        assert check_imports(plan, loaded.origin) == []
