"""Lease messages as plain values for msgpack, and back; whatever a peer sent is checked on the way in.

A message is a dictionary of its fields; the small records inside it (leases, reports, …) are lists in field order. Most
messages are their own form. Those with tokens and log-probs have a *head* instead: the same message with the number of
tokens in the place of each run of them. The tokens themselves lie behind each other in one payload frame, in the order
in which the head counts them, so that the header stays small and its bulk is copied rather than parsed. A few tokens
lie in the head itself: a frame of their own would cost more than copying them.

Example: the head of a Piece of 3 tokens is [position, sample, start, 3, …], with 3·4 + 3·8 bytes in its `bulk`, and 3·8
more if it has filtered log-probs.
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from operator import lt
from typing import Annotated, Any, NamedTuple, TypeVar

import msgspec

from distflow.comm.message import Buffer
from distflow.comm.message import Message as Envelope
from distflow.data.decoding import Form, PeerName, Row, Whole, decoder, read, shown
from distflow.errors import ProtocolError
from distflow.exchange.messages import (
    Ack,
    Again,
    Ask,
    Bye,
    Cancel,
    Closed,
    Finished,
    Grant,
    HandBack,
    Lease,
    Message,
    Piece,
    Progress,
    Refuse,
    Report,
    Result,
    Running,
)
from distflow.exchange.partials import ANSWER_BYTES, LOGPROB, LOGPROB_BYTES, TOKEN, TOKEN_BYTES
from distflow.types import FIRST_CALL, BegunSample, LeaseKind, Span, Uid

M = TypeVar("M", bound=Message)
EndOfSample = Annotated[str, msgspec.Meta(pattern=r"\A(stop|length|)\Z")]
Spans = tuple[Whole, ...]
"""Term, version, start and end of each span, one after the other."""
Call = Annotated[tuple[Whole, ...], msgspec.Meta(min_length=1, max_length=32)]
"""A call of an episode: tasks within tasks, so many at most."""


INLINE_BYTES = 4 << 10
"""A bulk of at most this size lies in the head."""


class Packed(NamedTuple):
    """A message for the wire: the header's body, which is itself or its head, and no or one payload frame."""

    body: Form
    payload: tuple[Buffer, ...] = ()


class _BegunHead(Row, frozen=True):
    sample: Whole
    tokens: Whole
    spans: Spans
    finish_reason: EndOfSample
    filtered: bool = False
    call: Call = FIRST_CALL
    digest: Whole = 0
    answer: Annotated[int, msgspec.Meta(ge=0, le=ANSWER_BYTES)] = 0

    def __post_init__(self) -> None:
        _check_cover(self.spans, 0, self.tokens)


class _PieceHead(Row, frozen=True):
    position: Whole
    sample: Whole
    start: Whole
    tokens: Whole
    spans: Spans
    finish_reason: EndOfSample
    filtered: bool = False
    call: Call = FIRST_CALL
    digest: Whole = 0
    answer: Annotated[int, msgspec.Meta(ge=0, le=ANSWER_BYTES)] = 0

    def __post_init__(self) -> None:
        _check_cover(self.spans, self.start, self.tokens)


class _LeaseHead(Row, frozen=True):
    uid: tuple[Whole, Whole, Whole]
    ledger: Whole
    k: Whole
    attempt: Whole
    seed: Whole
    prompt_tokens: Whole
    prompt_text: str
    task: str
    min_version: Whole
    term: Whole
    kind: LeaseKind
    begun: tuple[_BegunHead, ...]
    copy: bool


class _GrantHead(Form, frozen=True):
    owner: PeerName
    term: Whole
    incarnation: Whole
    number: Whole
    ask: Whole
    leases: tuple[_LeaseHead, ...]
    bulk: bytes
    step: Whole


class _ProgressHead(Form, frozen=True):
    report: Report
    running: tuple[Running, ...]
    pieces: tuple[_PieceHead, ...]
    bulk: bytes


class _HandBackHead(Form, frozen=True):
    report: Report
    positions: tuple[Whole, ...]
    pieces: tuple[_PieceHead, ...]
    bulk: bytes


_WITH_PIECES = (_ProgressHead, _HandBackHead)
_FORMS: Mapping[str, type[Any]] = {
    "ask": Ask,
    "progress": _ProgressHead,
    "handback": _HandBackHead,
    "result": Result,
    "bye": Bye,
    "grant": _GrantHead,
    "refuse": Refuse,
    "ack": Ack,
    "cancel": Cancel,
    "again": Again,
    "closed": Closed,
    "finished": Finished,
}

OF_VALIDATION = "val-"
"""What the names of messages about validation leases begin with."""
KINDS: tuple[str, ...] = tuple(_FORMS)
"""Names of all lease messages on the wire."""


