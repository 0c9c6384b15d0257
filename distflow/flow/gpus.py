"""Which GPUs the workers of one host get: one after another, each as many as its engine shards the model over."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from distflow.config.plugins import ENGINES, OPTIONS, full_name
from distflow.config.schema import PoolConfig, Recipe
from distflow.errors import Problems, UserError
from distflow.flow.plan import WorkerPlan
from distflow.flow.resolve import resolve
from distflow.flow.structure import Structure


def width(worker: WorkerPlan) -> int:
    """How many GPUs one worker takes; 1 for engines of users, which distflow knows nothing about; 0 without a model."""
    if worker.engine is None:
        return 1 if worker.models else 0
    return _width(worker.engine, worker.engine_options)


def _width(engine: str, options: Mapping[str, Any]) -> int:
    return int(resolve(OPTIONS[engine]).parse(options).gpus) if engine in OPTIONS else 1


def gpus_on(worker: WorkerPlan, device: str) -> tuple[int, ...]:
    """The numbers of the GPUs that a worker uses if its device is cuda:N; none on another one, or without a model."""
    number = device.partition(":")[2]
    return tuple(range(int(number), int(number) + width(worker))) if number else ()


def device_of_slot(worker: WorkerPlan, slot: int, gpus: int) -> str:
    """The device of a worker in a slot of a host with `gpus` GPUs: `cuda` and `auto` become the GPU of its slot."""
    if worker.device == "cuda" or (worker.device == "auto" and gpus):
        return f"cuda:{slot % gpus}" if gpus else f"cuda:{slot}"
    return worker.device


def shown_gpus(worker: WorkerPlan, first: int) -> str:
    """Name the GPUs of a worker, for messages; empty if it uses none, or its recipe names them."""
    if worker.device not in ("auto", "cuda") or not width(worker):
        return ""
    last = first + width(worker) - 1
    return f"GPU {first}" if last == first else f"GPUs {first}-{last}"


def takes_free_gpu(worker: WorkerPlan, gpus: int) -> bool:
    """Whether a worker that joins a run gets a free GPU of a host with so many: it names none, and has a model."""
    return worker.device in ("auto", "cuda") and bool(gpus) and bool(width(worker))


def free_gpu(users: Mapping[int, int], gpus: int, count: int) -> int | None:
    """The first of `count` consecutive GPUs of a host that no worker uses; None if there are none.

    `users`: how many workers use each. Where workers share a GPU already, another may share those with the fewest.
    """
    load = {first: max(users.get(n, 0) for n in range(first, first + count)) for first in range(gpus - count + 1)}
    first = min(load, key=lambda at: (load[at], at), default=None)
    shares = max(users.values(), default=0) > 1
    return first if first is not None and (shares or not load[first]) else None


def check_shared_gpus(recipe: Recipe, structure: Structure, problems: Problems) -> None:
    """Refuse engines on several GPUs on workers that also train: each has one GPU, the next belongs to another."""
    for planned in structure.pools:
        if planned.takes_turns:
            _check_widths(planned.name, recipe.layout.pools[planned.name], problems)


def _check_widths(name: str, pool: PoolConfig, problems: Problems) -> None:
    reported: set[str] = set()
    for number in range(pool.count):
        own = pool.settings_of(number)
        wide = _width(full_name(own.engine or pool.engine, ENGINES), pool.engine_options_of(own))
        place = f"layout.pools.{name}" if own.engine_options is None else f"layout.pools.{name}.each.{number}"
        if wide > 1 and (own.device or pool.device) != "cpu" and place not in reported:
            reported.add(place)
            message = (
                f"the engine of {name}/{number} shards its model over {wide} GPUs, but a worker that also trains has "
                "one, and the next ones belong to other workers; this is not built yet"
            )
            problems.add(f"{place}.engine_options", message, "1 GPU an engine, or separate pools (layout=split)")


def first_gpu(workers: Sequence[WorkerPlan], worker: WorkerPlan, gpus: int) -> int:
    """The first GPU of one of the `workers` of a host with so many GPUs; it starts over when all are taken.

    Workers that name a device (cpu, cuda:N) are skipped. Raises UserError if the worker needs more GPUs than there are.
    """
    check_width(worker, gpus)
    known = any(one.name == worker.name for one in workers)
    return first_gpus(workers if known else [*workers, worker], gpus)[str(worker.name)]


def check_width(worker: WorkerPlan, gpus: int) -> None:
    """Raise UserError if a worker needs more GPUs than its host has."""
    if width(worker) > gpus:
        raise UserError(
            f"{worker.name} shards its model over {width(worker)} GPUs (layout.pools.{worker.name.pool}."
            f"engine_options), but there are {gpus} — use fewer, or a host with more"
        )


def first_gpus(workers: Sequence[WorkerPlan], gpus: int) -> dict[str, int]:
    """The first GPU of each worker by name, as for `first_gpu`; 0 for a worker that needs too many."""
    firsts: dict[str, int] = {}
    following = 0
    for worker in workers:
        taken = width(worker)
        first = firsts[str(worker.name)] = following if following + taken <= gpus else 0
        if worker.device in ("auto", "cuda"):
            following = first + taken
    return firsts
