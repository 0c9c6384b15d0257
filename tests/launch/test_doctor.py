"""The report on this machine: levels, cures, and what dead runs leave."""

from __future__ import annotations

import fcntl
import json
import mmap
import os
import resource
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from distflow.launch.agent.host_facts import PythonFacts, unwritable
from distflow.launch.cli import run as distflow
from distflow.launch.commands import doctor
from distflow.launch.commands.doctor import (
    TorchProbe,
    check_leftovers,
    check_open_files,
    check_packages,
    check_python,
    check_tools,
    dead_segments,
    dead_sockets,
    lost_processes,
    pinned_versions,
)
from distflow.launch.deploy.host_checks import Threshold
from distflow.launch.deploy.interpreter_check import requirements
from tests.launch.conftest import await_that


def old(path: Path) -> Path:
    os.utime(path, (0, 0))
    return path


def test_this_machine_runs_the_tests_so_nothing_fails(tmp_path, capsys):
    assert distflow(["doctor", "--json", "--runs-dir", str(tmp_path / "not" / "yet")]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["ok"]
    names = [finding["name"] for finding in told["findings"]]
    for name in (
        "python",
        "packages",
        "torch",
        "CPUs",
        "memory",
        "shared memory",
        "disk",
        "run folder",
        "open files",
        "leftovers",
    ):
        assert name in names
    for finding in told["findings"]:
        assert finding["level"] in ("OK", "WARN")
        assert bool(finding["hint"]) == (finding["level"] == "WARN"), finding


def test_a_failure_is_shown_with_its_cure_and_exit_code(monkeypatch, capsys):
    monkeypatch.setattr(doctor, "requirements", lambda: [Requirement("no-such-package>=3")])
    assert distflow(["doctor"]) == 2
    out = capsys.readouterr().out
    assert "FAIL  packages " in out
    assert "needed: no-such-package>=3 (found: nothing)" in out
    assert "→ " in out
    assert "pip install 'no-such-package>=3'" in out
    assert "1 failures" in out.splitlines()[-1]


def test_old_and_untested_packages_are_told_apart():
    python = PythonFacts(packages={"pytest": "8.1"})
    (missing,) = check_packages([Requirement("pytest>=999")], python, {})
    assert (missing.level, "needed: pytest>=999 (found: " in missing.text) == ("FAIL", True)
    fine, other = check_packages([Requirement("pytest")], python, {"pytest": "1.0"})
    assert (fine.level, other.level) == ("OK", "WARN")
    assert other.text.endswith("(tested: 1.0)")
    assert {"torch", "numpy"} <= {need.name for need in requirements()}
    assert "torch" in pinned_versions(gpu=False)


def test_torch_is_asked_in_a_process_with_a_time_limit(monkeypatch):
    monkeypatch.setattr(doctor, "TORCH_PROGRAM", "import time; time.sleep(600)")
    monkeypatch.setattr(doctor, "TORCH_S", 0.2)
    slow = TorchProbe().finding("2.13.0", 0)
    assert (slow.level, "not imported within 0.2 s" in slow.text) == ("WARN", True)
    monkeypatch.setattr(doctor, "TORCH_S", 30.0)
    monkeypatch.setattr(doctor, "TORCH_PROGRAM", "import no_such_library_of_torch")
    broken = TorchProbe().finding("2.13.0", 0)
    assert broken.level == "FAIL"
    assert "cannot be imported: ModuleNotFoundError: No module named 'no_such_library_of_torch'" in broken.text


def test_what_is_too_little_is_named_by_degree(tmp_path):
    assert [Threshold(10, 2).level(found) for found in (10, 9, 2, 1)] == ["OK", "WARN", "WARN", "FAIL"]
    assert unwritable(tmp_path) is None
    assert unwritable(tmp_path / "no") == f"nothing can be created in {tmp_path}/no: No such file or directory"
    infinite = resource.RLIM_INFINITY
    assert [check_open_files(limits).level for limits in ((infinite, infinite), (512, infinite), (64, 64))] == [
        "OK",
        "WARN",
        "FAIL",
    ]
    assert check_python((3, 9, 1)).level == "FAIL"
    assert [finding.name for finding in check_tools()] == ["ssh", "sshd", "sbatch"]


@pytest.fixture
def short_folder() -> Iterator[Path]:
    """The path of a Unix socket must be short."""
    folder = Path(f"/tmp/df-test-{os.getpid()}")
    folder.mkdir()
    yield folder
    shutil.rmtree(folder)


def test_sockets_that_nobody_listens_on(short_folder: Path):
    dead, alive, young = (short_folder / f"distflow-{os.getuid()}-{name}" for name in ("dead", "alive", "young"))
    for folder in (dead, alive, young):
        folder.mkdir()
        with socket.socket(socket.AF_UNIX) as gone:
            gone.bind(str(folder / "trainer-0"))
    with socket.socket(socket.AF_UNIX) as door:
        door.bind(str(alive / "rollout-0"))
        door.listen()
        old(dead), old(alive)
        (found,) = dead_sockets(short_folder)
    assert (found.level, found.hint) == ("WARN", f"rm -r {dead}")
    texts = [finding.text for finding in check_leftovers(short_folder, short_folder / "none")]
    assert f"sockets {dead}: nothing listens there" in texts


def test_many_leftovers_of_a_kind_are_one_line_with_the_command_that_removes_them(
    short_folder: Path, monkeypatch, capsys
):
    segments = short_folder / "shm"
    segments.mkdir()
    dead = [short_folder / f"distflow-{os.getuid()}-{n}" for n in range(5)]
    unused = [segments / f"distflow-{n}" for n in range(2)]
    for path in (*dead, *unused):
        path.mkdir() if path in dead else path.write_text("weights")
        old(path)
    monkeypatch.setattr(doctor, "lost_processes", lambda: iter(()))
    monkeypatch.setattr(doctor, "check_leftovers", lambda: check_leftovers(short_folder, segments))
    assert distflow(["doctor"]) == 0
    told = capsys.readouterr().out
    lines = told.splitlines()
    (at,) = [n for n, line in enumerate(lines) if "5 socket folders of dead runs" in line]
    assert lines[at].endswith(f"{dead[0]}, {dead[1]}, {dead[2]}, …")
    assert not any(str(path) in told for path in dead[3:])
    assert all(f"shared segment {path} " in told for path in unused), "few are named"
    assert distflow(["doctor", "--json"]) == 0
    found = capsys.readouterr().out
    assert sum(one["name"] == "leftovers" for one in json.loads(found)["findings"]) == 7
    command = lines[at + 1].partition("→ ")[2].partition(" removes them")[0].removeprefix("distflow doctor --json | ")
    subprocess.run(command, shell=True, input=found, text=True, check=True, timeout=60)
    assert not any(path.exists() for path in dead)
    assert all(path.exists() for path in unused)


def test_files_for_exit_codes_that_nobody_will_write(tmp_path: Path):
    dead, alive, young = (tmp_path / f"distflow-{os.getuid()}-{name}.exit" for name in ("dead", "alive", "young"))
    for path in (dead, alive, young):
        path.touch()
    old(dead), old(alive)
    with alive.open("rb") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        (found,) = dead_sockets(tmp_path)
    assert (found.text, found.hint) == (f"job {dead}: the process that created it is gone", f"rm -r {dead}")


def test_segments_that_nobody_maps(tmp_path: Path):
    used, unused = tmp_path / "distflow-run-1-used", tmp_path / "distflow-run-1-unused"
    for path in (used, unused, tmp_path / "distflow-run-1-young"):
        path.write_bytes(b"x" * 4096)
    with used.open("r+b") as file, mmap.mmap(file.fileno(), 4096):
        old(used), old(unused)
        (found,) = dead_segments(tmp_path)
    assert found.hint == f"rm -r {unused}"


def test_processes_whose_run_is_over(fake_run):
    run = fake_run({"trainer/0": {"steps": 10_000}})
    run.start()
    run.await_up("trainer/0")
    mine = [finding for finding in lost_processes() if str(run.run_dir) in finding.text]
    assert mine == [], "a run that goes on leaves nothing"
    program = "import setproctitle, sys; setproctitle.setproctitle('distflow gone rollout/0'); sys.stdin.read()"
    logs = run.run_dir.parent / "gone" / "logs"
    logs.mkdir(parents=True)
    with (logs / "rollout-0.log").open("w") as log:
        lost = subprocess.Popen([sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=log)
    try:
        await_that(lambda: any(str(logs.parent) in finding.text for finding in lost_processes()), "a lost process")
        (found,) = (finding for finding in lost_processes() if str(logs.parent) in finding.text)
    finally:
        lost.communicate()
    assert found.text == f"process {lost.pid} (distflow gone rollout/0): its run in {logs.parent} is over"
    assert found.hint == f"kill {lost.pid}"
