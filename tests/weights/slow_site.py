"""Readers at a site that a slow link joins with the publisher's, in virtual time: the cores that run in processes.

The publisher sends on every connection what was asked there, in order, as its threads do; connections with something to
send share the link. Between the readers everything arrives at once.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from distflow.weights.manifest import CHUNK_BYTES
from distflow.weights.swarm.chunk_plan import ChunkDealer, ChunkPlan
from distflow.weights.swarm.patience import Patience

STEP_S = 0.05
TICK_S = 0.1
CONNECTIONS = 4
"""Of each reader to the publisher."""
HEADER_BYTES = 45


@dataclass
class Line:
    """A connection to the publisher."""

    asks: deque[tuple[float, str, int]] = field(default_factory=deque)
    """When it arrives, what, and chunk or count."""
    to_send: deque[int] = field(default_factory=deque)
    left: float = 0.0
    """Bytes of the first of them that have not been sent."""
    arriving: deque[tuple[float, str, tuple[int, ...], float]] = field(default_factory=deque)
    """When, what, chunks, and bytes of a chunk."""


class FarReader:
    """One reader; it fetches from `start` on."""

    def __init__(self, number: int, site: SlowSite, start: float) -> None:
        self.name = f"reader {number}"
        self.number = number
        self.start = start
        self.running = True
        """Neither killed nor stopped."""
        self.alive = True
        self.received = 0.0
        self.plan = ChunkPlan(site.chunks, start=7 * number)
        self.right: list[int] = []
        self.lines = [Line() for _ in range(CONNECTIONS)]
        self.patience = Patience(self.name, 0, start)
        self.told: dict[str, int] = {}
        self.heard_of: dict[int, tuple[int, dict[str, int]]] = {}
        self.done_at: float | None = None
        self._tick_at = start
        for line in range(CONNECTIONS):
            self.plan.join(line, seed=True)

    def begin(self, site: SlowSite) -> None:
        """Connect to the neighbours in the ring."""
        for other in site.neighbours(self):
            self.plan.join(CONNECTIONS + other.number, seed=False)
            self.heard_of[other.number] = (0, {})

    def lose(self, other: FarReader) -> None:
        """A reader was killed: the connection to it ends, and the publisher says who is left."""
        if self.heard_of.pop(other.number, None) is not None:
            self.plan.leave(CONNECTIONS + other.number)
        self.plan.urge(again=False)

    def turn(self, site: SlowSite) -> None:
        """Take what has arrived, look after the fetch, and ask."""
        for number, line in enumerate(self.lines):
            while line.arriving and line.arriving[0][0] <= site.now:
                _, what, chunks, size = line.arriving.popleft()
                self._take(number, what, chunks, size)
        for number, (had, counts) in list(self.heard_of.items()):
            other = site.readers[number]
            self.plan.offers(CONNECTIONS + number, other.right[had:])
            if other.told != counts:
                self.patience.heard(other.told, site.now)
            self.heard_of[number] = (len(other.right), other.told)
        if site.now >= self._tick_at:
            self._tick_at = site.now + TICK_S
            self._look_after(site.now)
            self._leave_stuck(site)
        self._ask(site)
        if self.plan.done and self.done_at is None:
            self.done_at = site.now

    def _take(self, line: int, what: str, chunks: tuple[int, ...], size: float) -> None:
        if what == "bytes":
            if self.plan.begin(line, chunks[0]):
                self.received += size
        elif what == "chunk":
            if self.plan.begin(line, chunks[0]):
                self.plan.right(line, chunks[0])
                self.right.append(chunks[0])
        elif what == "given":
            self.plan.given(line, chunks)
        elif what == "dealt":
            self.plan.all_dealt(line)
        else:
            self.plan.refused(line, chunks[0], gone=False)

    def _look_after(self, now: float) -> None:
        self.patience.received(int(self.received), now)
        if (told := self.patience.tells(now)) is not None:
            self.told = told
        if not self.plan.done and (urge := self.patience.urges(now)) is not None:
            self.plan.urge(again=urge == "again")

    def _leave_stuck(self, site: SlowSite) -> None:
        """End connections to readers that owe chunks and stand still; nothing answers there."""
        if site.now - self.patience.moved_at <= self.patience.wait_s:
            return
        for number in [number for number in self.heard_of if self.plan.waits_for(CONNECTIONS + number)]:
            assert not site.readers[number].running
            del self.heard_of[number]
            self.plan.leave(CONNECTIONS + number)

    def _ask(self, site: SlowSite) -> None:
        for link in list(self.plan.connections):
            want = self.plan.next(link)
            if want is None:
                continue
            if link < CONNECTIONS:
                asks = [(want.what, chunk) for chunk in want.chunks] or [("deal", want.deals)]
                self.lines[link].asks.extend((site.now + site.delay_s, *ask) for ask in asks)
                continue
            other = site.readers[link - CONNECTIONS]
            for chunk in want.chunks if other.running else ():
                assert self.plan.begin(link, chunk)
                self.plan.right(link, chunk)
                self.right.append(chunk)
                self.received += CHUNK_BYTES


class SlowSite:
    """A publisher, a link of `rate` bytes a second on which everything takes `delay_s`, and readers behind it."""

    def __init__(self, chunks: int, rate: float, delay_s: float, starts: list[float]) -> None:
        self.chunks = chunks
        self.rate = rate
        self.delay_s = delay_s
        self.now = 0.0
        self.crossed = 0.0
        self.dealer = ChunkDealer(chunks)
        self.readers: list[FarReader] = []
        for number, start in enumerate(starts):
            self.readers.append(FarReader(number, self, start))
        for reader in self.readers:
            reader.begin(self)

    @property
    def size(self) -> int:
        """Bytes of the version."""
        return self.chunks * CHUNK_BYTES

    @property
    def waiting(self) -> list[FarReader]:
        return [reader for reader in self.readers if reader.running and not reader.plan.done]

    def neighbours(self, reader: FarReader) -> list[FarReader]:
        """1, 2, 4 … places after it."""
        count = len(self.readers)
        steps = [1 << power for power in range(count.bit_length()) if 1 << power < count]
        return [self.readers[(reader.number + step) % count] for step in steps]

    def kill(self, reader: FarReader) -> None:
        reader.alive = reader.running = False
        for other in self.readers:
            if other is not reader:
                other.lose(reader)

    def run(self, until_s: float) -> None:
        """Until all that run have the version."""
        while self.waiting and self.now < until_s:
            self.turn()

    def turn(self) -> None:
        self.now += STEP_S
        there = [reader for reader in self.readers if reader.alive and reader.start <= self.now]
        self._send([(reader, line) for reader in there for line in reader.lines])
        for reader in there:
            if reader.running:
                reader.turn(self)

    def _send(self, lines: list[tuple[FarReader, Line]]) -> None:
        room = self.rate * STEP_S
        while room > 0.5:
            for reader, line in lines:
                self._answer(reader, line)
            # A reader that is stopped takes nothing: its buffers are full.
            busy = [(reader, line) for reader, line in lines if line.to_send and reader.running]
            if not busy:
                return
            share = room / len(busy)
            for _, line in busy:
                sent = min(share, line.left)
                line.left -= sent
                room -= sent
                self.crossed += sent
                chunk, at = line.to_send[0], self.now + self.delay_s
                line.arriving.append((at, "bytes", (chunk,), sent))
                if line.left <= 0:
                    line.arriving.append((at, "chunk", (chunk,), 0.0))
                    line.to_send.popleft()
                    line.left = CHUNK_BYTES

    def _answer(self, reader: FarReader, line: Line) -> None:
        """Take requests as long as there is nothing to send."""
        while not line.to_send and line.asks and line.asks[0][0] <= self.now:
            _, what, number = line.asks.popleft()
            at = self.now + self.delay_s
            self.crossed += HEADER_BYTES
            if what == "deal":
                dealt = self.dealer.deal(reader.name, "far", number)
                line.arriving.append((at, "given", tuple(dealt), 0.0))
                if len(dealt) < number:
                    line.arriving.append((at, "dealt", (), 0.0))
                line.to_send.extend(dealt)
            elif self.dealer.gives(reader.name, "far", number, self._present(), again=what == "again"):
                line.to_send.append(number)
            else:
                line.arriving.append((at, "elsewhere", (number,), 0.0))
            line.left = CHUNK_BYTES

    def _present(self) -> set[str]:
        return {reader.name for reader in self.readers if reader.alive and reader.start <= self.now}
