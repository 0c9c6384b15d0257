"""Weights on their way into an engine of another project: staged in memory that all its processes can map.

The memory has no name (memfd): it goes when the last process that uses it does.
"""

from __future__ import annotations

import json
import mmap
import os
from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor

ALIGN = 64


class StagedWeights:
    """One version of all parameters, in the engine's dtype, as tensors to be written; `descriptor` fits this file."""

    def __init__(self, shapes: Mapping[str, Sequence[int]], dtype: torch.dtype, tied: Mapping[str, str]) -> None:
        """`shapes` by name; `tied` further names, each with the name in `shapes` that it shares its tensor with."""
        places, size = [], 0
        for name, shape in shapes.items():
            count = torch.Size(shape).numel()
            places.append((name, list(shape), size))
            size += -(-count * dtype.itemsize // ALIGN) * ALIGN
        self.descriptor = os.memfd_create("distflow-weights")
        os.truncate(self.descriptor, max(size, ALIGN))
        # The views keep the memory mapped; it is unmapped with the last of them.
        memory = mmap.mmap(self.descriptor, max(size, ALIGN))
        self.tensors = {name: _view(memory, dtype, shape, start) for name, shape, start in places}
        self.tensors |= {name: self.tensors[other] for name, other in tied.items()}
        self.layout = {"dtype": str(dtype).removeprefix("torch."), "tensors": places, "tied": dict(tied)}

    def described(self, holder: int, descriptor: int) -> str:
        """For `staged_tensors`: process `holder` has the memory open as `descriptor`."""
        return json.dumps({"place": f"/proc/{holder}/fd/{descriptor}", **self.layout})

    def close(self) -> None:
        """Let go of the memory."""
        self.tensors.clear()
        os.close(self.descriptor)


def staged_tensors(description: str, *, all_names: bool = False) -> Iterator[tuple[str, Tensor]]:
    """What is staged, by `described`, in this process: its own copies as soon as they are written to.

    Tied parameters come once, or with `all_names` under each of their names.
    """
    staged = json.loads(description)
    dtype: torch.dtype = getattr(torch, staged["dtype"])
    with open(staged["place"], "rb") as file:
        memory = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
    found = {name: _view(memory, dtype, shape, start) for name, shape, start in staged["tensors"]}
    yield from found.items()
    if all_names:
        yield from ((name, found[other]) for name, other in staged["tied"].items())


def _view(memory: mmap.mmap, dtype: torch.dtype, shape: Sequence[int], start: int) -> Tensor:
    count = torch.Size(shape).numel()
    if not count:
        return torch.empty(shape, dtype=dtype)
    return torch.frombuffer(memory, dtype=dtype, count=count, offset=start).view(*shape)
