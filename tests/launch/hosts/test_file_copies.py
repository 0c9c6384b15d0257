"""Files on the way to a host and back, over the line that the launcher speaks through: pieces, and a copy goes on."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from distflow.launch.deploy import fan_out
from distflow.launch.deploy.fan_out import fetch_file, send_file
from distflow.launch.deploy.hostfile import parse_hosts
from distflow.launch.deploy.ssh import HostFault, ProbeLine, Transport, open_line

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
