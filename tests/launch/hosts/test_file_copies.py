"""Files on the way to a host and back, over the line that the launcher speaks through: pieces, and a copy goes on."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import closing, nullcontext
from pathlib import Path
from typing import Any

import pytest
from msgspec import structs

from distflow.launch.agent import remote_helper
from distflow.launch.agent.remote_helper import write_piece
from distflow.launch.deploy import fan_out, multi_host
from distflow.launch.deploy.fan_out import Fleet, fetch_file, send_file
from distflow.launch.deploy.folder_contents import tar
from distflow.launch.deploy.hostfile import parse_hosts
from distflow.launch.deploy.multi_host import fetch_record, send_parts
from distflow.launch.deploy.ssh import HostFault, Line, ProbeLine, Transport, open_line
from distflow.launch.run.record import FILE_NAME, RunRecord

PIECE = 1000


class Noted:
    """A line that notes what was asked, and is cut after so many pieces."""

    def __init__(self, line: ProbeLine, pieces: int = 1000) -> None:
        self.line = line
        self.left = pieces
        self.asked: list[tuple[str, int]] = []

    def ask(self, verb: str, given: Mapping[str, Any], *, limit_s: float, payload: bytes = b"") -> dict[str, Any]:
        self.asked.append((verb, given["offset"]))
        if verb == "write":
            self.left -= 1
            if self.left < 0:
                raise HostFault("the line to it was cut", "")
        return self.line.ask(verb, given, limit_s=limit_s, payload=payload)

    def close(self) -> None:
        self.line.close()


@pytest.fixture
def line(monkeypatch: pytest.MonkeyPatch) -> Iterator[ProbeLine]:
    monkeypatch.setattr(fan_out, "PIECE_BYTES", PIECE)
    found = open_line(parse_hosts("here", "hosts")[0], Transport(), here=True)
    yield found
    found.close()


@pytest.mark.parametrize("size", [0, 1, PIECE, 5 * PIECE, 5 * PIECE + 17])
def test_a_file_arrives_there_and_comes_back(line: ProbeLine, tmp_path: Path, size: int) -> None:
    source, there, back = tmp_path / "source", tmp_path / "there" / "file", tmp_path / "back" / "file"
    source.write_bytes(os.urandom(size))
    send_file(line, source, there)
    assert there.read_bytes() == source.read_bytes()
    assert [path.name for path in there.parent.iterdir()] == ["file"], "no draft is left"
    fetch_file(line, there, back)
    assert back.read_bytes() == source.read_bytes()


def test_a_copy_goes_on_where_the_last_attempt_ended(line: ProbeLine, tmp_path: Path) -> None:
    source, there = tmp_path / "source", tmp_path / "file"
    source.write_bytes(os.urandom(10 * PIECE))
    with pytest.raises(HostFault, match="was cut"):
        send_file(Noted(line, pieces=7), source, there)
    assert not there.exists(), "it has its name only when it is whole"
    again = Noted(line)
    send_file(again, source, there)
    assert there.read_bytes() == source.read_bytes()
    assert next(offset for verb, offset in again.asked if verb == "write") == 7 * PIECE


def test_what_another_file_has_left_there_is_not_gone_on_from(line: ProbeLine, tmp_path: Path) -> None:
    source, there = tmp_path / "source", tmp_path / "file"
    source.write_bytes(os.urandom(4 * PIECE))
    other = source.read_bytes()[:PIECE] + os.urandom(9 * PIECE)
    (tmp_path / "file.0.draft").write_bytes(other)
    send_file(line, source, there)
    assert there.read_bytes() == source.read_bytes()
    back = tmp_path / "back"
    back.write_bytes(other)
    fetch_file(line, there, back)
    assert back.read_bytes() == source.read_bytes()


def test_hosts_that_share_a_folder_do_not_write_to_one_draft(line: ProbeLine, tmp_path: Path) -> None:
    source, there = tmp_path / "source", tmp_path / "file"
    source.write_bytes(os.urandom(5 * PIECE + 17))

    class Ahead:
        """A line over which the whole file is sent to another host just before each piece."""

        def ask(self, verb: str, given: Mapping[str, Any], *, limit_s: float, payload: bytes = b"") -> dict[str, Any]:
            if verb == "write":
                send_file(line, source, there, 1)
            return line.ask(verb, given, limit_s=limit_s, payload=payload)

        def close(self) -> None:
            line.close()

    send_file(Ahead(), source, there, 2)
    assert there.read_bytes() == source.read_bytes()


def test_a_draft_that_vanishes_meanwhile_is_not_gone_on_from(line: ProbeLine, tmp_path: Path) -> None:
    given = {"path": str(tmp_path / "file"), "draft": str(tmp_path / "file.0.draft"), "offset": 7, "last": True}
    with pytest.raises(HostFault, match="removed or shortened"):
        line.ask("write", given, limit_s=10.0, payload=b"the rest")
    assert not (tmp_path / "file").exists()


def test_a_file_that_vanishes_before_it_is_fetched_leaves_the_earlier_copy(line: ProbeLine, tmp_path: Path) -> None:
    here = tmp_path / "here"
    here.write_bytes(b"what was fetched before")
    with pytest.raises(HostFault, match="No such file"):
        fetch_file(line, tmp_path / "gone", here)
    assert here.read_bytes() == b"what was fetched before"


def test_what_has_come_of_a_checkpoint_outlives_a_launch_that_is_undone(
    line: ProbeLine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a host that had no folder of the run, and only it: keys and recipe go, however often the launch is undone."""
    source, run = tmp_path / "source", tmp_path / "there" / "mine"
    source.write_bytes(os.urandom(10 * PIECE))
    part = run / "checkpoints" / "step_000006" / "part"
    bundle = tar({"run.json": b"{}", "recipe.yaml": b"{}"}, {"keys/run.key": b"secret"}, ("checkpoints", "logs"))

    def launch(pieces: int) -> list[int]:
        with closing(open_line(parse_hosts("here", "hosts")[0], Transport(), here=True)) as there:
            there.ask("unpack", {"folder": str(run), "mode": 0o700}, limit_s=10.0, payload=bundle)
            assert (run / "keys" / "run.key").exists()
            noted = Noted(there, pieces)
            with pytest.raises(HostFault, match="was cut") if pieces < 10 else nullcontext():
                send_file(noted, source, part)
            return [offset for verb, offset in noted.asked if verb == "write"]

    assert launch(3)[0] == 0
    draft = part.with_name("part.0.draft")
    for done, pieces in ((3, 4), (7, 10)):
        assert [path for path in (tmp_path / "there").rglob("*") if path.is_file()] == [draft]
        assert launch(pieces)[0] == done * PIECE
    assert [path for path in run.rglob("*") if path.is_file()] == [part]
    assert part.read_bytes() == source.read_bytes()


