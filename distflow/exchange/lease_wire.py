"""Lease messages as plain dictionaries and lists for msgpack, and back, believing nothing.

A message is a dictionary of its fields; the small records inside it (leases, reports, …) are lists in field order.
Tokens and log-probs are not among them: the dictionary only says how many there are, and they lie in a payload frame
(`bulk.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from itertools import pairwise, repeat
from operator import attrgetter
from typing import Any, NamedTuple, TypeVar

from distflow.comm.message import Buffer
from distflow.comm.message import Message as Envelope
from distflow.data.decoding import MAX_NAME_CHARACTERS, MOST, decoder, shown
from distflow.errors import ProtocolError
from distflow.exchange.bulk import BegunHead, PieceHead, join, split
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
    Progress,
    Refuse,
    Report,
    Result,
    Running,
)
from distflow.types import Span, Uid, Version

Decoder = Callable[[Any], Any]
M = TypeVar("M", bound=Message)


class Packed(NamedTuple):
    """A message for the wire: the header's body, and no or one payload frame."""

    body: dict[str, Any]
    payload: tuple[Buffer, ...] = ()


class _Unfit(Exception):
    """A value does not fit; `path` grows on the way out."""

    def __init__(self, expected: str, value: object, path: str = "") -> None:
        super().__init__(expected)
        self.expected = expected
        self.value = value
        self.path = path


def _whole(value: Any) -> int:
    if type(value) is not int or not 0 <= value < MOST:
        raise _Unfit("an integer ≥ 0", value)
    return value


def _whole_or_none_yet(value: Any) -> int:
    if type(value) is not int or not -1 <= value < MOST:
        raise _Unfit("an integer ≥ −1", value)
    return value


def _text(value: Any) -> str:
    if type(value) is not str:
        raise _Unfit("text", value)
    return value


def _name(value: Any) -> str:
    if type(value) is not str or not 0 < len(value) <= MAX_NAME_CHARACTERS:
        raise _Unfit("a worker's name", value)
    return value


def _flag(value: Any) -> bool:
    if type(value) is not bool:
        raise _Unfit("true or false", value)
    return value


def _kind(value: Any) -> str:
    if value not in ("train", "val"):
        raise _Unfit("train or val", value)
    return str(value)


def _wholes(value: Any) -> tuple[int, ...]:
    # Prompts are long and come by the thousand: checked in bulk.
    fits = isinstance(value, list | tuple) and set(map(type, value)) <= {int}
    if not fits or (value and not 0 <= min(value) <= max(value) < MOST):
        raise _Unfit("a list of integers ≥ 0", value)
    return tuple(value)


def _version_or_none(value: Any) -> Version | None:
    if value is None:
        return None
    numbers = _wholes(value)
    if len(numbers) != 2:
        raise _Unfit("[term, number] or null", value)
    return Version(*numbers)


def _uid(value: Any) -> Uid:
    numbers = _wholes(value)
    if len(numbers) != 3:
        raise _Unfit("[epoch, index, position]", value)
    return Uid(*numbers)


def _reason(value: Any) -> str:
    if value not in ("", "stop", "length"):
        raise _Unfit("stop, length or nothing", value)
    return str(value)


def _spans(value: Any) -> tuple[Span, ...]:
    flat = _wholes(value)
    spans = tuple([Span(*flat[i : i + 4]) for i in range(0, len(flat) - 3, 4)])
    if len(flat) % 4 or any(a.end != b.start for a, b in pairwise(spans)) or any(s.end <= s.start for s in spans):
        raise _Unfit("spans [term, version, start, end, …] that join up", value)
    return spans


def _covered(tokens: int, spans: Sequence[Span], start: int) -> None:
    """Spans must be of just these tokens."""
    if (spans[0].start, spans[-1].end) != (start, start + tokens) if spans else tokens:
        raise _Unfit(f"spans of tokens {start} … {start + tokens}", tuple(spans), ".spans")


def _piece(value: Any) -> PieceHead:
    piece: PieceHead = _plain_piece(value)
    _covered(piece.tokens, piece.spans, piece.start)
    return piece


def _begun(value: Any) -> BegunHead:
    sample: BegunHead = _plain_begun(value)
    _covered(sample.tokens, sample.spans, 0)
    return sample


def _record(cls: type[Any], decoders: Sequence[Decoder]) -> Decoder:
    names = [field.name for field in fields(cls)]
    assert len(names) == len(decoders), f"{cls.__name__} has fields {names}"

    def decode(value: Any) -> Any:
        if not isinstance(value, list | tuple) or len(value) != len(names):
            raise _Unfit(f"a list of {len(names)} values ({', '.join(names)})", value)
        return cls(*_each(decoders, value, lambda place: f".{names[place]}"))

    return decode


def _list_of(decoder: Decoder) -> Decoder:
    def decode(value: Any) -> tuple[Any, ...]:
        if not isinstance(value, list | tuple):
            raise _Unfit("a list", value)
        return tuple(_each(repeat(decoder), value, lambda place: f"[{place}]")) if value else ()

    return decode


def _each(decoders: Iterable[Decoder], values: Iterable[Any], step: Callable[[int], str]) -> list[Any]:
    """Leases come by the thousand: where a value stands is only put in words when it does not fit."""
    pairs = list(zip(decoders, values, strict=False))
    try:
        return [decoder(value) for decoder, value in pairs]
    except _Unfit:
        for place, (decoder, value) in enumerate(pairs):
            try:
                decoder(value)
            except _Unfit as unfit:
                raise _Unfit(unfit.expected, unfit.value, step(place) + unfit.path) from None
        raise


