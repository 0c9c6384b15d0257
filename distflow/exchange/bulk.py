"""Tokens and log-probs of lease messages, which travel beside the header in one payload frame.

A message's *head* is the message with a number in the place of each run of tokens: how many there are. The numbers
themselves lie behind each other in the payload, in the order in which the head counts them, so that the header stays
small whatever the samples have produced, and its bulk is copied rather than parsed.

Example: the head of a Piece of 3 tokens is PieceHead(position, sample, start, 3, …), with 3·4 + 3·8 bytes of payload.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from distflow.errors import ProtocolError
from distflow.exchange.messages import Grant, HandBack, Lease, Message, Piece, Progress
from distflow.exchange.partials import LOGPROB, LOGPROB_BYTES, TOKEN, TOKEN_BYTES
from distflow.types import BegunSample, Span


@dataclass(frozen=True, slots=True)
class BegunHead:
    """Of a BegunSample."""

    sample: int
    tokens: int
    spans: tuple[Span, ...]
    finish_reason: str


@dataclass(frozen=True, slots=True)
class PieceHead:
    """Of a Piece."""

    position: int
    sample: int
    start: int
    tokens: int
    spans: tuple[Span, ...]
    finish_reason: str


def split(message: Message) -> tuple[Any, bytearray]:
    """The head of a message, and its payload."""
    bulk = bytearray()
    if isinstance(message, Grant):
        heads = tuple([_lease_head(lease, bulk) for lease in message.leases])
        return replace(message, leases=heads), bulk
    if isinstance(message, Progress | HandBack):
        pieces: Any = tuple([_piece_head(piece, bulk) for piece in message.pieces])
        return replace(message, pieces=pieces), bulk
    return message, bulk


def join(head: Any, payload: Sequence[memoryview]) -> Any:
    """The inverse, for a head that has been checked. Raises ProtocolError for a payload that is not the head's."""
    if isinstance(head, Grant):
        prompts, begun = _counted(head.leases)
        bulk = _Bulk(payload, prompts * TOKEN_BYTES + begun * (TOKEN_BYTES + LOGPROB_BYTES))
        return replace(head, leases=tuple([_lease(lease, bulk) for lease in head.leases]))
    if isinstance(head, Progress | HandBack):
        pieces: Sequence[Any] = head.pieces
        bulk = _Bulk(payload, sum(piece.tokens for piece in pieces) * (TOKEN_BYTES + LOGPROB_BYTES))
        return replace(head, pieces=tuple([_piece(piece, bulk) for piece in pieces]))
    _Bulk(payload, 0)
    return head


class _Bulk:
    """A payload, read from the front. Its size is compared with what the head says before anything is copied."""

    def __init__(self, payload: Sequence[memoryview], expected: int) -> None:
        size = sum(map(len, payload))
        if size != expected or len(payload) > 1:
            raise ProtocolError(
                f"tokens and log-probs of {expected} bytes in one payload frame were announced, got {size} bytes in "
                f"{len(payload)} frames"
            )
        self._data = payload[0] if payload else memoryview(b"")
        self._at = 0

    def tokens(self, count: int) -> bytes:
        """The next `count` token ids."""
        found = self._take(count * TOKEN_BYTES)
        if count and int(np.frombuffer(found, dtype=np.int32).min()) < 0:
            raise ProtocolError("a negative token id in the payload of a lease message; expected ids ≥ 0")
        return found

    def logprobs(self, count: int) -> bytes:
        """The next `count` log-probs."""
        return self._take(count * LOGPROB_BYTES)

    def _take(self, size: int) -> bytes:
        self._at += size
        return bytes(self._data[self._at - size : self._at])


def _lease_head(lease: Lease, bulk: bytearray) -> Any:
    bulk += array(TOKEN, lease.prompt_ids).tobytes()
    heads = []
    for begun in lease.begun:
        bulk += array(TOKEN, begun.token_ids).tobytes()
        bulk += array(LOGPROB, begun.logprobs).tobytes()
        heads.append(BegunHead(begun.sample, len(begun.token_ids), begun.spans, begun.finish_reason))
    counts: dict[str, Any] = {"prompt_ids": len(lease.prompt_ids), "begun": tuple(heads)}
    return replace(lease, **counts)


def _piece_head(piece: Piece, bulk: bytearray) -> PieceHead:
    bulk += piece.token_ids
    bulk += piece.logprobs
    tokens = len(piece.token_ids) // TOKEN_BYTES
    return PieceHead(piece.position, piece.sample, piece.start, tokens, piece.spans, piece.finish_reason)


def _counted(leases: Sequence[Any]) -> tuple[int, int]:
    """Tokens of all prompts, and of all samples that were begun."""
    return sum(lease.prompt_ids for lease in leases), sum(head.tokens for lease in leases for head in lease.begun)


def _lease(head: Any, bulk: _Bulk) -> Lease:
    prompt = tuple(array(TOKEN, bulk.tokens(head.prompt_ids)))
    begun = tuple([_begun(sample, bulk) for sample in head.begun])
    lease: Lease = replace(head, prompt_ids=prompt, begun=begun)
    return lease


def _begun(head: BegunHead, bulk: _Bulk) -> BegunSample:
    tokens = tuple(array(TOKEN, bulk.tokens(head.tokens)))
    logprobs = tuple(array(LOGPROB, bulk.logprobs(head.tokens)))
    return BegunSample(head.sample, tokens, logprobs, head.spans, head.finish_reason)


def _piece(head: PieceHead, bulk: _Bulk) -> Piece:
    tokens, logprobs = bulk.tokens(head.tokens), bulk.logprobs(head.tokens)
    return Piece(head.position, head.sample, head.start, tokens, logprobs, head.spans, head.finish_reason)
