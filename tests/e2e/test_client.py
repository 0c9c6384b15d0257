"""Clients that read the samples of a real run: what the page on it shows, and what is read when a client is killed."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import distflow
from distflow.errors import UserError
from tests.e2e.runs import PACED, PROMPTS, SAMPLES, Run
from tests.polling import eventually
from tests.test_docs import ROOT, files_in

STEPS = 60
READER = Path(__file__).with_name("reading_client.py")


def readers(folder: Path) -> Iterator[subprocess.Popen[str]]:
    """Two that have imported what they need, and wait for the run; the first one hangs with what it has claimed."""
    command = [sys.executable, str(READER), str(folder)]
    started = [subprocess.Popen([*command, *more], stdout=subprocess.PIPE, text=True) for more in (["--hang"], [])]
    for process in started:
        assert next_line(process) == "ready"
        yield process


def next_line(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


def test_the_program_that_is_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = Run(tmp_path / "runs", "quickstart", ["quickstart", *PACED, f"run.training_steps={STEPS}"])
    try:
        monkeypatch.chdir(tmp_path)
        eventually(lambda: (run.folder / "run.json").exists())
        exec(compile(files_in(ROOT / "docs" / "service.md")["best_answers.py"], "best_answers.py", "exec"), {})
        assert run.wait() == 0
        with pytest.raises(UserError, match="this run is over"):
            distflow.Client(run.folder)
    finally:
        run.end()
    for line in (tmp_path / "best.jsonl").read_text().splitlines():
        assert json.loads(line).keys() == {"prompt", "response"}


def test_every_group_is_read_once_although_a_client_is_killed(tmp_path: Path) -> None:
    hangs, reads = readers(tmp_path / "read")
    run = Run(tmp_path, "read", ["quickstart", *PACED, f"run.training_steps={STEPS}", "layout.pools.trainer.count=2"])
    try:
        held = json.loads(next_line(hangs))
        hangs.send_signal(signal.SIGKILL)
        out, _ = reads.communicate(timeout=60)
        assert run.wait() == 0
    finally:
        for process in (hangs, reads):
            process.kill()
            process.wait()
        run.end()
    used = [position for line in out.splitlines() for position in json.loads(line)]
    assert held
    assert set(held) <= set(used), "what the first had claimed goes to the other one"
    assert len(used) == len(set(used))
    trained = {int(line["uid"][2]) for line in run.dumps() if line["step"] == STEPS}
    assert len(trained) == PROMPTS
    assert trained <= set(used), f"{SAMPLES} samples each"
