"""What a holder knows of its owners: the leases it has from each, and which of them it asks next.

The walk of an ask over the owners, one ask at a time: *idle* → ask the home owner → refused, ask the others in random
order, each once → the last one keeps the ask *parked* if it has nothing either. After a wait the ask goes round the
others again. The wait is 1 s (± 50%) and doubles with each owner asked in vain, up to 16 s, so that long rounds are
rare; of many owners a round takes 8 at random. If a result was dropped here, its owner is about to lease another group
and is asked next. With one owner the ask parks at once, and the rounds become repetitions that make up for a lost
message. A grant ends the walk.

Owners may lease several training steps ahead (`max_staleness`), and some may be the home of fewer holders than others,
or of none. So when the home owner begins to lease for a later step, the next ask goes to another one first, taken at
random. If that one leases for an earlier step, it is asked until it has caught up, then another one is tried; if not,
the home owner again. Otherwise those that nobody asks first would hold up the steps that others have long had ready.
"""

from __future__ import annotations

import random
from bisect import insort
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from msgspec import structs

from distflow.exchange.lease_settings import LeaseSettings
from distflow.exchange.messages import Lease, Piece, Result, Running
from distflow.exchange.partials import LOGPROB_BYTES, cut
from distflow.types import CallNumber, SampleOutput, Version

_OWNERS_A_ROUND = 8
"""With fewer, an ask may be parked while another owner has work; more cost messages for each grant."""
_UNANSWERED_LIMIT = 3


@dataclass(frozen=True, slots=True)
class AskState:
    """An ask that has not been answered by a grant yet."""

    owner: str
    parked: bool
    """Whether the owner keeps the ask; otherwise its answer is outstanding."""
    since: float
    """When the holder began to ask (any owner)."""


class Home(NamedTuple):
    """Which owner a holder asks first: the `turn`th of those that are `near`, counted round; of all if none is."""

    turn: int = 0
    near: frozenset[str] = frozenset()

    def among(self, owners: Sequence[str]) -> int:
        """Its number among these."""
        numbers = [number for number, owner in enumerate(owners) if owner in self.near] or range(len(owners))
        return numbers[self.turn % len(numbers)]


FIRST = Home()


class AskWalk:
    """The one ask in flight. `owner` is its number 0 … R−1, or None when idle."""

    def __init__(self, home: int, settings: LeaseSettings, rng: random.Random) -> None:
        self.owner: int | None = None
        self.number = 0
        """Number of the current ask; a new one for each owner asked."""
        self.park = False
        self.parked = False
        self.since = 0.0
        self._home = home
        self._settings = settings
        self._rng = rng
        self._ahead: list[int] = []
        """Owners still to be asked in this round; the last one parks the ask."""
        self._unanswered = 0
        self._wait = settings.park_s
        self._due = 0.0
        self._home_step = -1
        """For which the home owner leased last."""
        self._looks = False
        """Whether to try another owner before the home one."""
        self._behind: int | None = None
        """An owner that leases for an earlier step than the home one."""

    def begin(self, owners: Sequence[int], now: float) -> None:
        """Start to ask: an owner that leases for an earlier step than the home one, or looking for such a one; else the
        home one, if it still has work.
        """
        self._wait, self.since = self._settings.park_s, now
        home, others = [owner for owner in owners if owner == self._home], self._others(self._home, owners)
        first = [owner for owner in owners if owner == self._behind] or (others[:1] if self._looks else [])
        rest = [owner for owner in [*home, *others] if owner not in first]
        self._put_to_next([*first, *rest][:_OWNERS_A_ROUND], now)

    def granted(self, owner: int, step: int) -> None:
        """An owner leases for this training step now."""
        if not self._settings.max_staleness:
            return  # All lease for the same step, or in any order.
        if owner == self._home:
            self._looks = self._looks or -1 < self._home_step < step
            self._home_step = max(step, self._home_step)
            return
        is_behind = step < self._home_step
        self._looks = owner == self._behind and not is_behind
        self._behind = owner if is_behind else None

    def end(self) -> None:
        """Stop: the ask was answered, or nothing is wanted any more."""
        self.owner = None
        self.parked = False

    def settle(self, home: int) -> None:
        """The list of owners has changed: no ask is in flight, and the next one begins at `home`."""
        self.end()
        self._home = home
        self._home_step, self._looks, self._behind = -1, False, None

    def is_answer(self, owner: int, number: int) -> bool:
        """Whether a grant or refusal of this owner answers the current ask."""
        return owner == self.owner and number == self.number

    def refused(self, parked: bool, owners: Sequence[int], now: float) -> bool:
        """The owner has nothing now. Returns True if the ask moved to another owner and must be sent there."""
        self._looks = False
        self._behind = None if self.owner == self._behind else self._behind
        if not parked:
            self._lengthen_wait()
            self.move(owners, now)
            return True
        if not self.parked:
            self.parked = True
            self._due = now if self._ahead else now + self._jittered_wait()
        return False

    def prefer(self, owner: int, now: float) -> None:
        """This owner has work again: ask it next; a parked ask moves there with the next tick."""
        if owner == self.owner:
            return
        self._ahead = [owner, *(other for other in self._ahead if other != owner)]
        if self.parked:
            self._due = now

    def due(self, now: float) -> bool:
        """Whether it is time to repeat the ask or to move it."""
        return self.owner is not None and now >= self._due

    def go_on(self, owners: Sequence[int], now: float) -> bool:
        """The ask is due: move it to another owner (True) or repeat it."""
        lonely = len(owners) == 1 and owners[0] == self.owner
        self._unanswered += not self.parked
        if not lonely and (self.parked or self._unanswered >= _UNANSWERED_LIMIT):
            self.move(owners, now)
            return True
        self._due = now + (self._jittered_wait() if self.parked else self._settings.resend_s)
        return False

    def move(self, owners: Sequence[int], now: float) -> None:
        """Move the ask to the next owner of this round, or begin another round."""
        left = [owner for owner in self._ahead if owner in owners]
        self._put_to_next(left or self._others(self.owner, owners) or list(owners), now)

    def _others(self, but: int | None, owners: Sequence[int]) -> list[int]:
        others = [owner for owner in owners if owner != but]
        return self._rng.sample(others, min(len(others), _OWNERS_A_ROUND))

    def _put_to_next(self, ahead: list[int], now: float) -> None:
        self.owner, *self._ahead = ahead
        self.number += 1
        self.park = not self._ahead
        self.parked = False
        self._unanswered = 0
        self._due = now + self._settings.resend_s

    def _jittered_wait(self) -> float:
        wait = self._wait
        self._lengthen_wait()
        return wait * (0.5 + self._rng.random())

    def _lengthen_wait(self) -> None:
        self._wait = min(2 * self._wait, self._settings.park_limit_s)


