"""How many samples a score step has judged, or a generate step made, and on how many of them it failed, over all
workers that run it.

Each worker counts its own and says so with every heartbeat. Owners hear all of them, also of several services of which
no worker that asks sees more than a part: they add up and say the sums with theirs. What a worker has said outlives it.
Sums are a heartbeat or two old. An owner that was restarted lacks what had died before; of several the fullest counts.
Whether too many fail is judged by the newest samples (`RECENT`): a long run forgets a bad hour, and notices a new one.

Example: reward/0 says {"reward": (90, 9)}, reward/1 {"reward": (110, 0)}; trainer/0 says {"reward": (200, 9)}.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from typing import NamedTuple

from distflow.exchange.facts import JUDGED, JUDGED_BY_ALL

RECENT = 1000
"""Samples by which the share of failures is judged."""
LEAST = 100
"""Samples before it is judged."""
FIRST = 16
"""If a worker's first so many samples all fail, the step cannot work."""


class Counts(NamedTuple):
    """Samples of one step."""

    judged: int = 0
    failed: int = 0

    def exceed(self, rate: float) -> bool:
        """Tell whether more than this share failed, of enough to tell."""
        return self.judged >= LEAST and self.failed > rate * self.judged


class Tally:
    """The counts of one step, as its worker sees them."""

    def __init__(self, by_all: Callable[[], Counts] | None = None) -> None:
        self.own = Counts()
        """Of this worker since it started."""
        self.recent = Counts()
        """Of all workers, as of the last `note`: the last `RECENT` samples, or a few more, as many as were told of
        together."""
        self._by_all = by_all
        self._before: deque[Counts] = deque()
        """What was known earlier: the newest that is older than `RECENT` samples, and all since."""

    def add(self, judged: int, failed: int) -> None:
        """Count samples that this worker has judged."""
        self.own = Counts(self.own.judged + judged, self.own.failed + failed)

    def by_all(self) -> Counts:
        """Of all workers that run the step, as far as known; zeros until the first owner is heard."""
        return self.own if self._by_all is None else self._by_all()

    def note(self) -> None:
        """Take down what is known over all workers. To be called whenever samples have been judged, since it is by this
        that the last `RECENT` of them are told apart. What others had judged before this worker began does not count.
        """
        now, before = self.by_all(), self._before
        if not before:
            if not now.judged:
                return
            earlier = max(0, now.judged - self.own.judged)
            before.append(Counts(earlier, min(earlier, max(0, now.failed - self.own.failed))))
        if now.judged < before[-1].judged:
            before.clear()  # An owner was restarted, and lacks what had died before.
            before.append(Counts(now.judged, now.failed))
        if now.judged > before[-1].judged:
            before.append(now)
        while len(before) > 1 and before[1].judged <= now.judged - RECENT:
            before.popleft()
        self.recent = Counts(now.judged - before[0].judged, now.failed - before[0].failed)

    def too_many(self, rate: float) -> str:
        """Note what is known, and say of how many samples too many failed for the step to be of use: more than `rate`
        of the last ones, or all of this worker's first ones; "" if it is not so."""
        self.note()
        recent = self.recent
        if self.all_failed and rate < 1.0:
            return f"all of the first {self.own.judged} samples"
        return f"{recent.failed} of {recent.judged} samples" if recent.exceed(rate) else ""

    @property
    def all_failed(self) -> bool:
        """Tell whether none of this worker's first samples was of use."""
        return FIRST <= self.own.judged == self.own.failed


class Tallies:
    """The counts of all steps at one worker; `owner`: it adds up those of the others."""

    def __init__(self, owner: bool) -> None:
        self._owner = owner
        self._tallies: dict[str, Tally] = {}
        self._said: dict[tuple[str, int], Mapping[str, Counts]] = {}
        """What other workers have counted, by name and incarnation: an owner's."""
        self._sums: dict[str, tuple[int, Mapping[str, Counts]]] = {}
        """What owners say, with the incarnation that does."""
        self._heard: dict[str, Mapping[str, object]] = {}
        """The last facts of each worker."""

    def of(self, step: str) -> Tally:
        """Where a step of this worker counts."""
        return self._tallies.setdefault(step, Tally(lambda: self._by_all(step)))

    def hear(self, name: str, incarnation: int, facts: Mapping[str, object]) -> None:
        """Take the facts of another worker, newer ones later; the same ones again are no news. It may be called on
        another thread than the one that counts: what both know is copied before it is gone through."""
        if self._heard.get(name) is facts:
            return
        self._heard[name] = facts
        if self._owner and JUDGED in facts:
            self._said[name, incarnation] = _read(facts[JUDGED])
        if JUDGED_BY_ALL in facts:
            self._sums[name] = incarnation, _read(facts[JUDGED_BY_ALL])
        elif name in self._sums and self._sums[name][0] < incarnation:
            del self._sums[name]  # It has heard of nothing yet; what it had added up before, others would not know.

    def facts(self) -> dict[str, dict[str, Counts]]:
        """What this worker says."""
        said = {JUDGED: {step: tally.own for step, tally in self._tallies.copy().items() if tally.own.judged}}
        if self._owner:
            steps = {*said[JUDGED], *(step for counts in list(self._said.values()) for step in counts)}
            said[JUDGED_BY_ALL] = {step: self._sum(step) for step in sorted(steps)}
        return {fact: counts for fact, counts in said.items() if counts}

    def _by_all(self, step: str) -> Counts:
        sums = [sums[step] for _, sums in list(self._sums.values()) if step in sums]
        return max([*sums, self._sum(step)] if self._owner else sums, default=Counts())

    def _sum(self, step: str) -> Counts:
        mine = [self._tallies[step].own] if step in self._tallies else []
        parts = [*mine, *(counts[step] for counts in list(self._said.values()) if step in counts)]
        return Counts(sum(part.judged for part in parts), sum(part.failed for part in parts))


def _read(said: object) -> dict[str, Counts]:
    assert isinstance(said, Mapping), "facts are checked when they arrive"
    return {step: Counts(*counts) for step, counts in said.items()}
