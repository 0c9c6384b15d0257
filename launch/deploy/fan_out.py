"""Requests to all hosts of a run at once over a connection to each: answers, and hosts that do not answer."""

from __future__ import annotations

import base64
import hashlib
import ipaddress
import socket
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO, Protocol, Self, TypeVar

import psutil

from distflow.errors import Problem
from distflow.launch.agent.host_facts import HostFacts
from distflow.launch.deploy.host_checks import Needs, facts_from
from distflow.launch.deploy.hostfile import Host, HostsError
from distflow.launch.deploy.ssh import HostFault, Line, ProbeLine, Transport, open_line

AT_ONCE = 128
CLOCK_ROUNDS = 5
ASK_S = 30.0
DESCRIBE_S = 120.0
"""The Python of a pool may be on a slow disk."""
LINKS_S = 60.0
PIECE_BYTES = 4 << 20
PIECE_S = 60.0
"""Limit for one piece of a file: enough for 0.6 Mbit/s, or for a faster link that is down for a while."""
NOTHING: Mapping[int, bytes] = {}

Note = Callable[[int, Path, int], None]
"""Is told how many bytes of a file a host has."""

_Answer = TypeVar("_Answer")


class Ways(Protocol):
    """How the hosts of a run are reached."""

    here: int | None
    """Number of the host that is this machine; None: none is."""
    resolved: Mapping[int, str]
    """Name or address of each host, as known before any host is contacted."""

    def open(self, number: int) -> Line:
        """Connect to a host; raises HostFault."""
        ...


class SshWays:
    """By ssh, or directly for the host that is this machine. Creating it contacts no host."""

    def __init__(self, hosts: Mapping[int, Host], transport: Transport) -> None:
        self._hosts = hosts
        self._transport = transport
        with ThreadPoolExecutor(max_workers=AT_ONCE) as pool:
            names = pool.map(transport.resolve, hosts.values())
            self.resolved: Mapping[int, str] = dict(zip(hosts, names, strict=True))
        own = own_addresses()
        own_names = {"localhost", socket.gethostname(), socket.getfqdn()}
        mine = [n for n, name in self.resolved.items() if name in own_names or addresses_of(name) & own]
        self.here = mine[0] if mine else None

    def open(self, number: int) -> ProbeLine:
        """Connect to a host; raises HostFault."""
        return open_line(self._hosts[number], self._transport, here=number == self.here)


