"""What an agent leaves for the next one on its host, and what that makes of it. No processes."""

from __future__ import annotations

import shutil
import signal
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from distflow.cluster.gossip import Gossip
from distflow.cluster.host_report import Death, DesiredWorkers, HostedWorker, HostReport, Saved, Successor, Term
from distflow.cluster.processes import Exit, Failure, HostEntry, ProcessId
from distflow.comm.beats import BEAT_S
from distflow.launch.agent.record_writer import Journal, JournalWriter, Succession, journal_file, read_journal
from distflow.launch.agent.restart_policy import Life, RestartPolicy, Signal, StartWorker, Tell
from distflow.launch.agent.start import RestartLimit
from distflow.launch.run.record import RunRecord, WorkerEntry

KILLED = Exit(None, signal.SIGKILL)
WORKERS = [WorkerEntry("rollout/0", False), WorkerEntry("rollout/1", False), WorkerEntry("trainer/0", True)]
NEXT = Successor(2, 40, 1, ("trainer/0",), 1, ((1, 20), (2, 40)), "trainer/0 was killed")


def hosted(life: Life) -> HostedWorker:
    code = None if life.ending is None else life.ending.code
    return HostedWorker(life.entry.trains, 1, life.standing, life.incarnation, "", code, tuple(life.deaths))


def report_of(core: RestartPolicy) -> HostReport:
    lives = core.lives.items()
    return HostReport(
        host=0,
        entry=HostEntry("", ""),
        phase=core.course,
        reason=core.reason,
        at_once=core.at_once,
        failure=core.failure,
        workers={name: hosted(life) for name, life in lives},
        marks={name: ProcessId(life.pid, 1.0, "here") for name, life in lives if life.pid is not None},
    )


def journal_of(core: RestartPolicy) -> Journal:
    return Journal(
        launch_term=0,
        report=report_of(core),
        begun=True,
        restarted={name: list(life.restarted) for name, life in core.lives.items()},
        told=tuple(name for name, life in core.lives.items() if life.told),
        culprits=tuple(sorted(core.culprits)),
    )


def supervisor() -> RestartPolicy:
    def explained(worker: str, ending: Exit) -> Failure:
        return Failure(worker, ending.code or 3, "WorkerFailed", str(ending))

    return RestartPolicy(WORKERS, RestartLimit(2, 100.0), drain_s=30.0, explain=explained)


def test_a_journal_is_read_as_it_was_written(tmp_path: Path):
    term = Term(1, NEXT, True, True, (Saved(40, 1, ("a.part",)),), ("trainer/1",), NEXT, NEXT, "killed", "host 1")
    report = HostReport(
        host=3,
        entry=HostEntry("node3", "10.0.0.3", "tcp://10.0.0.3:4711", "nonce"),
        serial=7,
        term=term,
        phase="stopping",
        failure=Failure("trainer/0", 3, "WorkerFailed", "why"),
        workers={
            "rollout/0": HostedWorker(
                False, 2, "draining", 1, "tcp://10.0.0.3:5", None, (Death(0, "signal 9"),), "/p", True
            )
        },
        marks={"rollout/0": ProcessId(12, 3.5, "here")},
        wanted={"rollout": DesiredWorkers((2, 3), {"rollout/0": 3})},
    )
    journal = Journal(
        5, report, {"0": "tcp://10.0.0.1:1"}, 7, True, {"rollout/0": [1.5]}, ("rollout/0",), ("trainer/0",)
    )
    (tmp_path / "hosts").mkdir()
    assert JournalWriter(tmp_path, 3).write(journal)
    assert read_journal(tmp_path, 3, 5) == journal
    assert read_journal(tmp_path, 3, 6) is None, "of an earlier launch"
    assert read_journal(tmp_path, 2, 5) is None


@pytest.mark.parametrize(
    "text",
    [
        '{"report": 5}',
        '{"launch_term": 0, "report": {"host": 0, "entry": {"name": "", "address": ""}}, "told": "rollout/0"}',
        '{"launch_term": "0", "report": {"host": 0, "entry": {"name": "", "address": ""}}}',
    ],
)
def test_a_journal_that_is_none_is_passed_over(tmp_path: Path, caplog: pytest.LogCaptureFixture, text: str):
    (tmp_path / "hosts").mkdir()
    journal_file(tmp_path, 0).write_text(text)
    assert read_journal(tmp_path, 0, 0) is None
    assert "not a journal of this version" in caplog.text


EVENTS = st.lists(
    st.tuples(
        st.sampled_from(["exit", "exit", "stop", "kill", "later", "agent", "shrink"]),
        st.sampled_from([worker.name for worker in WORKERS]),
        st.sampled_from([Exit(0), Exit(2), Exit(130), KILLED, Exit(None, early=0)]),
    ),
    max_size=30,
)