def kind_of(message: Message) -> str:
    """The message's name on the wire, for example `ask`."""
    return type(message).__name__.lower()


def to_wire(message: Message) -> Packed:
    """The form of a message, and its payload."""
    bulk = bytearray()
    head = _head(message, bulk)
    return Packed(head, (bulk,) if bulk else ())


@decoder
def from_wire(kind: str, body: object, payload: Sequence[memoryview] = ()) -> Message:
    """The inverse of `to_wire`. Raises ProtocolError naming the message kind and the field that does not fit."""
    if kind not in _FORMS:
        raise ProtocolError(f"lease message kind {kind!r}: expected one of {', '.join(KINDS)}")
    message: Message = _message(read(body, _FORMS[kind], f"lease message {kind}"), payload)
    return message


def said_by(message: Message) -> str:
    """The worker that a lease message names as its sender."""
    # Tuples: a union would be made with each call.
    if isinstance(message, (Ask, Progress, HandBack)):
        return message.report.worker
    return message.worker if isinstance(message, (Result, Bye)) else message.owner


@decoder
def lease_message(envelope: Envelope) -> Message:
    """The lease message in an envelope; raises ProtocolError if it is malformed or names another sender."""
    message = from_wire(envelope.kind.removeprefix(OF_VALIDATION), envelope.body, envelope.payload)
    return check_sender(envelope, message)


def check_sender(envelope: Envelope, message: M) -> M:
    """The message itself; raises ProtocolError if it names another worker than its envelope."""
    if said_by(message) != envelope.sender:
        raise ProtocolError(f"{envelope.kind} of {shown(said_by(message))}, sent by {envelope.sender}")
    return message


# -- a message and its head


def _head(message: Message, bulk: bytearray) -> Form:
    """The form of a message; its tokens and log-probs go to the end of `bulk`."""
    if isinstance(message, Grant):
        leases = tuple([_lease_head(lease, bulk) for lease in message.leases])
        about = (message.owner, message.term, message.incarnation, message.number, message.ask)
        return _GrantHead(*about, leases, _inside(bulk), message.step)
    if isinstance(message, Progress):
        pieces = tuple([_piece_head(piece, bulk) for piece in message.pieces])
        return _ProgressHead(message.report, message.running, pieces, _inside(bulk))
    if isinstance(message, HandBack):
        pieces = tuple([_piece_head(piece, bulk) for piece in message.pieces])
        return _HandBackHead(message.report, message.positions, pieces, _inside(bulk))
    return message


def _inside(bulk: bytearray) -> bytes:
    """What lies in the head: a small bulk, which is taken out of its place."""
    if len(bulk) > INLINE_BYTES:
        return b""
    inside = bytes(bulk)
    bulk.clear()
    return inside


def _message(head: Any, payload: Sequence[memoryview]) -> Any:
    """The inverse; raises ProtocolError for a payload that is not the one that the head announces."""
    if isinstance(head, _GrantHead):
        prompts = sum(lease.prompt_tokens for lease in head.leases)
        begun = sum(_size(sample) for lease in head.leases for sample in lease.begun)
        bulk = _Bulk(head.bulk, payload, prompts * TOKEN_BYTES + begun)
        leases = tuple([_lease(lease, bulk) for lease in head.leases])
        return Grant(head.owner, head.term, head.incarnation, head.number, head.ask, leases, head.step)
    if not isinstance(head, _WITH_PIECES):
        if payload:
            _Bulk(b"", payload, 0)
        return head
    bulk = _Bulk(head.bulk, payload, sum(map(_size, head.pieces)))
    pieces = tuple([_piece(piece, bulk) for piece in head.pieces])
    if isinstance(head, _ProgressHead):
        return Progress(head.report, head.running, pieces)
    return HandBack(head.report, head.positions, pieces)


class _Bulk:
    """What a head or a payload has, read from the front. Its size is compared with what the head counts first."""

    def __init__(self, inside: bytes, payload: Sequence[memoryview], expected: int) -> None:
        size = len(inside) + sum(map(len, payload))
        if size != expected or len(payload) + bool(inside) > 1:
            raise ProtocolError(
                f"tokens and log-probs of {expected} bytes in one place were announced, got {size} bytes: "
                f"{len(inside)} in the head, the others in {len(payload)} payload frames"
            )
        self._data = payload[0] if payload else memoryview(inside)
        self._at = 0

    def tokens(self, count: int) -> bytes:
        """The next `count` token ids."""
        found = self._take(count * TOKEN_BYTES)
        # Little-endian: the sign is in the last byte of each.
        if not found[TOKEN_BYTES - 1 :: TOKEN_BYTES].isascii():
            raise ProtocolError("a negative token id in the payload of a lease message; expected ids ≥ 0")
        return found

    def logprobs(self, count: int) -> bytes:
        """The next `count` log-probs."""
        return self._take(count * LOGPROB_BYTES)

    def answer(self, size: int) -> bytes:
        """The next answer of a tool, which has so many bytes."""
        return self._take(size)

    def _take(self, size: int) -> bytes:
        self._at += size
        return bytes(self._data[self._at - size : self._at])


