"""The training side of a worker off the home of the policy: it trains a further model on rows that owners deal to it.

It decides nothing about the run: with the rows of a training step the owners say whether to train on them or to stop,
the same to all replicas of all homes. While it waits for rows it answers calls for its model, of just the version that
this step begins with, and takes part in the rounds of other replicas.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from distflow.comm.fact_exchange import Fact
from distflow.data.batch import Batch, group_ranges
from distflow.data.micro_batches import minibatch_rows, with_agreed
from distflow.errors import RunEnded, RunStopped, TermEnded
from distflow.exchange.dealing import DealRule, Offer, deal_step, ranks
from distflow.exchange.facts import ENDS_BECAUSE
from distflow.metrics.learning_signal import LearningSignal
from distflow.runtime.checkpoint.parts import CheckpointWriter
from distflow.runtime.checkpoint.policy import Saving, SavingParts
from distflow.runtime.lockstep import STEP, STOP, Rounds
from distflow.runtime.metrics import ROWS, MetricStore, MetricWriter
from distflow.runtime.node import Node
from distflow.runtime.protocols import Backend
from distflow.runtime.receiving import TrainingLimits
from distflow.runtime.replicas import Replicas
from distflow.runtime.rows import InboundRows, ReceivedRows
from distflow.runtime.serving import Answering
from distflow.runtime.steps import ServedContext, StepContext
from distflow.runtime.updates import Updates
from distflow.runtime.weight_publisher import Publishing
from distflow.types import Version, WorkerName


@dataclass(frozen=True, slots=True)
class FurtherParts:
    """The parts that it works with."""

    rows: InboundRows
    models: Mapping[str, Backend]
    trained: Mapping[str, str]
    """The models of this home, each with what its metrics' names begin with."""
    contexts: Mapping[str, StepContext]
    replicas: Replicas
    dealing: DealRule
    """How owners deal, and whether what they have dealt is cut into rounds here."""
    checkpoints: CheckpointWriter
    commits: bool
    """This replica writes COMMIT for its host."""
    metrics: MetricStore
    writer: MetricWriter
    answering: Answering | None
    """Calls for the models of this home; None where nobody asks."""
    publishing: Publishing
    """Those that are generated with."""
    run: Callable[[str, Batch], Batch]
    """Runs a step."""
    rounds: Rounds | None = None
    """Only where models are divided over the replicas."""


