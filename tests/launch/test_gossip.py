"""How the agents' reports spread, under loss, doubling, reordering and agents that fall silent."""

from __future__ import annotations

from collections.abc import Iterator

import msgpack
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from msgspec import structs

from distflow.cluster import cluster_view
from distflow.cluster.gossip import Gossip
from distflow.cluster.host_report import Death, DesiredWorkers, HostedWorker, HostReport
from distflow.cluster.processes import Exit, Failure, HostEntry, ProcessId
from distflow.cluster.report_totals import ReportTotals
from distflow.comm.beats import BEAT_S, Beat
from distflow.errors import ProtocolError

SILENCE_S = 10.0


def entry(host: int) -> HostEntry:
    return HostEntry(f"node{host}", f"10.0.0.{host}", f"tcp://10.0.0.{host}:1", "nonce")


def mesh(host: int, of: int = 3) -> Gossip:
    return Gossip(HostReport(host, entry(host)), set(range(of)) - {host}, SILENCE_S)


class World:
    """Agents and the messages between them; everything goes over the wire format."""

    def __init__(self, hosts: int) -> None:
        self.agents = {host: mesh(host, hosts) for host in range(hosts)}
        self.now = 0.0
        self.flying: list[tuple[int, bytes]] = []
        self.cut: set[tuple[int, int]] = set()
        self.arrived: set[tuple[int, int]] = set()
        """Hosts, each with a pulse of it that anybody has heard."""

    def send(self, host: int, beats: list[Beat]) -> None:
        for beat in beats:
            if (host, beat.host) not in self.cut:
                self.flying.append((beat.host, msgpack.packb(dict(beat.body))))

    def deliver(self, number: int) -> None:
        to, body = self.flying.pop(number % len(self.flying))
        beat = msgpack.unpackb(body)
        self.arrived |= {(host, pulse) for host, _, pulse in beat["seen"] if host == beat["from"]}
        if to in self.agents:
            self.agents[to].hear(msgpack.unpackb(body))

    def publish(self, host: int, **changes: object) -> None:
        agent = self.agents[host]
        self.send(host, agent.publish(structs.replace(agent.own, **changes)))

    def happens(self, kind: str, host: int, number: int) -> None:
        if kind == "crash" and len(self.agents) > 2:
            self.agents.pop(host, None)
        elif kind == "publish" and host in self.agents:
            self.publish(host, reason=str(number))
        elif kind == "tick" and host in self.agents:
            self.now += BEAT_S
            self.send(host, self.agents[host].tick(self.now))
        elif self.flying and kind == "deliver":
            self.deliver(number)
        elif self.flying and kind == "lose":
            self.flying.pop(number % len(self.flying))
        elif self.flying and kind == "double":
            self.flying.append(self.flying[number % len(self.flying)])

    def beat(self, rounds: int = 1) -> None:
        for _ in range(rounds):
            self.now += BEAT_S
            for host, agent in self.agents.items():
                self.send(host, agent.tick(self.now))
            while self.flying:
                self.deliver(0)


EVENTS = st.lists(
    st.tuples(
        st.sampled_from(["publish", "tick", "deliver", "lose", "double", "crash"]),
        st.integers(0, 3),
        st.integers(0, 99),
    ),
    max_size=60,
)


@settings(max_examples=200)
@given(EVENTS)
def test_whatever_is_lost_doubled_or_overtaken_in_the_end_all_know_the_newest(events):
    world = World(4)
    for kind, host, number in events:
        world.happens(kind, host, number)
    world.beat(3)
    for host, agent in world.agents.items():
        for peer, other in world.agents.items():
            assert agent.report(peer) == other.own
            assert peer == host or agent.seen_by(peer)
    # What a crashed agent said last, all have or none.
    for crashed in set(range(4)) - world.agents.keys():
        assert len({repr(agent.report(crashed)) for agent in world.agents.values()}) == 1


FOLLOWS = st.lists(
    st.tuples(
        st.sampled_from(["publish", "tick", "tick", "deliver", "deliver", "lose", "follow"]),
        st.integers(0, 2),
        st.integers(0, 99),
    ),
    max_size=80,
)


