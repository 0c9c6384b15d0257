"""Meshes in which agents talk to few others: who is silent, what is known where, and who may go on."""

from __future__ import annotations

import cProfile
import random
import threading
import time
import tracemalloc
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgpack
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from distflow.cluster.gossip import FEW, Gossip, in_order
from distflow.cluster.host_report import HostReport
from distflow.cluster.processes import HostEntry, agent_name
from distflow.comm import roll_call
from distflow.comm.endpoint import Endpoint
from distflow.comm.message import Body, Buffer
from distflow.comm.outbox import Delivery, delivered
from distflow.comm.probes import PARTNERS, Probes
from distflow.comm.pulses import Pulses
from distflow.comm.roll_call import PROVES_AFTER, RollCall, bits, pack, roll_from
from distflow.errors import ProtocolError
from distflow.launch.agent.peer_agents import IDLE_S, KEPT_LINKS, PeerAgents
from distflow.launch.run.record import RunRecord
from tests.budget import within
from tests.launch.real_meshes import LiveMesh
from tests.search import agent_mesh as meshes
from tests.search.agent_mesh import HOSTS, KNOWN_S, SETTLED_S, SILENCE_S, Mesh, check_events, near, split


def settled(hosts: int = HOSTS, seed: int = 0, **network: float) -> Mesh:
    """A mesh in which all know all."""
    mesh = Mesh(hosts, seed, **network)
    mesh.run_for(6.0)
    assert len(mesh.serials()) == 1
    return mesh


EVENTS = st.lists(
    st.tuples(
        st.sampled_from(meshes.EVENTS),
        st.integers(0, 63),
        st.integers(0, 6),
    ),
    max_size=8,
)


@settings(max_examples=5)
@given(st.integers(0, 10_000), st.sampled_from([0.0, 0.1]), EVENTS)
@within(30, examples=5)
def test_whatever_happened_in_the_end_all_have_the_same_and_only_the_dead_are_silent(
    seed: int, loss: float, events: list[tuple[str, int, int]]
) -> None:
    check_events(seed, loss, events)


@pytest.mark.parametrize("loss", [0.0, 0.1])
def test_all_that_live_know_of_a_death_and_of_a_silence_within_seconds(loss: float) -> None:
    mesh = settled(32, loss=loss, doubling=loss, late_s=0.1)
    del mesh.agents[30]
    mesh.publish(7, reason="a worker was killed")
    mesh.run_for(KNOWN_S)
    for agent in mesh.agents.values():
        assert agent.report(7).reason == "a worker was killed"
        assert 0.0 < agent.unheard_s(30) < KNOWN_S
    mesh.run_for(SILENCE_S)
    assert all(agent.silent() == {30} for agent in mesh.agents.values())


def test_nobody_who_is_heard_is_called_silent_whatever_is_lost() -> None:
    mesh = settled(seed=1, loss=0.15, late_s=0.3)
    mesh.cut = {(one, one + 1) for one in range(0, HOSTS, 2)} | {(one + 2, one) for one in range(0, HOSTS, 4)}
    for _ in range(12):
        mesh.run_for(1.0)
        for agent in mesh.agents.values():
            assert agent.silent(KNOWN_S) == frozenset()
            assert near(agent, mesh.now) == set(mesh.agents)


@pytest.mark.parametrize("part", [1, 8])
def test_a_minority_finds_itself_cut_off_before_it_counts_as_gone(part: int) -> None:
    """As `term_vote` needs it: at `silence_s` by the one side, and not before `silence_s` and a margin by the other."""
    mesh = settled()
    cut_at, few = mesh.now, set(range(part))
    split(mesh, few)
    noticed: dict[int, float] = {}
    while mesh.now < cut_at + 1.5 * SILENCE_S:
        mesh.run_for(0.5)
        for host in sorted(few - noticed.keys()):
            if 2 * len(near(mesh.agents[host], mesh.now)) <= HOSTS:
                noticed[host] = mesh.now - cut_at
        for host in range(part, HOSTS):
            assert all(mesh.agents[host].unheard_s(one) <= mesh.now - cut_at + 0.5 for one in few)
            assert 2 * len(near(mesh.agents[host], mesh.now)) > HOSTS
    assert noticed.keys() == few
    assert max(noticed.values()) <= SILENCE_S + 1.0
    assert {host for host, agent in mesh.agents.items() if agent.is_outnumbered()} == few
    assert all(mesh.agents[host].silent() == few for host in range(part, HOSTS))
    mesh.group = dict.fromkeys(mesh.group, 0)
    mesh.run_for(SETTLED_S)
    for agent in mesh.agents.values():
        assert agent.silent(KNOWN_S) == frozenset()
        assert near(agent, mesh.now) == set(mesh.agents)


