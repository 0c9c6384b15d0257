"""The run that a client is attached to: who owns its samples, and whether it goes on. All of it may take seconds."""

from __future__ import annotations

import os
import shlex
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Protocol

import msgspec
from msgspec import structs

from distflow.comm.client import ask
from distflow.data.decoding import read
from distflow.errors import NoProgressError, UserError, WorkerFailed
from distflow.exchange.store_channel import OWNERS
from distflow.launch.observe.run_client import ANSWER_S, ask_any_agent, keys_of
from distflow.launch.run.record import FINAL, RunRecord, read_record

CHECK_EVERY_S = 0.5
LOOK_EVERY_S = 2.5


class _Told(msgspec.Struct, frozen=True):
    """What an agent tells of a run, as far as clients need it."""

    state: str
    roster: Mapping[str, str]


class HasPath(Protocol):
    """A run from Python: `distflow.launch` or `distflow.load_run`."""

    @property
    def path(self) -> Path:
        """The run folder."""
        ...


class AttachedRun:
    """A run, or the one in a folder, which may be a copy of its run.json and key on another machine. For any thread."""

    def __init__(self, run: HasPath | str | os.PathLike[str]) -> None:
        self._path = _folder_of(run)
        self._looked_at = 0.0
        self._told: Mapping[str, str] = {}
        """Addresses that an agent has told."""
        self.record = read_record(self._path)

    def find_owners(self, deadline: float) -> tuple[str, ...]:
        """Ask the training workers who owns samples; in a run that starts they may not listen yet.

        Raises UserError for a run that is over, NoProgressError if nobody answers until then.
        """
        while True:
            record = self._read()
            if record.over:
                raise UserError(f"{self._path}: this run is over ({record.state}) — a Client needs one that goes on")
            owners = self.owners()
            if owners:
                return owners
            self._ask_agents(record)
            if time.monotonic() >= deadline:
                raise NoProgressError(
                    f"{self._path}: no training worker of this run answers — {self._status()} tells why"
                )
            time.sleep(CHECK_EVERY_S)

    def owners(self) -> tuple[str, ...]:
        """Who owns samples now; nobody if no training worker answers."""
        record = self.record
        for name in record.trainers:
            address = record.roster.get(name)
            answer = ask(address, OWNERS, {}, ANSWER_S, keys_of(record)) if address else None
            if answer is not None:
                return tuple(str(owner) for owner in answer["owners"])
        return ()

    def due(self, now: float) -> bool:
        """Whether it is time for a look; if so, for one thread only."""
        if now - self._looked_at < LOOK_EVERY_S:
            return False
        self._looked_at = now
        return True

    def ended(self) -> bool:
        """Whether the run has ended in order; raises WorkerFailed if it has failed."""
        record = self._read()
        # A copy of run.json on another machine stays as it was.
        state = record.state if record.over else self._ask_agents(record)
        if state == "failed":
            why = "" if record.failure is None else f": {record.failure.message}"
            raise WorkerFailed(f"{record.name} has failed{why} — {self._status()} tells more")
        return state in FINAL

    def _status(self) -> str:
        return f"`distflow status {shlex.quote(str(self._path))}`"

    def _ask_agents(self, record: RunRecord) -> str:
        """The state of a run on several hosts as an agent tells it; "": nobody does. Where workers listen by now, too:
        those that are restarted have other ports.
        """
        answer = ask_any_agent(record, "status", {}, ANSWER_S) if record.hosts else None
        if answer is None:
            return ""
        told = read(answer, _Told, "status")
        self._told = told.roster
        self._read()
        return told.state

    def _read(self) -> RunRecord:
        record = read_record(self._path)
        self.record = structs.replace(record, roster={**record.roster, **self._told})
        return self.record


def _folder_of(run: HasPath | str | os.PathLike[str]) -> Path:
    if isinstance(run, str | os.PathLike):
        return Path(run)
    if not isinstance(getattr(run, "path", None), Path):
        raise UserError(f"run: expected a run's folder, or what distflow.launch or load_run returned, got {run!r}")
    return run.path
