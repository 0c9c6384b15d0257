"""One ledger: which of its positions are leased, have arrived, are taken or dropped, and which the open step may take.

The life of a position:  (unleased) → open → arrived → taken,  open → back → open again when its worker is lost,
open or back → dropped. `entries` has, by k, every position that is leased and may still count for the open step or a
later one; its first b are the open step's window. A drop removes a position, so the window reaches further.
Positions before the first of `entries` are all taken or dropped: that is the frontier kept in a checkpoint.

Example, b = 2, s = 0: 0 and 1 are leased; 0 is dropped, so 2 may be leased; 2 arrives, then 1: step 0 takes {1, 2}.

In free order (no staleness bound) there is no window: the open step may take the first b that arrive. Positions trained
by finished steps can then lie ahead of the frontier; they are exceptions in a checkpoint, as drops are.
"""

from __future__ import annotations

import heapq
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

from msgspec import structs

from distflow.errors import WorkerFailed
from distflow.exchange.entry import Entry
from distflow.exchange.lease_settings import LeaseSettings
from distflow.exchange.messages import Lease, LeasePrompt, PromptAt
from distflow.types import UNREWARDED, Scores, Uid, Version

SAMPLES_LEFT_OUT = "samples left out"
"""How reasons begin of groups of which too few samples are left; behind it is why most of the others were left out."""
_WHERE_DROPPED = "Look at the rewards of the samples, in rollouts/ of the run folder once there are some"
_WHERE_LEFT_OUT = (
    "The logs of the workers that generate and judge show what failed: mend it, or see on_error and max_error_rate of "
    "that step; responses that are cut off need a higher max_new_tokens"
)
_WHERE_UNREWARDED = (
    "No step failed: the reward functions named returned no number for these samples, which leaves them out. Return a "
    "number for each, take prompts that none of them judges out of the data"
)
_TOLD = 4
"""Reasons for which groups were dropped, in the error: the most frequent ones."""


class RefillsExhausted(WorkerFailed):
    """A ledger dropped so many groups for one training step that continuing makes no sense."""


class Judged(NamedTuple):
    """A dropped group whose samples were all judged."""

    uid: Uid
    scores: Scores


