"""Weights rounded for the way to other hosts: to bfloat16, or matrices to 8 bits (e4m3) with a scale for each block.

fp8: the values of a matrix in the order of memory, in blocks of BLOCK, each divided by its scale and rounded to the
nearest number of 4 bits of exponent and 3 of mantissa. Scales are powers of two, one byte each (the exponent + 127):
they round nothing themselves, and as long as a block's largest value stays within its power of two, values that do not
change keep their bytes, so that deltas stay small. The bytes of a tensor: one for each value, then its scales. What has
less than two dimensions, such as the weights of norms, is rounded to bfloat16.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Literal, overload

import torch
from torch import Tensor

from distflow.weights.manifest import BLOCK, FP8, TensorEntry, coding_threads
from distflow.weights.transport import NamedTensors

Rounding = Literal["bf16", "fp8"]
LARGEST = 448.0
"""Largest number of e4m3."""
_BIAS = 127
_PIECE = 255 * BLOCK
"""Values at a time, which stay in a core's cache; of 32,768 PyTorch would divide the work over threads of its own."""
_TURN = 32 * _PIECE
"""Values that a thread takes at a time."""
_VALUES = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
"""The value of each byte."""
_POWERS = torch.ldexp(torch.ones(256), torch.arange(256) - _BIAS)
"""The scale of each byte."""


def to_fp8(values: Tensor) -> Tensor:
    """The bytes of a tensor of n values. Infinite values become NaN, which e4m3 has. On several threads."""
    flat = values.detach().reshape(-1)
    count = flat.numel()
    stored = torch.empty(count + -(-count // BLOCK), dtype=torch.uint8)
    bytes_, scales = stored[:count], stored[count:]
    _in_pieces(count, lambda part, blocks: _encode(flat[part], bytes_[part], scales[blocks]))
    return stored


def from_fp8(stored: Tensor, shape: Sequence[int]) -> Tensor:
    """The values in bfloat16, which holds all of them exactly unless they are below its smallest number. On several
    threads.
    """
    count = torch.Size(shape).numel()
    bytes_, scales = stored[:count], stored[count:]
    values = torch.empty(count, dtype=torch.bfloat16)
    _in_pieces(count, lambda part, blocks: _decode(bytes_[part], scales[blocks], values[part]))
    return values.view(*shape)


def _in_pieces(count: int, work: Callable[[slice, slice], None]) -> None:
    """Call `work` with the values of each piece and with its blocks."""

    def run(begin: int) -> None:
        for at in range(begin, min(begin + _TURN, count), _PIECE):
            end = min(at + _PIECE, count)
            work(slice(at, end), slice(at // BLOCK, -(-end // BLOCK)))

    if count <= _TURN:
        run(0)
        return
    with ThreadPoolExecutor(coding_threads()) as pool:
        deque(pool.map(run, range(0, count, _TURN)), maxlen=0)


def _encode(values: Tensor, bytes_: Tensor, scales: Tensor) -> None:
    """One piece, whose blocks are whole but for the last one of a tensor."""
    count = values.numel()
    blocks = torch.nn.functional.pad(values.float(), (0, -count % BLOCK)).view(-1, BLOCK)
    largest = blocks.abs().amax(1)
    if not largest.isfinite().all():
        blocks = torch.where(blocks.isinf(), torch.nan, blocks)
        largest = blocks.abs().nan_to_num(nan=0.0).amax(1)
    # The smallest power of two at which the largest value of the block is at most LARGEST.
    mantissa, exponent = torch.frexp(largest / LARGEST)
    exponent = torch.where(mantissa == 0.5, exponent - 1, exponent).clamp(-_BIAS, _BIAS)
    scaled = blocks * _POWERS[_BIAS - exponent].unsqueeze(1)
    bytes_.copy_(scaled.to(torch.float8_e4m3fn).view(torch.uint8).view(-1)[:count])
    scales.copy_(exponent + _BIAS)


def _decode(bytes_: Tensor, scales: Tensor, values: Tensor) -> None:
    """One piece."""
    count = bytes_.numel()
    # Looked up: converting from float8 takes eleven times as long.
    found = torch.nn.functional.pad(_VALUES[bytes_.int()], (0, -count % BLOCK)).view(-1, BLOCK)
    values.copy_((found * _POWERS[scales.int()].unsqueeze(1)).view(-1)[:count])


def rounded(tensors: Iterable[tuple[str, Tensor]], to: Rounding) -> Iterator[tuple[str, Tensor]]:
    """The tensors, rounded; those in fp8 as their bytes. What is narrow enough stays as it is."""
    for name, tensor in tensors:
        if to == "fp8" and tensor.dim() > 1:
            yield name, to_fp8(tensor)
        else:
            yield name, tensor.to(torch.bfloat16) if tensor.itemsize > torch.bfloat16.itemsize else tensor


def restored(stored: NamedTensors, entries: Sequence[TensorEntry]) -> NamedTensors:
    """The tensors of a version as it came over the network, in types that engines know."""
    shapes = {entry.name: entry.shape for entry in entries if entry.dtype == FP8}
    return Restored(stored, shapes) if shapes else stored


class Restored(Sequence[tuple[str, Tensor]]):
    """Tensors of which those in fp8 are decoded when they are taken: never all of them at once.

    `shapes`: those of the tensors in fp8, by name.
    """

    def __init__(self, stored: NamedTensors, shapes: dict[str, tuple[int, ...]]) -> None:
        self._stored = stored
        self._shapes = shapes

    def __len__(self) -> int:
        return len(self._stored)

    @overload
    def __getitem__(self, at: int) -> tuple[str, Tensor]: ...
    @overload
    def __getitem__(self, at: slice) -> list[tuple[str, Tensor]]: ...
    def __getitem__(self, at: int | slice) -> tuple[str, Tensor] | list[tuple[str, Tensor]]:
        """As in a list."""
        if isinstance(at, slice):
            return [self[index] for index in range(*at.indices(len(self)))]
        name, tensor = self._stored[at]
        return name, from_fp8(tensor, self._shapes[name]) if name in self._shapes else tensor
