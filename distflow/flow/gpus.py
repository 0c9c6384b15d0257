"""Which GPUs the workers of one host get: one after another, each as many as its engine shares the model between."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from distflow.config.check import Where
from distflow.config.plugins import ENGINES, OPTIONS, full_name
from distflow.config.schema import Recipe, WorkerSettings
from distflow.errors import Problem, UserError
from distflow.flow.plan import WorkerPlan
from distflow.flow.resolve import resolve
from distflow.flow.structure import Structure


def width(worker: WorkerPlan) -> int:
    """GPUs of one worker. Of engines that are not ours only they know: 1."""
    return 1 if worker.engine is None else _width(worker.engine, worker.engine_options)


def _width(engine: str, options: Mapping[str, Any]) -> int:
    return int(resolve(OPTIONS[engine]).parse(options).gpus) if engine in OPTIONS else 1


def shared_gpu_problems(recipe: Recipe, structure: Structure, where: Where) -> list[Problem]:
    """Workers that train too, each on a GPU of its own, beside engines that take GPUs of their neighbours."""
    placement = structure.placement
    name, pool = placement.generating, recipe.layout.pools[placement.generating]
    if name != placement.training:
        return []
    problems = []
    for number in range(pool.count):
        own = pool.each[str(number)] if str(number) in pool.each else WorkerSettings()
        options = own.engine_options
        if options is None:
            options = {} if own.engine is not None else pool.engine_options
        wide = _width(full_name(own.engine or pool.engine, ENGINES), options)
        if wide > 1 and (own.device or pool.device) != "cpu":
            place = f"layout.pools.{name}"
            key = f"{place}.engine_options" if own.engine_options is None else f"{place}.each.{number}.engine_options"
            message = (
                f"the engine of {name}/{number} shares its model between {wide} GPUs, but a worker that also trains "
                "has one, and the others belong to its neighbours; this is not built yet"
            )
            problems.append(Problem(where(key), key, message, "1 GPU an engine, or pools of their own (layout=split)"))
    # Of the first worker that has these options.
    return list({problem.key: problem for problem in reversed(problems)}.values())


def first_gpu(workers: Sequence[WorkerPlan], worker: WorkerPlan, gpus: int) -> int:
    """The first GPU of one of the `workers` of a host with so many; it starts over when all are taken.

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
