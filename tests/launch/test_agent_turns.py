"""What a turn of an agent's loop costs among many hosts: those count that have news, not those that there are."""

from __future__ import annotations

import cProfile
import random
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from msgspec import structs

from benchmarks import agents as turns
from distflow.cluster.gossip import Gossip
from distflow.cluster.host_report import DesiredWorkers, HostedWorker, HostReport, Term, to_wire
from distflow.cluster.processes import HostEntry
from distflow.cluster.report_totals import ReportTotals
from distflow.comm.beats import BEAT_S
from distflow.comm.message import decode, encode
from distflow.launch.agent import agent as agent_module
from distflow.launch.agent import record_writer
from distflow.launch.agent.agent import Agent
from distflow.launch.agent.peer_agents import NEWS_S, AddressBook
from tests.search.agent_mesh import Mesh


class Seen(dict[int, HostReport]):
    """Reports that count how many of them are looked at one after another."""

    count = 0

    def _counted(self, values: Any) -> Iterator[Any]:
        for value in values:
            self.count += 1
            yield value

    def __iter__(self) -> Iterator[int]:
        return self._counted(super().keys())

    keys = __iter__

    def items(self) -> Iterator[tuple[int, HostReport]]:
        return self._counted(super().items())

    def values(self) -> Iterator[HostReport]:
        return self._counted(super().values())


class Listed(list[int]):
    """Numbers of hosts that count how many of them are looked at."""

    count = 0

    def __iter__(self) -> Iterator[int]:
        for number in super().__iter__():
            self.count += 1
            yield number


@pytest.fixture
def works(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[int], dict[str, Callable[[int], None]]]:
    """Turns of an agent of so many hosts, by name."""
    monkeypatch.setattr(record_writer, "Endpoint", turns.Wire)
    monkeypatch.setattr(agent_module, "WorkerGroup", turns.Quiet)
    monkeypatch.setattr(turns, "Agent", Kept)

    def make(hosts: int) -> dict[str, Callable[[int], None]]:
        (folder := tmp_path / str(hosts)).mkdir()
        return turns.turns(turns.world(hosts, folder), 9, writes=False)

    return make


class Kept(Agent):
    """Of the agents that were made the last one."""

    last: Agent

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        Kept.last = self


def calls(work: Callable[[], object]) -> int:
    profile = cProfile.Profile()
    profile.runcall(work)
    return sum(entry.callcount for entry in profile.getstats())


Works = Callable[[int], dict[str, Callable[[int], None]]]


@pytest.mark.parametrize("what", ["quiet", "news"])
def test_the_cost_of_a_turn_does_not_grow_with_the_number_of_hosts(works: Works, what: str) -> None:
    found = []
    for hosts in (64, 512):
        work = works(hosts)[what]
        for number in range(3):
            work(number)
        found.append(calls(lambda work=work: work(3)))
    assert found[0] == found[1]


@pytest.mark.parametrize("what", ["quiet", "news"])
def test_a_turn_looks_at_no_host_without_news(works: Works, what: str) -> None:
    work = works(64)[what]
    work(0)
    mesh = Kept.last._peers.mesh
    reports, others = Seen(mesh.reports), Listed(mesh.others)
    mesh.reports = mesh._news.reports = reports
    mesh._pulses.others = others
    for number in range(1, 4):
        work(number)
    assert (reports.count, others.count) == (0, 0)
    list(mesh.reports.values())
    assert reports.count == 64, "it would have been counted"


def test_what_came_since_the_last_turn_is_concluded_from_at_one_time(works: Works) -> None:
    works(64)
    peers, told = Kept.last._peers, turns.reports(Kept.last._recorder.record)
    now = time.monotonic()
    peers.concluded(now)
    assert peers.patience_s(now) == pytest.approx(BEAT_S), "nothing is new"
    assert peers.rest(now + 0.5, float("inf"))
    for number in (1, 2):
        peers.hear(turns.beat(Kept.last._recorder.record, turns.changed(told[number], 0)), now)
    assert peers.patience_s(now) == pytest.approx(NEWS_S)
    assert peers.rest(now, float("inf"))
    assert not peers.rest(now + NEWS_S, float("inf"))
    assert not peers.rest(now, now), "a deadline of this host does not wait for that"


def test_what_was_answered_is_on_disk_before_the_answer_goes_out(works: Works, monkeypatch: pytest.MonkeyPatch) -> None:
    works(2)
    agent = Kept.last
    record, decision = agent._recorder.record, DesiredWorkers((1, 0), {"rollout/0": 0})
    monkeypatch.setattr(
        agent._scaling, "ask", lambda body, mesh: agent._scaling._decided.update(rollout=decision) or {}
    )
    answered = []

    def reply(message: Any, body: Any) -> None:
        before = record_writer.read_journal(record.path, 0, record.launch_term)
        answered.append((body, None if before is None else dict(before.report.wanted)))

    monkeypatch.setattr(agent._endpoint, "reply", reply)
    agent._handle(decode(encode("scale", "client", 0, {})))
    assert answered == [({}, {"rollout": decision})]


def told_of(body: Any) -> set[str]:
    return set(body["addresses"])


