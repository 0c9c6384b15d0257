"""Which prompts are drawn, by how many of their samples were solved: pools of prompts by pass rate, and retirement.

The data order (`order.py`) says which prompt belongs to which position; here it is decided whether that visit takes
place or is passed over. A prompt of a pool with half the weight is visited in half of the passes over the data, chosen
by seed, prompt and pass; a retired one in none. The pass rate of a prompt is that of its last visit.

What was measured in training step t counts from version t + 1 on. A visit is decided by what was known at the oldest
version that may generate for it (`Lease.min_version`). So which prompts are trained on is a function of seed, recipe
and trained steps, and owners that record the same visits decide alike. Imports no torch.

Example: with `retire_solved` 2, a prompt solved by all samples of its group in training steps 3 and 7 is passed over by
whatever is decided at version 8 or later.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Self

from distflow.config.data_schema import DifficultyConfig
from distflow.data.randomness import stream_key
from distflow.types import Uid

_UNSEEN, _RETIRED_SOLVED, _RETIRED_UNSOLVED = -1, -2, -3
"""Where a prompt can stand besides the pools, which are counted from 0."""


class Visit(NamedTuple):
    """One group whose samples were judged."""

    position: int
    prompt: int
    """Number over all sources (`Uid.prompt`)."""
    solved: int
    of: int


class _Known(NamedTuple):
    """What is known of a prompt from a version on: its last visit, and visits in a row with one outcome."""

    version: int
    solved: int
    of: int
    streak: int
    """Visits that all samples solved; negative: that none did; 0: the last one was mixed."""


@dataclass(frozen=True, slots=True)
class PromptPool:
    """Prompts with a pass rate of at most `up_to`, and above that of the pool before."""

    name: str
    up_to: float
    weight: float


@dataclass(frozen=True, slots=True)
class DifficultyRule:
    """The recipe's `data.difficulty`. `pools` by rising `up_to`, the last one up to 1; none: all prompts alike."""

    pools: Sequence[PromptPool] = ()
    retire_solved: int | None = None
    retire_unsolved: int | None = None
    solved_score: float = 1.0
    reopen_below: float = 0.0

    @classmethod
    def of(cls, config: DifficultyConfig) -> Self:
        """As a recipe gives it."""
        pools = [PromptPool(name, pool.up_to, pool.weight) for name, pool in config.ranges]
        retired = config.retire_solved, config.retire_unsolved
        return cls(pools, *retired, config.solved_score, config.reopen_below)

    @property
    def most(self) -> float:
        """The largest weight, which unseen prompts have."""
        return max((pool.weight for pool in self.pools), default=1.0)

    def visit(self, uid: Uid, scores: Sequence[float]) -> Visit:
        """A group with these scores."""
        return Visit(uid.position, uid.prompt, sum(score >= self.solved_score for score in scores), len(scores))

    def place(self, known: _Known | None) -> int:
        """The number of a pool, or one of the places besides."""
        if known is None:
            return _UNSEEN
        if self.retire_solved is not None and known.streak >= self.retire_solved:
            return _RETIRED_SOLVED
        if self.retire_unsolved is not None and -known.streak >= self.retire_unsolved:
            return _RETIRED_UNSOLVED
        rate = known.solved / known.of
        return next((number for number, pool in enumerate(self.pools) if rate <= pool.up_to), 0)

    def weight(self, place: int) -> float:
        """The weight of prompts that stand there."""
        if place in (_RETIRED_SOLVED, _RETIRED_UNSOLVED):
            return 0.0
        return self.pools[place].weight if self.pools and place != _UNSEEN else self.most