@settings(max_examples=200)
@given(FOLLOWS)
@example(
    [("follow", 0, 1), ("publish", 0, 0), ("publish", 0, 1), ("deliver", 0, 0), ("follow", 0, 0), ("publish", 0, 0)]
)
def test_whatever_an_agent_begins_to_count_from_it_is_heard_and_no_other_is_taken_for_it(events):
    """Agents are followed by others, again and again, which know nothing of what those before them have sent."""
    world = World(3)
    for generation, (kind, host, number) in enumerate(events):
        if kind == "follow":
            after = mesh(host)
            after.resume(world.agents[host].own, (number << 20) + (generation << 10))
            world.agents[host] = after
        else:
            world.happens(kind, host, number)
        for one, agent in world.agents.items():
            arrived = [at for pulse, at in agent._pulses.sent.items() if (one, pulse) in world.arrived]
            assert all(at <= max(arrived, default=0.0) for at in agent._pulses._heard_us), "heard, and was not"
    world.beat(4)
    for host, agent in world.agents.items():
        for peer, other in world.agents.items():
            assert agent.report(peer) == other.own
            assert peer == host or (agent.seen_by(peer) and agent.unseen_s(peer, world.now) <= 2 * BEAT_S)


def test_a_change_is_sent_at_once_and_only_until_it_is_known():
    world = World(2)
    world.beat(2)
    one = world.agents[1]
    beats = one.publish(structs.replace(one.own, phase="failing"))
    assert [report["phase"] for report in beats[0].body["reports"]] == ["failing"]
    assert one.publish(one.own) == []
    world.send(1, beats)
    world.beat(2)
    (beat,) = one.tick(world.now + BEAT_S)
    assert beat.body["reports"] == []


def test_most_hosts_are_silent_to_one_that_is_cut_off_and_to_none_of_an_even_split():
    for hosts, parts in ((3, [{2}]), (4, [{0, 1}, {2, 3}]), (2, [{0}, {1}])):
        world = World(hosts)
        world.beat(2)
        world.cut = {(a, b) for part in parts for a in range(hosts) for b in range(hosts) if (a in part) != (b in part)}
        world.beat(int(SILENCE_S / BEAT_S) + 1)
        assert {host for host in world.agents if world.agents[host].is_outnumbered()} == ({2} if hosts == 3 else set())


def test_hosts_that_have_left_do_not_count():
    world = World(3)
    world.publish(1, gone=True)
    world.beat(2)
    del world.agents[1]
    world.cut = {(0, 2), (2, 0)}
    world.beat(int(SILENCE_S / BEAT_S) + 1)
    assert world.agents[0].silent() == {1, 2}
    assert not world.agents[0].is_outnumbered()


def test_two_that_cannot_reach_each_other_hear_of_each_other_through_the_third():
    world = World(3)
    world.cut = {(0, 1), (1, 0)}
    world.publish(0, reason="told by 2")
    world.beat(int(2 * SILENCE_S))
    assert world.agents[1].report(0).reason == "told by 2"
    assert world.agents[1].silent() == frozenset()


def test_silence_begins_when_nobody_hears_the_pulse_and_ends_with_it():
    world = World(3)
    world.beat()
    asleep = world.agents.pop(2)
    world.beat(int(SILENCE_S) - 1)
    assert world.agents[0].silent() == frozenset()
    world.beat(2)
    assert world.agents[0].silent() == world.agents[1].silent() == {2}
    world.agents[2] = asleep
    world.beat()
    assert world.agents[0].silent() == frozenset()


def test_who_slept_itself_concludes_nothing_from_it():
    world = World(2)
    world.beat()
    world.now += 100 * SILENCE_S
    world.agents[0].tick(world.now)
    assert world.agents[0].silent() == frozenset()


def test_the_time_for_which_an_agent_was_away_is_no_silence_of_its_own():
    world = World(3)
    world.beat(3)
    agent = world.agents[0]
    world.now += 100 * SILENCE_S
    assert agent.unseen_s(1, world.now) < SILENCE_S / 2, "before it has read what came meanwhile"
    agent.tick(world.now)
    assert agent.unseen_s(1, world.now) < SILENCE_S / 2
    world.cut = {(0, 1), (0, 2)}
    world.beat(int(SILENCE_S))
    assert agent.unseen_s(1, world.now) >= SILENCE_S, "it counts on once it is back"


def test_turns_that_are_slow_make_nobody_silent():
    world = World(2)
    slow = world.agents[0]
    world.beat(2)
    for _ in range(100):
        world.now += 0.9 * SILENCE_S
        world.send(1, world.agents[1].tick(world.now))
        world.send(0, slow.tick(world.now))
        while world.flying:
            world.deliver(0)
        assert slow.silent() == frozenset()
        assert slow.unseen_s(1, world.now) < SILENCE_S / 2