def test_workers_are_told_the_addresses_that_they_lack(works: Works) -> None:
    work = works(64)["news"]
    agent, sent = Kept.last, list[dict[str, Any]]()

    def keep(to: str, kind: str, body: dict[str, Any]) -> None:
        sent.extend([body] if (to, kind) == ("trainer/0", "roster") else [])

    agent._worker_group._send = keep
    moved = {next(name for name in agent._peers.mesh.reports[1].workers)}
    work(0)
    work(1)
    assert [told_of(body) for body in sent] == [moved, moved]
    assert sent[1]["since"] == sent[0]["number"]

    def here(has: int) -> set[str]:
        sent.clear()
        agent._peers.here(decode(encode("here", "trainer/0", 0, {"address": turns.address_of(0, 9), "has": has})))
        turns.turn(agent)
        assert len(sent) == 1, "whoever says where it listens is answered"
        return told_of(sent[0])

    newest = sent[1]["number"]
    everybody = 9 * 64
    assert here(newest) <= {"trainer/0"}
    assert moved <= here(sent[0]["since"] - 1), "a roster was lost on the way"
    assert len(here(0)) == everybody
    assert len(here(7)) == everybody, "the number is of another agent"


def report(host: int, serial: int, draw: random.Random) -> HostReport:
    """Anything."""
    states = ("starting", "running", "ended", "left")
    workers = {
        f"rollout/{host}": HostedWorker(False, 1, draw.choice(states), address=f"tcp://10.0.0.{draw.randrange(3)}:1"),
        f"trainer/{host}": HostedWorker(True, 1, draw.choice(states), address=f"tcp://10.0.0.{host}:2"),
    }
    about: dict[str, Any] = {"saved": draw.randrange(3), "at_once": draw.random() < 0.2, "gone": draw.random() < 0.2}
    about["phase"] = draw.choice(("running", "running", "leaving", "stopping", "failing"))
    term = Term(draw.randrange(3), broken=draw.random() < 0.3)
    return HostReport(host, HostEntry(f"h{host}", "", f"tcp://10.0.0.{host}:9"), serial, term, workers=workers, **about)


@pytest.mark.parametrize("seed", range(5))
def test_what_is_kept_up_to_date_is_what_would_be_counted_anew(seed: int) -> None:
    draw = random.Random(seed)
    mesh = Gossip(report(0, 0, draw), range(1, 4), 60.0)
    totals, book = ReportTotals(mesh), AddressBook(mesh)
    for serial in range(1, 60):
        host = draw.randrange(6)
        if host:
            mesh.hear({"from": host, "seen": [], "reports": [to_wire(report(host, serial, draw))]})
        else:
            mesh.publish(report(0, serial, draw))
        if draw.random() < 0.7:
            totals.look()
            book.look()
            anew = vars(ReportTotals(mesh))
            assert {name: value for name, value in vars(totals).items() if name != "_revision"} == {
                name: value for name, value in anew.items() if name != "_revision"
            }
            assert AddressBook(mesh).since(0) == book.since(0), "who starts now is not told of those that have left"


def test_what_changed_since_a_revision() -> None:
    draw = random.Random(0)
    mesh = Gossip(report(0, 0, draw), range(1, 4), 60.0)
    assert mesh.changed_since(-1) == [0]
    for host in (2, 1, 2):
        mesh.hear({"from": host, "seen": [], "reports": [to_wire(report(host, 10 + mesh.revision, draw))]})
    assert mesh.changed_since(0) == [2, 1]
    assert mesh.changed_since(mesh.revision - 1) == [2]
    mesh.know(9)
    assert mesh.changed_since(mesh.revision - 1) == [9]
    assert mesh.changed_since(mesh.revision) == []


def test_a_pool_that_is_not_whole_is_seen_to(works: Works) -> None:
    """As long as nothing disturbs it, the agents are not asked one by one; whatever does is noticed."""
    works(32)
    agent, now = Kept.last, time.monotonic()
    terms, mesh, record = agent._terms, agent._peers.mesh, agent._recorder.record
    told = turns.reports(record)

    def looked(at: float = now) -> bool:
        with mock.patch.object(terms, "_view", side_effect=terms._view) as view:
            terms.act(mesh, lambda name, address: None, at)
            return bool(view.called)

    assert not looked()
    agent._peers.hear(turns.beat(record, turns.changed(told[3], 0)), now)
    assert not looked(), "news of another kind"
    with mock.patch.object(mesh, "silent", return_value=frozenset({5})):
        assert looked()
    with mock.patch.object(mesh, "confirmed", return_value=mesh._pulses.known ^ 1 << 5):
        assert looked(), "host 5 has not confirmed for long that it hears us"
    assert not looked()
    terms._asked_at = now
    wanted = {"trainer": DesiredWorkers((1, 4), {"trainer/1": 1})}
    agent._peers.hear(turns.beat(record, structs.replace(told[4], serial=50, wanted=wanted)), now)
    assert looked(), "others are to train"
    agent._scaling._decided.clear()
    assert not looked()
    broken = structs.replace(told[6], serial=50, term=Term(0, broken=True, reason="trainer/6 was killed"))
    agent._peers.hear(turns.beat(record, broken), now)
    (kill,) = terms.act(mesh, lambda name, address: None, now)
    assert kill.worker == "trainer/0"
    assert looked(), "until the next term"


@pytest.mark.parametrize("hosts", [4, 40])
def test_who_has_confirmed_lately_is_known_without_asking_for_each(hosts: int) -> None:
    """`confirmed` never names a host that `unseen_s` does not."""
    mesh = Mesh(hosts)
    mesh.everybody_knows_everything()
    dead = hosts - 1
    for second in range(40):
        mesh.run_for(1.0)
        if second == 15:
            del mesh.agents[dead]
        agent = mesh.agents[1]
        for within_s in (1.0, 5.0, 12.0, 30.0):
            bits = agent.confirmed(within_s, mesh.now)
            named = {host for host in agent.others if bits >> host & 1}
            assert named <= {host for host in agent.others if agent.unseen_s(host, mesh.now) < within_s}
        everybody = {*range(hosts)} - ({dead} if second > 30 else set())
        if second > 12 and not 15 <= second <= 30:
            assert {host for host in range(hosts) if agent.confirmed(12.0, mesh.now) >> host & 1} >= everybody