REPORT_TOKENS = 1 << 16
"""Most tokens in one progress report; the rest follows in the next."""
_REMEMBERED_GRANTS = 1024


@dataclass(slots=True)
class Held:
    """One lease."""

    lease: Lease
    tokens: int = 0
    version: int = -1
    result: Result | None = None
    due: float = 0.0
    wait: float = 0.0
    outputs: dict[tuple[int, CallNumber], SampleOutput] = field(default_factory=dict)
    """What its samples had when they were last told, by sample and call."""
    sent: dict[tuple[int, CallNumber], int] = field(default_factory=dict)
    """Tokens of each that were sent to the owner."""

    def begun_on(self) -> Version | None:
        """The oldest version of its tokens; None if unknown or if the group is not to be trained on."""
        if self.result is not None:
            return self.result.oldest if not self.result.dropped else None
        spans = [span for output in self.outputs.values() for span in output.spans]
        return min((Version(span.term, span.version) for span in spans), default=None)

    def go_on(self, term: int, now: float) -> None:
        """Continue under a lease of a later term, whose owner knows nothing of it yet."""
        oldest = self.begun_on()
        assert oldest is not None, "only groups with valid tokens are continued"
        self.version = oldest.number
        self.sent.clear()
        if self.result is not None:
            self.result = structs.replace(self.result, term=term)
            self.due = now

    def unsent(self) -> Iterator[tuple[SampleOutput, int]]:
        """Requests with new tokens, and where these begin."""
        for key, output in self.outputs.items():
            start = self.sent.get(key, 0)
            if start < len(output.token_ids) or (output.answer and key not in self.sent):
                yield output, start


