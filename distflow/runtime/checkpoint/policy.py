"""Checkpoints of all training workers, written while training goes on.

The stages of a checkpoint. *Due*: every `run.save_every` training steps or `run.save_every_s` seconds. *Begun* after a
training step: the state does not change before the next `apply`, so a thread copies this replica's share meanwhile, and
`apply` waits only for what is not copied by then. *Written* by the same thread: parts, checksums, fsync. *Agreed on*
after a later training step, when every replica has told the others that its parts are written; COMMIT then lists all of
them. With a single replica, COMMIT follows the parts at once. If any replica could not write its parts (a full disk),
all abandon this checkpoint and training continues.

Only one is under way at a time. Checkpoints that become due meanwhile are merged into one, begun after the first
training step at which the previous one is done: training never waits for a disk, and a slow disk gets as many
checkpoints as it can write. The last one of a run is waited for.

What is due, agreed on or abandoned is a function of the training step and of facts that every replica has received from
every other: they call `step_done` and `save_now` at the same points.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

from distflow.comm.fact_exchange import Fact
from distflow.config.schema import RunConfig
from distflow.data.difficulty import Difficulty
from distflow.errors import StepError, UserError, WorkerFailed
from distflow.exchange.kept_samples import KeptSamples
from distflow.exchange.owner import OwnerCore
from distflow.runtime.checkpoint.format import Shard
from distflow.runtime.checkpoint.parts import DIFFICULTY, HOME, LEDGER, CheckpointWriter, ModelFolders
from distflow.runtime.checkpoint.writer_thread import CheckpointThread, Flight, Parts, mean_of
from distflow.runtime.metrics import MetricStore
from distflow.runtime.node import SAY_EVERY_S, Node, agent_of
from distflow.runtime.protocols import Backend
from distflow.runtime.replicas import MemberGroup
from distflow.runtime.steps import StepContext
from distflow.runtime.waits import WaitBoard
from distflow.types import Version, is_validated

STALL, WRITE = "timing_s/save_stall", "timing_s/save_write"
PUT_OFF = "checkpoint/put_off/count"


@dataclass(frozen=True, slots=True)
class SavingParts:
    """What goes into a checkpoint, and where it goes."""

    home: str
    """The pool of this replica."""
    core: OwnerCore | None
    """None on replicas that own no ledgers."""
    models: Mapping[str, Backend]
    """The trained models."""
    contexts: Mapping[str, StepContext]
    writer: CheckpointWriter
    commits: bool
    """This replica writes COMMIT for its host."""
    record: Callable[[], None]
    """Queues the samples that were trained on last for the dumps."""
    flush: Callable[[], None]
    """Writes that queue to the disk: samples that a checkpoint counts are never generated again."""
    unread: Callable[[Mapping[str, Any]], KeptSamples] = lambda ledgers: KeptSamples((), {})
    """What consumers outside the run have yet to read, of what these ledgers have trained on."""
    folders: ModelFolders | None = None
    """Only where the recipe asks for Hugging Face folders."""
    difficulty: Difficulty | None = None
    """What is known of the prompts' pass rates, at the owner that saves it for all."""
    validated: Callable[[], Mapping[int, float]] = dict
    """What checkpoints are kept for, by version, if validation measures it here."""


