"""Moves tensors to the host's memory and back, asynchronously to what the device computes."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from distflow.errors import UserError


class Offloader:
    """Offloads tensors of one device.

    On a GPU, copies use pinned buffers, which stay allocated, and a stream of their own: neither `put` nor `fetch`
    waits for them. On a CPU nothing moves.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream: torch.cuda.Stream | None = None
        if device.type == "cuda":
            self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._copied: torch.cuda.Event | None = None
        self._away: list[Tensor] = []
        self._buffers: dict[int, Tensor] = {}
        """Pinned buffers, by the order in which tensors are offloaded."""

    @torch.no_grad()
    def put(self, tensors: Iterable[Tensor]) -> None:
        """Offload these tensors, in addition to others; device memory is freed once nothing else refers to it.

        Their values can be read in the host's memory after `wait`.
        """
        if self._stream is None:
            return
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            for tensor in tensors:
                data = tensor.data
                buffer = self._buffer(data)
                buffer.copy_(data, non_blocking=True)
                # Its memory is reused only after the copy.
                data.record_stream(self._stream)
                tensor.data = buffer
                self._away.append(tensor)
        self._copied = self._stream.record_event()

    def wait(self) -> None:
        """Wait until offloaded values can be read."""
        if self._copied is not None:
            self._copied.synchronize()

    @torch.no_grad()
    def fetch(self) -> None:
        """Bring all tensors back; later work on the device's current stream finds them there."""
        if self._stream is None:
            return
        current = torch.cuda.current_stream(self._device)
        # Allocated on the stream that uses them; the copies wait for what that stream still does with this memory.
        places = [torch.empty_like(tensor.data, device=self._device, pin_memory=False) for tensor in self._away]
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream):
            for tensor, place in zip(self._away, places, strict=True):
                place.copy_(tensor.data, non_blocking=True)
                tensor.data = place
        current.wait_stream(self._stream)
        self._away.clear()

    def check(self) -> None:
        """Raise UserError while tensors are offloaded: nothing can be computed with them."""
        if self._away:
            raise UserError(
                "a model was used while the worker generates, but with offload: true models are in the host's memory "
                "then — use it in a step that runs after the samples have been received"
            )

    def _buffer(self, data: Tensor) -> Tensor:
        place = len(self._away)
        if place not in self._buffers or not _same_kind(self._buffers[place], data):
            self._buffers[place] = torch.empty_like(data, device="cpu", pin_memory=True)
        return self._buffers[place]


def bytes_on(device: torch.device, tensors: Iterable[Tensor | None]) -> int:
    """Bytes that these tensors occupy on a device; shared memory counts once."""
    storages = {
        storage.data_ptr(): storage.nbytes()
        for tensor in tensors
        if tensor is not None and tensor.device == device
        for storage in (tensor.untyped_storage(),)
    }
    return sum(storages.values())


def _same_kind(buffer: Tensor, data: Tensor) -> bool:
    return buffer.shape == data.shape and buffer.dtype == data.dtype and buffer.stride() == data.stride()
