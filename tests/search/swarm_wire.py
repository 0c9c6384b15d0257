"""One simulated connection between a reader and a holder of weights.

What is sent arrives in order. While the two hosts are cut off from each other nothing does; after DEAD_LINK_S the
system gives the connection up. A chunk goes in pieces, between which others share the sender's bandwidth. Each piece is
read as it is sent, and written as it comes: what is written over in between goes out torn.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING

from distflow.comm.curve import DEAD_LINK_MS
from distflow.weights.swarm.fetch_actions import ChunkLink, Landing
from distflow.weights.swarm.serve_core import MOST_WAITING, SendChunk, SendFrame, ServedReader
from distflow.weights.swarm_messages import ChunkAsk, Says, pack, read_ask, read_counts, read_indices, read_peers
from tests.search.swarm_memory import PIECES, HeldSegment, part

if TYPE_CHECKING:
    # They make it: at run time the import goes the other way.
    from tests.search.swarm_hosts import SwarmHost
    from tests.search.swarm_readers import ReaderHost

DEAD_LINK_S = DEAD_LINK_MS / 1000
KEEPALIVE_S = 25.0
"""After so long the system notices that a host is gone to which nothing is sent."""


class SwarmWire(ChunkLink):
    """A connection of `reader` to `holder`, as the reader's core sees it, and what is at its two ends."""

    def __init__(
        self, number: int, reader: ReaderHost, holder: SwarmHost, served: ServedReader[HeldSegment], address: str
    ) -> None:
        super().__init__(number, address, reader.clock)
        assert reader.client is not None, "it has connected"
        self.client = reader.client
        self.served = served
        self.reader = reader
        self.holder = holder
        self.open = True
        """At the reader's end."""
        self.serving = True
        """At the holder's end."""
        self._network = reader.network
        self._arrives = {True: 0.0, False: 0.0}
        self._asks: deque[ChunkAsk] = deque()
        self._out: Iterator[SendFrame | SendChunk[HeldSegment]] | None = None
        self._busy = self._woken = self._hung_up = False
        self._landing: Landing | None = None

    # -- at the reader's end
    def ask(self, ask: ChunkAsk) -> None:
        """Send a request."""
        if self.open and not self._hung_up:
            self._carry(partial(self._asked, pack(ask)), to_reader=False)

    def hang_up(self) -> None:
        """The reader ends it. What comes before its thread has found out is received still."""
        if self.open and not self._hung_up:
            self._hung_up = True
            self.reader.after(self._network.delay(), partial(self.reader.lost, self))
            self._carry(self._left, to_reader=False)

    def _heard(self, what: SendFrame) -> None:
        reader = self.reader
        self.heard_at = reader.clock
        if what.says is Says.PEERS:
            reader.met(self, read_peers(what.payload))
        elif what.says is Says.COMING:
            reader.coming(self, what.content, read_counts(what.payload))
        else:
            reader.heard(self, what.says, what.content, what.chunk, read_indices(what.payload))

    def _piece(self, what: SendChunk[HeldSegment], number: int, data: bytes, nbytes: int) -> None:
        """A piece of a chunk has come."""
        reader, chunk = self.reader, what.chunk
        self.heard_at = reader.clock
        if number == 0:
            self._landing = reader.landing(self, what.held.manifest.content, chunk, what.held.manifest.size_of(chunk))
        landing = self._landing
        if landing is None:
            return
        if landing.trusted:
            self.received += nbytes
        landing.data[part(number)] = data
        if number == PIECES - 1:
            right = self.judge(landing, what.held.manifest.size_of(chunk))
            reader.landed(self, what.held.manifest.content, chunk, right=right)

    # -- at the holder's end
    def wake(self) -> None:
        """There may be something to tell the reader."""
        self._woken = True
        self._work()

    def _asked(self, message: bytes) -> None:
        assert len(self._asks) <= MOST_WAITING, f"{self.reader.name} has {len(self._asks)} requests open at a holder"
        self._asks.append(read_ask(message[4:]))
        self._work()

    def _work(self) -> None:
        while self.serving and not self._busy:
            if self._out is None:
                self._out = self._next()
            if self._out is None:
                return
            what = next(self._out, None)
            if what is None:
                self._out = None
            elif isinstance(what, SendChunk):
                self._busy = True
                self.holder.on_read(what.held)
                self._send(what, 0)
            else:
                self._carry(partial(self._heard, what), to_reader=True)

    def _next(self) -> Iterator[SendFrame | SendChunk[HeldSegment]] | None:
        if self._asks:
            return chain(self.served.answer(self._asks.popleft()), self.served.news())
        woken, self._woken = self._woken, False
        return self.served.news() if woken else None

    def _send(self, what: SendChunk[HeldSegment], number: int) -> None:
        nbytes = what.held.manifest.size_of(what.chunk) * (number + 1) // PIECES
        nbytes -= what.held.manifest.size_of(what.chunk) * number // PIECES
        self.holder.after(self.holder.occupy(nbytes), partial(self._sent, what, number, nbytes))

    def _sent(self, what: SendChunk[HeldSegment], number: int, nbytes: int) -> None:
        if not self.serving:
            return
        data, last = bytes(what.held.segment.data[what.chunk][part(number)]), number == PIECES - 1
        self._carry(
            partial(self._piece, what, number, self.holder.spoilt(data) if last else data, nbytes), to_reader=True
        )
        if not last:
            self._send(what, number + 1)
            return
        self.holder.has_sent(self, what)
        self._busy = False
        self._work()

    def _left(self) -> None:
        self.serving = False
        self.holder.left(self)

    # -- between them
    def end_at(self, host: SwarmHost) -> None:
        """The process at one end is no more."""
        self.open = self.open and host is not self.reader
        self.serving = self.serving and host is not self.holder

    def lose(self) -> None:
        """It ends at both ends, each as soon as its process looks."""
        if self.open:
            self.open = False
            self.reader.after(0.0, partial(self.reader.lost, self))
        if self.serving:
            self.serving = False
            self.holder.after(0.0, partial(self.holder.left, self))

    def _carry(self, hear: Callable[[], None], *, to_reader: bool) -> None:
        """Bring something to the other end."""
        network, receiver = self._network, self.reader if to_reader else self.holder
        healed = network.healed_at(self.reader.number, self.holder.number)
        if healed > network.now + DEAD_LINK_S or not receiver.up:
            network.after(DEAD_LINK_S, self.lose)
            return
        at = max(network.now + network.delay(), healed, self._arrives[to_reader])
        self._arrives[to_reader] = at
        network.at(at, partial(receiver.when_awake, partial(self._arrived, hear, to_reader=to_reader)))

    def _arrived(self, hear: Callable[[], None], *, to_reader: bool) -> None:
        if self.open if to_reader else self.serving:
            hear()
