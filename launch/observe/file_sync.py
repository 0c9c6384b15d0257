"""Copies what other hosts wrote into the local run folder, where the hosts do not share one. Only what is new travels.

A file is written by one process, on one host, under that process's name, and only grows; so what is there already is
its beginning. Should its first bytes differ all the same (a resumed run wrote it anew), it is fetched anew.

Before a term begins from a checkpoint, a host fetches the parts of it that it lacks. A part is fetched into a draft
beside its place, compared with what COMMIT says of it, and then gets its name; one host after the other is asked for it
until one gives it.
"""

from __future__ import annotations

import math
import os
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Self

from distflow.comm.client import Client
from distflow.comm.keys import Keys, key_file, read_keys
from distflow.data.decoding import Form, Whole, read
from distflow.errors import DistflowError, ProtocolError, WorkerFailed
from distflow.launch.cluster.host_report import Saved, Successor, Term
from distflow.launch.observe.file_server import READ_BYTES, WHOLE, FileData, head, inside
from distflow.launch.run.record import HOSTS, RunRecord, read_record
from distflow.launch.run.resume import checkpoint_of, missing_parts
from distflow.log import logger
from distflow.runtime.checkpoint.commit import (
    COMMIT,
    Fingerprint,
    checkpoints_of,
    commits,
    fingerprint,
    read_file,
    sync_folder,
)

COLLECTED = ("logs", "metrics", "rollouts", "trace", WHOLE)
"""What the first host keeps of a run that is over."""
ANSWER_S = 5.0
"""How long to wait for one answer; then the same is asked again over a new connection."""
PATIENCE_S, LOOK_S = 3.0, 30.0
"""For a command that reads: how long one silent host may hold it up, and how long fetching may take in all."""
log = logger(__name__)


class FileSync:
    """Fetches from the agents of the hosts in `apart`, by their numbers.

    A host that does not answer for `patience_s` seconds is given up; after `limit_s` seconds so is all that is left.
    """

    def __init__(self, record: RunRecord, apart: Collection[int], patience_s: float, limit_s: float = math.inf) -> None:
        self._record = record
        self._apart = sorted(apart)
        self._patience_s = patience_s
        self._limit_s = limit_s
        self._keys = read_keys(key_file(record.path)) if record.hosts else None
        self.unreachable: list[str] = []
        """Names of the hosts that did not answer in the last fetch."""
        self.progress_at = -math.inf
        """When the last piece of a file came, or the name of one (monotonic clock)."""

    def fetch(self, folders: Sequence[str]) -> None:
        """Bring these folders up to date; of checkpoints only the newest whole one."""
        deadline = time.monotonic() + self._limit_s
        self.unreachable = []
        listed: dict[int, list[ServedFile]] = {}
        with ExitStack() as stack:
            clients = {host: stack.enter_context(self._client(host, deadline)) for host in self._apart}
            for host, client in clients.items():
                try:
                    listed[host] = [self._noted(file) for folder in folders for file in client.list(folder)]
                    for file in listed[host]:
                        if not file.path.startswith(f"{WHOLE}/"):
                            self._fetch(client, file)
                except DistflowError as error:
                    self._give_up(host, error)
            if WHOLE in folders:
                self._fetch_checkpoint(clients, listed)

    def _client(self, host: int, deadline: float) -> FileClient:
        return FileClient(self._record.hosts[host].agent, self._keys, self._patience_s, deadline)

    def _fetch_checkpoint(self, clients: Mapping[int, FileClient], listed: Mapping[int, list[ServedFile]]) -> None:
        """All parts first, then the files that make it one."""
        here = [str(path.relative_to(self._record.path)) for path in self._record.path.glob(f"{WHOLE}/*/{COMMIT}")]
        there = [file.path for files in listed.values() for file in files if file.path.endswith(f"/{COMMIT}")]
        if not here and not there:
            return
        folder = max([*here, *there]).removesuffix(COMMIT)
        parts = [(host, file) for host, files in listed.items() for file in files if file.path.startswith(folder)]
        for host, file in sorted(parts, key=lambda part: part[1].path.endswith(COMMIT)):
            try:
                self._fetch(clients[host], file)
            except DistflowError as error:
                self._give_up(host, error)
                return

    def _give_up(self, host: int, error: DistflowError) -> None:
        name = self._record.hosts[host].name
        log.info("host %s: %s", name, error)
        if name not in self.unreachable:
            self.unreachable.append(name)

    def _fetch(self, client: FileClient, file: ServedFile) -> None:
        path = inside(self._record.path.resolve(), file.path)
        have = self._common(path, file)
        if have == file.size and path.exists() and path.stat().st_size == have:
            return
        path.parent.mkdir(parents=True, exist_ok=True)
        client.copy(file.path, path, have, file.size, self._note)

    def _note(self, have: int) -> None:
        self.progress_at = time.monotonic()

    def _noted(self, file: ServedFile) -> ServedFile:
        self._note(0)
        return file

    def _common(self, path: Path, file: ServedFile) -> int:
        """How many bytes of the file are here already."""
        if not path.exists():
            return 0
        size, length, digest = head(path, max(1, file.head_bytes))
        same = length == file.head_bytes and digest == file.head_digest
        return size if same and size <= file.size else 0


