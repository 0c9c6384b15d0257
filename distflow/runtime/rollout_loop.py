"""The decode loop of a generating worker: leases in, weights in, finished groups out; and the wait when idle.

A `RolloutCore` (`distflow/exchange/rollout_core.py`) decides what happens when. The loop does it: it loads weights,
gives the engine its requests, decodes, sends, measures, and waits under a name.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Protocol

from distflow.config.schema import Recipe
from distflow.errors import NoProgressError
from distflow.exchange.messages import Lease
from distflow.exchange.rollout_core import FinishedGroup, Messages, RolloutCore, Turn
from distflow.exchange.sample_channel import OutboundSamples
from distflow.log import logger
from distflow.metrics.batch_cost import BatchMeter
from distflow.runtime.metrics import ENVIRONMENT, MetricStore
from distflow.runtime.node import Node
from distflow.runtime.protocols import Engine
from distflow.runtime.trajectories import Trajectories
from distflow.runtime.waits import WaitBoard
from distflow.types import SampleOutput, Version
from distflow.weights.receiver import WeightInbox

log = logger(__name__)


class Meanwhile(Protocol):
    """What other workers, or further engines here, do for whole groups before they are sent."""

    @property
    def news(self) -> bool:
        """Whether something has come back."""

    @property
    def something(self) -> bool:
        """Whether a further engine has something to do."""

    @property
    def signs_of_life(self) -> float:
        """A number that changes while further engines get weights, or their episodes wait for something else."""

    def advance(self) -> None:
        """Decode a token with the further engines."""

    def waiting(self) -> tuple[str, tuple[str, ...]] | None:
        """What is still to come, and from whom; None: nothing."""

    def cancel(self, positions: Sequence[int]) -> None:
        """These groups are not wanted any more."""


class RolloutLoop:
    """Drives the engine of one worker, on its main thread. `validation`: the channel of leases for validation, if there
    are any beside those for training.
    """

    def __init__(
        self,
        engine: Engine,
        samples: Trajectories,
        channel: OutboundSamples,
        inbox: WeightInbox,
        node: Node,
        metrics: MetricStore,
        recipe: Recipe,
        validation: OutboundSamples | None = None,
    ) -> None:
        self._engine = engine
        self._samples = samples
        self._channel = channel
        self._inbox = inbox
        self._node = node
        self._board: WaitBoard = node.board
        self._metrics = metrics
        self._no_progress_s = recipe.limits.no_progress_s
        # Half of it, to be done before the host agent, which counts `drain_s` too, kills this worker.
        self._drain_s = recipe.limits.drain_s / 2
        self._validation = validation
        core = None if validation is None else validation.core
        # With validation only, weights are taken for a round, and none within it.
        refresh = "at_bound" if channel.core.settings.kind == "val" else recipe.layout.refresh
        self._core = RolloutCore(channel.core, refresh, core)
        samples.on_news = self._board.wake
        self._on_version: Callable[[Version], None] = lambda version: None
        self._meanwhile: Meanwhile | None = None
        self.others_sample = False
        """Whether there are engines elsewhere that a lease may go to."""
        self._batch = BatchMeter()

    def until_closed(self, step: int | None, *, only_validation: bool = False) -> RolloutLoop:
        """Set how long `open` is true: until every owner has its set for this step; None: until the run is over.

        `only_validation`: until the validation is closed that is due by then.
        """
        with self._board.condition:
            self._core.until(step, only_validation=only_validation)
        return self

    @property
    def endless(self) -> bool:
        """Whether the loop goes on until the run is over, because this worker does nothing else."""
        return self._core.endless

    def on_version(self, handler: Callable[[Version], None]) -> None:
        """Call `handler` with each version that the engine has taken."""
        self._on_version = handler

    def accompanied_by(self, meanwhile: Meanwhile) -> None:
        """Return from `groups` when something has come back."""
        self._meanwhile = meanwhile

    def drain(self) -> None:
        """End the loop, because the worker is to leave. Any thread may call this."""
        with self._board.condition:
            self._core.drain()
            self._board.condition.notify_all()

    @property
    def draining(self) -> bool:
        """Whether this worker was asked to leave."""
        return self._core.draining

    @property
    def over_in(self) -> int | None:
        """The owners' term in which an endless loop was found to be over; a later term may need more groups."""
        return self._core.over_in

    def open(self) -> bool:
        """Whether to continue; an endless loop never reopens. Raises RunStopped, or the fault that ends the worker."""
        if self.endless:
            self._board.raise_if_over()
        # A worker that also trains stops together with the other training workers, after it has generated.
        self._board.raise_fault()
        with self._board.condition:
            return self._core.open() and not self._stops()

    def groups(self) -> list[FinishedGroup] | None:
        """Generate until groups are finished, and return them; an empty list once the loop is over.

        None: something has come back from other workers, so that groups can be sent.
        """
        while self.open():
            self.prepare()
            finished = self.decode()
            if self._meanwhile is not None:
                self._meanwhile.advance()
            if finished:
                return finished
            if self._news():
                return None
            self.wait_if_idle()
        return []

    def sent(self, positions: Iterable[int]) -> None:
        """These groups have been handed to the channel. Called under the worker's lock."""
        self._core.sent(positions)

    def prepare(self) -> None:
        """Take newer weights, abort what is cancelled, start leases and ask for more, between two decode steps."""
        judge_weights(self._inbox, self._engine, self._metrics)
        turn = self._turn()
        while turn.load or turn.abort:
            if turn.load:
                load_weights(self._inbox, self._engine, self._node, self._metrics, self._on_version)
            self._discard(turn.abort)
            turn = self._turn()
        if turn.start:
            self._samples.submit(self._engine, self._samples.begin(turn.start))

    def decode(self) -> list[FinishedGroup]:
        """One decode step; returns the groups that are now whole. Reports progress and free room to the owners."""
        (samples, used), began = self._core.slots_used(self._engine.free_slots), time.perf_counter()
        with self._metrics.timed("timing_s/gen"):
            outputs = self._samples.poll(self._engine)
        seconds = time.perf_counter() - began
        self._batch.look(samples, seconds, self._engine.progress(), outputs)
        self._metrics.mean("perf/slots_share", used, seconds)
        self._metrics.mean("perf/batch_share", self._batch.share, seconds)
        further, done = self._samples.take(self._judged(outputs))
        # Before anything new starts: a slot that a turn has left is for the next turn.
        self._samples.submit(self._engine, further)
        core, now = self._core, time.monotonic()
        finished = core.collect(done)
        due = core.wants_partials(now) or self._samples.untold
        partials = self._samples.partials(self._engine.partials()) if due else None
        progress = self._samples.progress(self._engine.progress())
        with self._board.condition:
            core.report(progress, partials, self._inbox.loaded)
            if finished:
                self._send(core.ask(self._samples.room(self._engine.free_slots)[0], now))
        if outputs or progress:
            self._node.work_done()
        return finished

    def _judged(self, outputs: Sequence[SampleOutput]) -> Sequence[SampleOutput]:
        """The outputs that the samples go on with: where log-probs cannot be used, another engine makes the group.

        If there is none, or it has come from there, its samples go on as ones that are not trained on.
        """
        judged, wrong = self._samples.judge(outputs, self._engine.version)
        if not wrong:
            return judged
        declined: Collection[int] = ()
        if self.others_sample and not self.draining:
            with self._board.condition:
                declined, messages = self._core.decline({position for position, _ in wrong}, time.monotonic())
                self._send(messages)
        self._samples.leave_out({key: why for key, why in wrong.items() if key[0] not in declined})
        return [output for output in judged if output.position not in declined]

    def wait_if_idle(self) -> None:
        """Wait until there is something to do; return at once if the engine has something to decode."""
        if self._samples.asks and self._inbox.loaded is not None:
            return
        with self._board.condition:
            if self._meanwhile is not None and self._meanwhile.something:
                return
            kind, _, _ = self._reason()
        waits = f"timing_s/wait_{kind}"
        timed = (ENVIRONMENT, "environment") if kind == "environments" else (waits, "runtime")
        with self._metrics.timed(*timed):
            self._board.until(
                self._something,
                name=lambda: self._reason()[1],
                peers=lambda: self._reason()[2],
                limit_s=self._no_progress_s,
                progress=self._signs_of_life,
                even_when_stopping=not self.endless,
            )

    def hand_back(self) -> None:
        """Give up all leases, with what their samples have produced, so that other workers continue from there.

        Returns when the owners have taken over everything, or half of `limits.drain_s` after the last one did.
        """
        core = self._core
        aborted = self._samples.partials(self._engine.abort(core.running))
        with self._board.condition:
            self._send(core.hand_back(aborted, time.monotonic()))
        try:
            self._board.until(
                lambda: core.released or None,
                name="the owners to take over leases and results",
                peers=self._channel.core.owners,
                limit_s=self._drain_s,
                limit="limits.drain_s",
                progress=lambda: core.held,
                even_when_stopping=True,
            )
        except NoProgressError as error:
            log.warning("%s; shutting down anyway", error)

    def _turn(self) -> Turn:
        engine, inbox = self._engine, self._inbox
        room, spare = self._samples.room(engine.free_slots)
        with self._board.condition:
            about = (engine.version, inbox.loaded, inbox.waiting, time.monotonic())
            turn = self._core.turn(room, *about, spare)
            self._send(turn.messages)
            if self._meanwhile is not None:
                self._meanwhile.cancel(self._core.take_given_up())
        for lease in turn.start:
            self._count(lease)
        return turn

    def _send(self, messages: Messages) -> None:
        self._channel.send(messages.train)
        if self._validation is not None:
            self._validation.send(messages.val)

    def _discard(self, positions: Sequence[int]) -> None:
        """Drop these groups; the tokens of their unfinished samples are lost."""
        if not positions:
            return
        lost = self._samples.partials(self._engine.abort(positions), positions)
        self._samples.forget(positions)
        if lost:
            self._metrics.add("rollout/aborted_samples", len({out.key[:2] for out in lost}))
            self._metrics.add("rollout/lost_tokens", sum(len(out.token_ids) for out in lost))

    def _count(self, lease: Lease) -> None:
        if lease.copy:
            self._metrics.add("rollout/hedged_groups", 1)
        if lease.begun:
            self._metrics.add("rollout/continued_samples", len({sample.sample for sample in lease.begun}))
            self._metrics.add("rollout/continued_tokens", sum(len(sample.token_ids) for sample in lease.begun))

    def _something(self) -> bool | None:
        room = self._samples.room(self._engine.free_slots)
        if self._core.something(self._inbox.loaded, self._inbox.waiting, *room) or self._stops() or self._samples.news:
            return True
        return self._news() or (self._meanwhile is not None and self._meanwhile.something) or None

    def _news(self) -> bool:
        return self._meanwhile is not None and self._meanwhile.news

    def _reason(self) -> tuple[str, str, tuple[str, ...]]:
        """What an idle worker waits for: its kind, its name, and from whom."""
        if self._core.running and not self._samples.asks:
            return "environments", self._samples.environments, ()
        answers = None if self._meanwhile is None else self._meanwhile.waiting()
        if answers is not None:
            return "answers", *answers
        name, owner = self._core.reason(self._inbox.loaded)
        return name.split()[0], name, self._channel.core.owners if owner is None else owner

    def _stops(self) -> bool:
        """Whether a worker that also trains is to stop generating because the run stops."""
        return not self.endless and self._board.stopping is not None

    def _signs_of_life(self) -> object:
        """A value that changes as long as peers, or ledgers here, make progress or weights arrive, or episodes are
        within their own time-outs, which end them."""
        if self._core.running and not self._samples.asks:
            return time.monotonic()
        signs = self._inbox.chunks + (0.0 if self._meanwhile is None else self._meanwhile.signs_of_life)
        return signs, self._node.progress, [(p.progress, p.facts) for p in self._node.membership.peers.values()]


