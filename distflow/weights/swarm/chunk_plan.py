"""Which chunk from whom: the reader's side (`ChunkPlan`) and the publisher's (`ChunkDealer`). No socket, no clock.

The publisher gives each chunk to one reader of a site; the others get it from there, and from everyone who has got it
so. Thus it sends the model about once to each site, however many read there. Whoever lacks a chunk that no present
reader of its site was given, or that does not come, asks the publisher for it. A reader that passes nothing on is dealt
nothing, so that nobody waits for it: it asks for chunks by number, the publisher or the readers that were given them.

What was dealt to a reader is said before it comes, so that it is not asked for once more meanwhile.

Example, two readers of four chunks: A is dealt 0 and 1, B 2 and 3; A then hears that B has 2 and asks B for it, and so
on. If B is lost before A has 3, A asks the publisher, which sees that B is gone and gives 3 to A.
"""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Collection, Iterable, Set
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

WINDOW = 8
"""Most chunks that a reader has requested on one connection and not received."""


class Want(NamedTuple):
    """What to ask on a connection now, as in `swarm_messages.ChunkAsk`."""

    what: Literal["deal", "want", "again"]
    chunks: tuple[int, ...] = ()
    deals: int = 0


@dataclass(slots=True)
class _Source:
    """A connection to a holder."""

    seed: bool
    """Whether it is to the publisher, which has all chunks and deals them."""
    holder: str
    """What the connections to the same holder have in common."""
    closing: bool = False
    doubted: set[int] = field(default_factory=set)
    """What it says it has, and the holder has sent wrong bytes of."""
    asked: set[int] = field(default_factory=set)
    deals: int = 0
    """Chunks that were asked for without saying which; the publisher has not said either."""
    has: set[int] = field(default_factory=set)
    queue: deque[int] = field(default_factory=deque)
    """What it has and was not asked for, in the order heard of; may contain what came from elsewhere since."""

    @property
    def under_way(self) -> int:
        return len(self.asked) + self.deals


