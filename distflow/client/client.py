"""A program outside a run, as one more peer of its training workers.

Threads: those of the user call the methods; one of its own sends and receives (`comm/client.py`). The condition guards
what they share.
"""

from __future__ import annotations

import os
import secrets
import shlex
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, Self, TypeVar

import msgspec
from msgspec import structs

from distflow.client.arguments import check_consumer, check_request, check_seconds, check_site
from distflow.client.attached_run import CHECK_EVERY_S, AttachedRun, HasPath
from distflow.client.feeding import FeedCall, Feeding
from distflow.client.reading import REPEAT_S, AnswerBody, ConsumerReading, OwnerAnswer, Part
from distflow.client.samples import Samples
from distflow.client.settling import Settling
from distflow.client.weights import Replies, WeightSubscription
from distflow.comm.client import BackgroundClient
from distflow.comm.message import Buffer, Message
from distflow.comm.outbox import SentOnce
from distflow.data.batch_wire import decode_batch
from distflow.errors import NoProgressError, ProtocolError, UserError
from distflow.exchange.store_channel import (
    ALIVE,
    ALIVE_S,
    ASK,
    FORGET,
    LEAVE,
    Forgotten,
    From,
)
from distflow.launch.observe.run_client import keys_of

SILENT_S = 5.0
"""After so long without a word of an owner the run itself is looked at: it may be over."""
REQUEST_AGAIN_S = 1.0
"""After so long without a reply a request is repeated, once the former copy has left."""
T = TypeVar("T")


