"""The training side of one worker: receive a step's samples, apply, publish, save."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from distflow.comm.fact_exchange import Fact
from distflow.data.batch import Batch
from distflow.data.micro_batches import minibatch_rows
from distflow.errors import NoProgressError, TermEnded, UserError, WorkerFailed
from distflow.exchange.dealing import DealRule
from distflow.exchange.facts import ENDS_BECAUSE
from distflow.exchange.rows_messages import Then
from distflow.exchange.sample_channel import InboundSamples
from distflow.exchange.store_channel import SampleStore
from distflow.flow.edges import SAMPLES
from distflow.log import logger
from distflow.metrics.learning_signal import LearningSignal
from distflow.runtime.checkpoint.parts import CheckpointWriter, ModelFolders
from distflow.runtime.checkpoint.policy import Saving, SavingParts
from distflow.runtime.dumps import DumpWriter, dumped
from distflow.runtime.generating import Turns
from distflow.runtime.held_out import HeldOut
from distflow.runtime.intake import Intake
from distflow.runtime.lockstep import STEP, Rounds
from distflow.runtime.metrics import MetricStore, MetricWriter, Recovery
from distflow.runtime.node import Node
from distflow.runtime.owner_side import await_readers
from distflow.runtime.protocols import Backend
from distflow.runtime.receiving import Receiving, TrainingLimits
from distflow.runtime.replicas import Replicas
from distflow.runtime.rows import OutboundRows
from distflow.runtime.steps import StepContext
from distflow.runtime.updates import Goal, Updates
from distflow.runtime.validation import Validation
from distflow.runtime.weight_publisher import Publishing
from distflow.types import Version, WorkerName

log = logger(__name__)


@dataclass(frozen=True, slots=True)
class TrainingParts:
    """The parts that the training side works with."""

    inbound: InboundSamples
    store: SampleStore
    """The same samples for clients outside the run."""
    models: Mapping[str, Backend]
    trained: Mapping[str, str]
    """The trained ones among them, which are saved, each with what its metrics' names begin with."""
    primary: str
    """The one whose samples the ledgers lease: each of its versions opens a training step."""
    contexts: Mapping[str, StepContext]
    replicas: Replicas
    intake: Intake
    publishing: Publishing
    """The models that are generated with."""
    dumps: DumpWriter
    checkpoints: CheckpointWriter
    commits: bool
    """This replica writes COMMIT for its host."""
    dealing: DealRule
    """How groups are dealt to replicas, here and to other homes."""
    run: Callable[[str, Batch], Batch]
    """Runs a step of the flow over a batch."""
    metrics: MetricStore
    writer: MetricWriter
    rounds: Rounds | None = None
    """Only where models are divided over the replicas."""
    folders: ModelFolders | None = None
    """Only where the recipe asks for Hugging Face folders."""
    turns: Turns = field(default_factory=Turns)
    """How the device is shared with an engine."""
    rows: Mapping[str, OutboundRows] = field(default_factory=dict)
    """By edge, where further models are trained by other workers."""
    recovery: Recovery | None = None
    """Only in the first term after the pool has restarted."""
    validation: Validation | None = None
    """Only at the first owner."""
    validates: bool = False
    """Whether there is validation, here or at another owner, of samples that are generated."""
    held_out: HeldOut | None = None
    """Only where there is validation of samples that are read from the data."""


