"""Idle training replicas take arrived groups from busy ones: a state machine without sockets.

The ledgers stay with their owners, and so does the window: only groups that the owner's open training step may take are
handed over. The sums of a step are global, so who computes them changes nothing but the time. A replica becomes a
*requester* once everything it owns for the step is taken; it is a possible *holder* all the time.

A transfer: the requester *probes* a few random peers → each answers with its *backlog* (consumable groups that it has
not begun) → the requester *asks* the peer with the largest one → that holder *hands over* groups with their rows, and
sends them again until they are either *kept* or *returned*. Where none of them has a backlog, others are probed, too, a
few at a time. A peer without a backlog remembers the probe and answers once it has one. At most one transfer is under
way from one replica to another, and a holder is not *settled* until all its transfers have been answered.

No group is lost or computed twice, even if messages are lost, duplicated, delayed or reordered:
1. An ask is answered once: by groups or by a refusal. If it is repeated, it gets the same answer again.
2. A requester keeps only the groups of its newest ask, and only until it hears that this ask was refused. What it does
   not keep on first sight it never keeps. It acknowledges what it kept and returns everything else.
3. Groups that were kept belong to the requester; groups that were returned are in the holder's backlog again. Until one
   of the two is known, the holder neither trains on them nor gives them to another requester.

Example: trainer/1 is idle in step 7: probe → trainer/0 (backlog 3), trainer/2 (backlog 0) → ask trainer/0 → 2 groups →
kept.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from distflow.data.decoding import Form, Whole, read
from distflow.errors import ProtocolError
from distflow.exchange.group_transfer import GROUPS, KEPT, REPEAT_S, RETURNED, Send, Transfer, TransferAnswer

PROBE, BACKLOG, ASK = "steal.probe", "steal.backlog", "steal.ask"
PROBED = 4
MOST_PROBED = 16
"""Peers that a search probes, a few at a time, before it waits for one that finds something to hand over."""


class _Probe(Form, frozen=True):
    step: Whole


class _Backlog(Form, frozen=True):
    step: Whole
    groups: Whole
    refused: Whole | None = None
    """Number of the ask that this refuses."""


class _Ask(Form, frozen=True):
    step: Whole
    number: Whole


_FORMS: Mapping[str, type[Any]] = {
    PROBE: _Probe,
    BACKLOG: _Backlog,
    ASK: _Ask,
    GROUPS: Transfer,
    KEPT: TransferAnswer,
    RETURNED: TransferAnswer,
}
KINDS = frozenset(_FORMS)
"""Message kinds that belong here."""


@dataclass(slots=True)
class _Handed:
    number: int
    positions: tuple[int, ...]
    sent_at: float


@dataclass(slots=True)
class _Search:
    """What a requester waits for: answers of the probed peers, then groups from one of them."""

    backlogs: dict[str, int | None]
    since: float
    holder: str = ""


@dataclass(slots=True)
class StealCore:
    """One replica among `peers` (the others). `backlog()` counts its consumable groups that nobody has begun;
    `give(requester)` takes some of them out for a requester and returns their positions.
    """

    peers: Sequence[str]
    backlog: Callable[[], int]
    give: Callable[[str], tuple[int, ...]]
    rng: random.Random
    step: int = -1
    """The open training step; messages about another step are ignored."""
    number: int = 0
    """Of this replica's last ask."""
    _search: _Search | None = None
    _kept: dict[str, int] = field(default_factory=dict)
    """Number of the last transfer kept, by holder."""
    _waiting: dict[str, None] = field(default_factory=dict)
    """Requesters to be told of the next backlog, in order."""
    _handed: dict[str, _Handed] = field(default_factory=dict)
    _returned: list[int] = field(default_factory=list)
    _answered: dict[str, int] = field(default_factory=dict)
    """Number of the last ask that was answered, by requester."""
    _refused: dict[str, int] = field(default_factory=dict)
    """Number of the last ask that was refused, by requester."""

    # -- requester
    def begin(self, step: int) -> None:
        """Open a training step and forget what was under way for the one before."""
        assert self.settled, f"groups of step {self.step} were neither kept nor returned"
        assert not self._returned, f"the positions {self._returned} of step {self.step} came back and were not taken"
        self.step, self._search = step, None
        self._waiting.clear()

    def search(self, now: float) -> list[Send]:
        """This replica is idle: look for work, unless a search is under way."""
        if self._search is not None or not self.peers:
            return []
        probed = self.rng.sample(list(self.peers), min(PROBED, len(self.peers)))
        self._search = _Search(dict.fromkeys(probed), now)
        return [Send(peer, PROBE, {"step": self.step}) for peer in probed]

    # -- holder
    def offer(self) -> list[Send]:
        """The backlog has grown: tell the requesters that were refused."""
        if not self._waiting:
            return []
        told = list(self._waiting)[: self.backlog()]
        for requester in told:
            del self._waiting[requester]
        return [Send(requester, BACKLOG, self._backlog_for(requester)) for requester in told]

    @property
    def settled(self) -> bool:
        """Whether everything handed over is known to be kept or has come back."""
        return not self._handed

    def owed(self) -> tuple[str, ...]:
        """Requesters that have not yet acknowledged or returned their groups."""
        return tuple(self._handed)

    def take_returned(self) -> list[int]:
        """Positions that were returned since the last call: they belong to the backlog again."""
        returned, self._returned = self._returned, []
        return returned

    # -- events
    def handle(self, kind: str, sender: str, body: Mapping[str, Any], now: float) -> list[Send]:
        """Take a message of KINDS from a peer. Keep the rows of GROUPS if `expects` is true of them beforehand.

        Call `take_returned` afterwards. Raises ProtocolError for a malformed message or one from another kind of
        worker.
        """
        if sender not in self.peers:
            raise ProtocolError(f"{sender} is not a training replica and cannot take part in stealing")
        match read(body, _FORMS[kind], kind):
            case TransferAnswer() as answer:
                return self._on_answer(sender, answer.number, kept=kind == KEPT)
            case Transfer() as transfer:
                return self._on_groups(sender, transfer)
            case _Probe() as probe if probe.step == self.step:
                return [Send(sender, BACKLOG, self._backlog_for(sender))]
            case _Backlog() as found if found.step == self.step:
                return self._on_backlog(sender, found.groups, now, refused=found.refused == self.number)
            case _Ask() as ask if ask.step == self.step:
                return self._on_ask(sender, ask.number, now)
        return []

    def decline(self, sender: str, body: Mapping[str, Any]) -> list[Send]:
        """Call this instead of `handle` for expected GROUPS whose rows cannot be read."""
        transfer = read(body, Transfer, GROUPS)
        if self._is_expected(sender, transfer):
            self._search = None
        return self._on_groups(sender, transfer)

    def expects(self, sender: str, body: Mapping[str, Any]) -> bool:
        """Whether these GROUPS answer the newest ask, for the first time."""
        return self._is_expected(sender, read(body, Transfer, GROUPS))

    def tick(self, now: float) -> list[Send]:
        """Send again what was not answered."""
        out = [
            Send(requester, GROUPS, {"step": self.step, "number": handed.number}, handed.positions)
            for requester, handed in self._handed.items()
            if now - handed.sent_at >= REPEAT_S
        ]
        for handed in self._handed.values():
            handed.sent_at = now if now - handed.sent_at >= REPEAT_S else handed.sent_at
        search = self._search
        if search is None or now - search.since < REPEAT_S:
            return out
        if search.holder:
            search.since = now
            return [*out, Send(search.holder, ASK, {"step": self.step, "number": self.number})]
        self._search = None
        return [*out, *self.search(now)]

    # -- details
    def _is_expected(self, holder: str, transfer: Transfer) -> bool:
        asked = self._search is not None and self._search.holder == holder
        return asked and (transfer.step, transfer.number) == (self.step, self.number)

    def _on_backlog(self, holder: str, groups: int, now: float, *, refused: bool) -> list[Send]:
        search = self._search
        if search is None or holder not in search.backlogs:
            return []
        if search.holder:
            if search.holder != holder or not refused:
                return []
            search.holder = ""  # others were faster; it reports again once it has a backlog
        search.backlogs[holder] = groups
        known = {name: count for name, count in search.backlogs.items() if count is not None}
        if len(known) < len(search.backlogs):
            return []
        if not any(known.values()):
            return self._probe_more(search, now)
        search.holder, search.since = max(known, key=lambda name: known[name]), now
        self.number += 1
        return [Send(search.holder, ASK, {"step": self.step, "number": self.number})]

    def _probe_more(self, search: _Search, now: float) -> list[Send]:
        """None of the peers probed has anything: look at others, too."""
        if len(search.backlogs) >= MOST_PROBED:
            return []
        others = [peer for peer in self.peers if peer not in search.backlogs]
        probed = self.rng.sample(others, min(PROBED, len(others)))
        search.backlogs.update(dict.fromkeys(probed))
        search.since = now
        return [Send(peer, PROBE, {"step": self.step}) for peer in probed]

    def _on_ask(self, requester: str, number: int, now: float) -> list[Send]:
        handed = self._handed.get(requester)
        if handed is not None and handed.number == number:
            return [Send(requester, GROUPS, {"step": self.step, "number": number}, handed.positions)]
        if number == self._refused.get(requester):
            return [Send(requester, BACKLOG, {**self._backlog_for(requester), "refused": number})]
        if handed is not None or number <= self._answered.get(requester, 0):
            return []  # an old ask that arrived late
        self._answered[requester] = number
        positions = self.give(requester)
        if not positions:
            self._refused[requester], self._waiting[requester] = number, None
            return [Send(requester, BACKLOG, {"step": self.step, "groups": 0, "refused": number})]
        self._handed[requester] = _Handed(number, positions, now)
        return [Send(requester, GROUPS, {"step": self.step, "number": number}, positions)]

    def _on_groups(self, holder: str, transfer: Transfer) -> list[Send]:
        if self._is_expected(holder, transfer):
            self._search, self._kept[holder] = None, transfer.number
        kept = self._kept.get(holder, 0)
        if transfer.number < kept:
            return []  # answered before: the holder sent the later groups after it had read that answer
        return [Send(holder, KEPT if transfer.number == kept else RETURNED, {"number": transfer.number})]

    def _on_answer(self, requester: str, number: int, *, kept: bool) -> list[Send]:
        handed = self._handed.get(requester)
        if handed is not None and handed.number == number:
            del self._handed[requester]
            self._returned += () if kept else handed.positions
        return []

    def _backlog_for(self, requester: str) -> dict[str, int]:
        """Body of the answer to a probe. A requester that is told of no backlog is told again by `offer`."""
        groups = self.backlog()
        if not groups:
            self._waiting[requester] = None
        return {"step": self.step, "groups": groups}