class Fleet:
    """Connections to hosts, by number. A context manager: on exit every host undoes what was not to be kept."""

    def __init__(self, hosts: Mapping[int, Host], ways: Ways, nonce: str) -> None:
        self.hosts = dict(hosts)
        self.ways = ways
        self.nonce = nonce
        self._lines: dict[int, Line] = {}
        self._pool = ThreadPoolExecutor(max_workers=min(AT_ONCE, len(hosts)))

    def __enter__(self) -> Self:
        """Does not contact any host yet."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        # Not in the pool: after an interrupt its threads still wait for answers, until their connections are closed.
        with ThreadPoolExecutor(max_workers=AT_ONCE) as closing:
            list(closing.map(lambda line: line.close(), self._lines.values()))
        self._pool.shutdown()

    @property
    def reached(self) -> list[int]:
        """Numbers of the hosts we are connected to."""
        return list(self._lines)

    def open(self) -> list[Problem]:
        """Connect to all hosts; returns a problem for each that cannot be reached."""
        self._lines, problems = self._on_all(self.hosts, self.ways.open)
        return problems

    def ask(
        self,
        verb: str,
        given: Mapping[int, Mapping[str, Any]],
        *,
        limit_s: float = ASK_S,
        payloads: Mapping[int, bytes] = NOTHING,
    ) -> tuple[dict[int, dict[str, Any]], list[Problem]]:
        """Send one request to each host in `given`, all at once; returns answers, and a problem for each failure."""

        def one(number: int) -> dict[str, Any]:
            payload = payloads.get(number, b"")
            return self._lines[number].ask(verb, given[number], limit_s=limit_s, payload=payload)

        return self._on_all(given, one)

    def must(
        self,
        verb: str,
        given: Mapping[int, Mapping[str, Any]],
        *,
        limit_s: float = ASK_S,
        payloads: Mapping[int, bytes] = NOTHING,
    ) -> dict[int, dict[str, Any]]:
        """As `ask`, but raises HostsError unless all answer."""
        answers, problems = self.ask(verb, given, limit_s=limit_s, payloads=payloads)
        if problems:
            raise HostsError(problems)
        return answers

    def send(
        self, files: Mapping[int, Sequence[tuple[Path, Path]]], note: Note = lambda number, path, have: None
    ) -> None:
        """Copy files to hosts, given as pairs of the path here and the path there. Raises HostsError."""

        def send(line: Line, source: Path, target: Path, number: int) -> None:
            send_file(line, source, target, number, lambda have: note(number, source, have))

        self._copy(files, send)

    def fetch(self, files: Mapping[int, Sequence[tuple[Path, Path]]]) -> None:
        """Copy files from hosts, given as pairs of the path there and the path here. Raises HostsError."""
        self._copy(files, lambda line, source, target, _: fetch_file(line, source, target))

    def _copy(
        self, files: Mapping[int, Sequence[tuple[Path, Path]]], copy: Callable[[Line, Path, Path, int], None]
    ) -> None:
        def one(number: int) -> None:
            for source, target in files[number]:
                copy(self._lines[number], source, target, number)

        if problems := self._on_all(files, one)[1]:
            raise HostsError(problems)

    def describe(
        self, run_dirs: Mapping[int, Path], paths: Mapping[int, Sequence[str]], needs: Mapping[int, Needs]
    ) -> tuple[dict[int, HostFacts], list[Problem]]:
        """Facts about all reachable hosts, as far as `needs` asks for them."""
        offsets, lost = self._on_all(self._lines, self._clock_offset)
        given = {
            n: {"run_dir": str(run_dirs[n]), "nonce": self.nonce, "paths": list(paths[n]), **needs[n].question()}
            for n in offsets
        }
        answers, problems = self.ask("describe", given, limit_s=DESCRIBE_S)
        facts = {n: replace(facts_from(answer), clock_offset=offsets[n]) for n, answer in answers.items()}
        return facts, [*lost, *problems]

    def links(self, addresses: Mapping[int, str]) -> tuple[dict[tuple[int, int], str], dict[int, int], list[Problem]]:
        """Test all links: pairs that cannot connect and why, by number; listening ports; problems of single hosts."""
        listening = {n: {"address": address, "nonce": self.nonce} for n, address in addresses.items()}
        answers, problems = self.ask("listen", listening)
        ports: dict[int, int] = {}
        for n, answer in answers.items():
            if answer["port"] is None:
                hint = "give an address that this host has and the others can reach: address=… on its line"
                message = f"it cannot listen on {addresses[n]}: {answer['error']}"
                problems.append(Problem(self.hosts[n].where, self.hosts[n].name, message, hint))
            else:
                ports[n] = int(answer["port"])
        targets = {
            n: {
                "nonce": self.nonce,
                "targets": [[str(to), addresses[to], port] for to, port in ports.items() if to != n],
            }
            for n in answers
        }
        found, lost = self.ask("connect", targets, limit_s=LINKS_S)
        faults = {
            (n, int(to)): str(fault)
            for n, answer in found.items()
            for to, fault in answer["faults"].items()
            if fault is not None
        }
        return faults, ports, [*problems, *lost]

    def _clock_offset(self, number: int) -> float:
        """Seconds by which a host's clock is ahead, from the fastest of a few round trips."""
        rounds = []
        for _ in range(CLOCK_ROUNDS):
            sent = time.time()
            theirs = float(self._lines[number].ask("clock", {}, limit_s=ASK_S)["time"])
            received = time.time()
            rounds.append((received - sent, theirs - (sent + received) / 2))
        return min(rounds)[1]

    def _on_all(
        self, numbers: Collection[int], act: Callable[[int], _Answer]
    ) -> tuple[dict[int, _Answer], list[Problem]]:
        def guarded(number: int) -> _Answer | HostFault:
            try:
                return act(number)
            except HostFault as fault:
                return fault

        found: dict[int, _Answer] = {}
        problems = []
        for number, answer in zip(numbers, self._pool.map(guarded, list(numbers)), strict=True):
            if isinstance(answer, HostFault):
                host = self.hosts[number]
                problems.append(Problem(host.where, host.name, answer.message, answer.hint))
            else:
                found[number] = answer
        return found, problems