class FurtherTraining:
    """Holder of further trained models. All methods run on the worker's main thread."""

    def __init__(self, parts: FurtherParts, limits: TrainingLimits, node: Node, start: Version) -> None:
        self._parts = parts
        self._limits = limits
        self._node = node
        self._board = node.board
        self._term = start.term
        self._number = start.number
        self.receives = parts.rows.edge.name
        """The edge on which it gets what it trains on."""
        self._ranks: Mapping[int, int] = {}
        """Ranks in their ledgers of all groups of the training step."""
        self._began = 0.0
        self.finished = False
        """Whether all training steps are done."""
        policies = parts.publishing.models
        about = (parts.models, parts.trained, policies, parts.contexts, parts.metrics, limits.batch)
        self._updates = Updates(*about, leads=parts.replicas.rank == 0)
        # Only owners know the pass over the data.
        self._signal = LearningSignal(limits.judged, (), limits.waits.bad_steps, from_start=False)
        self._accounts: Sequence[Fact] = ()
        """What all replicas have said in the training step, the last time."""
        saved = SavingParts(
            home=WorkerName.parse(parts.replicas.me).pool,
            core=None,
            models={name: parts.models[name] for name in parts.trained},
            contexts={name: one for name, one in parts.contexts.items() if not isinstance(one, ServedContext)},
            writer=parts.checkpoints,
            commits=parts.commits,
            record=lambda: None,
            flush=lambda: None,
        )
        self._saving = Saving(
            saved, limits.run, limits.waits.no_progress_s, parts.replicas.set, node.board, parts.metrics
        )
        node.count_checkpoint(lambda: parts.checkpoints.written)
        if start.number:
            self._saving.already(start.number)

    def steps(self) -> Iterator[int]:
        """Yield the training steps t, counted from 0."""
        self._parts.replicas.finishes_step = True
        for model in self._parts.publishing.models:
            self.publish(model, self._number)
        self._tell(self._number)
        self._saving.prepare()
        run = self._limits.run
        for t in range(self._number, min(run.training_steps, run.stop_after or run.training_steps)):
            self._saving.note_states()
            self._updates.begin(t, self._number)
            self._accounts = ()
            self._node.facts |= {"state": "training", "step": t}
            self._began = time.perf_counter()
            yield t
            self._end(t)
        self.finished = True

    def finish(self) -> None:
        """All training steps are done."""
        self._node.facts |= {"state": "finished"}

    def receive(self, t: int) -> Iterator[Batch]:
        """The rows of step t that were dealt to this replica, at once.

        Raises RunStopped if the owners stop before it, RunEnded if they end the run there, and TermEnded if the term.

        Answers calls until all owners have closed the step: none of them needs the present version afterwards.
        """
        while (received := self._next(t)) is None:
            answering, rounds = self._parts.answering, self._parts.rounds
            answered = answering is not None and answering.turn(self._parts.run)
            if not answered and rounds is not None and self._called():
                rounds.answer()
        if received.then != "train" and self._parts.rounds is not None:
            # Others may have begun a round before they heard of it.
            self._parts.rounds.meet(STOP)
        if received.then == "end":
            self._saving.end(Version(self._term, self._number))
            self.finished = True
            raise RunEnded("the training workers that own the samples have ended the run")
        if received.then == "leave":
            self._saving.try_now(Version(self._term, self._number), scored=True)
            raise TermEnded(f"left after training step {self._number}, so that the next term begins")
        if received.then == "stop":
            raise RunStopped(self._board.stopping or "the training workers that own the samples were asked to stop")
        assert received.batch is not None, "there are rows to train on"
        self._ranks = ranks(received.groups, self._limits.batch.ledgers)
        first = next(iter(self._parts.trained.values()))
        self._parts.metrics.add(f"{first}/groups/count", len(group_ranges(received.batch)))
        self._updates.took(received.batch)
        yield self._in_rounds(received.batch, received.groups)

    def note(self, before: Batch, after: Batch) -> None:
        """Rows are dumped by the owners."""

    def minibatches(self, batch: Batch) -> Iterator[Batch]:
        """The parts of what was received, in every epoch: those with the groups that owners have in theirs."""
        plan = self._limits.batch
        rows = minibatch_rows(batch, self._ranks.__getitem__, plan.minibatches)
        return self._updates.epochs([batch.select(part) for part in rows])

    def apply(self, model: str) -> None:
        """Optimizer step over everything accumulated, divided by the exact global denominator."""
        if not self._updates.resting(model):
            self._updates.apply(model, self._agree, self._saving.wait_for_copy)
            self._node.work_done()

    def publish(self, model: str, number: int) -> None:
        """Make version `number` available to the engines."""
        manifest = self._parts.publishing.make(model, Version(self._term, number))
        with self._board.condition:
            self._parts.publishing.announce(manifest)
            self._board.condition.notify_all()

    def save(self, number: int) -> None:
        """Begin a checkpoint if one is due, as the owners do at the same step."""
        self._tell(number)
        self._saving.step_done(Version(self._term, number))

    def save_now(self) -> None:
        """Write the state after the last whole training step, for a run that is being stopped."""
        if self._number > 0:
            self._saving.save_now(Version(self._term, self._number))

    def dismiss(self) -> None:
        """Nobody generates for this worker."""

    def finish_saving(self) -> None:
        """Wait for what is being saved, as long as no half of `drain_s` seconds passes without progress."""
        self._saving.close(self._limits.waits.drain_s / 2)

    def close(self) -> None:
        """Give everything back."""
        self._parts.publishing.close()
        for backend in self._parts.models.values():
            backend.close()

    # -- details

    def _next(self, t: int) -> ReceivedRows | None:
        """Wait for the rows of the next step; None: there is something to compute for others."""
        parts = self._parts

        def ready() -> tuple[ReceivedRows | None] | None:
            if (rows := parts.rows.take()) is not None:
                return (rows,)
            asked = parts.answering is not None and parts.answering.asked
            return (None,) if asked or self._called() else None

        with parts.metrics.timed(ROWS):
            return self._board.until(
                ready,
                name=f"rows of training step {t + 1}",
                peers=lambda: parts.rows.missing,
                limit_s=self._limits.waits.no_progress_s,
                # Owners may still train on the last step.
                progress=lambda: (self._node.membership.news, parts.replicas.set.progress()),
                even_when_stopping=True,
            )[0]

    def _called(self) -> bool:
        """Whether another replica wants a round."""
        with self._board.condition:
            return self._parts.rounds is not None and self._parts.rounds.called

    def _in_rounds(self, batch: Batch, groups: Mapping[int, Offer]) -> Batch:
        """The rows with their micro-batches, where replicas compute in rounds: what each has is known to all."""
        rule, replicas = self._parts.dealing, self._parts.replicas
        if not rule.divided:
            return batch
        hands = deal_step(groups, replicas.size, self._ranks, replace(rule, pinned=True))
        return with_agreed(batch, hands[replicas.rank])

    def _agree(self) -> Sequence[Fact]:
        """What all replicas of this home have accumulated."""
        parts = self._parts
        with parts.metrics.timed("timing_s/wait_replicas"):
            if parts.rounds is not None:
                parts.rounds.meet(STEP)
            fact = {**self._updates.account(), "signal": self._signal.sums(parts.metrics.mean_so_far, 0)}
            self._accounts = parts.replicas.agree("the size of the batch", fact)
            return self._accounts

    def _tell(self, number: int) -> None:
        self._number = number
        self._node.facts |= {"version": number, "step": number}
        if self._parts.answering is not None:
            with self._board.condition:
                self._parts.answering.version(Version(self._term, number))

    def _end(self, t: int) -> None:
        with self._board.condition:
            self._parts.rows.release()
        self._signal.judge([fact["signal"] for fact in self._accounts], t + 1, self._updates.end())
        if self._signal.reason:
            # Owners end the run with the training step that they are at, so that all save the same one.
            self._node.facts |= {ENDS_BECAUSE: self._signal.reason}
        metrics, first = self._parts.metrics, next(iter(self._parts.trained.values()))
        seconds = time.perf_counter() - self._began
        # Under a name of its own: a step is over when the policy has been trained.
        metrics.set(f"timing_s/{first}_step", seconds)
        metrics.trace.span(f"training step {t + 1}", "step", self._began, self._began + seconds)
        self._parts.writer.write(t + 1, self._term, metrics.drain())
