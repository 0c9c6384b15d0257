"""What a reader decides while it fetches versions: a state machine without sockets, threads and clocks.

It is told what happens on its connections and what time it is, and returns what to do: connect, ask, hang up, tell the
readers that wait for what is on its way here. `client.py` has the sockets and threads around it, `tests/search/` has
virtual time. Which chunk is asked of whom is for `chunk_plan.py`, how long to wait for `patience.py`.

Wherever `now` is given, it is in seconds, of one clock that never goes back.
"""

from __future__ import annotations

import zlib
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Generic, Literal

from distflow.comm.curve import KEY_HINT
from distflow.errors import ChecksumError, NoProgressError, Overtaken, ProtocolError
from distflow.weights.manifest import Manifest
from distflow.weights.swarm.chunk_plan import ChunkPlan, ring_peers
from distflow.weights.swarm.fetch_actions import Action, Expect, HangUp, L, Landing, Note, SendAsk, WantedVersion
from distflow.weights.swarm.patience import Patience
from distflow.weights.swarm_messages import ChunkAsk, Content, Says

RECONNECT_S = 0.2
BAN_S = 10.0
"""After wrong chunks a reader is asked nothing for this long, the next time for twice as long, and so on: they may have
come of a version that it was writing over."""
STILL_S = 5.0
"""A process that looks after its fetch less often than this was stopped meanwhile."""
BLOCKED_S = 7.0
"""So much longer it takes while it connects to the publisher, which may not answer."""
ATTEMPTS = 3
"""How often in a fetch one chunk of the publisher, or chunks of one reader, may arrive with wrong bytes."""


@dataclass(slots=True)
class _Job:
    """The fetch under way."""

    wanted: WantedVersion
    plan: ChunkPlan
    patience: Patience
    error: Exception | None = None

    @property
    def manifest(self) -> Manifest:
        return self.wanted.manifest


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


