"""Which chunk from whom, simulated: one publisher, several readers, connections that break, bytes that are wrong."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from random import Random

from hypothesis import given
from hypothesis import strategies as st

from distflow.weights.swarm.chunk_plan import ChunkDealer, ChunkPlan, Want, ring_peers

SEED = 0
"""Number of each reader's connection to the publisher; the others are 1 + the other reader."""
TURNS = 30_000


@dataclass
class Reader:
    plan: ChunkPlan
    right: list[int] = field(default_factory=list)
    told: dict[int, int] = field(default_factory=dict)
    """By connection, how much of what the other end has this reader has heard of."""
    lines: dict[int, deque[tuple[str, int]]] = field(default_factory=dict)
    """What is under way to it, by connection and in order."""
    alive: bool = True


class Swarm:
    """Delivers what is under way at random; each delivery may be wrong, or break the connection."""

    def __init__(self, readers: int, chunks: int, window: int, seed: int, trouble: float = 0.0, sites: int = 1) -> None:
        self.sites = sites
        """Readers take turns among them, and are connected to those of their own."""
        self.random = Random(seed)
        self.trouble = trouble
        self.dealer = ChunkDealer(chunks)
        self.sent: list[int] = []
        """Chunks that the publisher has sent."""
        self.readers = [Reader(ChunkPlan(chunks, window, start=7 * n)) for n in range(readers)]
        for number, reader in enumerate(self.readers):
            for link in (SEED, *(1 + other for other in range(number % sites, readers, sites) if other != number)):
                self.connect(reader, link)

    def connect(self, reader: Reader, link: int) -> None:
        reader.plan.join(link, seed=link == SEED)
        reader.lines[link], reader.told[link] = deque(), 0

    def disconnect(self, reader: Reader, link: int) -> None:
        reader.plan.leave(link)
        reader.lines.pop(link, None)

    def lose(self, number: int) -> None:
        self.readers[number].alive = False
        for reader in self.readers:
            self.disconnect(reader, 1 + number)

    def turn(self, number: int) -> None:
        """One delivery to a reader, on any of its connections, and what it asks for then."""
        reader = self.readers[number]
        link = self.random.choice(list(reader.lines))
        if link != SEED:
            has = self.readers[link - 1].right
            reader.plan.offers(link, has[reader.told[link] :])
            reader.told[link] = len(has)
        if reader.lines[link]:
            self.deliver(reader, link, *reader.lines[link].popleft())
        if self.random.random() < self.trouble:
            self.disconnect(reader, link)
            self.connect(reader, link)
        self.ask(number, reader, link)

    def deliver(self, reader: Reader, link: int, what: str, chunk: int) -> None:
        if what == "given":
            reader.plan.given(link, [chunk])
        elif what == "dealt":
            reader.plan.all_dealt(link)
        elif what != "chunk":
            reader.plan.refused(link, chunk, gone=what == "gone")
        elif reader.plan.begin(link, chunk):
            if self.random.random() < self.trouble:
                assert reader.plan.wrong(link, chunk) > 0
            else:
                assert chunk not in reader.right, "what is there is not asked for"
                reader.plan.right(link, chunk)
                reader.right.append(chunk)

    def ask(self, number: int, reader: Reader, link: int) -> None:
        want, line = reader.plan.next(link), reader.lines[link]
        if want is None:
            return
        if want.what == "deal":
            dealt = self.dealer.deal(str(number), self.site(number), want.deals)
            line.extend(("given", chunk) for chunk in dealt)
            self.send(line, dealt)
            line.extend([("dealt", 0)] * (len(dealt) < want.deals))
        for chunk in want.chunks:
            if link != SEED:
                line.append(("chunk" if chunk in self.readers[link - 1].right else "gone", chunk))
            elif self.gives(number, chunk, again=want.what == "again"):
                self.send(line, [chunk])
            else:
                line.append(("elsewhere", chunk))

    def send(self, line: deque[tuple[str, int]], chunks: list[int]) -> None:
        self.sent += chunks
        line.extend(("chunk", chunk) for chunk in chunks)

    def site(self, number: int) -> str:
        return str(number % self.sites)

    def gives(self, number: int, chunk: int, *, again: bool) -> bool:
        there = self.present(self.site(number))
        return self.dealer.gives(str(number), self.site(number), chunk, there, again=again)

    def present(self, site: str) -> set[str]:
        alive = [number for number, reader in enumerate(self.readers) if reader.alive]
        return {str(number) for number in alive if self.site(number) == site}

    @property
    def waiting(self) -> list[int]:
        return [number for number, reader in enumerate(self.readers) if reader.alive and not reader.plan.done]


