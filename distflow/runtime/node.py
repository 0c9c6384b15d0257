"""A worker among its peers: the endpoint, membership, which handler gets which message, and where the peers are.

Handlers run on the endpoint's thread under the board's lock; they change state and never compute. Who waits for it is
woken once all that came together has been handled.

Workers of one host meet over Unix sockets whose names are known in advance (`Hosts`). For other hosts a worker listens
on a port chosen by the system: it tells its host agent (`here`), the agents tell each other, and each agent tells its
workers (`roster`), again whenever a worker joins (`Greeting`).
"""

from __future__ import annotations

import logging
import math
import os
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from distflow.comm.addresses import Address
from distflow.comm.curve import CLIENT
from distflow.comm.endpoint import Endpoint
from distflow.comm.keys import Keys, NetworkListener, key_file, listening_on, own_keys, read_keys
from distflow.comm.membership import GREETINGS, KINDS, Identity, Joined, Lost, MemberMessage, Membership
from distflow.comm.message import Message
from distflow.comm.processes import process_alive, resident_mb, started_at
from distflow.data.decoding import Form, Name, Whole, read
from distflow.errors import ProtocolError, RecipeMismatch
from distflow.exchange.facts import CHANGING, HELD_UP, read_facts
from distflow.exchange.store_channel import refusal
from distflow.flow.digest import digest_parts
from distflow.flow.memory import frame_bytes
from distflow.flow.plan import leaders_of, publisher_for
from distflow.log import logger
from distflow.runtime.assembly import Setting
from distflow.runtime.process_record import thread_stacks
from distflow.runtime.waits import WaitBoard
from distflow.weights.one_sided.reads import NixlSetting

Handler = Callable[[Message], None]
AGENT_POOL = "agent"
COMPLAIN_EVERY_S = 10.0
"""How often malformed messages of one kind and sender are logged."""
SAY_EVERY_S = 1.0
"""How often a worker tells its agent where it listens, until the agent answers, and how far it is with a checkpoint."""
REMIND_EVERY_S = 15.0
"""The same afterwards: a message may be lost, and the agent may have been restarted."""

log = logger(__name__)


class _Stop(Form, frozen=True):
    reason: str = "asked to stop"


