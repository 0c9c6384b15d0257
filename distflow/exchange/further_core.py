"""What a worker that generates with a further model does next: which groups start, what is aborted, when newer weights
are taken.

Its groups come from leases of the same worker, or from calls of others; here they have only a key. Any version from the
oldest that a group allows on may start it, so that nobody waits for a particular one. Nothing here knows an engine, a
clock or a socket, and weights are values, as in `rollout_core.py`.

The life of a group: queued (no room, no weights that are new enough, or a group of the same position runs for another
caller: its random numbers are the same) → running → whole (`collect` returns its key). Or cancelled.

Example: ask(WantedGroup("a", position=12, …, least=(0, 2))) → turn(16, (0, 3), …) = start ["a"] → collect(…) = ["a"].
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from distflow.config.schema import Refresh
from distflow.types import FinishedSample, SampleOutput, Version


@dataclass(frozen=True, slots=True)
class WantedGroup:
    """A group that somebody wants."""

    key: Hashable
    """Unique among the open ones."""
    position: int
    samples: int
    t: int
    """Training step that it is for: the oldest are started first."""
    least: Version
    """No sample starts with an older version."""


class FurtherTurn(NamedTuple):
    """What to do before the next decode step. One that loads or aborts has nothing else: ask for another after it."""

    load: bool = False
    abort: Sequence[int] = ()
    """Positions."""
    start: Sequence[Hashable] = ()


@dataclass(slots=True)
class _RunningGroup:
    wanted: WantedGroup
    left: int
    """Samples that are not finished."""
    versions: set[Version]
    """Those that its tokens may come from."""


class FurtherCore:
    """The groups of one further model at one worker. `refresh`: when newer weights are taken.

    `for_others`: they come from calls. A caller keeps what needs newer weights until these are loaded, so a worker that
    waits for such a group takes them when nothing that it was asked for is left to start.
    """

    def __init__(self, refresh: Refresh = "eager", *, for_others: bool = False) -> None:
        self._refresh = refresh
        self._for_others = for_others
        self._queued: dict[Hashable, WantedGroup] = {}
        self._running: dict[int, _RunningGroup] = {}
        """By position."""
        self._aborted: list[int] = []
        self._begins: Mapping[int, int] = {}
        self._spare: int | None = None
        self._may_load = True
        """Weights are taken once between two decode steps, however fast newer ones are published."""

    # -- what is wanted
    def ask(self, wanted: WantedGroup) -> None:
        """Make this group."""
        assert wanted.key not in self, f"{wanted.key!r} is asked for already"
        self._queued[wanted.key] = wanted

    def cancel(self, keys: Iterable[Hashable]) -> None:
        """These are not wanted any more, if they are open."""
        gone = set(keys)
        for key in gone & self._queued.keys():
            del self._queued[key]
        self._abort([p for p, group in self._running.items() if group.wanted.key in gone])

    def begin_term(self, begins: Mapping[int, int]) -> None:
        """Training has restarted (`begins`: training steps by term): what has tokens of lost weights starts again."""
        self._begins = dict(begins)
        self._start_again()

    def __contains__(self, key: Hashable) -> bool:
        return key in self._queued or any(group.wanted.key == key for group in self._running.values())

    @property
    def running(self) -> Collection[int]:
        """Positions of the groups in the engine."""
        return self._running.keys()

    @property
    def queued(self) -> int:
        """Samples that have not started."""
        return sum(wanted.samples for wanted in self._queued.values())

    # -- before a decode step
    def turn(
        self, free_slots: int, running_on: Version | None, loaded: Version | None, newer: bool, spare: int | None = None
    ) -> FurtherTurn:
        """What to do next. `running_on`: the engine's version, None while it is torn; `loaded`: the one it was given;
        `newer`: whether newer weights can be loaded; `spare` as in `RolloutCore.turn`.
        """
        self._spare = spare
        if self._may_load and self._takes_weights(loaded, newer):
            self._may_load = False
            return FurtherTurn(load=True)
        self._goes_on(running_on)
        if self._aborted:
            aborted, self._aborted = self._aborted, []
            return FurtherTurn(abort=aborted)
        self._may_load = True
        return FurtherTurn(start=[wanted.key for wanted in self._start(free_slots, running_on)])

    # -- after a decode step
    def collect(self, outputs: Iterable[SampleOutput | FinishedSample]) -> list[Hashable]:
        """Count finished samples; return the groups that are now whole. Samples of aborted groups count for nothing."""
        whole: list[Hashable] = []
        for out in outputs:
            group = self._running.get(out.position)
            if group is None:
                continue
            group.left -= 1
            if not group.left:
                del self._running[out.position]
                whole.append(group.wanted.key)
        return whole

    # -- when idle
    def something(self, loaded: Version | None, newer: bool, room: int | None = None, spare: int | None = None) -> bool:
        """Whether an idle worker has something to do; `room` and `spare` as in `RolloutCore.something`."""
        self._spare = spare
        startable = any(
            self._fresh(wanted, loaded) and (room is None or self._fits(wanted, room))
            for wanted in self._queued.values()
        )
        return startable or bool(self._aborted) or self._takes_weights(loaded, newer)

    def awaited(self, loaded: Version | None) -> Version | None:
        """The version that the next group waits for; None: none does."""
        first = min(self._queued.values(), key=lambda wanted: wanted.least, default=None)
        if first is None or self._fresh(first, loaded):
            return None
        lost = loaded is not None and not loaded.survives(self._begins)
        return max([first.least, *(Version(*begun) for begun in self._begins.items() if lost)])

    # -- details
    def _start(self, room: int, running_on: Version | None) -> list[WantedGroup]:
        """Those for which there is room. An empty engine takes one that it has fewer slots for: samples wait."""
        started: list[WantedGroup] = []
        for wanted in sorted(self._queued.values(), key=lambda wanted: wanted.t):
            if wanted.position in self._running or not self._fresh(wanted, running_on):
                continue
            if not self._fits(wanted, room, first=not started):
                break
            room -= wanted.samples
            started.append(self._queued.pop(wanted.key))
            assert running_on is not None, "groups start with some version"
            self._running[wanted.position] = _RunningGroup(wanted, wanted.samples, {running_on})
        return started

    def _fits(self, wanted: WantedGroup, room: int, *, first: bool = True) -> bool:
        """Whether there is room for a group or, for the first to start, an engine that has nothing to decode."""
        return wanted.samples <= room or (first and (not self._running or wanted.samples <= (self._spare or 0)))

    def _goes_on(self, running_on: Version | None) -> None:
        """What runs may get tokens of this version next. It may be lost: what was loading when a term began."""
        if running_on is None:
            return
        for group in self._running.values():
            group.versions.add(running_on)
        if not running_on.survives(self._begins):
            self._start_again()

    def _start_again(self) -> None:
        """Queue the groups with tokens of lost weights, which newer ones may have followed, before all others."""
        lost = [p for p, group in self._running.items() if not all(v.survives(self._begins) for v in group.versions)]
        again = [self._running[position].wanted for position in lost]
        self._abort(lost)
        self._queued = {wanted.key: wanted for wanted in again} | self._queued

    def _abort(self, positions: Sequence[int]) -> None:
        for position in positions:
            del self._running[position]
        self._aborted += positions

    def _fresh(self, wanted: WantedGroup, version: Version | None) -> bool:
        return version is not None and version.meets(wanted.least) and version.survives(self._begins)

    def _takes_weights(self, loaded: Version | None, newer: bool) -> bool:
        """Whether there are newer weights that the refresh policy takes now."""
        if not newer:
            return False
        if loaded is None or not loaded.survives(self._begins) or self._refresh == "eager":
            return True
        if self._refresh == "when_idle":
            return not self._running or self._spare is not None
        if self._for_others and not self._queued:
            return True
        return any(not self._fresh(wanted, loaded) for wanted in self._queued.values())
