"""Who reads an owner's samples from outside the run: named consumers, each with a position of its own. No I/O.

A *consumer* is a name; the *clients* that read under this name share its groups, so each group goes to one of them. Two
consumers are independent: each gets every group that arrives after it was opened, in the order of arrival.

The life of a group at one consumer:  (waits for its fields) → ready → claimed → acknowledged,  claimed → ready again
when its client gives it back or ends, or is silent and another one finds nothing else. A claim is what one answer hands
out, named by the number of the ask; an ask that is repeated gets the same claim, so that a lost answer loses nothing.

What a consumer keeps is bounded in bytes, claims included. One that loses nothing (`lossless`) holds the owner up at
its bound: nothing is leased until it has read. For others the oldest groups that nobody has claimed are let go, and
counted. A client that keeps claims until it has more hears that the bound is reached ("full"): it has to do with them.
Steps that clients write have no bound of their own: their groups are those that the owner stores for training.

Example (bound of 3 groups):
    ask(a, 1, rows=8) -> []                       nothing has arrived
    arrived(7)        -> Handed(a, 1, [7])        pushed to the waiting ask
    arrived(8, 9, 10), then a is silent           one group is let go; 7 stays a's until it is wanted
    ask(b, 1, rows=24) -> Handed(b, 1, [9, 10]), ask(b, 2) -> Handed(b, 2, [7])
    settle(a, 1) -> stale                         a's claim is void: it hears so
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

from distflow.errors import ProtocolError, nearest
from distflow.exchange.consumer_state import ClientState, ConsumerState
from distflow.exchange.consumer_types import ConsumerCounts, End, Handed, Offered, SamplesWanted

ANSWER_BYTES, ANSWER_GROUPS = 1 << 20, 64
"""Most of one answer, unless a single group is larger; a client asks again for the rest. An answer is made under the
owner's lock, on the thread that its peers wait for."""
REMEMBERED = 1024
"""Claims of a client that were acknowledged last: an acknowledgement may be repeated."""
REMEMBERED_SILENCES = 30
"""For so many times the limit of silence they are kept of a client that says nothing, and a consumer that may lose
groups without any client."""
ABANDONED_SILENCES = 1000
"""The same for one whose clients have claimed something: their computer may sleep."""
MOST_CONSUMERS = 64
ALIKE = 0.8
"""How similar the name of a new consumer may not be to that of a step: its client would wait, and so would the run."""
MOST_CLIENTS = 4096


