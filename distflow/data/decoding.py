"""Decoding of received messages: *decoders* trust nothing and raise ProtocolError for malformed values.

A message that a decoder refuses is dropped; it never ends a worker or an agent. So decoders have no side effects. Most
of them are a form (a msgspec.Struct with bounds) that `read` fills from plain values; those that are written by hand
are marked `@decoder`. An exception in the code that acts on a decoded message is a bug of ours.

Example: read({"worker": "rollout/0", "incarnation": True}, Lost, "lost") raises ProtocolError, "malformed lost:
Expected `int`, got `bool` - at `$.incarnation`".
"""

from __future__ import annotations

import functools
import reprlib
from collections.abc import Callable
from typing import Annotated, ParamSpec, TypeVar

import msgspec

from distflow.errors import ProtocolError

MOST = 1 << 62
"""Upper bound of numbers in messages: their sums and their products with small ones still fit into 64 bits."""
MAX_NAME_CHARACTERS = 256
"""Longest kind of a message, and longest name of a worker."""
Whole = Annotated[int, msgspec.Meta(ge=0, lt=MOST)]
"""A whole number ≥ 0 in a form."""
Name = Annotated[str, msgspec.Meta(pattern=r"\A[^/\0]{1,200}/[0-9]{1,9}\Z")]
"""The name of a worker or an agent in a form: pool/index."""
Site = Annotated[str, msgspec.Meta(pattern=r"\A([A-Za-z0-9][A-Za-z0-9._-]{0,63})?\Z")]
"""Where a host stands; "" for all that have no site."""
PeerName = Annotated[str, msgspec.Meta(min_length=1, max_length=MAX_NAME_CHARACTERS)]
"""The name of a worker in a lease message, which must be the one in the message's header."""
FromMinusOne = Annotated[int, msgspec.Meta(ge=-1, lt=MOST)]
"""A whole number ≥ 0, or −1: none yet."""
QUOTED = 150
"""Characters at the beginning and at the end of an error that `read` passes on."""
P = ParamSpec("P")
T = TypeVar("T")


class Form(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Base of what travels as a dictionary of its fields; one with other keys is refused."""


class Row(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Base of what travels as a list of its fields in order; a longer one is refused."""


def decoder(function: Callable[P, T]) -> Callable[P, T]:
    """Mark a function that decodes a message: whatever it raises means that the message is refused."""

    @functools.wraps(function)
    def refusing(*args: P.args, **kwargs: P.kwargs) -> T:
        try:
            return function(*args, **kwargs)
        except ProtocolError:
            raise
        except Exception as error:
            raise ProtocolError(f"malformed message: {shown(error)}") from error

    return refusing


@decoder
def read(body: object, form: type[T], what: str) -> T:
    """Convert plain values into a `form`; the ProtocolError for malformed ones names `what` and where the value is."""
    try:
        return msgspec.convert(body, form, builtin_types=(bytes,))
    except msgspec.ValidationError as error:
        # It may quote a text of any length; the path of the value is at the end.
        text = str(error)
        reason = text if len(text) <= 2 * QUOTED else f"{text[:QUOTED]} … {text[-QUOTED:]}"
        raise ProtocolError(f"malformed {what}: {reason}") from error


def shown(value: object) -> str:
    """A value for messages and logs, shortened."""
    return reprlib.repr(value)
