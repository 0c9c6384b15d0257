from __future__ import annotations

import socket

import pytest

from distflow.comm.collective import LOOPBACK, Collective, Rendezvous, open_store
from distflow.errors import ReplicaLost


def test_who_does_not_find_the_others_has_lost_them() -> None:
    with socket.socket() as deaf:
        deaf.bind((LOOPBACK, 0))
        nowhere = deaf.getsockname()
        with pytest.raises(ReplicaLost, match="the group of 2 training replicas cannot be made from 127.0.0.1"):
            Collective(Rendezvous(1, 2, LOOPBACK, 1.0), nowhere, nccl=False)


def test_who_is_alone_at_the_meeting_point_has_lost_the_others() -> None:
    meeting = Rendezvous(0, 2, LOOPBACK, 1.0)
    with pytest.raises(ReplicaLost, match="the group of 2 training replicas cannot be made"):
        Collective(meeting, open_store(meeting), nccl=False)