def test_nothing_is_left_of_a_launch_that_is_undone_before_any_part_has_come(tmp_path: Path) -> None:
    run = tmp_path / "there" / "mine"
    with closing(open_line(parse_hosts("here", "hosts")[0], Transport(), here=True)) as there:
        bundle = tar({"run.json": b"{}"}, {}, ("checkpoints", "logs"))
        there.ask("unpack", {"folder": str(run), "mode": 0o700}, limit_s=10.0, payload=bundle)
        assert (run / "run.json").exists()
    assert not (tmp_path / "there").exists()


def test_a_large_file_is_written_through_to_the_disk_on_the_way(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So the last piece, which has a limit of time, does not wait for all of it."""
    monkeypatch.setattr(remote_helper, "SYNC_BYTES", 4 * PIECE)
    synced: list[int] = []
    monkeypatch.setattr(remote_helper.os, "fsync", lambda handle: synced.append(os.fstat(handle).st_size))
    there, draft = tmp_path / "file", tmp_path / "file.0.draft"
    for piece in range(10):
        write_piece(str(there), str(draft), piece * PIECE, piece == 9, bytes(PIECE))
    assert synced == [4 * PIECE, 8 * PIECE, 10 * PIECE]
    assert there.stat().st_size == 10 * PIECE


def test_sending_says_how_much_of_it_is_there(
    line: ProbeLine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(multi_host, "TELL_EVERY_S", 0.0)
    monkeypatch.setattr(multi_host, "GIB", PIECE)
    source = tmp_path / "source"
    source.write_bytes(os.urandom(3 * PIECE + 500))
    host = parse_hosts("gpu-2", "hosts")[0]
    with Fleet({0: host}, Answering(line, []), "") as fleet:
        assert fleet.open() == []
        send_parts(fleet, {0: [(source, tmp_path / "there")]})
    assert capsys.readouterr().out.splitlines() == [
        "sending 3.50 GiB of the checkpoint to gpu-2",
        *(f"gpu-2 has {have} of 3.5 GiB of the checkpoint" for have in ("1.0", "2.0", "3.0", "3.5")),
    ]
    assert (tmp_path / "there").read_bytes() == source.read_bytes()


class Answering:
    """A host that has the files that it says it has."""

    here = None

    def __init__(self, line: ProbeLine, names: list[str]) -> None:
        self.line = line
        self.names = names
        self.resolved: Mapping[int, str] = {}

    def open(self, number: int) -> Line:
        return self

    def ask(self, verb: str, given: Mapping[str, Any], *, limit_s: float, payload: bytes = b"") -> dict[str, Any]:
        return {"files": self.names} if verb == "find" else self.line.ask(verb, given, limit_s=limit_s, payload=payload)

    def close(self) -> None:
        """The fixture closes the line."""


def test_only_what_was_asked_for_is_fetched_into_the_run_folder(line: ProbeLine, tmp_path: Path) -> None:
    head, there, stolen = tmp_path / "runs" / "mine", tmp_path / "there", tmp_path / "stolen.jsonl"
    head.mkdir(parents=True)
    wanted = ["metrics/trainer-0.jsonl", "workers/rollout-1.failure.json"]
    others = ["../up.jsonl", "metrics/../../up.jsonl", str(stolen), "keys/run.key", "metrics/x/y.jsonl", "metrics/.."]
    for name in [*wanted, *others[:2], *others[3:5]]:
        (there / name).parent.mkdir(parents=True, exist_ok=True)
        (there / name).write_text("of the host")
    RunRecord("mine", str(there), 40, (), {}, 30.0, 3, state="done").write()
    hosts = dict(enumerate(parse_hosts("here", "hosts")))
    found = fetch_record(hosts, Answering(line, [*others, FILE_NAME, *wanted]), {0: there}, head)
    assert found is not None
    assert (found.state, found.path) == ("done", head)
    files = {str(path.relative_to(head.parent)) for path in head.parent.rglob("*") if path.is_file()}
    assert files == {f"mine/{name}" for name in [*wanted, FILE_NAME]}
    assert not stolen.exists()


def test_a_record_that_was_cut_off_on_the_way_is_none(line: ProbeLine, tmp_path: Path) -> None:
    head, there = tmp_path / "head", tmp_path / "there"
    for folder in (head, there):
        folder.mkdir()
    known = RunRecord("mine", str(head), 40, (), {}, 30.0, 3, state="running")
    known.write()
    structs.replace(known, run_dir=str(there), renewed="x" * 3 * PIECE).write()

    class Cut(Answering):
        def ask(self, verb: str, given: Mapping[str, Any], *, limit_s: float, payload: bytes = b"") -> dict[str, Any]:
            if verb == "read" and given["offset"]:
                raise HostFault("the line to it was cut", "")
            return super().ask(verb, given, limit_s=limit_s)

    hosts = dict(enumerate(parse_hosts("here", "hosts")))
    assert fetch_record(hosts, Cut(line, [FILE_NAME]), {0: there}, head) is None
    assert [path.name for path in head.iterdir()] == [FILE_NAME]
