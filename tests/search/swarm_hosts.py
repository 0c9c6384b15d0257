"""The simulated hosts of `swarm_network`: what all have, and the one that publishes."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

from distflow.flow.sizes import PINNED, PUBLISHED
from distflow.sim.scenario import Crash
from distflow.types import Version
from distflow.weights.manifest import Manifest
from distflow.weights.segments.turns import Pin, SegmentTurns
from distflow.weights.swarm.chunk_plan import ChunkDealer
from distflow.weights.swarm.delta_chain import DeltaChain
from distflow.weights.swarm.serve_core import SendChunk, ServeCore, ServedReader
from distflow.weights.swarm_messages import ChunkAsk, Content, SwarmPlace
from tests.search.lease_scenario import Pause
from tests.search.swarm_memory import MODEL, TORN, HeldSegment, SimulatedSegment, content_of, delta_between, manifest_of
from tests.search.swarm_wire import KEEPALIVE_S, SwarmWire

if TYPE_CHECKING:
    # It makes them: at run time the import goes the other way.
    from tests.search.swarm_network import SwarmNetwork

NOTICED_S = 0.5
"""After so long the host agents have started what ended, at the earliest."""


class SwarmHost(ABC):
    """A host with one process that can die, come back, be suspended, and serve weights."""

    def __init__(self, network: SwarmNetwork, number: int) -> None:
        self.network = network
        self.number = number
        self.name = f"host {number}"
        self.alive = False
        self.up = True
        """Whether the machine runs, with or without the process."""
        self.gone = False
        """Whether it never comes back."""
        self.incarnation = 0
        self.tokens: set[bytes] = set()
        """Whoever knows one of them is let in."""
        self.server = ServeCore[HeldSegment](introduces=number == 0)
        self.wires: list[SwarmWire] = []
        """Connections of readers."""
        self.died_at = -1.0
        self.clear_since = 0.0
        """Since when the process runs."""
        self.slept_s = 0.0
        """For how long processes here have been suspended."""
        self._awake_at = 0.0
        self._waiting: deque[Callable[[], None]] = deque()
        """What came while it was suspended."""
        self._offset = 1000.0 * number
        self._free_at = 0.0

    @property
    def address(self) -> str:
        """Where the process serves, in this incarnation."""
        return f"tcp://10.0.0.{self.number}:{1000 + self.incarnation}"

    @property
    def clock(self) -> float:
        """What the clock of this host shows, in seconds."""
        return self.network.now + self._offset

    @property
    def asleep_s(self) -> float:
        """For how long the process is still suspended."""
        return max(0.0, self._awake_at - self.network.now)

    def when_awake(self, event: Callable[[], None]) -> None:
        """Run it once the process is not suspended, in the order in which things came; not if it has died by then."""
        if not self.alive:
            return
        if self._awake_at <= self.network.now and not self._waiting:
            event()
            return
        self._waiting.append(event)
        if len(self._waiting) == 1:
            self.network.at(self._awake_at, partial(self._resume, self.incarnation))

    def _resume(self, incarnation: int) -> None:
        while self._waiting and (self.incarnation, self.alive) == (incarnation, True):
            if self._awake_at > self.network.now:
                # It was suspended once more meanwhile.
                self.network.at(self._awake_at, partial(self._resume, incarnation))
                return
            self._waiting.popleft()()

    def after(self, seconds: float, event: Callable[[], None]) -> None:
        """Schedule what this incarnation does."""
        incarnation = self.incarnation

        def attempt() -> None:
            if self.incarnation == incarnation:
                self.when_awake(event)

        self.network.after(seconds, attempt)

    def occupy(self, nbytes: int) -> float:
        """Seconds until this host has sent so much more."""
        now = self.network.now
        self._free_at = max(self._free_at, now) + nbytes / self.network.scenario.rate(self.number)
        return self._free_at - now

    # -- faults
    def pause(self, pause: Pause) -> None:
        """Suspend the process, as SIGSTOP does."""
        before = self.network.now + self.asleep_s
        self._awake_at = max(before, self.network.now + pause.seconds)
        self.slept_s += self._awake_at - before
        self.clear_since = max(self.clear_since, self._awake_at)

    def jump(self, seconds: float) -> None:
        """The clock goes forward."""
        self._offset += seconds

    def die(self, crash: Crash) -> None:
        """The process ends, or the host: then nobody hears of it, and its memory is gone."""
        if not self.alive:
            return
        self.alive, self.up, self.died_at = False, crash.noticed, self.network.now
        self.gone = crash.restart_s is None
        for wire in self.ends():
            wire.end_at(self)
            self.network.after(self.network.delay() if crash.noticed else KEEPALIVE_S, wire.lose)
        self.wires = []
        if not crash.noticed:
            self.forget_memory()
        if crash.restart_s is not None:
            self.network.after(NOTICED_S + crash.restart_s, self.begin)

    def begin(self) -> None:
        """Start the process, with nothing remembered but what is in shared memory."""
        self.incarnation += 1
        self.alive = self.up = True
        self._awake_at, self._free_at = 0.0, self.network.now
        self._waiting.clear()
        self.clear_since = self.network.now
        self.tokens = set()
        self.server = ServeCore[HeldSegment](introduces=self.number == 0)
        self.start()

    @abstractmethod
    def start(self) -> None:
        """What the process does first."""

    def ends(self) -> list[SwarmWire]:
        """The connections that end with the process."""
        return list(self.wires)

    @abstractmethod
    def forget_memory(self) -> None:
        """The host has lost what was in shared memory."""

    @abstractmethod
    def damage(self) -> None:
        """A byte of the newest version changes."""

    # -- serving
    def welcome(self, wire: SwarmWire) -> None:
        """A reader has connected."""
        self.wires.append(wire)
        self.server.readers.append(wire.served)
        if self.server.introduces:
            self.tell()

    def serve(self, reader: str, site: str) -> ServedReader[HeldSegment]:
        """What a reader is to this server."""
        return ServedReader(self.server, reader, site)

    def left(self, wire: SwarmWire) -> None:
        """A reader's connection is over."""
        if wire in self.wires:
            self.wires.remove(wire)
            self.server.readers.remove(wire.served)
            if self.server.introduces:
                self.tell()

    def serves(self, content: Content, chunk: int) -> bool:
        """Whether a chunk can be had here."""
        held = self.server.find(ChunkAsk("want", MODEL, content.term, content.number, base=content.base))
        return held is not None and held.has(chunk)

    def tell(self) -> None:
        """There may be something to tell readers."""
        for wire in list(self.wires):
            wire.wake()

    @abstractmethod
    def on_read(self, held: HeldSegment) -> None:
        """A chunk is about to be sent."""

    def spoilt(self, data: bytes) -> bytes:
        """What arrives of bytes of a chunk."""
        scenario, lies = self.network.scenario, self.number in self.network.scenario.liars
        bad = self.network.now < scenario.calm_at and self.network.chance(scenario.wrong)
        if not (lies or bad):
            return data
        self.network.inject("wrong_chunks")
        return bytes([data[0] ^ 1]) + data[1:]

    def has_sent(self, wire: SwarmWire, what: SendChunk[HeldSegment]) -> None:
        """A chunk has been sent."""
        if self.number:
            self.network.record.passed_on += 1
        else:
            manifest = what.held.manifest
            self.network.record.sent[manifest.content, wire.served.site] += manifest.size_of(what.chunk)