class Node:
    """Sends to peers, dispatches what they send, answers `status` and `stop`."""

    def __init__(self, endpoint: Endpoint, membership: Membership, board: WaitBoard) -> None:
        self.endpoint = endpoint
        self.membership = membership
        self.board = board
        self._work = 0
        self._work_sources: list[Callable[[], int]] = []
        self._checkpoint_sources: list[Callable[[], int]] = []
        self.facts: dict[str, Any] = {"state": "starting", "step": 0, "version": -1}
        self.counts: Callable[[], Mapping[str, float]] = dict
        """Counters of this worker by metric name, for the status."""
        self.status_rows: defaultdict[str, list[Callable[[], list[dict[str, Any]]]]] = defaultdict(list)
        """What else `status` shows of this worker, by key."""
        self._handlers: dict[str, Handler] = {}
        self._requests: dict[str, Handler] = {"status": self._status, "stop": self._stop, "stacks": self._stacks}
        self._agent_handlers: dict[str, Handler] = {}
        self._joined: list[Callable[[str, int], None]] = []
        self._lost: list[Callable[[Lost], None]] = []
        self._closing: list[Callable[[], None]] = []
        board.held_up = self._held_up
        self._ticks: list[Callable[[float], None]] = []
        self._complained: dict[tuple[str, str], tuple[float, int]] = {}
        """When a malformed message of a sender and kind was logged, and how many have come since."""

    def on(self, kind: str, handler: Handler) -> None:
        """Handle messages of this kind from peers that are present."""
        assert kind not in self._requests, f"{kind} is what clients send"
        self._handlers[kind] = handler

    def on_request(self, kind: str, handler: Handler) -> None:
        """Handle messages of this kind from anyone with the run's key, a command or a client outside the run too."""
        assert kind not in self._handlers, f"{kind} is what peers send"
        self._requests[kind] = handler

    def on_agent(self, kind: str, handler: Handler) -> None:
        """Handle messages of this kind from host agents only."""
        self._agent_handlers[kind] = handler

    def on_joined(self, handler: Callable[[str, int], None]) -> None:
        """Call `handler` with the name and incarnation of each peer that joins."""
        self._joined.append(handler)

    def on_lost(self, handler: Callable[[Lost], None]) -> None:
        """Call `handler` when a peer has left or died."""
        self._lost.append(handler)

    def on_tick(self, handler: Callable[[float], None]) -> None:
        """Call `handler` a few times a second with the monotonic time."""
        self._ticks.append(handler)

    def on_close(self, handler: Callable[[], None]) -> None:
        """Call `handler` when this worker leaves, before its endpoint closes."""
        self._closing.append(handler)

    def start(self) -> None:
        """Start to receive messages; all handlers must be registered before."""
        self.endpoint.start(self._receive, self._tick, self.board.fault, self.board.wake)
        with self.board.condition:
            self.membership.address = self.endpoint.network_address
            self.membership.facts = self.facts

    def send(self, to: str, kind: str, body: Mapping[str, Any]) -> None:
        """Queue a message without payload."""
        self.endpoint.send(to, kind, body)

    def work_done(self, amount: int = 1) -> None:
        """Count work done, as a sign of progress. Any thread may call this."""
        with self.board.condition:
            self._work += amount

    def count_work(self, source: Callable[[], int]) -> None:
        """Add a counter kept elsewhere to this worker's progress."""
        self._work_sources.append(source)

    def count_checkpoint(self, source: Callable[[], int]) -> None:
        """Add a counter of bytes of checkpoints that are read or written here: work, of which the agent hears too."""
        self._checkpoint_sources.append(source)
        self.count_work(source)

    @property
    def checkpointed(self) -> int:
        """Bytes of checkpoints read and written here so far."""
        return sum(source() for source in self._checkpoint_sources)

    @property
    def progress(self) -> int:
        """Rises with all work done here; sent with each heartbeat, so that peers can tell slow work from none."""
        return self._work + sum(source() for source in self._work_sources)

    def close(self, *, orderly: bool) -> None:
        """Leave: flush what is queued, close the sockets, remove our own.

        Only an orderly leave is announced: after a failure the host agent tells the peers which worker failed and why,
        so that they do not fail in turn because a peer is missing, which would hide the cause.
        """
        for closing in self._closing:
            closing()
        if orderly:
            with self.board.condition:
                self._apply(self.membership.leave(), [])
        self.endpoint.close()
        # The process that ends the run may have removed it already.
        Path(self.endpoint.roster[self.endpoint.name].removeprefix("ipc://")).unlink(missing_ok=True)

    # -- on the endpoint's thread

    def _receive(self, message: Message) -> None:
        now = time.monotonic()
        with self.board.condition:
            try:
                self._dispatch(message, now)
            except RecipeMismatch:
                raise
            except ProtocolError as error:
                # One malformed message must not end a worker.
                self._complain(message, error, now)
                self.endpoint.traffic.count_dropped(1)

    def _complain(self, message: Message, error: ProtocolError, now: float) -> None:
        """Log that a message was dropped; further ones of one kind and sender are only counted for a while."""
        about = (message.sender if message.sender in self.endpoint.roster else CLIENT, message.kind)
        at, more = self._complained.get(about, (-math.inf, 0))
        if now - at < COMPLAIN_EVERY_S:
            self._complained[about] = (at, more + 1)
            return
        told = f" (and {more} more since the last such line)" if more else ""
        log.warning("dropped a %r message from %s: %s%s", message.kind, message.sender, error, told)
        self._complained[about] = (now, 0)

    def _dispatch(self, message: Message, now: float) -> None:
        if message.kind in KINDS:
            if message.kind == "lost" and not is_agent(message.sender):
                raise ProtocolError("only a host agent may report that a worker died")
            out, events = self.membership.handle(message.kind, message.sender, message.incarnation, message.body, now)
            if message.kind in GREETINGS:
                self._find(message.sender)
            self._apply(out, events)
        elif is_agent(message.sender) and message.kind in self._agent_handlers:
            self._agent_handlers[message.kind](message)
        elif message.kind in self._requests:
            try:
                self._requests[message.kind](message)
            except ProtocolError as error:
                # Whoever asked would wait for ever: it hears that this worker is alive.
                self.endpoint.reply(message, refusal(message, str(error)))
                raise
        elif message.kind in self._handlers and self._accepts(message, now):
            self._handlers[message.kind](message)

    def _find(self, name: str) -> None:
        """Learn a peer's address from the peer itself; the agents' message about it may still be under way."""
        address = self.membership.elsewhere(name)
        if address is not None and self.endpoint.roster.get(name) != address:
            self.endpoint.know(name, address)

    def _accepts(self, message: Message, now: float) -> bool:
        return message.sender != CLIENT and self.membership.accepts(message.sender, message.incarnation, now)

    def _tick(self) -> None:
        now = time.monotonic()
        with self.board.condition:
            self._apply(*self.membership.tick(now, self.progress, self.facts))
            for handler in self._ticks:
                handler(now)

    def _apply(self, out: Iterable[MemberMessage], events: Iterable[Joined | Lost]) -> None:
        for item in out:
            self.endpoint.send(item.to, item.kind, item.body)
        for event in events:
            if isinstance(event, Joined):
                log.info("%s joined (incarnation %d)", event.name, event.incarnation)
                for joined in self._joined:
                    joined(event.name, event.incarnation)
            else:
                level = logging.INFO if event.orderly else logging.WARNING
                log.log(level, "%s is gone (incarnation %d): %s", event.name, event.incarnation, event.reason)
                self.endpoint.disconnect(event.name)
                for lost in self._lost:
                    lost(event)

    def _held_up(self) -> str:
        """Tell for which programs outside of the run owners say that they wait, this worker and its peers."""
        present = (peer.facts for peer in self.membership.peers.values() if peer.state == "present")
        told = (one for facts in (self.facts, *present) for one in facts.get(HELD_UP, ()))
        return " and ".join(dict.fromkeys(told))

    def _status(self, message: Message) -> None:
        wait = self.board.current
        row = {
            "name": self.endpoint.name,
            "incarnation": self.endpoint.incarnation,
            "pid": os.getpid(),
            "host": os.uname().nodename,
            **{fact: self.facts[fact] for fact in ("state", "step", "version")},
            "waiting_for": wait.describe(time.monotonic()) if wait else None,
            "waits": self.board.waits(),
            "traffic": asdict(self.endpoint.traffic),
            "segments": {name: asdict(use) for name, use in self.endpoint.segments.items()},
            "memory_mb": resident_mb(),
            "counts": dict(self.counts()),
            "checkpointed": self.checkpointed,
        }
        # A copy: the main thread adds what it builds meanwhile.
        sources_of = self.status_rows.copy()
        more = {key: [one for rows in sources for one in rows()] for key, sources in sources_of.items()}
        self.endpoint.reply(message, row | more)

    def _stacks(self, message: Message) -> None:
        self.endpoint.reply(message, {"waits": self.board.waits(), "threads": thread_stacks()})

    def _stop(self, message: Message) -> None:
        reason = read(message.body, _Stop, "stop").reason
        self.endpoint.reply(message, {"stopping": True})
        if self.facts["state"] != "finished":
            log.info("stop: %s", reason)
            self.board.stop(reason)


