"""Copies what other hosts wrote into the local run folder, where the hosts do not share one. Only what is new travels.

A file is written by one process, on one host, under that process's name, and only grows; so what is there already is
its beginning. Should its first bytes differ all the same (a resumed run wrote it anew), it is fetched anew.
"""

from __future__ import annotations

import math
import time
from collections.abc import Collection, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path

from distflow.comm.keys import key_file, read_keys
from distflow.errors import DistflowError
from distflow.launch.observe.file_client import FileClient, ServedFile
from distflow.launch.observe.file_server import WHOLE, head, inside
from distflow.launch.run.record import HOSTS, RunRecord, read_record
from distflow.log import logger

COLLECTED = ("logs", "metrics", "rollouts", "trace", WHOLE)
"""What the first host keeps of a run that is over."""
ANSWER_S = 3.0
"""For a command that reads: a host that says nothing for so long is left out."""
LOOK_S = 30.0
"""For such a command in all; what has not come by then is left for the next time."""
COMMIT = "COMMIT"
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
    mirror = FileSync(record, missing, ANSWER_S, LOOK_S)
    mirror.fetch(folders)
    return mirror.unreachable
