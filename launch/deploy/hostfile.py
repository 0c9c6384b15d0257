"""Hosts files, in the syntax of DeepSpeed (`gpu-1 slots=4`) and of MPI (`gpu-1:4`, `gpu-1 slots=4 max_slots=8`).

Our own additions to a line: `address=10.0.0.3` (what the other hosts connect to), `python=/path/to/python`,
`dir=/path` (the folder of runs on that host), `site=frankfurt` (where it stands: what leaves a site is compressed, and
weights enter it once), `cost=2.5` (of a slot for an hour, in any currency, for `distflow plan --optimize`),
`gpu_gib=80` (memory of each of its GPUs) and `ram_gib=1000` (its own memory), by which `distflow plan` judges.
`gpu[1-4]` is a line for each, as Slurm writes names; `user@gpu-1` logs in as that user;
ports and keys belong in the ssh configuration.
"""

from __future__ import annotations

import ipaddress
import re
import socket
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path

from distflow.errors import Problem, UserError, did_you_mean
from distflow.launch.deploy.job_environment import expand
from distflow.types import MOST_WORKERS

_NAME = re.compile(r"(?:(?P<user>[A-Za-z0-9._-]+)@)?(?P<host>[A-Za-z0-9][A-Za-z0-9._-]*)")
_SITE = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_COST = re.compile(r"[0-9]{1,9}(\.[0-9]{0,9})?|\.[0-9]{1,9}")
_WORDS = ("slots", "max_slots", "address", "python", "dir", "site", "cost", "gpu_gib", "ram_gib")


@dataclass(frozen=True, slots=True)
class Host:
    """One line of a hosts file."""

    name: str
    slots: tuple[int, ...]
    """Numbers of the worker slots; on a host with GPUs, those of the GPUs."""
    where: str
    """`file:line`, for messages."""
    user: str | None = None
    address: str | None = None
    """IP address that workers on other hosts connect to; None: the one that ssh uses."""
    python: str | None = None
    """Python on that host; None: the same path as here."""
    directory: str | None = None
    """Folder of runs on that host; None: the same path as here."""
    site: str = ""
    """Where it stands: links between hosts of different sites are slow. Hosts without one stand together."""
    cost: float | None = None
    """Of each slot for an hour; None: not given."""
    gpu_gib: float | None = None
    """Memory of each of its GPUs, in GiB; None: not given."""
    ram_gib: float | None = None
    """Its own memory, in GiB; None: not given."""

    @property
    def login(self) -> str:
        """The destination argument of ssh."""
        return self.name if self.user is None else f"{self.user}@{self.name}"


class HostsError(UserError):
    """All problems with the hosts of a run at once."""

    def __init__(self, problems: Sequence[Problem]) -> None:
        assert problems, "a HostsError names at least one problem"
        self.problems = tuple(problems)
        super().__init__(self.problems)

    def __str__(self) -> str:
        return "\n".join(str(problem) for problem in self.problems)


