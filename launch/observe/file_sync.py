"""Copies what other hosts wrote into the local run folder, where the hosts do not share one. Only what is new travels.

A file is written by one process, on one host, under that process's name, and only grows; so what is there already is
its beginning. Should its first bytes differ all the same (a resumed run wrote it anew), it is fetched anew.

A part of a checkpoint has its name only when all of it is here: until then it is a draft beside that. The draft's name
tells of which COMMIT it is: two terms of a run may save the same training step.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path, PurePosixPath
from typing import Any

import msgspec
from msgspec import structs

from distflow.comm.keys import key_file, read_keys
from distflow.data.decoding import Form, read
from distflow.errors import DistflowError, ProtocolError
from distflow.launch.observe.file_client import FileClient, NoAnswer, OutOfTime, ServedFile
from distflow.launch.observe.file_server import WHOLE, head, inside
from distflow.launch.observe.run_client import ask_any_agent
from distflow.launch.run.record import HOSTS, RunRecord, read_record
from distflow.log import logger
from distflow.metrics.merge import MetricsReader
from distflow.runtime.checkpoint.commit import COMMIT, sync_folder

COLLECTED = ("logs", "metrics", "rollouts", "trace", "prompts", WHOLE)
"""What the first host keeps of a run that is over."""
PATIENCE_S, LOOK_S = 3.0, 30.0
"""For a command that reads: how long one silent host may hold it up, and how long fetching may take in all."""
STALL_S = 20.0
"""The same for a checkpoint, which takes as long as it takes: how long no piece may come."""
TELL_EVERY_S = 10.0
RECORD_S = 2.0
"""How long to wait for an agent's record."""
GIB = 1 << 30
AT_ONCE = 16
"""Hosts that are asked at once."""
Steps = list[dict[str, float]]
"""Metrics by training step."""
SILENT, LATE = "does not answer", "not all of it came in time: run it again"
log = logger(__name__)


@dataclass(frozen=True, slots=True)
class _Wanted:
    """What is fetched of one checkpoint."""

    folder: Path
    commit: ServedFile
    same: bool
    """Whether the folder has this COMMIT already, with some of the parts."""
    parts: Mapping[int, Sequence[ServedFile]]
    """By the host that gives them."""

    @property
    def size(self) -> int:
        return sum(part.size for parts in self.parts.values() for part in parts)

    def draft(self, name: str) -> Path:
        """Where a file of it lies until it is whole."""
        return self.folder / f"{name}.{self.commit.head_digest[:8]}.draft"


class _Record(Form, frozen=True):
    record: str


