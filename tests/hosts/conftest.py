from __future__ import annotations

import functools
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from tests.hosts.netns import NetHosts, why_not
from tests.launch.hosts.conftest import PYTHON, REPOSITORY, STANDIN

WAIT_S = 120.0


@functools.cache
def reason() -> str | None:
    return why_not()


class Cluster:
    """Three hosts, and `distflow launch` run on the first of them."""

    def __init__(self, net: NetHosts, folder: Path) -> None:
        self.net = net
        self.folder = folder
        self.runs_dir = folder / "runs"
        self.python = folder / "python"
        self.python.write_text(PYTHON.format(python=sys.executable, standin=STANDIN))
        self.python.chmod(0o755)

    def file(self, *lines: str, python: Path | None = None) -> Path:
        path = self.folder / "hosts"
        path.write_text("".join(f"{line} python={python or self.python}\n" for line in lines))
        return path

    def start(self, hosts: Path, *arguments: str, recipe: str = "quickstart") -> subprocess.Popen[str]:
        command = [sys.executable, "-m", "distflow.launch", "launch", recipe, "--hosts", str(hosts)]
        command += ["--ssh-config", str(self.net.ssh_config), "--runs-dir", str(self.runs_dir), *arguments]
        environment = {**os.environ, "PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1"}
        pipe = subprocess.PIPE
        return subprocess.Popen(self.net.command(0, *command), stdout=pipe, stderr=pipe, text=True, env=environment)

    def distflow(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        """A command on the first host."""
        command = self.net.command(0, sys.executable, "-m", "distflow.launch", *arguments)
        environment = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
        return subprocess.run(command, capture_output=True, text=True, env=environment, timeout=WAIT_S, check=False)

    def processes(self) -> list[str]:
        """Command lines of what runs on the hosts, beside sshd."""
        found = []
        for pid in (pid for host in self.net.hosts for pid in self.net.pids(host)):
            with suppress(psutil.Error):
                process = psutil.Process(pid)
                title = " ".join(process.cmdline())
                if "sshd" not in title and process.status() != psutil.STATUS_ZOMBIE:
                    found.append(title)
        return found

    def launch(self, hosts: Path, *arguments: str, recipe: str = "quickstart") -> tuple[int, str, str]:
        head = self.start(hosts, *arguments, recipe=recipe)
        out, err = head.communicate(timeout=WAIT_S)
        return head.returncode, out, err


@pytest.fixture
def shaped(tmp_path: Path) -> Iterator[Cluster]:
    """Four hosts whose links carry 200 Mbit/s."""
    if (why := reason()) is not None:
        pytest.skip(why)
    with NetHosts(4, tmp_path, rate="200mbit") as net:
        yield Cluster(net, tmp_path)


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    if (why := reason()) is not None:
        pytest.skip(why)
    with NetHosts(3, tmp_path) as net:
        yield Cluster(net, tmp_path)