class Client:
    """Attaches to a run that goes on: `run` is its folder, or what `distflow.launch` or `load_run` returned.

    From another machine: a copy of the folder's run.json and keys/run.key is enough. Several clients may read as one
    consumer and share its samples. Waits up to `timeout_s` seconds for the run to start; raises UserError if there is
    none, or if it is over, and ProtocolError for another run's key. Use it as a context, or `close` it.
    """

    def __init__(self, run: HasPath | str | os.PathLike[str], *, timeout_s: float = 60.0) -> None:
        check_seconds("timeout_s", timeout_s)
        self._name = secrets.token_hex(8)
        self._changed = threading.Condition()
        self._readings: dict[str, ConsumerReading] = {}
        self._using: set[str] = set()
        """Consumers that a thread is waiting for samples of."""
        self._numbers = 0
        self._replies: dict[int, dict[str, Any]] = {}
        self._awaited: set[int] = set()
        self._refused: dict[str, str] = {}
        """Why an owner does not serve a consumer."""
        self._over: set[str] = set()
        """Owners that have said that the run is over."""
        self._subscriptions: list[WeightSubscription] = []
        self._fault: Exception | None = None
        self._say_alive_at = 0.0
        self._run = AttachedRun(run)
        self._owners = self._run.find_owners(time.monotonic() + timeout_s)
        self._heard = dict.fromkeys(self._owners, time.monotonic())
        self._feeding = Feeding(self._name, self._ask_first)
        self._settling = Settling(self._name, self._request, self._gave_back)
        self._wire = BackgroundClient(keys_of(self._run.record), self._on_reply, self._on_tick, self._on_fault)
        self._meet()
        self._wire.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *raised: object) -> None:
        self.close()

    def get(
        self,
        fields: Sequence[str],
        *,
        consumer: str,
        rows: int = 0,
        tokens: int = 0,
        lossless: bool = False,
        timeout: float | None = None,
    ) -> Samples | None:
        """Wait for samples, and claim them: at least `rows` rows and `tokens` tokens, in whole groups.

        Without either: whatever has arrived. Fewer at the end of the run, and where an owner keeps no more
        (`limits.consumer_mb`); None once all has been read, or the run is stopped. `consumer`: a name whose clients
        share what arrives after its first `get`; each of them asks for the same fields. A `lossless` one gets every
        group: when it has `limits.consumer_mb` unread, the run waits for it. Others lose the oldest. A step that
        clients write is a consumer by its name: it gets every group, and samples are done once its fields are written
        with `samples.put`. Raises UserError for fields that samples do not have, TimeoutError after `timeout` seconds,
        WorkerFailed if the run has failed, and NoProgressError if nothing of it answers.
        """
        check_request(fields, consumer, rows, tokens, timeout)
        with self._changed:
            self._check_unused(consumer)
            reading = self._reading(consumer, fields, lossless=lossless)
            self._using.add(consumer)
            try:
                reading.want(rows, tokens)
                self._ask()
                none: list[Part] = []
                parts = self._until(lambda: self._taken(reading), f"samples for consumer {consumer!r}", timeout, none)
            finally:
                self._using.discard(consumer)
        return Samples(self._settling, reading, parts) if parts else None

    def put_prompts(self, rows: Iterable[Mapping[str, Any]], *, timeout: float | None = None) -> int:
        """Put prompts, rows as of a file, into a run that gets them by `distflow.data.fed:by_clients`.

        Returns how many were taken, from the first on: fewer than all after `timeout` seconds without room for more
        (`data.with.ahead`), and at the end of the run. Raises UserError, and takes none, if any of them is no prompt.
        """
        return self._feeding.put(rows, timeout)

    def end_prompts(self) -> None:
        """No further prompts come, though the recipe says so: passes over those that are there follow."""
        self._feeding.end()

    def subscribe_weights(self, model: str = "policy", *, site: str = "") -> WeightSubscription:
        """The newest version of a model, and each one after it; nobody waits for this client.

        `site`: where this program runs, as the hosts file names it: it takes from hosts there what they have. Raises
        UserError if no host of the run stands there.
        """
        record = self._run.record
        check_site(site, [host.site for host in record.hosts])
        found = WeightSubscription(model, self._name, record.trainers, self._ask_all, record.no_progress_s, site)
        self._subscriptions.append(found)
        return found

    def forget(self, consumer: str) -> None:
        """Close a consumer for all its clients: the run keeps nothing for it any longer.

        Raises UserError for a step, and if the run ends before it is closed.
        """
        check_consumer(consumer)
        with self._changed:
            self._check_unused(consumer)
            self._readings.pop(consumer, None)
        for owner in self._owners:
            if self._request(owner, FORGET, partial(structs.replace, Forgotten(self._name, 0, consumer))) is None:
                raise UserError(f"consumer {consumer!r}: the run has ended before {owner} closed it")

    def close(self) -> None:
        """Leave: what was claimed and not acknowledged goes to others."""
        self._on_fault(UserError("this client is closed — make another one"))
        for owner in self._owners:
            self._wire.send(owner, LEAVE, msgspec.to_builtins(From(self._name)))
        self._wire.close()
        for subscription in self._subscriptions:
            subscription.close()

    # -- used by WeightSubscription
    def _ask_all(
        self,
        names: Sequence[str],
        kind: str,
        body: Callable[[int], msgspec.Struct],
        timeout: float | None,
        ready: Callable[[Replies], T | None],
    ) -> T | None:
        """Ask these workers, again and again, until their replies are what is awaited; None: the run is over."""
        replies: dict[str, dict[str, Any]] = {}
        sent = [0.0]

        def heard() -> T | None:
            if time.monotonic() - sent[0] >= REPEAT_S:
                sent[0] = time.monotonic()
                for number, name in numbers.items():
                    if name not in replies:
                        self._wire.send(name, kind, msgspec.to_builtins(body(number)))
            replies.update({name: self._replies.pop(at) for at, name in numbers.items() if at in self._replies})
            return ready(replies)

        with self._changed:
            numbers = {self._number(): name for name in names}
            self._awaited.update(numbers)
            try:
                return self._until(heard, "weights", timeout, None, told=True)
            finally:
                self._awaited.difference_update(numbers)

    def _ask_first(self, asking: FeedCall) -> Mapping[str, Any] | None:
        """For Feeding: ask the owner that takes prompts, whoever that is by now; None: the run is over."""

        def replied() -> Mapping[str, Any] | None:
            reply = asking.answer(self._replies.pop(number, None))
            if reply is None and (sends := asking.sends(number, time.monotonic())):
                self._wire.send(self._owners[0], asking.kind, *sends)
            return reply

        with self._changed:
            self._awaited.add(number := self._number())
            try:
                return self._until(replied, "prompts to be taken", None, None, told=True)
            finally:
                self._awaited.discard(number)

    # -- requests
    def _gave_back(self, consumer: str, owner: str) -> None:
        with self._changed:
            if consumer in self._readings:
                self._readings[consumer].gave_back(owner)

    def _check_unused(self, consumer: str) -> None:
        if consumer in self._using:
            raise UserError(
                f"consumer {consumer!r}: another thread is in `get` — use a Client for each thread; they share"
            )

    def _reading(self, consumer: str, fields: Sequence[str], *, lossless: bool) -> ConsumerReading:
        known = self._readings.get(consumer)
        if known is None:
            known = ConsumerReading(self._name, consumer, fields, self._owners, self._number, lossless=lossless)
            self._readings[consumer] = known
        self._refused.pop(consumer, None)
        if (known.fields, known.lossless) != (tuple(fields), lossless):
            raise UserError(
                f"consumer {consumer!r} reads {list(known.fields)}, lossless={known.lossless}: it cannot change — use "
                "another Client, another name, or forget it first"
            )
        return known

    def _number(self) -> int:
        self._numbers += 1
        return self._numbers

    def _taken(self, reading: ConsumerReading) -> list[Part] | None:
        if reading.consumer in self._refused:
            # It is not open: it may be asked for in another way.
            self._readings.pop(reading.consumer, None)
            raise UserError(self._refused.pop(reading.consumer))
        parts = reading.take()
        return [] if parts is None and reading.over else parts

    def _ask(self) -> None:
        now = time.monotonic()
        for name in self._using:
            for owner, asked in self._readings[name].asks(now):
                self._wire.send(owner, ASK, msgspec.to_builtins(asked))

    def _request(
        self, owner: str, kind: str, body: Callable[..., msgspec.Struct], payload: Sequence[Buffer] = ()
    ) -> dict[str, Any] | None:
        """Send a request until its reply comes; None: the run is over. Raises UserError if that is a refusal."""
        with self._changed:
            number = self._number()
            self._awaited.add(number)
            sent = [0.0]
            copies = SentOnce()

            def replied() -> dict[str, Any] | None:
                due = time.monotonic() - sent[0] >= REQUEST_AGAIN_S and not copies.under_way(owner, number)
                if number not in self._replies and due:
                    sent[0] = time.monotonic()
                    plain = msgspec.to_builtins(body(number=number), builtin_types=(bytes,))
                    copies.note(owner, number, self._wire.send(owner, kind, plain, payload))
                if owner not in self._owners:
                    # It is gone for good, and its claims with it.
                    return {"stale": [number]}
                return self._replies.pop(number, None)

            try:
                reply: dict[str, Any] | None = self._until(replied, f"{owner} to confirm", None, None)
            finally:
                self._awaited.discard(number)
        if reply is not None and "error" in reply:
            raise UserError(str(reply["error"]))
        return reply

    def _until(
        self, ready: Callable[[], T | None], what: str, timeout: float | None, over: T, *, told: bool = False
    ) -> T:
        """Wait under the condition; `over`: what to return once the run has ended, or with `told` all owners say so."""
        began, name = time.monotonic(), self._run.record.name
        while (found := ready()) is None:
            if self._fault is not None:
                raise self._fault
            now = time.monotonic()
            if timeout is not None and now - began >= timeout:
                raise TimeoutError(f"{name}: waited {timeout:g} s for {what} — the run goes on; ask again")
            if told and self._over.issuperset(self._owners):
                self._look()
                return over
            silent = [owner for owner, at in self._heard.items() if now - at > SILENT_S]
            if silent and self._run.due(now):
                if self._look():
                    return over
                continue
            longest = max(now - at for at in self._heard.values())
            if longest > self._run.record.no_progress_s:
                raise NoProgressError(
                    f"{name}: no word of {', '.join(silent)} for {longest:.0f} s, while waiting for {what} — "
                    f"`distflow status {shlex.quote(str(self._run.record.path))}` tells how the run is"
                )
            left = CHECK_EVERY_S if timeout is None else began + timeout - now
            self._changed.wait(max(0.0, min(CHECK_EVERY_S, left)))
        return found

    # -- the run
    def _look(self) -> bool:
        """Whether the run has ended, and if not, who owns its samples by now. Nothing else waits for this meanwhile."""
        self._changed.release()
        try:
            ended = self._run.ended()
            owners = () if ended else self._run.owners()
        finally:
            self._changed.acquire()
        if owners and owners != self._owners:
            now = time.monotonic()
            self._owners = owners
            self._heard = {owner: self._heard.get(owner, now) for owner in owners}
            for reading in self._readings.values():
                reading.owned_by(owners)
        self._meet()
        return ended

    def _meet(self) -> None:
        record = self._run.record
        for name in record.trainers:
            self._wire.know(name, record.roster.get(name, ""))

    # -- on the thread of the connection
    def _on_reply(self, owner: str, message: Message) -> None:
        with self._changed:
            body = message.body
            number = body.get("number")
            if message.kind == f"{ASK}.reply":
                self._on_answer(owner, message)
            elif message.kind == f"{ALIVE}.reply":
                (self._over.add if body.get("over") is True else self._over.discard)(owner)
            elif isinstance(number, int) and number in self._awaited:
                self._replies[number] = dict(body)
            if owner in self._heard:
                self._heard[owner] = time.monotonic()
                for reading in self._readings.values():
                    reading.heard(owner, message.incarnation)
            self._ask()
            self._changed.notify_all()

    def _on_answer(self, owner: str, message: Message) -> None:
        answered = msgspec.convert(message.body, AnswerBody)
        if answered.refusal:
            self._refused[answered.consumer] = answered.refusal
            return
        reading = self._readings.get(answered.consumer)
        if reading is None:
            return
        part = None
        if answered.batch is not None:
            batch = decode_batch(answered.batch, message.payload[0])
            part = Part(owner, answered.number, batch, answered.tokens)
        about = (answered.end, answered.missed)
        reading.answered(OwnerAnswer(owner, message.incarnation, answered.number, *about, part))

    def _on_tick(self) -> None:
        with self._changed:
            now = time.monotonic()
            if now >= self._say_alive_at:
                self._say_alive_at = now + ALIVE_S
                for owner in self._owners:
                    self._wire.send(owner, ALIVE, msgspec.to_builtins(From(self._name, self._feeding.feeds)))
            self._ask()

    def _on_fault(self, error: Exception) -> None:
        with self._changed:
            self._fault = error if isinstance(error, ProtocolError | UserError) else _broken(error)
            self._changed.notify_all()


def _broken(error: Exception) -> ProtocolError:
    found = ProtocolError(f"the client's connection has ended: {error}")
    found.__cause__ = error
    return found