class ChunkPlan:
    """The chunks of one version at one reader: each is open, asked for on one connection, or arrived.

    Connections are named by numbers. After each event, `next` of that connection says what to ask there; after `leave`
    and `urge`, all of them may have something. Readers with different `start`s ask for missing chunks in other orders,
    so that each gets some and the others get them there. `there`: what has arrived before. Without `deals` none are
    dealt to this reader.
    """

    def __init__(
        self, count: int, window: int = WINDOW, start: int = 0, there: Collection[int] = (), *, deals: bool = True
    ) -> None:
        self.count = count
        self.arrived = len(there)
        self._window = window
        self._start = start
        self._open = set(range(count)).difference(there)
        self._sources: dict[int, _Source] = {}
        self._wrong: Counter[tuple[str, int | str]] = Counter()
        self._doubts: defaultdict[str, set[int]] = defaultdict(set)
        """Chunks that have come wrong, by the reader that has sent them."""
        self._all_dealt = False
        self._missing: deque[int] = deque()
        """What to ask the publisher for by number, since it was last urged; `_urge` says how."""
        self._urge: Literal["want", "again"] = "want"
        if there or not deals:
            # What is left is asked for by number: most of what the publisher would deal is there.
            self._all_dealt = True
            self.urge(again=False)

    @property
    def done(self) -> bool:
        """Whether all have arrived."""
        return self.arrived == self.count

    @property
    def connections(self) -> Set[int]:
        """Those that take part."""
        return self._sources.keys()

    def waits_for(self, link: int) -> bool:
        """Whether something was asked on this connection and has not come."""
        return link in self._sources and self._sources[link].under_way > 0

    def join(self, link: int, *, seed: bool, holder: str = "") -> None:
        """A connection to the publisher, or to another reader, is there; `holder`: its name, if it may have several."""
        self._sources[link] = _Source(seed, holder or str(link))

    def close(self, link: int) -> None:
        """Ask nothing more on a connection; what was asked for may come until it is gone."""
        self._sources[link].closing = True

    def leave(self, link: int) -> None:
        """A connection is gone, and nothing comes on it any more."""
        source = self._sources.pop(link, None)
        if source is not None:
            self._reopen(source.asked)
            # The publisher will notice as well that a reader is lost, and give its chunks to others.
            self.urge(again=False)

    def offers(self, link: int, chunks: Iterable[int]) -> None:
        """The reader at the other end has got these."""
        source = self._sources[link]
        doubts = self._doubts[source.holder]
        told = [chunk for chunk in chunks if chunk < self.count and chunk not in source.has]
        new = [chunk for chunk in told if chunk not in doubts]
        source.doubted.update(chunk for chunk in told if chunk in doubts)
        source.has.update(new)
        source.queue.extend(new)

    def given(self, link: int, chunks: Iterable[int]) -> None:
        """The publisher has dealt these, which come next: nobody else is asked for them."""
        source = self._sources[link]
        dealt = [chunk for chunk in chunks if chunk < self.count]
        source.deals = max(0, source.deals - len(dealt))
        source.asked.update(self._open.intersection(dealt))
        self._open.difference_update(dealt)

    def all_dealt(self, link: int) -> None:
        """The publisher has nothing left to deal; of what was asked for no more will be given than has been."""
        self._sources[link].deals = 0
        self._all_dealt = True

    def refused(self, link: int, chunk: int, *, gone: bool) -> None:
        """A chunk that was asked for will not come.

        `gone`: the other end does not have the version (any more); else another reader has this chunk.
        """
        source = self._sources[link]
        source.has.discard(chunk)
        if gone and not source.seed:
            source.has.clear()
            source.queue.clear()
        if chunk in source.asked:
            source.asked.remove(chunk)
            self._reopen([chunk])

    def urge(self, *, again: bool) -> None:
        """Nothing comes: ask the publisher for what no reader has. `again`: whoever it has given it to. Without it,
        readers are asked for what has come wrong of them, too.
        """
        if again and not any(source.seed for source in self._sources.values()):
            self._doubts.clear()
            for source in self._sources.values():
                source.has.update(source.doubted)
                source.queue.extend(source.doubted)
                source.doubted.clear()
        self._urge = "again" if again else "want"
        missing = sorted(self._open.difference(*(source.has for source in self._sources.values())))
        self._missing = deque(missing)
        if missing:
            self._missing.rotate(-(self._start % len(missing)))

    def next(self, link: int) -> Want | None:
        """What to ask on this connection now."""
        source = self._sources[link]
        free = self._window - source.under_way
        if free <= 0 or source.closing or not self._open:
            return None
        if not source.seed:
            return self._take(source, "want", _popped(source.queue, self._open, free))
        if not self._all_dealt:
            source.deals += free
            return Want("deal", deals=free)
        if self._urge == "want" and any(one.deals for one in self._sources.values()):
            # What is missing may have been given to this reader, which has not heard of it yet.
            return None
        return self._take(source, self._urge, _popped(self._missing, self._open, free))

    def begin(self, link: int, chunk: int) -> bool:
        """The bytes of a chunk begin to arrive; returns whether they are to be kept, checked, and reported."""
        return link in self._sources and chunk in self._sources[link].asked

    def right(self, link: int, chunk: int) -> None:
        """A chunk arrived with the right bytes."""
        self._sources[link].asked.remove(chunk)
        self.arrived += 1

    def wrong(self, link: int, chunk: int) -> int:
        """A chunk arrived with wrong bytes and will be asked for again; of the same reader only without the publisher.

        Returns how often that has happened: to this chunk if it is the publisher's, else to all of this reader's.
        """
        source = self._sources[link]
        source.asked.remove(chunk)
        for other in self._sources.values():
            if other.holder == source.holder and chunk in other.has:
                other.has.remove(chunk)
                other.doubted.add(chunk)
                other.queue = deque(one for one in other.queue if one != chunk)
        self._reopen([chunk])
        if source.seed:
            self._missing.append(chunk)
        else:
            self._doubts[source.holder].add(chunk)
        whose = ("chunk", chunk) if source.seed else ("reader", source.holder)
        self._wrong[whose] += 1
        return self._wrong[whose]

    def _take(self, source: _Source, what: Literal["want", "again"], chunks: Iterable[int]) -> Want | None:
        taken = tuple(chunks)
        self._open.difference_update(taken)
        source.asked.update(taken)
        return Want(what, taken) if taken else None

    def _reopen(self, chunks: Iterable[int]) -> None:
        for chunk in chunks:
            self._open.add(chunk)
            for source in self._sources.values():
                if chunk in source.has:
                    source.queue.append(chunk)


