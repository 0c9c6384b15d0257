"""The input and the record of a simulation with `call_network`."""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from distflow.sim.scenario import Crash
from tests.search.lease_scenario import Leave, Pause

FROZEN, VERSIONED = "reference", "values"
"""The steps that are called: one of a frozen model, one of the version of the training step."""
MIB = 1 << 20
AGAIN = 10
"""How much longer than all calls one by one a run may take: what is lost is waited for, and computed again."""


@dataclass(frozen=True, slots=True)
class Withdrawal:
    """The oldest open request of caller number `client` is cancelled at second `at`."""

    client: int
    at: float


@dataclass(frozen=True, slots=True)
class Cut:
    """Nothing gets through between a caller and a server, both by number, from second `at` on."""

    client: int
    server: int
    at: float
    seconds: float


@dataclass(frozen=True, slots=True)
class CallScenario:
    """What to simulate. Times are in virtual seconds, probabilities per message.

    Servers are numbered over all: the first ones run `reference`, the others `values`; if `shared`, those run both. The
    first server of each step must not be gone for good, or nobody would answer.
    """

    clients: int = 1
    servers: int = 2
    """Of `reference`; 0: that is not called."""
    homes: int | None = None
    """Servers of `values`; None: as many, 0: that is not called."""
    shared: bool = False
    steps: int = 2
    """Training steps: version t + 1 exists once everything for step t is answered."""
    groups: int = 4
    """Of each caller for each training step: one call of each step of the flow."""
    ahead: int = 1
    """Training steps for which calls are asked before their turn."""
    largest_bytes: int = MIB
    """Requests have between 1% and all of that."""
    ahead_bytes: int = 4 * MIB
    """Of requests ahead of their turn at each server."""
    tokens: int = 100
    """Of a request, in the middle."""
    spread: float = 0.0
    """Of their logarithm, which is normal: 1 is much."""
    budget: int = 400
    """Tokens that a server joins."""
    token_s: float = 0.001
    """Seconds that a server takes for a token."""
    generated: bool = False
    """`values` is a step that generates: any version from the one before its training step on may answer."""
    hasty: bool = False
    """Servers take a new version while they compute, and say so (to test that the caller notices)."""
    slowness: Sequence[float] = ()
    """Factor on that time for the first servers, by number."""
    crashes: Sequence[Crash] = ()
    """Of servers."""
    pauses: Sequence[Pause] = ()
    """Of servers."""
    leaves: Sequence[Leave] = ()
    """Servers that are drained."""
    cuts: Sequence[Cut] = ()
    joins: Sequence[float] = ()
    """When further servers join, of the first step that is called."""
    client_crashes: Sequence[Crash] = ()
    """Of callers: they come back, and ask anew what they have no answer for."""
    client_pauses: Sequence[Pause] = ()
    cancels: Sequence[Withdrawal] = ()
    renewals: Sequence[float] = ()
    """When a later term of the trained model begins, at the same training step."""
    loss: float = 0.0
    duplicates: float = 0.0
    delay_s: float = 0.01
    """Most that a message takes."""
    seed: int = 0
    limit_s: float = 8_000.0

    @property
    def called(self) -> tuple[str, ...]:
        """The steps that are called."""
        homes = self.servers if self.homes is None else self.homes
        return tuple(step for step, servers in ((FROZEN, self.servers), (VERSIONED, homes)) if servers)

    @property
    def pools(self) -> dict[str, int]:
        """The servers of each pool."""
        homes = self.servers if self.homes is None else self.homes
        sizes = {FROZEN: self.servers} if self.shared else {FROZEN: self.servers, VERSIONED: homes}
        return {pool: servers for pool, servers in sizes.items() if servers}

    def patient(self) -> CallScenario:
        """The same, with time enough for a network that loses much and one slow server that is left with everything."""
        calls = self.clients * self.steps * self.groups * len(self.called)
        each_s = self.tokens * math.exp(self.spread**2 / 2) * self.token_s * max(self.slowness, default=1.0)
        return replace(self, limit_s=self.limit_s + AGAIN * calls * each_s)

    def nbytes(self, client: int, step: str, t: int, group: int) -> int:
        """Size of one request."""
        rng = random.Random(f"{self.seed}/{client}/{step}/{t}/{group}")
        return max(1, int(self.largest_bytes * rng.uniform(0.01, 1.0)))

    def tokens_of(self, client: int, step: str, t: int, group: int) -> int:
        """What one request costs."""
        rng = random.Random(f"{self.seed}/{client}/{step}/{t}/{group}/tokens")
        return max(1, round(self.tokens * rng.lognormvariate(0.0, self.spread)))


@dataclass(slots=True)
class CallRecord:
    """What happened."""

    answers: Counter[tuple[int, str, int, int]] = field(default_factory=Counter)
    """Answers that counted, by caller, step, training step and group."""
    computed: Counter[str] = field(default_factory=Counter)
    """Requests that servers have computed, by server, repetitions included."""
    joined: list[int] = field(default_factory=list)
    """Tokens of each batch that was computed."""
    messages: Counter[str] = field(default_factory=Counter)
    unused: int = 0
    """Answers that counted for nothing."""
    cancelled: int = 0
    peak_bytes: int = 0
    """Most that one server had of one caller."""
    largest_load: dict[str, int] = field(default_factory=dict)
    """Most that each server had to answer."""
    returned: int = 0
    """Requests that drained servers gave back."""
    seconds: float = 0.0
