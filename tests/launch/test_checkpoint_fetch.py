"""Parts of a checkpoint come from the hosts that have them, or it is said who has which no more."""

from __future__ import annotations

import shutil
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from distflow.cluster.host_report import Saved, Successor, Term
from distflow.comm.keys import key_file, make_keys, write_keys
from distflow.errors import ProtocolError
from distflow.launch.observe import file_client
from distflow.launch.observe.file_client import CheckpointFetch, saved_here
from distflow.launch.observe.file_server import FileServer
from distflow.runtime.checkpoint.commit import examine
from tests.disks import SmallDisk
from tests.launch.conftest import await_that
from tests.runtime.test_checkpoint import save

TERM = Successor(1, 6, 1, ("trainer/0", "trainer/1"), 0, ((1, 6),), "killed")
PARTS = {rank: (f"model-policy-trainer-{rank}.safetensors", f"worker-trainer-{rank}.json") for rank in (0, 1)}


@pytest.fixture
def hosts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """Run folders of two hosts, each with the parts of its own training worker."""
    folders = [tmp_path / "h0", tmp_path / "h1"]
    save(folders[0], 6)
    write_keys(key_file(folders[0]), make_keys())
    shutil.copytree(folders[0], folders[1])
    for host, folder in enumerate(folders):
        for name in PARTS[1 - host]:
            (folder / "checkpoints" / "step_000006" / name).unlink()
    servers = {f"tcp://h{host}": FileServer(folder, list) for host, folder in enumerate(folders)}

    class Client:
        def __init__(self, address: str, keys: object) -> None:
            self._server = servers[address]

        def ask(self, kind: str, body: Mapping[str, Any], timeout_s: float) -> dict[str, Any]:
            assert kind == "files.read"
            try:
                return self._server.read(body)
            except ProtocolError as error:
                return {"error": str(error)}

        def close(self) -> None:
            pass

    monkeypatch.setattr(file_client, "RequestClient", Client)
    return folders


def known(folders: list[Path], *lost: int) -> tuple[dict[int, Term], dict[int, str]]:
    terms = {host: Term(0, checkpoints=saved_here(folder)) for host, folder in enumerate(folders) if host not in lost}
    return terms, {host: f"tcp://h{host}" for host in terms}


def await_ready(gathering: CheckpointFetch, *about: Any) -> None:
    await_that(lambda: not gathering.lacks(TERM, *about) or gathering.fault is not None, "the parts, or why not")


def test_each_host_gets_what_it_lacks(hosts: list[Path]) -> None:
    about = known(hosts)
    assert [one.missing for term in about[0].values() for one in term.checkpoints] == [PARTS[1], PARTS[0]]
    for folder in hosts:
        one = CheckpointFetch(folder, 5.0)
        assert one.lacks(TERM, *about).endswith("of step_000006")
        await_ready(one, *about)
        assert one.fault is None
        assert examine(folder / "checkpoints" / "step_000006")[1] == ""
        assert not list(folder.rglob("*.draft"))


def test_a_host_without_the_checkpoint_gets_all_of_it(hosts: list[Path], tmp_path: Path) -> None:
    about = known(hosts)
    new = tmp_path / "h2"
    write_keys(key_file(new), make_keys())
    one = CheckpointFetch(new, 5.0)
    await_ready(one, *about)
    assert one.fault is None
    assert examine(new / "checkpoints" / "step_000006")[1] == ""


def test_bytes_that_commit_does_not_list_are_not_taken(hosts: list[Path]) -> None:
    about = known(hosts)
    (hosts[1] / "checkpoints" / "step_000006" / PARTS[1][1]).write_text("{}")
    one = CheckpointFetch(hosts[0], 5.0)
    await_ready(one, *about)
    assert "worker-trainer-1.json: tcp://h1: other bytes than COMMIT lists" in str(one.fault)


def test_a_part_that_nobody_has_is_named(hosts: list[Path]) -> None:
    one = CheckpointFetch(hosts[0], 5.0)
    await_ready(one, *known(hosts, 1))
    assert "model-policy-trainer-1.safetensors: no host that can be heard has it" in str(one.fault)


def test_what_is_there_is_not_fetched(hosts: list[Path]) -> None:
    save(hosts[0], 6, term=0)
    assert CheckpointFetch(hosts[0], 5.0).lacks(TERM, {0: Term(0, checkpoints=(Saved(6, 0),))}, {}) == ""


def test_a_commit_that_was_cut_short_is_fetched_anew_or_it_is_said_that_none_can_be_had(hosts: list[Path]) -> None:
    about = known(hosts)
    commits = [folder / "checkpoints" / "step_000006" / "COMMIT" for folder in hosts]
    whole = commits[0].read_bytes()
    commits[0].write_bytes(whole[:40])
    one = CheckpointFetch(hosts[0], 5.0)
    await_ready(one, *about)
    assert one.fault is None
    assert examine(commits[0].parent)[1] == ""
    for commit in commits:
        commit.write_bytes(whole[:40])
    one = CheckpointFetch(hosts[0], 5.0)
    await_ready(one, *about)
    assert "COMMIT: tcp://h0: its COMMIT cannot be read" in str(one.fault)


def test_a_part_that_came_half_is_gone_on_from_unless_it_was_another(
    hosts: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only what is missing travels again."""
    about, name = known(hosts), PARTS[1][0]
    whole = (hosts[1] / "checkpoints" / "step_000006" / name).read_bytes()
    draft = hosts[0] / "checkpoints" / "step_000006" / f"{name}.draft"
    offsets: list[int] = []
    read = FileServer.read

    def count(server: FileServer, body: Mapping[str, Any]) -> dict[str, Any]:
        if str(body["path"]).endswith(name):
            offsets.append(int(body["offset"]))
        return read(server, body)

    monkeypatch.setattr(FileServer, "read", count)
    for begun, first in ((whole[:100], [100]), (b"of another" * 10, [100, len(whole), 0])):
        (hosts[0] / "checkpoints" / "step_000006" / name).unlink(missing_ok=True)
        draft.write_bytes(begun)
        offsets.clear()
        one = CheckpointFetch(hosts[0], 5.0)
        await_ready(one, *about)
        assert one.fault is None
        assert offsets[: len(first)] == first
        assert (hosts[0] / "checkpoints" / "step_000006" / name).read_bytes() == whole


def test_on_a_full_disk_it_waits_for_room_and_goes_on_with_what_has_come(
    hosts: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    part = hosts[1] / "checkpoints" / "step_000006" / PARTS[1][0]
    with SmallDisk(tmp_path / "disk") as disk:
        new = disk.folder / "h2"
        write_keys(key_file(new), make_keys())
        half = new / "checkpoints" / "step_000006" / f"{part.name}.draft"
        half.parent.mkdir(parents=True)
        half.write_bytes(part.read_bytes()[:100])
        disk.fill()
        about = known(hosts)
        one = CheckpointFetch(new, 5.0)
        await_that(lambda: one.lacks(TERM, *about) and one.no_room, "the full disk")
        for _ in range(3):
            one.lacks(TERM, *about)
            time.sleep(0.5)
        assert (one.fault, one.no_room, half.stat().st_size) == (None, True, 100)
        disk.free()
        await_ready(one, *about)
        assert (one.fault, one.no_room) == (None, False)
        assert examine(half.parent)[1] == ""
