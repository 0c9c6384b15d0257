"""Page-locked memory: a GPU copies from and to it by itself, over four times as fast as with other memory.

Locking takes a sixth of a second for 3 GiB that are there already, once, and no memory (`benchmarks/RESULTS.md`). It is
a help, never a need: where the driver refuses it, copies are as slow as they were.
"""

from __future__ import annotations

import mmap
import weakref

import torch

from distflow.log import logger

_PORTABLE, _READ_ONLY = 1, 8
"""Flags of `cudaHostRegister` (CUDA runtime API, memory management): for every GPU; memory mapped to be read."""
log = logger(__name__)


class PageLock:
    """Keeps mapped memory locked, and mapped, until it is let go of.

    `device`: a GPU that this process uses anyway: the driver is asked in its name.
    """

    def __init__(self, memory: mmap.mmap, device: torch.device, *, writable: bool) -> None:
        # Its view keeps the memory mapped while the driver holds the pages.
        self._view = torch.frombuffer(memory, dtype=torch.uint8)
        address = self._view.data_ptr()
        flags = _PORTABLE if writable else _PORTABLE | _READ_ONLY
        with torch.cuda.device(device):
            refused = int(_driver().cudaHostRegister(address, len(memory), flags))
            if refused:
                _clear_error(device)
        self.held = not refused
        if refused:
            log.warning(
                "the driver does not lock %.1f MB of shared memory for %s (error %d): copies of weights are slower",
                len(memory) / 1e6,
                device,
                refused,
            )
            return
        letting_go = weakref.finalize(self, _unlock, address)
        # The end of the process unlocks all, and CUDA may have gone by then.
        letting_go.atexit = False


def _driver() -> torch._C._cudart:  # type: ignore[name-defined]
    return torch.cuda.cudart()  # type: ignore[no-untyped-call]


def _unlock(address: int) -> None:
    _driver().cudaHostUnregister(address)


def _clear_error(device: torch.device) -> None:
    """PyTorch would raise at its next kernel what the driver said to somebody else; it forgets it then."""
    try:
        torch.zeros(1, device=device)
    except RuntimeError as error:
        log.debug("%s: %s", device, error)
