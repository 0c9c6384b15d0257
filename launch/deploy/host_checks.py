"""Judges what the hosts say about themselves, before anything is started. No socket, clock or process in here."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from distflow.errors import Problem
from distflow.launch.deploy.hostfile import Host

CLOCK_S = 5.0
"""Clocks farther apart are refused: logs and traces of the hosts could not be read together."""
CLOCK_NOTE_S = 0.5
GIB = 1 << 30


@dataclass(frozen=True, slots=True)
class Facts:
    """What a host says about itself; bytes and seconds."""

    hostname: str
    python: str
    packages: Mapping[str, str | None]
    distflow: str | None
    digest: str | None
    package: str | None
    """Folder of the package."""
    cpus: int
    free_memory: int
    gpus: Sequence[str]
    ssh_address: str | None
    same_folder: bool
    """The run folder is the head's, on a shared file system."""
    taken: bool
    """There is something at the run folder's path."""
    unwritable: str | None
    free_disk: int
    free_shm: int
    missing: Sequence[str]
    """Paths that were asked for and are not there."""
    clock_offset: float = 0.0
    """How far its clock is ahead of the head's."""


@dataclass(frozen=True, slots=True)
class Expected:
    """What every host must have in common with the head."""

    distflow: str
    digest: str
    python: str
    packages: Mapping[str, str | None]
    resume: bool


@dataclass(frozen=True, slots=True)
class ResourceRequest:
    """What the workers of one host take, roughly, memory in bytes; and the model folders that they read."""

    memory: int
    """Of a host without GPUs."""
    memory_beside_gpus: int
    """Of a host whose GPUs hold what may lie there."""
    disk: int
    shm: int
    gpus: int
    """Workers that ask for one by `device: cuda`; they may share, but one there must be."""
    paths: tuple[str, ...]


def facts_from(answer: Mapping[str, Any], clock_offset: float) -> Facts:
    """From the answer of a probe; raises TypeError for one of another version."""
    return Facts(**answer, clock_offset=clock_offset)


def judge(
    host: Host, facts: Facts, expected: Expected, need: ResourceRequest, run_dir: str, optional: Sequence[str] = ()
) -> list[Problem]:
    """Everything that keeps this host from taking part; paths in `optional` may be missing."""
    missing = [path for path in facts.missing if path not in optional]
    found = (
        *_code(facts, expected),
        *_folder(facts, expected, run_dir),
        *_room(facts, need),
        *_gpus(facts, need),
        *_paths(missing),
    )
    return [Problem(host.where, host.name, message, cure) for message, cure in found]


def notes(host: Host, facts: Facts) -> Iterator[str]:
    """What is worth knowing, but keeps nobody from starting."""
    if CLOCK_NOTE_S < abs(facts.clock_offset) <= CLOCK_S:
        yield f"{host.name}: its clock is off by {facts.clock_offset:+.1f} s; traces are corrected for it, logs are not"


def clock_problems(hosts: Mapping[int, Host], offsets: Mapping[int, float]) -> list[Problem]:
    """Hosts whose clocks differ from the head's by too much."""
    return [
        Problem(
            hosts[number].where,
            hosts[number].name,
            f"its clock is off by {offset:+.1f} s; at most {CLOCK_S:g} s are allowed",
            "set the clocks by NTP on all hosts",
        )
        for number, offset in offsets.items()
        if abs(offset) > CLOCK_S
    ]


def link_problems(
    hosts: Mapping[int, Host], addresses: Mapping[int, str], faults: Mapping[tuple[int, int], str]
) -> list[Problem]:
    """One problem for all the links that do not work, with the matrix of who cannot reach whom."""
    if not faults:
        return []
    pairs = [
        f"  {hosts[a].name} cannot reach {hosts[b].name} at {addresses[b]}: {fault}" for (a, b), fault in faults.items()
    ]
    names = [hosts[number].name for number in addresses]
    message = "\n".join(["some hosts cannot reach each other", *pairs, *_matrix(names, list(addresses), faults), ""])
    cure = (
        "let the hosts of a run open TCP connections to each other on all ports, or give the address that the others "
        "reach: address=… on the host's line"
    )
    source = next(iter(hosts.values())).where.rpartition(":")[0]
    return [Problem(source, "links", message, cure)]


def _matrix(names: Sequence[str], numbers: Sequence[int], faults: Mapping[tuple[int, int], str]) -> Iterator[str]:
    width = max(len(name) for name in (*names, "from\\to"))
    yield "  " + "  ".join(word.ljust(width) for word in ("from\\to", *names)).rstrip()
    for row, name in zip(numbers, names, strict=True):
        cells = ["-" if row == column else "NO" if (row, column) in faults else "ok" for column in numbers]
        yield "  " + "  ".join(word.ljust(width) for word in (name, *cells)).rstrip()


def _code(facts: Facts, expected: Expected) -> Iterator[tuple[str, str]]:
    if facts.distflow is None:
        yield (
            f"distflow is not installed for its Python {facts.python}",
            "install it there, forward PYTHONPATH, or copy the code of this machine with --ship-code",
        )
    elif facts.digest != expected.digest:
        version = f" (version {facts.distflow}, here {expected.distflow})" * (facts.distflow != expected.distflow)
        yield (
            f"its distflow in {facts.package} has the code {facts.digest}, here it is {expected.digest}{version}",
            "bring the same code to all hosts, or copy this machine's with --ship-code",
        )
    if _minor(facts.python) != _minor(expected.python):
        yield f"its Python is {facts.python}, here it is {expected.python}", "give one of the same version: python=…"
    for name, ours in expected.packages.items():
        theirs = facts.packages[name]
        if theirs != ours:
            cure = f"install {name}=={ours} there, or give another Python: python=…"
            yield f"its {name} is {theirs or 'missing'}, here it is {ours or 'missing'}", cure


def _folder(facts: Facts, expected: Expected, run_dir: str) -> Iterator[tuple[str, str]]:
    if facts.unwritable is not None:
        yield f"{run_dir}: {facts.unwritable}", "give a folder that can be written there: dir=… or --runs-dir"
    elif facts.taken and not facts.same_folder and not expected.resume:
        cure = "choose another name with --run, give another folder with dir=…, or remove it"
        yield f"{run_dir} exists there already, and it is not this machine's", cure


def _room(facts: Facts, need: ResourceRequest) -> Iterator[tuple[str, str]]:
    memory = need.memory_beside_gpus if facts.gpus else need.memory
    short = (
        ("memory", facts.free_memory, memory, "place fewer workers on it, or end what else runs there"),
        ("disk space for the run folder", facts.free_disk, need.disk, "make room, or give another folder: dir=…"),
        ("room in /dev/shm", facts.free_shm, need.shm, "remount it larger: mount -o remount,size=… /dev/shm"),
    )
    for what, free, needed, cure in short:
        if free < needed:
            yield f"{free / GIB:.1f} GiB of {what} are free, about {needed / GIB:.1f} GiB are needed", cure


def _gpus(facts: Facts, need: ResourceRequest) -> Iterator[tuple[str, str]]:
    if need.gpus and not facts.gpus:
        cure = "pin their pool to hosts that have (layout.pools.NAME.hosts), or set its device to auto or cpu"
        yield f"it has no GPU that nvidia-smi shows, and {need.gpus} worker(s) placed there have device: cuda", cure


def _paths(missing: Sequence[str]) -> Iterator[tuple[str, str]]:
    for path in missing:
        yield f"there is no {path}, which its workers read", "copy it there, to the same path, or share the file system"


def _minor(version: str) -> list[str]:
    return version.split(".")[:2]