def apart(record: RunRecord) -> list[int]:
    """Hosts whose files are not in this run folder: their agent's nonce is not there either."""
    return [host for host, entry in enumerate(record.hosts) if entry.nonce and _nonce(record, host) != entry.nonce]


def _nonce(record: RunRecord, host: int) -> str | None:
    path = record.path / HOSTS / f"{host}.nonce"
    return path.read_text() if path.is_file() else None


def refresh(run_dir: Path, folders: Sequence[str]) -> list[str]:
    """Bring folders of a run up to date before they are read; returns the names of hosts that did not answer.

    Does nothing for a run on one host or on hosts that share the folder, nor once it is over: its end collects.
    """
    if not (run_dir / "run.json").is_file():
        return []
    record = read_record(run_dir)
    missing = apart(record)
    if record.over or not missing:
        return []
    mirror = FileSync(record, missing, PATIENCE_S, LOOK_S)
    mirror.fetch(folders)
    return mirror.unreachable


class CheckpointFetch:
    """For one agent. `patience_s`: after so long without another piece of a part, it is given up."""

    def __init__(self, run_dir: Path, patience_s: float) -> None:
        self._run_dir = run_dir
        self._patience_s = patience_s
        self._wanted: tuple[int, int] | None = None
        self._thread: threading.Thread | None = None
        self._fetching = ""
        """Which part, and how much of it is here."""
        self.fault: str | None = None
        """Why the parts that are wanted cannot be had."""

    def lacks(self, term: Successor, terms: Mapping[int, Term], agents: Mapping[int, str]) -> str:
        """What is being fetched of what the term begins from, and how much of it is here; "" when all is.

        `terms`: what the hosts report that they have; `agents`: addresses of their agents.
        """
        folder = checkpoint_of(self._run_dir, term.step)
        if folder is None:
            return ""
        if self._thread is not None and self._thread.is_alive():
            return f"{self._fetching} of {folder.name}"
        if _is_whole(folder):
            return ""
        what = (term.step, term.saved_by)
        if self._wanted != what:
            self._wanted, self.fault, self._fetching = what, None, COMMIT
            sources = _sources(terms, what, agents)
            log.warning("fetching what is missing here of %s from %s", folder.name, ", ".join(sources) or "nobody")
            self._thread = threading.Thread(target=self._fetch, args=(folder, sources), name="fetch", daemon=True)
            self._thread.start()
        return f"{self._fetching} of {folder.name}"

    def _fetch(self, folder: Path, sources: Mapping[str, frozenset[str]]) -> None:
        try:
            self._fetch_all(folder, sources)
        except (DistflowError, OSError) as error:
            self.fault = f"{folder.name} cannot be put together on this host: {error}"

    def _fetch_all(self, folder: Path, sources: Mapping[str, frozenset[str]]) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        # COMMIT last: without it the folder is no checkpoint yet.
        listed = folder / COMMIT
        commit, _ = read_file(listed)
        if commit is None:
            listed = self._fetch_one(folder, COMMIT, list(sources), lambda draft: read_file(draft)[1])
            commit, fault = read_file(listed)
            assert commit is not None, fault
        for name in missing_parts(folder, commit):
            having = [agent for agent, lacks in sources.items() if name not in lacks]
            self._fetch_one(folder, name, having, partial(_differs, commit.parts[name])).rename(folder / name)
        listed.rename(folder / COMMIT)
        sync_folder(folder)

    def _fetch_one(self, folder: Path, name: str, agents: Sequence[str], judge: Callable[[Path], str]) -> Path:
        """A draft of one file, which `judge` has found nothing wrong with. What there is of it is gone on from."""
        draft = folder / f"{name}.draft"
        faults = []
        for agent in agents:
            have = draft.stat().st_size if draft.exists() else 0
            try:
                self._copy(agent, f"checkpoints/{folder.name}/{name}", draft, have)
                fault = judge(draft)
                if fault and have:
                    # Some of it may be of another file of this name.
                    self._copy(agent, f"checkpoints/{folder.name}/{name}", draft, 0)
                    fault = judge(draft)
            except DistflowError as error:
                faults.append(f"{agent}: {error}")
                continue
            if not fault:
                return draft
            draft.unlink()
            faults.append(f"{agent}: {fault}")
        raise WorkerFailed(f"{name}: {'; '.join(faults) or 'no host that can be heard has it'}")

    def _copy(self, agent: str, path: str, draft: Path, have: int) -> None:
        def note(count: int) -> None:
            self._fetching = f"{draft.stem} ({count >> 30} GiB so far)"

        keys = read_keys(key_file(self._run_dir))
        with FileClient(agent, keys, self._patience_s, limit="limits.no_progress_s") as client:
            client.copy(path, draft, have, note=note)


