"""What lossless consumers have yet to acknowledge when a checkpoint is written, as bytes that go with it.

Only groups that its ledgers have trained on: all others are generated again after a restart, and arrive as new ones.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import msgspec

from distflow.data.batch import Batch, RowRange
from distflow.data.batch_wire import decode_batch, encode_batch
from distflow.data.decoding import Row, Whole
from distflow.exchange.sample_channel import ArrivedGroup

Trained = Callable[[int], bool]
"""Whether a position has been trained on."""


class KeptConsumer(Row, frozen=True):
    """A lossless consumer, with the positions that it has yet to acknowledge."""

    name: str
    fields: tuple[str, ...]
    positions: tuple[Whole, ...]


class _Group(Row, frozen=True):
    position: Whole
    worker: str
    tokens: Whole
    batch: Mapping[str, Any]
    data: bytes


class _Saved(Row, frozen=True):
    consumers: tuple[KeptConsumer, ...]
    groups: Annotated[tuple[_Group, ...], msgspec.Meta(max_length=1 << 24)]


@dataclass(frozen=True, slots=True)
class KeptSamples:
    """The consumers of one owner, and the groups that they have yet to acknowledge, with their tokens."""

    consumers: Sequence[KeptConsumer]
    groups: Mapping[int, tuple[ArrivedGroup, int]]

    def encode(self) -> bytes:
        """As bytes; none if there are no such consumers."""
        if not self.consumers:
            return b""
        groups = tuple(_encoded(group, tokens) for group, tokens in self.groups.values())
        return msgspec.msgpack.encode(_Saved(tuple(self.consumers), groups))

    @classmethod
    def decode(cls, data: bytes) -> KeptSamples:
        """The inverse, for bytes that are as they were written."""
        saved = msgspec.msgpack.decode(data, type=_Saved)
        return cls(saved.consumers, {one.position: (_decoded(one), one.tokens) for one in saved.groups})


def trained_by(snapshot: Mapping[str, Any]) -> Trained:
    """By the ledgers of a checkpoint."""
    count = int(snapshot["batch_ledgers"])
    ledgers = {one["ledger"]: (one["frontier"], frozenset(one["trained"])) for one in snapshot["ledgers"]}

    def trained(position: int) -> bool:
        k, ledger = divmod(position, count)
        frontier, ahead = ledgers.get(ledger, (0, frozenset()))
        return k < frontier or k in ahead

    return trained


def _encoded(group: ArrivedGroup, tokens: int) -> _Group:
    rows = group.rows.batch.slice(group.rows.start, group.rows.stop)
    described, buffer = encode_batch(rows.with_columns(**group.more))
    return _Group(group.position, group.worker, tokens, described, bytes(buffer))


def _decoded(saved: _Group) -> ArrivedGroup:
    batch: Batch = decode_batch(saved.batch, memoryview(saved.data))
    return ArrivedGroup(saved.position, RowRange(batch, 0, batch.rows), saved.worker)
