"""One agent's part in the terms of the training pool: what it reports, and what it is to do next. No process, no clock.

    whole ──why_broken──▶ broken ──workers ended──▶ ended ──proposes, votes──▶ whole again, in the next term
                                                      └──no way, or none in time──▶ the run ends

`note` brings our own report up to date, `act` says what follows from it and from those of the others.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from distflow.launch.mesh.renewal import (
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
from distflow.launch.mesh.report import Saved, Successor, Term

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

    def act(self, view: View, *, alive: bool, ready: Callable[[Successor], bool], now: float) -> Move | None:
        """What to do now. `view` has our report of `note`; `ready`: whether our host has all to begin with a term.

        It may ask for less than is there and be told so later: `ready` is asked again at every call.
        """
        if not self.term.broken:
            self._still_since = None
            why = why_broken(view, self._rules, alive=alive)
            return None if why is None else Break(why)
        if not self.term.ended:
            return None
        following = ahead(view)
        if following is not None:
            return self._begin(following) if self._may_begin(view, following) and ready(following) else None
        found = propose(view, self._rules)
        if view.host in view.member_hosts:
            self._decide(view, found, ready)
        chosen = elected(self._seen(view), self._rules)
        if chosen is not None and (view.host not in view.member_hosts or self.term.vote == chosen):
            return self._begin(chosen)
        if isinstance(found, Standstill) and found.hopeless:
            return Stop(found.why)
        return self._overdue(now)

    def _decide(self, view: View, found: Successor | Standstill, ready: Callable[[Successor], bool]) -> None:
        if self.term.vote is None:
            self.term = standing(self.term, found)
        wanted = electable(self._seen(view), self._rules)
        if wanted is not None and ready(wanted):
            self.term = replace(self.term, vote=wanted)

    def _may_begin(self, view: View, term: Successor) -> bool:
        """Not while we are cut off: what we heard is old, and the others may have gone on without us since."""
        ours = any(view.hosts[name] == view.host for name in term.members)
        return not ours or not view.cut_off(self._rules)

    def _begin(self, term: Successor) -> Begin:
        self.term = Term(term.number, term)
        self._still_since = None
        return Begin(term)

    def _seen(self, view: View) -> View:
        return replace(view, terms={**view.terms, view.host: self.term})

    def _overdue(self, now: float) -> Stop | None:
        """Waiting for one thing for too long."""
        what = self.term.waits or "the host agents to agree on the next term"
        if self._still_since is None or self._still_since[0] != what:
            self._still_since = what, now
        if now - self._still_since[1] < self._patience_s:
            return None
        return Stop(
            f"{self.term.reason or ELSEWHERE}; then the training workers waited {self._patience_s:g} s "
            f"(limits.no_progress_s) for {what} — go on with --resume, on hosts that can reach each other"
        )
