"""The generating worker's end of the sample channel: finished groups out, kept until their owner answers for them.

Groups that finish together travel as one message per owner, with one buffer, up to `MESSAGE_BYTES`. What is not
acknowledged is sent again, but only when the last copy has left this process: an owner that is gone for a while finds
one copy of each group when it comes back.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any

from distflow.comm.message import Buffer
from distflow.comm.message import Message as WireMessage
from distflow.comm.outbox import SentOnce
from distflow.data.batch import Batch, RowRange, group_ranges, join
from distflow.data.batch_wire import encode_batch
from distflow.exchange.lease_client import HolderCore
from distflow.exchange.lease_settings import MESSAGE_BYTES
from distflow.exchange.lease_wire import kind_of, lease_message, to_wire
from distflow.exchange.messages import HandBack, Message, Outgoing, Result
from distflow.exchange.sample_receiver import RESULTS, Post
from distflow.types import Version

OWNER_KINDS = ("grant", "refuse", "ack", "cancel", "again", "closed", "finished")
LocalAccept = Callable[[Sequence[Result], Batch | None], None]


class OutboundSamples:
    """Connects a HolderCore with sockets on one side and the generating loop on the other.

    `local_accept` takes results for an owner in this very process (colocated layouts), without any encoding.
    Always called under the worker's lock.
    """

    def __init__(
        self, core: HolderCore, post: Post, local_owner: str = "", local_accept: LocalAccept | None = None
    ) -> None:
        self.core = core
        self._post = post
        self._local_owner = local_owner
        self._local_accept = local_accept
        self._sent = SentOnce()
        self._kept: dict[int, RowRange] = {}

    def on_message(self, message: WireMessage, now: float) -> None:
        """A lease message from the wire; raises ProtocolError if it is malformed."""
        self.send(self.core.handle(lease_message(message), now))
        for position in self.core.take_acked():
            self._kept.pop(position, None)

    def finish(self, batch: Batch, dropped: Mapping[int, str], now: float) -> None:
        """Whole groups are done; those named in `dropped` are reported with the reason, without their rows."""
        out: list[Outgoing] = []
        oldest = _oldest(batch)
        share = batch.nbytes // max(1, batch.rows)
        for position, rows in group_ranges(batch).items():
            reason = dropped.get(position, "")
            if not reason:
                self._kept[position] = rows
            size = 0 if reason else share * (rows.stop - rows.start)
            first = min(filter(None, oldest[rows.start : rows.stop]), default=None)
            out += self.core.finished(position, first, size, reason, now)
        self.send(out)
        for position in self.core.take_acked():
            self._kept.pop(position, None)

    def send(self, out: Iterable[Outgoing]) -> None:
        """Put the core's messages on the wire, results with their rows."""
        results: dict[str, list[Result]] = {}
        for item in out:
            key = _key(item.message)
            if key is not None and self._sent.under_way(item.to, key):
                continue
            if isinstance(item.message, Result):
                results.setdefault(item.to, []).append(item.message)
                continue
            delivery = self._post(item.to, kind_of(item.message), *to_wire(item.message))
            if key is not None:
                self._sent.note(item.to, key, delivery)
        for owner, found in results.items():
            for alike in self._by_columns(found):
                for some in _by_size(alike):
                    self._send_results(owner, some)

    def _by_columns(self, results: Sequence[Result]) -> Iterable[list[Result]]:
        """Results that can be one batch: those sent again may come from steps that wrote different fields."""
        alike: dict[frozenset[str], list[Result]] = {}
        for result in results:
            fields = frozenset() if result.dropped else frozenset(self._kept[result.position].batch.columns)
            alike.setdefault(fields, []).append(result)
        return alike.values()

    def _send_results(self, owner: str, results: list[Result]) -> None:
        rows = [self._kept[result.position] for result in results if not result.dropped]
        batch = join(rows) if rows else None
        if owner == self._local_owner and self._local_accept is not None:
            self._local_accept(results, batch)
            return
        body: dict[str, Any] = {"results": [to_wire(result).body for result in results], "batch": None}
        payload: Sequence[Buffer] = ()
        if batch is not None:
            body["batch"], buffer = encode_batch(batch)
            payload = (buffer,)
        delivery = self._post(owner, RESULTS, body, payload)
        if delivery.dropped:
            self.core.not_sent(result.position for result in results)
        for result in results:
            self._sent.note(owner, result.position, delivery)


def _key(message: Message) -> Hashable:
    """What tells a copy of this message from others; None where copies are small or never sent again."""
    if isinstance(message, Result):
        return message.position
    return message.positions if isinstance(message, HandBack) else None


def _by_size(results: Iterable[Result]) -> Iterator[list[Result]]:
    """In messages of at most `MESSAGE_BYTES`, unless one group alone is larger."""
    some: list[Result] = []
    size = 0
    for result in results:
        if some and size + result.nbytes > MESSAGE_BYTES:
            yield some
            some, size = [], 0
        some.append(result)
        size += result.nbytes
    if some:
        yield some


def _oldest(batch: Batch) -> list[Version | None]:
    """The oldest version of each row's tokens; None for a row without any."""
    spans = batch.ragged("policy_versions")
    versions = [Version(term, number) for term, number, _, _ in spans.values.tolist()]
    return [min(versions[a:b], default=None) for a, b in pairwise(spans.offsets.tolist())]
