"""A reader's connections to the publisher and to other readers, and the fetch of a version over them."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass

from distflow.comm.curve import KEY_HINT
from distflow.errors import ChecksumError, NoProgressError, Overtaken, ProtocolError
from distflow.log import logger
from distflow.weights.manifest import CHUNK_BYTES, Manifest, coding_threads
from distflow.weights.swarm.chunk_plan import ChunkPlan, ring_peers
from distflow.weights.swarm.link import Landing, SwarmLink
from distflow.weights.swarm.patience import Patience
from distflow.weights.swarm.sockets import Refused
from distflow.weights.swarm_messages import ChunkAsk, Content, Opening, Says, SwarmPlace

CONNECTIONS = 4
"""At least, to the publisher, and to all other readers together: each has a thread that receives and hashes."""
RECONNECT_S = 0.2
BAN_S = 10.0
"""After wrong chunks a reader is asked nothing for this long, the next time for twice as long, and so on: they may have
come of a version that it was writing over."""
ATTEMPTS = 3
"""How often one chunk of the publisher, or chunks of one reader, may arrive with wrong bytes."""
TICK_S = 0.1
CLOSE_S = 5.0

log = logger(__name__)


@dataclass(frozen=True, slots=True)
class FetchRules:
    """When a fetch ends without success."""

    no_progress_s: float
    closed: Callable[[], bool]
    superseded: Callable[[], bool]


@dataclass(slots=True)
class _Job:
    """The fetch under way."""

    manifest: Manifest
    memory: memoryview
    arrived: Callable[[int], None]
    plan: ChunkPlan
    patience: Patience
    error: Exception | None = None


@dataclass(slots=True)
class _Trouble:
    """What is wrong with an address."""

    retry_at: float = 0.0
    banned: int = 0
    """How often it has sent wrong chunks."""
    banned_until: float = 0.0

    def ban(self, now: float) -> None:
        """Ask nothing there for a while, each time for longer; of several connections the first one counts."""
        if now >= self.banned_until:
            self.banned_until = self.retry_at = now + BAN_S * 2**self.banned
            self.banned += 1


class SwarmClient:
    """Fetches from the swarm around one publisher; `own`: where this reader stands, and serves what it has fetched.

    One thread fetches at a time. Connections stay open between fetches: so the publisher knows which readers there are.
    """

    def __init__(self, place: SwarmPlace, own: Opening) -> None:
        self.place = place
        self._opening = own
        self._own = own.serves
        self._condition = threading.Condition()
        self._links: dict[int, SwarmLink] = {}
        self._numbers = itertools.count()
        self._connecting: list[str] = []
        """Readers that are being connected to, on threads: one that stands still does not even answer."""
        self._peers: tuple[str, ...] = ()
        self._received = 0
        """Bytes of chunks that came on connections that are over."""
        self._trouble: dict[str, _Trouble] = {}
        self._refused = False
        self._job: _Job | None = None
        self._closed = False

    def fetch(
        self,
        manifest: Manifest,
        memory: memoryview,
        arrived: Callable[[int], None],
        coming: Callable[[Mapping[str, int]], None],
        rules: FetchRules,
        there: Collection[int] = (),
    ) -> None:
        """Fill `memory` with the version; `arrived` is called for each chunk that is there and right, but for those
        that are `there` before, and `coming` for what to tell readers that wait for chunks that are on their way here.

        Raises Overtaken, ChecksumError, NoProgressError; nothing is written to `memory` any more then.
        """
        start = hash(self._own) % max(manifest.chunks, 1)
        plan = ChunkPlan(manifest.chunks, start=start, there=there, deals=self._own != "")
        with self._condition:
            job = _Job(manifest, memory, arrived, plan, Patience(self._own, self._count(), time.monotonic()))
            self._job = job
            # A fetch that ended early has hung up itself: only connections that fail wait before the next attempt.
            self._trouble.pop(self.place.address, None)
            links = list(self._links.values())
        try:
            for link in links:
                self._join(link)
            while not plan.done:
                self._connect(job)
                with self._condition:
                    self._condition.wait_for(lambda: plan.done or job.error is not None, TICK_S)
                if not plan.done:
                    self._look_after(job, coming, rules)
        finally:
            with self._condition:
                self._job = None
            if not plan.done:
                self._hang_up()

    def tell_made(self, manifest: Manifest) -> None:
        """Tell the publisher that readers can get all of a version here, though it has not given it to this one."""
        with self._condition:
            link = next((link for link in self._links.values() if link.seed), None)
        if link is not None:
            link.ask(ChunkAsk("made", manifest.model, *manifest.version))

    def close(self) -> None:
        """Hang up everywhere."""
        with self._condition:
            self._closed = True
        self._hang_up()

    def _hang_up(self) -> None:
        with self._condition:
            links = list(self._links.values())
        for link in links:
            link.close()
        for link in links:
            link.thread.join(CLOSE_S)
            if link.thread.is_alive():
                log.warning("%s did not stop within %g s", link.thread.name, CLOSE_S)

    # -- on the fetching thread

    def _connect(self, job: _Job) -> None:
        """Make the connections that are missing."""
        now = time.monotonic()
        with self._condition:
            there = [*self._connecting, *(link.address for link in self._links.values())]
            good = [peer for peer in self._peers if peer != self._own and self._usable(peer, now)]
        peers = ring_peers(self._own, good)
        most = max(CONNECTIONS, coding_threads())
        each = max(1, most // max(1, len(peers)))
        for address, wanted in ((self.place.address, most), *((peer, each) for peer in peers)):
            for _ in range(wanted - there.count(address)):
                if job.plan.done or self._closed or not self._usable(address, now):
                    break
                if address == self.place.address:
                    self._connect_to(address)
                else:
                    with self._condition:
                        self._connecting.append(address)
                    threading.Thread(
                        target=self._connect_apart, args=(address,), name="swarm-meet", daemon=True
                    ).start()

    def _connect_apart(self, address: str) -> None:
        try:
            self._connect_to(address)
        finally:
            with self._condition:
                self._connecting.remove(address)

    def _usable(self, address: str, now: float) -> bool:
        trouble = self._trouble.get(address)
        return trouble is None or now >= trouble.retry_at

    def _connect_to(self, address: str) -> None:
        try:
            link = SwarmLink(next(self._numbers), address, self.place, self._opening, self)
        except OSError as error:
            if isinstance(error, Refused) and address == self.place.address and not self._refused:
                # Not final: a proxy between the hosts may accept connections for a server that is not back yet.
                self._refused = True
                log.warning("%s refused the connection for weight transfer — %s", address, KEY_HINT)
            self._trouble.setdefault(address, _Trouble()).retry_at = time.monotonic() + RECONNECT_S
            return
        self._join(link)

    def _join(self, link: SwarmLink) -> None:
        """Use a connection for the fetch under way, or keep it for the next."""
        with self._condition:
            if self._closed:
                link.close()
            if link.over or self._closed:
                return
            job = self._job
            self._links[link.number] = link
            if job is not None:
                job.plan.join(link.number, seed=link.seed)
        if job is None:
            return
        if not link.seed:
            link.ask(ChunkAsk("follow", job.manifest.model, *job.manifest.version, base=job.manifest.base))
        self._pump(job, [link])

    def _pump(self, job: _Job, links: list[SwarmLink]) -> None:
        """Ask for what can be asked for now."""
        for link in links:
            with self._condition:
                want = job.plan.next(link.number) if link.number in job.plan.connections and self._job is job else None
            if want is not None:
                manifest = job.manifest
                version = manifest.version
                link.ask(ChunkAsk(want.what, manifest.model, *version, want.chunks, want.deals, manifest.base))

    def _pump_all(self, job: _Job) -> None:
        with self._condition:
            links = list(self._links.values())
        self._pump(job, links)

    def _count(self) -> int:
        """Bytes of chunks received so far; with the lock."""
        return self._received + sum(link.received for link in self._links.values())

    def _look_after(self, job: _Job, coming: Callable[[Mapping[str, int]], None], rules: FetchRules) -> None:
        """Raise if waiting longer is pointless; replace connections that are stuck; ask elsewhere; tell others."""
        title, now, patience = job.manifest.title, time.monotonic(), job.patience
        with self._condition:
            patience.received(self._count(), now)
            told = patience.tells(now)
            owing = [link for link in self._links.values() if job.plan.waits_for(link.number)]
        if told is not None and self._own:
            coming(told)
        silence = patience.silence_s(now)
        if job.error is not None:
            raise job.error
        if rules.closed():
            raise Overtaken(f"{title}: the reader was closed")
        if patience.stalled(now) and rules.superseded():
            raise Overtaken(f"{title}: no chunk from {self.place.address}, and there is a newer version")
        if silence > rules.no_progress_s:
            why = KEY_HINT if self._refused else "is that host up and its port reachable?"
            raise NoProgressError(
                f"{title} from {self.place.address}: no chunk for {silence:.0f} s, "
                f"{job.plan.arrived} of {job.plan.count} arrived — {why}"
            )
        for link in owing:
            if now - max(link.heard_at, patience.moved_at) > patience.wait_s:
                log.info("%s: nothing comes from %s, connecting anew", title, link.address)
                link.close()
        with self._condition:
            urge = patience.urges(now)
            if urge is not None:
                job.plan.urge(again=urge == "again")
        if urge is not None:
            self._pump_all(job)

    # -- on the connections' threads

    def landing(self, link: SwarmLink, content: Content, chunk: int, size: int) -> Landing | None:
        """Where a chunk goes that begins to arrive."""
        with self._condition:
            job = self._job
            if job is None or content != job.manifest.content or not job.plan.begin(link.number, chunk):
                return None
            trouble = self._trouble.get(link.address)
        start = chunk * CHUNK_BYTES
        if size != min(CHUNK_BYTES, job.manifest.size - start):
            raise ProtocolError(f"chunk {chunk} of {job.manifest.title} in {size} bytes")
        trusted = trouble is None or not trouble.banned
        return Landing(job.memory[start : start + size], job.manifest.digest_of(chunk), trusted)

    def landed(self, link: SwarmLink, content: Content, chunk: int, *, right: bool) -> None:
        """A chunk has arrived."""
        with self._condition:
            job = self._job
            if job is None or job.error is not None or content != job.manifest.content:
                return
            if right:
                job.plan.right(link.number, chunk)
                job.arrived(chunk)
                if job.plan.done:
                    self._condition.notify_all()
            else:
                self._note_wrong(job, link, chunk)
        self._pump(job, [link])

    def _note_wrong(self, job: _Job, link: SwarmLink, chunk: int) -> None:
        what = (
            f"{job.manifest.title}: chunk {chunk} of {job.plan.count} from {link.address} does not have the announced "
            f"digest"
        )
        times = job.plan.wrong(link.number, chunk)
        if times < ATTEMPTS:
            log.warning("%s; requesting it again", what)
        elif link.seed:
            job.error = ChecksumError(f"{what}, {times} times — the link or the publisher's memory is corrupt")
            self._condition.notify_all()
        else:
            log.warning("%s, nor had others from there; fetching from elsewhere", what)
            self._trouble.setdefault(link.address, _Trouble()).ban(time.monotonic())
            link.close()

    def heard(self, link: SwarmLink, says: Says, content: Content, chunk: int, chunks: tuple[int, ...]) -> None:
        """Something about chunks."""
        with self._condition:
            job = self._job
            if job is None or content != job.manifest.content or link.number not in job.plan.connections:
                return
            if says is Says.HAVE:
                job.plan.offers(link.number, chunks)
            elif says is Says.GIVEN:
                job.plan.given(link.number, chunks)
                return
            elif says is Says.DEALT:
                job.plan.all_dealt(link.number)
            elif says is Says.GONE and link.seed:
                job.error = Overtaken(f"{job.manifest.title}: overwritten by a newer version while it was fetched")
                self._condition.notify_all()
            else:
                job.plan.refused(link.number, chunk, gone=says is Says.GONE)
        self._pump(job, [link])

    def coming(self, content: Content, counts: Mapping[str, int]) -> None:
        """Another reader says who has received how much."""
        with self._condition:
            if self._job is not None and content == self._job.manifest.content:
                self._job.patience.heard(counts, time.monotonic())

    def met(self, peers: tuple[str, ...]) -> None:
        """The publisher says which readers there are."""
        with self._condition:
            gone, self._peers = not set(self._peers) <= set(peers), peers
            job = self._job
            if gone and job is not None:
                # What they were given, and nobody else has, the publisher gives to whoever asks.
                job.plan.urge(again=False)
        if gone and job is not None:
            self._pump_all(job)

    def lost(self, link: SwarmLink) -> None:
        """A connection is over."""
        with self._condition:
            link.over = True
            if self._links.pop(link.number, None) is not None:
                self._received += link.received
            trouble = self._trouble.setdefault(link.address, _Trouble())
            trouble.retry_at = max(trouble.retry_at, time.monotonic() + RECONNECT_S)
            job = self._job
            if job is not None:
                job.plan.leave(link.number)
        if job is not None:
            self._pump_all(job)