class Saving:
    """The checkpoints of one replica. `run`: when they are due, and which are kept."""

    def __init__(
        self,
        parts: SavingParts,
        run: RunConfig,
        no_progress_s: float,
        replicas: MemberGroup,
        board: WaitBoard,
        metrics: MetricStore,
    ) -> None:
        self._parts = parts
        self._run = run
        self._no_progress_s = no_progress_s
        self._replicas = replicas
        self._board = board
        self._metrics = metrics
        self._states: Mapping[str, object] = {}
        self._thread = CheckpointThread(
            parts.writer,
            parts.flush,
            metrics,
            board.wake,
            alone=replicas.size == 1,
            folders=parts.folders if replicas.rank == 0 else None,
        )
        self._flight: Flight | None = None
        self._prepared: Future[Any] | None = None
        """Done when the buffers are ready, which takes a copy of the state."""
        self._removal: Future[None] | None = None
        """Done when the draft of the last failed checkpoint is removed."""
        self._commit: Future[str] | None = None
        """Only on replicas that write COMMIT: the error, or an empty text."""
        self._confirmed = True
        """Whether all replicas know if the last COMMIT succeeded."""
        self._saved = -1
        self._owed = self._hf_owed = False
        """Whether a checkpoint is due; whether a Hugging Face folder is to be made from it."""
        self._measured = is_validated(run.keep_best)
        self._last_due = time.monotonic()

    def already(self, number: int) -> None:
        """Note that the run resumes from the checkpoint of this version."""
        self._saved = number
        self._thread.catch_up(number, self._run.hf_every)
        self._thread.copy_again(number)

    def prepare(self) -> None:
        """Before the first training step: prepare the buffers, if checkpoints will be written while training."""
        if self._run.save_every > 0 or self._run.hf_every > 0 or self._run.save_every_s is not None:
            self._prepared = self._thread.prepare(self._shards())

    def note_states(self) -> None:
        """Keep the steps' present states, for a stop within the next training step."""
        self._states = _plain_states(self._parts.contexts)

    def step_done(self, version: Version) -> None:
        """After every training step: begin what is due, finish what is written. At the end of the run, wait for it.

        Raises StepError for a state of a step that cannot be saved, WorkerFailed if the last checkpoint failed.
        """
        number, run = version.number, self._run
        if self._commit is not None and self._commit.done():
            self._commit.result()  # Raises errors that are not the disk's: another term of the run has begun.
        self._hf_owed = self._hf_owed or (run.hf_every > 0 and number % run.hf_every == 0)
        if number in (run.training_steps, run.stop_after):
            self.end(version)
            return
        self._owed = self._owed or self._hf_owed or (run.save_every > 0 and number % run.save_every == 0)
        if self._has_to_talk:
            with self._metrics.timed(STALL):
                self._conclude(self._talk())
        if not self._owed:
            return
        if self._flight is not None:
            self._metrics.add(PUT_OFF, 1)
            return
        with self._metrics.timed(STALL):
            self.note_states()
            self._begin(version, self._score())

    def end(self, version: Version) -> None:
        """After the last training step: write the whole checkpoint, unless it exists, and wait for it.

        Raises StepError and WorkerFailed as `step_done`.
        """
        self.note_states()
        self.save_now(version, scored=True)
        if self._run.hf_every > 0:
            self._finish_folder()

    def wait_for_copy(self) -> None:
        """Wait until the state that is being saved is copied, before a caller changes or moves it."""
        copied = self._prepared if self._flight is None else self._flight.copied
        if copied is not None and not copied.done():
            with self._metrics.timed(STALL):
                self._wait(copied, "the copy of the state for a checkpoint")

    def save_now(self, version: Version, *, scored: bool = False) -> None:
        """Write a whole checkpoint of the state after `version.number` training steps, and wait for it.

        In a run that is stopped within a step, the metrics belong to another version: `scored` is then false.
        Raises WorkerFailed if it cannot be written.
        """
        trouble = self.try_now(version, scored=scored)
        if trouble is not None:
            newest = self._parts.writer.newest()
            some = newest != "none"
            go_on = (
                f"The newest is {newest}: make room, and resume from it with --resume"
                if some
                else "No checkpoint exists; --resume would begin again at step 1"
            )
            raise WorkerFailed(
                f"the last checkpoint, after training step {version.number}, could not be written: {trouble}. {go_on}."
            )

    def try_now(self, version: Version, *, scored: bool = False) -> str | None:
        """As `save_now`, but returns why it could not be written; all replicas are told the same."""
        with self._metrics.timed(STALL):
            if self._flight is not None and self._finish() is not None:
                self._remove()
            if self._saved == version.number and self._confirm() is None:
                return None
            self._begin(version, self._score() if scored else (0.0, 0.0))
            trouble = self._finish() or self._confirm()
            if trouble is not None and self._removal is not None:
                self._remove()
            return trouble

    def close(self, limit_s: float) -> None:
        """Finish what is being written, as long as no `limit_s` seconds pass without progress."""
        self._thread.close(limit_s)
        writer = self._parts.writer
        if writer.copies is not None:
            with self._board.shown("the copy of the last checkpoint to run.copy_to", ()):
                writer.copies.close(limit_s, lambda: writer.written)

    # -- on the main thread

    def _begin(self, version: Version, score: tuple[float, float]) -> None:
        as_folder = self._hf_owed
        self._owed = self._hf_owed = False
        self._last_due = time.monotonic()
        parts = self._parts
        with self._board.condition:
            worker: dict[str, Any] = {HOME: parts.home, "steps": self._states}
            unread = KeptSamples((), {})
            if parts.core is not None:
                worker[LEDGER] = parts.core.snapshot()
                unread = parts.unread(worker[LEDGER])
            if parts.difficulty is not None:
                worker[DIFFICULTY] = parts.difficulty.snapshot(version.number)
        parts.record()
        self._flight = self._thread.begin(
            version,
            score,
            self._shards(),
            worker,
            unread=unread.encode,
            validated=parts.validated(),
            as_folder=as_folder,
        )

    def _shards(self) -> dict[str, list[Shard]]:
        return {name: list(model.state_shards()) for name, model in self._parts.models.items()}

    @property
    def _has_to_talk(self) -> bool:
        """The same on every replica: it depends on the recipe and on what all have agreed on before."""
        unmeasured = self._run.keep_best is not None and not self._measured
        return self._flight is not None or self._run.save_every_s is not None or unmeasured

    def _talk(self) -> list[Fact]:
        run, flight = self._run, self._flight
        due = run.save_every_s is not None and time.monotonic() - self._last_due >= run.save_every_s
        fact: dict[str, object] = {"due": due, "measured": self._score()[1] > 0}
        if flight is not None:
            done = flight.written.done()
            trouble = _trouble(flight.written) if done else None
            good = done and trouble is None
            fact |= {"done": done, "trouble": trouble, "score": list(flight.score)}
            fact |= {"validated": list(flight.validated.items())}
            fact |= {"parts": {k: list(v) for k, v in flight.written.result().items()} if good else {}}
        facts = self._replicas.agree("the checkpoint", fact)
        self._owed = self._owed or any(fact["due"] for fact in facts)
        if run.keep_best is not None and not self._measured:
            self._measured = any(fact["measured"] for fact in facts)
            if not self._measured:
                raise UserError(
                    f"run.keep_best: no training worker measured a mean {run.keep_best!r} in the first training step — "
                    f"choose one of {', '.join(self._metrics.means())}"
                )
        return facts

    def _conclude(self, facts: Sequence[Fact]) -> None:
        """When all replicas are done with their parts: write COMMIT, or abandon the checkpoint."""
        flight = self._flight
        if flight is None or not all(fact["done"] for fact in facts):
            return
        self._flight = None
        self._metrics.add(WRITE, flight.seconds)
        if any(fact["trouble"] is not None for fact in facts):
            self._removal = self._thread.abandon(flight.version)
            return
        self._saved = flight.version.number
        if self._replicas.size == 1:
            return
        self._confirmed = False
        parts = {name: part for fact in facts for name, part in fact["parts"].items()}
        if self._parts.commits:
            score = mean_of([fact["score"] for fact in facts])
            validated = {int(number): float(value) for fact in facts for number, value in fact["validated"]}
            self._commit = self._thread.commit(flight, parts, score, validated)

    def _finish(self) -> str | None:
        """Wait for the parts of all replicas and conclude; return the error, if there was one."""
        assert self._flight is not None, "no checkpoint is under way"
        self._wait(self._flight.written, "the parts of the checkpoint")
        facts = self._talk()
        self._conclude(facts)
        return next((str(fact["trouble"]) for fact in facts if fact["trouble"] is not None), None)

    def _remove(self) -> None:
        """Wait until every replica has removed its failed draft: the same version may be written again."""
        assert self._removal is not None, "something failed"
        self._wait(self._removal, "the removal of a checkpoint that failed")
        if self._replicas.size > 1:
            self._replicas.agree("the removal of a checkpoint that failed", {})

    def _confirm(self) -> str | None:
        """Wait for the COMMIT of all hosts; return the error, if there was one."""
        if self._confirmed:
            return None
        trouble = ""
        if self._commit is not None:
            self._wait(self._commit, "COMMIT of the checkpoint")
            trouble = self._commit.result()
        facts = self._replicas.agree("whether the checkpoint is whole", {"trouble": trouble})
        self._confirmed, self._commit = True, None
        return next((str(fact["trouble"]) for fact in facts if fact["trouble"]), None)

    def _finish_folder(self) -> None:
        """Wait for the last Hugging Face folder, which one replica writes for all."""
        if self._thread.folder is not None:
            self._wait(self._thread.folder, "the Hugging Face folder")
        if self._replicas.size > 1:
            self._replicas.agree("the Hugging Face folder", {})

    def _score(self) -> tuple[float, float]:
        metric = self._run.keep_best
        return (0.0, 0.0) if metric is None or is_validated(metric) else self._metrics.mean_so_far(metric)

    def _wait(self, future: Future[Any], what: str) -> None:
        self._board.until(
            lambda: True if future.done() else None,
            name=what,
            peers=(),
            limit_s=self._no_progress_s,
            progress=lambda: self._parts.writer.written,
            even_when_stopping=True,
        )


def _trouble(written: Future[Parts]) -> str | None:
    """Return the OSError text of a failed write; re-raise any other exception."""
    error = written.exception()
    if error is not None and not isinstance(error, OSError):
        raise error
    return None if error is None else str(error)


def _plain_states(contexts: Mapping[str, StepContext]) -> dict[str, object]:
    """A copy of what the steps keep in `ctx.state`; raises StepError for values that a checkpoint cannot hold."""
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


class CheckpointReports:
    """Tells the agent how far this worker is with a checkpoint: it gives a worker that is ending time to save."""

    def __init__(self, node: Node, host: int) -> None:
        self._node = node
        self._agent = agent_of(host)
        self._say_at = 0.0
        self._said = 0
        node.on_tick(self._tick)

    def _tick(self, now: float) -> None:
        amount = self._node.checkpointed
        if amount != self._said and now >= self._say_at and self._agent in self._node.endpoint.roster:
            self._say_at, self._said = now + SAY_EVERY_S, amount
            self._node.send(self._agent, "checkpointed", {"bytes": amount})