def send_file(
    line: Line, source: Path, target: Path, number: int = 0, note: Callable[[int], None] = lambda have: None
) -> None:
    """Copy a file to a host, continuing an earlier attempt that was cut off; raises HostFault.

    It is sent in pieces with a deadline each, so neither the size of the file nor the speed of the link matters.
    `number`: the host's; part of the draft's name, since several hosts may share a folder that is not ours.
    `note` is told after each piece how many bytes are there.
    """
    draft = f"{target}.{number}.draft"
    with source.open("rb") as file:
        offset = _common(line, file, draft, note)
        file.seek(offset)
        last = False
        while not last:
            piece = file.read(PIECE_BYTES)
            last = len(piece) < PIECE_BYTES
            given = {"path": str(target), "draft": draft, "offset": offset, "last": last}
            line.ask("write", given, limit_s=PIECE_S, payload=piece)
            offset += len(piece)
            note(offset)


def fetch_file(line: Line, source: Path, target: Path) -> None:
    """Copy a file from a host in pieces, continuing an earlier attempt; raises HostFault."""
    target.parent.mkdir(parents=True, exist_ok=True)
    target.touch()
    with target.open("r+b") as file:
        offset = _common(line, file, str(source))
        file.seek(offset)
        while True:
            given = {"path": str(source), "offset": offset, "size": PIECE_BYTES}
            piece = base64.b64decode(line.ask("read", given, limit_s=PIECE_S)["data"])
            if not piece:
                break
            offset += file.write(piece)
        file.truncate()


def _common(line: Line, file: BinaryIO, there: str, note: Callable[[int], None] = lambda have: None) -> int:
    """Length of the common beginning, in bytes of whole pieces, of a file here and one on a host."""
    offset = 0
    while piece := file.read(PIECE_BYTES):
        given = {"path": there, "offset": offset, "size": len(piece)}
        if line.ask("digest", given, limit_s=PIECE_S)["digest"] != hashlib.blake2b(piece).hexdigest():
            break
        offset += len(piece)
        note(offset)
    return offset


def own_addresses() -> set[str]:
    """IP addresses of this machine."""
    return {a.address for addresses in psutil.net_if_addrs().values() for a in addresses if a.family in _FAMILIES}


_FAMILIES = (socket.AF_INET, socket.AF_INET6)


def addresses_of(name: str) -> set[str]:
    """IP addresses of a name; empty if it cannot be resolved here (ssh may still know it)."""
    try:
        return {str(found[4][0]) for found in socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)}
    except OSError:
        return set()


def reachable_address(host: Host, facts: HostFacts, resolved: str, others: Sequence[str]) -> str | None:
    """The address other hosts connect to: from the hosts file, else from ssh, else from resolving the name.

    A loopback address is the last resort; for this machine, the address on the route to the others is preferred.
    None: no address was found.
    """
    if host.address is not None:
        return host.address
    candidates = [facts.ssh_address] if facts.ssh_address is not None else sorted(addresses_of(resolved))
    outside = [address for address in candidates if not ipaddress.ip_address(address).is_loopback]
    routed = [] if outside else [address for other in others if (address := route_to(other)) is not None]
    return next(iter([*outside, *routed, *candidates]), None)


def route_to(other: str) -> str | None:
    """This machine's own address on the route to another; nothing is sent."""
    addresses = sorted(addresses_of(other))
    if not addresses:
        return None
    family = socket.AF_INET6 if ":" in addresses[0] else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as way:
        try:
            way.connect((addresses[0], 9))
        except OSError:
            return None
        return str(way.getsockname()[0])
