"""Checkpoints of a training pool: every replica writes its parts, all learn of all parts, COMMIT lists them."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from distflow.errors import StepError
from distflow.exchange.owner import OwnerCore
from distflow.log import logger
from distflow.runtime.checkpoint import CheckpointWriter
from distflow.runtime.context import StepContext
from distflow.runtime.metrics import MetricStore
from distflow.runtime.protocols import Backend
from distflow.runtime.replicas import Replicas
from distflow.runtime.waits import WaitBoard
from distflow.types import Version

log = logger(__name__)


@dataclass(frozen=True, slots=True)
class SavingParts:
    """What goes into a checkpoint, and where it goes."""

    core: OwnerCore
    models: Mapping[str, Backend]
    """The trained ones."""
    contexts: Mapping[str, StepContext]
    writer: CheckpointWriter
    commits: bool
    """This replica writes COMMIT for its host."""
    flush: Callable[[], None]
    """Brings the record of all trained samples to the disk: what a checkpoint counts is never sampled again."""


class Saving:
    """Of one replica. All replicas save at the same training steps."""

    def __init__(self, parts: SavingParts, replicas: Replicas, board: WaitBoard, metrics: MetricStore) -> None:
        self._parts = parts
        self._replicas = replicas
        self._board = board
        self._metrics = metrics
        self._states: Mapping[str, object] = {}
        self._saved = -1

    def already(self, number: int) -> None:
        """The run begins at this version, which lies in a checkpoint."""
        self._saved = number

    def note_states(self) -> None:
        """Keep the steps' states as they are now, for a stop in the middle of what follows."""
        self._states = _plain_states(self._parts.contexts)

    def save(self, version: Version) -> None:
        """Write a checkpoint of the state after `version.number` training steps, unless there is one."""
        if self._saved == version.number:
            return
        parts = self._parts
        with self._board.condition:
            ledger = parts.core.snapshot()
        with self._metrics.timed("timing_s/save_checkpoint"):
            parts.flush()
            shards = {name: list(model.state_shards()) for name, model in parts.models.items()}
            own = parts.writer.write_parts(version, shards, {"ledger": ledger, "steps": self._states})
            facts = self._replicas.agree("the parts of the checkpoint", {"parts": own})
            if parts.commits:
                folder = parts.writer.commit(version, {k: part for fact in facts for k, part in fact["parts"].items()})
                log.info("saved %s", folder)
        self._saved = version.number


def _plain_states(contexts: Mapping[str, StepContext]) -> dict[str, object]:
    """A copy of what the steps keep in `ctx.state`; raises StepError for what cannot go into a checkpoint."""
    copies: dict[str, object] = {}
    for name, context in contexts.items():
        try:
            copies[name] = json.loads(json.dumps(context.state))
        except (TypeError, ValueError) as error:
            raise StepError(
                f"step {name!r} on {context.worker}: ctx.state cannot go into a checkpoint ({error}) — keep numbers, "
                "texts, lists, and dicts with text keys there"
            ) from error
    return copies
