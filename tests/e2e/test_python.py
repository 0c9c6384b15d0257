"""A real run from Python: what the page on it shows."""

from __future__ import annotations

import contextlib
import runpy
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
