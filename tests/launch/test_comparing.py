"""Several runs side by side: tables and pictures of their metrics, from files as runs leave them."""

from __future__ import annotations

import csv
import io
import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest

from distflow.launch.cli import run as distflow
from distflow.launch.commands.metrics import read_runs
from distflow.launch.commands.plot import PANELS, Panel, draw


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


def test_a_picture_of_what_there_is(two: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert distflow(["plot", *two, "-o", str(tmp_path / "curves.png")]) == 0
    out, err = capsys.readouterr()
    assert out == f"{tmp_path / 'curves.png'}: 1 panels of one, two\n"
    assert "note: no reward: no run has critic/rewards/mean\n" in err
    assert "note: no KL: no run has actor/kl_loss, critic/kl, actor/ppo_kl\n" in err
    assert len(err.splitlines()) == len(PANELS) - 1
    assert (tmp_path / "curves.png").read_bytes().startswith(b"\x89PNG")


def test_validation_stands_beside_the_score(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    values: dict[str, Any] = {"val__avg@2": [0.25] * 3, "val__sums__avg@2": [0.5] * 3, "critic__score__mean": [0.1] * 3}
    values |= {"staleness__mean": [0.0] * 3}
    run = str(leave_run(tmp_path, "checked", 3, **values))
    assert distflow(["metrics", run]) == 0
    assert capsys.readouterr().out.split()[:3] == ["step", "val/avg@2", "score"]
    assert distflow(["plot", run, "-o", str(tmp_path / "curves.png")]) == 0
    out, err = capsys.readouterr()
    assert out == f"{tmp_path / 'curves.png'}: 2 panels of checked\n"
    assert "note: no staleness: staleness/mean never changes\n" in err


def test_a_picture_is_named_after_its_run(
    two: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert distflow(["plot", str(leave_run(tmp_path, "lone", 2, actor__entropy=[1.0, 2.0]))]) == 0
    assert distflow(["plot", *two]) == 0
    capsys.readouterr()
    assert {path.name for path in tmp_path.glob("*.png")} == {"lone.png", "curves.png"}


def curves_of(figure: Any) -> list[tuple[str, list[Any]]]:
    return [(axes.get_title("left"), [line for line in axes.lines if len(line.get_xdata())]) for axes in figure.axes]


def test_runs_are_drawn_over_each_other_and_metrics_beside(two: list[str], tmp_path: Path) -> None:
    runs = read_runs(two, tmp_path)
    chosen = [Panel(name, ((name, ""),)) for name in ("critic/score/mean", "actor/loss")]
    (score, scores), (loss, losses) = curves_of(draw(chosen, runs))
    assert (score, loss) == ("critic/score/mean", "actor/loss")
    assert [list(line.get_ydata()) for line in scores if len(line.get_ydata())] == [[0.1, 0.9, 0.3, 0.5], [0.25, 0.75]]
    assert len({line.get_color() for line in scores}) == 2
    assert [list(line.get_ydata()) for line in losses if len(line.get_ydata())] == [[4.0, 3.0, 2.0, 1.0]]
    figure = draw(chosen, runs)
    assert [text.get_text() for text in figure.legends[0].get_texts()] == ["one", "two"]


def test_the_metrics_of_a_panel_differ_by_colour_or_by_style(tmp_path: Path) -> None:
    shares = {"perf__trainer_idle_share": [0.5] * 3, "perf__score_share": [0.1] * 3}
    paths = [str(leave_run(tmp_path, name, 3, **shares)) for name in ("one", "two")]
    for runs in (paths[:1], paths):
        ((_, lines),) = curves_of(draw([PANELS[-1]], read_runs(runs, tmp_path)))
        assert len({(line.get_color(), line.get_linestyle()) for line in lines}) == 2 * len(runs)


def test_the_legend_of_many_runs_lies_within_the_picture(tmp_path: Path) -> None:
    names = [f"a-run-with-quite-a-long-name-{number}" for number in range(9)]
    paths = [str(leave_run(tmp_path, name, 3, actor__entropy=[0.1, 0.2, 0.3])) for name in names]
    figure = draw([PANELS[3]], read_runs(paths, tmp_path))
    figure.canvas.draw()
    legend = figure.legends[0].get_window_extent()
    assert 0 <= legend.x0 < legend.x1 <= figure.bbox.width
    assert legend.y1 <= figure.bbox.height
    assert figure.axes[0].get_window_extent().height > 80


def test_many_steps_are_smoothed(tmp_path: Path) -> None:
    values = [float(step % 2) for step in range(400)]
    run = leave_run(tmp_path, "long", 400, actor__entropy=values)
    ((_, (faint, bold)),) = curves_of(draw([PANELS[3]], read_runs([str(run)], tmp_path)))
    assert list(faint.get_ydata()) == values
    assert bold.get_ydata() == pytest.approx(0.5, abs=0.11)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["-o", "curves.docx"], r"-o curves\.docx: unknown kind of picture '\.docx' — .*png"),
        (["-o", "nowhere/curves.png"], r"-o nowhere/curves\.png: cannot be written \(No such file or directory\)"),
        (["-o", "curves.png", "--keys", "critic/scores/mean"], "did you mean critic/score/mean"),
    ],
)
def test_pictures_that_cannot_be_made(
    two: list[str],
    arguments: list[str],
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    assert distflow(["plot", *two, *arguments]) == 2
    assert re.search(message, capsys.readouterr().err)


def test_nothing_to_draw(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = str(tmp_path / "curves.png")
    assert distflow(["plot", str(leave_run(tmp_path, "young", 0)), "-o", out]) == 2
    assert "young: no training step has been done yet" in capsys.readouterr().err
    assert distflow(["plot", str(leave_run(tmp_path, "other", 1, mine=[1.0])), "-o", out]) == 2
    assert "choose some with --keys" in capsys.readouterr().err


def test_without_matplotlib(
    two: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in [name for name in sys.modules if name.startswith("matplotlib")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert distflow(["plot", *two, "-o", "curves.png"]) == 2
    assert "needs matplotlib" in (told := capsys.readouterr().err)
    assert "pip install 'distflow-rl[plot]'" in told
