"""What a caller knows of the servers that can answer it: who is there, how loaded, and which of its requests each has.

*Room* bounds the bytes that one server has of one caller: `SERVER_BYTES`, and half of it with requests of later
training steps than the oldest that waits for answers, of which it has only what it computes soon. A server that has
none of that oldest step always takes one, so that its requests are held back only by each other. A server that has
nothing takes any request: however large they are, all servers work.

Load: of two random servers with room, the less loaded gets a request. A server's load is what it said last, plus what
it was sent since, in tokens: what they cost to compute.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

from distflow.types import Version, WorkerName

SERVER_BYTES = 32 << 20
"""Most bytes of requests that one server has of one caller: half of what the outbox keeps for one peer."""
SILENCE_S = 2.0
"""Seconds without a message after which a server counts as silent: not lost, but others are asked."""


@dataclass(slots=True)
class CallTarget:
    """One server, as its caller sees it."""

    name: str
    pool: str
    incarnation: int
    heard_at: float
    """In seconds of listening."""
    present: bool = True
    leaving: bool = False
    """It drains: nothing more is asked there."""
    version: Version | None = None
    announced: bool = False
    """Whether it has said which version it has; until then it may have any."""
    load: int = 0
    sent_since: int = 0
    """Tokens sent after `load` was reported."""
    out: dict[int, tuple[int, int, int]] = field(default_factory=dict)
    """Training step, bytes and tokens of the requests that it has, by number."""
    bytes_at: Counter[int] = field(default_factory=Counter)
    """Bytes of those, by training step."""
    tokens: int = 0
    """Of those."""

    @property
    def estimate(self) -> int:
        """Tokens that it has to answer, as far as known here."""
        return max(self.load + self.sent_since, self.tokens)

    def serves(self, need: Version | None, *, at_least: bool = False) -> bool:
        """Whether it may have this version, or a later one if that is `at_least`; None: of a frozen model, which it
        always has."""
        return self.present and not self.leaving and (not self.announced or allows(need, self.version, at_least))

    def room(self, call_t: int, nbytes: int, oldest: int, ahead_bytes: int) -> bool:
        """Whether a request fits. `ahead_bytes`: most that it has for training steps after `oldest`, but for one."""
        total = self.bytes_at.total()
        if call_t == oldest:
            return not self.bytes_at[oldest] or total + nbytes <= SERVER_BYTES
        ahead = total - self.bytes_at[oldest]
        return not total or (total + nbytes <= SERVER_BYTES // 2 and (not ahead or ahead + nbytes <= ahead_bytes))

    def put(self, number: int, t: int, nbytes: int, tokens: int) -> None:
        """It is sent a request; again does not count twice."""
        if number not in self.out:
            self.out[number] = (t, nbytes, tokens)
            self.bytes_at[t] += nbytes
            self.tokens += tokens
            self.sent_since += tokens

    def drop(self, number: int) -> None:
        """It no longer has a request, or its answer is no longer wanted."""
        t, nbytes, tokens = self.out.pop(number)
        self.tokens -= tokens
        self.bytes_at[t] -= nbytes
        if not self.bytes_at[t]:
            del self.bytes_at[t]

    def reported(self, load: int) -> None:
        """It has said how many tokens it has to answer."""
        self.load, self.sent_since = load, 0

    def learn(self, version: Version | None) -> None:
        """It has said which version it has. Versions only grow: what says otherwise was overtaken."""
        self.announced = True
        if version is not None and (self.version is None or version > self.version):
            self.version = version


class CallTargets:
    """All servers of one caller, with the clock of its listening.

    Time in which the caller itself did not run is no silence of theirs, and no time that they took to answer.
    """

    LONGEST_GAP_S = 0.5
    """Seconds between two events that count at most."""

    def __init__(self, rng: random.Random) -> None:
        self.clock = 0.0
        self._now: float | None = None
        self._rng = rng
        self._targets: dict[str, CallTarget] = {}

    def listen(self, now: float) -> float:
        """Advance the clock; returns it."""
        if self._now is not None:
            self.clock += min(max(0.0, now - self._now), self.LONGEST_GAP_S)
        self._now = now
        return self.clock

    def meet(self, name: str, incarnation: int) -> CallTarget | None:
        """A server is there; returns what was known of an earlier incarnation of it. Older ones are ignored."""
        known = self._targets.get(name)
        if known is not None and incarnation <= known.incarnation:
            return None
        self._targets[name] = CallTarget(name, WorkerName.parse(name).pool, incarnation, self.clock)
        return known

    def get(self, name: str, incarnation: int | None = None) -> CallTarget | None:
        """A server that is known, of this incarnation if one is named."""
        target = self._targets.get(name)
        return target if target is None or incarnation in (None, target.incarnation) else None

    def silent(self, target: CallTarget) -> bool:
        """Whether nothing has been heard of it for a while, or it is gone."""
        return not target.present or self.clock - target.heard_at > SILENCE_S

    def of(self, pool: str) -> list[CallTarget]:
        """The servers of a pool that are there and take requests."""
        return [target for target in self._targets.values() if target.pool == pool and target.serves(None)]

    def behind(self, pool: str, need: Version | None, *, at_least: bool = False) -> tuple[str, ...]:
        """The servers of a pool, as far as they are heard, that have yet to take a version."""
        if need is None:
            return ()
        return tuple(
            target.name
            for target in self.of(pool)
            if target.announced and not self.silent(target) and _behind(target.version, need, at_least=at_least)
        )

    def least_loaded(self, pool: str) -> list[CallTarget]:
        """The servers of a pool that are heard and take requests, the least loaded first."""
        heard = [target for target in self.of(pool) if not self.silent(target)]
        return sorted(self._rng.sample(heard, len(heard)), key=lambda target: target.estimate)

    def choose(self, targets: Iterable[CallTarget]) -> CallTarget | None:
        """Of two random ones the less loaded; silent ones only if there is no other."""
        found = list(targets)
        found = [target for target in found if not self.silent(target)] or found
        two = self._rng.sample(found, min(2, len(found)))
        return min(two, key=lambda target: target.estimate, default=None)


def allows(need: Version | None, has: Version | None, at_least: bool) -> bool:
    """Whether a model of version `has` may answer what needs `need`: just this version, or also a later one."""
    if need is None or not at_least:
        return need in (None, has)
    return has is not None and has.meets(need)


def _behind(has: Version | None, need: Version, *, at_least: bool) -> bool:
    """A worker that generates joins at any time, and may take minutes for its first weights: nobody waits for it."""
    if has is None:
        return not at_least
    return not has.meets(need) if at_least else has < need
