"""Moves a version between ranks that hold it in different parts: each piece straight from who has it to who wants it.

A process group of its own, beside the one in which trainers sum gradients: Gloo on CPUs, over one connection a pair of
ranks. All members make the same plan (`plan.py`) and so the same bundles of it, messages of some MiB each with a sum
behind them. Who calls has agreed over messages that all are there; from then on each message has one short deadline. A
rank that is lost costs its own pieces: the others get theirs, and it is named in what is returned. After that the group
is made anew, without it.

How long a transfer may take does not depend on its size: a rank is lost when none of its messages has passed for
`still_s`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import xxhash
from torch import Tensor
from torch._C._distributed_c10d import Store

from distflow.comm.collective import interface_of
from distflow.weights.shards.plan import Box, ShardPiece

BUNDLE_BYTES = 8 << 20
WINDOW = 2
"""Bundles under way between two ranks."""
ALIGN = 8
SUM_BYTES = 8


class HeldPart(NamedTuple):
    """One part of a tensor, in this rank's memory."""

    box: Box
    data: Tensor


@dataclass(slots=True)
class Transferred:
    """How a transfer ended."""

    lost: dict[int, str] = field(default_factory=dict)
    """Ranks that were lost or sent wrong bytes, each with what was noticed. From them, or to them, not all came."""
    nbytes: int = 0


class _Bundle(NamedTuple):
    places: tuple[tuple[int, ShardPiece], ...]
    """Each piece and its offset."""
    size: int


class ShardTransfer:
    """One rank of the group. The constructor waits for all of them, for at most `limit_s`; raises RuntimeError."""

    def __init__(self, store: Store, rank: int, size: int, own_address: str, limit_s: float) -> None:
        self.rank = rank
        # torch has no types for a group that is not the default one.
        gloo: Any = dist.ProcessGroupGloo
        options = gloo._Options()
        options._devices = [gloo.create_device(interface=interface_of(own_address))]
        options._timeout = timedelta(seconds=limit_s)
        self._store = store
        """Kept as long as the group, whose threads call it."""
        self._group = gloo(store, rank, size, options)

    def send(self, plan: Sequence[ShardPiece], held: Mapping[str, Sequence[HeldPart]], still_s: float) -> Transferred:
        """Send what the plan says of the parts that this rank holds. That it was sent is not that it has arrived."""
        parts = {(name, part.box): part.data for name, own in held.items() for part in own}

        def send_to(peer: int, pieces: Sequence[ShardPiece]) -> Iterator[int]:
            under_way: deque[tuple[Tensor, dist.Work]] = deque()
            for bundle in _bundles(pieces, parts):
                if len(under_way) == WINDOW:
                    _wait(under_way.popleft()[1], still_s)
                buffer = _packed(bundle, parts)
                under_way.append((buffer, self._group.send([buffer], peer, 0)))
                yield bundle.size
            while under_way:
                _wait(under_way.popleft()[1], still_s)

        return _each(send_to, [(piece.target, piece) for piece in plan if piece.source == self.rank])

    def receive(
        self, plan: Sequence[ShardPiece], wanted: Mapping[str, Sequence[HeldPart]], still_s: float
    ) -> Transferred:
        """Fill the parts that this rank wants."""
        parts = {(name, part.box): part.data for name, own in wanted.items() for part in own}

        def receive_from(peer: int, pieces: Sequence[ShardPiece]) -> Iterator[int]:
            under_way: deque[tuple[_Bundle, Tensor, dist.Work]] = deque()
            bundles = deque(_bundles(pieces, parts))
            wrong: ValueError | None = None
            while bundles or under_way:
                while bundles and len(under_way) < WINDOW:
                    bundle = bundles.popleft()
                    buffer = torch.empty(bundle.size, dtype=torch.uint8)
                    under_way.append((bundle, buffer, self._group.recv([buffer], peer, 0)))
                bundle, buffer, work = under_way.popleft()
                _wait(work, still_s)
                try:
                    _unpack(bundle, buffer, parts)
                except ValueError as error:
                    # The rest is taken nevertheless, or its sender would wait for its deadline.
                    wrong = error
                yield bundle.size
            if wrong is not None:
                raise wrong

        return _each(receive_from, [(piece.source, piece) for piece in plan if piece.target == self.rank])

    def end(self) -> None:
        """End what is under way, and what begins later, with an error. From another thread."""
        self._group.abort()


def _each(
    talk: Callable[[int, Sequence[ShardPiece]], Iterator[int]], pieces: Sequence[tuple[int, ShardPiece]]
) -> Transferred:
    """Talk with each rank on a thread of its own, so that one that stands still delays nobody else."""
    by_rank: dict[int, list[ShardPiece]] = {}
    for rank, piece in pieces:
        by_rank.setdefault(rank, []).append(piece)
    done = Transferred()

    def run(rank: int) -> int:
        moved = 0
        try:
            for size in talk(rank, by_rank[rank]):
                moved += size
        except (RuntimeError, ValueError) as error:
            done.lost[rank] = str(error)
        return moved

    with ThreadPoolExecutor(max(1, len(by_rank)), "weights-shards") as pool:
        done.nbytes = sum(pool.map(run, by_rank))
    return done


def _wait(work: dist.Work, still_s: float) -> None:
    work.wait(timedelta(seconds=still_s))


def _bundles(pieces: Iterable[ShardPiece], parts: Mapping[tuple[str, Box], Tensor]) -> Iterator[_Bundle]:
    """The pieces between two ranks in messages, in the order of the plan; a large piece is a message of its own."""
    itemsize = {name: tensor.element_size() for (name, _), tensor in parts.items()}
    places: list[tuple[int, ShardPiece]] = []
    at = 0
    for piece in pieces:
        size = -(-piece.box.elements * itemsize[piece.name] // ALIGN) * ALIGN
        if places and at + size > BUNDLE_BYTES:
            yield _Bundle(tuple(places), at + SUM_BYTES)
            places, at = [], 0
        places.append((at, piece))
        at += size
    yield _Bundle(tuple(places), at + SUM_BYTES)


def _packed(bundle: _Bundle, parts: Mapping[tuple[str, Box], Tensor]) -> Tensor:
    buffer = torch.zeros(bundle.size, dtype=torch.uint8)
    for at, piece in bundle.places:
        held = parts[piece.name, piece.held]
        _place(buffer, at, piece, held.dtype).copy_(held[piece.box.within(piece.held)])
    _sum_of(buffer).copy_(torch.frombuffer(bytearray(_sum(buffer)), dtype=torch.uint8))
    return buffer


def _unpack(bundle: _Bundle, buffer: Tensor, parts: Mapping[tuple[str, Box], Tensor]) -> None:
    """Raises ValueError for wrong bytes."""
    if bytes(_sum_of(buffer).numpy().data) != _sum(buffer):
        raise ValueError(f"a message of {bundle.size} bytes does not have the sum that it brings")
    for at, piece in bundle.places:
        wanted = parts[piece.name, piece.wanted]
        wanted[piece.box.within(piece.wanted)].copy_(_place(buffer, at, piece, wanted.dtype))


def _place(buffer: Tensor, at: int, piece: ShardPiece, dtype: torch.dtype) -> Tensor:
    size = piece.box.elements * dtype.itemsize
    return buffer[at : at + size].view(dtype).view(piece.box.sizes)


def _sum_of(buffer: Tensor) -> Tensor:
    return buffer[-SUM_BYTES:]


def _sum(buffer: Tensor) -> bytes:
    return xxhash.xxh3_64_digest(buffer[:-SUM_BYTES].numpy().data)
