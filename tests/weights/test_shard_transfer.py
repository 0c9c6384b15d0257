"""Two ranks that train send to three that generate, each of which holds other parts: real processes, over Gloo."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from distflow.weights.shards import plan as shard_plan
from distflow.weights.shards import transfer as shard_transfer
from distflow.weights.shards.plan import Box, RankPart, ShardPiece, TensorLayout, boxes_of, plan_pieces
from distflow.weights.shards.transfer import HeldPart, ShardTransfer
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

    def send(self, number: int) -> tuple[list[int], int]:
        """The ranks that were lost, and what was sent."""
        done = self.group.send(self.plan, self.parts(True, number), LIMIT_S)
        return sorted(done.lost), done.nbytes

    def receive(self, number: int) -> tuple[list[int], bool]:
        """The ranks that were lost, and whether what came is right."""
        found = self.parts(False, None)
        done = self.group.receive(self.plan, found, LIMIT_S)
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


class OneMessage:
    """Under way: how long it may be waited for is written down."""

    def __init__(self, waited: list[float]) -> None:
        self.waited = waited

    def wait(self, limit: timedelta) -> None:
        self.waited.append(limit.total_seconds())


class Gloo:
    """Instead of torch's: each message passes at once."""

    _Options = SimpleNamespace

    def __init__(self, *_: object) -> None:
        self.waited: list[float] = []

    @staticmethod
    def create_device(interface: str) -> str:
        return interface

    def send(self, buffers: list[torch.Tensor], peer: int, tag: int) -> OneMessage:
        return OneMessage(self.waited)

    recv = send


def test_a_member_may_stand_still_as_long_before_the_last_message_as_before_the_first(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Thousands of messages may take minutes; nobody waits minutes for one that does not come."""
    monkeypatch.setattr(dist, "ProcessGroupGloo", Gloo)
    monkeypatch.setattr(shard_plan, "MOST_BYTES", 16 << 10)
    monkeypatch.setattr(shard_transfer, "BUNDLE_BYTES", 32 << 10)
    group: Any = ShardTransfer(dist.HashStore(), 0, 2, "127.0.0.1", LIMIT_S)
    box, tensor = Box((0, 0), (500, 400)), torch.zeros(500, 400)
    layout = TensorLayout("w", (500, 400), 4, (RankPart(0, box),), (RankPart(1, box),))
    back = TensorLayout("w", (500, 400), 4, (RankPart(1, box),), (RankPart(0, box),))
    group.send(plan_pieces([layout]), {"w": [HeldPart(box, tensor)]}, 7.0)
    group.receive(plan_pieces([back]), {"w": [HeldPart(box, tensor)]}, 7.0)
    assert set(group._group.waited) == {7.0}
    assert len(group._group.waited) > 2 * 20, "one piece would be one message, however large"


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
