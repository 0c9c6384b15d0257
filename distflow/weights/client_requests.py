"""Programs outside the run that read its weights: where they can, and which of them wait for a version here.

A client first asks all training workers who publishes a model, then one of them for each version: one whose shared
memory it sees, else one that serves other hosts. Nobody waits for it; what it asks for it repeats.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated

import msgspec

from distflow.comm.message import Message
from distflow.data.decoding import MAX_NAME_CHARACTERS, Form, Whole
from distflow.errors import ProtocolError
from distflow.types import Version
from distflow.weights.manifest import Manifest

ASK_WEIGHTS = "client.weights"
"""What a client asks a publisher: the next version of a model."""
ASK_PUBLISHERS = "client.publishers"
"""What it asks every training worker: which models are published there, and how it would read them."""
MOST_CLIENTS = 1024
ClientName = Annotated[str, msgspec.Meta(min_length=1, max_length=64)]


class AskedPublishers(Form, frozen=True):
    """Body of ASK_PUBLISHERS. The reply names `models`, whether their publisher is `near`, the client seeing its
    shared memory, and whether it serves `far` ones.
    """

    client: ClientName
    number: Whole
    memory: Annotated[str, msgspec.Meta(min_length=1, max_length=128)]
    """`shm.memory_name` of the client."""


class AskedWeights(Form, frozen=True):
    """Body of ASK_WEIGHTS: a client has version `after`, and waits for a newer one. It may be repeated."""

    client: ClientName
    number: Whole
    model: Annotated[str, msgspec.Meta(min_length=1, max_length=MAX_NAME_CHARACTERS)]
    after: Version | None = None
    far: bool = False
    """Whether it reads over the network."""


class WaitingClients:
    """Those that wait for a version of one model, each by its newest request. Used under the worker's lock."""

    def __init__(self, model: str, reply: Callable[[Message, dict[str, object]], None]) -> None:
        self._model = model
        self._reply = reply
        self._waiting: dict[str, tuple[AskedWeights, Message]] = {}

    def add(self, asked: AskedWeights, message: Message) -> None:
        """One more; raises ProtocolError if there are too many."""
        if asked.client not in self._waiting and len(self._waiting) >= MOST_CLIENTS:
            raise ProtocolError(f"{MOST_CLIENTS} clients wait for weights of {self._model!r} already")
        self._waiting[asked.client] = (asked, message)

    def any(self, *, far: bool) -> bool:
        """Whether one waits that reads over the network, or on this host."""
        return any(asked.far == far for asked, _ in self._waiting.values())

    def answer(self, manifest: Manifest, *, far: bool) -> None:
        """A version is there for those that read in this way."""
        served = [
            client
            for client, (asked, _) in self._waiting.items()
            if asked.far == far and (asked.after is None or manifest.version > asked.after)
        ]
        wire = manifest.to_wire() if served else {}  # made once: it lists every parameter
        for client in served:
            asked, message = self._waiting.pop(client)
            self._reply(message, {"number": asked.number, "manifest": wire})
