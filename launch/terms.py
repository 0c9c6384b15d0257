"""The training pool's terms on one host: ends its training workers when one was killed anywhere, and starts them again.

What is decided, and when, is in `mesh/renewal.py`; this is where it meets the run folder.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace

import yaml

from distflow.config.yamlfile import yaml_text
from distflow.launch.ending import log_file
from distflow.launch.mesh.core import Mesh
from distflow.launch.mesh.renewal import is_broken, next_term
from distflow.launch.mesh.report import Term
from distflow.launch.processes import sweep_term
from distflow.launch.record import Failure, RunRecord
from distflow.launch.resuming import checkpoint_of, forget_drafts, whole_steps
from distflow.launch.supervisor import Action, Supervisor
from distflow.log import logger
from distflow.types import WorkerName

ELSEWHERE = "a training worker on another host was killed"
log = logger(__name__)


class Terms:
    """For one agent."""

    def __init__(self, record: RunRecord, host: int, core: Supervisor) -> None:
        self._run_dir = record.path
        self._host = host
        self._tries = record.restarts
        self._core = core
        self._trainers = {entry.name: entry.host for entry in record.workers if entry.trains}
        self._term = Term(record.term)

    @property
    def present(self) -> Term:
        """As it is to be reported."""
        if self._core.broken is None:
            return self._term
        if not self._term.broken:
            reason = "" if self._core.broken == ELSEWHERE else self._core.broken
            self._term = replace(self._term, broken=True, reason=reason)
        if not self._core.trains and not self._term.ended:
            # Nobody writes here any more: what is whole now stays so.
            self._term = replace(self._term, ended=True, checkpoints=whole_steps(self._run_dir))
        return self._term

    def act(self, mesh: Mesh, apart: Collection[int], now: float) -> list[Action]:
        """Do this host's part. The mesh has our report of `present`; hosts in `apart` have run folders of their own."""
        core = self._core
        if core.winding_up or not is_broken(mesh):
            return []
        hosts = set(self._trainers.values())
        if len(hosts) > 1 and hosts & set(apart):
            return core.fail(self._divided(), now)
        if core.broken is None:
            return core.break_up(ELSEWHERE)
        term = None if core.trains else next_term(mesh, self._trainers)
        if term is None:
            return []
        if term.tries > self._tries:
            return core.fail(self._given_up(term), now)
        return self._begin(term)

    def _begin(self, term: Term) -> list[Action]:
        log.warning("%s", term)
        sweep_term(self._run_dir, self._host, self._term.number)
        forget_drafts(self._run_dir)
        self._term = term
        for name in self._own():
            self._rewrite(name, term)
        return self._core.renew()

    def _own(self) -> Sequence[str]:
        return [name for name, host in self._trainers.items() if host == self._host]

    def _rewrite(self, name: str, term: Term) -> None:
        path = self._run_dir / "workers" / f"{WorkerName.parse(name).file_stem}.yaml"
        document = yaml.safe_load(path.read_text())
        checkpoint = checkpoint_of(self._run_dir, term.step)
        document |= {"term": term.number, "resume": None if checkpoint is None else str(checkpoint)}
        draft = path.with_suffix(".draft")
        draft.write_text(yaml_text(document))
        draft.replace(path)

    def _divided(self) -> Failure:
        why = self._core.broken or ELSEWHERE
        message = (
            f"{why}, and no host has all parts of a checkpoint, since training workers on several hosts have run "
            "folders of their own — go on with --resume, or give the hosts a shared run folder"
        )
        return self._failure(message)

    def _failure(self, message: str) -> Failure:
        worker = next(iter(self._own()), next(iter(self._trainers)))
        return Failure(worker, 3, "WorkerFailed", message, "", str(log_file(self._run_dir, worker)))

    def _given_up(self, term: Term) -> Failure:
        return self._failure(
            f"{term.reason}, as {term.tries} times in a row now since the checkpoint of training step "
            f"{term.step} (limits.restarts: {self._tries}) — look at the logs; go on with --resume when the cause is "
            "found"
        )
