"""A parameter sharded by rows: this replica's rows as a view for the optimizer, and the whole when needed."""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor import Shard as ByRows

from distflow.runtime.checkpoint.format import Shard


class Rows:
    """The rows of `parameter` (a DTensor sharded by rows over one mesh) that this replica holds; there may be none.

    Rows are divided as by `torch.chunk`: ⌈rows / replicas⌉ to each replica, until none are left.
    """

    def __init__(self, parameter: nn.Parameter) -> None:
        self._parameter = _divided(parameter)
        self.shape = tuple(self._parameter.shape)
        self.held = nn.Parameter(self._local(), requires_grad=parameter.requires_grad)
        """Shares its memory with the parameter."""
        mesh = self._parameter.device_mesh
        self._first = min(-(-self.shape[0] // mesh.size()) * mesh.get_local_rank(), self.shape[0])

    def rebind(self, parameter: nn.Parameter) -> None:
        """Use this tensor, after the parameter was moved to another device."""
        self._parameter = _divided(parameter)
        self.refresh()

    def refresh(self) -> None:
        """Point `held` at the memory that forwards read: the first one may have moved the rows to pinned memory."""
        self.held.data = self._local()

    @property
    def gradient(self) -> Tensor | None:
        """These rows of the accumulated gradient."""
        gradient = self._parameter.grad
        return None if gradient is None else _divided(gradient).to_local()

    def take_gradient(self) -> None:
        """Expose the gradient to the optimizer."""
        gradient = self.gradient
        self.refresh()
        self.held.grad = gradient

    def clear_gradient(self) -> None:
        """Drop the gradient."""
        self._parameter.grad = None

    def shard(self, name: str, data: Tensor) -> Shard:
        """These rows of a tensor of the parameter's shape, such as a moment."""
        return Shard(name, self.shape, self._first * math.prod(self.shape[1:]), data)

    def of(self, tensor: Tensor) -> Tensor:
        """These rows of a whole tensor."""
        return tensor.narrow(0, self._first, len(self.held))

    @torch.no_grad()
    def gathered(self, dtype: torch.dtype, device: torch.device) -> Tensor:
        """The whole parameter, on every replica; collective."""
        local = self._local().to(device=device, dtype=dtype)
        mesh = self._parameter.device_mesh
        stride = torch.empty(self.shape, device="meta").stride()
        divided = DTensor.from_local(
            local, mesh, [ByRows(0)], run_check=False, shape=self._parameter.shape, stride=stride
        )
        return divided.full_tensor()

    @torch.no_grad()
    def pieces(self, dtype: torch.dtype, device: torch.device, limit: int) -> Iterator[tuple[int, Tensor]]:
        """The whole parameter in runs of rows of about `limit` bytes, each with the number of its first row.

        The same on every replica; collective.
        """
        mesh = self._parameter.device_mesh
        local = self._local().to(device=device, dtype=dtype)
        each = -(-self.shape[0] // mesh.size())
        row = dtype.itemsize * math.prod(self.shape[1:])
        at_once = max(1, limit // row)
        for replica in range(mesh.size()):
            end = min((replica + 1) * each, self.shape[0])
            for first in range(min(replica * each, self.shape[0]), end, at_once):
                count = min(at_once, end - first)
                piece = torch.empty((count, *self.shape[1:]), dtype=dtype, device=device)
                if replica == mesh.get_local_rank():
                    piece.copy_(local.narrow(0, first - self._first, count))
                dist.broadcast(piece, group=mesh.get_group(), group_src=replica)
                yield first, piece

    def _local(self) -> Tensor:
        return _divided(self._parameter.detach()).to_local()


def _divided(tensor: Tensor) -> DTensor:
    assert isinstance(tensor, DTensor), "fully_shard has sharded every parameter"
    return tensor
