"""What the members of a mesh, the agents of hosts, send each other: its form, and the numbers in it.

Example, from host 1 of three to host 0, which lacks its newest report:

    {"from": 1, "seen": [[1, 8, 512], [0, 3, 498], [2, 5, 507]], "reports": [{"host": 1, …}]}

and in a mesh of many, from host 1 to its partner 40, which is to answer, and to ask host 7:

    {"from": 1, "seen": [[1, 8, 512], [40, 2, 498]], "reports": [], "checksum": 815…, "asks": [40, 7],
     "doubts": [[9, 511, 2000]], "roll": [31, …]}
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any

import msgspec

from distflow.comm.roll_call import ToldRoll
from distflow.data.decoding import MOST, Form, Whole

HostNumber = Annotated[int, msgspec.Meta(ge=0, lt=1 << 16)]
BEAT = "mesh.beat"
BEAT_S = 1.0
UNSEEN = -1
STRIDE = 1 << 44
"""The next agent of a host counts from a random number less than this above the previous agent's: no two agents use the
same numbers."""
HIGHEST = MOST >> 1
"""Others cannot have higher numbers from us: we never sent any."""


@dataclass(frozen=True, slots=True)
class Beat:
    """A message to the agent of a host."""

    host: int
    body: Mapping[str, Any]


class Heard(Form, frozen=True):
    """Body of a beat, without its reports. One that has no checksum lists all hosts that the sender knows."""

    sender: HostNumber = msgspec.field(name="from")
    seen: list[tuple[HostNumber, Annotated[int, msgspec.Meta(ge=UNSEEN, lt=MOST)], Whole]]
    """Host, serial of its report and its last pulse, as the sender knows them."""
    checksum: Whole | None = None
    """Over the serials of all reports that the sender has."""
    asks: tuple[HostNumber, ...] = ()
    """Hosts of which it wants a sign of life: the receiver's own, and others through the receiver."""
    doubts: tuple[tuple[HostNumber, Whole, Whole], ...] = ()
    """Host, its last known pulse, and for how long it has not answered (ms)."""
    roll: ToldRoll | None = None
