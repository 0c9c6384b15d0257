"""The input and the record of a simulation with `swarm_network`."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field

from distflow.sim.scenario import Crash
from distflow.types import Version
from distflow.weights.swarm_messages import Content
from tests.search.lease_scenario import Pause


@dataclass(frozen=True, slots=True)
class LinkCut:
    """Nothing gets through between two hosts from second `at` on; with `reset` their connections end at once."""

    between: tuple[int, int]
    at: float
    seconds: float
    reset: bool


@dataclass(frozen=True, slots=True)
class Damage:
    """At second `at` a byte changes in the newest version that a host has."""

    host: int
    at: float


@dataclass(frozen=True, slots=True)
class ClockJump:
    """At second `at` the clock of a host jumps forward."""

    host: int
    at: float
    seconds: float


@dataclass(frozen=True, slots=True)
class WeightScenario:
    """What to simulate. Times are in virtual seconds. Host 0 publishes, hosts 1, 2, … read."""

    joins: Sequence[float] = (0.0, 0.0)
    """When each reader begins."""
    chunks: int = 4
    last_bytes: int = 1 << 20
    """Of the last chunk."""
    delta_bytes: int = 0
    """Of what has changed in a version since the one before; 0: that is not served."""
    publishes: Sequence[float] = ()
    """When the trainer has versions after the first; one that it is still copying is waited for."""
    in_step: bool = False
    """Whether the trainer waits with the next version until every reader has the last one."""
    copy_s: float = 0.1
    """Seconds to copy a version into shared memory."""
    describe_s: float = 0.1
    """Seconds to hash it, and to find out what has changed."""
    sites: Sequence[str] = ()
    """Where the readers stand."""
    outside: frozenset[int] = frozenset()
    """Readers that pass nothing on."""
    rates: Sequence[float] = ()
    """Bytes a second that each host sends; the last one holds for all others."""
    delay_s: float = 0.01
    """Most that a message takes."""
    no_progress_s: float = 60.0
    crashes: Sequence[Crash] = ()
    """Of processes; with those that are not noticed the whole host is gone, and the memory of it."""
    pauses: Sequence[Pause] = ()
    cuts: Sequence[LinkCut] = ()
    jumps: Sequence[ClockJump] = ()
    damages: Sequence[Damage] = ()
    liars: frozenset[int] = frozenset()
    """Readers that send wrong bytes only."""
    wrong: float = 0.0
    """Probability that a chunk arrives with wrong bytes, until `calm_at`."""
    calm_at: float = 0.0
    """From then on nothing new goes wrong."""
    limit_s: float = 900.0
    """How long after that everybody may take to have the newest version."""
    seed: int = 0

    @property
    def faultless(self) -> bool:
        """Whether nothing goes wrong at all."""
        faults = (self.crashes, self.pauses, self.cuts, self.jumps, self.damages, self.liars)
        return not any(faults) and self.wrong == 0.0

    def rate(self, host: int) -> float:
        """Bytes a second that a host sends."""
        return self.rates[min(host, len(self.rates) - 1)] if self.rates else 1e9

    def site(self, host: int) -> str:
        """Where a reader stands."""
        return self.sites[host - 1] if self.sites else ""


@dataclass(slots=True)
class WeightRecord:
    """What happened."""

    sent: Counter[tuple[Content, str]] = field(default_factory=Counter)
    """Bytes that publishers have sent, by version, or delta, and site."""
    versions: defaultdict[int, list[Version]] = field(default_factory=lambda: defaultdict(list))
    """That each host has had whole, one after the other."""
    ended: Counter[str] = field(default_factory=Counter)
    """Fetches, by how they ended."""
    published: list[Version] = field(default_factory=list)
    """That were announced."""
    wrong: int = 0
    """Chunks that arrived with wrong bytes."""
    passed_on: int = 0
    """Chunks that readers have sent."""
    made: int = 0
    """Versions that readers have made of older ones, all of their chunks."""
    seconds: float = 0.0
