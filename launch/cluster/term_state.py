"""One agent's part in the terms of the training pool: what it reports, and what it is to do next. No process, no clock.

    whole ──why_broken──▶ broken ──workers ended──▶ ended ──proposes, votes──▶ whole again, in the next term
                                                      └──no way, or none in time──▶ the run ends

`note` brings our own report up to date, `act` says what follows from it and from those of the others.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from distflow.launch.cluster.host_report import Saved, Successor, Term
from distflow.launch.cluster.term_vote import (
    ELSEWHERE,
    Rules,
    Standstill,
    View,
    ahead,
    electable,
    elected,
    propose,
    standing,
    why_broken,
)

Found = tuple[tuple[Saved, ...], tuple[str, ...]]
"""Checkpoints that our host has, and its workers that cannot come back."""


@dataclass(frozen=True, slots=True)
class Break:
    """End the training workers of our host."""

    reason: str


@dataclass(frozen=True, slots=True)
class Begin:
    """Start those of the new term."""

    term: Successor


@dataclass(frozen=True, slots=True)
class Stop:
    """There is no way on: the run ends here."""

    why: str


Move = Break | Begin | Stop


class Pool:
    """`patience_s`: how long the pool may stand still, waiting for one and the same thing."""

    def __init__(self, rules: Rules, number: int, patience_s: float) -> None:
        self.term = Term(number)
        self._rules = rules
        self._patience_s = patience_s
        self._still_since: tuple[str, float] | None = None

    def note(self, broken: str | None, *, alive: bool, look: Callable[[], Found]) -> Term:
        """Our report, brought up to date. `broken`: why our workers are being ended; `alive`: some still live."""
        if broken is None:
            return self.term
        if not self.term.broken:
            self.term = replace(self.term, broken=True, reason="" if broken == ELSEWHERE else broken)
        if not alive and not self.term.ended:
            # Nobody writes here any more: what there is now stays so.
            checkpoints, given_up = look()
            self.term = replace(self.term, ended=True, checkpoints=checkpoints, given_up=given_up)
        return self.term

    def act(self, view: View, *, alive: bool, lacks: Callable[[Successor], str], now: float) -> Move | None:
        """What to do now. `view` has our report of `note`; `lacks`: what our host waits for before it can begin a term.

        It says "" when there is nothing, and is asked again at every call. A `Begin` is given until it is told that the
        term `began`, or is `put_off`.
        """
        if not self.term.broken:
            self._still_since = None
            why = why_broken(view, self._rules, alive=alive)
            return None if why is None else Break(why)
        if not self.term.ended:
            return None
        following = ahead(view)
        if following is not None:
            return self._follow(view, following, lacks, now)
        found = propose(view, self._rules)
        if view.host in view.member_hosts:
            self._decide(view, found, lacks)
        chosen = elected(self._seen(view), self._rules)
        if chosen is not None and (view.host not in view.member_hosts or self.term.vote == chosen):
            return Begin(chosen)
        if isinstance(found, Standstill) and found.hopeless:
            return Stop(found.why)
        return self._overdue(self._waits_in(view), now)

    def began(self, term: Successor) -> None:
        """Our host has begun it."""
        self.term = Term(term.number, term)
        self._still_since = None

    def put_off(self, what: str, now: float) -> Stop | None:
        """Our host could not begin a term, and waits for this before it tries again."""
        self.term = replace(self.term, waits=what)
        return self._overdue(what, now)

    def _follow(self, view: View, term: Successor, lacks: Callable[[Successor], str], now: float) -> Move | None:
        """Begin a term that began elsewhere."""
        ours = any(view.hosts[name] == view.host for name in term.members)
        if ours and view.cut_off(self._rules):
            # What we heard is old, and the others may have gone on without us since.
            return None
        what = lacks(term)
        if not what:
            return Begin(term)
        self.term = replace(self.term, waits=what)
        # The others can train without us if none of their members are ours: no reason to end the run.
        return self._overdue(what, now) if ours else None

    def _decide(self, view: View, found: Successor | Standstill, lacks: Callable[[Successor], str]) -> None:
        if self.term.vote is None:
            self.term = standing(self.term, found)
        wanted = electable(self._seen(view), self._rules)
        if wanted is not None:
            what = lacks(wanted)
            self.term = replace(self.term, waits=what, vote=None if what else wanted)

    def _seen(self, view: View) -> View:
        return replace(view, terms={**view.terms, view.host: self.term})

    def _waits_in(self, view: View) -> str:
        """What the next term waits for: here, or else on another host."""
        own = self.term
        others = (view.terms[host] for host in sorted(view.terms))
        known = (term.waits for term in (own, *others) if term.number == own.number and term.waits)
        return next(known, "the host agents to agree on the next term")

    def _overdue(self, what: str, now: float) -> Stop | None:
        """Waiting for one thing for too long."""
        if self._still_since is None or self._still_since[0] != what:
            self._still_since = what, now
        if now - self._still_since[1] < self._patience_s:
            return None
        return Stop(
            f"{self.term.reason or ELSEWHERE}; then the training workers waited {self._patience_s:g} s "
            f"(limits.no_progress_s) for {what} — go on with --resume, on hosts that can reach each other"
        )
