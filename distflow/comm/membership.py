"""Which peers are present: a state machine without sockets. Hello and welcome compare recipes, beats show progress.

A peer is `unknown` until its hello (or welcome) arrives with our interface digest, then `present`, and `lost` when its
host agent reports its death, when a newer incarnation of it appears, or when it fell silent and its process is gone.
Silence alone never makes a peer lost: a stopped or starved process may continue, and its work with it.

Example: rollout/0 starts and repeats `hello` to trainer/0 until `welcome` arrives; trainer/0, which starts later,
receives one of them, finds the digest equal, answers `welcome`, and both report `Joined`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any

import msgspec

from distflow.comm.addresses import Address
from distflow.comm.beat_order import BeatOrder
from distflow.data.decoding import MOST, Form, Name, Site, Whole, read
from distflow.errors import RecipeMismatch

Facts = Mapping[str, Any]
HELLO_AFTER_S = 0.25
HELLO_EVERY_S = 4.0
"""An absent peer is sent `hello` after `HELLO_AFTER_S`, twice that, and so on up to this: when it starts, it sends one
too. A peer that has left is sent none."""
BEAT_EVERY_S = 1.0
SILENCE_S = 3.0
"""After this long without a message from a peer its process is checked."""

GREETINGS = frozenset({"hello", "welcome"})
KINDS = GREETINGS | frozenset({"refused", "beat", "left", "lost"})
"""Message kinds that belong here."""


@dataclass(frozen=True, slots=True)
class MemberMessage:
    """A message to send."""

    to: str
    kind: str
    body: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Joined:
    """A peer with our recipe is present."""

    name: str
    incarnation: int


@dataclass(frozen=True, slots=True)
class Lost:
    """An incarnation of a peer has ended."""

    name: str
    incarnation: int
    reason: str
    orderly: bool = False
    """It announced that it leaves."""


Event = Joined | Lost


@dataclass(slots=True)
class Member:
    """What is known about one peer."""

    incarnation: int = -1
    pid: int = 0
    started: float = 0.0
    host: int = 0
    site: str = ""
    address: str | None = None
    """Where it listens for other hosts."""
    state: str = "unknown"
    heard_at: float = 0.0
    progress: int = 0
    facts: Mapping[str, Any] = field(default_factory=dict)
    greet_at: float = -1e9
    greet_wait: float = HELLO_AFTER_S

    def greeting_due(self, now: float) -> bool:
        """Whether to send `hello` now; the interval doubles each time."""
        if self.state == "present" or now < self.greet_at:
            return False
        self.greet_at = now + self.greet_wait
        self.greet_wait = min(2 * self.greet_wait, HELLO_EVERY_S)
        return True


@dataclass(frozen=True, slots=True)
class Identity:
    """This worker: `started` is the start time of its process in seconds since boot."""

    name: str
    incarnation: int
    pid: int
    started: float
    digest: str
    digest_parts: Mapping[str, str]
    host: int = 0
    """Number of its host; only processes on the same host can be checked."""
    site: str = ""
    """Where its host stands."""


class _Recipe(msgspec.Struct, frozen=True):
    """The part of `hello` and `welcome` that can be read whatever code the sender runs."""

    digest: str
    parts: dict[str, str]


class _Card(_Recipe, frozen=True, forbid_unknown_fields=True):
    """The whole body, from a peer with our recipe."""

    pid: Whole
    started: Annotated[float, msgspec.Meta(ge=0.0, le=MOST)]
    host: Whole
    site: Site
    address: Address | None
    facts: dict[str, Any]


class _Beat(Form, frozen=True):
    progress: Whole
    facts: dict[str, Any]


class _LostBody(Form, frozen=True):
    worker: Name
    incarnation: Whole
    reason: str


class _Refused(Form, frozen=True):
    reason: str


class Membership:
    """The peers of one worker. `alive(pid, started)` says whether a process of this machine still runs.

    `read_facts`: decoder of the facts that peers report. `close(name)`: whether a peer gets every heartbeat, however
    many peers there are (`beat_order.py`). `minor`: facts that change all the time: for them alone no peer's turn comes
    earlier.
    """

    def __init__(
        self,
        me: Identity,
        peers: Iterable[str],
        alive: Callable[[int, float], bool],
        read_facts: Callable[[Facts], Facts] = dict,
        close: Callable[[str], bool] = lambda name: False,
        minor: Collection[str] = (),
    ) -> None:
        self.me = me
        self.address: str | None = None
        """Where this worker listens for other hosts; peers learn it from the first hello."""
        self.facts: Mapping[str, Any] = {}
        """Facts about this worker, sent from the first hello on."""
        self.peers = {name: Member() for name in peers}
        self.news = 0
        """Increases whenever a peer says that it has made progress, or other facts than before."""
        self._alive = alive
        self._read_facts = read_facts
        self._beat_at = -1e9
        self._order = BeatOrder(me.name, close)
        self._minor = frozenset(minor)

    def present(self, name: str) -> bool:
        """Whether a peer is present now."""
        return self.peers[name].state == "present"

    def add(self, name: str) -> None:
        """Add a peer that joined the run after it began."""
        if name != self.me.name:
            self.peers.setdefault(name, Member())

    def greet(self, name: str) -> None:
        """The address of a peer has become known: send `hello` at once if it is absent."""
        if name in self.peers:
            self.peers[name].greet_at, self.peers[name].greet_wait = -1e9, HELLO_AFTER_S

    def elsewhere(self, name: str) -> str | None:
        """The address that a present peer on another host has announced."""
        peer = self.peers.get(name)
        return peer.address if peer is not None and peer.state == "present" and peer.host != self.me.host else None

    def afar(self, name: str) -> bool:
        """Whether a peer that is or was present stands at another site than this worker."""
        peer = self.peers.get(name)
        return peer is not None and peer.state != "unknown" and peer.site != self.me.site

    def met(self, name: str) -> bool:
        """Whether a peer is or was present."""
        return self.peers[name].state != "unknown"

    def handle(
        self, kind: str, sender: str, incarnation: int, body: Mapping[str, Any], now: float
    ) -> tuple[list[MemberMessage], list[Event]]:
        """Take one message of KINDS.

        Raises RecipeMismatch if a peer has another recipe and no present peer has ours, ProtocolError if the message is
        malformed.
        """
        if kind == "lost":
            lost = read(body, _LostBody, kind)
            return [], self._lost(lost.worker, lost.incarnation, lost.reason)
        if kind == "refused":
            reason = read(body, _Refused, kind).reason
            if sender not in self.peers or any(peer.state == "present" for peer in self.peers.values()):
                # That peer is the exception, and our own refusal tells it so; peers with the same recipe continue.
                return [], []
            raise RecipeMismatch(f"{sender} refused this worker: {reason}")
        if sender not in self.peers or incarnation < self.peers[sender].incarnation:
            return [], []
        if kind == "left":
            return [], self._lost(sender, incarnation, "it left the run", orderly=True)
        if kind == "beat":
            return self._beat(sender, incarnation, body, now)
        return self._hello(kind, sender, incarnation, body, now)

    def accepts(self, sender: str, incarnation: int, now: float) -> bool:
        """Whether a message of another protocol may be processed: this incarnation of the sender is present."""
        if sender == self.me.name:
            return True
        if sender not in self.peers:
            return False
        peer = self.peers[sender]
        if peer.incarnation != incarnation or peer.state != "present":
            return False
        peer.heard_at = now
        self._order.heard(sender)
        return True

    def tick(self, now: float, progress: int, facts: Mapping[str, Any]) -> tuple[list[MemberMessage], list[Event]]:
        """Send `hello` to absent peers and heartbeats to present ones; check the processes of silent ones."""
        out: list[MemberMessage] = []
        events: list[Event] = []
        absent = [name for name, peer in self.peers.items() if peer.greeting_due(now)]
        out += [MemberMessage(name, "hello", self._card()) for name in absent]
        if now - self._beat_at >= BEAT_EVERY_S:
            self._beat_at = now
            # A copy, for what follows too: the worker's main thread adds facts meanwhile.
            facts = dict(facts)
            body = {"progress": progress, "facts": facts}
            present = [name for name, peer in self.peers.items() if peer.state == "present"]
            news = {name: fact for name, fact in facts.items() if name not in self._minor}
            out += [MemberMessage(name, "beat", body) for name in self._order.next(present, news)]
            for name, peer in self.peers.items():
                silent = peer.state == "present" and now - peer.heard_at > SILENCE_S
                here = peer.host == self.me.host
                if silent and here and not self._alive(peer.pid, peer.started):
                    events += self._lost(name, peer.incarnation, "its process is gone")
        return out, events

    def leave(self) -> list[MemberMessage]:
        """Announce to present peers that this worker leaves."""
        return [MemberMessage(name, "left", {}) for name in self.peers if self.present(name)]

    def _card(self) -> dict[str, Any]:
        me = self.me
        return {
            "digest": me.digest,
            "parts": dict(me.digest_parts),
            "pid": me.pid,
            "started": me.started,
            "host": me.host,
            "site": me.site,
            "address": self.address,
            "facts": dict(self.facts),
        }

    def _hello(
        self, kind: str, sender: str, incarnation: int, body: Mapping[str, Any], now: float
    ) -> tuple[list[MemberMessage], list[Event]]:
        recipe = read(body, _Recipe, kind)
        if recipe.digest != self.me.digest:
            reason = self._difference(sender, recipe.parts)
            if kind == "welcome":
                raise RecipeMismatch(reason)
            return [MemberMessage(sender, "refused", {"reason": reason})], []
        card = read(body, _Card, kind)
        facts = self._read_facts(card.facts)
        out = [MemberMessage(sender, "welcome", self._card())] if kind == "hello" else []
        peer = self.peers[sender]
        peer.heard_at = now
        if peer.state == "present" and peer.incarnation == incarnation:
            return out, []
        if peer.state == "lost" and peer.incarnation == incarnation:
            return out, []
        events = self._lost(sender, peer.incarnation, "a newer incarnation of it has started")
        self.peers[sender] = Member(
            incarnation=incarnation,
            pid=card.pid,
            started=card.started,
            host=card.host,
            site=card.site,
            address=card.address,
            state="present",
            heard_at=now,
            facts=facts,
        )
        return out, [*events, Joined(sender, incarnation)]

    def _beat(
        self, sender: str, incarnation: int, body: Mapping[str, Any], now: float
    ) -> tuple[list[MemberMessage], list[Event]]:
        peer = self.peers[sender]
        if peer.state != "present" or peer.incarnation != incarnation:
            # Its hello was lost, or this worker is a new incarnation: send `hello`, it will answer.
            return [MemberMessage(sender, "hello", self._card())], []
        beat = read(body, _Beat, "beat")
        facts = self._read_facts(beat.facts)
        self.news += (beat.progress, facts) != (peer.progress, peer.facts)
        peer.progress, peer.facts, peer.heard_at = beat.progress, facts, now
        return [], []

    def _lost(self, name: str, incarnation: int, reason: str, *, orderly: bool = False) -> list[Event]:
        if name not in self.peers:
            return []
        peer = self.peers[name]
        if peer.state != "present" or peer.incarnation > incarnation:
            return []
        peer.state = "lost"
        peer.greet_at, peer.greet_wait = math.inf if orderly else -1e9, HELLO_AFTER_S
        return [Lost(name, peer.incarnation, reason, orderly)]

    def _difference(self, sender: str, theirs: Mapping[str, str]) -> str:
        mine = self.me.digest_parts
        differ = sorted(key for key in mine.keys() | theirs.keys() if mine.get(key) != theirs.get(key))
        what = ", ".join(differ) or "the code of distflow"
        return (
            f"{self.me.name} and {sender} were compiled from different recipes: they differ in {what} — "
            f"start all workers of a run from the same recipe and code"
        )
