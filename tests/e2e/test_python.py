"""A real run from Python: what the page on it shows."""

from __future__ import annotations

import contextlib
import json
import runpy
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import distflow
from distflow.errors import DistflowError
from distflow.launch.deploy.stop_run import stop_run
from tests.test_docs import ROOT, files_in

NAME = "from-python"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The current one; the run that is left there ends with it."""
    monkeypatch.chdir(tmp_path)
    yield tmp_path
    with contextlib.suppress(DistflowError):
        stop_run(tmp_path / "runs" / NAME, timeout_s=0.0)


def test_the_first_run_that_is_shown(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = files_in(ROOT / "docs" / "python.md")["first_run.py"]
    (folder / "first_run.py").write_text(text.replace("training_steps=20", "training_steps=3"))
    found: dict[str, Any] = runpy.run_path("first_run.py")
    run = found["run"]
    assert isinstance(run, distflow.Run)
    assert (run.path, run.status()["state"]) == (folder / "runs" / NAME, "done")
    assert [row["step"] for row in run.metrics()] == [1, 2, 3]
    assert "done after" in capsys.readouterr().out
    assert len(list((run.path / "rollouts").glob("step_*/*.jsonl"))) >= 3


def test_the_run_without_a_recipe_that_is_shown(folder: Path) -> None:
    """By a script of its own, whose function the worker imports."""
    (folder / "digits.py").write_text(files_in(ROOT / "docs" / "python.md")["digits.py"])
    done = subprocess.run([sys.executable, "digits.py"], capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    run = distflow.load_run("digits")
    assert [row["step"] for row in run.metrics()] == [1, 2, 3, 4]
    lines = [json.loads(line) for file in run.path.glob("rollouts/step_*/*.jsonl") for line in file.open()]
    assert {round(3 * line["reward"], 3) for line in lines} <= {0.0, 1.0, 2.0, 3.0}
    assert len(lines) == 4 * 16 * 4