@given(st.integers(1, 6), st.integers(0, 40), st.integers(1, 9), st.integers(0, 2**32))
def test_each_chunk_arrives_once_and_the_publisher_sends_it_once(
    readers: int, chunks: int, window: int, seed: int
) -> None:
    swarm = Swarm(readers, chunks, window, seed)
    for _ in range(TURNS):
        if not swarm.waiting:
            break
        swarm.turn(swarm.random.choice(swarm.waiting))
    assert all(sorted(reader.right) == list(range(chunks)) for reader in swarm.readers)
    assert sorted(swarm.sent) == list(range(chunks))


@given(st.integers(1, 8), st.integers(1, 4), st.integers(0, 40), st.integers(1, 9), st.integers(0, 2**32))
def test_the_publisher_sends_each_chunk_once_to_every_site(
    readers: int, sites: int, chunks: int, window: int, seed: int
) -> None:
    swarm = Swarm(readers, chunks, window, seed, sites=sites)
    for _ in range(TURNS):
        if not swarm.waiting:
            break
        swarm.turn(swarm.random.choice(swarm.waiting))
    assert all(sorted(reader.right) == list(range(chunks)) for reader in swarm.readers)
    assert sorted(swarm.sent) == sorted([*range(chunks)] * min(sites, readers))


@given(st.integers(2, 6), st.integers(1, 40), st.integers(1, 9), st.integers(0, 2**32))
def test_who_is_left_gets_everything_through_cuts_damage_and_death(
    readers: int, chunks: int, window: int, seed: int
) -> None:
    swarm = Swarm(readers, chunks, window, seed, trouble=0.05)
    doomed = swarm.random.sample(range(readers), swarm.random.randrange(readers))
    for turn in range(TURNS):
        if not swarm.waiting:
            break
        number = swarm.random.choice(swarm.waiting)
        swarm.turn(number)
        if doomed and swarm.random.random() < 0.05:
            swarm.lose(doomed.pop())
        if turn % 40 == 39 and swarm.waiting:
            # For a while nothing came; in the end a reader does not believe that another gets what it was given.
            swarm.readers[swarm.random.choice(swarm.waiting)].plan.urge(again=turn % 200 == 199)
    left = [reader for reader in swarm.readers if reader.alive]
    assert left
    assert all(sorted(reader.right) == list(range(chunks)) for reader in left)


@given(st.integers(2, 6), st.integers(1, 40), st.integers(0, 2**32))
def test_the_chunks_of_a_lost_reader_are_sent_once_more(readers: int, chunks: int, seed: int) -> None:
    """Readers that ask for what is missing, but trust each other, make the publisher send only the lost one's share."""
    swarm = Swarm(readers, chunks, 4, seed)
    for _ in range(swarm.random.randrange(200)):
        if swarm.waiting:
            swarm.turn(swarm.random.choice(swarm.waiting))
    swarm.lose(0)
    given = [item for site in swarm.dealer._sites.values() for item in site.given.items()]
    dealt = [chunk for chunk, reader in given if reader == "0"]
    for turn in range(TURNS):
        if not swarm.waiting:
            break
        number = swarm.random.choice(swarm.waiting)
        swarm.turn(number)
        if turn % 40 == 39:
            swarm.readers[number].plan.urge(again=False)
    assert all(reader.plan.done for reader in swarm.readers[1:])
    assert len(swarm.sent) <= chunks + len(dealt)


def test_a_late_reader_takes_nothing_from_the_publisher() -> None:
    swarm = Swarm(2, 20, 4, 0)
    late = swarm.readers[1]
    late.alive = False
    while swarm.waiting:
        swarm.turn(0)
    late.alive = True
    for _ in range(TURNS):
        if swarm.waiting:
            swarm.turn(1)
    assert late.plan.done
    assert len(swarm.sent) == 20


def test_what_goes_to_one_that_passes_nothing_on_is_dealt_to_others_all_the_same() -> None:
    dealer, outside = ChunkDealer(4), ChunkPlan(4, window=2, deals=False)
    outside.join(SEED, seed=True)
    assert outside.next(SEED) == Want("want", (0, 1))
    assert all(dealer.gives("", "", chunk, set(), again=False) for chunk in (0, 1))
    assert dealer.deal("", "", 2) == []
    dealer.made("", "")
    assert dealer.deal("a", "", 3) == [0, 1, 2]
    assert not dealer.gives("", "", 0, {"a"}, again=False), "it is had from that one"


def test_one_that_passes_nothing_on_waits_for_the_readers_of_its_site() -> None:
    dealer = ChunkDealer(2)
    assert dealer.gives("", "far", 0, set(), again=False), "nobody else is there"
    assert not dealer.gives("", "far", 0, {"a"}, again=False), "that one will be given it"
    assert dealer.gives("", "far", 0, {"a"}, again=True), "it does not come"
    assert dealer.deal("a", "far", 2) == [0, 1]
    assert not dealer.gives("", "far", 1, {"a"}, again=False)
    assert dealer.gives("", "far", 1, {"b"}, again=False)


