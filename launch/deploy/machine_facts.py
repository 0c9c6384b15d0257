"""Whether this machine has what a plan asks of it: memory, GPUs, libraries of engines and backends. Without torch.

Memory is asked of the system and of the driver, in milliseconds.
"""

from __future__ import annotations

import ctypes
import importlib.util
import os
import shlex
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import psutil

from distflow.config.plugins import LIBRARIES
from distflow.errors import Problem
from distflow.flow.memory_fit import Capacity
from distflow.flow.plan import Plan, WorkerPlan

VISIBLE = "CUDA_VISIBLE_DEVICES"
_NVML = "libnvidia-ml.so.1"
_CGROUP_LIMIT = Path("/sys/fs/cgroup/memory.max")


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
    from distflow.launch.deploy.machine_facts import capacity  # it loads what most plans need not wait for

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


class _Memory(ctypes.Structure):
    """nvmlMemory_t, in bytes."""

    _fields_ = [("total", ctypes.c_ulonglong), ("free", ctypes.c_ulonglong), ("used", ctypes.c_ulonglong)]


def capacity() -> Capacity:
    """Of this host."""
    return Capacity(_host_bytes(), _gpu_bytes())


def _host_bytes() -> int:
    """Of the machine, or of the container if that is less."""
    total = int(psutil.virtual_memory().total)
    try:
        limit = _CGROUP_LIMIT.read_text(encoding="ascii").strip()
    except OSError:
        return total
    return min(total, int(limit)) if limit.isdigit() else total


def _gpu_bytes() -> tuple[int, ...]:
    """Of each GPU, by the driver's library (NVML); none without one."""
    try:
        nvml = ctypes.CDLL(_NVML)
    except OSError:
        return ()
    if nvml.nvmlInit_v2():
        return ()
    try:
        count = ctypes.c_uint()
        found = [] if nvml.nvmlDeviceGetCount_v2(ctypes.byref(count)) else range(count.value)
        return tuple(size for number in found if (size := _total(nvml, number)))
    finally:
        nvml.nvmlShutdown()


def _total(nvml: ctypes.CDLL, number: int) -> int:
    """0 where the driver does not say."""
    device, memory = ctypes.c_void_p(), _Memory()
    if nvml.nvmlDeviceGetHandleByIndex_v2(ctypes.c_uint(number), ctypes.byref(device)):
        return 0
    return 0 if nvml.nvmlDeviceGetMemoryInfo(device, ctypes.byref(memory)) else int(memory.total)