class Training:
    """Owner of ledgers and holder of trained models. All methods run on the worker's main thread."""

    def __init__(self, parts: TrainingParts, limits: TrainingLimits, node: Node, start: Version) -> None:
        self._parts = parts
        self._limits = limits
        self._node = node
        self._board = node.board
        self._term = start.term
        self._number = start.number
        policies = parts.publishing.models
        about = (parts.models, parts.trained, policies, parts.contexts, parts.metrics, limits.batch)
        self._updates = Updates(*about, leads=parts.replicas.rank == 0)
        self.finished = False
        """Whether all training steps are done."""
        self._ends_elsewhere = ""
        """Why the run is to end behind this training step, of a home of another model."""
        self.receives = limits.receives
        """The edge on which it gets what it trains on, or the step that reads it from the data."""
        self.complete_with = parts.intake.calls  # The steps whose fields samples have when they are received.
        self._dumped = -1
        self._closed = True  # Whether other homes know what to do with the rows of the open training step.
        self._term_ends = False  # Whether all replicas leave after this training step, for the next term.
        self._recovery = parts.recovery
        self._signal = LearningSignal(
            limits.judged, limits.compared, limits.waits.bad_steps, from_start=start.number == 0
        )
        self._accounts: Sequence[Fact] = ()
        """What all replicas have said in the training step, the last time."""
        self._goal = Goal(limits.run.stop_when, parts.metrics, self._validated)
        self._receiving = Receiving(
            parts.intake, parts.replicas, limits, node, parts.metrics, self._account, parts.run, parts.rounds
        )
        parts.store.writes_to(parts.intake.written)
        core = parts.inbound.core
        saved = SavingParts(
            home=WorkerName.parse(parts.replicas.me).pool,
            core=core,
            models={name: parts.models[name] for name in parts.trained},
            contexts=parts.contexts,
            writer=parts.checkpoints,
            folders=parts.folders,
            commits=parts.commits,
            record=self._record,
            flush=parts.dumps.flush,
            unread=parts.store.kept,
            difficulty=core.settings.difficulty if parts.replicas.rank == 0 else None,
            validated=lambda: dict(self._validated().get(limits.run.keep_best or "", {})),
        )
        self._saving = Saving(
            saved, limits.run, limits.waits.no_progress_s, parts.replicas.set, node.board, parts.metrics
        )
        parts.turns.settled_by(self._saving.wait_for_copy)
        # Other replicas, and the agent that is to end this worker, wait for it while it writes.
        node.count_checkpoint(lambda: parts.checkpoints.written)
        if start.number:
            self._saving.already(start.number)

    def steps(self) -> Iterator[int]:
        """Yield the training steps t, counted from 0."""
        for model in self._parts.publishing.models:
            self.publish(model, self._number)
        self._saving.prepare()
        self._measure()
        run = self._limits.run
        last = min(run.training_steps, run.stop_after or run.training_steps)
        for t in range(self._number, last):
            self._begin(t)
            yield t
            self._end(t)
            self._end_if_nothing_is_learnt(t)
            self._measure()
            if self._goal.reached:
                break
            if self._term_ends and t + 1 < last:
                self._end_term()
        self.finished = True

    @property
    def steps_done(self) -> int:
        """Whole training steps so far."""
        return self._number

    def finish(self) -> None:
        """All training steps are done: finish validation, and tell the generating workers that the run is over."""
        self._node.facts |= {"state": "finishing"}
        if self._parts.validation is not None:
            self._parts.validation.settle()
        known = list(self._validated().get(self._limits.run.keep_best or "", {}).items())
        if self._parts.validates:
            # Generating workers stay until then.
            facts = self._parts.replicas.agree("the end of validation", {"validated": known})
            known = [value for fact in facts for value in fact["validated"]]
        if self._parts.commits:
            self._parts.checkpoints.note_validated({int(version): float(value) for version, value in known})
        self.dismiss()
        self._node.facts |= {"state": "finished"}

    def receive(self, t: int) -> Iterator[Batch]:
        """The samples of step t, in batches of at least `tokens_per_microbatch` as they arrive (or all at once)."""
        self._parts.turns.train()
        if self._parts.validation is not None:
            # It may be all there, and may decide that this is the last training step.
            self._parts.validation.collect()
        for batch in self._receiving.receive(t):
            self._updates.took(batch)
            yield batch

    def send(self, edge: str, batch: Batch) -> None:
        """Deal the groups of a batch to the home of a further model, which trains on them."""
        self._parts.rows[edge].send(batch, self._parts.dealing, self._parts.intake.core.window)
        if not self._limits.streamed and all(rows.groups for rows in self._parts.rows.values()):
            # All replicas have agreed before that each has its whole batch, and that none stops.
            self._close("train")

    def note(self, before: Batch, after: Batch) -> None:
        """Keep the fields that a step has added, for the dumps."""
        if not self._limits.dump_fields or after is before:
            return
        taken = self._receiving.tally.taken
        for index in reversed(range(len(taken))):
            if taken[index][0] is before:
                taken[index] = (after, taken[index][1])
                return

    def minibatches(self, batch: Batch) -> Iterator[Batch]:
        """The parts of a whole batch, in every epoch the same: part m has the groups of rank m modulo their number.

        The rank is among the groups that a ledger gives to the training step, so it does not depend on how many workers
        own the ledgers.
        """
        plan = self._limits.batch
        parts = list(map(batch.select, minibatch_rows(batch, self._parts.intake.core.rank, plan.minibatches)))
        return self._updates.epochs(parts)

    def apply(self, model: str) -> None:
        """Optimizer step over everything accumulated, divided by the exact global denominator."""
        rests = self._updates.resting(model)
        if rests and not self._closed:
            self._agree_on_accounts()
        if not rests:
            self._updates.apply(model, self._agree_on_accounts, self._saving.wait_for_copy)
            self._node.work_done()

    def publish(self, model: str, number: int) -> None:
        """Make version `number` available to the engines; that of the primary model opens the next step for leasing."""
        parts = self._parts
        manifest = parts.publishing.make(model, Version(self._term, number))
        with self._board.condition:
            parts.publishing.announce(manifest)
            if model == parts.primary:
                self._open(number)
            self._board.condition.notify_all()

    def _open(self, number: int) -> None:
        """So many training steps are done: open the next one for leasing. Called under the worker's lock."""
        inbound, validation = self._parts.inbound, self._parts.validation
        self._number = number
        self._node.facts |= {"version": number, "step": number}
        if number > inbound.core.version:
            inbound.send(inbound.core.advance(number, time.monotonic()))
        if validation is not None:
            validation.due(number)

    def save(self, number: int) -> None:
        """Begin a checkpoint if one is due (`run.save_every`, `run.save_every_s`); the last one of the run is whole."""
        if not self._parts.publishing.models:
            # No engine awaits a version, so none is published: this is where the next training step begins.
            with self._board.condition:
                self._open(number)
        self._saving.step_done(Version(self._term, number))

    def save_now(self) -> None:
        """Write the state after the last whole training step, for a run that is being stopped."""
        if not self._closed:
            self._close("stop")
        if self._number > 0:
            self._parts.turns.train()
            self._saving.save_now(Version(self._term, self._number))

    def dismiss(self) -> None:
        """Tell the generating workers that the run is over, and give them `drain_s` seconds to leave."""
        cores = [self._parts.inbound.core]
        if self._parts.validation is not None:
            cores.append(self._parts.validation.inbound.core)
        # After a stop the host agent counts `drain_s` from the last sign of saving: leave before it kills this worker.
        limit_s = self._limits.waits.drain_s / (1 if self._board.stopping is None else 2)
        for rows in self._parts.rows.values():
            rows.settle()
        with self._board.condition:
            self._parts.inbound.send(cores[0].finish(time.monotonic()))
            if self._parts.validation is not None:
                self._parts.validation.finish()
            holders = [holder.name for core in cores for holder in core.holders()]
        try:
            self._board.until(
                lambda: True if all(core.all_left for core in cores) else None,
                name="the generating workers to leave",
                peers=tuple(dict.fromkeys(holders)),
                limit_s=limit_s,
                limit="limits.drain_s",
                progress=lambda: [len(core.holders()) for core in cores],
                even_when_stopping=True,
            )
        except NoProgressError as error:
            log.warning("%s; shutting down without waiting for them", error)
        if self._board.stopping is None:
            await_readers(self._parts.store, self._board, self._limits.waits.drain_s)

    def finish_saving(self) -> None:
        """Wait for what is being saved, as long as no half of `drain_s` seconds passes without progress."""
        self._saving.close(self._limits.waits.drain_s / 2)

    def close(self) -> None:
        """Withdraw published weights, finish the dumps."""
        self._parts.publishing.close()
        for backend in self._parts.models.values():
            backend.close()
        # Last, because they raise errors of writing.
        if self._parts.validation is not None:
            self._parts.validation.close()
        self._parts.dumps.close()

    def _measure(self) -> None:
        if self._parts.held_out is not None:
            self._parts.held_out.measure(self._number)

    def _validated(self) -> Mapping[str, Mapping[int, float]]:
        measuring = self._parts.validation or self._parts.held_out
        return {} if measuring is None else measuring.scores

    def _record(self) -> None:
        """Pass the samples of the last finished training step to the dumps."""
        if self._receiving.tally.step < self._number:
            self._dump()

    def _begin(self, t: int) -> None:
        # Kept for a stop within this step, which may have changed them by then.
        self._saving.note_states()
        if self._parts.replicas.set.size == 1:
            self._board.raise_if_over()
        self._closed, self._accounts = not self._parts.rows, ()
        self._parts.replicas.finishes_step = False
        self._receiving.begin(t)
        self._updates.begin(t, self._number)
        self._node.facts |= {"state": "training", "step": t}

    def _account(self) -> Fact:
        """What this replica has trained on so far in this step, and whether it was asked to stop."""
        return {
            **self._updates.account(),
            "groups": self._parts.intake.core.groups,
            "stop": self._parts.replicas.stopping,
            "leave": self._parts.replicas.asked_to_leave,
            "visits": self._receiving.visits(),
            "goal": self._goal.value(),
            "signal": self._signal.sums(self._parts.metrics.mean_so_far, self._receiving.tally.epoch),
            "ends_because": next(self._found_elsewhere(), ""),
        }

    def _agree_on_accounts(self) -> Sequence[Fact]:
        """What all replicas have accumulated; raises RunStopped if one was asked to stop."""
        parts = self._parts
        with parts.metrics.timed("timing_s/wait_replicas"):
            if parts.rounds is not None:
                parts.rounds.meet(STEP)
            facts = self._receiving.accounts or parts.replicas.agree("the size of the batch", self._account())
        parts.replicas.stop_together(facts)
        groups, expected = sum(int(fact["groups"]) for fact in facts), self._limits.batch.prompts
        assert groups == expected, f"training step {self._number + 1}: {groups} groups were trained on, not {expected}"
        self._term_ends = self._term_ends or any(fact["leave"] for fact in facts)
        self._receiving.learn(visit for fact in facts for visit in fact["visits"])
        if not self._closed:
            self._close("train")
        self._goal.judge(facts, self._number + 1)
        self._accounts = facts
        reasons = (str(fact["ends_because"]) for fact in facts if fact["ends_because"])
        self._ends_elsewhere = next(reasons, self._ends_elsewhere)
        # With several updates, a stop between two of them would save what no training step ends with.
        parts.replicas.finishes_step = True
        return facts

    def _close(self, then: Then) -> None:
        """Tell the homes of further models what to do with the rows of this training step, as all owners do."""
        taken = self._parts.intake.core.groups
        for name, rows in self._parts.rows.items():
            if then == "train" and rows.groups != taken:
                raise UserError(
                    f"training step {self._number + 1}: {taken} groups were received and {rows.groups} sent to train "
                    f"on — a script must call w.send({name!r}, batch) for every batch of w.receive, before w.apply"
                )
            rows.close(then)
        self._closed, self._parts.replicas.finishes_step = True, True

    def _end(self, t: int) -> None:
        metrics, tally = self._parts.metrics, self._receiving.tally
        unmoved = self._updates.end()
        self._dump()
        seconds = time.perf_counter() - tally.began
        self._receiving.note_schedule()
        sums = [fact["signal"] for fact in self._accounts]
        for name, value in self._signal.judge(sums, t + 1, unmoved).items():
            metrics.max(name, value)
        metrics.set("timing_s/step", seconds)
        metrics.trace.span(f"training step {t + 1}", "step", tally.began, tally.began + seconds)
        if self._recovery is not None:
            self._recovery.note(metrics)
            self._recovery = None
        tally.measure(metrics, seconds, 1 + len(self._node.membership.peers), generated=self.receives == SAMPLES)
        if self._goal.reached:
            if self._parts.rows:
                self._close("end")
            self._saving.end(Version(self._term, t + 1))
        self._parts.writer.write(t + 1, self._term, metrics.drain())
        if self._parts.validation is not None:
            self._parts.validation.collect()

    def _found_elsewhere(self) -> Iterator[str]:
        """Yield why homes of other models find that training should end."""
        peers = self._node.membership.peers
        # Each is looked at once: the endpoint's thread puts others in the place of a peer's facts.
        told = (peers[name].facts.get(ENDS_BECAUSE) for name in sorted(peers))
        return (str(reason) for reason in told if reason)

    def _end_if_nothing_is_learnt(self, t: int) -> None:
        """Raise WorkerFailed, with everything saved, if nothing is learnt for too long, here or elsewhere."""
        reason = self._signal.reason or self._ends_elsewhere
        if not reason or self._goal.reached:
            return
        if self._parts.rows:
            self._close("end")
        self._saving.end(Version(self._term, t + 1))
        more = t + 1 < self._limits.run.training_steps
        cure = "from where --resume goes on" if more else "the last one: raise run.training_steps to go on"
        raise WorkerFailed(f"{reason}. Everything is saved behind training step {t + 1}, {cure}")

    def _end_term(self) -> None:
        """Save, and leave to begin again as other workers may; if nothing can be saved, go on as before."""
        if self._parts.rows:
            self._close("leave")
        trouble = self._saving.try_now(Version(self._term, self._number), scored=True)
        if trouble is None or self._parts.rows:
            raise TermEnded(f"left after training step {self._number}, so that the next term begins")
        log.error("training goes on in this term, since it could not be saved: %s", trouble)
        self._term_ends = False

    def _dump(self) -> None:
        """Pass the samples of a trained step to the dumps, once."""
        tally, every = self._receiving.tally, self._limits.run.dump_rollouts
        lost = self._updates.lost(self._parts.primary)
        if every and (tally.step % every == 0 or lost) and self._dumped != tally.step:
            groups = [(dumped(batch, self._limits.dump_fields, lost), workers) for batch, workers in tally.taken]
            self._parts.dumps.write(tally.step + 1, self._term, groups)
        self._dumped = tally.step
