"""What members of a group that moves weights in parts tell each other; one of them decides (`conductor.py`)."""

from __future__ import annotations

from typing import Annotated

import msgspec

from distflow.data.decoding import MAX_NAME_CHARACTERS, Form, FromMinusOne, Name, Row, Whole
from distflow.weights.manifest import Manifest

REPORT, GROUP, GO = "weights.report", "weights.group", "weights.go"
ModelName = Annotated[str, msgspec.Meta(min_length=1, max_length=MAX_NAME_CHARACTERS)]


class HeldRange(Row, frozen=True):
    """Elements of a tensor that a trainer holds: `count` from `start` on, in the order in which they lie in memory."""

    name: str
    dtype: str
    shape: Annotated[tuple[Whole, ...], msgspec.Meta(max_length=8)]
    start: Whole
    count: Whole


class ShardReport(Form, frozen=True):
    """What a member says of itself, again and again: a lost report is made good by the next."""

    model: ModelName
    term: Whole
    epoch: FromMinusOne = -1
    """The group that it is in; −1: none."""
    free: bool = False
    """A reader that could take a version now; a trainer always is, once it has sent `done`."""
    done: FromMinusOne = -1
    """The last version whose transfer has ended here, well or not."""
    numbers: tuple[Whole, ...] = ()
    """Versions of which a trainer has a copy."""
    held: tuple[HeldRange, ...] = ()
    """What a trainer holds, as long as it is in no group."""


class ShardGroup(Form, frozen=True):
    """All of `members` are to make the group of this epoch now: first the trainers, as many as `held`, then readers."""

    model: ModelName
    term: Whole
    epoch: Whole
    members: Annotated[tuple[Name, ...], msgspec.Meta(min_length=2)]
    held: Annotated[tuple[tuple[HeldRange, ...], ...], msgspec.Meta(min_length=1)]


class ShardGo(Form, frozen=True):
    """The trainers of the group send this version to `targets` now."""

    model: ModelName
    epoch: Whole
    targets: Annotated[tuple[Name, ...], msgspec.Meta(min_length=1)]
    manifest: Manifest