def test_a_report_is_passed_on_only_to_those_who_say_that_they_lack_it():
    world = World(6)
    world.beat(3)
    world.cut = {(0, 5), (5, 0)}
    world.publish(0, reason="news")
    while world.flying:
        world.deliver(0)
    sent = []
    for _ in range(3):
        world.now += BEAT_S
        for host in range(1, 6):
            beats = world.agents[host].tick(world.now)
            sent += [beat.host for beat in beats if any(report["host"] == 0 for report in beat.body["reports"])]
            world.send(host, beats)
        while world.flying:
            world.deliver(0)
    assert world.agents[5].report(0).reason == "news"
    assert set(sent) == {5}, "the others had it from host 0 itself"


@pytest.mark.parametrize("body", [{}, {"from": 0}, {"from": 1, "seen": [[1]], "reports": []}, {"from": 1, "seen": 3}])
def test_what_is_no_beat_is_refused(body):
    with pytest.raises(ProtocolError, match="malformed beat of a host agent"):
        mesh(0).hear(body)


def test_a_report_that_is_none_is_refused_with_what_is_wrong():
    for entry, match in (({}, r".*`host` - at `\$.reports\[0\]`"), ({"adress": ""}, r".*unknown field `adress` - at")):
        report = {"entry": {"name": "x", "address": "", **entry}}
        with pytest.raises(ProtocolError, match=f"malformed beat of a host agent: {match}"):
            mesh(0).hear({"from": 1, "seen": [], "reports": [report]})


def test_a_report_survives_the_wire_whole():
    hosted = HostedWorker(True, 2, "running", 1, "tcp://x:1", None, (Death(0, "signal 9"),))
    report = HostReport(
        1,
        entry(1),
        failure=Failure("rollout/0", 3, "StepError", "it raised", "File x", "log"),
        workers={"rollout/0": hosted},
        marks={"rollout/0": ProcessId(7, 1.5, "here")},
        wanted={"rollout": DesiredWorkers((3, 1), {"rollout/0": 1})},
    )
    sender, receiver = mesh(1), mesh(0)
    for beat in sender.publish(report):
        if beat.host == 0:
            receiver.hear(msgpack.unpackb(msgpack.packb(dict(beat.body))))
    assert receiver.report(1) == structs.replace(report, serial=1)


# -- what follows from the reports


def known(**reports: HostReport) -> Gossip:
    found = mesh(0, of=2)
    found.reports |= {report.host: report for report in reports.values()}
    return found


def hosted(**states: str) -> dict[str, HostedWorker]:
    codes = {"ended": 0, "bad": 3}
    return {
        name.replace("_", "/"): HostedWorker(
            name.startswith("trainer"), 1, "ended" if state in codes else state, code=codes.get(state)
        )
        for name, state in states.items()
    }


TRAINERS = {"trainer/0": 0, "trainer/1": 1}


def test_a_host_that_has_not_reported_lives_and_trains():
    totals = ReportTotals(known())
    assert cluster_view.elsewhere(totals, TRAINERS) == cluster_view.Elsewhere(living=True, training=True)
    assert cluster_view.elsewhere(totals, {"trainer/0": 0}) == cluster_view.Elsewhere(living=True, training=False)


@pytest.mark.parametrize("state, living", [("starting", True), ("draining", True), ("ended", False), ("left", False)])
def test_a_host_lives_while_one_of_its_workers_does(state, living):
    report = HostReport(1, entry(1), workers=hosted(rollout_0=state, trainer_1="ended"))
    assert cluster_view.elsewhere(ReportTotals(known(a=report)), TRAINERS) == cluster_view.Elsewhere(
        living, training=False
    )


def test_a_silent_host_is_not_waited_for_but_nobody_says_that_its_training_ended():
    found = known(a=HostReport(1, entry(1), workers=hosted(trainer_1="running")))
    for now in range(int(SILENCE_S) + 2):
        found.tick(float(now))
    assert cluster_view.elsewhere(ReportTotals(found), TRAINERS) == cluster_view.Elsewhere(living=False, training=True)