class FetchCore(Generic[L]):
    """Fetches of the reader that serves at `own` ("": nowhere) from the swarm around one `publisher`, one at a time.

    It has `connections` to the publisher, and as many to all other readers together, at least one to each of those that
    it fetches from. They stay open between fetches: so the publisher knows which readers there are.
    """

    def __init__(self, publisher: str, own: str, connections: int) -> None:
        self._publisher = publisher
        self._own = own
        self._connections = connections
        self._links: dict[int, L] = {}
        self._connecting: list[str] = []
        self.peers: tuple[str, ...] = ()
        """Where readers serve, as the publisher has said last."""
        self._received = 0
        """Bytes of chunks that came on connections that are over."""
        self._trouble: dict[str, _Trouble] = {}
        self._refused = False
        self._job: _Job | None = None
        self._closed = False
        self._looked_at = 0.0

    @property
    def done(self) -> bool:
        """Whether the fetch under way has everything."""
        return self._job is not None and self._job.plan.done

    @property
    def error(self) -> Exception | None:
        """Why the fetch under way has failed: Overtaken, ChecksumError, NoProgressError."""
        return None if self._job is None or self._job.plan.done else self._job.error

    @property
    def ended(self) -> bool:
        """Whether the fetch under way is over, well or not."""
        return self.done or self.error is not None

    @property
    def links(self) -> list[L]:
        """The connections that are open."""
        return list(self._links.values())

    def begin(self, wanted: WantedVersion, there: Collection[int], now: float) -> list[Action[L]]:
        """Fetch a version; `there`: the chunks of it that are here already."""
        count, self._looked_at = wanted.manifest.chunks, now
        start = zlib.crc32(self._own.encode()) % max(count, 1)
        plan = ChunkPlan(count, start=start, there=there, deals=self._own != "")
        self._job = _Job(wanted, plan, Patience(self._own, self.received, now))
        # A fetch that ended early has hung up itself: only connections that fail wait before the next attempt.
        self._trouble.pop(self._publisher, None)
        return [action for link in self.links for action in self._join(self._job, link)]

    def end(self) -> list[Action[L]]:
        """What comes from now on is for nobody. A fetch that has failed gives up its connections."""
        done, self._job = self.done, None
        return [] if done else self._hang_up()

    def close(self) -> list[Action[L]]:
        """Hang up everywhere, for good."""
        self._closed = True
        return self._hang_up()

    def connect(self, now: float) -> str | None:
        """The address of the next connection to make, of those that are missing; `opened` or `failed` answers it."""
        self._look(now)
        if self._closed or self._job is None or self._job.plan.done:
            return None
        there = [*self._connecting, *(link.address for link in self._links.values())]
        for address, wanted in self._places(now):
            if there.count(address) < wanted and self._usable(address, now):
                self._connecting.append(address)
                return address
        return None

    def opened(self, link: L, now: float) -> list[Action[L]]:
        """A connection is there."""
        self._look(now)
        self._connecting.remove(link.address)
        if link.over:
            return []
        if self._closed or now < self._trouble.get(link.address, _Trouble()).banned_until:
            return [HangUp(link)]
        self._links[link.number] = link
        return [] if self._job is None else self._join(self._job, link)

    def failed(self, address: str, now: float, *, refused: bool) -> list[Action[L]]:
        """A connection could not be made; `refused`: for another token."""
        self._look(now)
        self._connecting.remove(address)
        self._trouble.setdefault(address, _Trouble()).retry_at = now + RECONNECT_S
        if refused and address == self._publisher and not self._refused:
            # Not final: a proxy between the hosts may accept connections for a server that is not back yet.
            self._refused = True
            return [Note(f"{address} refused the connection for weight transfer — {KEY_HINT}")]
        return []

    def lost(self, link: L, now: float) -> list[Action[L]]:
        """A connection is over; nothing more comes on it, and none of its landings is written to."""
        self._look(now)
        link.over = True
        if self._links.pop(link.number, None) is not None:
            self._received += link.received
        trouble = self._trouble.setdefault(link.address, _Trouble())
        trouble.retry_at = max(trouble.retry_at, now + RECONNECT_S)
        if self._job is None:
            return []
        self._job.plan.leave(link.number)
        return self._pump(self._job, self.links)

    def made(self, manifest: Manifest) -> list[Action[L]]:
        """All of a version is here, though the publisher has not given it to this reader: that is told there."""
        link = next((link for link in self._links.values() if link.address == self._publisher), None)
        return [] if link is None else [SendAsk(link, _ask("made", manifest))]

    def stalled(self, now: float) -> bool:
        """Whether nothing has come for so long that a newer version would be taken instead."""
        job = self._job
        if job is None:
            return False
        job.patience.received(self.received, now)
        return job.patience.stalled(now)

    def tick(self, now: float, *, superseded: bool, closed: bool = False) -> list[Action[L]]:
        """Look after the fetch, several times a second: end it if waiting longer is pointless, replace connections that
        are stuck, ask elsewhere.

        `superseded`: there is a newer version; `closed`: nobody waits for this one any more.
        """
        self._look(now)
        job = self._job
        if job is None or job.plan.done:
            return []
        job.patience.received(self.received, now)
        told = job.patience.tells(now)
        out: list[Action[L]] = [] if told is None or not self._own else [Expect(told)]
        job.error = job.error or self._pointless(job, now, superseded=superseded, closed=closed)
        if job.error is None:
            out += [*self._replace(job, now), *self._urge(job, now)]
        return out

    # -- what comes
    def landing(self, link: L, content: Content, chunk: int, size: int) -> Landing | None:
        """Where a chunk goes that begins to arrive; None: nobody wants it. Raises ProtocolError."""
        job = self._job
        if job is None or content != job.manifest.content or not job.plan.begin(link.number, chunk):
            return None
        if size != job.manifest.size_of(chunk):
            raise ProtocolError(f"chunk {chunk} of {job.manifest.title} in {size} bytes")
        trouble = self._trouble.get(link.address)
        trusted = trouble is None or not trouble.banned
        return Landing(job.wanted.into(chunk), job.manifest.digest_of(chunk), trusted)

    def landed(self, link: L, content: Content, chunk: int, now: float, *, right: bool) -> list[Action[L]]:
        """A chunk with a landing has arrived."""
        self._look(now)
        job = self._job
        if job is None or job.error is not None or content != job.manifest.content:
            return []
        if right:
            job.plan.right(link.number, chunk)
            job.wanted.arrived(chunk)
            return self._pump(job, [link])
        return self._wrong(job, link, chunk, now)

    def heard(self, link: L, says: Says, content: Content, chunk: int, chunks: tuple[int, ...]) -> list[Action[L]]:
        """Something about chunks."""
        job = self._job
        if job is None or content != job.manifest.content or link.number not in job.plan.connections:
            return []
        if says is Says.GIVEN:
            job.plan.given(link.number, chunks)
            return []
        if says is Says.HAVE:
            job.plan.offers(link.number, chunks)
        elif says is Says.DEALT:
            job.plan.all_dealt(link.number)
        elif says is Says.GONE and link.address == self._publisher:
            job.error = Overtaken(f"{job.manifest.title}: overwritten by a newer version while it was fetched")
        else:
            job.plan.refused(link.number, chunk, gone=says is Says.GONE)
        return self._pump(job, [link])

    def coming(self, content: Content, counts: Mapping[str, int], now: float) -> None:
        """Another reader says who has received how many bytes."""
        self._look(now)
        if self._job is not None and content == self._job.manifest.content:
            self._job.patience.heard(counts, now)

    def met(self, peers: tuple[str, ...]) -> list[Action[L]]:
        """The publisher says which readers there are."""
        gone, self.peers = not set(self.peers) <= set(peers), peers
        if not gone or self._job is None:
            return []
        # What they were given, and nobody else has, the publisher gives to whoever asks.
        self._job.plan.urge(again=False)
        return self._pump(self._job, self.links)

    # -- details
    def _look(self, now: float) -> None:
        """Something happens, or it is time to look. If nothing did for long, the process stood still meanwhile."""
        still_s, self._looked_at = now - self._looked_at, now
        most = STILL_S + (BLOCKED_S if self._publisher in self._connecting else 0.0)
        if self._job is not None and still_s > most:
            self._job.patience.stood_still(still_s)

    def _places(self, now: float) -> Iterator[tuple[str, int]]:
        """Where to be connected to, and how often."""
        yield self._publisher, self._connections
        peers = ring_peers(self._own, [peer for peer in self.peers if peer != self._own and self._usable(peer, now)])
        for peer in peers:
            yield peer, max(1, self._connections // len(peers))

    def _usable(self, address: str, now: float) -> bool:
        trouble = self._trouble.get(address)
        return trouble is None or now >= trouble.retry_at

    def _join(self, job: _Job, link: L) -> list[Action[L]]:
        """Use a connection for the fetch under way."""
        seed = link.address == self._publisher
        job.plan.join(link.number, seed=seed, holder=link.address)
        return [*([] if seed else [SendAsk(link, _ask("follow", job.manifest))]), *self._pump(job, [link])]

    def _pump(self, job: _Job, links: Iterable[L]) -> list[Action[L]]:
        """Ask for what can be asked for now."""
        out: list[Action[L]] = []
        for link in links:
            want = job.plan.next(link.number) if link.number in job.plan.connections else None
            if want is not None:
                out.append(SendAsk(link, _ask(want.what, job.manifest, want.chunks, want.deals)))
        return out

    def _hang_up(self) -> list[Action[L]]:
        return [HangUp(link) for link in self._links.values()]

    @property
    def received(self) -> int:
        """Bytes of chunks received so far, on all connections."""
        return self._received + sum(link.received for link in self._links.values())

    def _pointless(self, job: _Job, now: float, *, superseded: bool, closed: bool) -> Exception | None:
        """Why waiting longer is."""
        title, silence = job.manifest.title, job.patience.silence_s(now)
        if closed:
            return Overtaken(f"{title}: the reader was closed")
        if job.patience.stalled(now) and superseded:
            return Overtaken(f"{title}: no chunk from {self._publisher}, and there is a newer version")
        if silence > job.wanted.no_progress_s:
            why = KEY_HINT if self._refused else "is that host up and its port reachable?"
            return NoProgressError(
                f"{title} from {self._publisher}: no chunk for {silence:.0f} s, "
                f"{job.plan.arrived} of {job.plan.count} arrived — {why}"
            )
        return None

    def _replace(self, job: _Job, now: float) -> Iterator[Action[L]]:
        """Hang up on those that owe chunks and send nothing."""
        patience = job.patience
        for link in self._links.values():
            quiet_s = now - max(link.heard_at, patience.moved_at)
            if job.plan.waits_for(link.number) and quiet_s > patience.wait_s:
                yield Note(f"{job.manifest.title}: nothing comes from {link.address}, connecting anew", warns=False)
                yield from self._hang_up_on(job, link)

    def _hang_up_on(self, job: _Job, link: L) -> list[Action[L]]:
        job.plan.close(link.number)
        return [HangUp(link)]

    def _urge(self, job: _Job, now: float) -> list[Action[L]]:
        urge = job.patience.urges(now)
        if urge is None:
            return []
        job.plan.urge(again=urge == "again")
        return self._pump(job, self.links)

    def _wrong(self, job: _Job, link: L, chunk: int, now: float) -> list[Action[L]]:
        what = (
            f"{job.manifest.title}: chunk {chunk} of {job.plan.count} from {link.address} does not have the announced "
            f"digest"
        )
        times = job.plan.wrong(link.number, chunk)
        if times < ATTEMPTS:
            return [Note(f"{what}; requesting it again"), *self._pump(job, self.links)]
        if link.address == self._publisher:
            job.error = ChecksumError(f"{what}, {times} times — the link or the publisher's memory is corrupt")
            return []
        self._trouble.setdefault(link.address, _Trouble()).ban(now)
        note = Note(f"{what}, nor had others from there; fetching from elsewhere")
        same = [one for one in self._links.values() if one.address == link.address]
        return [note, *(action for one in same for action in self._hang_up_on(job, one))]


def _ask(
    what: Literal["deal", "want", "again", "follow", "made"],
    manifest: Manifest,
    chunks: tuple[int, ...] = (),
    deals: int = 0,
) -> ChunkAsk:
    return ChunkAsk(what, manifest.model, *manifest.version, chunks, deals, manifest.base)