_plain_piece = _record(PieceHead, [_whole, _whole, _whole, _whole, _spans, _reason])
_plain_begun = _record(BegunHead, [_whole, _whole, _spans, _reason])
_lease = _record(
    Lease,
    [
        _uid,
        _whole,
        _whole,
        _whole,
        _whole,
        _whole,  # tokens of the prompt
        _text,
        _text,
        _whole,
        _whole,
        _kind,
        _list_of(_begun),
        _flag,
    ],
)
_report = _record(Report, [_name, _whole, _whole, _whole, _wholes, _whole, _whole_or_none_yet])
_running = _record(Running, [_whole, _whole, _whole_or_none_yet])


@dataclass(frozen=True, slots=True)
class _Form:
    cls: type[Any]
    decoders: Mapping[str, Decoder]


def _form(cls: type[Any], *decoders: Decoder) -> _Form:
    names = [field.name for field in fields(cls)]
    return _Form(cls, dict(zip(names, decoders, strict=True)))


_FORMS: Mapping[str, _Form] = {
    form.cls.__name__.lower(): form
    for form in (
        _form(Ask, _report, _whole, _whole, _flag, _flag),
        _form(Progress, _report, _list_of(_running), _list_of(_piece)),
        _form(HandBack, _report, _wholes, _list_of(_piece)),
        _form(Result, _name, _whole, _whole, _whole, _whole, _whole, _version_or_none, _text, _whole),
        _form(Bye, _name, _whole),
        _form(Grant, _name, _whole, _whole, _whole, _whole, _list_of(_lease)),
        _form(Refuse, _name, _whole, _whole, _whole, _flag),
        _form(Ack, _name, _whole, _whole, _wholes),
        _form(Cancel, _name, _whole, _whole, _wholes),
        _form(Again, _name, _whole, _whole, _wholes),
        _form(Closed, _name, _whole, _whole_or_none_yet),
        _form(Finished, _name, _whole),
    )
}

KINDS: tuple[str, ...] = tuple(_FORMS)
"""Names of all lease messages on the wire."""

_values_of: Mapping[type[Any], Callable[[Any], tuple[Any, ...]]] = {
    cls: attrgetter(*[field.name for field in fields(cls)]) for cls in (Lease, Report, Running, BegunHead, PieceHead)
}


def _plain(value: Any) -> Any:
    if isinstance(value, tuple):
        return [_plain(item) for item in value] if value and type(value[0]) in _values_of else _flat(value)
    if type(value) in _values_of:
        return [_plain(item) if isinstance(item, tuple) else item for item in _values_of[type(value)](value)]
    return value


def _flat(value: tuple[Any, ...]) -> list[Any]:
    """Numbers, or the four numbers of each span one after the other."""
    if value and type(value[0]) is Span:
        return [number for span in value for number in span]
    return list(value)


def kind_of(message: Message) -> str:
    """The message's name on the wire, for example `ask`."""
    return type(message).__name__.lower()


def to_wire(message: Message) -> Packed:
    """The message as a dictionary of numbers, texts, flags and lists, ready for msgpack, and its payload."""
    head, bulk = split(message)
    body = {name: _plain(getattr(head, name)) for name in _FORMS[kind_of(message)].decoders}
    return Packed(body, (bulk,) if bulk else ())


@decoder
def from_wire(kind: str, body: object, payload: Sequence[memoryview] = ()) -> Message:
    """The inverse of `to_wire`. Raises ProtocolError naming the message kind and the field that does not fit."""
    if kind not in _FORMS:
        raise ProtocolError(f"lease message kind {kind!r}: expected one of {', '.join(KINDS)}")
    form = _FORMS[kind]
    if not isinstance(body, dict) or body.keys() != form.decoders.keys():
        got = shown(sorted(body)) if isinstance(body, dict) else type(body).__name__
        raise ProtocolError(f"lease message {kind}: expected the fields {', '.join(form.decoders)}, got {got}")
    try:
        values = [body[name] for name in form.decoders]
        head = form.cls(*_each(form.decoders.values(), values, list(form.decoders).__getitem__))
    except _Unfit as unfit:
        raise ProtocolError(
            f"lease message {kind}, field {unfit.path}: expected {unfit.expected}, got {shown(unfit.value)}"
        ) from None
    message: Message = join(head, payload)
    if isinstance(message, Result) and not message.dropped and message.oldest is None:
        raise ProtocolError(f"lease message {kind}, field oldest: expected [term, number] unless dropped, got null")
    return message


def said_by(message: Message) -> str:
    """The worker that a lease message says it is from."""
    if isinstance(message, Ask | Progress | HandBack):
        return message.report.worker
    return message.worker if isinstance(message, Result | Bye) else message.owner


@decoder
def lease_message(envelope: Envelope) -> Message:
    """The lease message in an envelope; raises ProtocolError if it is malformed, or says to be somebody else's."""
    message = from_wire(envelope.kind, envelope.body, envelope.payload)
    return check_sender(envelope, message)


def check_sender(envelope: Envelope, message: M) -> M:
    """The message itself; raises ProtocolError if it names another worker than its envelope."""
    if said_by(message) != envelope.sender:
        raise ProtocolError(f"{envelope.kind} of {shown(said_by(message))}, sent by {envelope.sender}")
    return message
