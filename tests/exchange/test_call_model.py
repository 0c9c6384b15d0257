"""Every order of events there is, for two requests and two servers of which one may die, with a loss and a suspension.

Breadth first over all states. Where nothing is under way any more, time goes on without further faults: what is open
must then be answered, even if a suspended server never wakes up while there is another.
"""

from __future__ import annotations

import pickle
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from distflow.exchange.call_client import Call, CallClient
from distflow.exchange.call_messages import CallMessage, CallRequest, CallWithdrawn, OutgoingCall
from distflow.exchange.call_server import CallServer

CLIENT, SERVERS = "trainer/0", ("reference/0", "reference/1")
REQUESTS = ("a", "b")
LOOKS, LOOK_S = 5, 0.5
"""Time goes on by so many ticks at once: enough for a server to be silent, and for a request to be slow."""
ROUNDS = 60


class InTurn:
    """Stands in for the choice of two at random, of which there are only two: each is the first in turn."""

    turn = 0

    def sample(self, population: Sequence[Any], k: int) -> list[Any]:
        self.turn = 1 - self.turn
        return [*population[self.turn :], *population[: self.turn]][:k]


@dataclass(slots=True)
class State:
    """All there is; the faults and the ticks that are left."""

    client: CallClient
    servers: dict[str, CallServer]
    wire: list[tuple[str, str, CallMessage | None]] = field(default_factory=list)
    """Receiver, sender, message. None: the sender is dead."""
    answers: Counter[object] = field(default_factory=Counter)
    suspended: str = ""
    now: float = 0.0
    ticks: int = 1
    losses: int = 1
    kills: int = 1
    pauses: int = 1

    # -- what may happen
    def events(self) -> Iterator[Callable[[State], None]]:
        """Everything that may be next."""
        yield from self.work()
        if self.losses:
            yield from (partial(State.lose, place=place) for place in range(len(self.wire)))
        if self.kills:
            # Each has one of the requests at first: it does not matter which one dies.
            yield partial(State.kill, name=SERVERS[0])
        if self.pauses:
            yield from (partial(State.pause, name=name) for name in self.servers)
        if self.suspended:
            yield partial(State.pause, name="")
        if self.ticks:
            yield State.pass_time

    def work(self) -> Iterator[Callable[[State], None]]:
        """What happens without faults and without time."""
        awake = [name for name in self.servers if name != self.suspended]
        for place, (to, *_) in enumerate(self.wire):
            if to == CLIENT or to in awake:
                yield partial(State.deliver, place=place)
        for name in awake:
            if self.servers[name]._queued:
                yield partial(State.compute, name=name)

    def deliver(self, place: int) -> None:
        to, sender, message = self.wire.pop(place)
        if isinstance(message, CallWithdrawn):
            self.servers[to].withdrawn(CLIENT, 0, message.numbers)
        elif to != CLIENT:
            assert isinstance(message, CallRequest)
            self.post(to, self.servers[to].handle(CLIENT, 0, message))
        elif message is None:
            self.post(CLIENT, self.client.server(sender, 0, present=False, load=0, now=self.now))
        else:
            assert not isinstance(message, CallRequest | CallWithdrawn)
            self.post(CLIENT, self.client.handle(sender, 0, message, self.now))
        self.answers.update(key for key, _ in self.client.take_answered())

    def lose(self, place: int) -> None:
        self.losses -= 1
        self.wire.pop(place)

    def compute(self, name: str) -> None:
        server = self.servers[name]
        self.post(name, server.done(server.next(0), 0.001))

    def kill(self, name: str) -> None:
        """What it has sent still arrives, and so do the news, in any order."""
        self.kills -= 1
        del self.servers[name]
        self.wire = [item for item in self.wire if item[0] != name] + [(CLIENT, name, None)]

    def pause(self, name: str) -> None:
        self.pauses -= bool(name)
        self.suspended = name

    def pass_time(self) -> None:
        self.ticks -= 1
        for _ in range(LOOKS):
            self.now += LOOK_S
            for name in self.servers:
                if name != self.suspended:
                    self.client.heard(name, self.now)
        self.post(CLIENT, self.client.tick(self.now))

    def post(self, sender: str, out: Sequence[OutgoingCall]) -> None:
        for item in out:
            if item.to == CLIENT or item.to in self.servers:
                self.wire.append((item.to, sender, item.message))

    # -- states
    def copy(self) -> State:
        copied: State = pickle.loads(pickle.dumps(self, pickle.HIGHEST_PROTOCOL))
        return copied

    def identity(self) -> object:
        """What tells it from other states; times are counted from now. Requests have no bytes, so that servers have no
        load that would make states differ: who is asked is tested elsewhere."""
        core, clock = self.client, self.client._targets.clock
        requests = tuple(
            (number, tuple((name, clock - first) for name, first in one.at.items()), clock - one.sent, one.wait)
            for number, one in core._open.items()
        )
        targets = tuple(
            (target.present, clock - target.heard_at, tuple(target.out)) for target in core._targets._targets.values()
        )
        servers = tuple((name, tuple(one._queued)) for name, one in self.servers.items())
        left = (self.ticks, self.losses, self.kills, self.pauses, self.suspended, core._targets._rng.turn)
        wire = frozenset(Counter(self.wire).items())
        paces = str([[*pace._batches] for at in core._paces._at.values() for pace in at.values()])
        return requests, targets, servers, left, wire, paces, frozenset(self.answers)

    def check(self) -> None:
        """No answer counts twice; what is under way is what is open."""
        assert set(self.answers.values()) <= {1}, f"{self.answers}"
        core = self.client
        assert len(self.answers) + len(core._open) == len(REQUESTS)
        for name, target in core._targets._targets.items():
            assert set(target.out) == {number for number, one in core._open.items() if name in one.at}
            assert sum(target.bytes_at.values()) == sum(size for _, size, _ in target.out.values())


def first() -> State:
    client = CallClient(0, {"reference": "reference"}, 1 << 20, InTurn())  # type: ignore[arg-type]
    state = State(client, {name: CallServer() for name in SERVERS})
    for name in SERVERS:
        client.server(name, 0, present=True, load=0, now=0.0)
    for key in REQUESTS:
        state.post(CLIENT, client.ask(Call("reference", key, 0, None, 0, 10), 0.0))
    return state


def goes_on(state: State) -> bool:
    """Whether all is answered in time, without further faults; a server that is the only one left wakes up."""
    if state.servers.keys() == {state.suspended}:
        state.pause("")
    for _ in range(ROUNDS):
        while event := next(state.work(), None):
            event(state)
        state.check()
        if len(state.answers) == len(REQUESTS):
            return True
        state.pass_time()
    return False


def test_in_every_order_of_events_each_request_is_answered_once() -> None:
    begin = first()
    seen, ahead, ended = {begin.identity()}, deque([begin]), 0
    while ahead:
        state = ahead.popleft()
        if next(state.work(), None) is None:
            ended += 1
            assert goes_on(state.copy()), f"{state.wire} {state.client._open} {state.suspended}"
        for event in state.events():
            after = state.copy()
            event(after)
            after.check()
            identity = after.identity()
            if identity not in seen:
                seen.add(identity)
                ahead.append(after)
    assert len(seen) > 1000
    assert ended > 100
