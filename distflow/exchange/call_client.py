"""The side of calls that asks: keeps each request until a server has answered it.

A request is *queued* → *out* at one server, or at two → answered. It is queued again if its server is gone, returns it,
or says that its model has not the version that is needed ("not yet"). It is then asked again, by no timer, once all
servers that are heard have announced that version: they take it together, and each gets its part of what waited.

A request is *copied* to another server if the first one is silent, or if it has waited for much longer than the other
would take, by what that one has to do and by the cost of the request itself (`call_pace.py`): so copies go to servers
that are idle or much less loaded, and what takes long because it is long stays where it is. The first answer counts;
the other server is told, and drops what it has not begun. Where there is no other, it is sent again to the same.

Requests are sent in the order of their training steps. Those of the oldest one that waits for answers always fit; the
bytes of later ones are bounded at each server (`call_targets.py`).

Nothing here reads a clock or a socket. The caller keeps the rows of its requests, and those of an answer once
`take_answered` returns its number.

Example: ask(Call("reference", key=12, t=7, …)) → CallRequest to reference/1 → CallAnswer → take_answered() = [(12, 4)].
"""

from __future__ import annotations

import heapq
import random
from collections import Counter
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import inf
from typing import NamedTuple

from distflow.exchange.call_messages import (
    CallAnswer,
    CallNotYet,
    CallRequest,
    CallWithdrawn,
    OutgoingCall,
    ServerMessage,
)
from distflow.exchange.call_pace import Paces
from distflow.exchange.call_targets import CallTarget, CallTargets, allows
from distflow.types import Version

SLOW_S = 1.0
"""Seconds without an answer before a request is copied, at least."""
SLOW = 3.0
"""And multiple of what another server is expected to take for it."""
UNKNOWN_S = 10.0
"""Seconds before it is copied to an idle server where nobody has computed its step yet."""
RESEND_S, LONGEST_RESEND_S = 5.0, 40.0
"""Seconds without an answer before a request is sent again to the same server, which has it unless it was lost: at
first, and at most, since the wait doubles with every time. It is never sent again before it is late."""
COPIES = 2
"""Servers that are not silent and have the same request, at most."""


@dataclass(frozen=True, slots=True)
class Call:
    """What is asked: a step of the flow over some rows."""

    step: str
    key: Hashable
    """The caller's name for it, unique among its open ones."""
    t: int
    """Training step that the rows are for."""
    need: Version | None
    """Version of the model that must answer; None: it is frozen, or there is none."""
    nbytes: int
    tokens: int
    at_least: bool = False
    """Whether a later version may answer, too."""


class _Queue(NamedTuple):
    """Requests that the same servers may answer."""

    pool: str
    need: Version | None
    at_least: bool


@dataclass(slots=True)
class _Open:
    """A request without an answer."""

    number: int
    call: Call
    at: dict[str, float] = field(default_factory=dict)
    """The servers that have it, with the time when it was first sent there, in seconds of listening; the one that it
    was sent to last comes last. None: it is queued."""
    sent: float = 0.0
    """When it was sent last."""
    wait: float = 0.0
    """Seconds from then before it is sent again, at least."""

    @property
    def order(self) -> tuple[int, int]:
        return self.call.t, self.number


