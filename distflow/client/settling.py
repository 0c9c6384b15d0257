"""Tells the owners what has become of claims: used, given back, or what a step's fields are for their rows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import accumulate, pairwise
from typing import Any, Protocol

import msgspec
from msgspec import structs

from distflow.client.reading import Part
from distflow.comm.message import Buffer
from distflow.data.batch import Batch
from distflow.data.batch_wire import encode_batch
from distflow.errors import DistflowError
from distflow.exchange.consumers import REMEMBERED
from distflow.exchange.store_channel import PUT, SETTLE, Settled, Written

AT_ONCE = REMEMBERED // 2
"""Claims in one request: an owner that gets it twice still knows what it has answered."""


class StaleRows(DistflowError):
    """Samples that are not this client's any more: it was silent for too long, or their owner or the run has ended.

    They have gone, or will go, to a client of the same consumer again.
    """


class Request(Protocol):
    """Sends a request to an owner until its reply comes; None: the run is over. Raises UserError for a refusal."""

    def __call__(
        self, owner: str, kind: str, body: Callable[..., msgspec.Struct], payload: Sequence[Buffer] = ()
    ) -> dict[str, Any] | None:
        """`body(number=…)` is the request with its number."""


class Settling:
    """Of the client `name`. `gave_back(consumer, owner)` is called with what was given back."""

    def __init__(self, name: str, request: Request, gave_back: Callable[[str, str], None]) -> None:
        self._name = name
        self._request = request
        self._gave_back = gave_back

    def put(self, step: str, parts: Sequence[Part], fields: Batch) -> None:
        """Write the fields of a step for all these rows.

        Raises UserError, before anything is written, if some do not fit, and StaleRows if some could not be written.
        """
        ends = list(accumulate(part.batch.rows for part in parts))
        batches = [fields.slice(start, stop) for start, stop in pairwise([0, *ends])]
        # What one owner has written cannot be taken back when the next one refuses its part.
        for looks in (True, False) if len(parts) > 1 else (False,):
            stale = 0
            for part, batch in zip(parts, batches, strict=True):
                described, buffer = encode_batch(batch)
                written = Written(self._name, 0, step, part.number, described, looks)
                stale += self._stale(step, part.owner, PUT, written, (buffer,))
        _check_stale(step, stale)

    def settle(self, consumer: str, parts: Sequence[Part], *, used: bool) -> None:
        """They are used, or given back. Raises StaleRows if some were not this client's any more."""
        stale = 0
        for owner in dict.fromkeys(part.owner for part in parts):
            numbers = tuple(part.number for part in parts if part.owner == owner)
            for first in range(0, len(numbers), AT_ONCE):
                some = numbers[first : first + AT_ONCE]
                settled = Settled(self._name, 0, consumer, some if used else (), () if used else some)
                stale += self._stale(consumer, owner, SETTLE, settled)
            if not used:
                self._gave_back(consumer, owner)
        _check_stale(consumer, stale)

    def _stale(self, consumer: str, owner: str, kind: str, body: msgspec.Struct, payload: Sequence[Buffer] = ()) -> int:
        """How many of these claims were not this client's any more."""
        reply = self._request(owner, kind, partial(structs.replace, body), payload)
        if reply is None and not (isinstance(body, Settled) and body.returned):
            raise StaleRows(
                f"consumer {consumer!r}: the run has ended before {owner} confirmed this, so it may not be written — a "
                "step, or a consumer that is lossless, gets these samples again if the run is resumed"
            )
        return 0 if reply is None else len(reply["stale"])


def _check_stale(consumer: str, stale: int) -> None:
    if stale:
        raise StaleRows(
            f"consumer {consumer!r}: these samples are not this client's any more — it was silent for too long, or a "
            "training worker has restarted; they go to a client of this consumer again"
        )