def agent_of(host: int) -> str:
    """Name of a host's agent."""
    return f"{AGENT_POOL}/{host}"


def is_agent(name: str) -> bool:
    """Whether a sender is a host agent."""
    return name.startswith(f"{AGENT_POOL}/")


def identity(
    name: str, incarnation: int, digest: str, parts: Mapping[str, str], host: int = 0, site: str = ""
) -> Identity:
    """The identity of this process."""
    started = started_at(os.getpid())
    assert started is not None, "this process is running"
    return Identity(name, incarnation, os.getpid(), started, digest, parts, host, site)


class Hosts:
    """The hosts and workers of a run, from a worker's document."""

    def __init__(self, setting: Setting) -> None:
        document = setting.document
        self._setting = setting
        self._run_dir = setting.run_dir
        self.roster = {str(worker.name): "" for worker in setting.plan.workers} | document.roster
        """Address of every worker by name; "" while it is unknown."""
        self.here = document.host
        self.address = document.address
        self._sites = {int(number): site for number, site in document.sites.items()}
        self._leaders = {
            model: leaders_of(setting.home_of(model), document.placement) for model in setting.plan.generating
        }
        """The workers that publish each model, by host."""

    @property
    def keys(self) -> Keys | None:
        """The keys of a run on several hosts; None on one host. Raises UserError when they are missing."""
        return None if self.address is None else read_keys(key_file(self._run_dir))

    @property
    def listener(self) -> NetworkListener | None:
        """Where to listen for other hosts; None if there are none."""
        keys, port = self.keys, self._setting.document.port
        if self.address is None or keys is None:
            return None
        if port is None:
            return NetworkListener(self.address, keys)
        own = own_keys(self._run_dir, self._setting.me.name.file_stem)
        return NetworkListener(self.address, keys, own, listening_on(self.address, port))

    @property
    def nixl(self) -> NixlSetting | None:
        """For a process with NIXL; None where there are no other hosts, or the recipe asks for none."""
        if self.address is None or self._setting.recipe.weights.link != "nixl":
            return None
        name = self._setting.me.name
        title = f"distflow {self._run_dir.name} {name} weights"
        return NixlSetting(self.address, title, self._run_dir / "nixl" / f"{name.file_stem}.log")

    def _endpoint(self, name: str, incarnation: int, most_bytes: int) -> Endpoint:
        """The endpoint of a worker, which sends to others on its host through shared memory."""
        about, listener = (name, incarnation, self.roster), self.listener
        return Endpoint(*about, listener=listener, max_frame_bytes=most_bytes, shared_memory=True)

    def publishes_here(self, model: str) -> bool:
        """Whether a worker that trains a model is on this host, so that its weights come through shared memory."""
        return self.here in self._leaders[model]

    def publisher_for(self, host: int, site: str, model: str) -> str:
        """The worker that publishes a model's weights for a host: one of its own, of its site, or of another."""
        return publisher_for(host, self._leaders[model], site, self._sites)

    def node(self, incarnation: int, board: WaitBoard) -> Node:
        """What this worker is to its peers."""
        setting, document = self._setting, self._setting.document
        name = str(setting.me.name)
        endpoint = self._endpoint(name, incarnation, frame_bytes(setting.plan))
        digests = setting.plan.digest, digest_parts(setting.plan)
        me = identity(name, incarnation, *digests, document.host, document.site)
        membership = Membership(me, setting.peers, process_alive, read_facts, setting.is_close, CHANGING)
        endpoint.afar = membership.afar
        return Node(endpoint, membership, board)


