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
from distflow.types import SampleOutput, Version


@dataclass(frozen=True, slots=True)
class FinishedGroup:
    """All samples of one lease, ordered by sample number."""

    lease: Lease
    samples: tuple[SampleOutput, ...]


class Turn(NamedTuple):
    """What to do before the next decode step. One that loads or aborts has nothing else: ask for another after it."""

    load: bool = False
    abort: Sequence[int] = ()
    start: Sequence[Lease] = ()
    messages: Sequence[Outgoing] = ()


@dataclass(slots=True)
class _Running:
    lease: Lease
    done: dict[int, SampleOutput] = field(default_factory=dict)
    tokens: int = 0
    """Of those that are done."""


class RolloutCore:
    """Decides over the leases of `holder`, under the same lock. `refresh`: when newer weights are taken.

    In any case nothing starts below the minimum version of its lease, and a group that cannot start for that reason
    makes the worker take newer weights, at the latest when it is idle.
    """

    def __init__(self, holder: HolderCore, refresh: Refresh = "eager") -> None:
        self._holder = holder
        self._refresh = refresh
        self._settings = holder.settings
        self._group_size = holder.settings.samples_per_prompt
        self._queued: deque[Lease] = deque()
        self._running: dict[int, _Running] = {}
        self._whole: dict[int, FinishedGroup] = {}
        """Not sent yet."""
        self._cancelled: list[int] = []
        """Positions to abort in the engine."""
        self._given_up: list[int] = []
        self._slots = 0
        """The most free slots seen so far."""
        self._may_load = True
        """Weights are taken once between two decode steps, however fast newer ones are published."""
        self._partials_due = 0.0
        self._draining = False
        self._until: int | None = None
        self._over_in: int | None = None

    # -- how long to generate
    def until(self, step: int | None) -> None:
        """Generate until every owner has its set for this training step; None: until the run is over."""
        self._until = step

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
            return self._draining or self._holder.run_finished or self._over_in is not None
        return self._holder.run_finished or self._holder.closed(self._until)

    def open(self) -> bool:
        """Whether to continue; generation that was to last until the end of the run never begins again."""
        over = self.over
        if over and self._until is None and self._over_in is None:
            self._over_in = self._holder.term
        return not over

    # -- before a decode step
    def turn(
        self, free_slots: int, running_on: Version | None, loaded: Version | None, newer: bool, now: float
    ) -> Turn:
        """What to do next. `running_on`: the engine's version, None while it is torn; `loaded`: the one it was given;
        `newer`: whether newer weights can be loaded.
        """
        if self._may_load and self._takes_weights(loaded, newer):
            self._may_load = False
            return Turn(load=True)
        self._sync()
        if self._cancelled:
            # A group that was cancelled and granted anew must leave the engine before it starts again.
            cancelled, self._cancelled = self._cancelled, []
            return Turn(abort=cancelled)
        self._may_load = True
        self._slots = max(self._slots, free_slots)
        start = self._startable(free_slots, running_on)
        self._running.update((lease.position, _Running(lease)) for lease in start)
        return Turn(start=start, messages=self._ask(free_slots - self._group_size * len(start), now))

    @property
    def running(self) -> Collection[int]:
        """Positions of the groups in the engine."""
        return self._running.keys()

    # -- after a decode step
    def collect(self, outputs: Iterable[SampleOutput]) -> list[FinishedGroup]:
        """Add finished samples; return the groups that are now whole."""
        finished = []
        for out in outputs:
            group = self._running[out.position]
            group.done[out.sample] = out
            group.tokens += len(out.token_ids)
            if len(group.done) == self._group_size:
                del self._running[out.position]
                self._whole[out.position] = FinishedGroup(
                    group.lease, tuple(group.done[i] for i in range(self._group_size))
                )
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
            self._holder.produced([*partials, *self._done()])
        version = -1 if loaded is None else loaded.number
        for position in self._running.keys() & progress.keys():
            self._holder.report(position, self._running[position].tokens + progress[position], version)

    def ask(self, free_slots: int, now: float) -> list[Outgoing]:
        """Ask for leases: results that are about to be sent tell the owner how much room there is now."""
        return self._ask(free_slots, now)

    # -- when idle
    def something(self, loaded: Version | None, newer: bool) -> bool:
        """Whether an idle worker has something to do; to ask for leases, too, if no ask is in flight any more."""
        self._sync()
        startable = bool(self._queued) and _fresh_enough(self._queued[0], loaded)
        may_go_on = startable or self._holder.to_ask or self._takes_weights(loaded, newer)
        return may_go_on or bool(self._cancelled) or self.over

    def reason(self, loaded: Version | None) -> tuple[str, tuple[str, ...] | None]:
        """What an idle worker waits for, and from which owner; None: weights come from anybody."""
        if loaded is None or (self._queued and not _fresh_enough(self._queued[0], loaded)):
            wanted = self._queued[0].min_version if self._queued else 0
            return f"weights of version {wanted} or newer", None
        asking = self._holder.asking()
        return "leases", () if asking is None else (asking.owner,)

    # -- when the worker leaves
    def hand_back(self, outputs: Iterable[SampleOutput], now: float) -> list[Outgoing]:
        """Give up all leases, with what their samples have produced; `outputs` are those that were still running."""
        self._holder.produced([*outputs, *self._done()])
        self._running.clear()
        self._queued.clear()
        self._whole.clear()
        return self._holder.hand_back(now)

    @property
    def released(self) -> bool:
        """Whether the owners have taken over all results, and all that was handed back."""
        return self._holder.run_finished or not self._holder.held()

    # -- details
    def _sync(self) -> None:
        """Apply what the owners have sent. Cancellations concern leases from before the new grants."""
        cancelled = set(self._holder.take_cancelled())
        if cancelled:
            self._queued = deque(lease for lease in self._queued if lease.position not in cancelled)
            self._cancelled += [position for position in cancelled if self._running.pop(position, None) is not None]
            self._given_up += [position for position in cancelled if self._whole.pop(position, None) is not None]
        granted = self._holder.take_granted()
        if granted:
            # The oldest first: others wait for them, and they need no newer weights.
            self._queued = deque(sorted((*self._queued, *granted), key=lambda lease: lease.position))

    def _ask(self, free_slots: int, now: float) -> list[Outgoing]:
        room = free_slots - self._group_size * len(self._queued)
        return self._holder.want(room, now, idle=2 * free_slots >= self._slots)

    def _done(self) -> list[SampleOutput]:
        """Finished samples of groups that are not sent yet."""
        whole = [out for group in self._whole.values() for out in group.samples]
        return [*(out for group in self._running.values() for out in group.done.values()), *whole]

    def _takes_weights(self, loaded: Version | None, newer: bool) -> bool:
        """Whether there are newer weights that the refresh policy takes now."""
        if not newer:
            return False
        if loaded is None or self._refresh == "eager":
            return True
        if self._refresh == "when_idle":
            return not self._running
        return bool(self._queued) and not _fresh_enough(self._queued[0], loaded)

    def _startable(self, room: int, running_on: Version | None) -> list[Lease]:
        """The groups for which there is room. An empty engine takes one that it has fewer slots for: samples wait."""
        taken: list[Lease] = []
        while self._queued and _fresh_enough(self._queued[0], running_on):
            if room < self._group_size and (taken or self._running):
                break
            taken.append(self._queued.popleft())
            room -= self._group_size
        return taken


def _fresh_enough(lease: Lease, version: Version | None) -> bool:
    return version is not None and version.meets(lease.least)