def saved_here(run_dir: Path) -> tuple[Saved, ...]:
    """All checkpoints that count, with the parts that this folder lacks; who loads one reads every byte of it."""
    return tuple(
        Saved(commit.step, commit.term, missing_parts(folder, commit))
        for folder, commit in commits(checkpoints_of(run_dir))
    )


def _is_whole(folder: Path) -> bool:
    """Whether a checkpoint is here with all its parts."""
    commit, _ = read_file(folder / COMMIT)
    return commit is not None and not missing_parts(folder, commit)


def _differs(expected: Fingerprint, draft: Path) -> str:
    return "" if fingerprint(draft) == expected else "other bytes than COMMIT lists"


def _sources(terms: Mapping[int, Term], what: tuple[int, int], agents: Mapping[int, str]) -> dict[str, frozenset[str]]:
    """Agents of hosts that have the checkpoint, each with the parts that it lacks."""
    return {
        agents[host]: frozenset(saved.missing)
        for host, term in sorted(terms.items())
        for saved in term.checkpoints
        if (saved.step, saved.term) == what and agents.get(host)
    }


@dataclass(frozen=True, slots=True)
class ServedFile:
    """A file that an agent offers; `path` is relative to its run folder."""

    path: str
    size: int
    head_bytes: int
    head_digest: str


class _Listing(Form, frozen=True):
    files: list[tuple[str, Whole, Whole, str]]
    more: bool


class FileClient:
    """Fetches from one agent. Use as a context.

    `patience_s`: after so long without an answer it is given up; `deadline`: when all must be over (monotonic clock).
    `limit`: the key of the recipe that sets the patience, for messages.
    """

    def __init__(
        self, agent: str, keys: Keys | None, patience_s: float, deadline: float = math.inf, limit: str = ""
    ) -> None:
        self._limit = f" ({limit})" if limit else ""
        self._client = Client(agent, keys)
        self._patience_s = patience_s
        self._deadline = deadline

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *raised: object) -> None:
        self._client.close()

    def list(self, folder: str) -> Iterator[ServedFile]:
        """All files of a folder that it serves. Raises ProtocolError."""
        after, more = "", True
        while more:
            answer = self._ask("files.list", {"folder": folder, "after": after})
            listing = read(answer, _Listing, "answer to files.list")
            files = [ServedFile(*entry) for entry in listing.files]
            more, after = listing.more and bool(files), files[-1].path if files else ""
            yield from files

    def copy(
        self,
        path: str,
        to: Path,
        have: int = 0,
        size: int | None = None,
        note: Callable[[int], None] = lambda have: None,
    ) -> None:
        """Bring a file here from byte `have` on: to its end, or until there are `size` bytes. Raises ProtocolError.

        `note` is told after each piece how many there are. What has come stays if the rest does not: go on behind it.
        """
        handle = os.open(to, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            if have == 0:
                os.ftruncate(handle, 0)
            while size is None or have < size:
                most = READ_BYTES if size is None else min(READ_BYTES, size - have)
                answer = self._ask("files.read", {"path": path, "offset": have, "size": most})
                data = read(answer, FileData, "answer to files.read").data
                if not data:
                    return
                # Written where it belongs, not at the end: two commands may be fetching the same at once.
                have += os.pwrite(handle, data, have)
                note(have)
        finally:
            os.close(handle)

    def _ask(self, kind: str, body: Mapping[str, Any]) -> dict[str, Any]:
        asked = time.monotonic()
        while True:
            now = time.monotonic()
            left = min(asked + self._patience_s, self._deadline) - now
            if now >= self._deadline:
                raise ProtocolError(f"{kind}: not everything could be fetched in the time for it")
            if left <= 0:
                raise ProtocolError(f"{kind}: no answer for {self._patience_s:g} s{self._limit}")
            answer = self._client.ask(kind, body, min(ANSWER_S, left))
            if answer is not None and "error" in answer:
                raise ProtocolError(f"{kind}: {answer['error']}")
            if answer is not None:
                return answer