@dataclass(slots=True)
class Link:
    """A holder's state with respect to one owner."""

    name: str
    term: int
    held: dict[int, Held] = field(default_factory=dict)
    grants: set[int] = field(default_factory=set)
    grant_seen: int = 0
    closed: int = -1
    finished: bool = False
    back: tuple[int, ...] = ()
    """Leases in the last HandBack."""
    back_again: float = 0.0
    """When it is sent again."""

    def begin(self, term: int) -> None:
        """Begin a term: the owner numbers its grants from 1 again."""
        self.term, self.grant_seen, self.closed, self.finished = term, 0, -1, False
        self.grants.clear()

    def first_time(self, grant: int) -> bool:
        """Record a grant's number; False if it was received before (or is too old to tell)."""
        if grant in self.grants or grant <= self.grant_seen - _REMEMBERED_GRANTS:
            return False
        self.grants.add(grant)
        self.grant_seen = max(self.grant_seen, grant)
        self.grants.discard(self.grant_seen - _REMEMBERED_GRANTS)
        return True

    def unfinished(self) -> list[int]:
        """Positions that are still to be generated."""
        return [position for position, held in self.held.items() if held.result is None]

    def results_due(self, now: float, longest_s: float) -> list[Result]:
        """Results to send again, at growing intervals: large ones over a slow link take long to be acknowledged."""
        due = [held for held in self.held.values() if held.result is not None and held.due <= now]
        for held in due:
            held.wait = min(2 * held.wait, longest_s)
            held.due = now + held.wait
        return [held.result for held in due if held.result is not None]

    def running(self, *, finished_too: bool) -> tuple[Running, ...]:
        """The unfinished groups held, or all of them."""
        told = [(p, held) for p, held in self.held.items() if finished_too or held.result is None]
        return tuple([Running(p, held.tokens, held.version) for p, held in told])

    def new_pieces(self) -> tuple[Piece, ...]:
        """Tokens produced since the last call; they count as sent from now on."""
        room = REPORT_TOKENS
        pieces = []
        for held in self.held.values():
            for output, start in held.unsent() if held.result is None else ():
                if room > 0:
                    pieces.append(cut(output, start, room))
                    held.sent[output.sample, output.call] = pieces[-1].end
                    room -= pieces[-1].end - start + len(output.answer) // LOGPROB_BYTES
        return tuple(pieces)

    def back_due(self, now: float) -> bool:
        """Whether to send a HandBack: the last one was acknowledged, or it is time to repeat it."""
        waiting = self.back_again > now and any(position in self.held for position in self.back)
        return not waiting and not self.finished and bool(self.unfinished())

    def hand_back(self, limit_bytes: int) -> tuple[Piece, ...]:
        """Put the next unfinished groups into `back`: as many as fit, and at least one.

        Returns their tokens that were not sent to the owner yet.
        """
        self.back, pieces = (), []
        for position in self.unfinished():
            new = [cut(output, start, len(output.token_ids)) for output, start in self.held[position].unsent()]
            limit_bytes -= sum(piece.nbytes for piece in new)
            if limit_bytes < 0 and self.back:
                break
            self.back += (position,)
            pieces += new
        return tuple(pieces)

    def send_again(self, positions: Iterable[int]) -> None:
        """The owner has a gap in these groups: send them again from the first token."""
        for position in positions:
            if position in self.held:
                self.held[position].sent.clear()
        self.back_again = 0.0


class OwnerLinks:
    """All owners, in order. What is asked for with every event does not grow with their number."""

    def __init__(self, owners: Sequence[str], term: int) -> None:
        self.numbers = {owner: number for number, owner in enumerate(owners)}
        self.holding: dict[str, Link] = {}
        """Those whose leases it holds: of many a few."""
        self.open = list(range(len(owners)))
        """Numbers of those that have not finished."""
        self._links = [Link(owner, term) for owner in owners]

    def __iter__(self) -> Iterator[Link]:
        return iter(self._links)

    def __getitem__(self, number: int) -> Link:
        return self._links[number]

    def __len__(self) -> int:
        return len(self._links)

    def finish(self, link: Link) -> None:
        """It has no more work."""
        if not link.finished:
            self.open.remove(self.numbers[link.name])
        link.finished = True

    def begin(self, link: Link, term: int) -> None:
        """It has begun again."""
        if link.finished:
            insort(self.open, self.numbers[link.name])
        link.begin(term)

    def hold(self, link: Link, position: int, held: Held) -> None:
        """It has this lease."""
        link.held[position] = held
        self.holding[link.name] = link

    def release(self, link: Link, position: int) -> Held | None:
        """It has this lease no more; returns it if it had it."""
        held = link.held.pop(position, None)
        if not link.held:
            self.holding.pop(link.name, None)
        return held


def surviving(links: Iterable[Link], begins: Mapping[int, int], loaded: Version | None) -> dict[int, Held]:
    """The groups continued in a later term, by position: those whose oldest and newest weights both survive."""
    if loaded is None or not loaded.survives(begins):
        return {}
    begun = [(p, held, held.begun_on()) for link in links for p, held in link.held.items()]
    return {p: held for p, held, oldest in begun if oldest is not None and oldest.survives(begins)}
