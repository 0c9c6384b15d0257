"""What a holder of weights decides: which chunks a reader gets, and what it is told of others. No socket, no thread.

`chunk_server.py` has the sockets and threads around it, `tests/search/` has virtual time. What is to be sent comes one
by one, as it is decided just before it is sent: a version may be written over meanwhile.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Generic, NamedTuple, TypeVar

import msgspec

from distflow.types import Version
from distflow.weights.manifest import Manifest
from distflow.weights.swarm.chunk_plan import ChunkDealer
from distflow.weights.swarm_messages import MOST_TOLD, ChunkAsk, Content, Says, packed

MOST_HELD = 8
"""Versions that are served at a time; who holds deltas between them forgets these itself."""
MOST_WAITING = 256
"""Requests of one connection that have not been answered; a reader asks for a window of chunks at a time."""


@dataclass(slots=True)
class ServerTraffic:
    """What a server has sent so far, and whom it has refused."""

    chunks: int = 0
    sent_bytes: int = 0
    gone: int = 0
    refused: int = 0


class HeldChunks(ABC):
    """One version of a model, or a delta: all of it, or what a reader here has fetched so far.

    `dealer` is the publisher's.
    """

    def __init__(self, manifest: Manifest, dealer: ChunkDealer | None = None) -> None:
        self.manifest = manifest
        self.dealer = dealer
        self.order: list[int] = []
        """The chunks that have been fetched, in the order in which they came."""
        self.coming: Mapping[str, int] = {}
        """Bytes that the reader here has received while it fetched this, and what it was told of others, by address."""
        self.whole = dealer is not None
        self.over = False
        """Whether it is served no more: what a fetch that was given up has got is written over."""
        self._got: set[int] = set()

    def add(self, chunk: int) -> None:
        """A chunk has arrived and is right."""
        self._got.add(chunk)
        self.order.append(chunk)

    def has(self, chunk: int) -> bool:
        """Whether this chunk is there."""
        if self.whole:
            return chunk < self.manifest.chunks and self.intact
        return chunk in self._got and not self.over

    @property
    @abstractmethod
    def stored(self) -> Version:
        """The version that is whole where this one was, or is, put."""

    @property
    def intact(self) -> bool:
        """Whether the whole version is still there."""
        return self.stored == self.manifest.version


H = TypeVar("H", bound=HeldChunks)


class SendFrame(NamedTuple):
    """Send this."""

    says: Says
    content: Content
    chunk: int = 0
    payload: bytes = b""


class SendChunk(NamedTuple, Generic[H]):
    """Send the bytes of a chunk."""

    held: H
    chunk: int


class ServeCore(Generic[H]):
    """What one server holds, and the readers that are connected. With `introduces` they are told of each other."""

    def __init__(self, *, introduces: bool) -> None:
        self.introduces = introduces
        self.traffic = ServerTraffic()
        self.readers: list[ServedReader[H]] = []
        self._held: dict[tuple[str, Content], H] = {}

    def hold(self, held: H) -> None:
        """Serve a version from now on; the oldest of too many is forgotten."""
        self._held[held.manifest.model, held.manifest.content] = held
        whole = sorted((key for key in self._held if key[1].base < 0), key=lambda key: key[1])
        for key in whole[:-MOST_HELD]:
            del self._held[key]

    def forget(self, held: H) -> None:
        """Serve a version no more, nor what was asked for of it before."""
        held.over = True
        if self._held.get((held.manifest.model, held.manifest.content)) is held:
            del self._held[held.manifest.model, held.manifest.content]

    def forget_terms_before(self, term: int) -> None:
        """Serve no version of earlier terms any more: their segments have no names, only who maps them keeps them."""
        self._held = {key: held for key, held in self._held.items() if held.manifest.version.term >= term}

    def clear(self) -> None:
        """Hold nothing any more."""
        self._held.clear()

    def find(self, ask: ChunkAsk) -> H | None:
        """What is asked for, if it is held."""
        return self._held.get((ask.model, ask.content))

    def present(self, site: str | None = None) -> set[str]:
        """The readers of a site (None: of all) that are connected, by the addresses at which they serve."""
        return {one.reader for one in self.readers if one.reader and site in (None, one.site)}


class ServedReader(Generic[H]):
    """One connection of a reader, which serves at `reader` ("": nowhere) and stands at `site`."""

    def __init__(self, core: ServeCore[H], reader: str, site: str) -> None:
        self.reader = reader
        self.site = site
        self._core = core
        self._follows: ChunkAsk | None = None
        self._of: H | None = None
        """What it has been told of: a version that is fetched anew begins with nothing."""
        self._told = 0
        self._told_coming: Mapping[str, int] = {}
        self._peers: set[str] = set()

    def answer(self, ask: ChunkAsk) -> Iterator[SendFrame | SendChunk[H]]:
        """What to send for a request."""
        held = self._core.find(ask)
        if ask.what == "follow":
            self._follows, self._of = ask, None
        elif ask.what == "deal":
            yield from self._deal(ask, held)
        elif ask.what == "made":
            if held is not None and held.dealer is not None:
                held.dealer.made(self.reader, self.site)
        else:
            for chunk in ask.chunks:
                yield self._give(ask, held, chunk)

    def news(self) -> Iterator[SendFrame]:
        """What to tell the reader that it has not been told."""
        peers = self._core.present(self.site) if self._core.introduces else set[str]()
        if peers != self._peers:
            self._peers = peers
            yield SendFrame(Says.PEERS, Content(0, 0), 0, msgspec.msgpack.encode(sorted(peers)))
        ask = self._follows
        held = None if ask is None else self._core.find(ask)
        if ask is None or held is None:
            return
        if held is not self._of:
            self._of, self._told, self._told_coming = held, 0, {}
        while new := held.order[self._told : self._told + MOST_TOLD]:
            self._told += len(new)
            yield SendFrame(Says.HAVE, ask.content, 0, packed(new))
        if held.coming != self._told_coming:
            self._told_coming = held.coming
            yield SendFrame(Says.COMING, ask.content, 0, msgspec.msgpack.encode(self._told_coming))

    def _deal(self, ask: ChunkAsk, held: H | None) -> Iterator[SendFrame | SendChunk[H]]:
        if held is None or held.dealer is None:
            yield SendFrame(Says.GONE, ask.content)
            return
        chunks = held.dealer.deal(self.reader, self.site, ask.count)
        if chunks:
            yield SendFrame(Says.GIVEN, ask.content, 0, packed(chunks))
        for chunk in chunks:
            yield self._chunk(ask, held, chunk)
        if len(chunks) < ask.count:
            yield SendFrame(Says.DEALT, ask.content)

    def _give(self, ask: ChunkAsk, held: H | None, chunk: int) -> SendFrame | SendChunk[H]:
        if held is not None and held.dealer is not None and held.has(chunk):
            present = self._core.present(self.site)
            if not held.dealer.gives(self.reader, self.site, chunk, present, again=ask.what == "again"):
                return SendFrame(Says.ELSEWHERE, ask.content, chunk)
        return self._chunk(ask, held, chunk)

    def _chunk(self, ask: ChunkAsk, held: H | None, chunk: int) -> SendFrame | SendChunk[H]:
        if held is not None and held.has(chunk):
            return SendChunk(held, chunk)
        self._core.traffic.gone += 1
        return SendFrame(Says.GONE, ask.content, chunk)
