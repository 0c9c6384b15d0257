"""The callers and servers of `call_network`: the cores, with the simplest workers around them that obey their rules.

They check what the cores do while they run: what a caller believes to be under way is counted here a second time, from
the messages alone.
"""

from __future__ import annotations

import random
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import TYPE_CHECKING

from msgspec import structs

from distflow.exchange.call_client import Call, CallClient
from distflow.exchange.call_messages import (
    CallAnswer,
    CallMessage,
    CallNotYet,
    CallRequest,
    CallReturned,
    CallWithdrawn,
    OutgoingCall,
)
from distflow.exchange.call_server import CallKey, CallServer
from distflow.exchange.call_targets import SERVER_BYTES, allows
from distflow.sim.scenario import Crash
from distflow.types import Version
from tests.search.call_scenario import VERSIONED
from tests.search.lease_scenario import Pause

if TYPE_CHECKING:
    # It makes both of them: at run time the import goes the other way.
    from tests.search.call_network import CallNetwork

TICK_S = 0.25
BEAT_S = 0.5
Key = tuple[str, int, int]
"""Step, training step, group."""


class SimulatedProcess(ABC):
    """What can die, come back, and be suspended."""

    def __init__(self, network: CallNetwork, name: str) -> None:
        self.network = network
        self.name = name
        self.alive = True
        self.incarnation = 0
        self._awake_at = 0.0

    def when_awake(self, event: Callable[[], None]) -> None:
        """Run it once the process is not suspended; not at all if it has died by then."""
        incarnation = self.incarnation

        def attempt() -> None:
            if self.alive and self.incarnation == incarnation:
                if self.network.now < self._awake_at:
                    self.network.after(self._awake_at - self.network.now, attempt)
                else:
                    event()

        attempt()

    def after(self, seconds: float, event: Callable[[], None]) -> None:
        """Schedule what this incarnation does."""
        self.network.after(seconds, partial(self.when_awake, event))

    def pause(self, pause: Pause) -> None:
        """Suspend it, as SIGSTOP does."""
        self._awake_at = max(self._awake_at, self.network.now + pause.seconds)

    def die(self, crash: Crash) -> None:
        """Kill it; it may come back."""
        if not self.alive:
            return
        self.alive = False
        if crash.noticed:
            self.network.after(0.3, partial(self.network.tell_lost, self.name, self.incarnation))
        if crash.restart_s is not None:
            self.network.after(crash.restart_s, self._come_back)

    def _come_back(self) -> None:
        self.incarnation += 1
        self.alive, self._awake_at = True, 0.0
        self.start()

    @abstractmethod
    def start(self) -> None:
        """Begin, with nothing remembered."""


