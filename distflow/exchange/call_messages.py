"""The messages of calls: a worker that needs a step asks one of the workers that run it for the fields it writes.

Caller to server: CallRequest, CallWithdrawn. Server to caller: CallAnswer, CallNotYet, CallReturned. The rows of a
request and of an answer travel beside the message as one payload frame (`distflow/data/batch_wire.py`); the cores never
see them.

Messages may be lost, duplicated or reordered. A caller numbers its requests, and what a server says names the caller's
incarnation with those numbers, so that nothing said to a worker before it was restarted is taken for an answer now.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

import msgspec

from distflow.data.decoding import MAX_NAME_CHARACTERS, MOST, Form, Whole, read
from distflow.types import Version

_StepName = Annotated[str, msgspec.Meta(min_length=1, max_length=MAX_NAME_CHARACTERS)]


class CallRequest(Form, frozen=True):
    """A request to run a step over some rows. Sent again, under the same number, until it is answered.

    Example:

        CallRequest("values", number=4, t=7, version=Version(0, 7), tokens=320)
    """

    step: _StepName
    number: Whole
    """Counted by the caller's incarnation."""
    t: Whole
    """Training step that the rows are for."""
    version: Version | None
    """Version of the step's model that must answer; None: the model is frozen, or there is none."""
    tokens: Whole
    """Padded tokens of the rows: what it costs to compute."""
    at_least: bool = False
    """Whether a later version may answer, too: of a step that generates."""
    batch: Any = None
    """Description of the rows."""

    def __post_init__(self) -> None:
        """Raises ValueError, which a reader of the message passes on as ProtocolError."""
        _check_version("version", self.version)


class CallWithdrawn(Form, frozen=True):
    """The caller does not want the answers of these any more, or has them from another server.

    Example:

        CallWithdrawn(numbers=(4,))
    """

    numbers: tuple[Whole, ...]


class CallAnswer(Form, frozen=True):
    """What the step wrote for one request.

    Example:

        CallAnswer(0, number=4, version=Version(0, 7), load=640, tokens=1280, took_ms=95)
    """

    incarnation: Whole
    """Of the caller, as in every message of a server."""
    number: Whole
    version: Version | None
    """Version of the model that computed it, of several the newest; None: the model is frozen, or there is none."""
    load: Whole
    """Tokens of all requests that the server has not answered, as in every message of a server."""
    tokens: Whole
    """Of all requests that were computed at once with this one."""
    took_ms: Whole
    """Milliseconds for all of them."""
    batch: Any = None
    """Description of the rows."""

    def __post_init__(self) -> None:
        """Raises ValueError, which a reader of the message passes on as ProtocolError."""
        _check_version("version", self.version)


class CallNotYet(Form, frozen=True):
    """The server's model is of another version than these requests need. They are not kept.

    Example:

        CallNotYet(0, numbers=(5,), has=Version(0, 7), load=640)
    """

    incarnation: Whole
    numbers: tuple[Whole, ...]
    has: Version | None
    """None: the server has no version yet."""
    load: Whole

    def __post_init__(self) -> None:
        """Raises ValueError, which a reader of the message passes on as ProtocolError."""
        _check_version("has", self.has)


class CallReturned(Form, frozen=True):
    """The server drains: these and all further requests are to be asked elsewhere.

    Example:

        CallReturned(0, numbers=(5, 6), load=0)
    """

    incarnation: Whole
    numbers: tuple[Whole, ...]
    load: Whole


ServerMessage = CallAnswer | CallNotYet | CallReturned
ClientMessage = CallRequest | CallWithdrawn
CallMessage = ClientMessage | ServerMessage


class OutgoingCall(msgspec.Struct, frozen=True):
    """A message to be sent to the worker named `to`; a request or an answer goes with its rows."""

    to: str
    message: CallMessage


_FORMS: Mapping[str, type[Any]] = {
    "call.request": CallRequest,
    "call.withdrawn": CallWithdrawn,
    "call.answer": CallAnswer,
    "call.not_yet": CallNotYet,
    "call.returned": CallReturned,
}
_NAMES = {form: kind for kind, form in _FORMS.items()}
KINDS: tuple[str, ...] = tuple(_FORMS)
"""Names of all messages of calls on the wire."""


def kind_of(message: CallMessage) -> str:
    """The message's name on the wire, for example `call.request`."""
    return _NAMES[type(message)]


def to_wire(message: CallMessage) -> dict[str, Any]:
    """The message as plain values, ready for msgpack."""
    body: dict[str, Any] = msgspec.to_builtins(message, builtin_types=(bytes,))
    return body


def from_wire(kind: str, body: object) -> CallMessage:
    """The inverse, of a message of KINDS; raises ProtocolError naming the kind and the field that does not fit."""
    message: CallMessage = read(body, _FORMS[kind], kind)
    return message


def _check_version(name: str, version: Version | None) -> None:
    if version is not None and not 0 <= min(version) <= max(version) < MOST:
        raise ValueError(f"expected two integers >= 0 for {name}, got {version}")