class Difficulty:
    """What is known of `prompts` prompts at the versions that visits are still decided by: the last `lag` + 1.

    It begins at a version, with nothing known or with what was `saved` there (`snapshot`). What was saved by another
    rule keeps its visits, and is placed by this one.
    """

    def __init__(
        self,
        rule: DifficultyRule,
        seed: int,
        prompts: int,
        lag: int,
        version: int = 0,
        saved: Mapping[str, Any] | None = None,
    ) -> None:
        self.rule = rule
        self.version = version
        """Training steps that were recorded."""
        self.reopened = 0
        """How often all prompts were opened again."""
        self._seed = seed
        self._prompts = prompts
        self._lag = lag
        self._known: dict[int, list[_Known]] = {}
        """By prompt, rising by version."""
        self._forgets: list[int] = []
        """Versions at which all prompts were opened again: what was known then no longer counts."""
        self._scales: dict[int, float] = {}
        """The largest weight that a prompt has, by version."""
        self._places: Counter[int] = Counter()
        """How many prompts stand where at the newest version, without unseen ones."""
        if saved is not None:
            self._restore(saved)
        oldest = max(0, version - lag)
        self._scales = {at: self._scales.get(at, self._scale()) for at in range(oldest, version + 1)}

    def draws(self, uid: Uid, version: int) -> bool:
        """Whether a prompt is visited at a position, by what was known at a version; raises KeyError for older ones."""
        share = self.rule.weight(self._place(uid.prompt, version)) / self._scales[version]
        if share >= 1.0 or share <= 0.0:
            return share > 0.0
        drawn = int.from_bytes(stream_key(self._seed, "difficulty", uid.prompt, uid.epoch)[:8], "little")
        return drawn < share * 2.0**64

    def record(self, step: int, visits: Iterable[Visit]) -> None:
        """All visits that training step `step` has settled, in any order; a step recorded before is no news."""
        if step < self.version:
            return
        assert step == self.version, f"training step {step} after {self.version} steps"
        self.version = step + 1
        for visit in sorted(visits):
            self._fold(visit)
        if self._exhausted:
            self.reopened += 1
            self._forgets.append(self.version)
            self._places.clear()
        self._scales[self.version] = self._scale()
        self._prune()

    def counts(self) -> dict[str, int]:
        """How many prompts stand where at the newest version, and how often all were opened again: metrics."""
        named = {f"pool/{pool.name}": self._places[number] for number, pool in enumerate(self.rule.pools)}
        retired = {"solved": _RETIRED_SOLVED, "unsolved": _RETIRED_UNSOLVED}
        named |= {f"retired_{name}": self._places[place] for name, place in retired.items()}
        return named | {"unseen": self._unseen, "reopened": self.reopened}

    # -- checkpoints
    def snapshot(self, version: int) -> dict[str, object]:
        """What is known at a version, and at those before it that still matter, as plain JSON values."""
        seen = [[prompt, *known] for prompt in sorted(self._known) for known in self._known[prompt]]
        return {
            "seen": [row for row in seen if row[1] <= version],
            "scales": [[at, scale] for at, scale in self._scales.items() if at <= version],
            "forgets": [at for at in self._forgets if at <= version],
            "reopened": self.reopened,
        }

    def _restore(self, snapshot: Mapping[str, Any]) -> None:
        for prompt, version, solved, of, streak in snapshot["seen"]:
            self._known.setdefault(prompt, []).append(_Known(version, solved, of, streak))
        self._forgets, self.reopened = [int(at) for at in snapshot["forgets"]], int(snapshot["reopened"])
        for prompt in self._known:
            self._count(prompt, +1)
        self._scales = {int(at): float(scale) for at, scale in snapshot["scales"]}

    # -- details
    @property
    def _unseen(self) -> int:
        return self._prompts - self._places.total()

    def _fold(self, visit: Visit) -> None:
        before = self._at(visit.prompt, self.version)
        streak = 0 if before is None else before.streak
        if visit.solved == visit.of:
            streak = max(0, streak) + 1
        elif visit.solved == 0:
            streak = min(0, streak) - 1
        else:
            streak = 0
        self._count(visit.prompt, -1)
        entries = self._known.setdefault(visit.prompt, [])
        if entries and entries[-1].version == self.version:
            entries.pop()
        entries.append(_Known(self.version, visit.solved, visit.of, streak))
        self._count(visit.prompt, +1)
        oldest = self.version - self._lag
        # The newest of those that the oldest version knows, and what came after.
        del entries[: max(0, bisect_right(entries, oldest, key=lambda known: known.version) - 1)]

    def _count(self, prompt: int, change: int) -> None:
        place = self._place(prompt, self.version)
        if place != _UNSEEN:
            self._places[place] += change

    def _place(self, prompt: int, version: int) -> int:
        return self.rule.place(self._at(prompt, version))

    def _at(self, prompt: int, version: int) -> _Known | None:
        """What a version knows of a prompt."""
        for known in reversed(self._known.get(prompt, ())):
            if known.version <= version:
                forgotten = any(known.version <= at <= version for at in self._forgets)
                return None if forgotten else known
        return None

    @property
    def _exhausted(self) -> bool:
        """Whether so few prompts are left that all are to be opened again."""
        closed = sum(count for place, count in self._places.items() if not self.rule.weight(place))
        left = self._prompts - closed
        return left <= 0 or left < self.rule.reopen_below * self._prompts

    def _scale(self) -> float:
        there = [self.rule.weight(place) for place, count in self._places.items() if count > 0]
        return max([*there, *([self.rule.most] if self._unseen > 0 else [])], default=self.rule.most) or self.rule.most

    def _prune(self) -> None:
        oldest = self.version - self._lag
        self._scales = {at: scale for at, scale in self._scales.items() if at >= oldest}
        while self._forgets and self._forgets[0] <= oldest:
            at = self._forgets.pop(0)
            left = {prompt: [one for one in entries if one.version > at] for prompt, entries in self._known.items()}
            self._known = {prompt: entries for prompt, entries in left.items() if entries}
