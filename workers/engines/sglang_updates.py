"""Loads staged weights into SGLang's processes: each maps the shared memory, or all are sent its contents over Gloo.

Both happen between SGLang's begin_weight_update and end_weight_update, while it is paused.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from datetime import timedelta
from itertools import islice
from typing import Any

import torch
import torch.distributed as dist
from sglang.srt.managers.io_struct import (
    InitWeightsUpdateGroupReqInput,
    UpdateWeightsFromDistributedReqInput,
    UpdateWeightsFromTensorReqInput,
)
from sglang.srt.utils import MultiprocessingSerializer, init_custom_process_group
from torch import Tensor
from torch._C._distributed_c10d import PrefixStore

from distflow.comm.collective import LOOPBACK, buckets
from distflow.workers.engines.loopback_store import loopback_store
from distflow.workers.engines.staged_weights import CHECK, LOADER, POISON, staged_tensors

GROUP = "distflow-weights"
LIMIT = timedelta(seconds=600)
"""Limit for making the group, and for sending each piece. The worker waits equally long."""


class CallRefused(Exception):
    """SGLang refused a call."""


def check(call: str, answer: tuple[bool, str]) -> None:
    """Raises CallRefused with SGLang's answer to `call` unless it succeeded."""
    success, text = answer
    if not success:
        raise CallRefused(f"{call}: {text}")


class MappedUpdates:
    """Each of SGLang's `parts` processes maps the staged weights and takes its part of them."""

    def __init__(self, manager: Any, parts: int) -> None:
        self._manager = manager
        self._parts = parts

    async def load(self, staged: str, version: str) -> None:
        """`staged` describes where the weights are. Raises CallRefused."""
        await _tell_loader(self._manager, self._parts, staged, version)


async def _tell_loader(manager: Any, parts: int, told: str, version: str) -> None:
    """Pass a text to our loader in each of SGLang's processes."""
    # As the name of an empty tensor, which travels without memory of its own.
    named = MultiprocessingSerializer.serialize([(told, torch.empty(0))])
    request = UpdateWeightsFromTensorReqInput(
        serialized_named_tensors=[named] * parts,
        load_format=LOADER,
        # The cache is keyed by version, and running samples still need it.
        flush_cache=False,
        weight_version=version,
    )
    check("update_weights_from_tensor", await manager.update_weights_from_tensor(request, None))


class GroupUpdates:
    """This process and SGLang's `parts` processes form a Gloo group, in which this one, rank 0, sends the weights.

    Not NCCL: it would need a GPU for this process beside those of SGLang.
    """

    def __init__(self, manager: Any, parts: int) -> None:
        self._manager = manager
        self._parts = parts
        self._group: Any = None

    async def load(self, staged: str, version: str) -> None:
        """`staged` describes where the weights are. Raises CallRefused.

        The first call makes the group, and checks that all parameters were written.
        """
        first = self._group is None
        if first:
            self._group = await self._join()
            await _tell_loader(self._manager, self._parts, POISON, version)
        await self._broadcast(staged, version)
        if first:
            await _tell_loader(self._manager, self._parts, CHECK, version)

    async def _broadcast(self, staged: str, version: str) -> None:
        named = dict(staged_tensors(staged))
        names = iter(named)
        for bucket in buckets(list(named.values())):
            sending = asyncio.create_task(asyncio.to_thread(self._send, bucket))
            request = UpdateWeightsFromDistributedReqInput(
                names=list(islice(names, len(bucket))),
                dtypes=[str(tensor.dtype).removeprefix("torch.") for tensor in bucket],
                shapes=[list(tensor.shape) for tensor in bucket],
                group_name=GROUP,
                load_format="flattened_bucket",
                flush_cache=False,
                weight_version=version,
            )
            answer = await self._manager.update_weights_from_distributed(request, None)
            check("update_weights_from_distributed", answer)
            await sending

    async def _join(self) -> Any:
        members = self._parts + 1
        store = loopback_store(members, LIMIT)
        ours = asyncio.create_task(
            asyncio.to_thread(
                init_custom_process_group,
                backend="gloo",
                store=PrefixStore(GROUP, store),
                timeout=LIMIT,
                world_size=members,
                rank=0,
                group_name=GROUP,
            )
        )
        request = InitWeightsUpdateGroupReqInput(
            master_address=LOOPBACK,
            master_port=store.port,
            rank_offset=1,
            world_size=members,
            group_name=GROUP,
            backend="gloo",
        )
        check("init_weights_update_group", await self._manager.init_weights_update_group(request, None))
        return await ours

    def _send(self, bucket: Sequence[Tensor]) -> None:
        dist.broadcast(torch.cat([tensor.reshape(-1) for tensor in bucket]).view(torch.uint8), 0, group=self._group)


UPDATES: dict[str, type[MappedUpdates] | type[GroupUpdates]] = {"memory": MappedUpdates, "group": GroupUpdates}
"""By the name in `engine_options.update_by`."""
