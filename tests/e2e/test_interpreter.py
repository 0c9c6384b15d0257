"""A run whose rollout workers are executed by another Python than the rest."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from tests.e2e.runs import Launch, cli
from tests.interpreters import make_interpreter


def test_another_python_generates_and_is_started_again(launch: Launch, tmp_path: Path) -> None:
    python = str(make_interpreter(tmp_path / "v"))
    run = launch("quickstart", f"layout.pools.rollout.python={python}", "layout.pools.rollout.count=1")
    run.until(lambda: run.steps_done() >= 2, "the second training step")
    os.kill(run.pid_of("rollout/0"), signal.SIGKILL)
    log, told = run.folder / "logs" / "rollout-0.log", f"executed by {python}, Python"
    run.until(lambda: log.read_text().count(told) == 2, "the second life of rollout/0")
    before = run.steps_done()
    run.until(lambda: run.steps_done() > before + 2, "further training steps")
    pythons = {worker["name"]: worker["python"] for worker in run.record()["workers"]}
    assert pythons == {"rollout/0": python, "trainer/0": ""}
    assert told not in (run.folder / "logs" / "trainer-0.log").read_text()
    assert cli("stop", run.name, "--runs-dir", str(run.folder.parent)).returncode == 0
    assert run.wait() == 130, run.output
    assert run.leftovers() == []


@pytest.mark.long
def test_workers_that_come_later_have_it_too(launch: Launch, tmp_path: Path) -> None:
    """One that `scale` adds, and training workers of a new term."""
    python = str(make_interpreter(tmp_path / "v"))
    pools = [f"layout.pools.{pool}.python={python}" for pool in ("rollout", "trainer")]
    run = launch("quickstart", *pools, "layout.pools.rollout.count=1", "run.save_every=2")
    told, logs = f"executed by {python}, Python", run.folder / "logs"
    run.until(lambda: run.steps_done() >= 4, "the fourth training step")
    scaled = cli("scale", run.name, "rollout=2", "--runs-dir", str(run.folder.parent))
    assert scaled.returncode == 0, scaled.stderr
    new = logs / "rollout-1.log"
    run.until(lambda: new.exists() and told in new.read_text(), "the first life of rollout/1")
    os.kill(run.pid_of("trainer/0"), signal.SIGKILL)
    run.until(lambda: (logs / "trainer-0.log").read_text().count(told) == 2, "the second life of trainer/0")
    before = run.steps_done()
    run.until(lambda: run.steps_done() > before + 2, "further training steps")
    assert {worker["python"] for worker in run.record()["workers"]} == {python}
    stacks = cli("stacks", run.name, "--runs-dir", str(run.folder.parent))
    assert "rollout/1" in stacks.stdout, stacks.stderr
    assert cli("stop", run.name, "--runs-dir", str(run.folder.parent)).returncode == 0
    assert run.wait() == 130, run.output
    assert run.leftovers() == []
