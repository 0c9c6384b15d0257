"""Hosts as network namespaces of this machine: an interface and an address each, on one bridge.

    h0 10.77.0.1 ── eth0 ┐
    h1 10.77.0.2 ── eth0 ┼ bridge, in a namespace of its own
    h2 10.77.0.3 ── eth0 ┘

Hosts of two sites are on a bridge each, with a slow link between them (`slow_link.py`).

They share the file system, /tmp, /dev/shm and the PID space, and nothing of the network. Needs root and `ip`.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import time
from collections.abc import Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import count
from multiprocessing.process import BaseProcess
from typing import Self

from distflow.errors import DistflowError, UserError
from tests.hosts.slow_link import SiteLink, carry, open_tap

_SERIAL = count()
_END_TRIES = 50
_END_S = 5.0
FAST = SiteLink(1e9, 0.0)
UNITS = {"kbit": 1e3, "mbit": 1e6, "gbit": 1e9}


class HostsFailed(DistflowError):
    """Namespaces could not be set up."""


@dataclass(frozen=True, slots=True)
class NetHost:
    """One namespace."""

    name: str
    namespace: str
    address: str

    @property
    def network(self) -> str:
        """The file of its namespace."""
        return f"/run/netns/{self.namespace}"


def why_no_hosts(tools: Sequence[str] = ()) -> str | None:
    """Why there can be no namespaces here, or none with these programs; None if there can."""
    if os.geteuid() != 0:
        return "needs root for network namespaces"
    lacking = [tool for tool in ("ip", *tools) if shutil.which(tool) is None]
    if lacking:
        return f"needs {', '.join(lacking)}"
    name = f"distflow-{os.getpid()}-try"
    tried = subprocess.run(["ip", "netns", "add", name], capture_output=True, text=True, check=False)
    if tried.returncode != 0:
        return f"needs network namespaces: {tried.stderr.strip()}"
    run("ip", "netns", "del", name)
    return None


def bits_per_second(rate: str) -> float:
    """Of a rate as tc has it; raises UserError for another one."""
    number, unit = rate.rstrip("abcdefghijklmnopqrstuvwxyz"), rate.lstrip("0123456789.")
    if unit not in UNITS or not number.replace(".", "", 1).isdigit():
        raise UserError(f"a rate of {rate!r}: expected a number and {', '.join(UNITS)}, such as 200mbit")
    return float(number) * UNITS[unit]


class BridgedHosts:
    """Use as a context: whatever happens inside, all namespaces and the processes in them go away."""

    def __init__(self, number: int, rate: str | None = None, far: Collection[int] = (), link: SiteLink = FAST) -> None:
        """`rate`: of every interface in both directions, as tc has it (`1gbit`); None: as fast as it goes.

        `far`: the hosts of a second site, which `link` joins to the first.
        """
        tag = f"distflow-{os.getpid()}-{next(_SERIAL)}"
        self.hosts = [NetHost(f"h{n}", f"{tag}-h{n}", f"10.77.0.{n + 1}") for n in range(number)]
        self.switch = f"{tag}-sw"
        self._rate = rate
        self._far = frozenset(far)
        self._link = link
        self._carrier: BaseProcess | None = None
        self._ends: list[str] = []

    def __enter__(self) -> Self:
        try:
            self.build()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *raised: object) -> None:
        if self._carrier is not None:
            self._carrier.terminate()
            self._carrier.join(_END_S)
        for namespace in [*(host.namespace for host in self.hosts), self.switch]:
            _end_processes(namespace)
            subprocess.run(["ip", "netns", "del", namespace], capture_output=True, check=False)

    def build(self) -> None:
        """Make the bridge and connect all hosts to it."""
        run("ip", "netns", "add", self.switch)
        bridges = ["br0", "br1"] if self._far else ["br0"]
        for bridge in bridges:
            run("ip", "-n", self.switch, "link", "add", bridge, "type", "bridge")
            run("ip", "-n", self.switch, "link", "set", bridge, "up")
        for number, host in enumerate(self.hosts):
            self._connect(number, host)
        if self._far:
            self._join(bridges)

    def _join(self, bridges: Sequence[str]) -> None:
        """Join the bridges of two sites by the slow link."""
        ends = []
        for bridge in bridges:
            # A TAP device begins in the namespace of who makes it, so its name must be free there.
            name = f"df{os.getpid() % 10**6}-{next(_SERIAL)}"
            ends.append(open_tap(name))
            self._ends.append(name)
            run("ip", "link", "set", name, "netns", self.switch)
            run("ip", "-n", self.switch, "link", "set", name, "master", bridge)
            run("ip", "-n", self.switch, "link", "set", name, "up")
        self._carrier = carry((ends[0], ends[1]), self._link)
        for end in ends:
            os.close(end)

    def _connect(self, number: int, host: NetHost) -> None:
        port, space = f"p{number}", host.namespace
        run("ip", "netns", "add", space)
        run("ip", "link", "add", "eth0", "netns", space, "type", "veth", "peer", "name", port, "netns", self.switch)
        run("ip", "-n", space, "addr", "add", f"{host.address}/24", "dev", "eth0")
        for interface in ("lo", "eth0"):
            run("ip", "-n", space, "link", "set", interface, "up")
        run("ip", "-n", self.switch, "link", "set", port, "master", "br1" if number in self._far else "br0")
        run("ip", "-n", self.switch, "link", "set", port, "up")
        for where, interface in ((space, "eth0"), (self.switch, port)) if self._rate is not None else ():
            shaped = ["root", "tbf", "rate", str(self._rate), "burst", "256kb", "latency", "50ms"]
            run("tc", "-n", where, "qdisc", "add", "dev", interface, *shaped)

    def crossed(self) -> tuple[int, int]:
        """Bytes that have left the first site for the second so far, and the other way round."""
        first, second = [
            int(run("ip", "netns", "exec", self.switch, "cat", f"/sys/class/net/{end}/statistics/tx_bytes"))
            for end in self._ends
        ]
        return first, second


def pids_in(namespace: str) -> list[int]:
    """Everything that runs in a namespace."""
    found = subprocess.run(["ip", "netns", "pids", namespace], capture_output=True, text=True, check=False)
    return [int(pid) for pid in found.stdout.split()]


def run(*words: str) -> str:
    """Run a command, and return what it prints; raises HostsFailed with what it says."""
    done: subprocess.CompletedProcess[str] = subprocess.run(words, capture_output=True, text=True, check=False)
    if done.returncode:
        raise HostsFailed(f"{' '.join(words)}: {done.stderr.strip()}")
    return done.stdout


def _end_processes(namespace: str) -> None:
    for _ in range(_END_TRIES):
        pids = pids_in(namespace)
        if not pids:
            return
        for pid in pids:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.05)
