"""Hosts as network namespaces of this machine: an interface, an address and an sshd each, on one bridge.

    h0 10.77.0.1 ── eth0 ┐
    h1 10.77.0.2 ── eth0 ┼ bridge, in a namespace of its own
    h2 10.77.0.3 ── eth0 ┘

They share the file system, /tmp, /dev/shm and the PID space, and nothing of the network. Needs root, `ip` and sshd.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import time
from dataclasses import dataclass
from itertools import count
from pathlib import Path

SSHD = Path("/usr/sbin/sshd")
START_S = 10.0
_SERIAL = count()


def why_not() -> str | None:
    """Why there can be no namespaces here; None if there can."""
    if os.geteuid() != 0:
        return "needs root for network namespaces"
    lacking = [tool for tool in ("ip", "ssh", "ssh-keygen") if shutil.which(tool) is None]
    lacking += [] if SSHD.exists() else ["sshd (openssh-server)"]
    if lacking:
        return f"needs {', '.join(lacking)}"
    name = f"distflow-{os.getpid()}-try"
    tried = subprocess.run(["ip", "netns", "add", name], capture_output=True, text=True, check=False)
    if tried.returncode != 0:
        return f"needs network namespaces: {tried.stderr.strip()}"
    _run("ip", "netns", "del", name)
    return None


@dataclass(frozen=True, slots=True)
class NetHost:
    """One namespace."""

    name: str
    namespace: str
    address: str


class NetHosts:
    """Use as a context: whatever happens inside, all namespaces and the processes in them go away."""

    def __init__(self, number: int, folder: Path, rate: str | None = None) -> None:
        """`rate`: of every interface in both directions, as tc has it (`1gbit`); None: as fast as it goes."""
        tag = f"distflow-{os.getpid()}-{next(_SERIAL)}"
        self.hosts = [NetHost(f"h{n}", f"{tag}-h{n}", f"10.77.0.{n + 1}") for n in range(number)]
        self.folder = folder
        self.ssh_config = folder / "ssh_config"
        self._switch = f"{tag}-sw"
        self._rate = rate

    def __enter__(self) -> NetHosts:
        try:
            self._build()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *raised: object) -> None:
        for namespace in [*(host.namespace for host in self.hosts), self._switch]:
            _end_processes(namespace)
            subprocess.run(["ip", "netns", "del", namespace], capture_output=True, check=False)

    def command(self, host: int, *words: str) -> list[str]:
        """A command line that runs on a host."""
        return ["ip", "netns", "exec", self.hosts[host].namespace, *words]

    def ssh(self, host: int, to: int, *words: str) -> subprocess.CompletedProcess[str]:
        """From one host to another, as the launcher would."""
        command = self.command(host, "ssh", "-F", str(self.ssh_config), "-oBatchMode=yes", self.hosts[to].name, *words)
        return subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)

    def pids(self, host: NetHost) -> list[int]:
        """Everything that runs on a host."""
        return _pids(host.namespace)

    def unplug(self, host: int) -> None:
        """Take a host's cable out."""
        _run("ip", "-n", self._switch, "link", "set", f"p{host}", "down")

    def plug(self, host: int) -> None:
        """Put it in again."""
        _run("ip", "-n", self._switch, "link", "set", f"p{host}", "up")

    def block(self, host: int, to: int) -> None:
        """Let nothing of `host` get to `to`; what comes from there arrives, and is not answered."""
        _run("ip", "-n", self.hosts[host].namespace, "route", "add", "unreachable", f"{self.hosts[to].address}/32")

    def _build(self) -> None:
        _run("ip", "netns", "add", self._switch)
        _run("ip", "-n", self._switch, "link", "add", "br0", "type", "bridge")
        _run("ip", "-n", self._switch, "link", "set", "br0", "up")
        for number, host in enumerate(self.hosts):
            self._connect(number, host)
        self._make_keys()
        for host in self.hosts:
            self._start_sshd(host)

    def _connect(self, number: int, host: NetHost) -> None:
        port, space = f"p{number}", host.namespace
        _run("ip", "netns", "add", space)
        _run("ip", "link", "add", "eth0", "netns", space, "type", "veth", "peer", "name", port, "netns", self._switch)
        _run("ip", "-n", space, "addr", "add", f"{host.address}/24", "dev", "eth0")
        for interface in ("lo", "eth0"):
            _run("ip", "-n", space, "link", "set", interface, "up")
        _run("ip", "-n", self._switch, "link", "set", port, "master", "br0")
        _run("ip", "-n", self._switch, "link", "set", port, "up")
        for where, interface in ((space, "eth0"), (self._switch, port)) if self._rate is not None else ():
            shaped = ["root", "tbf", "rate", str(self._rate), "burst", "256kb", "latency", "50ms"]
            _run("tc", "-n", where, "qdisc", "add", "dev", interface, *shaped)

    def _make_keys(self) -> None:
        for name in ("host_key", "user_key"):
            _run("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(self.folder / name))
        public = (self.folder / "host_key.pub").read_text()
        known = "".join(f"{host.address} {public}" for host in self.hosts)
        (self.folder / "known_hosts").write_text(known)
        common = (
            "Host *\n  User root\n  IdentitiesOnly yes\n  StrictHostKeyChecking yes\n"
            f"  IdentityFile {self.folder}/user_key\n  UserKnownHostsFile {self.folder}/known_hosts\n"
        )
        names = "".join(f"Host {host.name}\n  HostName {host.address}\n" for host in self.hosts)
        self.ssh_config.write_text(names + common)

    def _start_sshd(self, host: NetHost) -> None:
        Path("/run/sshd").mkdir(exist_ok=True)
        config = self.folder / f"{host.name}.sshd_config"
        config.write_text(
            f"ListenAddress {host.address}\nPort 22\nHostKey {self.folder}/host_key\nPidFile none\n"
            f"AuthorizedKeysFile {self.folder}/user_key.pub\nStrictModes no\nUsePAM no\n"
            "PermitRootLogin yes\nPasswordAuthentication no\nKbdInteractiveAuthentication no\n"
        )
        log = self.folder / f"{host.name}.sshd.log"
        _run("ip", "netns", "exec", host.namespace, str(SSHD), "-f", str(config), "-E", str(log))
        deadline = time.monotonic() + START_S
        # sshd goes into the background a moment before or after it listens.
        while "Server listening" not in (log.read_text() if log.exists() else ""):
            assert time.monotonic() < deadline, f"sshd of {host.name} does not listen: {log}"
            time.sleep(0.02)


def _pids(namespace: str) -> list[int]:
    found = subprocess.run(["ip", "netns", "pids", namespace], capture_output=True, text=True, check=False)
    return [int(pid) for pid in found.stdout.split()]


def _end_processes(namespace: str) -> None:
    for _ in range(50):
        pids = _pids(namespace)
        if not pids:
            return
        for pid in pids:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        time.sleep(0.05)


def _run(*words: str) -> None:
    done: subprocess.CompletedProcess[str] = subprocess.run(words, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{' '.join(words)}: {done.stderr.strip()}"
