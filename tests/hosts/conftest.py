from __future__ import annotations

import functools
import os
import subprocess
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from tests.hosts.netns import NetHosts, why_not
from tests.launch.hosts.conftest import REPOSITORY, STANDIN, WARM, write_python
from tests.warm_start import WarmProcess

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
        self.python = write_python(folder / "python", STANDIN)
        self.warm = write_python(folder / "warm_python", WARM)

    def file(self, *lines: str, python: Path | None = None) -> Path:
        path = self.folder / "hosts"
        path.write_text("".join(f"{line} python={python or self.python}\n" for line in lines))
        return path

    def start(self, hosts: Path, *arguments: str, recipe: str = "quickstart") -> WarmProcess:
        command = ["launch", recipe, "--hosts", str(hosts), "--ssh-config", str(self.net.ssh_config)]
        return self._command(*command, "--runs-dir", str(self.runs_dir), *arguments)

    def distflow(self, *arguments: str, host: int = 0) -> subprocess.CompletedProcess[str]:
        """A command on one of the hosts."""
        command = self._command(*arguments, host=host)
        out, err = command.communicate(timeout=WAIT_S)
        return subprocess.CompletedProcess(arguments, command.wait(), out, err)

    def _command(self, *arguments: str, host: int = 0) -> WarmProcess:
        environment = {**os.environ, "PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1"}
        network = f"/run/netns/{self.net.hosts[host].namespace}"
        return WarmProcess("distflow.launch", arguments, environment=environment, network=network)

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
