"""The memory of this host and of its GPUs, for the plan: asked of the system and the driver, in milliseconds."""

from __future__ import annotations

import ctypes
from pathlib import Path

import psutil

from distflow.flow.fitting import Capacity

_NVML = "libnvidia-ml.so.1"
_CGROUP_LIMIT = Path("/sys/fs/cgroup/memory.max")


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
