"""Which GPUs the workers of one host get: one after another, each as many as its engine shares the model between."""

from __future__ import annotations

from collections.abc import Sequence

from distflow.config.plugins import OPTIONS
from distflow.errors import UserError
from distflow.flow.plan import WorkerPlan
from distflow.flow.resolve import resolve


def width(worker: WorkerPlan) -> int:
    """GPUs of one worker. Of engines that are not ours only they know: 1."""
    if worker.engine is None or worker.engine not in OPTIONS:
        return 1
    return int(resolve(OPTIONS[worker.engine]).parse(worker.engine_options).gpus)


def first_gpu(workers: Sequence[WorkerPlan], worker: WorkerPlan, gpus: int) -> int:
    """The first GPU of one of the `workers` of a host with so many; it begins anew when all are taken.

    Those with a device of their own choice (cpu, cuda:N) are passed over. Raises UserError if the worker needs more
    GPUs than there are.
    """
    if width(worker) > gpus:
        raise UserError(
            f"{worker.name} shares its model between {width(worker)} GPUs (layout.pools.{worker.name.pool}."
            f"engine_options), and there are {gpus} — lower that, or take a host that has them"
        )
    known = any(one.name == worker.name for one in workers)
    return first_gpus(workers if known else [*workers, worker], gpus)[str(worker.name)]


def first_gpus(workers: Sequence[WorkerPlan], gpus: int) -> dict[str, int]:
    """The first GPU of each worker, by name, as `first_gpu` has it; of one that needs too many, 0."""
    firsts: dict[str, int] = {}
    following = 0
    for worker in workers:
        taken = width(worker)
        first = firsts[str(worker.name)] = following if following + taken <= gpus else 0
        if worker.device in ("auto", "cuda"):
            following = first + taken
    return firsts
