"""A full disk neither ends a run nor hides how it ended: what its agent does about it."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml

from distflow.cluster.gossip import Gossip
from distflow.cluster.host_report import HostReport
from distflow.cluster.processes import Exit, HostEntry, Outcome
from distflow.comm.addresses import worker_address
from distflow.errors import WorkerFailed
from distflow.flow.recipe_check import plan_recipe
from distflow.launch.agent.peer_agents import PeerAgents
from distflow.launch.agent.pool_recovery import PoolRecovery
from distflow.launch.agent.record_writer import Journal
from distflow.launch.agent.restart_policy import RestartPolicy, StartWorker
from distflow.launch.agent.scaling import Scaling
from distflow.launch.agent.start import RestartLimit
from distflow.launch.cli import run as distflow
from distflow.launch.deploy.folder_contents import Beginning, RunContents, fill
from distflow.launch.deploy.stop_run import stop_run
from distflow.launch.run.exit_status import explain, finish
from distflow.launch.run.folder import create_run_folder
from distflow.launch.run.record import AGENT, RunRecord, WorkerEntry, read_record
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
    core = RestartPolicy(
        [entry], RestartLimit(3, 60.0), 30.0, lambda name, how: explain(run_dir, name, how), renews=True
    )
    terms, mesh = (
        PoolRecovery(record, 0, core, Scaling(record, 0, core)),
        Gossip(HostReport(0, HostEntry("", "")), (), 60.0),
    )
    core.start_unforked()
    core.started("trainer/0", os.getpid())
    core.exited("trainer/0", Exit(None, signal.SIGKILL), 0.0)
    disk.fill()
    for second in range(5):
        assert terms.act(mesh, lambda name, address: None, float(second)) == []
    assert core.failure is None
    assert terms.present.waits == "room on the disk of this machine"
    disk.free()
    assert terms.act(mesh, lambda name, address: None, 4.5) == [], "it looks once a second"
    # Another one may take the room between a look and a write.
    draft = run_dir / "workers" / f".trainer-0.yaml.{os.getpid()}.draft"
    draft.mkdir()
    assert terms.act(mesh, lambda name, address: None, 9.0) == []
    assert terms.present.waits == "room on the disk of this machine"
    draft.rmdir()
    assert terms.act(mesh, lambda name, address: None, 10.0) == [StartWorker(entry, 1)]
    assert yaml.safe_load((run_dir / "workers" / "trainer-0.yaml").read_text())["term"] == 1
    assert not list((run_dir / "checkpoints").glob(".room*"))


def test_a_run_ends_with_the_disk_that_its_next_term_has_waited_for(tmp_path: Path) -> None:
    (tmp_path / "workers").mkdir()
    entry = WorkerEntry("trainer/0", True)
    record = RunRecord("run", str(tmp_path), 9, (entry,), {}, 30.0, 3, no_progress_s=60.0)
    core = RestartPolicy(
        [entry], RestartLimit(3, 60.0), 30.0, lambda name, how: explain(tmp_path, name, how), renews=True
    )
    terms, mesh = (
        PoolRecovery(record, 0, core, Scaling(record, 0, core)),
        Gossip(HostReport(0, HostEntry("", "")), (), 60.0),
    )
    core.start_unforked()
    core.started("trainer/0", os.getpid())
    core.exited("trainer/0", Exit(None, signal.SIGKILL), 0.0)
    for now in (0.0, 61.0):
        # There is no folder to write to.
        terms.act(mesh, lambda name, address: None, now)
    assert core.failure is not None
    assert "waited 60 s (limits.no_progress_s) for room on the disk of this machine" in core.failure.message


def test_a_run_ends_with_the_file_that_hides_which_checkpoints_count(tmp_path: Path) -> None:
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "checkpoints" / "term_000001.json").touch()
    entry = WorkerEntry("trainer/0", True)
    record = RunRecord("run", str(tmp_path), 9, (entry,), {}, 30.0, 3)
    core = RestartPolicy(
        [entry], RestartLimit(3, 60.0), 30.0, lambda name, how: explain(tmp_path, name, how), renews=True
    )
    terms, mesh = (
        PoolRecovery(record, 0, core, Scaling(record, 0, core)),
        Gossip(HostReport(0, HostEntry("", "")), (), 60.0),
    )
    core.start_unforked()
    core.started("trainer/0", os.getpid())
    core.exited("trainer/0", Exit(None, signal.SIGKILL), 0.0)
    terms.act(mesh, lambda name, address: None, 0.0)
    assert core.failure is not None
    assert "term_000001.json: cannot be read" in core.failure.message


def test_the_agent_after_one_that_was_killed_keeps_its_nonce_on_a_full_disk(disk: SmallDisk) -> None:
    hosts = (HostEntry("a", "127.0.0.1"), HostEntry("b", "127.0.0.2"))
    record = RunRecord("run", str(disk.folder), 9, (), {}, 30.0, 3, hosts=hosts)
    endpoint = SimpleNamespace(network_address="tcp://127.0.0.1:1", roster={})
    entry = PeerAgents(record, 0, endpoint).open()
    disk.fill()
    after = PeerAgents(record, 0, endpoint)
    after.resume(Journal(0, HostReport(0, entry)))
    assert after.open() == entry
    assert (disk.folder / "hosts" / "0.nonce").read_text() == entry.nonce != ""


def test_workers_that_were_asked_for_are_started_when_the_disk_takes_their_documents(tmp_path: Path) -> None:
    run_dir = create_run_folder(tmp_path, "elastic", explicit=True)
    loaded, plan = plan_recipe("quickstart", ["layout.pools.rollout.count=1"])
    fill(RunContents(loaded, plan, Beginning(), run_dir))
    record = read_record(run_dir)
    core = RestartPolicy(record.workers, RestartLimit(3, 60.0), 30.0, lambda name, how: explain(run_dir, name, how))
    mesh, scaling = Gossip(HostReport(0, HostEntry("", "")), (), 60.0), Scaling(record, 0, core)
    scaling.ask({"pool": "rollout", "count": 2, "slots": {}}, mesh)
    (run_dir / "workers" / "rollout-1.yaml").mkdir()
    assert scaling.apply(mesh, lambda name, address: None, 0.0) == []
    (run_dir / "workers" / "rollout-1.yaml").rmdir()
    assert scaling.apply(mesh, lambda name, address: None, 0.5) == [], "it is tried again every second"
    (start,) = scaling.apply(mesh, lambda name, address: None, 1.0)
    assert isinstance(start, StartWorker)
    assert start.worker.name == "rollout/1"


def test_a_full_disk_at_the_end_of_a_run_is_told(disk: SmallDisk) -> None:
    """Where nothing was set aside for it."""
    run = disk.folder / "mine"
    run.mkdir()
    RunRecord("mine", str(run), 9, (), {}, 30.0, 3, state="running").write()
    disk.fill()
    with pytest.raises(WorkerFailed, match=r"the run is over \(done\), but run.json cannot be written \(No space left"):
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