class AskingWorker(SimulatedProcess):
    """A worker that asks."""

    def __init__(self, network: CallNetwork, number: int) -> None:
        super().__init__(network, f"trainer/{number}")
        self.number = number
        self.wanted: set[Key] = set()
        """Keys of the open training steps without an answer; a restarted caller wants them still."""

    def start(self) -> None:
        """Begin to ask."""
        network = self.network
        rng = random.Random(f"{network.scenario.seed}/{self.name}/{self.incarnation}")
        self.core = CallClient(self.incarnation, network.pools, network.scenario.ahead_bytes, rng)
        self._term = network.version.term
        self._asked: dict[Key, Call] = {}
        self._key_of: dict[int, Key] = {}
        """Of every request that was sent."""
        self._numbers: dict[Key, int] = {}
        """Of the open calls that were sent."""
        self._met: dict[str, int] = {}
        self._has: dict[str, set[Key]] = {}
        """What each server has of the open calls."""
        for server in network.servers.values():
            self.after(rng.random(), partial(self._meet, server))
        for key in sorted(self.wanted):
            self.after(rng.random(), partial(self._ask, key))
        self._tick()

    def open_step(self, t: int, rng: random.Random) -> None:
        """The groups of a training step arrive."""
        scenario = self.network.scenario
        keys = [(step, t, group) for group in range(scenario.groups) for step in scenario.called]
        self.wanted.update(keys)
        for key in keys if self.alive else ():
            self.after(rng.random(), partial(self._ask, key))

    def hear(self, server: str, incarnation: int, message: CallMessage) -> None:
        """A message of a server."""
        assert not isinstance(message, CallRequest | CallWithdrawn), f"{self.name} was sent {message}"
        expected = self._expected(message) if isinstance(message, CallAnswer) else None
        call = None if expected is None else self._asked[expected]
        if expected is not None:
            self._forget(expected)
        elif not isinstance(message, CallAnswer):
            self._not_taken(server, incarnation, message)
        if isinstance(message, CallReturned):
            self.network.record.returned += len(message.numbers)
        self._post(self.core.handle(server, incarnation, message, self.network.now))
        answered = self.core.take_answered()
        assert [key for key, _ in answered] == ([] if expected is None else [expected]), f"{answered}, not {expected}"
        if expected is not None and call is not None and isinstance(message, CallAnswer):
            self.wanted.discard(expected)
            by = message.version if call.at_least else call.need
            self.network.answered((self.number, *expected), by, message)

    def hear_beat(self, server: str, incarnation: int, version: Version | None, load: int) -> None:
        """A server's heartbeat."""
        now = self.network.now
        if incarnation > self._met.get(server, -1):
            self._met[server], self._has[server] = incarnation, set()
        self.core.heard(server, now)
        self._post(self.core.server(server, incarnation, present=True, load=load, now=now))
        if version is not None:
            self._post(self.core.announced(server, incarnation, version))

    def hear_lost(self, server: str, incarnation: int) -> None:
        """A server's process has ended."""
        if self._met.get(server) == incarnation:
            self._has[server].clear()
        self._post(self.core.server(server, incarnation, present=False, load=0, now=self.network.now))

    def begin_term(self, term: int) -> None:
        """What was asked of the versions before is asked of the new ones."""
        self._term = max(term, self._term)
        self.core.restarted(self.network.begins)
        older = [key for key, call in self._asked.items() if not call.at_least and _older(call.need, self._term)]
        for key in older:
            self._forget(key)
        self._post(self.core.cancel(older))
        for key in older:
            self._ask(key)

    def cancel(self) -> None:
        """Its oldest open call is not wanted any more."""
        key = next(iter(self._asked), None)
        if key is not None:
            self._forget(key)
            self.wanted.discard(key)
            self.network.record.cancelled += 1
            self.network.inject("calls_cancelled")
            self._post(self.core.cancel([key]))
            self.network.look()

    # -- details
    def _expected(self, answer: CallAnswer) -> Key | None:
        """The key that this answer is the first for, if it is one that counts."""
        key = self._key_of.get(answer.number) if answer.incarnation == self.incarnation else None
        if key is None or key not in self._asked or self._numbers.get(key) != answer.number:
            return None
        call = self._asked[key]
        return key if allows(call.need, answer.version, call.at_least) else None

    def _not_taken(self, server: str, incarnation: int, message: CallNotYet | CallReturned) -> None:
        """A server does not keep some requests: does it speak of what it was asked as it is, by us as we are?"""
        if message.incarnation == self.incarnation and self._met.get(server) == incarnation:
            keys = {number: self._key_of[number] for number in message.numbers}
            self._has[server] -= {key for number, key in keys.items() if self._numbers.get(key) == number}

    def _forget(self, key: Key) -> None:
        del self._asked[key]
        self._numbers.pop(key, None)
        for keys in self._has.values():
            keys.discard(key)

    def _tick(self) -> None:
        self._post(self.core.tick(self.network.now))
        self.after(TICK_S, self._tick)

    def _meet(self, server: AnsweringWorker) -> None:
        if server.alive:
            self.hear_beat(server.name, server.incarnation, server.version, server.core.load)

    def _ask(self, key: Key) -> None:
        if key not in self.wanted or key in self._asked:
            return
        step, t, _ = key
        scenario = self.network.scenario
        generated = step == VERSIONED and scenario.generated
        need = Version(self._term, max(0, t - generated)) if step == VERSIONED else None
        nbytes, tokens = scenario.nbytes(self.number, *key), scenario.tokens_of(self.number, *key)
        self._asked[key] = Call(step, key, t, need, nbytes, tokens, at_least=generated)
        self._post(self.core.ask(self._asked[key], self.network.now))

    def _post(self, out: Sequence[OutgoingCall]) -> None:
        for item in out:
            if isinstance(item.message, CallWithdrawn):
                assert all(self.core.key_of(number) is None for number in item.message.numbers), f"{item} is open"
                self.network.send(self, item.to, item.message)
                continue
            assert isinstance(item.message, CallRequest), f"{self.name} sends {item}"
            key = self.core.key_of(item.message.number)
            assert isinstance(key, tuple), f"{key} is not one of ours"
            self._key_of[item.message.number], self._numbers[key] = key, item.message.number
            self._check_bound(item.to, key)
            self._has[item.to].add(key)
            rows = [self.number, *key]
            self.network.send(self, item.to, structs.replace(item.message, batch=rows))
        self._check_room()

    def _check_bound(self, server: str, key: Key) -> None:
        """Before a server gets a request: is there room for it, and for its training step in all?"""
        call, record = self._asked[key], self.network.record
        if key in self._has[server]:
            return
        there = [self._asked[other] for other in self._has[server]]
        total = call.nbytes + sum(other.nbytes for other in there)
        record.peak_bytes = max(record.peak_bytes, total)
        older = call.t < min((other.t for other in there), default=call.t + 1)
        assert total <= SERVER_BYTES or older, f"{self.name} sends {total} bytes to {server}"
        oldest = min(other.t for other in self._asked.values())
        if call.t > oldest and there:
            ahead = sum(other.nbytes for other in there if other.t > oldest)
            within = not ahead or ahead + call.nbytes <= self.network.scenario.ahead_bytes
            assert within, f"{self.name} sends {server} {ahead} bytes ahead of step {oldest}"
            assert total <= SERVER_BYTES // 2, f"{self.name} sends {server} {total} bytes, some ahead of step {oldest}"

    def _check_room(self) -> None:
        """While a request waits, every server has something; of the oldest training step, if the request is of that."""
        oldest = min((call.t for call in self._asked.values()), default=0)
        under_way = set[Key]().union(*self._has.values())
        for key, call in self._asked.items():
            if key in under_way:
                continue
            if self.core._targets.behind(self.network.pools[call.step], call.need, at_least=call.at_least):
                continue
            for target in self.core._targets.of(self.network.pools[call.step]):
                works = any(call.t > oldest or other[1] == oldest for other in self._has[target.name])
                silent = self.core._targets.silent(target)
                serves = target.serves(call.need, at_least=call.at_least)
                assert works or silent or not serves, f"{self.name}: {key} could go to {target.name}"


