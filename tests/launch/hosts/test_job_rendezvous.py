"""The rendezvous as a state machine: nodes come in any order, again and again, or not at all."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from distflow.launch.deploy.job_rendezvous import Hello, JobRendezvous, RendezvousFailed


def hello(rank, life="a", nodes=3):
    return Hello(rank, nodes, life, f"host-{rank}", f"10.0.0.{rank}", "/python", None)


def rendezvous(nodes=3, deadline=10.0):
    return JobRendezvous(nodes, deadline, lambda rank: f"node {rank} (gpu-{rank})")


@given(st.integers(1, 9), st.randoms(use_true_random=False), st.integers(1, 4))
def test_it_is_complete_when_all_have_come_in_whatever_order_and_number(nodes, order, times):
    meeting = rendezvous(nodes)
    coming = [hello(rank, nodes=nodes) for rank in range(nodes)] * times
    order.shuffle(coming)
    seen = set()
    for one in coming:
        assert meeting.complete == (len(seen) == nodes)
        assert meeting.heard(one) is None
        seen.add(one.rank)
    assert meeting.complete
    meeting.tick(1e9, "here", 0)


def test_who_is_missing_is_named_at_the_deadline_and_not_before():
    meeting = rendezvous()
    meeting.heard(hello(1))
    meeting.tick(9.9, "tcp://10.0.0.0:29400", 0)
    with pytest.raises(
        RendezvousFailed, match=r"2 of 3 nodes did not join at tcp://10.0.0.0:29400: node 0 \(gpu-0\), n"
    ):
        meeting.tick(10.0, "tcp://10.0.0.0:29400", 0)
    with pytest.raises(RendezvousFailed, match="4 connection.s. with another DISTFLOW_RUN_KEY were refused"):
        meeting.tick(10.0, "tcp://10.0.0.0:29400", 4)


def test_a_node_that_was_restarted_replaces_itself_until_all_are_there():
    meeting = rendezvous(2)
    assert meeting.heard(hello(1, "first", 2)) is None
    assert meeting.heard(hello(1, "second", 2)) is None
    assert meeting.heard(hello(0, nodes=2)) is None
    assert meeting.hellos[1].life == "second"
    assert "node 1 (gpu-1) has joined already, on host-1" in meeting.heard(hello(1, "third", 2))
    assert meeting.heard(hello(1, "second", 2)) is None


@pytest.mark.parametrize("one, message", [(hello(1, nodes=4), "it expects 4 nodes"), (hello(7), "there is no node 7")])
def test_nodes_of_another_job_are_refused(one, message):
    meeting = rendezvous()
    assert message in meeting.heard(one)
    assert meeting.hellos == {}
