"""Memory that another host may read by itself, as announced; and what the processes that have NIXL in them are told.

Regions are plain numbers (address, bytes, device): descriptors are made of them where they are used, since NIXL's own
form of them on the wire is a pickle. An agent's metadata is not: fields with their lengths, one after the other, which
NIXL reads in a process of its own (`one_sided/process.py`).
"""

from __future__ import annotations

from typing import Annotated, TypeAlias

import msgspec

from distflow.data.decoding import Row, Whole

MOST_METADATA = 32 << 10
"""Bytes of an agent's metadata: its name, an address for each network device, a key for each region and device."""


class RemoteMemory(Row, frozen=True):
    """Where the bytes of a version lie at their publisher, for those who read them with NIXL."""

    metadata: Annotated[bytes, msgspec.Meta(min_length=1, max_length=MOST_METADATA)]
    """Of the agent there: how to reach it, and the keys of the memory that it has registered."""
    address: Whole
    """Of the first byte, in the process of that agent."""
    device: Whole = 0
    """NIXL's number of the device whose memory it is; 0 for a host's own."""


class Expose(msgspec.Struct, tag=True, frozen=True):
    """Let others read a segment of this host, which is a file of `size` bytes."""

    path: str
    size: int


class Attach(msgspec.Struct, tag=True, frozen=True):
    """Lock a segment of this host, to read into it from `memory`, which has the bytes from `begin` on."""

    path: str
    size: int
    begin: int
    memory: RemoteMemory


class Read(msgspec.Struct, tag=True, frozen=True):
    """Read a piece of the version."""

    start: int
    size: int


class Detach(msgspec.Struct, tag=True, frozen=True):
    """Nothing more is read into the segment: unlock it."""


class Ready(msgspec.Struct, tag=True, frozen=True):
    """NIXL is there."""


class Exposed(msgspec.Struct, tag=True, frozen=True):
    """The file at `path` can be read; `memory` says where its first byte is."""

    path: str
    memory: RemoteMemory


class Attached(msgspec.Struct, tag=True, frozen=True):
    """The segment is locked."""


class HasRead(msgspec.Struct, tag=True, frozen=True):
    """The piece that begins there has come."""

    start: int


class Detached(msgspec.Struct, tag=True, frozen=True):
    """The segment is unlocked."""


class Failed(msgspec.Struct, tag=True, frozen=True):
    """The process ends."""

    why: str


Order: TypeAlias = Expose | Attach | Read | Detach
Answer: TypeAlias = Ready | Exposed | Attached | HasRead | Detached | Failed
