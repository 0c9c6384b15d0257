"""Random clients of named consumers, beside what must hold at any time."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from distflow.exchange.consumer_types import Handed
from distflow.exchange.consumers import Consumers
from tests.exchange.test_consumers import LIMIT, SILENCE_S, group, wanted


class Model(RuleBasedStateMachine):
    """Random clients of two consumers, beside what must hold at any time."""

    def __init__(self) -> None:
        super().__init__()
        self.store = Consumers(LIMIT, SILENCE_S)
        self.now = 0.0
        self.next = 0
        self.numbers: Counter[str] = Counter()
        self.held: dict[tuple[str, str], dict[int, tuple[int, ...]]] = defaultdict(dict)
        self.used: dict[str, Counter[int]] = defaultdict(Counter)
        self.offered: dict[str, set[int]] = defaultdict(set)
        self.finished = False

    def take(self, answers: Iterable[Handed]) -> None:
        for answer in answers:
            if answer.positions:
                # A client goes by the first answer to a number that it reads.
                self.held[answer.client, answer.consumer].setdefault(answer.number, answer.positions)

    clients = st.sampled_from(["a", "b", "c"])
    consumers = st.sampled_from(["lossless", "lossy"])

    @precondition(lambda self: not self.finished)
    @rule(sizes=st.lists(st.integers(1, 400), min_size=1, max_size=4))
    def arrive(self, sizes: list[int]) -> None:
        groups = {self.next + n: group(size) for n, size in enumerate(sizes)}
        self.next += len(sizes)
        for name in self.store._consumers:
            self.offered[name].update(groups)
        self.take(self.store.arrived(groups))

    @rule(client=clients, consumer=consumers, rows=st.integers(0, 24), repeat=st.booleans())
    def ask(self, client: str, consumer: str, rows: int, *, repeat: bool) -> None:
        self.numbers[client] += not repeat
        if self.numbers[client]:
            asked = wanted(consumer, rows=rows, lossless=consumer == "lossless")
            # A repeated number may belong to the other consumer: a client never does that.
            known = self.store._clients.get(client)
            if repeat and (known is None or known.last.get(consumer) != self.numbers[client]):
                return
            self.take(self.store.ask(client, self.numbers[client], asked, self.now, again=repeat))

    @rule(client=clients, consumer=consumers, use=st.booleans(), data=st.data())
    def settle(self, client: str, consumer: str, *, use: bool, data: st.DataObject) -> None:
        mine = self.held[client, consumer]
        if not mine:
            return
        number = data.draw(st.sampled_from(sorted(mine)))
        valid = (client, number) in self.store._consumers[consumer].claims
        stale, answers = self.store.settle(client, consumer, [number] if use else [], [] if use else [number], self.now)
        if use:
            assert (number in stale) == (not valid)
        if use and valid:
            self.used[consumer].update(mine[number])
        del mine[number]
        self.take(answers)

    @rule(client=clients)
    def leave(self, client: str) -> None:
        for consumer in ("lossless", "lossy"):
            self.held.pop((client, consumer), None)
        self.take(self.store.leave(client))

    @rule(seconds=st.floats(0, 12) | st.sampled_from([400.0, 11_000.0]))
    def time(self, seconds: float) -> None:
        self.now += seconds
        self.take(self.store.tick(self.now))
        for name in self.offered.keys() - self.store._consumers.keys():
            # Nobody has read it for long. Who asks for it opens another one.
            assert name == "lossy"
            del self.offered[name]
            self.used.pop(name, None)
            for client in ("a", "b", "c"):
                self.held.pop((client, name), None)

    @rule()
    def finish(self) -> None:
        self.finished = True
        self.take(self.store.finish())

    @invariant()
    def every_group_is_in_one_place(self) -> None:
        for name, one in self.store._consumers.items():
            claimed = [position for found in one.claims.values() for position in found]
            places = [*one.ready, *one.partial, *claimed]
            assert len(places) == len(set(places))
            assert not set(places) & set(self.used[name]), "what was used is not handed out again"
            assert one.pinned.total == sum(self.store.kept[position].nbytes for position in places)
            lost = len(self.offered[name]) - len(places) - len(self.used[name])
            assert lost == one.missed
            if name == "lossless":
                assert not lost
            else:
                assert one.pinned.total <= LIMIT or not one.ready
            assert max(self.used[name].values(), default=1) == 1
        held = {p for one in self.store._consumers.values() for p in (*one.ready, *one.partial)}
        held |= {p for one in self.store._consumers.values() for found in one.claims.values() for p in found}
        assert set(self.store.kept) == held

    def teardown(self) -> None:
        """Whatever happened: a client that goes on reading gets all that is left, and hears of the end."""
        self.take(self.store.finish())
        for client in ("a", "b", "c"):
            self.take(self.store.leave(client))
        numbers = iter(range(10_000, 20_000))
        for name in list(self.store._consumers):
            end = ""
            asked = wanted(name, rows=8, lossless=name == "lossless")
            for number in numbers:
                (answer,) = self.store.ask("last", number, asked, self.now)
                end = answer.end
                if end:
                    break
                self.used[name].update(answer.positions)
                assert self.store.settle("last", name, [number], [], self.now)[0] == []
            assert end == "over"
            assert sum(self.used[name].values()) + self.store._consumers[name].missed == len(self.offered[name])
        assert not self.store.kept


TestModel = Model.TestCase
TestModel.settings = settings(max_examples=100, stateful_step_count=30, deadline=None)
