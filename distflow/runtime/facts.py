"""What a worker tells its peers of itself, in its first hello and with every heartbeat; and the decoder of that."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

import msgspec

from distflow.data.decoding import Name, Whole, read
from distflow.errors import ProtocolError

ANNOUNCED = "announced"
"""The fact in which a reader says of which version of the weights it was told."""
OWNERS, TERM, BEGINS = "owners", "term", "begins"
"""Facts of a training worker once its pool has begun anew: who is in it, since which term, where all terms began."""
WHAT = "facts of a worker"


class _Reader(msgspec.Struct, frozen=True):
    announced: tuple[Whole, Whole] | None = None


class _Pool(msgspec.Struct, frozen=True):
    owners: Annotated[tuple[Name, ...], msgspec.Meta(min_length=1)]
    term: Whole
    begins: tuple[tuple[Whole, Whole], ...]


def read_facts(facts: Mapping[str, Any]) -> Mapping[str, Any]:
    """The facts, those that somebody acts on checked; raises ProtocolError."""
    read(facts, _Reader, WHAT)
    if OWNERS in facts:
        owners = read(facts, _Pool, WHAT).owners
        if len(set(owners)) < len(owners):
            raise ProtocolError(f"malformed {WHAT}: an owner is named twice")
    return facts
