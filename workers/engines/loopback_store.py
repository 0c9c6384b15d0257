"""Keeps the TCPStore of an engine's own process group on loopback.

torch's TCPStore listens on all interfaces without authentication: anyone who reaches its port could set keys there. All
processes of an engine are on one host.
"""

from __future__ import annotations

import socket
from datetime import timedelta
from importlib import import_module
from typing import Any

from torch._C._distributed_c10d import TCPStore

from distflow.comm.collective import LOOPBACK


def loopback_store(members: int, limit: timedelta) -> TCPStore:
    """A listening store for `members` processes, on a port that the system chooses."""
    listener = socket.create_server((LOOPBACK, 0))
    port = int(listener.getsockname()[1])
    return TCPStore(LOOPBACK, port, members, True, limit, wait_for_workers=False, master_listen_fd=listener.detach())


def stay_on_loopback() -> None:
    """Make `init_process_group("tcp://…")` of any library in this process listen on the named address only."""
    # Not `torch.distributed.rendezvous`, which is also a function's name in the package.
    vars(import_module("torch.distributed.rendezvous"))["TCPStore"] = _bound


def _bound(host_name: str, port: int, **given: Any) -> TCPStore:
    if given["is_master"]:
        family = socket.AF_INET6 if ":" in host_name else socket.AF_INET
        given["master_listen_fd"] = socket.create_server((host_name, port), family=family).detach()
    return TCPStore(host_name, port, **given)
