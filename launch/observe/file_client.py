"""Reads files of a run folder on another host from the agent there, and the parts of a checkpoint before a term begins.

A part is fetched into a draft beside its place, compared with what COMMIT says of it, and then gets its name; one host
after the other is asked for it until one gives it. On a full disk it waits for room, and goes on behind what it has.
"""

from __future__ import annotations

import errno
import math
import os
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Self

from distflow.cluster.host_report import Saved, Successor, Term
from distflow.comm.client import RequestClient
from distflow.comm.keys import Keys, key_file, read_keys
from distflow.data.decoding import Form, Whole, read
from distflow.errors import DistflowError, ProtocolError, WorkerFailed
from distflow.launch.observe.file_server import READ_BYTES, FileData
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

ANSWER_S = 5.0
"""How long to wait for one answer; then the same is asked again over a new connection."""
READS = 4
"""Pieces of one file that are asked for at once, each over a connection of its own."""


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


class OutOfTime(ProtocolError):
    """The agent answers, but not everything could be fetched in the time for it."""


class NoAnswer(ProtocolError):
    """The agent was asked for as long as anybody waits, without an answer."""


class FileClient:
    """Fetches from one agent. Use as a context.

    `patience_s`: after so long without an answer it is given up; `deadline`: when all must be over (monotonic clock).
    `limit`: the key of the recipe that sets the patience, for messages.
    """

    def __init__(
        self, agent: str, keys: Keys | None, patience_s: float, deadline: float = math.inf, limit: str = ""
    ) -> None:
        self._limit = f" ({limit})" if limit else ""
        self._clients = [RequestClient(agent, keys) for _ in range(READS)]
        self._idle: queue.SimpleQueue[RequestClient] = queue.SimpleQueue()
        for client in self._clients:
            self._idle.put(client)
        self._patience_s = patience_s
        self._deadline = deadline
        self._answered = False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *raised: object) -> None:
        for client in self._clients:
            client.close()

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
            for piece in self._to_end(path, have) if size is None else self._ahead(path, have, size):
                left = memoryview(piece)
                while left:
                    # Written where it belongs, not at the end: two commands may be fetching the same at once.
                    written = os.pwrite(handle, left, have)
                    left, have = left[written:], have + written
                note(have)
        finally:
            os.close(handle)

    def _to_end(self, path: str, have: int) -> Iterator[bytes]:
        while data := self._read(path, have, READ_BYTES):
            yield data
            have += len(data)

    def _ahead(self, path: str, have: int, size: int) -> Iterator[bytes]:
        """The pieces in order, while those behind them are on their way. Ends early with a file that is shorter."""
        rest = iter(range(have, size, READ_BYTES))
        with ThreadPoolExecutor(READS, thread_name_prefix="read") as pool:
            coming: deque[tuple[int, Future[bytes]]] = deque()

            def ask_on() -> None:
                for offset in rest:
                    count = min(READ_BYTES, size - offset)
                    coming.append((count, pool.submit(self._read, path, offset, count)))
                    if len(coming) >= READS:
                        return

            try:
                ask_on()
                while coming:
                    count, piece = coming.popleft()
                    data = piece.result()
                    yield data
                    if len(data) < count:
                        return
                    ask_on()
            finally:
                for _, piece in coming:
                    piece.cancel()

    def _read(self, path: str, offset: int, size: int) -> bytes:
        answer = self._ask("files.read", {"path": path, "offset": offset, "size": size})
        return read(answer, FileData, "answer to files.read").data

    def _ask(self, kind: str, body: Mapping[str, Any]) -> dict[str, Any]:
        client = self._idle.get()
        try:
            return self._ask_by(client, kind, body)
        finally:
            self._idle.put(client)

    def _ask_by(self, client: RequestClient, kind: str, body: Mapping[str, Any]) -> dict[str, Any]:
        asked = time.monotonic()
        while True:
            now = time.monotonic()
            left = min(asked + self._patience_s, self._deadline) - now
            if now >= self._deadline and (self._answered or asked >= self._deadline):
                raise OutOfTime(f"{kind}: not everything could be fetched in the time for it")
            if left <= 0:
                raise NoAnswer(f"{kind}: no answer for {min(self._patience_s, now - asked):.3g} s{self._limit}")
            answer = client.ask(kind, body, min(ANSWER_S, left))
            self._answered |= answer is not None
            if answer is not None and "error" in answer:
                raise ProtocolError(f"{kind}: {answer['error']}")
            if answer is not None:
                return answer


FULL = (errno.ENOSPC, errno.EDQUOT)
AGAIN_S = 1.0
"""How often it is tried whether a full disk takes more."""
log = logger(__name__)


class CheckpointFetch:
    """For one agent. `patience_s`: after so long without another piece of a part, it is given up."""

    def __init__(self, run_dir: Path, patience_s: float) -> None:
        self._run_dir = run_dir
        self._patience_s = patience_s
        self._wanted: tuple[int, int] | None = None
        self._thread: threading.Thread | None = None
        self._fetching = ""
        """Which part, and how much of it is here."""
        self._again_at = 0.0
        self.no_room = False
        """Whether the disk is full: no more of the parts has come since it refused them."""
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
        new = self._wanted != what
        if new:
            self._wanted, self.fault, self.no_room, self._fetching = what, None, False, COMMIT
        if new or (self.no_room and time.monotonic() >= self._again_at):
            sources = _sources(terms, what, agents)
            if new:
                log.warning("fetching what is missing here of %s from %s", folder.name, ", ".join(sources) or "nobody")
            self._thread = threading.Thread(target=self._fetch, args=(folder, sources), name="fetch", daemon=True)
            self._thread.start()
        return f"{self._fetching} of {folder.name}"

    def _fetch(self, folder: Path, sources: Mapping[str, frozenset[str]]) -> None:
        try:
            self._fetch_all(folder, sources)
        except (DistflowError, OSError) as error:
            if isinstance(error, OSError) and error.errno in FULL:
                if not self.no_room:
                    log.error("%s waits for room on the disk: %s", folder.name, error)
                self._again_at, self.no_room = time.monotonic() + AGAIN_S, True
                return
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
            self.no_room = False
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
