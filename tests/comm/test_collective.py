from __future__ import annotations

import os

import psutil
import pytest
import torch.distributed as dist

from distflow.comm.collective import INTERFACE, LOOPBACK, Collective, Rendezvous
from distflow.errors import ReplicaLost


def test_who_is_alone_at_the_meeting_point_has_lost_the_others() -> None:
    with pytest.raises(ReplicaLost, match="the group of 2 training replicas cannot be created from 127.0.0.1"):
        Collective(Rendezvous(0, 2, LOOPBACK, 1.0), dist.HashStore(), nccl=False)


def test_a_group_listens_on_its_own_address_alone() -> None:
    before = set(listening())
    group = Collective(Rendezvous(0, 1, LOOPBACK, 20.0), dist.HashStore(), nccl=False)
    try:
        found = set(listening()) - before
        assert {address for address, _ in found} == {LOOPBACK}
        assert os.environ[INTERFACE] == "lo"
    finally:
        group.close()


def listening() -> list[tuple[str, int]]:
    connections = psutil.Process().net_connections("tcp")
    return [(c.laddr.ip, c.laddr.port) for c in connections if c.status == psutil.CONN_LISTEN]