def outcomes(*reports: HostReport, exits: dict[str, Exit] | None = None) -> Iterator[tuple[str, int]]:
    """As both hosts see it."""
    for host in (0, 1):
        found = mesh(host, of=2)
        found.reports = {report.host: report for report in reports}
        outcome = cluster_view.outcome(found, TRAINERS, exits or {})
        yield outcome.state, outcome.exit_code


def test_done_means_that_all_training_workers_everywhere_ended_well():
    zero, one = (
        HostReport(0, entry(0), workers=hosted(trainer_0="ended")),
        HostReport(1, entry(1), workers=hosted(trainer_1="ended")),
    )
    assert list(outcomes(zero, one)) == [("done", 0)] * 2
    assert list(outcomes(zero, structs.replace(one, workers=hosted(trainer_1="running")))) == [("failed", 3)] * 2
    assert list(outcomes(zero, exits={"trainer/1": Exit(0)})) == [("done", 0)] * 2
    assert list(outcomes(zero, exits={"trainer/1": Exit(None, 9)})) == [("failed", 3)] * 2


def test_two_hosts_that_fail_at_once_agree_on_the_reason():
    reports = [
        HostReport(host, entry(host), phase="failing", failure=Failure(f"rollout/{host}", host + 2, "StepError", "x"))
        for host in (0, 1)
    ]
    assert list(outcomes(*reports)) == [("failed", 2)] * 2
    assert list(outcomes(structs.replace(reports[0], phase="stopping"), reports[1])) == [("failed", 3)] * 2


def test_the_last_decision_about_a_pool_counts_wherever_it_was_taken():
    early, late = DesiredWorkers((1, 1), {"rollout/0": 0}), DesiredWorkers((2, 0), {"rollout/0": 1})
    for first, second in ((early, late), (late, early)):
        found = known(
            a=HostReport(0, entry(0), wanted={"rollout": first}), b=HostReport(1, entry(1), wanted={"rollout": second})
        )
        assert cluster_view.wanted(found) == {"rollout": late}


def test_nobody_leaves_before_the_others_know_and_the_writer_last():
    zero, one = mesh(0, of=2), mesh(1, of=2)
    zero.publish(structs.replace(zero.own, clean=True, collected=True))
    assert cluster_view.awaited(zero, [], [], writes=True) == "agent/1 to end and clean up its part"
    beats = one.publish(structs.replace(one.own, clean=True))
    zero.hear(beats[0].body)
    assert cluster_view.awaited(zero, [], [], writes=False) == "agent/1 to learn that this host is cleaned up"
    one.hear(zero.tick(1.0)[0].body)
    zero.hear(one.tick(1.0)[0].body)
    one.hear(zero.tick(2.0)[0].body)
    assert cluster_view.awaited(one, [], [], writes=False) is None
    assert cluster_view.awaited(zero, [], [], writes=True) == "agent/1 to exit before the end is written to run.json"
    zero.hear(one.publish(structs.replace(one.own, gone=True))[0].body)
    assert cluster_view.awaited(zero, [], [], writes=True) is None


def test_who_has_a_folder_of_its_own_waits_for_the_first_host_to_fetch_from_it():
    zero, one = mesh(0, of=2), mesh(1, of=2)
    one.publish(structs.replace(one.own, clean=True))
    one.hear(zero.publish(structs.replace(zero.own, clean=True))[0].body)
    zero.hear(one.tick(1.0)[0].body)
    one.hear(zero.tick(1.0)[0].body)
    assert cluster_view.awaited(one, [0], [], writes=True) == "agent/0 to fetch the last files"
    assert cluster_view.awaited(one, [0], [0], writes=True) is None
    one.hear(zero.publish(structs.replace(zero.own, collected=True))[0].body)
    assert cluster_view.awaited(one, [0], [], writes=True) is None


def test_silent_hosts_whose_workers_have_all_left_do_not_count() -> None:
    mesh = Gossip(HostReport(0, HostEntry("h0", "10.0.0.0")), {1, 2}, 60.0)
    mesh.silent = lambda for_s=None: frozenset({1, 2})
    for state, outnumbered in (("running", True), ("left", False)):
        for host in (1, 2):
            workers = {f"rollout/{host}": HostedWorker(trains=False, threads=1, state=state)}
            mesh.reports[host] = HostReport(host, HostEntry(f"h{host}", f"10.0.0.{host}"), workers=workers)
        assert mesh.is_outnumbered() is outnumbered
