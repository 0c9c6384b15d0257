"""The simulated hosts that fetch weights: the cores, with the simplest process around them that obeys their rules.

They check what the cores do while they run. A process that a fetch has failed in ends, and is started again.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING

from distflow.errors import ChecksumError, NoProgressError, Overtaken
from distflow.flow.sizes import FETCHED
from distflow.sim.scenario import Crash
from distflow.types import Version
from distflow.weights.manifest import Manifest, digest
from distflow.weights.swarm.client import CONNECTIONS, TICK_S
from distflow.weights.swarm.fetch_actions import Action, Expect, HangUp, Landing, SendAsk, WantedVersion
from distflow.weights.swarm.fetch_core import ATTEMPTS, BAN_S, FetchCore
from distflow.weights.swarm.patience import RETRY_S
from distflow.weights.swarm_messages import Content, Says, SwarmPlace
from tests.search.swarm_hosts import SwarmHost
from tests.search.swarm_memory import TORN, Fetch, HeldSegment, Making, SimulatedSegment, make
from tests.search.swarm_wire import SwarmWire

if TYPE_CHECKING:
    # It makes them: at run time the import goes the other way.
    from tests.search.swarm_network import SwarmNetwork

LATE_S = 12.0
"""A reader may find out so much later that nobody gets anything: it tries to connect, and hears of bytes in turn."""
RESTART_S = 2.0
"""A worker that has failed is started again after so long."""


class ReaderHost(SwarmHost):
    """One reader of a host: it fetches what is announced, the newest first, and serves what it has."""

    def __init__(self, network: SwarmNetwork, number: int) -> None:
        super().__init__(network, number)
        self.site = network.scenario.site(number)
        self.passes_on = number not in network.scenario.outside
        self.versions: list[Version] = []
        """That this process has had, one after the other."""
        self.client: FetchCore[SwarmWire] | None = None
        self.links: list[SwarmWire] = []
        """Its own connections."""
        self.manifest: Manifest | None = None
        """What it has begun to fetch last."""
        self.gave_up_at = -2.0
        """When a fetch failed last, of which nothing came."""
        self._fetch: Fetch | None = None
        self.forget_memory()

    @property
    def newest(self) -> Version | None:
        """The newest version that is whole in the memory of this host."""
        return max((one.stored for one in self._segments if one.stored.term >= 0), default=None)

    def start(self) -> None:
        """Hear what was announced last."""
        self.client, self.links, self._fetch = None, [], None
        self._place: SwarmPlace | None = None
        self._wanted: Manifest | None = None
        self._known = TORN
        self._wrong: Counter[str] = Counter()
        """Wrong chunks of the fetch under way, by the address that they came from."""
        self._received = 0
        """Most bytes that counted as received."""
        self._banned: dict[str, float] = {}
        """Until when nothing may be asked of an address."""
        self.fetch_began = self.network.now
        self._quiet_since = (self.network.now, 0.0)
        """When bytes came last, and for how long the process had stood still by then."""
        self.versions = []
        self._deltas: list[HeldSegment] = []
        """That it has, and serves."""
        if self.network.announced is not None:
            self.after(self.network.delay(), partial(self.announce, self.network.announced))

    def forget_memory(self) -> None:
        """The host has lost what was in shared memory."""
        self._segments = [
            SimulatedSegment(f"{self.name}-{slot}", self.network.scenario.chunks) for slot in range(FETCHED)
        ]
        self._told: tuple[Version, int] = (TORN, 0)

    def die(self, crash: Crash) -> None:
        """The process ends, with its fetch."""
        super().die(crash)
        if not self.alive:
            self._fetch = self.client = None

    def ends(self) -> list[SwarmWire]:
        """The connections that end with the process."""
        return [*self.wires, *self.links]

    def damage(self) -> None:
        """A byte of the newest version changes."""
        for segment in (one for one in self._segments if one.stored == self.newest):
            segment.data[self.network.any(len(segment.data))][0] ^= 1
            self.network.inject("damaged_chunks")

    def on_read(self, held: HeldSegment) -> None:
        """It may be written over all the same: only a publisher waits for those that fetch."""

    def announce(self, manifest: Manifest) -> None:
        """A version is there to be fetched."""
        if manifest.version > self._known:
            self._known, self._wanted = manifest.version, manifest
            self._consider()

    # -- fetching
    def _consider(self) -> None:
        """Begin to fetch what is wanted, if nothing is being fetched."""
        if self._fetch is not None or self._wanted is None:
            return
        manifest, self._wanted = self._wanted, None
        newest = self.newest
        self.server.forget_terms_before(manifest.version.term)
        if newest is not None and newest >= manifest.version:
            if newest == manifest.version:
                self._have(manifest.version)
            return
        self._client_for(SwarmPlace.parse(manifest.place))
        self._keep_for(manifest)
        segment = next(one for one in self._segments if one.stored != newest or newest is None)
        segment.stored = TORN
        held = HeldSegment(manifest, segment)
        self._serve(held)
        fetch, chain = Fetch(manifest, segment, held), list(manifest.chain_from(newest))
        self._interrupted = self._told
        if chain:
            base = next(one for one in self._segments if one.stored == newest)
            self._next_delta(Making(fetch, base, chain))
        else:
            self._fetch_rest(fetch, ())

    def _serve(self, held: HeldSegment) -> None:
        if self.passes_on:
            self.server.hold(held)
            self.tell()

    def _keep_for(self, manifest: Manifest) -> None:
        """Forget deltas that do not lead to this version."""
        named = {manifest.of_delta(delta).content for delta in manifest.deltas}
        for held in [held for held in self._deltas if held.manifest.content not in named]:
            self.server.forget(held)
            self._deltas.remove(held)

    def _next_delta(self, making: Making) -> None:
        """Fetch the next delta, or make the version, all of them being there."""
        version = making.version
        if not making.left:
            there = make(version.manifest, making.base, version.segment)
            self.network.record.made += len(there) == version.manifest.chunks
            self._fetch_rest(version, there)
            return
        manifest = version.manifest.of_delta(making.left.pop(0))
        segment = SimulatedSegment(f"{self.name}-delta", manifest.chunks, manifest.base)
        fetch = Fetch(manifest, segment, HeldSegment(manifest, segment), making=making)
        self._serve(fetch.held)
        self._begin_to_fetch(fetch)

    def _fetch_rest(self, fetch: Fetch, made: Sequence[int]) -> None:
        """Fetch what is not there of a version: of what was made of it, or else of an interrupted fetch."""
        manifest, (interrupted, arrived), there = fetch.manifest, self._interrupted, made
        if not made and interrupted == manifest.version and arrived:
            there = [n for n, data in enumerate(fetch.segment.data) if digest(bytes(data)) == manifest.digest_of(n)]
        for chunk in there:
            fetch.held.add(chunk)
        fetch.there = there
        self._fetch = fetch
        (self._finish if len(there) == manifest.chunks else self._begin_to_fetch)(fetch)

    def _begin_to_fetch(self, fetch: Fetch) -> None:
        client, segment, held = self.client, fetch.segment, fetch.held
        assert client is not None, "the place is known"
        told = fetch if fetch.making is None else fetch.making.version

        def arrived(chunk: int) -> None:
            held.add(chunk)
            told.arrived += 1
            self._told = (told.manifest.version, told.arrived)
            self.after(0.0, self.tell)

        wanted = WantedVersion(
            fetch.manifest,
            lambda chunk: memoryview(segment.data[chunk]),
            arrived,
            self.network.scenario.no_progress_s,
        )
        self._fetch = fetch
        fetch.begun, self.manifest = True, fetch.manifest
        self.fetch_began = self.network.now
        self._wrong.clear()
        self._received = client.received
        self._begin_quiet(fetch)
        self._do(client.begin(wanted, fetch.there, self.clock))
        self._cycle(fetch)

    def _client_for(self, place: SwarmPlace) -> None:
        self.tokens.add(place.token)
        if self.client is None or self._place != place:
            if self.client is not None:
                self._hang_up(self.client.close())
            own = self.address if self.passes_on else ""
            self.client, self._place = FetchCore(place.address, own, CONNECTIONS), place
            self._banned.clear()

    def _cycle(self, fetch: Fetch) -> None:
        """Connect, then look after the fetch a moment later."""
        client, place = self.client, self._place
        if self._fetch is not fetch or client is None or place is None:
            return
        while (address := client.connect(self.clock)) is not None:
            if address == place.address:
                # On the thread that looks after the fetch: it waits for the outcome.
                self.network.connect(self, place, address, partial(self._met_publisher, client, fetch))
                return
            self.network.connect(self, place, address, partial(self._connected, client))
        self.after(TICK_S, partial(self._look, fetch))

    def _met_publisher(self, client: FetchCore[SwarmWire], fetch: Fetch, found: SwarmWire | str, refused: bool) -> None:
        self._connected(client, found, refused)
        self._cycle(fetch)

    def _connected(self, client: FetchCore[SwarmWire], found: SwarmWire | str, refused: bool) -> None:
        """A connection is there; or an address could not be reached."""
        if isinstance(found, str):
            self._do(client.failed(found, self.clock, refused=refused))
        else:
            self._do(client.opened(found, self.clock))

    def _look(self, fetch: Fetch) -> None:
        client = self.client
        if self._fetch is not fetch or client is None:
            return
        if not client.done:
            self._count_received(fetch, client.received)
            out = client.tick(self.clock, superseded=self._wanted is not None)
            for expected in [action for action in out if isinstance(action, Expect)]:
                fetch.held.coming = expected.counts
                self.tell()
            if client.error is not None:
                self._fail(fetch, client.error)
                return
            self._check_patience(fetch)
            self._do(out)
        if client.done:
            self._finish(fetch)
        else:
            self._cycle(fetch)

    def _wake(self) -> None:
        fetch, client = self._fetch, self.client
        if client is not None and client.ended and fetch is not None and not fetch.woken:
            fetch.woken = True
            self.after(0.0, partial(self._look, fetch))

    def _finish(self, fetch: Fetch) -> None:
        client, self._fetch = self.client, None
        assert client is not None, "it has fetched"
        self._hang_up(client.end() if fetch.begun else ())
        fetch.segment.stored = fetch.manifest.version
        fetch.held.whole = True
        assert fetch.segment.true, f"{self.name} has {fetch.manifest.title} with wrong bytes"
        if fetch.making is not None:
            self._deltas.append(fetch.held)
            self._next_delta(fetch.making)
            return
        self.network.record.ended["well"] += 1
        self._have(fetch.manifest.version)
        if fetch.there:
            self._do(client.made(fetch.manifest))
        self._consider()

    def _have(self, version: Version) -> None:
        assert not self.versions or version > self.versions[-1], f"{self.name} has {version} after {self.versions[-1]}"
        self.versions.append(version)
        self.network.record.versions[self.number].append(version)

    def _fail(self, fetch: Fetch, error: Exception) -> None:
        client, self._fetch = self.client, None
        assert client is not None, "it has fetched"
        self._hang_up(client.end())
        self.server.forget(fetch.held)
        if fetch.making is not None and isinstance(error, ChecksumError):
            self._fetch_rest(fetch.making.version, ())
            return
        if fetch.making is not None:
            self.server.forget(fetch.making.version.held)
        self.network.record.ended[type(error).__name__] += 1
        if isinstance(error, Overtaken):
            self._consider()
            return
        self.network.check_failure(self, error, self._quiet_s())
        if isinstance(error, NoProgressError):
            self.gave_up_at = self.network.now
        self.die(Crash(self.number, self.network.now, RESTART_S))

    # -- what comes on connections
    def landing(self, wire: SwarmWire, content: Content, chunk: int, size: int) -> Landing | None:
        """Where a chunk goes that begins to arrive."""
        return wire.client.landing(wire, content, chunk, size)

    def landed(self, wire: SwarmWire, content: Content, chunk: int, *, right: bool) -> None:
        """A chunk has arrived."""
        self.network.record.wrong += not right
        if not right and wire.holder.number:
            self._note_wrong(wire)
        self._do(wire.client.landed(wire, content, chunk, self.clock, right=right))
        self._wake()

    def heard(self, wire: SwarmWire, says: Says, content: Content, chunk: int, chunks: tuple[int, ...]) -> None:
        """Something about chunks."""
        self._do(wire.client.heard(wire, says, content, chunk, chunks))
        self._wake()

    def coming(self, wire: SwarmWire, content: Content, counts: Mapping[str, int]) -> None:
        """Another reader says who has received how much."""
        wire.client.coming(content, counts, self.clock)

    def met(self, wire: SwarmWire, peers: tuple[str, ...]) -> None:
        """The publisher says which readers there are."""
        self._do(wire.client.met(peers))

    def lost(self, wire: SwarmWire) -> None:
        """A connection is over."""
        wire.open = False
        if not wire.over:
            self._do(wire.client.lost(wire, self.clock))
        if wire in self.links:
            self.links.remove(wire)

    def _count_received(self, fetch: Fetch, received: int) -> None:
        """Bytes that somebody here wanted are progress as far as they count when looked at: wrong ones do not."""
        if received > self._received:
            self._received = received
            self._begin_quiet(fetch)

    def _begin_quiet(self, fetch: Fetch) -> None:
        self._quiet_since = (self.network.now, self.slept_s)
        self.network.moved[fetch.manifest.content] = self.network.now

    def _do(self, out: Iterable[Action[SwarmWire]]) -> None:
        for action in out:
            if isinstance(action, SendAsk):
                self._check_ban(action.link)
                action.link.ask(action.ask)
            elif isinstance(action, HangUp):
                action.link.hang_up()

    def _hang_up(self, out: Iterable[Action[SwarmWire]]) -> None:
        """Hang up, and see to it that nothing more comes."""
        for action in out:
            if isinstance(action, HangUp):
                action.link.hang_up()
                self.lost(action.link)

    # -- promises that can be seen on the way
    def _note_wrong(self, wire: SwarmWire) -> None:
        """After several wrong chunks from an address nothing is to be asked there for a while."""
        self._wrong[wire.address] += 1
        now = self.clock
        if self._wrong[wire.address] >= ATTEMPTS and now >= self._banned.get(wire.address, 0.0):
            self._banned[wire.address] = now + BAN_S

    def _check_ban(self, wire: SwarmWire) -> None:
        assert self.clock >= self._banned.get(wire.address, 0.0), f"{self.name} asks {wire.holder.name}, which lies"

    def _quiet_s(self) -> float:
        """For how long this process has got nothing, without the time in which it stood still."""
        since, slept = self._quiet_since
        return self.network.now - since - (self.slept_s - slept)

    def _check_patience(self, fetch: Fetch) -> None:
        """It waits no longer than it may, and less where there is a newer version."""
        quiet_s = self.network.now - self.network.moved[fetch.manifest.content]
        stood_still = sum(pause.seconds for pause in self.network.scenario.pauses)
        most = self.network.scenario.no_progress_s + stood_still + LATE_S
        if self._wanted is not None:
            most = min(most, RETRY_S + stood_still + LATE_S)
        assert quiet_s <= most, f"{self.name}: {fetch.manifest.title}: nobody has got anything for {quiet_s:.0f} s"

    def has(self, version: Version) -> bool:
        """Whether its process has this version, or a newer one."""
        return self.alive and bool(self.versions) and self.versions[-1] >= version

    def known(self) -> tuple[str, ...]:
        """The addresses of the readers that this one has been told of."""
        return () if self.client is None else self.client.peers

    def doing(self) -> str:
        """What it is at, for a person."""
        fetch = self._fetch
        had = f"has had {self.versions[-3:]}"
        return had if fetch is None else f"{had}, fetches {fetch.manifest.title}: {len(fetch.held.order)} chunks there"