def _lease_head(lease: Lease, bulk: bytearray) -> _LeaseHead:
    bulk += array(TOKEN, lease.prompt_ids).tobytes()
    return _LeaseHead(
        uid=lease.uid,
        ledger=lease.ledger,
        k=lease.k,
        attempt=lease.attempt,
        seed=lease.seed,
        prompt_tokens=len(lease.prompt_ids),
        prompt_text=lease.prompt_text,
        task=lease.task,
        min_version=lease.min_version,
        term=lease.term,
        kind=lease.kind,
        begun=tuple([_begun_head(sample, bulk) for sample in lease.begun]),
        copy=lease.copy,
    )


def _lease(head: _LeaseHead, bulk: _Bulk) -> Lease:
    return Lease(
        uid=Uid(*head.uid),
        ledger=head.ledger,
        k=head.k,
        attempt=head.attempt,
        seed=head.seed,
        prompt_ids=tuple(array(TOKEN, bulk.tokens(head.prompt_tokens))),
        prompt_text=head.prompt_text,
        task=head.task,
        min_version=head.min_version,
        term=head.term,
        kind=head.kind,
        begun=tuple([_begun(sample, bulk) for sample in head.begun]),
        copy=head.copy,
    )


def _begun_head(sample: BegunSample, bulk: bytearray) -> _BegunHead:
    bulk += array(TOKEN, sample.token_ids).tobytes()
    bulk += array(LOGPROB, (*sample.logprobs, *sample.filtered_logprobs)).tobytes()
    bulk += sample.answer
    tokens, filtered = len(sample.token_ids), bool(sample.filtered_logprobs)
    about = (_flat(sample.spans), sample.finish_reason, filtered, sample.call, sample.digest, len(sample.answer))
    return _BegunHead(sample.sample, tokens, *about)


def _begun(head: _BegunHead, bulk: _Bulk) -> BegunSample:
    tokens = tuple(array(TOKEN, bulk.tokens(head.tokens)))
    logprobs = tuple(array(LOGPROB, bulk.logprobs(head.tokens)))
    filtered = tuple(array(LOGPROB, bulk.logprobs(head.tokens if head.filtered else 0)))
    about = (_spans(head.spans), head.finish_reason, filtered, head.call, head.digest, bulk.answer(head.answer))
    return BegunSample(head.sample, tokens, logprobs, *about)


def _piece_head(piece: Piece, bulk: bytearray) -> _PieceHead:
    bulk += piece.token_ids
    bulk += piece.logprobs
    bulk += piece.filtered_logprobs
    bulk += piece.answer
    tokens, filtered = len(piece.token_ids) // TOKEN_BYTES, bool(piece.filtered_logprobs)
    about = (piece.position, piece.sample, piece.start, tokens, _flat(piece.spans), piece.finish_reason, filtered)
    return _PieceHead(*about, piece.call, piece.digest, len(piece.answer))


def _piece(head: _PieceHead, bulk: _Bulk) -> Piece:
    about = (head.position, head.sample, head.start)
    tokens, logprobs = bulk.tokens(head.tokens), bulk.logprobs(head.tokens)
    filtered = bulk.logprobs(head.tokens if head.filtered else 0)
    answer, reason = bulk.answer(head.answer), head.finish_reason
    return Piece(*about, tokens, logprobs, _spans(head.spans), reason, filtered, head.call, head.digest, answer)


def _size(head: _BegunHead | _PieceHead) -> int:
    """Bytes of what lies in the bulk."""
    return head.tokens * (TOKEN_BYTES + LOGPROB_BYTES * (2 if head.filtered else 1)) + head.answer


def _flat(spans: Sequence[Span]) -> Spans:
    return tuple([number for span in spans for number in span])


def _spans(flat: Spans) -> tuple[Span, ...]:
    return tuple([Span(*flat[at : at + 4]) for at in range(0, len(flat), 4)])


def _check_cover(flat: Spans, start: int, tokens: int) -> None:
    """Raises ValueError unless the spans join up and are of these tokens exactly."""
    starts, ends = flat[2::4], flat[3::4]
    joined = (*starts, start + tokens) == (start, *ends) and all(map(lt, starts, ends))
    if len(flat) % 4 or not joined:
        raise ValueError(
            f"expected spans [term, version, start, end, …] that join up and cover tokens {start} … {start + tokens}, "
            f"got {shown(flat)}"
        )