class _Roster(Form, frozen=True):
    addresses: dict[Name, Address]
    """Those that have changed after number `since`, up to `number`."""
    since: Whole = 0
    """0: these are all."""
    number: Whole = 0
    """0: it is not from our own agent, who counts its changes."""


class Greeting:
    """Tells the agent where this worker listens, and learns where others do. `wanted(name)`: whether it is a peer."""

    def __init__(self, node: Node, hosts: Hosts, wanted: Callable[[str], bool]) -> None:
        self._node = node
        self._agent = agent_of(hosts.here)
        self._wanted = wanted
        # Workers that were started by hand have no agent: their documents tell where the others listen.
        self._elsewhere = hosts.address is not None and self._agent in node.endpoint.roster
        self._say_at = 0.0
        self._said = False
        self._heard = False
        self._has = 0
        """The number up to which we have all that our agent knows."""
        node.on_agent("roster", self._on_roster)
        node.on_tick(self._tick)

    def _tick(self, now: float) -> None:
        if self._elsewhere and now >= self._say_at:
            self._said = True
            self._say_at = now + (REMIND_EVERY_S if self._heard else SAY_EVERY_S)
            here = {"address": self._node.endpoint.network_address, "has": self._has}
            self._node.send(self._agent, "here", here)

    def _on_roster(self, message: Message) -> None:
        told = read(message.body, _Roster, "roster")
        # The agent answers each `here` with a roster; one that comes before any `here` has another reason.
        self._heard = self._heard or self._said
        if told.number and told.since in (0, self._has):
            self._has = told.number
        elif told.number not in (0, self._has):
            # One before was lost: the agent is told what we have.
            self._say_at = 0.0
        endpoint, membership = self._node.endpoint, self._node.membership
        others = {name: address for name, address in told.addresses.items() if name != endpoint.name}
        new = {name: address for name, address in others.items() if endpoint.roster.get(name) != address}
        learned = endpoint.learn_all(new)
        for name in learned:
            membership.greet(name)
        good = others.keys() - (new.keys() - learned)
        for name in (name for name in others if name in good and name not in membership.peers and self._wanted(name)):
            log.info("%s was added to the run", name)
            membership.add(name)
