"""Two ranks that train send to three that generate, each of which holds other parts: real processes, over Gloo."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from distflow.weights import shard_plan, shard_transfer
from distflow.weights.shard_plan import Box, RankPart, ShardPiece, TensorLayout, boxes_of, plan_pieces
from distflow.weights.shard_transfer import HeldPart, ShardTransfer
from tests.weights.weight_processes import Actor, Role, start

TRAINERS, READERS = 2, 3
SHAPES = {
    "embed": ((400, 70), torch.float32),
    "norm": ((33,), torch.bfloat16),
    "scale": ((), torch.float32),
    "head": ((501, 2001), torch.bfloat16),
}
LIMIT_S = 10.0


def values(name: str, number: int) -> torch.Tensor:
    shape, dtype = SHAPES[name]
    return torch.randn(shape, generator=torch.Generator().manual_seed(number)).to(dtype)


def flat(shape: tuple[int, ...], first: int, ranks: int) -> Iterator[RankPart]:
    """Even ranges of elements, as optimizers that flatten parameters divide them."""
    each = -(-math.prod(shape) // ranks)
    for n in range(ranks):
        begin, end = min(n * each, math.prod(shape)), min((n + 1) * each, math.prod(shape))
        yield from (RankPart(first + n, box) for box in boxes_of(shape, begin, end - begin))


def by_columns(shape: tuple[int, ...], first: int, ranks: int) -> Iterator[RankPart]:
    """Even ranges of the last dimension; what has none, whole."""
    for n in range(ranks):
        if not shape:
            yield RankPart(first + n, Box.whole(shape))
            continue
        each = -(-shape[-1] // ranks)
        begin, end = min(n * each, shape[-1]), min((n + 1) * each, shape[-1])
        if begin < end:
            yield RankPart(first + n, Box((*(0 for _ in shape[:-1]), begin), (*shape[:-1], end)))


def layouts() -> list[TensorLayout]:
    return [
        TensorLayout(
            name, shape, dtype.itemsize, tuple(flat(shape, 0, TRAINERS)), tuple(by_columns(shape, TRAINERS, READERS))
        )
        for name, (shape, dtype) in SHAPES.items()
    ]


class Rank(Role):
    """One of the group."""

    def __init__(self, pipe: Connection, store: Path, rank: int) -> None:
        super().__init__(pipe)
        # Small enough that each pair has several of them.
        shard_plan.MOST_BYTES, shard_transfer.BUNDLE_BYTES = 16 << 10, 32 << 10
        self.rank, self.plan = rank, plan_pieces(layouts())
        self.group = ShardTransfer(
            dist.FileStore(str(store), TRAINERS + READERS), rank, TRAINERS + READERS, "127.0.0.1", LIMIT_S
        )

    def parts(self, source: bool, number: int | None) -> dict[str, list[HeldPart]]:
        found: dict[str, list[HeldPart]] = {}
        for layout in layouts():
            shape, dtype = SHAPES[layout.name]
            for part in layout.sources if source else layout.targets:
                if part.rank == self.rank:
                    data = torch.zeros(part.box.sizes, dtype=dtype)
                    if number is not None:
                        data = values(layout.name, number)[part.box.within(Box.whole(shape))].contiguous()
                    found.setdefault(layout.name, []).append(HeldPart(part.box, data))
        return found

    def send(self, number: int, still_s: float = LIMIT_S) -> tuple[list[int], int]:
        """The ranks that were lost, and what was sent."""
        done = self.group.send(self.plan, self.parts(True, number), still_s)
        return sorted(done.lost), done.nbytes

    def receive(self, number: int, still_s: float = LIMIT_S) -> tuple[list[int], bool]:
        """The ranks that were lost, and whether what came is right."""
        found = self.parts(False, None)
        done = self.group.receive(self.plan, found, still_s)
        right = self.parts(False, number)
        return sorted(done.lost), all(
            torch.equal(have.data, want.data)
            for name in found
            for have, want in zip(found[name], right[name], strict=True)
        )

    def stop_in_the_middle(self, number: int) -> None:
        """Receive, and stand still once some has come."""
        unpack = shard_transfer._unpack

        def until(*arguments: Any) -> None:
            unpack(*arguments)
            self.stand_still("receiving")

        shard_transfer._unpack = until
        self.receive(number)

    def linger(self, number: int, pause_s: float, still_s: float) -> tuple[list[int], bool]:
        """Receive slowly: what comes is looked at with a pause after each message."""
        unpack = shard_transfer._unpack

        def late(*arguments: Any) -> None:
            unpack(*arguments)
            time.sleep(pause_s)

        shard_transfer._unpack = late
        return self.receive(number, still_s)

    def spoil(self) -> None:
        """Send wrong bytes from now on."""
        packed = shard_transfer._packed

        def wrong(*arguments: Any) -> torch.Tensor:
            buffer = packed(*arguments)
            buffer[3] ^= 1
            return buffer

        shard_transfer._packed = wrong


@pytest.fixture
def ranks(tmp_path: Path) -> Iterator[list[Actor]]:
    with ExitStack() as stack:
        yield [start(stack, Rank, tmp_path / "store", rank) for rank in range(TRAINERS + READERS)]


def transfer(ranks: list[Actor], number: int) -> list[Any]:
    for rank, actor in enumerate(ranks):
        actor.tell("send" if rank < TRAINERS else "receive", number)
    return [actor.answer() for actor in ranks]


def test_each_reader_gets_its_columns_of_what_trainers_hold_in_flat_ranges_bit_for_bit(ranks: list[Actor]) -> None:
    size = sum(math.prod(shape) * dtype.itemsize for shape, dtype in SHAPES.values())
    for number in (1, 2):
        sent, received = (found := transfer(ranks, number))[:TRAINERS], found[TRAINERS:]
        assert received == [([], True)] * READERS
        assert [lost for lost, _ in sent] == [[]] * TRAINERS
        assert sum(nbytes for _, nbytes in sent) < 1.02 * size, "nothing twice, nothing gathered"
        assert max(nbytes for _, nbytes in sent) < 0.52 * size


def test_a_reader_that_is_killed_in_the_middle_costs_nobody_else_anything(ranks: list[Actor]) -> None:
    *others, lost = ranks
    lost.tell("stop_in_the_middle", 1)
    for rank, actor in enumerate(others):
        actor.tell("send" if rank < TRAINERS else "receive", 1)
    assert lost.answer() == "receiving"
    lost.kill()
    found = [actor.answer() for actor in others]
    assert found[TRAINERS:] == [([], True)] * (READERS - 1)
    # What the system has taken for it may be all that was left for it.
    assert all(one in ([], [TRAINERS + READERS - 1]) for one, _ in found[:TRAINERS])


def test_a_transfer_may_take_longer_than_a_member_may_stand_still(ranks: list[Actor]) -> None:
    """A reader that takes eleven messages of each trainer, or more, and pauses after each."""
    still_s = 4.0
    slow, *others = ranks[TRAINERS:]
    for trainer in ranks[:TRAINERS]:
        trainer.tell("send", 1, still_s)
    slow.tell("linger", 1, 0.15 * still_s, still_s)
    for other in others:
        other.tell("receive", 1, still_s)
    assert [trainer.answer()[0] for trainer in ranks[:TRAINERS]] == [[]] * TRAINERS
    assert [reader.answer() for reader in ranks[TRAINERS:]] == [([], True)] * READERS


def test_wrong_bytes_are_refused_by_all_who_get_them(ranks: list[Actor]) -> None:
    ranks[1].ask("spoil")
    found = transfer(ranks, 1)[TRAINERS:]
    assert [lost for lost, _ in found] == [[1]] * READERS


def test_messages_of_a_pair_are_of_the_same_pieces_at_both_ends() -> None:
    """Each end knows the types of its own parts only."""
    pieces = [piece for piece in plan_pieces(layouts()) if (piece.source, piece.target) == (0, 2)]

    def bundles(held: Callable[[ShardPiece], Box]) -> list[Any]:
        parts = {(piece.name, held(piece)): torch.zeros((), dtype=SHAPES[piece.name][1]) for piece in pieces}
        return list(shard_transfer._bundles(pieces, parts))

    assert bundles(lambda piece: piece.held) == bundles(lambda piece: piece.wanted)