def test_a_chunk_that_is_no_longer_wanted_is_not_kept() -> None:
    plan = ChunkPlan(2, window=1)
    plan.join(SEED, seed=True)
    plan.join(1, seed=False)
    assert not plan.begin(SEED, 0), "nothing was asked for"
    assert plan.next(SEED) == ("deal", (), 1)
    plan.offers(1, [0, 7])
    assert plan.next(1) == ("want", (0,), 0)
    plan.given(SEED, [0])
    assert not plan.begin(SEED, 0), "it is on its way from elsewhere"
    assert plan.begin(1, 0)
    plan.right(1, 0)
    assert (plan.arrived, plan.done) == (1, False)


def test_what_is_dealt_is_asked_for_nowhere_else_while_it_is_on_its_way() -> None:
    plan = ChunkPlan(3, window=2)
    for link in (SEED, 1, 2):
        plan.join(link, seed=link != 2)
    assert plan.next(SEED) == ("deal", (), 2)
    plan.given(SEED, [0, 2])
    assert plan.next(1) == ("deal", (), 2)
    plan.all_dealt(1)
    plan.offers(2, [1])
    plan.urge(again=False)
    assert plan.next(2) == ("want", (1,), 0)
    assert plan.next(1) is None
    plan.leave(SEED)
    assert plan.next(1) == ("want", (0, 2), 0), "the connection is gone, and what was to come on it"


def test_what_may_have_been_dealt_is_not_asked_for_by_number() -> None:
    plan = ChunkPlan(2, window=2)
    for link in (SEED, 1):
        plan.join(link, seed=True)
    assert plan.next(SEED) == ("deal", (), 2)
    plan.all_dealt(1)
    plan.urge(again=False)
    assert plan.next(1) is None, "the other connection has yet to say what it brings"
    plan.given(SEED, [0])
    plan.all_dealt(SEED)
    assert plan.next(1) == ("want", (1,), 0)


def test_what_has_come_wrong_from_a_reader_is_asked_of_it_again_only_without_the_publisher() -> None:
    plan = ChunkPlan(2, window=2)
    plan.join(SEED, seed=True)
    for link in (1, 2):
        plan.join(link, seed=False, holder="a")
    plan.all_dealt(SEED)
    plan.offers(1, [0, 1])
    assert plan.next(1) == ("want", (0, 1), 0)
    assert plan.wrong(1, 0) == 1
    plan.offers(2, [0])
    assert plan.next(2) is None, "it is the same reader"
    plan.urge(again=True)
    assert plan.next(SEED) == ("again", (0,), 0)
    plan.leave(SEED)
    assert plan.next(2) is None
    plan.urge(again=True)
    assert plan.next(2) == ("want", (0,), 0)
    assert plan.wrong(2, 0) == 2


def test_nothing_is_asked_on_a_connection_that_is_given_up_and_what_was_asked_may_come() -> None:
    plan = ChunkPlan(3, window=1)
    for link in (1, 2):
        plan.join(link, seed=False)
        plan.offers(link, [0, 1])
    assert plan.next(1) == ("want", (0,), 0)
    plan.close(1)
    assert plan.next(2) == ("want", (1,), 0)
    assert plan.begin(1, 0), "its bytes may be on their way into memory, where no other may write"
    plan.right(1, 0)
    assert plan.next(1) is None


def test_of_several_that_doubt_a_reader_one_gets_the_chunk() -> None:
    dealer, present = ChunkDealer(1), {"a", "b", "c"}
    assert dealer.deal("a", "", 1) == [0]
    assert not dealer.gives("b", "", 0, present, again=True), "it has not been told to ask another one"
    assert not dealer.gives("c", "", 0, present, again=False)
    assert dealer.gives("b", "", 0, present, again=True)
    assert not dealer.gives("c", "", 0, present, again=True), "the other one has it now"
    assert dealer.gives("c", "", 0, present, again=True)


def test_each_reader_fetches_from_log_r_others_and_everything_reaches_everyone() -> None:
    for count in (1, 2, 3, 4, 12, 100):
        names = [f"tcp://10.0.0.{number}:1" for number in range(count)]
        peers = {name: ring_peers(name, names) for name in names}
        assert all(name not in found and len(found) == len(set(found)) <= 7 for name, found in peers.items())
        reached = {names[0]}
        for _ in range(8):
            reached |= {name for name, found in peers.items() if reached & set(found)}
        assert len(reached) == count


def test_a_reader_asks_the_ring_without_those_that_it_cannot_reach() -> None:
    assert ring_peers("b", ["a", "c", "d"]) == ["c", "d"]
    assert ring_peers("b", []) == []