class CallClient:
    """All calls of one worker, of this `incarnation`. `pools`: the pool that runs each step.

    `ahead_bytes`: most bytes of requests for later training steps than the oldest at one server, unless a single one is
    larger.
    """

    def __init__(self, incarnation: int, pools: Mapping[str, str], ahead_bytes: int, rng: random.Random) -> None:
        self.unused = 0
        """Answers that came after the first one, or of another version than was asked for."""
        self._incarnation = incarnation
        self._pools = pools
        self._ahead_bytes = ahead_bytes
        self._targets = CallTargets(rng)
        self._numbers = 0
        self._open: dict[int, _Open] = {}
        self._number_of: dict[Hashable, int] = {}
        self._steps: Counter[int] = Counter()
        """Open requests by training step."""
        self._queues: dict[_Queue, list[tuple[int, int]]] = {}
        """Heaps of what is queued; what is not queued any more is removed at the top."""
        self._begins: Mapping[int, int] = {}
        """Training steps at which terms began, by number of the term."""
        self._paces = Paces()
        self._answered: list[tuple[Call, int]] = []
        self._withdrawn: dict[str, list[int]] = {}
        """What servers have and nobody waits for, to be told to them."""

    # -- called by the worker
    def ask(self, call: Call, now: float) -> list[OutgoingCall]:
        """Open a request."""
        assert call.key not in self._number_of, f"{call.key!r} is asked for already"
        self._targets.listen(now)
        self._numbers += 1
        request = _Open(self._numbers, call)
        self._open[request.number] = request
        self._number_of[call.key] = request.number
        self._steps[call.t] += 1
        self._queue(request)
        return self._send()

    def cancel(self, keys: Iterable[Hashable]) -> list[OutgoingCall]:
        """The answers of these are not wanted any more, if they are open: their bytes are free at once."""
        for number in [self._number_of[key] for key in keys if key in self._number_of]:
            self._close(self._open[number])
        return self._send()

    def restarted(self, begins: Mapping[int, int]) -> None:
        """Training has restarted (`begins`: training steps by term): what versions answer that are gone counts for
        nothing. Requests that any later version may answer stay open, as the groups do for which they are. Those for
        just one version are of owners, which have been restarted themselves.
        """
        self._begins = dict(begins)

    def take_answered(self) -> list[tuple[Hashable, int]]:
        """The keys that were answered since the last call, each with the number of the request: once each."""
        answered, self._answered = self._answered, []
        return [(call.key, number) for call, number in answered]

    def key_of(self, number: int) -> Hashable | None:
        """Whose rows go with a request that is to be sent, or for whom an answer is; None: it is not open any more."""
        return self._open[number].call.key if number in self._open else None

    def waiting(self) -> tuple[str, tuple[str, ...]] | None:
        """What the first open request waits for, and the workers that could help; None if nothing is open."""
        request = min(self._open.values(), key=lambda request: request.order, default=None)
        if request is None:
            return None
        step, (pool, need, at_least) = request.call.step, self._queue_of(request.call)
        there = self._targets.of(pool)
        if not there:
            return f"a worker of pool {pool!r}, which runs {step!r}", ()
        behind = self._targets.behind(pool, need, at_least=at_least)
        serving = any(target.serves(need, at_least=at_least) for target in there)
        if need is not None and ((behind and not request.at) or not serving):
            return f"version {need.number} for {step!r}", behind or tuple(target.name for target in there)
        return f"answers of {step!r}", tuple(request.at) or tuple(target.name for target in there)

    # -- events
    def server(self, name: str, incarnation: int, *, present: bool, load: int, now: float) -> list[OutgoingCall]:
        """A worker that answers is there, with `load` tokens to answer; or it is gone."""
        self._targets.listen(now)
        if present:
            before = self._targets.meet(name, incarnation)
            if before is not None:
                self._paces.forget(name)
                self._take_back(before, list(before.out))
        target = self._targets.get(name, incarnation)
        if target is None:
            # It says nothing of a process that is gone, but time has passed: others may be silent now.
            return self._send()
        target.present = present
        target.reported(load)
        if present:
            target.heard_at = self._targets.clock
        else:
            self._take_back(target, list(target.out))
        return self._send()

    def announced(self, server: str, incarnation: int, version: Version) -> list[OutgoingCall]:
        """A server has said which version its model has."""
        target = self._targets.get(server, incarnation)
        if target is not None:
            target.learn(version)
        return self._send()

    def heard(self, server: str, now: float) -> None:
        """Anything came from a server."""
        target = self._targets.get(server)
        clock = self._targets.listen(now)
        if target is not None:
            target.heard_at = clock

    def handle(self, server: str, incarnation: int, message: ServerMessage, now: float) -> list[OutgoingCall]:
        """Take a message of a server. Call `take_answered` afterwards."""
        clock = self._targets.listen(now)
        target = self._targets.get(server, incarnation)
        if target is not None:
            target.heard_at = clock
            target.reported(message.load)
        if message.incarnation != self._incarnation:
            return []
        if isinstance(message, CallAnswer):
            self._on_answer(server, message)
        elif target is not None:
            if isinstance(message, CallNotYet):
                target.learn(message.has)
            else:
                target.leaving = True
            self._take_back(target, message.numbers)
        return self._send()

    def tick(self, now: float) -> list[OutgoingCall]:
        """Copy or send again what has not been answered. Call it several times a second."""
        self._targets.listen(now)
        # Of one training step the newest first: a server takes them in order, and those are least likely to be begun.
        out = sorted((request for request in self._open.values() if request.at), key=_newest_first)
        pools = dict.fromkeys(self._pools[request.call.step] for request in out)
        others = {pool: self._targets.least_loaded(pool) for pool in pools}
        repeated = [
            message
            for request in out
            if (message := self._repeat(request, others[self._pools[request.call.step]])) is not None
        ]
        return repeated + self._send()

    # -- details
    def _on_answer(self, server: str, answer: CallAnswer) -> None:
        request = self._open.get(answer.number)
        if request is None:
            self.unused += 1
        elif not self._counts(request.call, answer.version):
            self.unused += 1
            if request.call.at_least and (target := self._targets.get(server)) is not None:
                self._take_back(target, [request.number])
        else:
            if server in request.at:
                self._paces.note(server, request.call.step, answer.tokens, answer.took_ms / 1000)
            self._close(request, server)
            self._answered.append((request.call, request.number))

    def _counts(self, call: Call, version: Version | None) -> bool:
        """Whether an answer of this version is one: of several, it is the newest, and all others were new enough."""
        gone = call.at_least and version is not None and not version.survives(self._begins)
        return not gone and allows(call.need, version, call.at_least)

    def _close(self, request: _Open, answered_by: str | None = None) -> None:
        for name in request.at:
            target = self._targets.get(name)
            assert target is not None, f"{name} has request {request.number} and is not known"
            target.drop(request.number)
            if name != answered_by and target.present:
                self._withdrawn.setdefault(name, []).append(request.number)
        del self._open[request.number], self._number_of[request.call.key]
        self._steps[request.call.t] -= 1
        if not self._steps[request.call.t]:
            del self._steps[request.call.t]

    def _take_back(self, target: CallTarget, numbers: Iterable[int]) -> None:
        """A server does not have these any more, if it had: they are queued unless another one has them."""
        for number in numbers:
            if number not in target.out:
                continue
            request = self._open[number]
            target.drop(number)
            del request.at[target.name]
            if not request.at:
                self._queue(request)

    def _queue(self, request: _Open) -> None:
        request.wait = 0.0
        heapq.heappush(self._queues.setdefault(self._queue_of(request.call), []), request.order)

    def _queue_of(self, call: Call) -> _Queue:
        return _Queue(self._pools[call.step], call.need, call.at_least)

    def _send(self) -> list[OutgoingCall]:
        """Send what is withdrawn, and what is queued, in order, as far as it fits."""
        sent = [OutgoingCall(name, CallWithdrawn(tuple(numbers))) for name, numbers in self._withdrawn.items()]
        self._withdrawn.clear()
        full: set[_Queue] = set()
        while heads := [(heap[0], queue) for queue, heap in self._waiting_queues() if queue not in full]:
            (_, number), queue = min(heads, key=lambda head: head[0])
            request = self._open[number]
            target = self._anybody(request)
            if target is None:
                full.add(queue)
                continue
            heapq.heappop(self._queues[queue])
            sent.append(self._put(request, target))
        return sent

    def _waiting_queues(self) -> Iterator[tuple[_Queue, list[tuple[int, int]]]]:
        """Those that are not empty; the first of each is queued."""
        for queue, heap in list(self._queues.items()):
            while heap and not self._is_queued(heap[0][1]):
                heapq.heappop(heap)
            if heap:
                yield queue, heap
            else:
                del self._queues[queue]

    def _is_queued(self, number: int) -> bool:
        return number in self._open and not self._open[number].at

    def _with_room(self, request: _Open, among: Iterable[CallTarget]) -> list[CallTarget]:
        """Those of these servers that may be sent a request now, for the first time."""
        call, oldest = request.call, min(self._steps)
        if self._targets.behind(self._pools[call.step], call.need, at_least=call.at_least):
            return []
        return [
            target
            for target in among
            if target.serves(call.need, at_least=call.at_least)
            and target.name not in request.at
            and target.room(call.t, call.nbytes, oldest, self._ahead_bytes)
        ]

    def _anybody(self, request: _Open) -> CallTarget | None:
        """A server for a request, if one has room."""
        return self._targets.choose(self._with_room(request, self._targets.of(self._pools[request.call.step])))

    def _repeat(self, request: _Open, others: Sequence[CallTarget]) -> OutgoingCall | None:
        """A copy for another server, or the same once more, if it is time. `others`: the least loaded first."""
        holders = [target for name in request.at if (target := self._targets.get(name)) is not None]
        live = [target for target in holders if not self._targets.silent(target)]
        target = self._helper(request, others) if len(live) < COPIES else None
        if not live:
            target = self._anybody(request)
        if target is not None and not self._targets.silent(target):
            return self._put(request, target)
        again = (live or holders)[0]
        # It may be lost once its server should have answered, by what that says it has to do.
        late_s = max(request.wait, SLOW * (self._expected_s(request, again) or 0.0))
        return self._put(request, again) if self._targets.clock - request.sent >= late_s else None

    def _helper(self, request: _Open, others: Sequence[CallTarget]) -> CallTarget | None:
        """A server that would have answered long before now."""
        waited = self._targets.clock - min(request.at.values())
        if waited < SLOW_S:
            return None
        for target in (other for other in others if other.name not in request.at):
            expected_s = self._expected_s(request, target)
            unknown_s = inf if target.estimate else UNKNOWN_S
            if waited < (unknown_s if expected_s is None else SLOW * expected_s):
                return None  # those after it have more to do
            if self._with_room(request, [target]):
                return target
        return None

    def _expected_s(self, request: _Open, target: CallTarget) -> float | None:
        """Seconds to an answer of this server, after all else that it has; None: nobody has run the step yet."""
        call = request.call
        before = max(0, target.estimate - (call.tokens if request.number in target.out else 0))
        return self._paces.expected_s(target.name, call.step, call.tokens, before)

    def _put(self, request: _Open, target: CallTarget) -> OutgoingCall:
        clock, call = self._targets.clock, request.call
        target.put(request.number, call.t, call.nbytes, call.tokens)
        request.sent, request.wait = clock, min(LONGEST_RESEND_S, max(2 * request.wait, RESEND_S))
        request.at[target.name] = request.at.pop(target.name, clock)
        body = CallRequest(call.step, request.number, call.t, call.need, call.tokens, call.at_least)
        return OutgoingCall(target.name, body)


def _newest_first(request: _Open) -> tuple[int, int]:
    return request.call.t, -request.number