def load_weights(
    inbox: WeightInbox,
    engine: Engine,
    node: Node,
    metrics: MetricStore,
    on_version: Callable[[Version], None],
    of: str = "",
) -> None:
    """Give an engine the newest weights, and tell `on_version`; `of`: what metrics of its canary end with."""
    skipped = inbox.skipped
    with metrics.timed("timing_s/weight_sync"):
        inbox.load(engine)
        loaded = inbox.loaded
        if loaded is not None:
            metrics.trace.arrive("weights", [f"{inbox.model}:{loaded.term}:{loaded.number}"])
    if loaded is None:
        return
    node.work_done()
    on_version(loaded)
    # After `on_version`: what was measured before belongs to the previous version.
    _note_canary(inbox, metrics, skipped, of)


def judge_weights(inbox: WeightInbox, engine: Engine, metrics: MetricStore, of: str = "") -> None:
    """Compare the canary of the version in use, if the engine has had room for it since it was loaded."""
    skipped = inbox.skipped
    judged = inbox.judge(engine)
    if judged or inbox.skipped > skipped:
        _note_canary(inbox, metrics, skipped, of)


def _note_canary(inbox: WeightInbox, metrics: MetricStore, skipped: int, of: str) -> None:
    if inbox.difference is not None:
        metrics.mean(f"weights/canary_diff{of}", inbox.difference)
    if inbox.skipped > skipped:
        metrics.add(f"weights/canary_skipped{of}", inbox.skipped - skipped)