class FileSync:
    """Fetches from the agents of the hosts in `apart`, by their numbers, several at once.

    A host that does not answer for `patience_s` seconds is given up; after `limit_s` seconds so is all that is left.
    """

    def __init__(self, record: RunRecord, apart: Collection[int], patience_s: float, limit_s: float = math.inf) -> None:
        self._record = record
        self._apart = sorted(apart)
        self._patience_s = patience_s
        self._limit_s = limit_s
        self._keys = read_keys(key_file(record.path)) if record.hosts else None
        self._lock = threading.Lock()
        self._interrupted = False
        self.faults: dict[str, str] = {}
        """By name of a host: why not all of it came in the last fetch."""
        self.progress_at = -math.inf
        """When the last piece of a file came, or the name of one (monotonic clock)."""
        self._wanted: _Wanted | None = None
        self._have: dict[str, int] = {}
        """Bytes here of each part of the checkpoint that is being fetched."""

    @property
    def collecting(self) -> dict[str, Any] | None:
        """The checkpoint that is being fetched, its bytes that are here, their total, and from where; None: none is."""
        wanted = self._wanted
        if wanted is None:
            return None
        with self._lock:
            have = sum(self._have.values())
        names = ", ".join(self._record.hosts[host].name for host in wanted.parts)
        return {"checkpoint": wanted.folder.name, "bytes": have, "total": wanted.size, "from": names}

    def fetch(self, folders: Sequence[str], *, final: bool = False) -> None:
        """Bring these folders up to date; of checkpoints only the newest whole one.

        `final`: the run is over, so a checkpoint of which not all came is kept with its COMMIT, which tells what lacks.
        """
        deadline = time.monotonic() + self._limit_s
        self.faults = {}
        listed: dict[int, list[ServedFile]] = {}
        with ExitStack() as stack:
            clients = {host: stack.enter_context(self._client(host, deadline)) for host in self._apart}

            def one(host: int) -> None:
                for folder in folders:
                    for file in clients[host].list(folder):
                        listed.setdefault(host, []).append(file)
                        self._note()
                for file in listed.get(host, ()):
                    if not file.path.startswith(f"{WHOLE}/"):
                        self._fetch(clients[host], file)

            self._side_by_side(clients, one)
            heard = {host: files for host, files in listed.items() if self._name(host) not in self.faults}
            wanted = self._newest(heard) if WHOLE in folders else None
            if wanted is not None:
                self._fetch_checkpoint(clients, wanted, final=final)

    def _client(self, host: int, deadline: float) -> FileClient:
        return FileClient(self._record.hosts[host].agent, self._keys, self._patience_s, deadline)

    def _name(self, host: int) -> str:
        return self._record.hosts[host].name

    def _side_by_side(self, hosts: Iterable[int], act: Callable[[int], None]) -> None:
        def guarded(host: int) -> None:
            try:
                act(host)
            except OutOfTime as error:
                self._give_up(host, LATE, error)
            except NoAnswer as error:
                self._give_up(host, SILENT, error)
            except DistflowError as error:
                self._give_up(host, f"not all of it came ({error})", error)
            except OSError as error:
                self._give_up(host, f"what it has cannot be written here ({error.strerror})", error)

        with ThreadPoolExecutor(AT_ONCE, thread_name_prefix="fetch") as pool:
            try:
                list(pool.map(guarded, hosts))
            except BaseException:
                # Ctrl-C, which only this thread hears; the others end with their next piece.
                self._interrupted = True
                raise

    def _give_up(self, host: int, what: str, error: Exception) -> None:
        name = self._name(host)
        log.info("host %s: %s", name, error)
        self.faults.setdefault(name, what)

    def _newest(self, listed: Mapping[int, Sequence[ServedFile]]) -> _Wanted | None:
        """What there is to fetch of the newest whole checkpoint; None: nothing."""
        here = {str(path.relative_to(self._record.path)) for path in self._record.path.glob(f"{WHOLE}/step_*/{COMMIT}")}
        there = {host: {file.path: file for file in files if _is_commit(file.path)} for host, files in listed.items()}
        newest = max(here.union(*there.values()), default="")
        having = {host: commits[newest] for host, commits in there.items() if newest in commits}
        if not having:
            return None
        commit = next(iter(having.values()))
        own = inside(self._record.path.resolve(), newest)
        same = own.is_file() and self._common(own, commit) == commit.size
        parts: dict[str, tuple[int, ServedFile]] = {}
        for host in (host for host, one in having.items() if one.head_digest == commit.head_digest):
            for file in listed[host]:
                name = PurePosixPath(file.path)
                lacks = not same or not _is_here(own.parent / name.name, file.size)
                if name.parent == PurePosixPath(newest).parent and file.path not in (newest, *parts) and lacks:
                    parts[file.path] = host, file
        hosts = sorted({host for host, _ in parts.values()})
        by_host = {host: [file for at, file in parts.values() if at == host] for host in hosts}
        return _Wanted(own.parent, commit, same, by_host) if parts else None

    def _fetch_checkpoint(self, clients: Mapping[int, FileClient], wanted: _Wanted, *, final: bool) -> None:
        """COMMIT and all parts first, side by side; then they get their names."""
        self._have, self._wanted = {}, wanted
        try:
            self._side_by_side(wanted.parts, lambda host: self._fetch_parts(clients[host], wanted, host))
            if wanted.folder.is_dir() and (final or _all_came(wanted)):
                _put_in_place(wanted)
        finally:
            self._wanted = None

    def _fetch_parts(self, client: FileClient, wanted: _Wanted, host: int) -> None:
        wanted.folder.mkdir(parents=True, exist_ok=True)
        commit = wanted.draft(f"{COMMIT}.{host}")
        client.copy(wanted.commit.path, commit, 0, wanted.commit.size)
        commit.rename(wanted.draft(COMMIT))
        for part in wanted.parts[host]:
            draft = wanted.draft(PurePosixPath(part.path).name)
            have = draft.stat().st_size if draft.exists() else 0
            self._count(part.path, have)
            client.copy(part.path, draft, have, part.size, partial(self._count, part.path))

    def _count(self, path: str, have: int) -> None:
        with self._lock:
            self._have[path] = have
        self._note()

    def _fetch(self, client: FileClient, file: ServedFile) -> None:
        path = inside(self._record.path.resolve(), file.path)
        have = self._common(path, file)
        if have == file.size and path.exists() and path.stat().st_size == have:
            return
        path.parent.mkdir(parents=True, exist_ok=True)
        client.copy(file.path, path, have, file.size, lambda have: self._note())

    def _note(self) -> None:
        if self._interrupted:
            raise OutOfTime("interrupted")
        self.progress_at = time.monotonic()

    def _common(self, path: Path, file: ServedFile) -> int:
        """How many bytes of the file are here already."""
        if not path.exists():
            return 0
        size, length, digest = head(path, max(1, file.head_bytes))
        same = length == file.head_bytes and digest == file.head_digest
        return size if same and size <= file.size else 0


def _is_commit(path: str) -> bool:
    return path.startswith(f"{WHOLE}/step_") and path.endswith(f"/{COMMIT}")


def _is_here(path: Path, size: int) -> bool:
    return path.is_file() and path.stat().st_size == size


