"""Who writes `run.json` on a folder that several agents share."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from msgspec import structs

from distflow.cluster.gossip import Gossip
from distflow.cluster.host_report import Death, DesiredWorkers, HostedWorker, HostReport, from_wire, to_wire
from distflow.cluster.processes import Exit, Failure, HostEntry, Outcome, ProcessId, agent_name, nursery_name
from distflow.launch.agent import record_writer as recording
from distflow.launch.agent.record_writer import OFFER_S, SPARE, TRY_S, RecordWriter, compose
from distflow.launch.commands.status import _findings
from distflow.launch.observe.wait_graph import wait_graph
from distflow.launch.run.exit_status import explain, failure_file, finish
from distflow.launch.run.folder import claim
from distflow.launch.run.process_table import process_id
from distflow.launch.run.record import FILE_NAME, BadGpu, RunRecord, WorkerEntry, read_record
from distflow.runtime.disk import set_aside
from tests.disks import SmallDisk


def record(folder: Path) -> RunRecord:
    return RunRecord("run", str(folder), 40, (), {}, 30.0, 3, state="running")


def test_an_agent_that_hears_few_leaves_the_folder_to_the_others(tmp_path: Path) -> None:
    cut_off = RecordWriter(record(tmp_path), claim(tmp_path))
    cut_off.save(structs.replace(record(tmp_path), waits_for="the others"))
    other = RecordWriter(record(tmp_path), None)
    other.try_for_lock(0.0)
    assert not other.writes
    other.save(structs.replace(record(tmp_path), term=1))

    cut_off.try_for_lock(1.0, outnumbered=True)
    assert not cut_off.writes
    other.try_for_lock(TRY_S)
    assert other.writes
    assert read_record(tmp_path).waits_for == "the others"
    other.save(structs.replace(record(tmp_path), term=1))
    found = read_record(tmp_path)
    assert (found.term, found.waits_for) == (1, ""), "written again, though nothing has changed since it had the lock"

    cut_off.try_for_lock(1.0 + OFFER_S, outnumbered=True)
    assert not cut_off.writes


def test_an_agent_whose_others_are_dead_takes_the_folder_again(tmp_path: Path) -> None:
    record(tmp_path).write()
    last = RecordWriter(record(tmp_path), claim(tmp_path))
    last.try_for_lock(0.0, outnumbered=True)
    last.try_for_lock(OFFER_S - 0.1, outnumbered=True)
    assert not last.writes
    last.try_for_lock(OFFER_S, outnumbered=True)
    assert last.writes
    last.try_for_lock(100.0, outnumbered=True)
    assert last.writes, "the folder is offered once"
    last.try_for_lock(101.0, outnumbered=False)
    last.try_for_lock(102.0, outnumbered=True)
    assert not last.writes, "once each time that most of the others cannot be heard"


def test_an_end_that_others_wrote_stays(tmp_path: Path) -> None:
    cut_off = RecordWriter(record(tmp_path), claim(tmp_path))
    cut_off.try_for_lock(0.0, outnumbered=True)
    structs.replace(record(tmp_path), state="done").write()
    cut_off.try_for_lock(OFFER_S, outnumbered=True)
    assert cut_off.writes
    cut_off.save(record(tmp_path))
    assert read_record(tmp_path).state == "done"


def many(folder: Path, workers: int) -> tuple[RunRecord, Gossip]:
    """A run of eight workers a host, of which all hosts but the last have reported."""
    hosts = range(workers // 8)
    entries = tuple(WorkerEntry(f"rollout/{i}", False, 1, i % len(hosts)) for i in range(workers))
    places = tuple(HostEntry(f"h{i}", f"10.0.0.{i}", f"tcp://10.0.0.{i}:1") for i in hosts)
    names = [*(entry.name for entry in entries), *map(agent_name, hosts), *map(nursery_name, hosts)]
    pids = {name: ProcessId(5, 1.0, "there") for name in names}
    found = RunRecord("run", str(folder), 40, entries, {}, 30.0, 3, hosts=places, pids=pids)
    reports = [
        HostReport(h, places[h], 1, workers={e.name: HostedWorker(False, 1, "running") for e in entries if e.host == h})
        for h in hosts
    ]
    mesh = Gossip(reports[0], hosts[1:], 60.0)
    mesh.reports |= {report.host: report for report in reports[:-1]}
    return found, mesh


def calls(workers: int) -> int:
    """Of Python functions, while `run.json` is composed."""
    before, mesh = many(Path("/none"), workers)
    count = 0

    def counts(frame: object, event: str, argument: object) -> None:
        nonlocal count
        count += event == "call"

    sys.setprofile(counts)
    try:
        compose(before, mesh, "running", 1)
    finally:
        sys.setprofile(None)
    return count


def test_the_cost_of_composing_is_linear_in_the_workers() -> None:
    calls(640)  # names that were met before are not parsed again
    assert calls(640) < 5 * calls(160)


def test_processes_of_hosts_that_have_not_reported_stay_in_the_record() -> None:
    before, mesh = many(Path("/none"), 64)
    names = {"rollout/7", "rollout/15", "rollout/23", "rollout/31", "rollout/39", "rollout/47", "rollout/55"}
    assert compose(before, mesh, "running", 1).pids.keys() == {*names, "rollout/63", "agent/7", "nursery/7"}


def test_a_gpu_that_failed_twice_is_bad_whichever_workers_it_failed_under(tmp_path: Path) -> None:
    mesh = Gossip(HostReport(0, HostEntry("", "")), (), 60.0)
    fault, killed = Death(0, "exit code 71", (3,)), Death(1, "signal 9")
    others = {"rollout/1": hosted_with(Death(0, "exit code 71", (4,))), "trainer/0": hosted_with(fault)}
    mesh.reports[0] = HostReport(0, HostEntry("", ""), workers={"rollout/0": hosted_with(fault, killed), **others})
    found = compose(record(tmp_path), mesh, "running", 1)
    assert found.bad_gpus == (BadGpu(0, 3, 2),)
    line = next(_findings(found, [], wait_graph([], {})))
    assert line.startswith("GPU 3 of this machine has failed 2 times in this run")
    assert "CUDA_VISIBLE_DEVICES" in line


def hosted_with(*deaths: Death) -> HostedWorker:
    return HostedWorker(False, 1, "running", deaths=deaths)


def test_a_turn_without_news_composes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before, mesh = many(tmp_path, 64)
    composed: list[object] = []

    def counted(*given: object) -> RunRecord:
        composed.append(given)
        return compose(*given)

    monkeypatch.setattr(recording, "compose", counted)
    writer, other = RecordWriter(before, claim(tmp_path)), RecordWriter(before, None)
    for _ in range(3):
        writer.update(mesh, "running", 1, 0.0)
        other.update(mesh, "running", 1, 0.0)
    assert len(composed) == 1
    assert (read_record(tmp_path).state, other.record.state) == ("running", "running")
    mesh.publish(structs.replace(mesh.own, marks={"agent/0": ProcessId(7, 1.0)}))
    writer.update(mesh, "running", 1, 100.0)
    assert len(composed) == 2
    assert read_record(tmp_path).pids["agent/0"] == ProcessId(7, 1.0)


def test_a_record_that_takes_long_to_write_is_not_written_all_the_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before, mesh = many(tmp_path, 64)
    for host in range(40):
        mesh.know(host)
    clock = iter(range(100))
    monkeypatch.setattr(recording, "time", SimpleNamespace(monotonic=lambda: float(next(clock))))
    writer = RecordWriter(before, claim(tmp_path))

    def publish(pid: int, now: float) -> int:
        mesh.publish(structs.replace(mesh.own, marks={"agent/0": ProcessId(pid, 1.0)}))
        writer.update(mesh, "running", 1, now)
        return read_record(tmp_path).pids["agent/0"].pid

    assert publish(7, 20.0) == 7, "at once; it takes a second"
    assert publish(8, 20.0 + SPARE - 0.1) == 7
    writer.update(mesh, "running", 1, 20.0 + SPARE)
    assert read_record(tmp_path).pids["agent/0"].pid == 8, "what was new meanwhile is written as soon as may be"
    assert publish(9, 60.0) == 9


def test_a_record_that_the_disk_refuses_is_written_when_there_is_room(tmp_path: Path) -> None:
    with SmallDisk(tmp_path / "disk") as disk:
        before, mesh = many(disk.folder, 64)
        writer = RecordWriter(before, claim(disk.folder))
        disk.fill()
        writer.update(mesh, "running", 1, 0.0)
        assert not (disk.folder / FILE_NAME).exists()
        disk.free()
        writer.update(mesh, "running", 1, TRY_S)
        assert read_record(disk.folder).state == "running"


def test_the_end_of_a_run_finds_room_on_a_full_disk(tmp_path: Path) -> None:
    with SmallDisk(tmp_path / "disk", size_kb=1024) as disk:
        before, _ = many(disk.folder, 64)
        before.write()
        set_aside(disk.folder)
        disk.fill()
        finish(before, Outcome("failed", 3, Failure("trainer/0", 3, "StepError", "it raised")))
        assert read_record(disk.folder).state == "failed"


def test_a_failure_that_is_not_unicode_can_be_written_and_read(tmp_path: Path) -> None:
    """A message may name a file whose bytes are not UTF-8."""
    path = failure_file(tmp_path, "rollout/0")
    path.parent.mkdir()
    told = {"exit_code": 2, "error": "UserError", "message": "no such file: \udcff", "traceback": ""}
    path.write_text(json.dumps(told))
    failure = explain(tmp_path, "rollout/0", Exit(2))
    structs.replace(record(tmp_path), state="failed", failure=failure).write()
    found = read_record(tmp_path).failure
    assert found is not None
    assert found.message == "no such file: \\udcff"


def test_a_process_that_ended_at_once_can_be_written_and_read(tmp_path: Path) -> None:
    """As when a worker is killed before the agent could look up when it started."""
    child = subprocess.Popen([sys.executable, "-S", "-c", ""])
    child.wait()
    marks = {"rollout/0": process_id(child.pid)}
    structs.replace(record(tmp_path), pids=marks).write()
    assert read_record(tmp_path).pids == marks
    report = HostReport(0, HostEntry("", ""), marks=marks)
    assert from_wire(to_wire(report)) == report


def test_a_worker_that_was_replaced_is_none_any_more_once_its_host_is_silent(tmp_path: Path) -> None:
    hosts = tuple(HostEntry(f"h{n}", f"10.0.0.{n}") for n in (0, 1))
    mesh = Gossip(HostReport(0, hosts[0]), {1}, 60.0)
    before = structs.replace(record(tmp_path), hosts=hosts)
    for host, name in enumerate(("rollout/0", "rollout/1")):
        hosted = {name: HostedWorker(trains=False, threads=1, state="running")}
        wanted = {"rollout": DesiredWorkers((1, 0), {"rollout/0": 0, "rollout/2": 0})}
        mesh.reports[host] = HostReport(host, hosts[host], workers=hosted, wanted=wanted)

    def names() -> list[str]:
        return [entry.name for entry in compose(before, mesh, "running", 1).workers]

    assert names() == ["rollout/0", "rollout/1"], "it may be leaving"
    mesh.silent = lambda for_s=None: frozenset({1})
    assert names() == ["rollout/0"]