class AnsweringWorker(SimulatedProcess):
    """A worker that answers."""

    def __init__(self, network: CallNetwork, name: str, slowness: float) -> None:
        super().__init__(network, name)
        self.slowness = slowness

    def start(self) -> None:
        """Begin to answer; the weights of a trained model come a little later."""
        self.core = CallServer()
        self.version: Version | None = None
        self._rows: dict[CallKey, object] = {}
        self._busy = self.draining = False
        if self.network.is_home(self.name):
            self.after(self.network.delay(), self.load)
        self._beat()

    def load(self) -> None:
        """Take the newest version."""
        if self.version != self.network.version:
            self.version = self.network.version
            self._post(self.core.version(self.version))
            self._tell()

    def hear(self, client: str, incarnation: int, message: CallMessage) -> None:
        """A request, or that some are not wanted any more."""
        if isinstance(message, CallWithdrawn):
            self.core.withdrawn(client, incarnation, message.numbers)
            return
        assert isinstance(message, CallRequest), f"{self.name} was sent {message}"
        self._post(self.core.handle(client, incarnation, message))
        assert not self.core._queued.keys() & self.core._working.keys(), "what is begun already waits once more"
        assert not (self.draining and self.core._queued), f"{self.name} takes a request while it drains"
        key = CallKey(client, incarnation, message.number)
        if key in self.core:
            self._rows[key] = message.batch
        self._work()

    def hear_lost(self, client: str, incarnation: int) -> None:
        """A caller's process has ended."""
        self.core.client_lost(client, incarnation)

    def drain(self) -> None:
        """Finish what was begun, and go."""
        self.draining = True
        queued, out = len(self.core._queued), self.core.drain()
        assert queued == sum(len(item.message.numbers) for item in out if isinstance(item.message, CallReturned))
        self._post(out)
        self._work()
        self._go_when_drained()

    # -- details
    def _work(self) -> None:
        record = self.network.record
        record.largest_load[self.name] = max(record.largest_load.get(self.name, 0), self.core.load)
        if self._busy:
            return
        keys = self.core.next(self.network.scenario.budget)
        if not keys:
            return
        assert not self.draining, f"{self.name} begins something while it drains"
        begun = [self.core._working[key] for key in keys]
        assert len({(request.step, request.t, request.version) for request in begun}) == 1, f"{begun} are joined"
        assert allows(begun[0].version, self.version, begun[0].at_least), f"{begun[0]} begins at {self.version}"
        tokens = sum(request.tokens for request in begun)
        assert len(keys) == 1 or tokens <= self.network.scenario.budget, f"{tokens} tokens are joined"
        record.joined.append(tokens)
        record.computed[self.name] += len(keys)
        self._busy = True
        seconds = tokens * self.network.scenario.token_s * self.slowness
        generated = [key for key, request in zip(keys, begun, strict=True) if request.at_least]
        self.after(seconds, partial(self._finish, keys, generated, seconds))

    def _finish(self, keys: Sequence[CallKey], generated: Sequence[CallKey], seconds: float) -> None:
        by = {key: self.version for key in generated if self.version is not None}
        for item in self.core.done(keys, seconds, by):
            answer = item.message
            assert isinstance(answer, CallAnswer), f"{self.name} answers {answer}"
            key = next(key for key in keys if (key.client, key.number) == (item.to, answer.number))
            if self.network.scenario.hasty and answer.version is not None:
                answer = structs.replace(answer, version=self.version)
            self.network.send(self, item.to, structs.replace(answer, batch=[self._rows[key], answer.version]))
        self._busy = False
        self._rows = {key: rows for key, rows in self._rows.items() if key in self.core}
        self._work()
        self._go_when_drained()

    def _go_when_drained(self) -> None:
        if self.core.drained:
            self.alive = False
            self.network.after(0.3, partial(self.network.tell_lost, self.name, self.incarnation))

    def _beat(self) -> None:
        self._tell()
        self.after(BEAT_S, self._beat)

    def _tell(self) -> None:
        for client in self.network.clients.values():
            beat = partial(client.hear_beat, self.name, self.incarnation, self.version, self.core.load)
            self.network.deliver(self, client, beat)

    def _post(self, out: Iterable[OutgoingCall]) -> None:
        for item in out:
            self.network.send(self, item.to, item.message)


def _older(need: Version | None, term: int) -> bool:
    return need is not None and need.term < term
