"""`launch --sweep`: a run for each value, with fake workers."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from distflow.launch.cli import run as distflow
from distflow.launch.deploy.stop_run import stop_run
from distflow.launch.run.folder import run_names
from tests.launch.test_launch import Launcher

FAIL_AT = "layout.pools.trainer.backend_options.fake.fail_at"


@pytest.fixture
def launcher(tmp_path: Path) -> Iterator[Launcher]:
    made = Launcher(tmp_path / "runs")
    yield made
    for head in made.heads:
        if head.poll() is None:
            os.kill(head.pid, signal.SIGKILL)
        head.communicate()
    for name in run_names(made.runs_dir):
        stop_run(made.runs_dir / name, timeout_s=0.0)


def table_of(out: str) -> list[list[str]]:
    """The lines of the table at the end."""
    lines = out.splitlines()
    head = next(number for number, line in enumerate(lines) if re.match(r" *run +\S+ .*state +steps", line))
    return [line.split() for line in lines[head + 1 : -1]]


def test_a_failed_run_does_not_keep_the_others_from_running(launcher: Launcher) -> None:
    fake = "{fake: {steps: 3, how: raise, fail_at: 0}}"
    head = launcher.start("--sweep", f"{FAIL_AT}=7,2,9", "--run", "mine", "run.training_steps=3", backend=fake)
    out, err = head.communicate(timeout=90)
    assert head.returncode == 3, err
    assert "step 'bonus' raised" in err
    runs = [words[:5] for words in table_of(out)]
    assert [words[:3] for words in runs] == [
        ["mine-fail_at-7", "7", "done"],
        ["mine-fail_at-2", "2", "failed"],
        ["mine-fail_at-9", "9", "done"],
    ]
    assert runs[0][3:] == ["3", "of"]
    assert (launcher.runs_dir / "mine-fail_at-9" / "overrides.txt").read_text().splitlines()[-1] == f"{FAIL_AT}=9"


def test_ctrl_c_stops_the_run_and_the_rest(launcher: Launcher) -> None:
    head = launcher.start("--sweep", "run.seed=0,1")
    launcher.await_step("quickstart-seed-0")
    os.kill(head.pid, signal.SIGINT)
    out, err = head.communicate(timeout=90)
    assert head.returncode == 130, err
    stopped, rest = table_of(out)
    assert stopped[:3] == ["quickstart-seed-0", "0", "stopped"]
    assert rest == ["quickstart-seed-1", "1", "not", "started"]
    assert run_names(launcher.runs_dir) == ["quickstart-seed-0"]
    assert launcher.nothing_left("quickstart-seed-0")


def names_of(arguments: list[str], runs_dir: Path, capsys: pytest.CaptureFixture[str]) -> list[str]:
    assert distflow(["launch", "quickstart", "--dry-run", "--runs-dir", str(runs_dir), *arguments]) == 0
    return capsys.readouterr().out.splitlines()


def test_combinations_and_names(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    clip = "flow.steps.update.with.clip"
    two = ["--sweep", "run.seed=0,1", "--sweep", f"{clip}=[0.2,0.2],[0.1,0.3]"]
    assert names_of([*two, "batch.prompts=64"], tmp_path, capsys) == [
        f"quickstart-seed-{seed}-clip-{low}-{high}: quickstart batch.prompts=64 run.seed={seed} {clip}=[{low},{high}]"
        for seed in (0, 1)
        for low, high in ((0.2, 0.2), (0.1, 0.3))
    ]
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "quickstart-seed-1").mkdir()
    seeds = ["--sweep", "run.seed=0,1"]
    assert [line.partition(":")[0] for line in names_of(seeds, tmp_path, capsys)] == [
        "quickstart-2-seed-0",
        "quickstart-2-seed-1",
    ]
    assert (
        names_of(["--run", "mine", "--sweep", "flow=grpo,ppo"], tmp_path, capsys)[1]
        == "mine-flow-ppo: quickstart flow=ppo"
    )


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--sweep", "run.seed"], "--sweep run.seed: expected KEY=A,B,…"),
        (["--sweep", "run.seed=0,,1"], "expected KEY=A,B,…"),
        (["--sweep", "run.seed=0,0"], "with different values"),
        (["--sweep", "run.seed=0,1", "run.seed=3"], "run.seed is given twice"),
        (["--sweep", "run.seed=0,1", "--sweep", "run.seed=2"], "run.seed is given twice"),
        (["--sweep", "run.seed=0,1", "--detach"], "waits for each, which --detach does not"),
        (["--sweep", "run.seed=0,1", "--resume"], "waits for each, which --resume does not"),
        (["--sweep", "run.seed=0,1", "--sweep", "run.sed=1,2"], "run.sed — unknown key"),
        (["--sweep", "run.seed=0,x"], "run.seed — "),
        (["--sweep", "flow.steps.update.with.clip=[0.2,0.3],[0.2, 0.3]"], "the names of the runs would not differ"),
        (["--sweep", "run.seed=0,1", "--run", "a/b"], "run name 'a/b-seed-0'"),
    ],
)
def test_sweeps_are_refused_before_anything_runs(
    arguments: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert distflow(["launch", "quickstart", "--runs-dir", str(tmp_path / "runs"), *arguments]) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "runs").exists()
