"""The most memory that this process has held, for the metrics of each training step."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

HOST = "memory/host_peak_gb/max"
"""Peak of the process's resident memory, shared pages included, in GiB; of an engine in a process of its own, nothing.
Since the line before; where the kernel cannot forget a peak, since the process began."""
DEVICE = "memory/device_peak_gb/max"
"""Peak of what PyTorch had allocated on the worker's GPU since the line before, in GiB; only with a GPU."""
RESERVED = "memory/device_reserved_gb/max"
"""Peak of what it had taken from the GPU for that."""
GIB = 1 << 30
_FORGET_PEAK = "5"
"""Written to /proc/<pid>/clear_refs (proc_pid_clear_refs(5))."""


class PeakMemory:
    """Of this process and its `device`, between one `take` and the next."""

    def __init__(self, device: str, proc: Path = Path("/proc/self")) -> None:
        self._cuda = torch.device(device) if device.startswith("cuda") else None
        self._proc = proc

    def take(self) -> dict[str, float]:
        """The metrics; the peaks begin anew."""
        out = {HOST: self._resident() / GIB}
        # An engine in a process of its own has the GPU, and this process may never touch it.
        cuda: Any = torch.cuda
        if self._cuda is not None and cuda.is_initialized():
            out[DEVICE] = torch.cuda.max_memory_allocated(self._cuda) / GIB
            out[RESERVED] = torch.cuda.max_memory_reserved(self._cuda) / GIB
            torch.cuda.reset_peak_memory_stats(self._cuda)
        return {name: round(value, 4) for name, value in out.items()}

    def _resident(self) -> int:
        """Bytes."""
        peak = _peak_bytes((self._proc / "status").read_text(encoding="utf-8"))
        try:
            (self._proc / "clear_refs").write_text(_FORGET_PEAK)
        except OSError:
            return peak  # the next one holds this one, too
        return peak


def _peak_bytes(status: str) -> int:
    """VmHWM of /proc/<pid>/status, which is in KiB."""
    (line,) = (line for line in status.splitlines() if line.startswith("VmHWM:"))
    return int(line.split()[1]) * 1024
