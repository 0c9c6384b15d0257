"""What the processes of a run listen on, compared with what is known of them."""

from __future__ import annotations

import ipaddress
import os
import struct
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

LISTENS, UNCONNECTED = "0A", "07"
"""States of /proc/net/tcp and /proc/net/udp."""


@dataclass(frozen=True, slots=True)
class Listening:
    """One socket that takes connections, or packets."""

    title: str
    """Of its process, or of the nearest process above it that is the run's."""
    address: str
    port: int


def listening(processes: Iterable[psutil.Process]) -> Iterator[Listening]:
    """All sockets of the network in these processes and in what they started; abstract Unix sockets, too.

    In whatever network namespace they are, which psutil's own list of sockets leaves out.
    """
    seen = set()
    for top in processes:
        for process in [top, *top.children(recursive=True)]:
            if process.pid in seen:
                continue
            seen.add(process.pid)
            try:
                title, inodes = _title(process), _inodes(process.pid)
            except psutil.NoSuchProcess:
                # It has ended, or is a zombie: it listens nowhere any more.
                continue
            for inode, address, port in _open_to_others(process.pid):
                if inode in inodes:
                    yield Listening(title, address, port)


def unknown(found: Iterable[Listening], having: dict[str, str]) -> list[Listening]:
    """Those that are not known: `having` says, by a word of a process's title, on which address alone it may listen."""
    return [one for one in found if _allowed(one, having) != _plain(one.address)]


def _allowed(one: Listening, having: dict[str, str]) -> str | None:
    return next((address for name, address in having.items() if name in one.title.split()), None)


def _plain(address: str) -> str:
    """Without the form that IPv4 addresses have on sockets that take both."""
    try:
        found = ipaddress.ip_address(address)
    except ValueError:
        return address
    mapped = found.ipv4_mapped if isinstance(found, ipaddress.IPv6Address) else None
    return str(mapped or found)


def _title(process: psutil.Process) -> str:
    for one in (process, *process.parents()):
        title = " ".join(one.cmdline()).strip()
        if title.startswith("distflow "):
            return title
    return " ".join(process.cmdline()).strip()


def _inodes(pid: int) -> set[str]:
    """Of the sockets that a process has open."""
    found = set()
    for descriptor in Path(f"/proc/{pid}/fd").iterdir():
        with suppress(FileNotFoundError):
            target = os.readlink(descriptor)
            if target.startswith("socket:["):
                found.add(target[len("socket:[") : -1])
    return found


def _open_to_others(pid: int) -> Iterator[tuple[str, str, int]]:
    """Inode, address and port of what takes connections or packets in a process's network namespace."""
    for table, state in (("tcp", LISTENS), ("tcp6", LISTENS), ("udp", UNCONNECTED), ("udp6", UNCONNECTED)):
        for line in _lines(pid, table):
            fields = line.split()
            if fields[3] == state:
                address, _, port = fields[1].partition(":")
                yield fields[9], _address(address), int(port, 16)
    for line in _lines(pid, "unix"):
        # Without a name, a line has seven fields; one with "@" is reached by every user of the machine.
        fields = line.split(maxsplit=7)
        if len(fields) == 8 and fields[7].startswith("@"):
            yield fields[6], fields[7], 0


def _lines(pid: int, table: str) -> list[str]:
    return Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]


def _address(text: str) -> str:
    """From words of 32 bits in the machine's order."""
    words = bytes.fromhex(text)
    return str(ipaddress.ip_address(struct.pack(f">{len(words) // 4}I", *struct.unpack(f"={len(words) // 4}I", words))))
