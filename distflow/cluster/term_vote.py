"""When and how a training pool restarts: a pure function of what one agent knows about the hosts.

A pool is *broken* when a training worker was killed, when a host of some of them has been silent for too long, or when
our own host is cut off from the hosts of most of them. Each agent then ends the training workers of its own host
(SIGKILL, waitpid) and reports that they have ended, together with the checkpoints it has. The next term may begin only
by **proof of death or majority**: each host of members has reported their end, or has been silent for `Rules.gone_s`
while the hosts that have reported had more than half of the members. Otherwise the pool stands still and reports why:
two halves never both go on. Members are the training workers of all homes, told apart by the pools in their names; each
home keeps at least one.

The next term is a `Successor`. A host *proposes* it while it may still change its mind, and then *votes* for it: once
per term, when all participating hosts propose the same. It begins when hosts with more than half of the members have
voted for it, and every other host that can be heard has voted. Any two majorities have a host in common, and that host
has one vote, so a term has at most one successor, whatever messages are lost or late. (Paxos with one ballot; if the
votes are split nevertheless, the pool stands still.) A term that has begun somewhere is adopted by all other hosts.

**Other members.** `distflow scale` decides who is to train (`DesiredWorkers`). Agents then ask the training workers to
save after a training step and leave, which breaks the pool; the next term takes the decision up (`aim_of`): it is part
of the successor, so that either its members train or the former ones do, whoever dies meanwhile. Those of the term that
ends vote, wherever the new ones are.

**Time.** In addition, a minority ends its workers before a majority goes on. Every beat of an agent confirms the last
pulse that it has heard from each host. Our host is *cut off* when pulses younger than `silence_s` are confirmed only by
hosts that, together with our own, have no more than half of the members: then it ends its workers. Another host is
*gone* when nothing was heard from it for `gone_s` = `silence_s` + `margin_s`. Let p be the last pulse of a lost host
that any other host has heard, sent at t. It was heard at t or later, so the host counts as gone at t + `gone_s` or
later; and no later pulse of it is confirmed, so it notices at t + `silence_s` that it is cut off. In between it has
`margin_s` to end its workers, which takes a tick (1 s) and a SIGKILL. If it fails to (its agent is stopped, say), its
workers still cannot train, since each gradient reduction and each COMMIT needs every member. These ages do not include
the time in which our own agent was not running (a slow turn of its loop, SIGSTOP): it did not read what arrived then,
and most likely no host was cut off. Among many hosts few beats go from one to another directly (`gossip.py`): there
rolls confirm them (`comm/roll_call.py`), and the silence of a host counts from a question on that it did not answer,
which is later still. A host that would be cut off among the members of the next term does not begin it, though it is
elected: they may have begun it long ago, and gone on without this host.

Example: trainer/0, 1, 2 on hosts 0, 1, 2; host 2 is cut off. After 60 s it ends trainer/2; after 75 s hosts 0 and 1 end
theirs, and propose and vote for term 1 with trainer/0 and 1. With four on two hosts, neither side has a majority.

`Pool` is one agent's part in it, without process or clock: `note` updates our own report, `act` derives what to do from
it and from the others' reports.

    whole ──why_broken──▶ broken ──workers ended──▶ ended ──proposes, votes──▶ whole again, in the next term
                                                      └──no way, or none in time──▶ the run ends
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace

from msgspec import structs

from distflow.cluster.cluster_view import Rules, View, members_of
from distflow.cluster.host_report import Choice, Saved, Successor, Term, choose
from distflow.types import WorkerName, in_pool

ELSEWHERE = "a training worker on another host was killed"
SCALED = "distflow scale"
"""Why a term has ended whose training workers have saved and left."""
OUT_OF_REACH = "the hosts of most training workers of the next term"
"""What a host waits for that has voted for a term and cannot reach most of its members."""
BEFORE_ALL = (-1, -1)
"""The stamp of a decision before any other."""
Found = tuple[tuple[Saved, ...], tuple[str, ...]]
"""Checkpoints on our host, and its workers that cannot return."""


@dataclass(frozen=True, slots=True)
class Standstill:
    """The next term cannot begin yet."""

    why: str
    hopeless: bool = False
    """It can never begin."""


def why_broken(view: View, rules: Rules, *, alive: bool) -> str | None:
    """Why our own training workers must end; None: they need not. `alive`: some of them are alive."""
    own = view.own
    if any(t.number > own.number or (t.number == own.number and t.broken) for t in view.terms.values()):
        return own.reason or ELSEWHERE
    if alive and view.cut_off(rules):
        near = view.weight(frozenset({view.host}))
        return (
            f"{view.named(frozenset({view.host}))}, with {near} of {len(view.members)} training workers, was cut off "
            f"from the hosts of most of them for limits.host_silence_s ({rules.silence_s:g} s)"
        )
    if alive and (gone := view.gone(rules)):
        return f"nothing was heard from {view.named(gone)} for {rules.gone_s:g} s"
    return None


def ahead(view: View) -> Successor | None:
    """The newest term that has begun elsewhere, if it is newer than ours."""
    newest = max(view.terms.values(), key=lambda term: term.number)
    return newest.begun if newest.number > view.own.number else None


@dataclass(frozen=True, slots=True)
class Aim:
    """Who is to train in the next term, unless they cannot come back."""

    members: Mapping[str, int]
    """By name, with their hosts."""
    scaled: tuple[tuple[str, int, int], ...] = ()
    """As `Successor.scaled`."""
    told: tuple[str, ...] = ()
    """What changes, or does not although it was asked for, and why: in words."""


def aim_of(view: View, rules: Rules) -> Aim:
    """The present members, with what `distflow scale` has decided since the term began.

    A decision is taken up once, by the next term. One that needs a host which cannot be heard is dropped.
    """
    began = view.own.begun
    members, told = dict(view.members), []
    scaled = {} if began is None else {pool: (number, host) for pool, number, host in began.scaled}
    for pool, decision in sorted(view.wanted.items()):
        if decision.stamp <= scaled.get(pool, BEFORE_ALL):
            continue
        scaled[pool] = decision.stamp
        before = in_pool(pool, members)
        new = {name: host for name, host in decision.hosts.items() if name not in before}
        if silent := view.unreachable(new.values(), rules):
            told.append(f"pool {pool} stays as it is, since {view.named(silent)} cannot be heard")
            continue
        after = sorted(decision.hosts, key=lambda name: WorkerName.parse(name).index)
        pools = dict.fromkeys(WorkerName.parse(name).pool for name in members)
        hosts = {**members, **decision.hosts}
        members = {name: hosts[name] for one in pools for name in (after if one == pool else in_pool(one, members))}
        if set(before) != set(after):
            told.append(f"pool {pool} goes from {len(before)} to {len(after)} training workers ({', '.join(after)})")
    return Aim(members, tuple((pool, *stamp) for pool, stamp in sorted(scaled.items())), tuple(told))


def is_to_end(view: View, rules: Rules) -> bool:
    """Whether the present term is to end after a training step, since others are to train in the next one."""
    return not view.own.broken and aim_of(view, rules).members.keys() != view.members.keys()


def propose(view: View, rules: Rules) -> Successor | Standstill:
    """What should follow the current term, which has ended on our host."""
    there, gone = view.there(), view.gone(rules)
    away = view.member_hosts - there
    if late := away - gone:
        return Standstill(f"{view.named(late)} to end its training workers")
    near = there - view.gone_after_end(rules)
    aim, silent = aim_of(view, rules), view.member_hosts - near
    names = ", ".join(name for name, host in view.members.items() if host in silent)
    if needed := [name for name, host in aim.members.items() if host in silent and not rules.shrinks]:
        return Standstill(
            f"{view.named(frozenset(map(aim.members.__getitem__, needed)))} with {', '.join(needed)}; with "
            "layout.on_failure: restart, training cannot continue without them"
        )
    if silent and not view.majority(near):
        return Standstill(
            f"{view.named(silent)} with {names}: only {view.weight(near)} of {len(view.members)} training workers are "
            "on hosts that can be heard here, and a pool goes on only with more than half of its workers"
        )
    terms = {host: view.terms[host] for host in sorted(there)}
    lost = {name for term in terms.values() for name in term.given_up if rules.shrinks}
    left = {name: host for name, host in aim.members.items() if host not in silent and name not in lost}
    if not left:
        return Standstill(f"{', '.join(view.members)} cannot come back, and no training worker is left", hopeless=True)
    if (without := _without_home(view, left, lost)) is not None:
        return without
    names_of = {host: view.names.get(host, "") for host in sorted(near)}
    choice = choose({host: terms[host].checkpoints for host in names_of}, names_of)
    if choice.step is None:
        return Standstill(choice.lacking, hopeless=True)
    return _successor(view, rules, aim, left, choice)


def _without_home(view: View, left: Collection[str], lost: set[str]) -> Standstill | None:
    """What keeps a pool that trains a model from having a worker in the next term; None: each has one."""
    for home in sorted({WorkerName.parse(name).pool for name in view.hosts}):
        members = in_pool(home, view.members)
        if in_pool(home, left):
            continue
        if set(members) <= lost:
            why = f"{', '.join(members)} cannot come back, and pool {home!r} has no other worker to train its models"
            return Standstill(why, hopeless=True)
        away = view.named(frozenset(view.members[name] for name in members if name not in lost))
        return Standstill(f"{away} with the workers of pool {home!r}, without which its models cannot be trained")
    return None


def _successor(view: View, rules: Rules, aim: Aim, left: Mapping[str, int], choice: Choice) -> Successor | Standstill:
    own, began = view.own, view.own.begun
    told = (view.terms[host].reason for host in sorted(view.there()))
    reasons = [next((reason for reason in told if reason), ELSEWHERE)]
    reason = "; ".join([*(reasons if reasons != [SCALED] else ()), *aim.told]) or SCALED
    missing = [name for name in aim.members if name not in left]
    again = choice.step == own.step and not missing and left.keys() == view.members.keys()
    tries = began.tries + 1 if again and began is not None else 1
    if tries > rules.restarts:
        since = f"the checkpoint of training step {own.step}" if own.step else "the beginning of the run"
        return Standstill(
            f"{reason}, {tries} times in a row now since {since} "
            f"(limits.restarts: {rules.restarts}) — look at the logs; continue with --resume when the cause is found",
            hopeless=True,
        )
    if missing:
        reason += f"; {', '.join(missing)} cannot come back ({len(left)} training workers are left)"
    if choice.lacking:
        reason += f"; {choice.lacking}"
    assert choice.step is not None, "a successor begins somewhere"
    number = own.number + 1
    begins = (*(began.begins if began is not None else ()), (number, choice.step))
    about = (number, choice.step, tries, tuple(left), choice.term, begins, reason)
    return Successor(*about, hosts=tuple(left.values()), scaled=aim.scaled)


def electable(view: View, rules: Rules) -> Successor | None:
    """What our host should vote for, once it can begin it; None: it has to wait for others.

    That is what all participating hosts propose that have not been silent for too long, or what another host has voted
    for already.
    """
    own, there = view.own, view.there()
    if own.vote is not None or own.proposal is None or view.host not in view.member_hosts:
        return None
    for host in sorted(there):
        if (vote := view.terms[host].vote) is not None:
            return vote
    same = all(view.terms[host].proposal == own.proposal for host in there - view.gone_after_end(rules))
    return own.proposal if same else None


def elected(view: View, rules: Rules) -> Successor | None:
    """The term to begin now, if enough hosts have voted for it."""
    there = view.there()
    votes = {host: view.terms[host].vote for host in there}
    for choice in {vote for vote in votes.values() if vote is not None}:
        agreed = frozenset(host for host, vote in votes.items() if vote == choice)
        undecided = {host for host in there - agreed if votes[host] is None}
        # Hosts on which training begins have no say, but time to fetch what it begins from.
        coming = set(members_of(choice, view.hosts).values()) - view.member_hosts
        undecided |= {host for host in coming if host not in view.terms or view.terms[host].vote is None}
        waits = {host for host in undecided if view.unheard_s.get(host, 0.0) < rules.gone_s}
        if view.majority(agreed) and not waits:
            return choice
    return None


def with_proposal(term: Term, found: Successor | Standstill) -> Term:
    """Our own report with what we propose now."""
    if isinstance(found, Standstill):
        # If it is hopeless, the run ends with this reason.
        return structs.replace(term, proposal=None, waits="" if found.hopeless else found.why)
    return structs.replace(term, proposal=found, waits="")


@dataclass(frozen=True, slots=True)
class Break:
    """End the training workers of our host."""

    reason: str


@dataclass(frozen=True, slots=True)
class Begin:
    """Start the training workers of the new term."""

    term: Successor


@dataclass(frozen=True, slots=True)
class Stop:
    """The training pool cannot go on: end the run."""

    why: str


Move = Break | Begin | Stop


class Pool:
    """One agent's view of the pool. `patience_s`: how long the pool may stand still, waiting for the same thing."""

    def __init__(self, rules: Rules, number: int, patience_s: float) -> None:
        self.term = Term(number)
        self._rules = rules
        self._patience_s = patience_s
        self._still_since: tuple[str, float] | None = None

    def note(self, broken: str | None, *, alive: bool, look: Callable[[], Found]) -> Term:
        """Our updated report. `broken`: why our workers are being ended; `alive`: some are still alive."""
        if broken is None:
            return self.term
        if not self.term.broken:
            self.term = structs.replace(self.term, broken=True, reason="" if broken == ELSEWHERE else broken)
        if not alive and not self.term.ended:
            # No worker writes checkpoints here any more, so what is there now is final.
            checkpoints, given_up = look()
            self.term = structs.replace(self.term, ended=True, checkpoints=checkpoints, given_up=given_up)
        return self.term

    def act(self, view: View, *, alive: bool, lacks: Callable[[Successor], str], now: float) -> Move | None:
        """What to do now. `view` contains our report from `note`.

        `lacks(term)`: what our host must wait for before it can begin a term; empty: nothing. It is called each time.
        `Begin` is returned until the caller reports that the term `began` or was `put_off`.
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
        else:
            self._get_ready(view, lacks)
        chosen = elected(self._seen(view), self._rules)
        if chosen is not None and (view.host not in view.member_hosts or self.term.vote == chosen):
            if not view.cut_off(self._rules, chosen):
                return Begin(chosen)
            # Most of its members are out of reach: they may have begun it, and gone on without us since.
            self.term = structs.replace(self.term, waits=OUT_OF_REACH)
        elif self.term.waits == OUT_OF_REACH:
            self.term = structs.replace(self.term, waits="")
        if isinstance(found, Standstill) and found.hopeless:
            return Stop(found.why)
        return self._overdue(self._waits_in(view), now)

    def began(self, term: Successor) -> None:
        """Our host has begun this term; others may still fetch from it what the term begins from."""
        what = (term.step, term.saved_by)
        kept = tuple(saved for saved in self.term.checkpoints if (saved.step, saved.term) == what)
        self.term = Term(term.number, term, checkpoints=kept)
        self._still_since = None

    def put_off(self, what: str, now: float) -> Stop | None:
        """Our host could not begin a term, and must wait for `what` before it tries again."""
        self.term = structs.replace(self.term, waits=what)
        return self._overdue(what, now)

    def _follow(self, view: View, term: Successor, lacks: Callable[[Successor], str], now: float) -> Move | None:
        """Begin a term that has begun elsewhere."""
        ours = view.host in members_of(term, view.hosts).values()
        if ours and (view.cut_off(self._rules) or view.cut_off(self._rules, term)):
            # What we know is old: the others may have gone on without us since.
            return self.put_off(OUT_OF_REACH, now)
        what = lacks(term)
        if not what:
            return Begin(term)
        self.term = structs.replace(self.term, waits=what)
        # If none of its members are ours, the others can train without us: no reason to end the run.
        return self._overdue(what, now) if ours else None

    def _decide(self, view: View, found: Successor | Standstill, lacks: Callable[[Successor], str]) -> None:
        if self.term.vote is None:
            self.term = with_proposal(self.term, found)
        wanted = electable(self._seen(view), self._rules)
        if wanted is not None:
            what = lacks(wanted)
            self.term = structs.replace(self.term, waits=what, vote=None if what else wanted)

    def _get_ready(self, view: View, lacks: Callable[[Successor], str]) -> None:
        """None of the members are ours: if some of the next term are, say when they can begin it."""
        votes = (view.terms[host].vote for host in sorted(view.there()))
        coming = (vote for vote in votes if vote and view.host in members_of(vote, view.hosts).values())
        if self.term.vote is None and (wanted := next(coming, None)) is not None:
            what = lacks(wanted)
            self.term = structs.replace(self.term, waits=what, vote=None if what else wanted)

    def _seen(self, view: View) -> View:
        return replace(view, terms={**view.terms, view.host: self.term})

    def _waits_in(self, view: View) -> str:
        """What the next term waits for, on this host or else on another one."""
        own = self.term
        others = (view.terms[host] for host in sorted(view.terms))
        known = (term.waits for term in (own, *others) if term.number == own.number and term.waits)
        return next(known, "the host agents to agree on the next term")

    def _overdue(self, what: str, now: float) -> Stop | None:
        """Stop if the pool has waited for the same thing for too long."""
        if self._still_since is None or self._still_since[0] != what:
            self._still_since = what, now
        if now - self._still_since[1] < self._patience_s:
            return None
        return Stop(
            f"{self.term.reason or ELSEWHERE}; then the training workers waited {self._patience_s:g} s "
            f"(limits.no_progress_s) for {what} — continue with --resume, on hosts that can reach each other"
        )
