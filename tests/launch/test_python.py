"""Runs from Python: the same command, agent and folder as from a terminal, with fake workers."""

from __future__ import annotations

import inspect
import json
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

import distflow
from distflow.errors import RecipeError, UserError, WorkerFailed
from distflow.launch.cli import run as command
from distflow.launch.commands.config import validate
from distflow.launch.deploy.stop_run import stop_run
from distflow.launch.run.process_table import host_part, leftovers
from distflow.launch.run.record import read_record
from tests.launch.conftest import FAKE, FAKE_PLUG_INS, WAIT_S, await_that

Start = Callable[..., distflow.Run]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """`start(fake, *overrides)` launches from Python; `fake`: what the training worker does."""
    runs: list[distflow.Run] = []

    def begin(fake: str, *overrides: str, **options: object) -> distflow.Run:
        given = [*FAKE_PLUG_INS, f"layout.pools.trainer.backend_options={{fake: {fake}}}", *overrides]
        run = distflow.launch("quickstart", given, runs_dir=tmp_path / "runs", worker_entry=FAKE, **options)
        runs.append(run)
        return run

    yield begin
    for run in runs:
        stop_run(run.path, timeout_s=0.0)


def test_a_run_from_its_launch_to_its_end(start: Start, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = start("{steps: 3}", run="mine")
    assert (run.path, run.name) == (tmp_path / "runs" / "mine", "mine")
    assert capsys.readouterr().out.splitlines()[0] == str(run.path)
    assert run.wait(timeout=WAIT_S) is run
    assert capsys.readouterr().out == "", "nobody asked for progress"
    assert repr(run).startswith("<distflow run 'mine': done after ")
    for words, told in ((["status"], run.status()), (["metrics"], run.metrics())):
        assert command([*words, "mine", "--json", "--runs-dir", str(run.path.parent)]) == 0
        printed = json.loads(capsys.readouterr().out)
        assert {**printed, "seconds": 0} == {**told, "seconds": 0} if isinstance(told, dict) else printed == told
    assert [row["step"] for row in run.metrics()] == [1, 2, 3]
    again = distflow.load_run("mine", runs_dir=tmp_path / "runs")
    assert again.wait().metrics() == run.metrics()
    with pytest.raises(UserError, match="mine exists already — add --resume"):
        start("{steps: 1}", run="mine")
    assert distflow.load_run(run.path).path == distflow.load_run(runs_dir=tmp_path / "runs").path == run.path


def test_a_failure_raises_what_the_command_prints(start: Start) -> None:
    """Launched and awaited by another thread, such as those of a notebook's executor: it may not handle signals."""

    def launch_and_wait() -> distflow.Run:
        return start("{steps: 3, fail_at: 2, how: raise}", run="doomed").wait(timeout=WAIT_S)

    assert threading.current_thread() is threading.main_thread()
    with ThreadPoolExecutor(1) as threads:
        failed = threads.submit(launch_and_wait)
        with pytest.raises(WorkerFailed, match=r"(?s)doomed: trainer/0 failed .*exit code 3"):
            failed.result()


INTERRUPTED = """
import distflow, os, signal, sys, threading
runs_dir, entry, *overrides = sys.argv[1:]
run = distflow.launch("quickstart", overrides, runs_dir=runs_dir, worker_entry=entry)
threading.Timer(0.3, os.killpg, (os.getpgid(0), signal.SIGINT)).start()
try:
    run.wait()
except KeyboardInterrupt:
    print("interrupted", run.status()["state"])
"""


def test_an_interrupted_cell_leaves_the_run(tmp_path: Path) -> None:
    """Ctrl-C reaches the whole process group; nor does the end of the process that launched it end it."""
    fake = "layout.pools.trainer.backend_options={fake: {steps: 10000}}"
    arguments = [sys.executable, "-c", INTERRUPTED, str(tmp_path / "runs"), FAKE, *FAKE_PLUG_INS, fake]
    done = subprocess.run(arguments, capture_output=True, text=True, timeout=60, start_new_session=True, check=False)
    try:
        assert done.stdout.splitlines()[-1:] == ["interrupted running"], done.stderr
        run = distflow.load_run("quickstart", runs_dir=tmp_path / "runs")
        steps = len(run.metrics())
        await_that(lambda: len(run.metrics()) > steps, "more training steps")
        with pytest.raises(TimeoutError, match=r"quickstart: the run is not over after 0\.3 s — it goes on"):
            run.wait(timeout=0.3)
        assert run.stop().status()["state"] == "stopped"
        assert run.wait() is run, "being stopped is no failure"
        assert leftovers(host_part(read_record(run.path))) == []
        run.stop()
    finally:
        stop_run(tmp_path / "runs" / "quickstart", timeout_s=0.0)


def test_all_problems_of_a_recipe_are_raised_at_once(tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match=r"run\.sed — unknown key") as raised:
        distflow.launch("quickstart", ["run.sed=1", "batch.prompt=3"], runs_dir=tmp_path / "runs")
    assert len(raised.value.problems) == 2
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"rum": "a"}, "launch: rum — unknown keyword — did you mean 'run'"),
        (
            {"batch": {"prompts": 8}},
            r'launch: batch — a recipe is given — its keys are overrides, as \["batch.KEY=VALUE"\]',
        ),
        ({"training_steps": 2}, r'did you mean run.training_steps\? overrides=\["KEY=VALUE"\]'),
        (
            {"reward_weights": [1.0]},
            r'reward_weights — unknown keyword — reward=\{NAME: \{"function": …, "weight": 0.5\}, …\}',
        ),
        (
            {"reward_funcs": ["math"]},
            "reward_funcs — unknown keyword — reward=…: a function, its name, or several: {NAME",
        ),
        ({"detach": True}, "detach — a run from Python always goes on by itself"),
        ({"dry_run": True}, "dry_run — .*distflow plan"),
        ({"resume": "yes"}, "--resume — expected True or False, got 'yes'"),
        ({"include": "gpu-1"}, "--include has no effect on a run on this machine"),
        ({"run": "a/b"}, "run name 'a/b'"),
        ({"overrides": "run.seed=1"}, r"expected a list of KEY=VALUE, got the text 'run\.seed=1'"),
        ({"recipe": None}, "no recipe given"),
        ({"recipe": None, "resume": True}, "no run in this folder"),
        ({"resume": True, "run": "never"}, "there is no run 'never'"),
    ],
)
def test_arguments_are_refused(tmp_path: Path, given: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        distflow.launch(**{"recipe": "quickstart", "runs_dir": tmp_path / "runs", **given})


def test_a_refusal_names_no_file_that_only_the_call_has_written(tmp_path: Path) -> None:
    rows = [{"prompt": "1=", "answer": "1"}]
    with pytest.raises(UserError, match=r"^launch: data\.max_prompt_tokens — 512 tokens") as raised:
        distflow.launch(model="tiny", data=rows, reward="exact_match", runs_dir=tmp_path / "runs")
    assert len(raised.traceback) == 2, "the frames are those of the caller and of the call"
    assert not (tmp_path / "runs").exists()


GOLD = """
def mine(completions, gold, **kwargs):
    return [1.0 for _ in completions]
"""


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ([{"question": "1=", "gold": "1"}], r"data\.source — row 0 of data: there is no column 'prompt'"),
        ([], r"data\.source — data has no rows"),
        ([{"prompt": "1="}], r"row 0 of data has no column 'gold', with which reward .*mine is called; there are none"),
        ("hub:nobody/nothing-of-the-kind", r"hub:nobody/nothing-of-the-kind cannot be loaded: it is not in the cache"),
    ],
)
def test_data_that_lack_something_are_refused_before_a_worker_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, data: Any, message: str
) -> None:
    monkeypatch.setattr("distflow.config.hub.settle_hub", lambda: "HF_HUB_OFFLINE is set")
    (tmp_path / "judge.py").write_text(GOLD)
    few = ["data.max_prompt_tokens=8"]
    given = {"model": "tiny", "reward": f"{tmp_path}/judge.py:mine", "overrides": few, "runs_dir": tmp_path / "runs"}
    with pytest.raises(RecipeError, match=message):
        distflow.launch(data=data, **given)
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["data.fields.prompt=question"], r"data\.source — .*d\.jsonl:2: there is no column 'question'"),
        (["+val.data.source=empty.jsonl", "+val.every=1"], r"val\.data\.source — empty\.jsonl has no rows"),
        ([], ""),
    ],
)
def test_validate_looks_at_the_first_row_of_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, overrides: list[str], message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "d.jsonl").write_text('\n{"prompt": "1=", "answer": "1"}\n')
    (tmp_path / "empty.jsonl").write_text("\n\n")
    told = CliRunner().invoke(validate, ["quickstart", "data.source=d.jsonl", "data.with={}", *overrides])
    shown = told.output + str(told.exception or "")
    assert re.search(message or r"^ok: quickstart", shown), shown


def test_no_run_to_load(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no run 'mine'"):
        distflow.load_run("mine", runs_dir=tmp_path)


def test_the_name_is_that_of_the_package_too() -> None:
    import distflow.launch.cli as cli

    assert cli.run is command
    assert inspect.ismodule(distflow.launch)
    program = "import distflow, sys; f = distflow.launch; assert callable(f); assert 'torch' not in sys.modules"
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