class PublisherHost(SwarmHost):
    """The training host: a publisher, and the server beside it."""

    def __init__(self, network: SwarmNetwork) -> None:
        super().__init__(network, 0)
        self.term = -1
        self.newest: Manifest | None = None
        """What was announced last."""
        self._number = 0

    @property
    def waits(self) -> bool:
        """Whether a version is yet to be announced."""
        return not self.alive or self._busy or self._due + self._undescribed > 0

    def start(self) -> None:
        """A new term, which publishes at once what the last one had last."""
        self.term += 1
        chunks = self.network.scenario.chunks
        names = [f"/dev/shm/distflow-t{self.term}-{slot}" for slot in range(PUBLISHED + PINNED)]
        self.place = SwarmPlace(self.address, f"token of term {self.term}".encode(), encrypted=False)
        self.tokens = {self.place.token}
        self._segments = [SimulatedSegment(name, chunks) for name in names]
        self._turns, self._pin = SegmentTurns(names), Pin()
        self._held: list[HeldSegment] = []
        self._chain = DeltaChain[HeldSegment](self.server)
        self._busy, self._due, self._undescribed = False, 0, 0
        self.publish()

    def publish(self) -> None:
        """The trainer has a version."""
        self._due += 1
        if not self._busy:
            self._next()

    def forget_memory(self) -> None:
        """A new term uses no memory of an older one."""

    def damage(self) -> None:
        """The training host is trusted: nobody could tell."""

    def on_read(self, held: HeldSegment) -> None:
        """Readers are fetching this segment."""
        self._pin.read(held.segment.name, self.clock)

    def _next(self) -> None:
        if not self._due:
            return
        self._busy, self._due = True, self._due - 1
        self._number += 1
        version, scenario = Version(self.term, self._number), self.network.scenario
        segment = self._segments[self._turns.next(self._pin.pinned(self.clock))]
        segment.stored = TORN
        for chunk in range(scenario.chunks):
            at = scenario.copy_s * (chunk + 1) / scenario.chunks
            self.after(at, partial(self._copy, segment, version, chunk))

    def _copy(self, segment: SimulatedSegment, version: Version, chunk: int) -> None:
        segment.data[chunk][:] = content_of(version, chunk)
        if chunk == len(segment.data) - 1:
            segment.stored = version
            self._undescribed += 1
            self.after(self.network.scenario.describe_s, partial(self._describe, segment, version))
            self._busy = False
            self._next()

    def _describe(self, segment: SimulatedSegment, version: Version) -> None:
        self._undescribed -= 1
        if segment.stored != version:
            return
        scenario = self.network.scenario
        manifest = manifest_of(version, segment.name, segment, scenario.last_bytes)
        held = HeldSegment(manifest, segment, ChunkDealer(manifest.chunks))
        made = delta_between(self._held[-1], held, scenario.delta_bytes) if self._held else None
        deltas = self._chain.lead_to(manifest.size, made)
        former = [one for one in self._held if one.segment is segment]
        self._held = [*(one for one in self._held if one not in former), held][-(PUBLISHED + PINNED) :]
        for one in former:
            self.server.forget(one)
        self.server.hold(held)
        self.tell()
        self.newest = manifest_of(version, str(self.place), segment, scenario.last_bytes, deltas)
        self.network.record.published.append(version)
        self.network.announce(self.newest)
