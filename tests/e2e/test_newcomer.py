"""docs/custom-steps.md as a newcomer reads it: distflow installed, a folder elsewhere, the commands of the page."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.test_docs import files_in

ROOT = Path(__file__).resolve().parents[2]
Distflow = Callable[..., str]


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """distflow as pip installs it, from a copy of what the package is made of."""
    source, prefix = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("prefix")
    for name in ("distflow", "workers", "launch", "recipes"):
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("setup.cfg", "pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    pip = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--no-build-isolation", "--no-index"]
    made = subprocess.run([*pip, "--target", prefix, source], capture_output=True, text=True, timeout=120, check=False)
    assert made.returncode == 0, made.stderr
    return prefix


@pytest.fixture
def distflow(installed: Path, tmp_path: Path) -> Distflow:
    environment = {**os.environ, "PYTHONPATH": str(installed)}

    def call(*words: str, cwd: Path = tmp_path) -> str:
        where = [sys.executable, "-c", "import distflow; print(distflow.__file__)"]
        found = subprocess.run(where, cwd=cwd, env=environment, capture_output=True, text=True, check=True).stdout
        assert Path(found.strip()).is_relative_to(installed)
        command = [sys.executable, "-m", "distflow.launch", *words]
        done = subprocess.run(
            command, cwd=cwd, env=environment, capture_output=True, text=True, timeout=240, check=False
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    return call


@pytest.fixture
def page(tmp_path: Path) -> None:
    """The files of the page."""
    for name, text in files_in(ROOT / "docs" / "custom-steps.md").items():
        (tmp_path / name).write_text(text)


def test_from_nothing_to_an_algorithm_of_ones_own(distflow: Distflow, page: None, tmp_path: Path) -> None:
    distflow("init", "sums")
    assert "1 of 1 passed" in distflow("test-plugin", "recipe.yaml", cwd=tmp_path / "sums")
    distflow("launch", "own.yaml", "run.training_steps=3")
    shown = json.loads(distflow("metrics", "--keys", "my/weight,my/equal_groups,critic/score/mean", "--json"))
    assert {"my/weight", "my/equal_groups"} <= set(json.dumps(shown).replace('"', " ").split())


NEIGHBOURS = {
    "mine.yaml": """\
defaults: [quickstart, _self_]
run: {training_steps: 2}
data: {source: "./prompts/own.py:prompts"}
flow: {steps: {reward: {with: {function: "./rewards/math.py:score", timeout_s: 60}}}}
""",
    "prompts/own.py": "from helpers import asked\n\n\ndef prompts():\n    return [asked(n) for n in range(64)]\n",
    "prompts/helpers.py": """\
from distflow.data.sources import PromptText


def asked(n):
    return PromptText(f"{n}=", {"answer": str(n)})
""",
    "rewards/math.py": """\
import math

from helpers import right


def score(sample):
    from .parts.ends import ends

    return {"reward": math.sqrt(right(sample)), "ends": ends(sample)}
""",
    "rewards/helpers.py": "def right(sample):\n    return float(sample.response == sample.task['answer'])\n",
    "rewards/parts/ends.py": "def ends(sample):\n    return float(sample.finish_reason == 'stop')\n",
    # Python would find it before its own library, by `python -m` in this folder.
    "random.py": "raise RuntimeError('not the library of Python')\n",
}


def test_plug_ins_import_what_lies_beside_them(installed: Path, tmp_path: Path) -> None:
    """In the command, in workers and in the processes of reward functions; and nothing else sees these files."""
    for name, text in NEIGHBOURS.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    environment = {**os.environ, "PYTHONPATH": str(installed)}
    command = [sys.executable, installed / "bin" / "distflow", "launch", "mine.yaml"]
    done = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=240, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    dumps = (tmp_path / "runs").glob("*/rollouts/*/*.jsonl")
    lines = [json.loads(line) for dump in dumps for line in dump.read_text().splitlines()]
    assert lines
    assert all("ends" in line["rewards"] for line in lines)


@pytest.mark.long
def test_what_the_page_shows_passes_its_tests(distflow: Distflow, page: None) -> None:
    assert "4 of 4 passed" in distflow("test-plugin", "own.yaml")
    assert "1 of 1 passed" in distflow("test-plugin", "./own.py:bounded", "--with", "most=2.0")
    assert "1 of 1 passed" in distflow("test-plugin", "./largest.py:found", "--data", "./largest.py:digits")
