"""Several runs side by side: tables and pictures of their metrics, from files as runs leave them."""

from __future__ import annotations

import csv
import io
import json
from pathlib import Path

import pytest

from distflow.launch.cli import run as distflow


def leave_run(runs_dir: Path, name: str, steps: int, **metrics: list[float]) -> Path:
    """The metrics of a run: `metrics` by name with __ for /, one value a training step, cut off where they end."""
    folder = runs_dir / name / "metrics"
    folder.mkdir(parents=True)
    lines = [
        {"step": step + 1, "term": 0, "timing_s/step": 2.0}
        | {key.replace("__", "/"): values[step] for key, values in metrics.items() if step < len(values)}
        for step in range(steps)
    ]
    (folder / "trainer-0.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder.parent


@pytest.fixture
def two(tmp_path: Path) -> list[str]:
    """Paths of two runs, of 4 and 2 training steps."""
    one = leave_run(
        tmp_path / "a", "one", 4, critic__score__mean=[0.1, 0.9, 0.3, 0.5], actor__loss=[4.0, 3.0, 2.0, 1.0]
    )
    return [str(one), str(leave_run(tmp_path / "a", "two", 2, critic__score__mean=[0.25, 0.75]))]


def table_of(text: str) -> dict[str, list[str]]:
    return {words[0]: words[1:] for line in text.splitlines() if (words := line.split())}


def test_runs_are_compared_by_last_best_and_mean(two: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert distflow(["metrics", *two, "--last", "2"]) == 0
    table = table_of(capsys.readouterr().out)
    assert table["one"] == ["two"]
    assert table["last"] == ["best", "mean", "last", "best", "mean"]
    assert table["step"] == ["s", *["2.000"] * 6]
    assert table["score"] == ["0.500", "0.900", "0.400", "0.750", "0.750", "0.500"]
    assert table["loss"] == ["1", "1.5"], "which loss is best cannot be said, and the other run has none"


def test_whole_names_and_json(two: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert distflow(["metrics", *two, "--keys", "actor/*,critic/score/mean"]) == 0
    table = table_of(capsys.readouterr().out)
    assert list(table)[2:] == ["step", "actor/loss", "critic/score/mean"]
    assert distflow(["metrics", *two, "--json", "--keys", "critic/*", "--last", "1"]) == 0
    score = {"last": 0.75, "best": 0.75, "mean": 0.75}
    step = {"last": 2, "best": None, "mean": None}
    assert json.loads(capsys.readouterr().out)[1] == {
        "run": "two",
        "metrics": {"step": step, "critic/score/mean": score},
    }


def test_csv_says_which_run(two: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert distflow(["metrics", *two, "--csv", "--last", "1"]) == 0
    rows = list(csv.DictReader(io.StringIO(capsys.readouterr().out)))
    assert [(row["run"], row["step"], row["actor/loss"]) for row in rows] == [("one", "4", "1.0"), ("two", "2", "")]


def test_runs_of_one_name_are_told_by_their_paths(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    runs = [str(leave_run(tmp_path / folder, "same", 1, actor__loss=[1.0])) for folder in "ab"]
    assert distflow(["metrics", *runs, runs[0], "--json"]) == 0
    assert [one["run"] for one in json.loads(capsys.readouterr().out)] == runs


def test_many_runs_stand_below_each_other(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    runs = [str(leave_run(tmp_path, f"{number:02}-{'x' * 40}", 1, actor__loss=[number + 0.5])) for number in range(8)]
    assert distflow(["metrics", *runs]) == 0
    lines = capsys.readouterr().out.splitlines()
    losses = [line.split()[1:] for line in lines if line.strip().startswith("loss")]
    assert [value for values in losses for value in values] == [
        f"{number + 0.5}" for number in range(8) for _ in range(2)
    ]
    assert len(losses) > 1
    assert max(map(len, lines)) <= 200


def test_a_metric_that_no_run_has(two: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert distflow(["metrics", *two, "--keys", "critic/scores/mean"]) == 2
    assert "did you mean critic/score/mean" in capsys.readouterr().err
