"""Sums over the replicas of a training pool: Gloo on CPUs, NCCL where every replica has a GPU of its own.

The members create the group themselves once they have agreed over ZeroMQ that all of them are present, so that it
cannot take long. They look up each other's addresses in a store; neither data nor later decisions pass through it.
Gloo and NCCL then listen on this host's address in the run without a key: every process that can reach their ports must
be trusted.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta

import psutil
import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import Store

from distflow.errors import ReplicaLost, UserError, WorkerFailed

BUCKET_BYTES = 64 << 20
"""Tensors are summed in pieces of about this size, in a reused buffer."""
LOOPBACK = "127.0.0.1"
INTERFACE = "GLOO_SOCKET_IFNAME"
"""The environment variable that names the interface for Gloo."""


@dataclass(frozen=True, slots=True)
class Rendezvous:
    """How the members find each other."""

    rank: int
    members: int
    own_address: str
    """This host's address for the other members."""
    limit_s: float
    """Seconds for creating the group, and for each sum."""


class Collective:
    """One member of the group. `store`: where the members look up each other's addresses.

    `nccl`: every member has a GPU of its own. Raises ReplicaLost if another member is gone or does not answer within
    the limit, WorkerFailed if the group cannot be created for another reason.
    """

    def __init__(self, rendezvous: Rendezvous, store: Store, *, nccl: bool) -> None:
        self._store = store
        """Kept as long as the group: a store written in Python is called from the library's threads."""
        self._buffers: dict[tuple[torch.dtype, torch.device], Tensor] = {}
        self._nccl = nccl
        # Gloo would look up this host's name, which may not resolve to the address that the others can reach.
        os.environ[INTERFACE] = interface_of(rendezvous.own_address)
        # Nor would NCCL choose it among several. "=" means exactly this one, not a prefix.
        os.environ.setdefault("NCCL_SOCKET_IFNAME", f"={os.environ[INTERFACE]}")
        limit = timedelta(seconds=rendezvous.limit_s)
        try:
            dist.init_process_group(
                "cpu:gloo,cuda:nccl" if nccl else "gloo",
                store=store,
                rank=rendezvous.rank,
                world_size=rendezvous.members,
                timeout=limit,
            )
        except (RuntimeError, ValueError) as error:
            lost = isinstance(error, RuntimeError) and is_lost_member(error)
            raise (ReplicaLost if lost else WorkerFailed)(
                f"the group of {rendezvous.members} training replicas cannot be created from "
                f"{rendezvous.own_address}, rank {rendezvous.rank}: {error}"
            ) from error

    def pieces(self, tensors: Sequence[Tensor]) -> Iterator[PendingSum]:
        """Sum tensors in place, piece by piece: `begin` each one, wait for it, `finish` it.

        Every member must give tensors of the same shapes and types, in the same order.
        """
        for bucket in buckets(tensors):
            device = bucket[0].device if self._nccl else torch.device("cpu")
            count = sum(tensor.numel() for tensor in bucket)
            yield PendingSum(bucket, self._buffer(bucket[0].dtype, device, count))

    def close(self) -> None:
        """Leave the group."""
        self._buffers.clear()
        dist.destroy_process_group()

    def _buffer(self, dtype: torch.dtype, device: torch.device, count: int) -> Tensor:
        key = (dtype, device)
        if key not in self._buffers or self._buffers[key].numel() < count:
            self._buffers[key] = torch.empty(count, dtype=dtype, device=device)
        return self._buffers[key][:count]


def is_lost_member(error: RuntimeError) -> bool:
    """Whether a collective operation failed because another member is gone or does not answer."""
    # Gloo has no exception type for it; its messages name the source file of its transport.
    return isinstance(error, dist.DistError) or "gloo/transport" in str(error)


@contextmanager
def losing_members(what: str) -> Iterator[None]:
    """Around a collective operation: raises ReplicaLost if another member is lost, other errors unchanged."""
    try:
        yield
    except RuntimeError as error:
        if not is_lost_member(error):
            raise
        raise ReplicaLost(f"a training replica was lost {what}: {error}") from error


class PendingSum:
    """One piece of a sum."""

    def __init__(self, tensors: Sequence[Tensor], buffer: Tensor) -> None:
        self._buffer = buffer
        pieces = torch.split_with_sizes(buffer, [tensor.numel() for tensor in tensors])
        self._places = list(zip(tensors, pieces, strict=True))
        """Each tensor, and its piece of the buffer, which may be on another device."""
        self._future: torch.futures.Future[list[Tensor]] | None = None

    @torch.no_grad()
    def begin(self, done: Callable[[], None]) -> None:
        """Start the sum; `done` is called at the end, on a thread of the library."""
        for tensor, piece in self._places:
            piece.copy_(tensor.reshape(-1))
        with losing_members("while gradients were summed"):
            work = dist.all_reduce(self._buffer, async_op=True)
        assert work is not None, "this process is a member of the group"
        self._future = work.get_future()
        self._future.add_done_callback(lambda future: done())

    @property
    def over(self) -> bool:
        """Whether it has ended, with or without an error."""
        return self._future is not None and self._future.done()

    @torch.no_grad()
    def finish(self) -> None:
        """Copy the sums into the tensors; raises ReplicaLost if a member was lost."""
        assert self._future is not None, "not begun"
        try:
            self._future.wait()
        except RuntimeError as error:
            raise ReplicaLost(f"a training replica was lost while gradients were summed: {error}") from error
        for tensor, piece in self._places:
            tensor.copy_(piece.view(tensor.shape))


def buckets(tensors: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    """Consecutive tensors of one type and device, up to BUCKET_BYTES (a larger tensor alone)."""
    bucket: list[Tensor] = []
    size = 0
    for tensor in tensors:
        fits = bucket and size + tensor.nbytes <= BUCKET_BYTES
        if bucket and not (fits and (tensor.dtype, tensor.device) == (bucket[0].dtype, bucket[0].device)):
            yield bucket
            bucket, size = [], 0
        bucket.append(tensor)
        size += tensor.nbytes
    if bucket:
        yield bucket


def interface_of(address: str) -> str:
    """The network interface with this address; raises UserError that lists the existing ones."""
    for name, entries in psutil.net_if_addrs().items():
        if any(entry.family in (socket.AF_INET, socket.AF_INET6) and entry.address == address for entry in entries):
            return name
    known = {name: [entry.address for entry in entries] for name, entries in psutil.net_if_addrs().items()}
    raise UserError(
        f"this host does not have the address {address} that other training workers would connect to; it has {known}"
    )
