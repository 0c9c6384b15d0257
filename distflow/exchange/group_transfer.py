"""Messages by which groups change hands between training replicas, whether they are stolen or dealt."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from distflow.data.decoding import Form, PeerName, Whole

GROUPS, KEPT, RETURNED = "steal.groups", "steal.kept", "steal.returned"
REPEAT_S = 1.0
"""Seconds before groups without an answer, or what asks for groups, are sent again."""


class Transfer(Form, frozen=True):
    """Body of GROUPS: groups for ask `number`, with the worker that generated each and a description of their rows."""

    step: Whole
    number: Whole
    workers: tuple[PeerName, ...] = ()
    batch: Any = None


class TransferAnswer(Form, frozen=True):
    """Body of KEPT and RETURNED."""

    number: Whole


@dataclass(frozen=True, slots=True)
class Send:
    """A message for a peer. Kind GROUPS: the rows of `positions` go with it."""

    to: str
    kind: str
    body: Mapping[str, Any]
    positions: tuple[int, ...] = ()
