"""Idle training replicas take arrived groups from busy ones: a state machine without sockets.

The ledgers stay with their owners, and so does the window: only groups that the owner's open training step may take are
handed over, and the step's sums are global, so who computes them changes nothing but the time. A replica is a *thief*
when all it owns for the step is taken, a *victim* all the time.

A theft, in words: the thief *probes* two random peers → each answers with its *backlog* (consumable groups that it has
not begun) → the thief *asks* the larger one → the *loot* comes with the rows, and is sent again until it is *thanked*
for or *returned*. A peer without a backlog remembers the probe and answers once it has one. One loot is under way
between two replicas at most, and a victim is not *settled* until all its loot has been answered.

No group is lost or computed twice, whatever is lost, doubled, late or overtaken on the way:
1. An ask is answered once: by its loot, or by being turned away; its repetitions get the same answer again.
2. A thief keeps the loot of its newest ask only, and only until it was told that this ask is turned away. Whatever it
   does not keep now it never keeps. It thanks for what it kept and returns everything else.
3. Thanked for, the groups are the thief's; returned, they are in the victim's backlog again; until then they are
   neither trained on by the victim nor given to anybody else.

Example: trainer/1 is idle in step 7: probe → trainer/0 (backlog 3), trainer/2 (backlog 0) → ask trainer/0 → loot of 2
groups → thanks.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from distflow.comm.message import whole
from distflow.errors import ProtocolError

PROBE, BACKLOG, ASK, LOOT = "steal.probe", "steal.backlog", "steal.ask", "steal.loot"
THANKS, RETURN = "steal.thanks", "steal.return"
KINDS = frozenset({PROBE, BACKLOG, ASK, LOOT, THANKS, RETURN})
"""Message kinds that belong here."""
WHAT = "a stealing message"
PROBED = 2
REPEAT_S = 1.0
"""Seconds before a probe, an ask or a loot without an answer is sent again."""


@dataclass(frozen=True, slots=True)
class Send:
    """A message for a peer. Kind LOOT: the rows of `positions` go with it."""

    to: str
    kind: str
    body: Mapping[str, Any]
    positions: tuple[int, ...] = ()


@dataclass(slots=True)
class _Handed:
    number: int
    positions: tuple[int, ...]
    sent_at: float


@dataclass(slots=True)
class _Hunt:
    """What a thief is after: first answers from the probed, then loot from one of them."""

    answers: dict[str, int | None]
    since: float
    victim: str = ""


@dataclass(slots=True)
class StealCore:
    """One replica among `peers` (the others). `backlog()` counts its consumable groups that nobody has begun, and
    `give(thief)` takes some of them out for a thief, by position.
    """

    peers: Sequence[str]
    backlog: Callable[[], int]
    give: Callable[[str], tuple[int, ...]]
    rng: random.Random
    step: int = -1
    """The open training step; messages about another one are old or early and change nothing."""
    number: int = 0
    """Of the thief's last ask."""
    _hunt: _Hunt | None = None
    _kept: dict[str, int] = field(default_factory=dict)
    """Number of the last loot kept, by victim."""
    _remembered: dict[str, None] = field(default_factory=dict)
    _handed: dict[str, _Handed] = field(default_factory=dict)
    _returned: list[int] = field(default_factory=list)
    _answered: dict[str, int] = field(default_factory=dict)
    """Number of the last ask that was answered, by thief."""
    _turned_away: dict[str, int] = field(default_factory=dict)
    """Number of the last ask that was turned away, by thief."""

    # -- thief
    def begin(self, step: int) -> None:
        """A training step opens: whatever was under way for the one before is over."""
        assert self.settled, f"loot of step {self.step} was neither thanked for nor returned"
        assert not self._returned, f"the positions {self._returned} of step {self.step} came back and were left"
        self.step, self._hunt = step, None
        self._remembered.clear()

    def hunt(self, now: float) -> list[Send]:
        """This replica is idle: look for work, if it is not looking already."""
        if self._hunt is not None or not self.peers:
            return []
        probed = self.rng.sample(list(self.peers), min(PROBED, len(self.peers)))
        self._hunt = _Hunt(dict.fromkeys(probed), now)
        return [Send(peer, PROBE, {"step": self.step}) for peer in probed]

    # -- victim
    def offer(self) -> list[Send]:
        """The backlog has grown: tell those who were turned away."""
        if not self._remembered:
            return []
        waiting = list(self._remembered)[: self.backlog()]
        for thief in waiting:
            del self._remembered[thief]
        return [Send(thief, BACKLOG, self._standing(thief)) for thief in waiting]

    @property
    def settled(self) -> bool:
        """Everything handed over is known to have been kept, or to have come back."""
        return not self._handed

    def owed(self) -> tuple[str, ...]:
        """The thieves that have not yet said what became of their loot."""
        return tuple(self._handed)

    def take_returned(self) -> list[int]:
        """Positions that were given and not kept: they belong to the backlog again. Each is told once."""
        returned, self._returned = self._returned, []
        return returned

    # -- events
    def handle(self, kind: str, sender: str, body: Mapping[str, Any], now: float) -> list[Send]:
        """Take a message of KINDS from a peer. Of a LOOT, keep the rows if `expects` it says so beforehand.

        Afterwards see whether `take_returned` has something. Raises ProtocolError for what no peer can have sent.
        """
        if sender not in self.peers:
            raise ProtocolError(f"{sender} is no training replica: it cannot take part in stealing")
        if kind in (THANKS, RETURN):
            return self._on_answer(sender, whole(body, "number", WHAT), kept=kind == THANKS)
        if kind == LOOT:
            return self._on_loot(sender, body)
        if whole(body, "step", WHAT) != self.step:
            return []
        if kind == PROBE:
            return [Send(sender, BACKLOG, self._standing(sender))]
        if kind == BACKLOG:
            turned_away = "turned_away" in body and body["turned_away"] == self.number
            return self._on_backlog(sender, whole(body, "groups", WHAT), now, turned_away=turned_away)
        return self._on_ask(sender, whole(body, "number", WHAT), now)

    def decline(self, sender: str, body: Mapping[str, Any]) -> list[Send]:
        """Instead of `handle`: a LOOT that was expected cannot be kept."""
        if self.expects(sender, body):
            self._hunt = None
        return self._on_loot(sender, body)

    def expects(self, sender: str, body: Mapping[str, Any]) -> bool:
        """Is this the loot that was asked for, for the first time?"""
        hunting = self._hunt is not None and self._hunt.victim == sender
        return hunting and whole(body, "step", WHAT) == self.step and whole(body, "number", WHAT) == self.number

    def tick(self, now: float) -> list[Send]:
        """Send again what was not answered."""
        out = [
            Send(thief, LOOT, {"step": self.step, "number": handed.number}, handed.positions)
            for thief, handed in self._handed.items()
            if now - handed.sent_at >= REPEAT_S
        ]
        for handed in self._handed.values():
            handed.sent_at = now if now - handed.sent_at >= REPEAT_S else handed.sent_at
        hunt = self._hunt
        if hunt is None or now - hunt.since < REPEAT_S:
            return out
        if hunt.victim:
            hunt.since = now
            return [*out, Send(hunt.victim, ASK, {"step": self.step, "number": self.number})]
        self._hunt = None
        return [*out, *self.hunt(now)]

    # -- details
    def _on_backlog(self, victim: str, groups: int, now: float, *, turned_away: bool) -> list[Send]:
        hunt = self._hunt
        if hunt is None or victim not in hunt.answers:
            return []
        if hunt.victim:
            if hunt.victim != victim or not turned_away:
                return []
            hunt.victim = ""  # others were quicker: it will say when it has something again
        hunt.answers[victim] = groups
        known = {name: count for name, count in hunt.answers.items() if count is not None}
        if len(known) < len(hunt.answers) or not any(known.values()):
            return []
        hunt.victim, hunt.since = max(known, key=lambda name: known[name]), now
        self.number += 1
        return [Send(hunt.victim, ASK, {"step": self.step, "number": self.number})]

    def _on_ask(self, thief: str, number: int, now: float) -> list[Send]:
        handed = self._handed.get(thief)
        if handed is not None and handed.number == number:
            return [Send(thief, LOOT, {"step": self.step, "number": number}, handed.positions)]
        if number == self._turned_away.get(thief):
            return [Send(thief, BACKLOG, {**self._standing(thief), "turned_away": number})]
        if handed is not None or number <= self._answered.get(thief, 0):
            return []  # an old ask, overtaken on the way
        self._answered[thief] = number
        positions = self.give(thief)
        if not positions:
            self._turned_away[thief], self._remembered[thief] = number, None
            return [Send(thief, BACKLOG, {"step": self.step, "groups": 0, "turned_away": number})]
        self._handed[thief] = _Handed(number, positions, now)
        return [Send(thief, LOOT, {"step": self.step, "number": number}, positions)]

    def _on_loot(self, victim: str, body: Mapping[str, Any]) -> list[Send]:
        number = whole(body, "number", WHAT)
        if self.expects(victim, body):
            self._hunt, self._kept[victim] = None, number
        kept = self._kept.get(victim, 0)
        if number < kept:
            return []  # answered long ago: the victim gave the later one after it had read that
        return [Send(victim, THANKS if number == kept else RETURN, {"number": number})]

    def _on_answer(self, thief: str, number: int, *, kept: bool) -> list[Send]:
        handed = self._handed.get(thief)
        if handed is not None and handed.number == number:
            del self._handed[thief]
            self._returned += () if kept else handed.positions
        return []

    def _standing(self, thief: str) -> dict[str, int]:
        """What a thief is told that wants to know; without a backlog it is told again by `offer`."""
        groups = self.backlog()
        if not groups:
            self._remembered[thief] = None
        return {"step": self.step, "groups": groups}
