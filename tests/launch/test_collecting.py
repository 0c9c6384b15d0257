"""Large checkpoints on their way between hosts with run folders of their own: drafts, progress, time, a full disk."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from distflow.launch.cli import run as distflow
from distflow.launch.observe import file_sync
from distflow.launch.observe.file_client import FileClient, saved_here
from distflow.launch.observe.file_sync import FileSync, refresh
from distflow.runtime.checkpoint.commit import examine, fingerprint
from tests.disks import SmallDisk
from tests.launch.conftest import await_that, environment
from tests.launch.many import Hosts
from tests.runtime.test_checkpoint import save

LONG = {"steps": 10_000}
MIB = 1 << 20
PART = "model-policy-trainer-1.safetensors"


@pytest.fixture
def going(tmp_path: Path) -> Iterator[Callable[..., Hosts]]:
    made: list[Hosts] = []

    def make(hosts: int = 2) -> Hosts:
        workers = {f"trainer/{host}": (host, LONG) for host in range(hosts)}
        run = Hosts(tmp_path, workers, shared=False)
        made.append(run)
        run.start()
        run.await_up()
        await_that(lambda: all(entry.agent and entry.nonce for entry in run.record().hosts), "all agents in run.json")
        return run

    yield make
    for run in made:
        run.end()


def leave(run: Hosts, size: int, step: int = 4) -> Path:
    """A checkpoint on the second host, with a part of this size; returns the part."""
    folder = run.folders[1] / "checkpoints" / f"step_{step:06d}"
    folder.mkdir(parents=True)
    with (folder / PART).open("wb") as file:
        file.write(os.urandom(MIB))
        file.truncate(size)
    (folder / "COMMIT").write_text(f'{{"step": {step}}}')
    return folder / PART


def stopped_on_the_way(run: Hosts, mirror: FileSync) -> None:
    """Stop the second host's agent when some of the checkpoint has come."""

    def watch() -> None:
        end = time.monotonic() + 30.0
        while time.monotonic() < end:
            if (collecting := mirror.collecting) is not None and collecting["bytes"] > MIB:
                os.kill(run.agents[1].pid, signal.SIGSTOP)
                return
            time.sleep(0.001)

    threading.Thread(target=watch, daemon=True).start()


def test_a_part_that_came_half_is_a_draft_which_is_gone_on_with(
    going: Callable[..., Hosts], monkeypatch: pytest.MonkeyPatch
) -> None:
    run = going()
    part = leave(run, 96 * MIB)
    copy = run.folders[0] / part.relative_to(run.folders[1])
    mirror = FileSync(run.record(), [1], 1.0)
    stopped_on_the_way(run, mirror)
    mirror.fetch(["checkpoints"])
    assert mirror.faults == {"node1": "does not answer"}
    assert mirror.collecting is None
    assert not copy.exists()
    assert not copy.with_name("COMMIT").exists()
    (draft,) = copy.parent.glob(f"{PART}.*.draft")
    have = draft.stat().st_size
    assert MIB < have < 96 * MIB
    begun: list[int] = []
    whole_copy = FileClient.copy

    def note(self: FileClient, path: str, to: Path, have: int = 0, *rest: Any) -> None:
        if to == draft:
            begun.append(have)
        whole_copy(self, path, to, have, *rest)

    monkeypatch.setattr(FileClient, "copy", note)
    os.kill(run.agents[1].pid, signal.SIGCONT)
    mirror = FileSync(run.record(), [1], 20.0)
    mirror.fetch(["checkpoints"])
    assert (mirror.faults, begun) == ({}, [have])
    assert sorted(path.name for path in copy.parent.iterdir()) == ["COMMIT", PART]
    assert copy.read_bytes() == part.read_bytes()


def test_what_another_term_has_left_of_a_part_is_not_gone_on_with(going: Callable[..., Hosts]) -> None:
    """Two terms may save the same training step, in files that begin with the same bytes and are equally long."""
    run = going()
    part = leave(run, 4 * MIB)
    copy = run.folders[0] / part.relative_to(run.folders[1])
    mirror = FileSync(run.record(), [1], 20.0)
    mirror.fetch(["checkpoints"])
    assert copy.read_bytes() == part.read_bytes()
    with part.open("r+b") as file:
        file.seek(2 * MIB)
        file.write(b"of another term")
    part.with_name("COMMIT").write_text('{"step": 4, "term": 1}')
    mirror.fetch(["checkpoints"])
    assert copy.read_bytes() == part.read_bytes()
    assert copy.with_name("COMMIT").read_text() == '{"step": 4, "term": 1}'


def test_a_checkpoint_that_stays_incomplete_at_the_end_keeps_its_commit(going: Callable[..., Hosts]) -> None:
    """So that it is known what is missing; half of a part does not count as one."""
    run = going()
    source = save(run.folders[1], 4)
    with (source / PART).open("ab") as file:
        file.truncate(96 * MIB)
    mirror = FileSync(run.record(), [1], 1.0)
    stopped_on_the_way(run, mirror)
    mirror.fetch(["checkpoints"], final=True)
    os.kill(run.agents[1].pid, signal.SIGCONT)
    (saved,) = saved_here(run.folders[0])
    assert (saved.step, PART in saved.missing) == (4, True)