def test_of_two_halves_neither_is_outnumbered_and_both_are_cut_off() -> None:
    mesh = settled()
    split(mesh, set(range(HOSTS // 2)))
    mesh.run_for(2 * SILENCE_S)
    for agent in mesh.agents.values():
        assert not agent.is_outnumbered()
        assert 2 * len(near(agent, mesh.now)) <= HOSTS


def test_an_agent_that_slept_doubts_nobody_for_it() -> None:
    mesh = settled()
    mesh.asleep.add(3)
    mesh.run_for(2 * SILENCE_S)
    assert all(agent.silent() == {3} for host, agent in mesh.agents.items() if host != 3)
    mesh.wake(3)
    assert mesh.agents[3].silent(KNOWN_S) == frozenset()
    mesh.run_for(SETTLED_S)
    assert all(agent.silent(KNOWN_S) == frozenset() for agent in mesh.agents.values())


def test_a_host_that_joins_has_all_reports_and_all_have_its_own() -> None:
    mesh = settled(30)
    mesh.join(30, knows=[0, 1, 30])
    mesh.run_for(SETTLED_S)
    assert len(mesh.serials()) == 1
    assert mesh.agents[30].others == list(range(30))
    assert all(agent.others == sorted({*range(31)} - {host}) for host, agent in mesh.agents.items())


def test_a_mesh_that_outgrows_the_few_goes_on() -> None:
    mesh = settled(FEW)
    del mesh.agents[2]
    mesh.run_for(KNOWN_S)
    for host in range(FEW, FEW + 6):
        mesh.join(host, knows=range(FEW))
        mesh.run_for(0.5)
    mesh.run_for(SILENCE_S)
    assert len(mesh.serials()) == 1
    assert not any(agent.few for agent in mesh.agents.values())
    assert all(agent.silent() == {2} for agent in mesh.agents.values())


def test_whoever_exits_knows_that_all_have_heard_how() -> None:
    mesh = settled()
    for host in mesh.agents:
        mesh.publish(host, clean=True)
    assert not any(mesh.agents[0].seen_by(host) for host in range(1, HOSTS))
    mesh.run_for(SETTLED_S)
    # One after another leaves, and what the others know of those that are left stays known.
    for host in range(HOSTS - 1, 0, -1):
        agent = mesh.agents[host]
        assert all(agent.seen_by(other) for other in mesh.agents if other != host)
        mesh.publish(host, gone=True)
        del mesh.agents[host]
        mesh.run_for(0.2)
    assert all(mesh.agents[0].report(host).gone for host in range(1, HOSTS))


def test_an_agent_takes_no_confirmation_of_the_one_before_it_for_its_own() -> None:
    mesh = settled()
    mesh.restart(5)
    mesh.cut = {(5, other) for other in range(HOSTS)}
    for _ in range(8):
        mesh.run_for(0.5)
        # It hears others, who have heard the agent before it; nobody hears this one.
        agent = mesh.agents[5]
        assert all(agent.unseen_s(other, mesh.now) >= agent._pulses.clock for other in agent.others)


def test_beats_that_were_under_way_for_long_prove_nothing_of_an_agent_that_began_meanwhile(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    mesh, late = settled(), list[bytes]()
    mesh.run_for(10 * RollCall.length_s(HOSTS))
    arrive = Mesh._arrive

    def arrives(mesh: Mesh, host: int, body: bytes, *spoken: object) -> None:
        if host == 5:
            late.append(body)
        arrive(mesh, host, body, *spoken)

    monkeypatch.setattr(Mesh, "_arrive", arrives)
    mesh.run_for(6.0)
    monkeypatch.undo()
    mesh.cut = {pair for other in range(HOSTS) for pair in ((5, other), (other, 5))}
    mesh.run_for(3.0)
    mesh.restart(5)
    # By itself it calls one roll after the other, the first of which the agent before it may have entered elsewhere.
    mesh.run_for((PROVES_AFTER + 2) * RollCall.length_s(HOSTS))
    agent = mesh.agents[5]
    for body in late:
        agent.hear(msgpack.unpackb(body), mesh.now)
    assert near(agent, mesh.now) == {5}
    mesh.cut = set()
    mesh.run_for(2 * SETTLED_S)
    assert near(agent, mesh.now) == set(range(HOSTS))


def test_each_agent_talks_to_few_and_to_all_in_turn() -> None:
    mesh = settled()
    agent, asked = mesh.agents[0], set()
    for _ in range(2 * HOSTS):
        mesh.run_for(1.05)
        partners = set(agent._partners._probes.partners)
        assert len(partners) == PARTNERS
        asked |= partners
    assert asked == set(range(1, HOSTS))
    before = mesh.messages
    mesh.run_for(10.5)
    assert mesh.messages - before < HOSTS * 10 * (2 * PARTNERS + 2)


def calls(work: Callable[[], object]) -> int:
    """How many functions it calls: its cost, whatever else the machine does."""
    profile = cProfile.Profile()
    profile.runcall(work)
    return sum(entry.callcount for entry in profile.getstats())


def test_what_an_agent_does_and_sends_hardly_grows_with_the_number_of_hosts() -> None:
    messages, sent, called = list[float](), list[float](), list[float]()
    for hosts in (32, 256):
        mesh = Mesh(hosts)
        mesh.everybody_knows_everything()
        mesh.run_for(1.5 * RollCall.length_s(hosts))
        mesh.messages = mesh.bytes = 0
        seconds = RollCall.length_s(hosts)
        called.append(calls(lambda mesh=mesh, seconds=seconds: mesh.run_for(seconds)) / hosts / seconds)
        messages.append(mesh.messages / hosts / seconds)
        sent.append(mesh.bytes / hosts / seconds)
    assert messages[1] < 1.05 * messages[0]
    assert called[1] < 1.05 * called[0]
    # A bit a host in the lists of the roll, while they fill.
    assert sent[1] < 1.5 * sent[0]


def three_rolls(hosts: int) -> None:
    """One agent's part in them, and all others hear it."""
    roll, every, length_s = RollCall(0), (1 << hosts) - 1, RollCall.length_s(hosts)
    for number in range(1, 4):
        roll.call(number * length_s, hosts)
        roll.hear(roll_call.Roll(number, every, every ^ 1, every, 7), number * length_s, hosts)
        roll.agree(every, 7, 1)
        assert roll.seen_at(hosts - 1) == number * length_s


def first_partners(hosts: int) -> None:
    probes = Probes(in_order)
    probes.replace_one(range(1, hosts), 0)
    assert len(probes.partners) == PARTNERS


@pytest.mark.parametrize("begin", [three_rolls, first_partners])
def test_beginning_a_roll_or_a_round_is_no_work_for_each_host(begin: Callable[[int], None]) -> None:
    assert calls(lambda: begin(64)) == calls(lambda: begin(4096))


def test_what_an_agent_remembers_of_the_pulses_of_a_host_is_a_few_bytes() -> None:
    hosts = list(range(4096))
    tracemalloc.start()
    try:
        pulses = Pulses(0, hosts[1:])
        pulses.count()
        for host in pulses.others:
            pulses.learn(host, 1_000_000 + host)
            pulses.confirm(host, pulses.own)
        taken, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert taken < 64 * len(hosts)


def test_every_host_has_its_turn_once_in_a_round_in_random_order() -> None:
    probes, others = Probes(random.Random(0).randrange), range(1, 101)
    seen = list[int]()
    probes.replace_one(others, 0)
    seen += probes.partners
    while len(seen) < 100:
        probes.replace_one(others, 0)
        seen.append(probes.partners[-1])
    assert sorted(seen) == list(others)
    assert seen != sorted(seen)


def test_when_a_host_last_heard_us_is_known_of_each_roll() -> None:
    roll = RollCall(0)
    for number, agreed in ((1, 0b1110), (2, 0b0110), (3, 0b0010)):
        roll.call(10.0 * number, 4)
        roll.hear(roll_call.Roll(number, 0b1111, agreed, 0b1111, 7), 10.0 * number, 4)
    assert [roll.seen_at(host) for host in (1, 2, 3)] == [30.0, 20.0, 10.0]
    roll.call(40.0, 4)
    assert [roll.seen_at(host) for host in (1, 2, 3)] == [30.0, 20.0, 10.0]
    assert len(roll._seen) == 3


def test_who_is_in_the_intersection_was_heard_by_all_that_agreed() -> None:
    zero, one, two = RollCall(0), RollCall(1), RollCall(2)
    for roll in (zero, one, two):
        roll.call(1.0, 3)
    one.hear(told(zero), 1.0, 3)
    one.agree(0b011, 77, 4)
    zero.hear(told(one), 1.5, 3)
    assert (zero.seen_at(1), zero.seen_at(2)) == (1.0, 0.0)
    # Host 2 agrees without having heard host 0: from then on nothing is proven for 0 in this roll.
    two.hear(told(RollCall(2)), 2.0, 3)
    two.agree(0b100, 77, 9)
    one.hear(told(two), 2.0, 3)
    assert (one.seen_at(2), two.seen_at(1)) == (0.0, 0.0)


def told(roll: RollCall) -> roll_call.Roll:
    number, present, agreed, common, checksum = roll.as_wire()
    return roll_from(roll_call.ToldRoll(number, present, agreed, common, checksum))


@given(st.sets(st.integers(0, 5000)))
def test_a_list_survives_the_wire(hosts: set[int]) -> None:
    packed = pack(sum(1 << host for host in hosts))
    assert set(bits(roll_call.unpack(packed))) == hosts


@pytest.mark.parametrize("packed", [b"", b"no list", pack(1 << (1 << 17))])
def test_what_is_no_list_is_refused(packed: bytes) -> None:
    body = {"from": 1, "seen": [], "reports": [], "checksum": 1, "roll": [1, packed, b"", b"", 0]}
    agent = Gossip(HostReport(0, HostEntry("h", "")), range(1, 40), SILENCE_S)
    with pytest.raises(ProtocolError, match="malformed"):
        agent.hear(body)


class Links(Endpoint):
    """To which agents there are connections; nothing is sent."""

    def __init__(self, name: str, roster: Mapping[str, str]) -> None:
        super().__init__(name, 0, roster)
        self.open: set[str] = set()

    def send(self, to: str, kind: str, body: Body, payload: Sequence[Buffer] = ()) -> Delivery:
        self.open.add(to)
        return delivered()

    def disconnect(self, name: str) -> None:
        self.open.remove(name)


def test_an_agent_keeps_so_many_connections_and_no_more(tmp_path: Path) -> None:
    hosts = range(2 * KEPT_LINKS)
    entries, roster = tuple(HostEntry(f"node{n}", "") for n in hosts), {agent_name(n): "" for n in hosts}
    links = Links(agent_name(0), roster)
    peers = PeerAgents(RunRecord("run", str(tmp_path), 1, (), roster, 30.0, 3, hosts=entries), 0, links)
    peers.begin({"agents": {str(n): f"ipc://{tmp_path}/{n}" for n in hosts}})
    begin, found = time.monotonic(), list[int]()
    for number in range(KEPT_LINKS):
        peers.tick(begin + IDLE_S + 1.5 * number)
        found.append(len(links.open))
    assert found == sorted(found)
    assert (found[0], found[-1]) == (PARTNERS, KEPT_LINKS)


def test_twenty_agents_on_sockets_know_of_a_death_and_of_a_silence(tmp_path: Path) -> None:
    lines: list[threading.Thread] = []

    def start(target: Callable[..., None], args: tuple[Any, ...]) -> Callable[[], None]:
        thread = threading.Thread(target=target, args=args)
        thread.start()
        lines.append(thread)
        return thread.join

    mesh = LiveMesh(tmp_path, 20, start)
    try:
        mesh.all_know("all", within_s=60.0)
        mesh.tell(1, "publish")
        mesh.all_know("report", within_s=60.0)
        mesh.tell(12, "end")
        mesh.kill(12)
        mesh.all_know("silence", within_s=60.0)
    finally:
        mesh.end()
    assert not any(thread.is_alive() for thread in lines)