def read_hosts(path: Path, include: str | None = None, exclude: str | None = None) -> tuple[Host, ...]:
    """The hosts of a file, filtered as by DeepSpeed's --include and --exclude; raises HostsError, UserError."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"--hosts {path}: cannot be read ({error}) — give a text file with one host per line") from None
    return select(parse_hosts(text, str(path)), include, exclude)


def addresses_of(hosts: Mapping[int, Host]) -> dict[int, str]:
    """Return the IP address of each host by number, without contacting it; raises HostsError for those without one."""
    problems, found = [], {}
    for number, host in hosts.items():
        found[number] = address = host.address or _resolved(host.name)
        unknown = not address or (len(hosts) > 1 and host.address is None and _only_here(host.name, address))
        if unknown:
            what = f"this machine takes the name for {address or 'no address'}, which other hosts cannot connect to"
            hint = "say in its line what they can connect to, such as address=10.0.0.3"
            problems.append(Problem(host.where, host.name, what, hint))
    if problems:
        raise HostsError(problems)
    return found


def _resolved(name: str) -> str:
    """Return the address of a name, as this machine knows it; empty if it knows none."""
    try:
        return str(socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)[0][4][0])
    except OSError:
        return ""


def _only_here(name: str, address: str) -> bool:
    # Hosts that are named by loopback addresses are meant so: all of them are this machine.
    return name != address and ipaddress.ip_address(address).is_loopback


def parse_hosts(text: str, source: str) -> tuple[Host, ...]:
    """The hosts named in `text`; raises HostsError with all problems."""
    problems: list[Problem] = []
    hosts: dict[str, Host] = {}
    for number, line in enumerate(text.splitlines(), start=1):
        words = line.partition("#")[0].split()
        if not words:
            continue
        where = f"{source}:{number}"
        for name in _names(words[0]):
            host = _host([name, *words[1:]], where, problems)
            if host is not None and host.name in hosts:
                hint = "use one line per host, with all of its slots"
                problems.append(Problem(where, host.name, f"named twice, first in {hosts[host.name].where}", hint))
            elif host is not None:
                hosts[host.name] = host
    problems += _clashes(list(hosts.values()))
    if not hosts and not problems:
        problems.append(Problem(source, "hosts", "no hosts in this file", "write one per line: gpu-1 slots=4"))
    if problems:
        raise HostsError(problems)
    return tuple(hosts.values())


def select(hosts: Sequence[Host], include: str | None, exclude: str | None) -> tuple[Host, ...]:
    """The selected hosts and slots: `gpu-1@gpu-2:0,2` is all of gpu-1, and slots 0 and 2 of gpu-2.

    Raises UserError when both are given, HostsError for unknown names and slots.
    """
    if include is not None and exclude is not None:
        raise UserError("--include and --exclude: both are given — give only one of them")
    if include is None and exclude is None:
        return tuple(hosts)
    option, text = ("--include", include) if include is not None else ("--exclude", exclude)
    assert text is not None, "one of the two is given"
    named = _selection(option, text, hosts)
    if option == "--include":
        kept = [replace(host, slots=named[host.name]) for host in hosts if host.name in named]
    else:
        kept = [replace(host, slots=_without(host, named)) for host in hosts]
    kept = [host for host in kept if host.slots]
    if not kept:
        raise UserError(f"{option} {text}: leaves no host — the file names {', '.join(host.name for host in hosts)}")
    return tuple(kept)


def _names(word: str) -> list[str]:
    """Expand Slurm's notation, `gpu[1-4,7]`; a word that is none is refused where names are."""
    try:
        found = list(islice(expand(word), MOST_WORKERS + 1)) if "[" in word else [word]
    except UserError:
        return [word]
    return found if 0 < len(found) <= MOST_WORKERS else [word]


def _host(words: Sequence[str], where: str, problems: list[Problem]) -> Host | None:
    """Read a line. A host of which something is wrong is returned without it, so that others are compared with it."""
    first, _, count = words[0].partition(":")
    name = _NAME.fullmatch(first)
    if name is None:
        hint = (
            "write NAME, user@NAME or NAME:SLOTS, of several hosts NAME[1-4]; ports belong in the ssh configuration "
            "(--ssh-config FILE)"
        )
        problems.append(Problem(where, words[0], "not a host name", hint))
        return None
    found = dict(_settings(words[1:], first, where, problems))
    if count and "slots" in found:
        message = f"slots given twice: {first}:{count} and slots={found['slots']}"
        problems.append(Problem(where, first, message, "give the slots once"))
    slots = _count(count or found.pop("slots", "1"), first, "slots", where, problems)
    most = _count(found.pop("max_slots", str(slots)), first, "max_slots", where, problems)
    if slots > most:
        message = f"slots={slots} is more than max_slots={most}"
        problems.append(Problem(where, first, message, "raise max_slots or lower slots"))
    if "address" in found and not _is_address(found["address"]):
        message = f"address={found.pop('address')} is not an IP address"
        problems.append(Problem(where, first, message, "write one such as address=10.0.0.3"))
    if "site" in found and not _SITE.fullmatch(found["site"]):
        message = f"site={found.pop('site')} is not a name"
        problems.append(
            Problem(where, first, message, "write letters, digits, '.', '_' or '-', such as site=frankfurt")
        )
    if "cost" in found and not _COST.fullmatch(found["cost"]):
        message = f"cost={found.pop('cost')} is not a price"
        problems.append(Problem(where, first, message, "write that of a slot for an hour, such as cost=2.5"))
    for word, of, such in (("gpu_gib", "a GPU", 80), ("ram_gib", "a host", 1000)):
        if word in found and not (_COST.fullmatch(found[word]) and float(found[word])):
            message = f"{word}={found.pop(word)} is not the memory of {of}"
            problems.append(Problem(where, first, message, f"write it in GiB, such as {word}={such}"))
    address, python, folder = (found.get(word) for word in ("address", "python", "dir"))
    site, cost = found.get("site", ""), float(found["cost"]) if "cost" in found else None
    gib, ram = (float(found[word]) if word in found else None for word in ("gpu_gib", "ram_gib"))
    return Host(name["host"], tuple(range(slots)), where, name["user"], address, python, folder, site, cost, gib, ram)