class Consumers:
    """Of one owner. `limit_bytes` bounds what each consumer keeps; who is silent for `silence_s` may lose claims."""

    def __init__(self, limit_bytes: int, silence_s: float) -> None:
        self.kept: dict[int, Offered] = {}
        """The groups that some consumer has not acknowledged, by position."""
        self.progress = 0
        """Rises with all that clients acknowledge."""
        self.signs = 0
        """Rises while the owner waits for a consumer of which a client is alive."""
        self._limit = limit_bytes
        self._silence_s = silence_s
        self._consumers: dict[str, ConsumerState] = {}
        self._clients: dict[str, ClientState] = {}
        self._uses: Counter[int] = Counter()
        self._finished = self._closed = False

    # -- groups
    def arrived(self, groups: Mapping[int, Offered]) -> list[Handed]:
        """These groups have been stored, each for the first time."""
        for position, group in groups.items():
            for consumer in self._consumers.values():
                self._add(consumer, position, group)
        return self._serve()

    def gained(self, position: int, fields: Iterable[str], nbytes: int = 0) -> list[Handed]:
        """A stored group has further fields by now, of so many bytes."""
        if position not in self.kept:
            return []
        group = self.kept[position]
        group = self.kept[position] = group._replace(fields=group.fields | set(fields))
        for consumer in self._consumers.values():
            consumer.pinned.write(position, nbytes)
            if position in consumer.partial and consumer.fields <= group.fields:
                del consumer.partial[position]
                consumer.ready[position] = None
        return self._serve()

    def left(self, positions: Iterable[int]) -> None:
        """Groups that are not stored any longer get no further fields: who waits for one has lost the group."""
        for position in positions:
            for consumer in self._consumers.values() if position in self.kept else ():
                if position in consumer.partial:
                    del consumer.partial[position]
                    consumer.missed += 1
                    self._let_go(consumer, position)

    def finish(self) -> list[Handed]:
        """No further groups will arrive."""
        self._finished = True
        return self._serve()

    def close(self) -> list[Handed]:
        """The owner ends: whoever waits hears that nothing more comes."""
        self._finished = self._closed = True
        return self._serve()

    def open(self, name: str, fields: Iterable[str]) -> None:
        """Open a consumer for what clients are to write: it gets every group, and is closed by nobody."""
        self._consumers[name] = ConsumerState(name, frozenset(fields), lossless=True, owned=True)

    def lossless(self) -> dict[str, tuple[str, ...]]:
        """What consumers of clients' own that lose nothing read, by name."""
        found = (one for one in self._consumers.values() if one.lossless and not one.owned)
        return {one.name: self.fields_of(one.name) for one in found}

    def unacknowledged(self, name: str) -> list[int]:
        """The groups that have all fields of a consumer and that its clients have yet to acknowledge."""
        one = self._consumers[name]
        return [*(position for claim in one.claims.values() for position in claim), *one.ready]

    def restore(self, name: str, fields: Iterable[str], groups: Mapping[int, Offered]) -> None:
        """Open a consumer that loses nothing with what it had yet to acknowledge when its owner ended."""
        consumer = self._consumers.setdefault(name, ConsumerState(name, frozenset(fields), lossless=True))
        for position, group in groups.items():
            self._add(consumer, position, group)

    # -- clients
    def ask(self, client: str, number: int, wanted: SamplesWanted, now: float, *, again: bool = False) -> list[Handed]:
        """A client asks for groups; raises ProtocolError if the consumer was opened for others.

        `again`: it has sent this ask before. Where its answer was taken back since, it must not get another one: the
        client may already have the first, and would acknowledge groups that it has never seen.
        """
        consumer = self._open(wanted)
        known = self._heard(client, now)
        if (client, number) in consumer.claims:
            return [self._handed(consumer, client, number, consumer.claims[client, number])]
        if again and number not in known.done and known.asks.get(consumer.name, (0,))[0] != number:
            return [self._handed(consumer, client, number, (), "void")]
        if number >= known.last.get(consumer.name, 0) and number not in known.done:
            known.last[consumer.name] = number
            known.asks[consumer.name] = (number, wanted)
        return self._serve()

    def settle(
        self, client: str, name: str, acknowledged: Sequence[int], returned: Sequence[int], now: float
    ) -> tuple[list[int], list[Handed]]:
        """A client is done with claims, or gives them back. Returns those that are not its own (any more)."""
        known = self._heard(client, now)
        consumer = self._consumers.get(name)
        stale = []
        for number in acknowledged:
            positions = None if consumer is None else consumer.claims.pop((client, number), None)
            if consumer is not None and positions is not None:
                self.progress += 1
                consumer.full = False
                known.done[number] = None
                for position in positions:
                    self._let_go(consumer, position)
            elif number not in known.done:
                stale.append(number)
        while len(known.done) > REMEMBERED:
            known.done.popitem(last=False)
        for number in returned:
            if consumer is not None:
                self._take_back(consumer, (client, number))
        return stale, self._serve()

    def claimed(self, client: str, name: str, number: int) -> tuple[int, ...]:
        """The groups of a claim; none if it is not this client's (any more)."""
        consumer = self._consumers.get(name)
        return () if consumer is None else consumer.claims.get((client, number), ())

    def alive(self, client: str, now: float) -> None:
        """A sign of life of a client, if it is known: what waits for it goes on waiting."""
        if client in self._clients:
            known = self._heard(client, now)
            self.signs += any(map(self._waits_for, known.last))

    def leave(self, client: str) -> list[Handed]:
        """A client ends: what it has claimed goes to others of its consumers."""
        if self._clients.pop(client, None) is None:
            return []
        for consumer in self._consumers.values():
            for claim in [claim for claim in consumer.claims if claim[0] == client]:
                self._take_back(consumer, claim)
        return self._serve()

    def forget(self, name: str) -> list[Handed]:
        """Close a consumer: nothing is kept for it any longer. Raises ProtocolError for one of the owner's own."""
        if name in self._consumers and self._consumers[name].owned:
            raise ProtocolError(f"consumer {name!r} is a step of the flow, which waits for what clients write")
        consumer = self._consumers.pop(name, None)
        if consumer is None:
            return []
        for position in [*consumer.ready, *consumer.partial, *(p for ps in consumer.claims.values() for p in ps)]:
            self._let_go(consumer, position)
        answers = []
        for client, known in self._clients.items():
            if name in known.asks:
                answers.append(Handed(client, known.asks.pop(name)[0], name, (), "closed", consumer.missed))
        return answers

    def tick(self, now: float) -> list[Handed]:
        """Look who is silent. Call it a few times per `silence_s`."""
        holders = {client for one in self._consumers.values() for client, _ in one.claims}
        for name, known in list(self._clients.items()):
            if now - known.heard_at > self._silence_s:
                known.silent = True
                known.asks.clear()
                # What it has acknowledged is known for longer: it may repeat that.
                long_ago = now - known.heard_at > REMEMBERED_SILENCES * self._silence_s
                if name not in holders and (long_ago or not known.done):
                    del self._clients[name]
        self._close_unread(now)
        return self._serve()

    def _close_unread(self, now: float) -> None:
        """Close consumers that may lose groups and have had no client for long: they would keep memory for nobody."""
        read = {name for known in self._clients.values() if not known.silent for name in known.last}
        for name, one in list(self._consumers.items()):
            if one.lossless or name in read:
                one.unread_since = math.inf
                continue
            one.unread_since = min(one.unread_since, now)
            limit = ABANDONED_SILENCES if one.claims else REMEMBERED_SILENCES
            if now - one.unread_since > limit * self._silence_s:
                self.forget(name)

    def knows(self, client: str) -> bool:
        """Whether a client has asked for something, and has not been given up."""
        return client in self._clients

    # -- what the owner asks
    @property
    def held_up_by(self) -> str:
        """A consumer that loses nothing and has reached its bound: nothing may be leased until it has read. Or ""."""
        return next((one.name for one in self._consumers.values() if one.holds_up(self._limit)), "")

    def unread(self) -> list[str]:
        """Consumers that have not read everything and have clients, and those that lose nothing."""
        busy = {name for client in self._clients.values() if not client.silent for name in client.last}
        return [one.name for one in self._consumers.values() if one.pinned.total and (one.lossless or one.name in busy)]

    def held_for_more(self, name: str) -> SamplesWanted | None:
        """What a client still wants that keeps groups until it has more, while there are none."""
        one = self._consumers[name]
        asks = [known.asks[name][1] for known in self._clients.values() if name in known.asks]
        return None if one.ready else next((wanted for wanted in asks if wanted.holds), None)

    def counts(self) -> list[ConsumerCounts]:
        """How far each consumer is."""
        clients = Counter(name for client in self._clients.values() if not client.silent for name in client.last)
        return [
            ConsumerCounts(
                name=one.name,
                lossless=one.lossless,
                unread=len(one.ready) + len(one.partial),
                claimed=sum(map(len, one.claims.values())),
                missed=one.missed,
                clients=clients[one.name],
                kept_bytes=one.pinned.total,
            )
            for one in self._consumers.values()
        ]

    def fields_of(self, name: str) -> tuple[str, ...]:
        """What a consumer reads."""
        return tuple(sorted(self._consumers[name].fields))

    # -- details
    def _open(self, wanted: SamplesWanted) -> ConsumerState:
        fields = frozenset(wanted.fields)
        found = self._consumers.get(wanted.consumer)
        if found is None:
            self._check_new(wanted.consumer)
            found = self._consumers[wanted.consumer] = ConsumerState(wanted.consumer, fields, wanted.lossless)
        if found.owned:
            if not fields <= found.fields:
                more = sorted(fields - found.fields)
                raise ProtocolError(
                    f"step {found.name!r} shows clients {sorted(found.fields)}, and not {more}: add what they need to "
                    "its `reads` in the recipe"
                )
        elif (found.fields, found.lossless) != (fields, wanted.lossless):
            how = "lossless" if found.lossless else "not lossless"
            raise ProtocolError(
                f"consumer {found.name!r} reads {sorted(found.fields)}, {how}: all its clients have to ask for the "
                "same — use these, or another name for the consumer"
            )
        return found

    def _check_new(self, name: str) -> None:
        if len(self._consumers) >= MOST_CONSUMERS:
            raise ProtocolError(f"there are {MOST_CONSUMERS} consumers already — close one that is not read any more")
        step = nearest(name, [one.name for one in self._consumers.values() if one.owned], ALIKE)
        if step is not None:
            raise ProtocolError(
                f"consumer {name!r}: did you mean step {step!r}, whose fields clients write? To read only, use a name "
                "that is less like it"
            )

    def _heard(self, client: str, now: float) -> ClientState:
        if client not in self._clients and len(self._clients) >= MOST_CLIENTS:
            raise ProtocolError(f"there are {MOST_CLIENTS} clients already — close some")
        known = self._clients.setdefault(client, ClientState(now))
        known.heard_at, known.silent = now, False
        return known

    def _add(self, consumer: ConsumerState, position: int, group: Offered) -> None:
        self.kept.setdefault(position, group)
        self._uses[position] += 1
        consumer.pinned.add(position, group)
        (consumer.ready if consumer.fields <= group.fields else consumer.partial)[position] = None
        while not consumer.lossless and consumer.pinned.total > self._limit and (consumer.ready or consumer.partial):
            oldest = next(iter(consumer.ready or consumer.partial))
            consumer.ready.pop(oldest, None)
            consumer.partial.pop(oldest, None)
            consumer.missed += 1
            consumer.full = bool(consumer.claims) and not consumer.ready
            self._let_go(consumer, oldest)

    def _let_go(self, consumer: ConsumerState, position: int) -> None:
        consumer.pinned.let_go(position)
        self._uses[position] -= 1
        if not self._uses[position]:
            del self._uses[position], self.kept[position]

    def _waits_for(self, name: str) -> bool:
        """Whether the owner waits for clients of this consumer."""
        one = self._consumers.get(name)
        return one is not None and (bool(one.pinned.total) if one.owned else one.holds_up(self._limit))

    def _take_back_from_silent(self, consumer: ConsumerState) -> None:
        for claim in reversed([claim for claim in consumer.claims if self._clients[claim[0]].silent]):
            self._take_back(consumer, claim)

    def _take_back(self, consumer: ConsumerState, claim: tuple[str, int]) -> None:
        consumer.full = False
        for position in reversed(consumer.claims.pop(claim, ())):
            consumer.ready[position] = None
            consumer.ready.move_to_end(position, last=False)

    def _serve(self) -> list[Handed]:
        """Answer the asks that can be answered, the client that has waited longest first."""
        answers = []
        for client, known in self._clients.items():
            for name, (number, wanted) in list(known.asks.items()):
                consumer = self._consumers[name]
                answer = self._answer(consumer, client, number, wanted)
                if answer is not None:
                    del known.asks[name]
                    answers.append(answer)
        for answer in answers:
            # Whoever was served is last in line.
            self._clients[answer.client] = self._clients.pop(answer.client)
        return answers

    def _answer(self, consumer: ConsumerState, client: str, number: int, wanted: SamplesWanted) -> Handed | None:
        if not consumer.ready:
            self._take_back_from_silent(consumer)
        if consumer.ready:
            positions = self._fitting(consumer, wanted)
            for position in positions:
                del consumer.ready[position]
            consumer.claims[client, number] = positions
            return self._handed(consumer, client, number, positions)
        if not self._finished:
            full = wanted.holds and (consumer.full or consumer.holds_up(self._limit))
            return self._handed(consumer, client, number, (), "full") if full else None
        others = any(holder != client for holder, _ in consumer.claims)
        if self._closed or not (others or consumer.partial):
            return self._handed(consumer, client, number, (), "over")
        return self._handed(consumer, client, number, (), "drained") if wanted.holds else None

    def _handed(
        self, consumer: ConsumerState, client: str, number: int, positions: tuple[int, ...], end: End = ""
    ) -> Handed:
        tokens = sum(self.kept[position].tokens for position in positions)
        return Handed(client, number, consumer.name, positions, end, consumer.missed, tokens)

    def _fitting(self, consumer: ConsumerState, wanted: SamplesWanted) -> tuple[int, ...]:
        """The next groups, until they reach what is wanted; whole groups, so the last one may go beyond."""
        found: list[int] = []
        rows = tokens = nbytes = 0
        for position in consumer.ready:
            group = self.kept[position]
            full = (wanted.rows and rows >= wanted.rows) or (wanted.tokens and tokens >= wanted.tokens)
            if found and (full or nbytes + group.nbytes > ANSWER_BYTES or len(found) == ANSWER_GROUPS):
                break
            found.append(position)
            rows, tokens, nbytes = rows + group.rows, tokens + group.tokens, nbytes + group.nbytes
        return tuple(found)
