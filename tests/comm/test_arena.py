"""The bookkeeping of a shared segment against a model: no overlap, no leak, and no reference that is not current."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from distflow.comm.arena import ALIGN, Arena, Block, aligned
from distflow.errors import ProtocolError

LIMIT = 64 * ALIGN


class AgainstAModel(RuleBasedStateMachine):
    """The model is one letter for each ALIGN bytes: the generation that holds them, or 0."""

    def __init__(self) -> None:
        super().__init__()
        self.arena = Arena(LIMIT)
        self.cells: list[int] = []
        self.held: list[Block] = []
        self.released: list[Block] = []

    @rule(by=st.integers(0, 16))
    def grow(self, by: int) -> None:
        by = min(by, LIMIT // ALIGN - len(self.cells))
        self.cells += [0] * by
        self.arena.grow(len(self.cells) * ALIGN)

    @rule(size=st.integers(0, 20 * ALIGN))
    def take(self, size: int) -> None:
        block = self.arena.take(size)
        cells = aligned(max(size, 1)) // ALIGN
        fits = [at for at in range(len(self.cells) - cells + 1) if not any(self.cells[at : at + cells])]
        if block is None:
            assert not fits, "there was room"
            return
        assert block.offset == fits[0] * ALIGN, "the first fit"
        assert block.size == cells * ALIGN
        assert all(block.generation > other.generation for other in self.held + self.released)
        self.cells[fits[0] : fits[0] + cells] = [block.generation] * cells
        self.held.append(block)

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        block = self.held.pop(data.draw(st.integers(0, len(self.held) - 1)))
        assert self.arena.release(block.offset, block.generation) == block
        self.cells = [0 if cell == block.generation else cell for cell in self.cells]
        self.released.append(block)

    @precondition(lambda self: self.released)
    @rule(data=st.data())
    def refuse_stale(self, data: st.DataObject) -> None:
        block = data.draw(st.sampled_from(self.released))
        with pytest.raises(ProtocolError, match=f"stale reference to generation {block.generation} at offset"):
            self.arena.release(block.offset, block.generation)

    @rule(offset=st.integers(-ALIGN, LIMIT + ALIGN), generation=st.integers(-2, 100))
    def refuse_made_up(self, offset: int, generation: int) -> None:
        if (offset, generation) not in [(block.offset, block.generation) for block in self.held]:
            with pytest.raises(ProtocolError, match="stale reference"):
                self.arena.release(offset, generation)

    @invariant()
    def counts_agree(self) -> None:
        assert self.arena.size == len(self.cells) * ALIGN
        assert self.arena.held == sum(map(bool, self.cells)) * ALIGN
        assert self.arena.blocks == len(self.held)

    def teardown(self) -> None:
        for block in self.held:
            self.arena.release(block.offset, block.generation)
        if self.cells:
            whole = self.arena.take(self.arena.size)
            assert whole is not None, "all extents are one again"


AgainstAModel.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestArena = AgainstAModel.TestCase


def test_a_reference_is_good_for_one_block_only() -> None:
    arena = Arena(4096)
    assert arena.take(1) is None, "nothing is usable yet"
    arena.grow(4096)
    first, second = arena.take(1000), arena.take(1000)
    assert (first, second) == (Block(0, 1024, 1), Block(1024, 1024, 2))
    arena.release(0, 1)
    assert arena.take(500) == Block(0, 512, 3)
    with pytest.raises(ProtocolError, match="generation 1 at offset 0: it holds generation 3 now"):
        arena.release(0, 1)
    with pytest.raises(ProtocolError, match="generation 1 at offset 64: nothing is held there"):
        arena.release(64, 1)


def test_a_hole_in_the_middle_is_used_before_the_end() -> None:
    arena = Arena(8192)
    arena.grow(8192)
    blocks = [arena.take(1024) for _ in range(4)]
    assert blocks[1] is not None
    arena.release(blocks[1].offset, blocks[1].generation)
    assert arena.take(2048) == Block(4096, 2048, 5)
    assert arena.take(1024) == Block(1024, 1024, 6)
