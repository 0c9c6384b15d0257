"""Whether this machine has what a plan asks of it: libraries of engines and backends, and GPUs. Without torch."""

from __future__ import annotations

import importlib.util
import os
import shlex
import sys
from collections.abc import Callable, Iterator, Mapping

from distflow.config.plugins import LIBRARIES
from distflow.errors import Problem
from distflow.flow.plan import Plan, WorkerPlan

VISIBLE = "CUDA_VISIBLE_DEVICES"


def machine_problems(plan: Plan, where: Callable[[str], str]) -> list[Problem]:
    """What is not here of what the workers need, if they all run on this machine.

    Pools with a Python of their own are asked for their libraries by `interpreter_check.problems_here`.
    """
    return list(dict.fromkeys([*_missing_libraries(plan, where), *_missing_gpus(plan, where)]))


def visible_gpus(found: int, environment: Mapping[str, str]) -> int:
    """How many of the GPUs that the driver shows this process may use."""
    if VISIBLE not in environment:
        return found
    named = [part for part in environment[VISIBLE].split(",") if part.strip() and part.strip() != "-1"]
    return min(found, len(named))


def _missing_libraries(plan: Plan, where: Callable[[str], str]) -> Iterator[Problem]:
    for worker in plan.workers:
        for kind, name in (("engine", worker.engine), ("backend", worker.backend)):
            if worker.python is not None or name is None or name not in LIBRARIES:
                continue
            module, cure = LIBRARIES[name]
            if importlib.util.find_spec(module) is None:
                key = _key(plan, worker, kind)
                message = f"it needs the package {module!r}, which is not installed for {sys.executable}"
                install = cure.format(python=shlex.quote(sys.executable))
                pool = f"layout.pools.{worker.name.pool}.python"
                yield Problem(where(key), key, message, f"{install}; or name a Python that has it: {pool}=PATH")


def _missing_gpus(plan: Plan, where: Callable[[str], str]) -> Iterator[Problem]:
    wanted = [worker for worker in plan.workers if worker.device.startswith("cuda")]
    if not wanted:
        return
    from distflow.launch.deploy.capacity import capacity  # it loads what most plans need not wait for

    there = visible_gpus(len(capacity().gpus), os.environ)
    for worker in wanted:
        if int(worker.device.partition(":")[2] or 0) >= there:
            key = _key(plan, worker, "device")
            seen = f"{there} GPU{'' if there == 1 else 's'}"
            yield Problem(where(key), key, f"{worker.device}, and this machine has {seen} to use", "auto or cpu")


def _key(plan: Plan, worker: WorkerPlan, setting: str) -> str:
    """Where the setting of a worker stands: with its pool, or with itself."""
    pool, index = f"layout.pools.{worker.name.pool}", str(worker.name.index)
    each = plan.recipe.layout.pools[worker.name.pool].each
    own = index in each and each[index].model_dump().get(setting) is not None
    return f"{pool}.each.{index}.{setting}" if own else f"{pool}.{setting}"
