"""Copies what other hosts wrote into the local run folder, where the hosts do not share one. Only what is new travels.

A file is written by one process, on one host, under that process's name, and only grows; so what is there already is
its beginning. Should its first bytes differ all the same (a resumed run wrote it anew), it is fetched anew.
"""

from __future__ import annotations

import os
import time
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from distflow.comm.client import ask
from distflow.comm.keys import key_file, read_keys
from distflow.data.decoding import Whole, read
from distflow.errors import DistflowError, ProtocolError
from distflow.launch.observe.file_server import READ_BYTES, WHOLE, FileData, head, inside
from distflow.launch.run.record import HOSTS, RunRecord, read_record
from distflow.log import logger

COLLECTED = ("logs", "metrics", "rollouts", "trace", WHOLE)
"""What the first host keeps of a run that is over."""
ANSWER_S = 3.0
LOOK_S = 30.0
"""For a command that reads; what has not come by then is left for the next time."""
COMMIT = "COMMIT"
log = logger(__name__)


@dataclass(frozen=True, slots=True)
class _File:
    path: str
    size: int
    head_bytes: int
    head_digest: str


class _Listing(msgspec.Struct, frozen=True):
    files: list[tuple[str, Whole, Whole, str]]
    more: bool


class FileSync:
    """Fetches from the agents of the hosts in `apart`, by their numbers, until `deadline_s` seconds have passed."""

    def __init__(self, record: RunRecord, apart: Collection[int], deadline_s: float) -> None:
        self._record = record
        self._apart = sorted(apart)
        self._limit_s = deadline_s
        self._deadline = 0.0
        self._keys = read_keys(key_file(record.path)) if record.hosts else None
        self.unreachable: list[str] = []
        """Names of the hosts that did not answer in the last fetch."""

    def fetch(self, folders: Sequence[str]) -> None:
        """Bring these folders up to date; of checkpoints only the newest whole one."""
        self._deadline = time.monotonic() + self._limit_s
        self.unreachable = []
        listed: dict[int, list[_File]] = {}
        for host in self._apart:
            try:
                listed[host] = [file for folder in folders for file in self._list(host, folder)]
                for file in listed[host]:
                    if not file.path.startswith(f"{WHOLE}/"):
                        self._fetch(host, file)
            except DistflowError as error:
                self._give_up(host, error)
        if WHOLE in folders:
            self._fetch_checkpoint(listed)

    def _fetch_checkpoint(self, listed: dict[int, list[_File]]) -> None:
        """All parts first, then the files that make it one."""
        here = [str(path.relative_to(self._record.path)) for path in self._record.path.glob(f"{WHOLE}/*/{COMMIT}")]
        there = [file.path for files in listed.values() for file in files if file.path.endswith(f"/{COMMIT}")]
        if not here and not there:
            return
        folder = max([*here, *there]).removesuffix(COMMIT)
        parts = [(host, file) for host, files in listed.items() for file in files if file.path.startswith(folder)]
        for host, file in sorted(parts, key=lambda part: part[1].path.endswith(COMMIT)):
            try:
                self._fetch(host, file)
            except DistflowError as error:
                self._give_up(host, error)
                return

    def _give_up(self, host: int, error: DistflowError) -> None:
        name = self._record.hosts[host].name
        log.info("host %s: %s", name, error)
        if name not in self.unreachable:
            self.unreachable.append(name)

    def _list(self, host: int, folder: str) -> Iterator[_File]:
        after, more = "", True
        while more:
            answer = self._ask(host, "files.list", {"folder": folder, "after": after})
            listing = read(answer, _Listing, "answer to files.list")
            files = [_File(*entry) for entry in listing.files]
            more, after = listing.more and bool(files), files[-1].path if files else ""
            yield from files

    def _fetch(self, host: int, file: _File) -> None:
        path = inside(self._record.path.resolve(), file.path)
        have = self._common(path, file)
        if have == file.size and path.exists() and path.stat().st_size == have:
            return
        path.parent.mkdir(parents=True, exist_ok=True)
        handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            if have == 0:
                os.ftruncate(handle, 0)
            while have < file.size:
                # Written where it belongs, not at the end: two commands may be fetching the same at once.
                body = {"path": file.path, "offset": have, "size": min(READ_BYTES, file.size - have)}
                data = read(self._ask(host, "files.read", body), FileData, "answer to files.read").data
                if not data:
                    break
                have += os.pwrite(handle, data, have)
        finally:
            os.close(handle)

    def _common(self, path: Path, file: _File) -> int:
        """How many bytes of the file are here already."""
        if not path.exists():
            return 0
        size, length, digest = head(path, max(1, file.head_bytes))
        same = length == file.head_bytes and digest == file.head_digest
        return size if same and size <= file.size else 0

    def _ask(self, host: int, kind: str, body: dict[str, Any]) -> dict[str, Any]:
        left = self._deadline - time.monotonic()
        if left <= 0:
            raise ProtocolError(f"{kind}: not everything could be fetched within {self._limit_s:g} s")
        answer = ask(self._record.hosts[host].agent, kind, body, min(ANSWER_S, left), self._keys)
        if answer is None:
            raise ProtocolError(f"{kind}: its agent did not answer within {min(ANSWER_S, left):.1f} s")
        if "error" in answer:
            raise ProtocolError(f"{kind}: {answer['error']}")
        return answer


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
    mirror = FileSync(record, missing, LOOK_S)
    mirror.fetch(folders)
    return mirror.unreachable
