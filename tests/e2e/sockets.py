"""What the processes of a run listen on, compared with what is known of them."""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import psutil


@dataclass(frozen=True, slots=True)
class Listening:
    """One socket that takes connections, or packets."""

    title: str
    """Of its process, or of the nearest process above it that is the run's."""
    address: str
    port: int


def listening(processes: Iterable[psutil.Process]) -> Iterator[Listening]:
    """All sockets of the network in these processes and in what they started; abstract Unix sockets, too."""
    seen = set()
    for top in processes:
        for process in [top, *top.children(recursive=True)]:
            if process.pid in seen:
                continue
            seen.add(process.pid)
            for found in process.net_connections("all"):
                if found.family in (socket.AF_INET, socket.AF_INET6):
                    if found.status == psutil.CONN_LISTEN or (found.type == socket.SOCK_DGRAM and not found.raddr):
                        yield Listening(_title(process), found.laddr.ip, found.laddr.port)
                elif found.laddr.startswith("@"):
                    # Reached by every user of the machine.
                    yield Listening(_title(process), found.laddr, 0)


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