def test_the_first_agent_says_how_much_of_the_last_checkpoint_it_has(
    going: Callable[..., Hosts], capsys: pytest.CaptureFixture[str]
) -> None:
    run = going()
    part = leave(run, 256 * MIB)
    watched: list[int] = []
    watch = threading.Thread(
        target=lambda: watched.append(distflow(["watch", "--runs-dir", str(run.folders[0].parent)])), daemon=True
    )
    watch.start()
    assert "collecting" not in (run.ask(0, "status", {}) or {})
    run.ask(0, "stop", {"reason": "test"})
    told: list[dict[str, Any]] = []

    def collecting() -> bool:
        answer = run.ask(0, "status", {}) or {}
        told.extend([answer["collecting"]] if "collecting" in answer and answer["collecting"]["bytes"] else [])
        return bool(told)

    await_that(collecting, "the progress of collecting")
    os.kill(run.agents[1].pid, signal.SIGSTOP)
    time.sleep(4.0)  # longer than `watch` waits before it asks again
    os.kill(run.agents[1].pid, signal.SIGCONT)
    assert (told[0]["checkpoint"], told[0]["total"], told[0]["from"]) == ("step_000004", 256 * MIB, "node1")
    assert 0 < told[0]["bytes"] <= 256 * MIB
    assert run.exit_codes() == [130, 130]
    assert (run.folders[0] / part.relative_to(run.folders[1])).read_bytes() == part.read_bytes()
    watch.join(20)
    said = capsys.readouterr()
    assert "collecting checkpoint step_000004 from node1: 0." in said.out + said.err
    assert watched == [130]


def test_an_export_that_is_interrupted_ends_though_pieces_keep_coming(going: Callable[..., Hosts]) -> None:
    run = going()
    part = leave(run, 8192 * MIB)
    command = [sys.executable, "-m", "distflow.launch", "export", "--to", "there"]
    export = subprocess.Popen(
        [*command, "--runs-dir", str(run.folders[0].parent)], cwd=run.folders[0], env=environment()
    )
    try:
        folder = (run.folders[0] / part.relative_to(run.folders[1])).parent
        await_that(
            lambda: any(draft.stat().st_size > MIB for draft in folder.glob(f"{PART}.*.draft")), "a piece of the part"
        )
        export.send_signal(signal.SIGINT)
        assert export.wait(10.0) == 130
    finally:
        export.kill()
        export.wait()


def test_a_silent_host_does_not_use_up_the_time_of_the_others(
    going: Callable[..., Hosts], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(file_sync, "LOOK_S", 2.0)
    run = going(3)
    os.kill(run.agents[1].pid, signal.SIGSTOP)
    try:
        faults = refresh(run.folders[0], ("logs",), "logs")
    finally:
        os.kill(run.agents[1].pid, signal.SIGCONT)
    assert faults == ["node1 does not answer: its logs may be missing"]
    assert (run.folders[0] / "logs" / "trainer-2.log").read_bytes()


def test_a_host_of_which_not_all_came_in_time_is_not_called_silent(
    going: Callable[..., Hosts], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(file_sync, "LOOK_S", 0.5)
    run = going()
    with (run.folders[1] / "logs" / "trainer-1.log.1").open("wb") as file:
        file.truncate(2048 * MIB)
    assert refresh(run.folders[0], ("logs",), "logs") == ["node1: not all of it came in time: run it again"]


def test_a_pool_waits_for_room_for_the_parts_that_it_goes_on_from(tmp_path: Path) -> None:
    """There is room for small files, but not for a part."""
    with SmallDisk(tmp_path / "runs-1", size_kb=4096) as disk:
        run = Hosts(tmp_path, {"trainer/0": (0, LONG), "trainer/1": (1, LONG)}, shared=False)
        try:
            source = save(run.folders[0], 4)
            (source / PART).write_bytes(os.urandom(2 * MIB))
            commit = msgspec.json.decode((source / "COMMIT").read_bytes())
            commit["parts"][PART] = fingerprint(source / PART)
            (source / "COMMIT").write_bytes(msgspec.json.encode(commit))
            run.start()
            run.await_up()
            (disk.folder / ".ballast").write_bytes(bytes(3 * MIB))
            os.kill(run.pid("trainer/1"), signal.SIGKILL)
            await_that(lambda: run.record().waits_for == "room on the disk of node1", "the wait for room")
            time.sleep(2.5)
            assert run.record().waits_for == "room on the disk of node1"
            assert not run.record().over
            disk.free()
            for name in ("trainer/0", "trainer/1"):
                run.await_log(name, f"{name} incarnation 1 is up")
            copy = run.folders[1] / source.relative_to(run.folders[0])
            assert examine(copy)[1] == ""
            assert not list(copy.glob("*.draft"))
        finally:
            run.end()