def _popped(queue: deque[int], open_chunks: Set[int], most: int) -> list[int]:
    found: list[int] = []
    while queue and len(found) < most:
        chunk = queue.popleft()
        if chunk in open_chunks and chunk not in found:
            found.append(chunk)
    return found


@dataclass(slots=True)
class _Dealt:
    """To whom the readers of one site go for each chunk; from `next` on they were given none."""

    next: int = 0
    given: dict[int, str] = field(default_factory=dict)
    referred: defaultdict[int, set[str]] = field(default_factory=lambda: defaultdict(set))
    """By chunk, the readers that were sent to whom it was given last."""


class ChunkDealer:
    """To whom the publisher gave the chunks of one version. Readers are named by the addresses at which they serve; "":
    one that passes nothing on, of which nothing is noted.

    Each chunk is given to one reader of each site: so it crosses the link between two sites once.
    """

    def __init__(self, count: int) -> None:
        self._count = count
        self._sites: defaultdict[str, _Dealt] = defaultdict(_Dealt)

    def deal(self, reader: str, site: str, count: int) -> list[int]:
        """Up to `count` chunks that nobody of the site was given."""
        dealt = self._sites[site]
        there: list[int] = []
        while reader and dealt.next < self._count and len(there) < count:
            if dealt.next not in dealt.given:
                there.append(dealt.next)
                dealt.given[dealt.next] = reader
            dealt.next += 1
        return there

    def made(self, reader: str, site: str) -> None:
        """This reader has all chunks without having been given them: its site gets there what nobody was given."""
        if not reader:
            return
        dealt = self._sites[site]
        for chunk in range(dealt.next, self._count):
            dealt.given.setdefault(chunk, reader)
        dealt.next = self._count

    def gives(self, reader: str, site: str, chunk: int, present: Set[str], *, again: bool) -> bool:
        """Whether a reader gets this chunk: not if another one of its site, that is `present`, was given it.

        With `again` it gets it all the same if it has been referred to that one before. So of several that wait for one
        that stands still the first gets the chunk, and the others get it there. One that passes nothing on waits for
        the readers of its site, if they are `present`, also for what is still to be given to them.
        """
        dealt = self._sites[site]
        holder = dealt.given.get(chunk)
        if not reader:
            return again or not (present if site and holder is None else holder in present)
        doubts = again and reader in dealt.referred[chunk]
        if doubts or holder is None or holder == reader or holder not in present:
            dealt.given[chunk] = reader
            dealt.referred.pop(chunk, None)
            return True
        dealt.referred[chunk].add(reader)
        return False


def ring_peers(own: str, others: Iterable[str]) -> list[str]:
    """The readers that a reader fetches from: those 1, 2, 4, 8 … places after it in the sorted ring of addresses.

    So each has log₂ R connections, and what one has gets to every other in as many steps.
    """
    ring = sorted({own, *others})
    at = ring.index(own)
    steps = (1 << power for power in range(len(ring).bit_length()))
    return [ring[(at + step) % len(ring)] for step in steps if step < len(ring)]