class Ledger:
    """State of ledger `index`. `memory_bytes` is its part of the owner's memory for results."""

    def __init__(self, index: int, settings: LeaseSettings, memory_bytes: int, prompt_at: PromptAt) -> None:
        self.index = index
        self.version = 0
        self.ready: set[int] = set()
        self.reserved = 0
        self.refills: Counter[str] = Counter()
        self.passed_over = 0
        """Positions that were not leased since their prompts were not drawn."""
        self.entries: dict[int, Entry] = {}
        """By k, in order: positions are leased one after another."""
        self._settings = settings
        self._b = settings.groups_per_ledger
        self._memory = memory_bytes
        self._prompt_at = prompt_at
        self._next_k = 0
        self._window = 0
        """Entries among the first b, taken ones too."""
        self._window_end = 0
        """Every lower k is in the window or gone."""
        self._trained: list[int] = []
        """Positions taken by the open step."""
        self._next_prompt: LeasePrompt | None = None
        self._dropped = 0
        self._dropped_ahead: dict[int, str] = {}
        self._trained_ahead: set[int] = set()
        self._judged: dict[int, Judged] = {}
        """Of the dropped groups in the open window or after it, if it matters what they scored."""
        self._in_turn: deque[int] = deque()
        """In free order: arrived positions for which the open step has no room."""
        self._back: list[int] = []
        self._gate = self._open_gate()

    # -- leasing
    def leasable(self) -> int | None:
        """The lowest k that may be leased now, or None: the gate, or memory beyond the open window, forbids it."""
        while self._back and not self._is_back(self._back[0]):
            heapq.heappop(self._back)
        return self._back[0] if self._back else self._next_leasable()

    def _next_leasable(self) -> int | None:
        self._skip()
        while self._next_k - self._dropped < self._gate and (prompt := self._prompt()) is not None:
            if self._draws(prompt.uid):
                break
            self._dropped += 1
            self.passed_over += 1
            self._next_k, self._next_prompt = self._next_k + 1, None
            self._skip()
        else:
            return None
        # The window never waits for memory: b of the largest groups fit, so no step can starve.
        if len(self.entries) >= self._b and self.reserved + self._next_bytes() > self._memory:
            return None
        return self._next_k

    def _skip(self) -> None:
        """Go over positions that are terminal since before this term."""
        while self._next_k in self._dropped_ahead or self._next_k in self._trained_ahead:
            self._dropped += self._next_k in self._dropped_ahead
            self._next_k += 1

    def _draws(self, uid: Uid) -> bool:
        """Whether the next position is to be leased; if not, it counts like a dropped one."""
        difficulty = self._settings.difficulty
        return difficulty is None or difficulty.draws(uid, self._settings.least_version(self._rank // self._b))

    def lease(self, term: int, now: float) -> Entry:
        """Lease the position that `leasable` named."""
        k = self.leasable()
        assert k is not None, f"ledger {self.index} has nothing to lease"
        if self._back:
            return self.lease_known(heapq.heappop(self._back), now)
        return self._lease_next(k, term, now)

    def lease_known(self, k: int, now: float) -> Entry:
        """Lease a position that was given back, or one of `unfold`."""
        entry = self.entries[k]
        entry.lease = structs.replace(entry.lease, attempt=entry.lease.attempt + 1)
        entry.state, entry.leased_at, entry.started = "open", now, False
        entry.tokens = 0 if entry.kept is None else entry.kept.tokens
        return entry

    def unfold(self, term: int, now: float) -> Iterator[Entry]:
        """All further positions that may be leased now, in order; `lease_known` then leases them in any order."""
        while (k := self._next_leasable()) is not None:
            entry = self._lease_next(k, term, now)
            entry.state, entry.lease = "back", structs.replace(entry.lease, attempt=0)
            yield entry

    @property
    def unread(self) -> bool:
        """Whether the next position cannot be leased only because its prompt has not been read."""
        return self._next_leasable() is None and self._next_k - self._dropped < self._gate and self._prompt() is None

    def reach(self, k: int, term: int, now: float) -> bool:
        """Lease (and give back) all positions up to k, as far as the gate and memory allow.

        False: prompts have to be read before.
        """
        while not self.knows(k) and (ahead := self._next_leasable()) is not None:
            self._lease_next(ahead, term, now)
            self.give_back(ahead)
        return self.knows(k) or not self.unread

    def _lease_next(self, k: int, term: int, now: float) -> Entry:
        entry = Entry(self._new_lease(k, term), self._next_bytes(), now, step=self._rank // self._b)
        self._next_k, self._next_prompt = k + 1, None
        self.entries[k] = entry
        self._widen()
        self.reserved += entry.reserved
        return entry

    def give_back(self, k: int) -> None:
        """This open position has no holder any more: it will be leased again, with the same k and minimum version."""
        entry = self.entries[k]
        assert entry.state == "open", f"position {entry.lease.position} is {entry.state}, not open"
        assert not entry.holders, f"position {entry.lease.position} is still held by {sorted(entry.holders)}"
        entry.state = "back"
        heapq.heappush(self._back, k)

    def knows(self, k: int) -> bool:
        """Whether this k was ever leased or is recorded as dropped."""
        return k < self._next_k or k in self._dropped_ahead or k in self._trained_ahead

    # -- arrival and consumption
    def arrive(self, k: int, nbytes: int, oldest: Version, worker: str) -> None:
        """The first complete copy of an open (or given back) position arrived: `nbytes` replaces its reservation."""
        entry = self.entries[k]
        assert entry.state in ("open", "back"), f"position {entry.lease.position} is already {entry.state}"
        entry.state, entry.oldest, entry.worker, entry.kept = "arrived", oldest, worker, None
        self.reserved += nbytes - entry.reserved
        entry.reserved = nbytes
        if self._settings.free_order:
            self._in_turn.append(k)
            self._fill_up()
            self.refills.clear()
        elif self.in_window(k):
            self.ready.add(k)

    def drop(self, k: int, reason: str, scores: Scores = ()) -> None:
        """An open (or given back) position is dropped; the window is extended by one."""
        entry = self.entries.pop(k)
        assert entry.state in ("open", "back"), f"position {entry.lease.position} is already {entry.state}"
        entry.state = "dropped"
        self.reserved -= entry.reserved
        self._dropped += 1
        self._dropped_ahead[k] = reason
        if scores and self._settings.difficulty is not None:
            self._judged[k] = Judged(entry.lease.uid, scores)
        self.refills[reason] += 1
        self._window -= self.in_window(k)
        self._widen()

    def take(self, k: int, *, keep: bool = False) -> Entry:
        """Hand a ready position to the open training step. Its memory is free now, or with `keep` after the step."""
        assert k in self.ready, f"position {self._settings.position_of(self.index, k)} is not ready to be taken"
        self.ready.remove(k)
        self._trained.append(k)
        entry = self.entries[k]
        entry.state = "taken"
        if not keep:
            self.reserved -= entry.reserved
            entry.reserved = 0
        return entry

    def advance(self) -> None:
        """The open step has taken its b groups: open the next one."""
        assert self.taken == self._b, f"ledger {self.index} took {self.taken} of {self._b} groups"
        trained, self._trained = self._trained, []
        self._judged = {k: judged for k, judged in self._judged.items() if not self.in_window(k)}
        for k in trained:
            self.reserved -= self.entries.pop(k).reserved
        self.version += 1
        self._gate = self._open_gate()
        self.refills.clear()
        if self._settings.free_order:
            self._fill_up()
        else:
            self._window -= len(trained)
            self._widen()
        frontier = self.frontier
        self._dropped_ahead = {k: reason for k, reason in self._dropped_ahead.items() if k >= frontier}
        self._trained_ahead = {k for k in (*self._trained_ahead, *trained) if k >= frontier}

    def in_window(self, k: int) -> bool:
        """Whether this position is among the first b that may still count (those without a result do)."""
        return k < self._window_end

    def judged(self) -> list[Judged]:
        """The dropped groups among those of the open step, whose set has arrived."""
        return [judged for k, judged in self._judged.items() if self.in_window(k)]

    @property
    def taken(self) -> int:
        """Number of groups taken by the open step."""
        return len(self._trained)

    @property
    def complete(self) -> bool:
        """Whether all b groups of the open step are taken."""
        return self.taken == self._b

    @property
    def set_complete(self) -> bool:
        """Whether all b groups of the open step have arrived or are taken."""
        return self.taken + len(self.ready) == self._b

    def so_far(self) -> tuple[int, int, int]:
        """Return groups of the open step that are here, all groups of it, and tokens of all groups that are leased or
        here."""
        tokens = sum(entry.tokens for entry in self.entries.values())
        return self.taken + len(self.ready), self._b, tokens

    @property
    def frontier(self) -> int:
        """Every lower k was taken by a finished step or dropped."""
        return next(iter(self.entries), self._next_k)

    def exhausted(self) -> RefillsExhausted | None:
        """The error to stop with if more groups were dropped than the open steps may replace."""
        settings = self._settings
        # In free order the count of drops is reset with every group that arrives.
        open_steps = 1 if settings.free_order else settings.open_steps(self.version)
        count, limit = self.refills.total(), settings.refill_limit * open_steps
        if count <= limit:
            return None
        left_out = [reason for reason in self.refills if reason.startswith(SAMPLES_LEFT_OUT)]
        cure = _WHERE_LEFT_OUT if left_out else _WHERE_DROPPED
        if left_out and all(UNREWARDED in reason for reason in left_out):
            cure = _WHERE_UNREWARDED
        told = self.refills.most_common(_TOLD)
        reasons = ", ".join(f"{reason}: {n}" for reason, n in told) + (", …" if len(self.refills) > _TOLD else "")
        return RefillsExhausted(
            f"training step {self.version + 1}, ledger {self.index}: {count} groups were dropped ({reasons}) while "
            f"{self._b} are wanted; at most {limit} may be replaced. {cure}"
            ", or raise batch.max_refills"
        )

    # -- checkpoint
    def snapshot(self) -> dict[str, object]:
        """Frontier and exceptions (positions dropped or trained ahead of it), as plain JSON values."""
        frontier = self.frontier
        ahead = sorted((k, reason) for k, reason in self._dropped_ahead.items() if k >= frontier)
        trained = sorted(k for k in self._trained_ahead if k >= frontier)
        found = {
            "ledger": self.index,
            "frontier": frontier,
            "dropped": [list(item) for item in ahead],
            "trained": trained,
        }
        judged = [[k, *one.uid[:2], list(one.scores)] for k, one in self._judged.items()]
        return found | ({"judged": judged} if judged else {})

    def restore(
        self,
        version: int,
        frontier: int,
        dropped: Iterable[tuple[int, str]],
        trained: Iterable[int] = (),
        judged: Iterable[Sequence[Any]] = (),
    ) -> None:
        """Begin at training step `version`; all positions that were not terminal then are leased again."""
        assert not self.entries, f"ledger {self.index} is already in use"
        self.version, self._next_k, self._window_end = version, frontier, frontier
        self._dropped_ahead, self._trained_ahead = dict(dropped), set(trained)
        for k, epoch, prompt, scores in judged:
            uid = Uid(epoch, prompt, self._settings.position_of(self.index, k))
            self._judged[k] = Judged(uid, tuple(scores))
        self._dropped = frontier - (version * self._b - len(self._trained_ahead))
        self._gate = self._open_gate()

    # -- details
    def _open_gate(self) -> int:
        """Number of positions, without dropped ones, that may be leased at the current version."""
        return (self.version + self._settings.open_steps(self.version)) * self._b

    def _is_back(self, k: int) -> bool:
        entry = self.entries.get(k)
        return entry is not None and entry.state == "back"

    def _fill_up(self) -> None:
        """In free order: make ready as many as the open step has room for, first come first served."""
        while self._in_turn and self.taken + len(self.ready) < self._b:
            self.ready.add(self._in_turn.popleft())

    def _widen(self) -> None:
        """Fill the window; positions in it that have arrived become ready. Each k is visited once."""
        while self._window < self._b and self._window_end < self._next_k and not self._settings.free_order:
            entry = self.entries.get(self._window_end)
            if entry is not None:
                self._window += 1
                if entry.state == "arrived":
                    self.ready.add(self._window_end)
            self._window_end += 1

    @property
    def _rank(self) -> int:
        """Of the next position among those that are not dropped, as far as that is known."""
        return self._next_k - self._dropped

    def _prompt(self) -> LeasePrompt | None:
        if self._next_prompt is None:
            self._next_prompt = self._prompt_at(self._settings.position_of(self.index, self._next_k))
        return self._next_prompt

    def _next_bytes(self) -> int:
        prompt = self._prompt()
        assert prompt is not None, f"the prompt of place {self._next_k} in ledger {self.index} has not been read"
        return self._settings.group_bytes(len(prompt.prompt_ids))

    def _new_lease(self, k: int, term: int) -> Lease:
        prompt = self._prompt()
        assert prompt is not None, f"the prompt of place {k} in ledger {self.index} has not been read"
        position = self._settings.position_of(self.index, k)
        assert prompt.uid.position == position, f"prompt_at({position}) gave position {prompt.uid.position}"
        return Lease(
            uid=prompt.uid,
            ledger=self.index,
            k=k,
            attempt=1,
            seed=self._settings.seed,
            prompt_ids=prompt.prompt_ids,
            prompt_text=prompt.prompt_text,
            task=prompt.task,
            min_version=self._settings.least_version(self._rank // self._b),
            term=term,
            kind=self._settings.kind,
        )