def _settings(words: Sequence[str], host: str, where: str, problems: list[Problem]) -> Iterator[tuple[str, str]]:
    seen: set[str] = set()
    for word in words:
        key, _, value = word.partition("=")
        key = key.replace("-", "_")
        if key in _WORDS and not value:
            problems.append(Problem(where, host, f"{word!r} has no value", f"write {key}=VALUE, or leave it out"))
        elif key not in _WORDS and key.lower() in _WORDS:
            problems.append(Problem(where, host, f"unknown word {word!r}", f"write {key.lower()} in small letters"))
        elif key not in _WORDS:
            hint = did_you_mean(key, _WORDS) + "; each is written WORD=VALUE"
            problems.append(Problem(where, host, f"unknown word {word!r}", hint))
        elif key in seen:
            problems.append(Problem(where, host, f"{key} is given twice", "give it once"))
        else:
            seen.add(key)
            yield key, value


def _count(text: str, host: str, word: str, where: str, problems: list[Problem]) -> int:
    if text.isdecimal() and int(text) > 0:
        return int(text)
    problems.append(Problem(where, host, f"{word}={text} is not a valid slot count", "write a whole number ≥ 1"))
    return 1


def _is_address(text: str) -> bool:
    try:
        ipaddress.ip_address(text)
    except ValueError:
        return False
    return True


def _clashes(hosts: Sequence[Host]) -> Iterator[Problem]:
    """Problems with hosts that have the same address."""
    first: dict[str, Host] = {}
    for host in hosts:
        if host.address is None:
            continue
        if host.address in first:
            other = first[host.address]
            message = f"has the address {host.address}, and so has {other.name} in {other.where}"
            yield Problem(host.where, host.name, message, "give each host its own address")
        first.setdefault(host.address, host)


def _selection(option: str, text: str, hosts: Sequence[Host]) -> dict[str, tuple[int, ...]]:
    known = {host.name: host for host in hosts}
    found: dict[str, tuple[int, ...]] = {}
    problems: list[Problem] = []
    for part in text.split("@"):
        name, colon, numbers = part.strip().partition(":")
        if name not in known:
            hint = did_you_mean(name, known)
            problems.append(Problem("command line", f"{option} {part}", f"there is no host {name!r}", hint))
            continue
        slots = known[name].slots
        chosen = _numbers(numbers) if colon else slots
        if not chosen or not set(chosen) <= set(slots) or name in found:
            message = f"{name} has the slots {', '.join(map(str, slots))}"
            hint = "name each host once, and only slots it has, as in gpu-2:0,2"
            problems.append(Problem("command line", f"{option} {part}", message, hint))
            continue
        found[name] = chosen
    if problems:
        raise HostsError(problems)
    return found


def _numbers(text: str) -> tuple[int, ...]:
    parts = text.split(",")
    return tuple(dict.fromkeys(map(int, parts))) if all(part.isdecimal() for part in parts) else ()


def _without(host: Host, named: dict[str, tuple[int, ...]]) -> tuple[int, ...]:
    return tuple(slot for slot in host.slots if host.name not in named or slot not in named[host.name])
