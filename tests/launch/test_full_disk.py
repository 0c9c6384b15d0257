"""A full disk neither ends a run nor hides how it ended: what its agent does about it."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from distflow.comm.addresses import worker_address
from distflow.errors import WorkerFailed
from distflow.launch.cli import run as distflow
from distflow.launch.ending import Exit, Outcome, explain, finish
from distflow.launch.mesh.core import Mesh
from distflow.launch.mesh.report import Report
from distflow.launch.record import AGENT, HostEntry, RunRecord, WorkerEntry, read_record
from distflow.launch.restarts import RestartLimit
from distflow.launch.stopping import stop_run
from distflow.launch.supervisor import Start, Supervisor
from distflow.launch.terms import Terms
from tests.disks import SmallDisk
from tests.launch.conftest import FakeRun, await_that


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[SmallDisk]:
    with SmallDisk(tmp_path / "disk", size_kb=2048) as made:
        yield made


def test_a_pool_that_lost_a_worker_waits_for_room_before_its_next_term_begins(disk: SmallDisk) -> None:
    run_dir = disk.folder / "run"
    for name in ("workers", "checkpoints"):
        (run_dir / name).mkdir(parents=True)
    document = {"worker": "trainer/0", "settings": {}}
    (run_dir / "workers" / "trainer-0.yaml").write_text(yaml.safe_dump(document))
    entry = WorkerEntry("trainer/0", True)
    record = RunRecord("run", str(run_dir), 9, (entry,), {AGENT: worker_address(run_dir, AGENT)}, 30.0, 3)
    core = Supervisor([entry], RestartLimit(3, 60.0), 30.0, lambda name, how: explain(run_dir, name, how), renews=True)
    terms, mesh = Terms(record, 0, core), Mesh(Report(0, HostEntry("", "")), (), 60.0)
    core.start_unborn()
    core.started("trainer/0", os.getpid())
    core.exited("trainer/0", Exit(None, signal.SIGKILL), 0.0)
    disk.fill()
    for second in range(5):
        assert terms.act(mesh, float(second)) == []
    assert core.failure is None
    disk.free()
    assert terms.act(mesh, 9.0) == [Start(entry, 1)]
    assert yaml.safe_load((run_dir / "workers" / "trainer-0.yaml").read_text())["term"] == 1
    assert not list((run_dir / "checkpoints").glob(".room*"))


def test_a_full_disk_at_the_end_of_a_run_is_told(disk: SmallDisk) -> None:
    """Where nothing was set aside for it."""
    run = disk.folder / "mine"
    run.mkdir()
    RunRecord("mine", str(run), 9, (), {}, 30.0, 3, state="running").write()
    disk.fill()
    with pytest.raises(WorkerFailed, match=r"the run is over \(done\), but run.json cannot say so \(No space left"):
        finish(read_record(run), Outcome("done", 0))
    assert not list(run.glob(".run.json.*"))
    assert read_record(run).state == "running"


def test_a_run_that_fails_on_a_full_disk_says_so_for_good(disk: SmallDisk, capsys: pytest.CaptureFixture[str]) -> None:
    """Its agent goes on writing when there is room, and finds room for its last words."""
    trainer = {"steps": 100_000, "step_s": 0.02}
    run = FakeRun(disk.folder / "fake", {"rollout/0": {}, "rollout/1": {}, "trainer/0": trainer})
    agent = run.start()
    try:
        run.await_up("rollout/0", "rollout/1", "trainer/0")
        os.kill(run.pid("trainer/0"), signal.SIGSTOP)  # a fake one cannot do without its metrics
        disk.fill()
        os.kill(run.pid("rollout/0"), signal.SIGKILL)
        time.sleep(1.0)
        assert agent.poll() is None
        disk.free()
        await_that(lambda: "rollout/0 incarnation 1 is up" in run.log("rollout-0"), "the worker that was killed")
        await_that(lambda: "rollout/0" in run.record().pids, "run.json that is up to date")
        disk.fill()
        os.kill(run.pid("trainer/0"), signal.SIGCONT)
        assert agent.wait(30) != 0
        assert run.record().state == "failed"
        options = ["--runs-dir", str(disk.folder)]
        assert distflow(["status", "fake", "--json", *options]) == 0
        assert json.loads(capsys.readouterr().out)["state"] == "failed"
        assert distflow(["stop", "fake", *options]) == 0
        assert "fake: failed" in capsys.readouterr().out
    finally:
        stop_run(run.run_dir, timeout_s=0.0)
