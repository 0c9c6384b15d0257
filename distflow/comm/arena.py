"""Which bytes of a shared segment are in use: pure bookkeeping, without memory, files, locks or threads.

A segment is divided into blocks. `take` cuts one from the first free extent that is large enough, `release` gives it
back and joins it with its free neighbours. Every block gets a generation number that no other block of the segment ever
has: a reference is an offset and a generation, and one that is stale, repeated or made up is refused, whatever stands
at its offset by now.

Example: in an arena that was grown to 4096 bytes, take(1000) is block (0, 1), take(1000) is block (1024, 2); after
release(0, 1), take(500) is block (0, 3), and another release(0, 1) raises ProtocolError.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from dataclasses import dataclass

from distflow.errors import ProtocolError

ALIGN = 64
"""Blocks begin at multiples of it: a cache line, and enough for every type of a column."""


@dataclass(frozen=True, slots=True)
class Block:
    """Bytes of a segment that were taken and not yet released."""

    offset: int
    size: int
    generation: int


def aligned(size: int) -> int:
    """`size` rounded up to a multiple of ALIGN."""
    return size + (-size % ALIGN)


class Arena:
    """The blocks of one segment, whose usable part `grow` extends up to `limit` bytes."""

    def __init__(self, limit: int) -> None:
        assert limit == aligned(limit), f"an arena of {limit} bytes; expected a multiple of {ALIGN}"
        self.limit = limit
        self.size = 0
        """Bytes that can be taken, or are."""
        self.held = 0
        """Bytes of the blocks that are taken."""
        self._generation = 0
        self._free: list[tuple[int, int]] = []
        """Offset and size of free extents by offset; no two of them touch."""
        self._taken: dict[int, Block] = {}

    @property
    def blocks(self) -> int:
        """How many blocks are taken."""
        return len(self._taken)

    def grow(self, size: int) -> None:
        """Make the first `size` bytes usable; a multiple of ALIGN, at most `limit`, never less than now."""
        assert self.size <= size <= self.limit, f"from {self.size} to {size} of {self.limit} bytes"
        assert size == aligned(size), f"{size} bytes; expected a multiple of {ALIGN}"
        if size > self.size:
            before, self.size = self.size, size
            self._put_back(before, size - before)

    def take(self, size: int) -> Block | None:
        """A block of at least `size` bytes; None if no free extent is large enough."""
        size = aligned(max(size, 1))
        for index, (offset, extent) in enumerate(self._free):
            if extent >= size:
                if extent == size:
                    del self._free[index]
                else:
                    self._free[index] = (offset + size, extent - size)
                self._generation += 1
                self.held += size
                block = self._taken[offset] = Block(offset, size, self._generation)
                return block
        return None

    def release(self, offset: int, generation: int) -> Block:
        """Give a block back. Raises ProtocolError if this reference is not, or no longer, to a taken block."""
        block = self._taken.get(offset)
        if block is None or block.generation != generation:
            now = "nothing is held there" if block is None else f"it holds generation {block.generation} now"
            raise ProtocolError(f"a stale reference to generation {generation} at offset {offset}: {now}")
        del self._taken[offset]
        self.held -= block.size
        self._put_back(offset, block.size)
        return block

    def _put_back(self, offset: int, size: int) -> None:
        at = bisect_left(self._free, (offset, 0))
        if at < len(self._free) and self._free[at][0] == offset + size:
            size += self._free.pop(at)[1]
        if at > 0 and sum(self._free[at - 1]) == offset:
            offset, before = self._free.pop(at - 1)
            size += before
        insort(self._free, (offset, size))
