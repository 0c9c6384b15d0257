"""A kept process ends with its parent, and everything that it has started with it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import psutil

from distflow.comm.kept_process import OUTPUT_BYTES, KeptProcess
from tests.polling import eventually

ENTRY = "tests.comm.kept_children:"


def helpers_of(folder: Path) -> list[psutil.Process]:
    """Live processes that name the folder in their command line, whoever their parents are."""
    every = psutil.process_iter(["cmdline"])
    return [process for process in every if any(str(folder) in word for word in process.info["cmdline"] or [])]


def start(function: str, *arguments: str, folder: Path) -> KeptProcess:
    return KeptProcess(ENTRY + function, arguments, f"test {folder}", folder / "output.log")


def test_helpers_in_sessions_of_their_own_end_with_the_child(tmp_path: Path) -> None:
    process = start("with_helpers", str(tmp_path), "yes", folder=tmp_path)
    eventually(lambda: process.ended, "its end")
    assert process.code == 7
    assert helpers_of(tmp_path) == []
    process.close()


def test_helpers_end_when_the_child_is_killed(tmp_path: Path) -> None:
    process = start("with_helpers", str(tmp_path), "no", folder=tmp_path)
    eventually(process.read, "the helpers")
    assert len(helpers_of(tmp_path)) >= 4
    process.close()
    assert process.ended
    assert helpers_of(tmp_path) == []


def test_all_of_it_ends_when_the_parent_is_killed(tmp_path: Path) -> None:
    program = f"from tests.comm.kept_children import parent_of_helpers; parent_of_helpers({str(tmp_path)!r})"
    parent = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE)
    assert parent.stdout is not None
    assert parent.stdout.readline() == b"started\n"
    assert len(helpers_of(tmp_path)) >= 4
    parent.kill()
    parent.wait()
    parent.stdout.close()
    eventually(lambda: not helpers_of(tmp_path), "the end of all of them")


def test_what_it_is_told_arrives_whole_or_not_in_time(tmp_path: Path) -> None:
    """A pipe has room for 64 KiB at most."""
    process = start("echoes", folder=tmp_path)
    assert process.tell(bytes(1_000_000) + b"\n", 20.0)
    assert eventually(process.read, "its report") == [b'{"read": 1000001}']
    assert not process.tell(bytes(1_000_000), 0.1)
    process.kill()
    eventually(lambda: process.ended, "its end")
    assert not process.tell(b"\n")
    process.close()


def test_what_it_prints_is_bounded(tmp_path: Path) -> None:
    process = start("floods", folder=tmp_path)
    output = tmp_path / "output.log"
    eventually(lambda: output.exists() and output.stat().st_size > OUTPUT_BYTES, "the limit")
    size = output.stat().st_size
    # It goes on printing, and is not held up by that.
    assert not process.ended
    process.close()
    assert output.stat().st_size == size
    assert output.read_bytes().endswith(b"[further output is dropped]\n")
    again = start("finishes", folder=tmp_path)
    eventually(again.read, "its report")
    again.finish()
    eventually(lambda: again.ended, "its end")
    assert again.code == 3
    assert output.stat().st_size == 0
    again.close()
