"""Hosts as network namespaces of this machine, with an sshd each. Needs root, `ip` and sshd."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Collection
from pathlib import Path

from tests.hosts.bridged import FAST, BridgedHosts, NetHost, pids_in, run, why_no_hosts
from tests.hosts.slow_link import SiteLink

SSHD = Path("/usr/sbin/sshd")
START_S = 10.0


def why_not() -> str | None:
    """Why there can be no such hosts here; None if there can."""
    if not SSHD.exists():
        return "needs sshd (openssh-server)"
    return why_no_hosts(["ssh", "ssh-keygen"])


class NetHosts(BridgedHosts):
    """Use as a context: whatever happens inside, all namespaces and the processes in them go away."""

    def __init__(
        self, number: int, folder: Path, rate: str | None = None, far: Collection[int] = (), link: SiteLink = FAST
    ) -> None:
        """`folder`: for the keys and the configuration of ssh; all else as of BridgedHosts."""
        super().__init__(number, rate, far, link)
        self.folder = folder
        self.ssh_config = folder / "ssh_config"

    def command(self, host: int, *words: str) -> list[str]:
        """A command line that runs on a host."""
        return ["ip", "netns", "exec", self.hosts[host].namespace, *words]

    def ssh(self, host: int, to: int, *words: str) -> subprocess.CompletedProcess[str]:
        """From one host to another, as the launcher would."""
        command = self.command(host, "ssh", "-F", str(self.ssh_config), "-oBatchMode=yes", self.hosts[to].name, *words)
        return subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)

    def pids(self, host: NetHost) -> list[int]:
        """Everything that runs on a host."""
        return pids_in(host.namespace)

    def unplug(self, host: int) -> None:
        """Take a host's cable out."""
        run("ip", "-n", self.switch, "link", "set", f"p{host}", "down")

    def plug(self, host: int) -> None:
        """Put it in again."""
        run("ip", "-n", self.switch, "link", "set", f"p{host}", "up")

    def block(self, host: int, to: int) -> None:
        """Let nothing of `host` get to `to`; what comes from there arrives, and is not answered."""
        run("ip", "-n", self.hosts[host].namespace, "route", "add", "unreachable", f"{self.hosts[to].address}/32")

    def sent(self, host: int) -> int:
        """Bytes that a host has sent to others so far."""
        counter = self.command(host, "cat", "/sys/class/net/eth0/statistics/tx_bytes")
        return int(subprocess.run(counter, capture_output=True, text=True, check=True).stdout)

    def build(self) -> None:
        """And start an sshd on each."""
        super().build()
        self._make_keys()
        for host in self.hosts:
            self._start_sshd(host)

    def _make_keys(self) -> None:
        for name in ("host_key", "user_key"):
            run("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(self.folder / name))
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
        run("ip", "netns", "exec", host.namespace, str(SSHD), "-f", str(config), "-E", str(log))
        deadline = time.monotonic() + START_S
        # sshd goes into the background a moment before or after it listens.
        while "Server listening" not in (log.read_text() if log.exists() else ""):
            assert time.monotonic() < deadline, f"sshd of {host.name} does not listen: {log}"
            time.sleep(0.02)
