"""Jobs in several processes that form a group, as the replicas of a training pool do."""

from __future__ import annotations

import multiprocessing
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from distflow.comm.collective import LOOPBACK, Collective, Rendezvous

LIMIT_S = 200.0
PRELOAD = (
    "distflow.comm.collective",
    "distflow.workers.backends.fsdp_backend",
    "distflow.workers.backends.deepspeed_backend",
    "distflow.testing.backend_contract",
)
"""Imported once, in the process that all others are forked from."""
Job = tuple[Callable[..., Any], tuple[Any, ...]]
"""A module's function and its arguments after the replicas; it returns what `torch.save` can write."""


class Members:
    """The `Reducer` that a backend gets."""

    def __init__(self, rank: int, size: int) -> None:
        self.rank = rank
        self.size = size

    def sum_(self, tensors: Sequence[Tensor]) -> None:
        for tensor in tensors:
            dist.all_reduce(tensor)


@contextmanager
def group_of_one() -> Iterator[None]:
    """Within it this process is the only member of a group."""
    meeting = Rendezvous(0, 1, LOOPBACK, 20.0)
    group = Collective(meeting, dist.HashStore(), nccl=torch.cuda.is_available())
    try:
        yield
    finally:
        leave_group(group.close)


def leave_group(close: Callable[[], None]) -> None:
    """`close` the group of this process, through DeepSpeed if that is at work: it would go on using its copy of it."""
    deepspeed = sys.modules.get("deepspeed")
    if deepspeed is not None and deepspeed.comm.is_initialized():
        deepspeed.comm.destroy_process_group()
    else:
        close()


def together(size: int, folder: Path, jobs: Mapping[str, Job]) -> dict[str, list[Any]]:
    """Run jobs in turn in `size` processes; returns results by rank. Fails with the traceback of one that raised."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(list(PRELOAD))
    folder.mkdir(parents=True, exist_ok=True)
    files = [folder / f"{rank}.pt" for rank in range(size)]
    meeting = folder / "group"
    members = [
        context.Process(target=_member, args=(rank, size, meeting, file, jobs)) for rank, file in enumerate(files)
    ]
    for member in members:
        member.start()
    deadline = time.monotonic() + LIMIT_S
    try:
        for member in members:
            member.join(max(0.0, deadline - time.monotonic()))
        assert [member.exitcode for member in members] == [0] * size, [f.read_text() for f in folder.glob("*.error")]
    finally:
        for member in members:
            member.kill()
    results = [torch.load(file) for file in files]
    return {name: [result[name] for result in results] for name in jobs}


def _member(rank: int, size: int, meeting: Path, file: Path, jobs: Mapping[str, Job]) -> None:
    torch.set_num_threads(1)
    try:
        group = Collective(Rendezvous(rank, size, LOOPBACK, LIMIT_S), dist.FileStore(str(meeting), size), nccl=False)
        members = Members(rank, size)
        torch.save({name: job(members, *arguments) for name, (job, arguments) in jobs.items()}, file)
        group.close()
    except BaseException:
        file.with_suffix(".error").write_text(traceback.format_exc())
        raise