def _all_came(wanted: _Wanted) -> bool:
    parts = (part for parts in wanted.parts.values() for part in parts)
    return all(_is_here(wanted.draft(PurePosixPath(part.path).name), part.size) for part in parts)


def _put_in_place(wanted: _Wanted) -> None:
    """Name what is whole; COMMIT last."""
    commit = wanted.draft(COMMIT)
    if not _is_here(commit, wanted.commit.size):
        return
    if not wanted.same:
        # What is there under these names, if anything, is a checkpoint of another term.
        (wanted.folder / COMMIT).unlink(missing_ok=True)
    for part in (part for parts in wanted.parts.values() for part in parts):
        name = PurePosixPath(part.path).name
        if _is_here(wanted.draft(name), part.size):
            wanted.draft(name).rename(wanted.folder / name)
    commit.rename(wanted.folder / COMMIT)
    sync_folder(wanted.folder)


def apart(record: RunRecord) -> list[int]:
    """Hosts whose files are not in this run folder: their agent's nonce is not there either."""
    return [host for host, entry in enumerate(record.hosts) if entry.nonce and _nonce(record, host) != entry.nonce]


def is_outside(record: RunRecord) -> bool:
    """Tell whether no agent of a run on hosts writes to this folder: that of a machine which only launched it."""
    return bool(record.hosts) and not any(_nonce(record, host) for host in record.numbers)


def record_of_agents(record: RunRecord) -> RunRecord | None:
    """Bring the record of a run outside of which this machine is up to date, as an agent gives it; None: none does."""
    answer = ask_any_agent(record, "record", {}, RECORD_S)
    if answer is None:
        return None
    try:
        found = msgspec.json.decode(read(answer, _Record, "answer to record").record, type=RunRecord)
    except (msgspec.MsgspecError, ProtocolError) as error:
        log.info("%s: an agent gives no record of this version of distflow (%s)", record.name, error)
        return None
    # An agent that has just begun may not have heard of the others yet, whose addresses are known here.
    known = dict(enumerate(record.hosts))
    hosts = tuple(known.get(n, one) if not one.agent else one for n, one in enumerate(found.hosts))
    roster = {**found.roster, **{name: at for name, at in record.roster.items() if not found.roster.get(name, at)}}
    found = structs.replace(found, run_dir=str(record.path), hosts=hosts, roster=roster)
    if found != record:
        found.write()
    return found


def _nonce(record: RunRecord, host: int) -> str | None:
    path = record.path / HOSTS / f"{host}.nonce"
    return path.read_text() if path.is_file() else None


def told(collecting: Mapping[str, Any]) -> str:
    """One line about a checkpoint that is being collected, as `FileSync.collecting` gives it."""
    have, total = collecting["bytes"] / GIB, collecting["total"] / GIB
    return f"collecting checkpoint {collecting['checkpoint']} from {collecting['from']}: {have:.1f} of {total:.1f} GiB"


@contextmanager
def _telling(mirror: FileSync, tell: Callable[[str], None]) -> Iterator[None]:
    """Tell every few seconds how much of a checkpoint is here."""
    done = threading.Event()

    def go_on() -> None:
        while not done.wait(TELL_EVERY_S):
            if (collecting := mirror.collecting) is not None:
                tell(told(collecting))

    thread = threading.Thread(target=go_on, name="told", daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()


def refresh(
    run_dir: Path, folders: Sequence[str], what: str, tell: Callable[[str], None] = lambda line: None
) -> list[str]:
    """Bring folders of a run up to date before they are read; returns a line for each host of which not all came.

    `what` is in these folders, in the words of the user; `tell` gets lines about what takes long. Does nothing for a
    run on one host or on hosts that share the folder, nor once it is over: its end collects.
    """
    if not (run_dir / "run.json").is_file():
        return []
    record = read_record(run_dir)
    if not record.over and is_outside(record):
        record = record_of_agents(record) or record
    missing = apart(record)
    if record.over or not missing:
        return []
    large = WHOLE in folders
    mirror = FileSync(record, missing, STALL_S if large else PATIENCE_S, math.inf if large else LOOK_S)
    with _telling(mirror, tell):
        mirror.fetch(folders)
    return [
        f"{host} {SILENT}: its {what} may be missing" if fault == SILENT else f"{host}: {fault}"
        for host, fault in mirror.faults.items()
    ]


def read_steps(run_dir: Path, tell: Callable[[str], None]) -> Steps:
    """The merged metrics of a run, one mapping per training step; `tell` gets lines about what is missing."""
    for line in refresh(run_dir, ("metrics",), "metrics"):
        tell(line)
    reader = MetricsReader(run_dir)
    reader.read()
    if reader.malformed:
        tell(f"{run_dir}/metrics: {reader.malformed} incomplete lines were skipped")
    return reader.merged()


def finite(step: dict[str, float]) -> dict[str, float | None]:
    """Replace NaN and infinity, which JSON lacks, by null."""
    return {name: value if math.isfinite(value) else None for name, value in step.items()}
