"""Virtual time in which things go wrong on purpose, which is counted as it happens."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable
from typing import Literal, Protocol

from distflow.sim.event_queue import EventQueue

Fault = Literal[
    "crashes",
    "pauses",
    "leaves",
    "joins",
    "new_terms",
    "scalings",
    "cuts",
    "messages_lost",
    "messages_doubled",
    "messages_overtaken",
    "messages_late",
    "calls_cancelled",
    "damaged_chunks",
    "wrong_chunks",
    "clock_jumps",
    "slow_workers",
    "slow_reads",
]
"""crashes: of processes and hosts; pauses: as by SIGSTOP; leaves, joins: of workers and hosts; new_terms: training that
begins again from a checkpoint; scalings: of pools that train; cuts: of links between hosts; messages_overtaken: by one
that was sent later; messages_late: of half a second and more, where order is not kept; damaged_chunks: in memory;
wrong_chunks: that arrive with wrong bytes; slow_workers: 20 times slower than others; slow_reads: of prompts."""


class Mortal(Protocol):
    """A process that may be dead."""

    @property
    def alive(self) -> bool:
        """Whether it runs."""


class FaultQueue(EventQueue):
    """The clock of a simulation, what is still to happen, and the faults that there were."""

    def __init__(self, injected: Counter[Fault] | None = None) -> None:
        """`injected`: where to count faults."""
        super().__init__()
        self.injected = Counter[Fault]() if injected is None else injected
        self._last_arrivals: dict[Hashable, float] = {}
        """When the last message on each way arrives."""

    def befall(self, seconds: float, what: Fault, process: Mortal, event: Callable[[], None]) -> None:
        """Schedule a fault of a process: it counts if the process is alive then, and a crash if it dies of it."""

        def happen() -> None:
            alive = process.alive
            event()
            self.injected[what] += alive and (what != "crashes" or not process.alive)

        self.after(seconds, happen)

    def inject(self, what: Fault) -> None:
        """Count a fault that happens now."""
        self.injected[what] += 1

    def note_arrival(self, way: Hashable, seconds: float) -> None:
        """Count a message that is sent now, and arrives before an earlier one on the same way."""
        at = self.now + seconds
        if at < self._last_arrivals.get(way, 0.0):
            self.inject("messages_overtaken")
        else:
            self._last_arrivals[way] = at

    def run_for(self, seconds: float) -> None:
        """Let everything happen that does within so many seconds."""
        until = self.now + seconds
        while self.events and self.events[0][0] <= until:
            self.happen()
        self.now = until