class World:
    """Workers start when asked to and die of SIGKILL; the agent is killed and followed by another at any time."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.core = supervisor()
        self.now = 0.0
        self.started = 0
        self.obey(self.core.start_unforked())

    def happens(self, kind: str, name: str, ending: Exit) -> None:
        self.now += 1.0
        if kind == "agent":
            self.follow()
        elif self.core.phase == "over":
            return
        elif kind == "exit" and self.core.lives[name].state == "running":
            self.obey(self.core.exited(name, ending, self.now))
        elif kind == "shrink" and not self.core.lives[name].entry.trains:
            self.obey(self.core.shrink(name))
        elif kind in ("stop", "kill"):
            self.obey(self.core.stop("wanted", self.now, at_once=kind == "kill"))
        else:
            self.obey(self.core.tick(self.now))

    def follow(self) -> None:
        before, journal = self.core, journal_of(self.core)
        assert JournalWriter(self.folder, 0).write(journal)
        found = read_journal(self.folder, 0, 0)
        assert found is not None
        self.core = supervisor()
        self.obey(self.core.resume(found.lives(), found.report, found.culprits, self.now))
        self.obey(self.core.start_unforked())
        assert report_of(self.core).workers == report_of(before).workers
        assert (self.core.course, self.core.failure) == (before.course, before.failure)

    def obey(self, actions: list[StartWorker | Tell | Signal]) -> None:
        for action in actions:
            if isinstance(action, StartWorker):
                self.started += 1
                self.core.started(action.worker.name, 300 + self.started)
            elif isinstance(action, Signal) and action.number == signal.SIGKILL and action.pid is not None:
                self.obey(self.core.exited(action.worker, KILLED, self.now))


@given(EVENTS)
def test_whenever_an_agent_is_killed_the_next_one_stands_where_it_stood(tmp_path_factory, events):
    folder = tmp_path_factory.mktemp("run")
    (folder / "hosts").mkdir()
    world = World(folder)
    for event in events:
        world.happens(*event)
    world.happens("stop", "trainer/0", Exit(0))
    world.follow()
    while world.core.phase != "over":
        world.now = max(world.now + 1.0, min(world.core.deadline, world.now + 60.0))
        assert world.now < 1000.0
        world.obey(world.core.tick(world.now))
    assert world.core.outcome is not None
    shutil.rmtree(folder)


def test_what_the_agent_before_may_not_have_told_any_more_is_told_once_more():
    core = supervisor()
    for number, action in enumerate(core.start_unforked()):
        assert isinstance(action, StartWorker)
        core.started(action.worker.name, 100 + number)
    core.exited("rollout/0", KILLED, 1.0)
    core.shrink("rollout/1")
    core.stop("wanted", 2.0)
    journal = journal_of(core)
    assert supervisor().resume(journal.lives(), journal.report, journal.culprits, 3.0) == [
        Tell("lost", {"worker": "rollout/0", "incarnation": 0, "reason": str(KILLED)}),
        Tell("drain", {"reason": "distflow scale"}, "rollout/1"),
        Tell("stop", {"reason": "wanted"}),
    ]


def test_other_hosts_take_what_the_next_agent_says_for_newer():
    def report(reason: str) -> HostReport:
        return HostReport(0, HostEntry("", ""), reason=reason)

    first, other = Gossip(report(""), [1], 60.0), Gossip(HostReport(1, HostEntry("", "")), [0], 60.0)
    for number in range(5):
        for beat in [*first.publish(report(str(number))), *first.tick(number * BEAT_S)]:
            other.hear(beat.body)
    second = Gossip(report(""), [1], 60.0)
    # It may have lost count: of a journal that no disk would take, the one before it had begun from the same.
    second.resume(report("1"), 0)
    second.publish(report("new"))
    for now in (10.0, 11.0, 12.0):
        for beat in other.tick(now):
            second.hear(beat.body)
    assert other.unheard_s(0) > 0.0
    for beat in second.tick(13.0):
        other.hear(beat.body)
    assert other.unheard_s(0) == 0.0
    assert other.reports[0].reason == "new"


def test_a_vote_goes_out_only_once_the_next_agent_would_know_of_it(tmp_path: Path):
    (tmp_path / "hosts").mkdir()
    mesh = Gossip(HostReport(0, HostEntry("", ""), term=Term(1, broken=True)), [1], 60.0)
    peers = SimpleNamespace(mesh=mesh, publish=mesh.publish, agents=dict, first=0, begun=True)
    record = RunRecord("x", str(tmp_path), 10, (), {}, 30.0, 3)
    terms = SimpleNamespace(former_culprits=())
    succession = Succession(record, 0, None, supervisor(), peers, terms)
    voted = HostReport(0, HostEntry("", ""), term=Term(1, broken=True, vote=NEXT), reason="told at once")
    (tmp_path / "hosts").rename(tmp_path / "away")
    succession.publish(voted)
    assert (mesh.own.term.vote, mesh.own.reason) == (None, "told at once")
    (tmp_path / "away").rename(tmp_path / "hosts")
    succession.publish(voted)
    assert mesh.own.term.vote == NEXT
