"""The messages of rows that owners deal to the home of a further model; what they mean is in `rows_core.py`.

Sender to receiver: RowsSent, with its rows beside the message, and RowsClose. Receiver to sender: RowsAck.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

import msgspec

from distflow.data.decoding import MAX_NAME_CHARACTERS, Form, FromMinusOne, Row, Whole, read

_EdgeName = Annotated[str, msgspec.Meta(min_length=1, max_length=MAX_NAME_CHARACTERS)]
Then = Literal["train", "stop", "end", "leave"]
"""Train on the step, or drop what was accumulated for it: the run is stopped before it, or has reached its end, or all
leave so that the next term begins."""


class RowsSent(Form, frozen=True):
    """Whole groups of one training step; their rows travel beside it.

    Example:

        RowsSent("critic_rows", 0, number=3, t=7, groups=(56, 60))
    """

    edge: _EdgeName
    term: Whole
    number: Whole
    """Counted by the sender for this receiver."""
    t: Whole
    groups: tuple[Whole, ...]
    """Their prompt positions."""
    batch: Any = None
    """Description of the rows."""


class DealtGroup(Row, frozen=True):
    """A group that was sent to a receiver.

    Example:

        DealtGroup(56, ((300, 10), (0, 12)))
    """

    position: Whole
    lengths: Annotated[tuple[tuple[Whole, Whole], ...], msgspec.Meta(min_length=1)]
    """Tokens of each of its rows (`distflow.parts`)."""


class RowsClose(Form, frozen=True):
    """The sender has no more rows for a training step.

    Example:

        RowsClose("critic_rows", 0, 4, t=7, dealt=((DealtGroup(56, ((300, 10), (0, 12))),), ()), then="train")
    """

    edge: _EdgeName
    term: Whole
    number: Whole
    t: Whole
    dealt: tuple[tuple[DealtGroup, ...], ...]
    """What it has sent to each receiver, in the order of the home's replicas."""
    then: Then


class RowsAck(Form, frozen=True):
    """What a receiver has.

    Example:

        RowsAck("critic_rows", 0, numbers=(4,), taken=6, released=5, ahead=65536)
    """

    edge: _EdgeName
    term: Whole
    numbers: tuple[Whole, ...]
    taken: FromMinusOne
    """The last training step that it has begun to train on, or to stop at."""
    released: FromMinusOne
    """The last one that it has trained on: it holds no rows of it any more."""
    ahead: Whole
    """Bytes that the receiver of this may send of the steps behind the one after `released`."""


class OutgoingRows(msgspec.Struct, frozen=True):
    """A message to be sent to the worker named `to`; RowsSent goes with its rows."""

    to: str
    message: RowsSent | RowsClose | RowsAck


_FORMS: Mapping[str, type[Any]] = {"rows": RowsSent, "rows.close": RowsClose, "rows.ack": RowsAck}
_NAMES = {form: kind for kind, form in _FORMS.items()}
TO_HOMES, TO_OWNERS = ("rows", "rows.close"), ("rows.ack",)
"""Kinds of messages of senders, and of receivers."""


def kind_of(message: RowsSent | RowsClose | RowsAck) -> str:
    """The message's name on the wire, for example `rows.close`."""
    return _NAMES[type(message)]


def from_wire(kind: str, body: object) -> RowsSent | RowsClose | RowsAck:
    """A message of TO_HOMES or TO_OWNERS; raises ProtocolError naming the kind and the field that does not fit."""
    message: RowsSent | RowsClose | RowsAck = read(body, _FORMS[kind], kind)
    return message
