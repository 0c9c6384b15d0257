"""Hosts that are folders of this machine: an `ssh` that runs commands here, and a Python whose agent is a stand-in."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from distflow.launch.run.process_table import await_end
from tests.warm_start import WarmProcess, door

REPOSITORY = Path(__file__).resolve().parents[3]
STANDIN = str(Path(__file__).with_name("standin_agent.py"))
WARM = f"-S -E {REPOSITORY}/tests/warm_agent.py {door()}"
WAIT_S = 60.0

SSH = """#!/bin/sh
# ssh -G: no host name but the given one. Else: the words before `--` are options, then login and command.
case " $* " in *" -G "*) while [ "$1" != -- ]; do shift; done; echo "hostname $2"; exit 0 ;; esac
while [ "$1" != -- ]; do shift; done
case "${2#*@}" in
  down) echo "ssh: connect to host down port 22: Connection timed out" >&2; exit 255 ;;
  refused) echo "alice@refused: Permission denied (publickey)." >&2; exit 255 ;;
  unknown) echo "Host key verification failed." >&2; exit 255 ;;
esac
echo "Welcome to $2, please behave"
unset PYTHONPATH
cd /
export SSH_CONNECTION="127.0.0.1 5 $(cat {folder}/$2.address 2>/dev/null || echo 127.0.0.1) 22"
exec sh -c "$3"
"""
PYTHON = """#!/bin/sh
if [ "$1 $2" = "-m distflow.launch.agent.agent" ]; then shift 2; exec {python} {agent} "$@"; fi
exec {python} "$@"
"""


def write_python(path: Path, agent: str) -> Path:
    """A Python of a host whose agent is a stand-in (STANDIN), or a real one that the warm server forks (WARM)."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(PYTHON.format(python=sys.executable, agent=agent))
    path.chmod(0o755)
    return path


class Hosts:
    """Runs `distflow launch` against such hosts; each has an address of its own on the loopback device."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.runs_dir = folder / "runs"
        self._write("bin/ssh", SSH.replace("{folder}", str(folder)))
        self.python = write_python(folder / "bin/python", STANDIN)
        self.warm = write_python(folder / "warm_python", WARM)
        self.heads: list[WarmProcess | subprocess.Popen[str]] = []

    def _write(self, name: str, text: str) -> Path:
        path = self.folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        path.chmod(0o755)
        return path

    def environment(self) -> dict[str, str]:
        path = f"{self.folder / 'bin'}:{os.environ['PATH']}"
        return {**os.environ, "PATH": path, "PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1"}

    def file(self, *lines: str) -> Path:
        """A hosts file; every line gets the Python with the stand-in, and the next address."""
        whole = [line if "address=" in line else f"{line} address=127.0.0.{n}" for n, line in enumerate(lines, start=2)]
        path = self.folder / "hosts"
        path.write_text("".join(f"{line} python={self.python}\n" for line in whole))
        return path

    def start(self, hosts: Path, *arguments: str, env: dict[str, str] | None = None) -> WarmProcess:
        command = ["launch", "quickstart", "--hosts", str(hosts), "--runs-dir", str(self.runs_dir), *arguments]
        head = WarmProcess("distflow.launch", command, environment={**self.environment(), **(env or {})})
        self.heads.append(head)
        return head

    def run(self, hosts: Path, *arguments: str, env: dict[str, str] | None = None) -> tuple[int, str, str]:
        head = self.start(hosts, *arguments, env=env)
        out, err = head.communicate(timeout=WAIT_S)
        return head.returncode, out, err

    def processes(self) -> list[psutil.Process]:
        """Everything that was started for these hosts and still runs."""
        found = []
        for process in psutil.process_iter():
            try:
                words = " ".join(process.cmdline())
            except psutil.Error:
                continue
            if str(self.folder) in words and process.pid != os.getpid():
                found.append(process)
        return found

    def end(self) -> None:
        for process in self.processes():
            process.send_signal(signal.SIGKILL)
        await_end(self.processes(), 10.0)
        for head in self.heads:
            if head.poll() is None:
                head.kill()
            head.communicate()


@pytest.fixture
def hosts(tmp_path: Path) -> Iterator[Hosts]:
    made = Hosts(tmp_path)
    yield made
    made.end()
