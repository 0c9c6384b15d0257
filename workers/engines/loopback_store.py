"""The store of addresses that an engine's library opens for its own process group, on loopback alone.

torch's TCPStore listens on all interfaces, without a key: whoever reached its port could set keys there. An engine's
processes are all on one host.
"""

from __future__ import annotations

import socket
from datetime import timedelta
from importlib import import_module
from typing import Any

from torch._C._distributed_c10d import TCPStore

from distflow.comm.collective import LOOPBACK


def loopback_store(members: int, limit: timedelta) -> TCPStore:
    """One that listens, on a port that the system chooses."""
    listener = socket.create_server((LOOPBACK, 0))
    port = int(listener.getsockname()[1])
    return TCPStore(LOOPBACK, port, members, True, limit, wait_for_workers=False, master_listen_fd=listener.detach())


def stay_on_loopback() -> None:
    """In this process, `init_process_group("tcp://…")` of any library listens on the address that it names alone."""
    # The package has a function of that name, too.
    vars(import_module("torch.distributed.rendezvous"))["TCPStore"] = _bound


def _bound(host_name: str, port: int, **given: Any) -> TCPStore:
    if given["is_master"]:
        family = socket.AF_INET6 if ":" in host_name else socket.AF_INET
        given["master_listen_fd"] = socket.create_server((host_name, port), family=family).detach()
    return TCPStore(host_name, port, **given)
