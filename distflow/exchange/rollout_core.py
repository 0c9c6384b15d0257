"""What a generating worker does next: which leases start, what is aborted, when newer weights are taken, when to ask.

Nothing here knows an engine, a clock or a socket. Before each decode step the driver asks for turns and does what each
says, until one has nothing to load or abort (`turn`). After it, the driver tells what has finished (`collect`) and how
far the rest is (`report`). Weights are values here: the version loaded, and whether newer ones can be.

The life of a group: queued (granted, but without room or new enough weights) → running → whole (`collect` returns it;
what others are asked for is still to come) → sent → acknowledged in the holder's core. Or cancelled: forgotten here,
then aborted in the engine, or `given_up` if it was whole. While a colocated worker trains, everything stays as it is,
here and in the engine.

Example: turn(8, …) → Turn(messages=[Ask]) … Grant … → turn(8, …) → Turn(start=[lease]) → collect(outputs) → [group].
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from distflow.config.schema import Refresh
from distflow.exchange.lease_client import HolderCore
from distflow.exchange.messages import Lease, Outgoing
from distflow.types import FinishedSample, SampleOutput, Version, lease_kind

DECLINE_EVERY_S = 30.0
"""So often a worker may leave groups to others, for which it asks for nothing for a moment."""


@dataclass(frozen=True, slots=True)
class FinishedGroup:
    """All samples of one lease, ordered by sample number."""

    lease: Lease
    samples: tuple[SampleOutput | FinishedSample, ...]


class Messages(NamedTuple):
    """Messages about leases of both kinds; each has owners, and messages, of its own."""

    train: Sequence[Outgoing] = ()
    val: Sequence[Outgoing] = ()


class Turn(NamedTuple):
    """What to do before the next decode step. One that loads or aborts has nothing else: ask for another after it."""

    load: bool = False
    abort: Sequence[int] = ()
    start: Sequence[Lease] = ()
    messages: Messages = Messages()


@dataclass(slots=True)
class _Running:
    lease: Lease
    done: dict[int, SampleOutput | FinishedSample] = field(default_factory=dict)
    tokens: int = 0
    """Of those that are done."""


class RolloutCore:
    """Decides over the leases of `holder`, under the same lock. `refresh`: when newer weights are taken.

    In any case nothing starts below the minimum version of its lease, and a group that cannot start for that reason
    makes the worker take newer weights, at the latest when it is idle.

    Groups for `validation` start before those for training. While some run, or may still be granted on the version that
    they measure, no newer weights are taken: all are measured on one version.
    """

    def __init__(self, holder: HolderCore, refresh: Refresh = "eager", validation: HolderCore | None = None) -> None:
        self._holder = holder
        self._refresh = refresh
        self._settings = holder.settings
        self._validation = validation
        self._holders = [holder] if validation is None else [holder, validation]
        self._queued: deque[Lease] = deque()
        self._validating: deque[Lease] = deque()
        """Queued, too, and the first to start."""
        self._running: dict[int, _Running] = {}
        self._whole: dict[int, FinishedGroup] = {}
        """Not sent yet."""
        self._cancelled: list[int] = []
        """Positions to abort in the engine."""
        self._given_up: list[int] = []
        self._slots = 0
        """The most free slots seen so far."""
        self._busiest = 0
        """The most slots in use so far."""
        self._may_load = True
        """Weights are taken once between two decode steps, however fast newer ones are published."""
        self._partials_due = 0.0
        self._declines_again = 0.0
        """When it may leave groups to others again."""
        self._spare: int | None = None
        self._draining = False
        self._until: int | None = None
        self._only_validates = False
        self._over_in: int | None = None

    # -- how long to generate
    def until(self, step: int | None, *, only_validation: bool = False) -> None:
        """Generate until every owner has its set for this training step, and all validation is closed that is due by
        then; None: until the run is over. With `only_validation`, the latter alone.
        """
        self._until, self._only_validates = step, only_validation

    @property
    def endless(self) -> bool:
        """Whether it goes on until the run is over, because this worker does nothing else."""
        return self._until is None

    def drain(self) -> None:
        """Start nothing more: the worker is to leave."""
        self._draining = True

    @property
    def draining(self) -> bool:
        """Whether this worker was asked to leave."""
        return self._draining

    @property
    def over_in(self) -> int | None:
        """The owners' term in which endless generation was found to be over; a later term may need more groups."""
        return self._over_in

    @property
    def over(self) -> bool:
        """Whether generation is over for now."""
        if self._until is None:
            ended = self._draining or self._over_in is not None
            return ended or all([holder.run_finished for holder in self._holders])
        closed = self._only_validates or self._holder.run_finished or self._holder.closed(self._until)
        return closed and self._validated(self._until)

    def open(self) -> bool:
        """Whether to continue; generation that was to last until the end of the run never begins again."""
        over = self.over
        if over and self._until is None and self._over_in is None:
            self._over_in = self._holder.term
        return not over

    def slots_used(self, free_slots: int) -> tuple[int, float]:
        """The engine's slots that are in use, and which share of all they are."""
        used = self._slots - max(0, free_slots)
        return used, used / self._slots if self._slots else 0.0

    # -- before a decode step
    def turn(
        self,
        free_slots: int,
        running_on: Version | None,
        loaded: Version | None,
        newer: bool,
        now: float,
        spare: int | None = None,
    ) -> Turn:
        """What to do next. `free_slots`: samples that may start; `running_on`: the engine's version, None while it is
        torn; `loaded`: the one it was given; `newer`: whether newer weights can be loaded. `spare`: nothing is being
        decoded, since all that run wait for something else, and so many may start, though there are fewer slots.
        """
        self._spare = spare
        self._sync()
        if self._may_load and self._takes_weights(loaded, newer):
            self._may_load = False
            return Turn(load=True)
        if self._cancelled:
            # A group that was cancelled and granted anew must leave the engine before it starts again.
            cancelled, self._cancelled = self._cancelled, []
            return Turn(abort=cancelled)
        self._may_load = True
        self._slots = max(self._slots, free_slots)
        start = self._startable(free_slots, running_on)
        self._running.update((lease.position, _Running(lease)) for lease in start)
        return Turn(start=start, messages=self._ask(free_slots - self._samples(start), now))

    @property
    def running(self) -> Collection[int]:
        """Positions of the groups in the engine."""
        return self._running.keys()

    # -- after a decode step
    def collect(self, outputs: Iterable[SampleOutput | FinishedSample]) -> list[FinishedGroup]:
        """Add finished samples; return the groups that are now whole."""
        finished = []
        for out in outputs:
            group = self._running[out.position]
            group.done[out.sample] = out
            group.tokens += sum(len(call.token_ids) for call in out.calls)
            size = self._samples([group.lease])
            if len(group.done) == size:
                del self._running[out.position]
                self._whole[out.position] = FinishedGroup(group.lease, tuple(group.done[i] for i in range(size)))
                finished.append(self._whole[out.position])
        return finished

    def sent(self, positions: Iterable[int]) -> None:
        """These groups are with the holder's core now."""
        for position in positions:
            self._whole.pop(position, None)

    def take_given_up(self) -> list[int]:
        """Positions of whole groups that were cancelled before they were sent, each returned once."""
        self._sync()
        given_up, self._given_up = self._given_up, []
        return given_up

    def wants_partials(self, now: float) -> bool:
        """Whether it is time to report what running samples have."""
        if not self._settings.partial_rollouts or now < self._partials_due:
            return False
        self._partials_due = now + self._settings.report_s
        return True

    def report(
        self, progress: Mapping[int, int], partials: Sequence[SampleOutput] | None, loaded: Version | None
    ) -> None:
        """Pass on how far the groups are: tokens by position of the samples that are not finished and, if
        `wants_partials`, what these have.
        """
        if partials is not None:
            self._produced([*partials, *self._done()])
        version = -1 if loaded is None else loaded.number
        for position in self._running.keys() & progress.keys():
            tokens = self._running[position].tokens + progress[position]
            self.holder_of(position).report(position, tokens, version)

    def ask(self, free_slots: int, now: float) -> Messages:
        """Ask for leases: results that are about to be sent tell the owner how much room there is now."""
        return self._ask(free_slots, now)

    def decline(self, positions: Iterable[int], now: float) -> tuple[Collection[int], Messages]:
        """Leave groups for training that run here to other workers; returns which ones, and the messages about it.

        A group is left once, whoever had it; and a worker that meets with trouble all the time keeps most of them.
        """
        running = self._running
        left = [p for p in positions if p in running and lease_kind(p) == "train" and running[p].lease.attempt == 1]
        if not left or now < self._declines_again:
            return (), Messages()
        self._declines_again = now + DECLINE_EVERY_S
        return left, Messages(self._holder.decline(left, now))

    # -- when idle
    def something(self, loaded: Version | None, newer: bool, room: int | None = None, spare: int | None = None) -> bool:
        """Whether an idle worker has something to do; to ask for leases, too, if no ask is in flight any more.

        `room`, of samples that may start (None: any), and `spare` as in `turn`, where groups wait for something else.
        """
        self._spare = spare
        self._sync()
        startable = any(
            queue and _fresh_enough(queue[0], loaded) and (room is None or self._fits(queue[0], room))
            for queue in self._served
        )
        to_ask = any(holder.to_ask for holder in self._holders[self._only_validates :])
        return startable or to_ask or self._takes_weights(loaded, newer) or bool(self._cancelled) or self.over

    def reason(self, loaded: Version | None) -> tuple[str, tuple[str, ...] | None]:
        """What an idle worker waits for, and from which owner; None: weights come from anybody."""
        waiting = [queue[0] for queue in self._queues if queue and not _fresh_enough(queue[0], loaded)]
        if loaded is None or waiting:
            wanted = min((lease.min_version for lease in waiting), default=0)
            return f"weights of version {wanted} or newer", None
        if self._holder.run_finished and self._validation is not None:
            return "the end of validation", self._validation.owners
        asking = self._holder.asking()
        return "leases", () if asking is None else (asking.owner,)

    # -- when the worker leaves
    def hand_back(self, outputs: Iterable[SampleOutput], now: float) -> Messages:
        """Give up all leases, with what their samples have produced; `outputs` are those that were still running."""
        self._produced([*outputs, *self._done()])
        self._running.clear()
        for queue in self._queues:
            queue.clear()
        self._whole.clear()
        return Messages(*(holder.hand_back(now) for holder in self._holders))

    @property
    def held(self) -> int:
        """How many leases the owners have not taken over yet, finished ones too."""
        return sum(len(holder.held()) for holder in self._holders if not holder.run_finished)

    @property
    def released(self) -> bool:
        """Whether the owners have taken over all results, and all that was handed back."""
        return not self.held

    def holder_of(self, position: int) -> HolderCore:
        """Which of the two holds the lease of a position, if it is held."""
        return self._holder if self._validation is None or lease_kind(position) == "train" else self._validation

    # -- details
    def _sync(self) -> None:
        """Apply what the owners have sent. Cancellations concern leases from before the new grants."""
        cancelled = {position for holder in self._holders for position in holder.take_cancelled()}
        if cancelled:
            for queue in self._queues:
                kept = [lease for lease in queue if lease.position not in cancelled]
                queue.clear()
                queue.extend(kept)
            self._cancelled += [position for position in cancelled if self._running.pop(position, None) is not None]
            self._given_up += [position for position in cancelled if self._whole.pop(position, None) is not None]
        for holder, queue in zip(self._holders, (self._queued, self._validating), strict=False):
            granted = holder.take_granted()
            if granted:
                ordered = sorted((*queue, *granted), key=self._urgency)
                queue.clear()
                queue.extend(ordered)

    def _ask(self, free_slots: int, now: float) -> Messages:
        # By what it has had to do, not by its slots: with many more of them it would be idle all the time.
        running = self._slots - free_slots
        self._busiest = max(self._busiest, running)
        idle = 2 * running <= self._busiest
        room = free_slots - self._samples(self._validating)
        val = [] if self._validation is None else self._validation.want(room, now, idle=idle)
        room -= self._samples(self._queued)
        return Messages([] if self._only_validates else self._holder.want(room, now, idle=idle), val)

    def _urgency(self, lease: Lease) -> int:
        """The oldest first: others wait for them, and they need no newer weights. Otherwise as they were granted."""
        return lease.position if self._settings.schedule == "fifo" else lease.min_version

    @property
    def _queues(self) -> list[deque[Lease]]:
        """In the order in which they may start."""
        return [self._validating, self._queued]

    @property
    def _served(self) -> list[deque[Lease]]:
        """Those whose groups start now."""
        return [self._validating] if self._only_validates else self._queues

    def _samples(self, leases: Collection[Lease]) -> int:
        """How many samples these groups have."""
        if self._validation is None:
            return len(leases) * self._settings.samples_per_prompt
        return sum(self.holder_of(lease.position).settings.samples_per_prompt for lease in leases)

    def _produced(self, outputs: Sequence[SampleOutput]) -> None:
        for holder in self._holders:
            holder.produced([output for output in outputs if self.holder_of(output.position) is holder])

    def _validated(self, version: int) -> bool:
        """Whether all validation is closed that is due once there is this version."""
        validation = self._validation
        due = 0 if validation is None else validation.settings.rounds_due(version)
        return validation is None or not due or validation.run_finished or validation.closed(due - 1)

    def _measures(self, loaded: Version | None) -> bool:
        """Whether groups run, or may still come, that are to be measured on the version loaded."""
        if self._validation is None or loaded is None:
            return False
        if any(lease_kind(position) == "val" for position in self._running):
            return True
        if self._validating:
            # Those of a later round come when all of an earlier one are leased.
            return _fresh_enough(self._validating[0], loaded)
        if loaded.number not in self._validation.settings.versions or self._validation.run_finished or self._draining:
            return False
        # An ask that is not refused may still be granted, and one that is answered is followed by the next.
        asking = self._validation.asking()
        return asking is None or not asking.parked

    def _done(self) -> list[SampleOutput]:
        """What finished samples have, of groups that are not sent yet."""
        running = [out for group in self._running.values() for out in group.done.values()]
        whole = [out for group in self._whole.values() for out in group.samples]
        return [call for out in (*running, *whole) for call in out.calls]

    def _takes_weights(self, loaded: Version | None, newer: bool) -> bool:
        """Whether there are newer weights that the refresh policy takes now."""
        if not newer or self._measures(loaded):
            return False
        if loaded is None or self._refresh == "eager":
            return True
        if self._refresh == "when_idle":
            return not self._running or self._spare is not None
        return any(queue and not _fresh_enough(queue[0], loaded) for queue in self._queues)

    def _startable(self, room: int, running_on: Version | None) -> list[Lease]:
        """The groups for which there is room. An empty engine takes one that it has fewer slots for: samples wait."""
        taken: list[Lease] = []
        for queue in self._served:
            while queue and _fresh_enough(queue[0], running_on):
                if not self._fits(queue[0], room, first=not taken):
                    return taken
                taken.append(queue.popleft())
                room -= self._samples(taken[-1:])
        return taken

    def _fits(self, lease: Lease, room: int, *, first: bool = True) -> bool:
        """Whether there is room for a group or, for the first to start, an engine that has nothing to decode."""
        size = self._samples([lease])
        return size <= room or (first and (not self._running or size <= (self._spare or 0)))


def _fresh_enough(lease: Lease, version: Version | None) -> bool:
    return version is not None and version.meets(lease.least)
