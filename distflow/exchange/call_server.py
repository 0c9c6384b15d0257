"""The side of calls that answers them: requests of many callers, joined into batches that one step computes at once.

A request is *queued* → *working* (`next` has handed it out) → answered. A server keeps no state beyond that: a request
that was answered and comes again is computed again. It never queues a request that the version of its model does not
allow: it answers "not yet", so that its memory is free for those that it can answer.

Nothing here reads a clock or a socket. The caller keeps the rows of a request while `key in server`.

Example: handle(rollout/0, request 4), handle(rollout/1, request 9) → next(8192) = both → done(both) → two answers.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple

from distflow.exchange.call_messages import CallAnswer, CallNotYet, CallRequest, CallReturned, OutgoingCall
from distflow.exchange.call_targets import allows
from distflow.types import Version


class CallKey(NamedTuple):
    """A request as a server knows it."""

    client: str
    incarnation: int
    number: int


class CallServer:
    """The requests at one worker, for all steps that it runs for others."""

    def __init__(self) -> None:
        self._queued: dict[CallKey, CallRequest] = {}
        """In order of arrival."""
        self._working: dict[CallKey, CallRequest] = {}
        self._incarnations: dict[str, int] = {}
        """The newest of each client."""
        self._begun = 0
        """Tokens of the batch that `next` has handed out last."""
        self._version: Version | None = None
        self._leaving = False

    # -- events
    def handle(self, client: str, incarnation: int, request: CallRequest) -> list[OutgoingCall]:
        """Take a request; keep its rows if its key is in this server afterwards."""
        if incarnation < self._incarnations.get(client, 0):
            return []
        if incarnation > self._incarnations.get(client, 0):
            self.client_lost(client, incarnation - 1)
        self._incarnations[client] = incarnation
        key = CallKey(client, incarnation, request.number)
        if key in self:
            return []
        if self._leaving:
            return self._returned([key])
        if not self._allows(request):
            return self._not_yet([key])
        self._queued[key] = request
        return []

    def withdrawn(self, client: str, incarnation: int, numbers: Iterable[int]) -> None:
        """A caller wants no answers of these: what is not begun never will be, and what is generated ends. What comes
        only now is computed.
        """
        keys = [CallKey(client, incarnation, number) for number in numbers]
        generated = [key for key in keys if key in self._working and self._working[key].at_least]
        self._forget([*generated, *(key for key in keys if key in self._queued)])

    def version(self, version: Version) -> list[OutgoingCall]:
        """The model has another version now: requests that it can no longer answer go back to their callers. So does
        what was begun to be generated for a version that is lost: it never starts.

        All callers that are known hear of it: some may keep requests for it.
        """
        self._version = version
        generated = {key: request for key, request in self._working.items() if request.at_least}
        outdated = [key for key, request in (self._queued | generated).items() if not self._allows(request)]
        self._forget(outdated)
        numbers = dict.fromkeys(self._incarnations.items(), ()) | _by_client(outdated)
        return [
            OutgoingCall(client, CallNotYet(incarnation, mine, version, self.load))
            for (client, incarnation), mine in numbers.items()
        ]

    def client_lost(self, client: str, incarnation: int) -> None:
        """A caller is gone, up to this incarnation: nobody waits for its answers."""
        self._forget([key for key in self._keys() if key.client == client and key.incarnation <= incarnation])

    def drain(self) -> list[OutgoingCall]:
        """Begin nothing more: what is queued, and what still comes, goes back to the callers."""
        self._leaving = True
        queued = list(self._queued)
        self._forget(queued)
        return self._returned(queued)

    # -- the work
    def next(self, budget: int, steps: Collection[str] | None = None) -> list[CallKey]:
        """Begin requests of the oldest training step, in order of arrival, up to `budget` tokens; of these steps only.

        They are of one step of the flow, and of one version. A request with more tokens is begun alone; so is every
        request at budget 0.
        """
        some = [request for request in self._queued.values() if steps is None or request.step in steps]
        if not some:
            return []
        first = min(some, key=lambda request: request.t)
        alike = (first.step, first.t, first.version)
        keys: list[CallKey] = []
        for key, request in self._queued.items():
            if (request.step, request.t, request.version) != alike:
                continue
            budget -= request.tokens
            if keys and budget < 0:
                break
            keys.append(key)
        self._working |= {key: self._queued.pop(key) for key in keys}
        self._begun = sum(self._working[key].tokens for key in keys)
        return keys

    def done(
        self, keys: Sequence[CallKey], seconds: float, by: Mapping[CallKey, Version] = MappingProxyType({})
    ) -> list[OutgoingCall]:
        """What `next` has handed out last was computed in this time: an answer for each that is still awaited.

        `by`: the newest versions that have computed them, where these are not the ones that were asked for: of what is
        generated one request at a time.
        """
        awaited = [(key, self._working.pop(key)) for key in keys if key in self._working]
        load, took_ms = self.load, round(1000 * seconds)
        return [
            OutgoingCall(
                key.client,
                CallAnswer(
                    key.incarnation,
                    key.number,
                    by.get(key, request.version),
                    load,
                    request.tokens if key in by else self._begun,
                    took_ms,
                ),
            )
            for key, request in awaited
        ]

    # -- what it holds
    def __contains__(self, key: CallKey) -> bool:
        return key in self._queued or key in self._working

    def works_on(self, key: CallKey) -> bool:
        """Whether a request has been begun and is not answered yet."""
        return key in self._working

    @property
    def load(self) -> int:
        """Tokens of the requests that are not answered yet."""
        return sum(request.tokens for held in (self._queued, self._working) for request in held.values())

    @property
    def drained(self) -> bool:
        """Whether it takes no more requests and has answered all that it began."""
        return self._leaving and not self._working

    # -- details
    def _allows(self, request: CallRequest) -> bool:
        """Whether the version of the model is one that may answer."""
        return allows(request.version, self._version, request.at_least)

    def _keys(self) -> list[CallKey]:
        return [*self._queued, *self._working]

    def _forget(self, keys: Iterable[CallKey]) -> None:
        for key in keys:
            self._queued.pop(key, None)
            self._working.pop(key, None)

    def _not_yet(self, keys: Iterable[CallKey]) -> list[OutgoingCall]:
        return [
            OutgoingCall(client, CallNotYet(incarnation, numbers, self._version, self.load))
            for (client, incarnation), numbers in _by_client(keys).items()
        ]

    def _returned(self, keys: Iterable[CallKey]) -> list[OutgoingCall]:
        return [
            OutgoingCall(client, CallReturned(incarnation, numbers, self.load))
            for (client, incarnation), numbers in _by_client(keys).items()
        ]


def _by_client(keys: Iterable[CallKey]) -> dict[tuple[str, int], tuple[int, ...]]:
    numbers: dict[tuple[str, int], tuple[int, ...]] = {}
    for key in keys:
        client = (key.client, key.incarnation)
        numbers[client] = (*numbers.get(client, ()), key.number)
    return numbers
