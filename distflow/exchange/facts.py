"""Facts: what a worker says about itself to all its peers, in its hello and with every heartbeat to them.

Example: critic/0 says {"serves": (0, 7), "load": 640}; trainer/0, once training has restarted, {"owners":
["trainer/0"], "term": 1, "begins": [(1, 4)]}.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

import msgspec

from distflow.data.decoding import MAX_NAME_CHARACTERS, Name, Whole, read
from distflow.errors import ProtocolError

ANNOUNCED = "announced"
"""The fact in which a reader says which version of each model's weights was announced to it last."""
SERVES = "serves"
"""The fact in which a worker that answers calls says with which version of its model."""
LOAD = "load"
"""The fact in which a worker that answers calls says how many tokens it has to compute for them."""
OWNERS, TERM, BEGINS = "owners", "term", "begins"
"""Facts of an owner once training has restarted: all owners, their term, and where all terms began."""
JUDGED, JUDGED_BY_ALL = "judged", "judged_by_all"
"""The facts in which a worker says its own counts, and an owner the sums, by step (`tally.py`)."""
HELD_UP = "held_up"
"""The fact in which an owner says for which programs outside of the run it waits (`outside.py`)."""
MOST_HELD_UP, HELD_UP_CHARACTERS = 16, 1024
"""How many of them at most, and of how many characters each."""
ENDS_BECAUSE = "ends_because"
"""The fact in which a worker that trains another model than the owners' says why training should end."""
CHANGING = frozenset({LOAD, JUDGED, JUDGED_BY_ALL})
"""Those that change all the time."""
WHAT = "facts of a worker"
_MOST_CHARACTERS = 4096

_ModelName = Annotated[str, msgspec.Meta(min_length=1, max_length=MAX_NAME_CHARACTERS)]
_Told = Annotated[str, msgspec.Meta(min_length=1, max_length=HELD_UP_CHARACTERS)]


class _Worker(msgspec.Struct, frozen=True):
    announced: dict[_ModelName, tuple[Whole, Whole]] = {}
    serves: tuple[Whole, Whole] | None = None
    load: Whole = 0
    held_up: Annotated[tuple[_Told, ...], msgspec.Meta(max_length=MOST_HELD_UP)] = ()
    judged: dict[str, tuple[Whole, Whole]] = {}
    judged_by_all: dict[str, tuple[Whole, Whole]] = {}
    ends_because: Annotated[str, msgspec.Meta(max_length=_MOST_CHARACTERS)] = ""


class _Owner(msgspec.Struct, frozen=True):
    owners: Annotated[tuple[Name, ...], msgspec.Meta(min_length=1)]
    term: Whole
    begins: tuple[tuple[Whole, Whole], ...]


def read_facts(facts: Mapping[str, Any]) -> Mapping[str, Any]:
    """The facts of a peer, after checking those that are used; raises ProtocolError."""
    read(facts, _Worker, WHAT)
    if OWNERS in facts:
        owners = read(facts, _Owner, WHAT).owners
        if len(set(owners)) < len(owners):
            raise ProtocolError(f"malformed {WHAT}: duplicate owner")
    return facts
