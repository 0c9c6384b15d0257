"""The agent's decisions, without processes or clocks."""

from __future__ import annotations

import json
import signal
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from distflow.cluster.cluster_view import Elsewhere
from distflow.cluster.processes import FAULTY, Exit, Failure
from distflow.launch.agent.restart_policy import GRACE_S, RestartPolicy, Signal, StartWorker, Tell
from distflow.launch.agent.start import RestartLimit
from distflow.launch.run.exit_status import has_unsaved
from distflow.launch.run.record import WorkerEntry
from distflow.metrics.merge import TRAINED
from tests.launch.checkpoints import leave_checkpoint

KILLED = Exit(None, signal.SIGKILL)
FAULT = Exit(FAULTY)
TWICE = RestartLimit(2, 100.0)
WORKERS = [WorkerEntry("rollout/0", False), WorkerEntry("rollout/1", False), WorkerEntry("trainer/0", True)]


def explained(worker: str, ending: Exit) -> Failure:
    return Failure(worker, ending.code or 3, "WorkerFailed", str(ending))


def supervisor(restarts: int = 2) -> RestartPolicy:
    core = RestartPolicy(WORKERS, RestartLimit(restarts, 100.0), drain_s=30.0, explain=explained)
    for number, action in enumerate(core.start_unforked()):
        assert isinstance(action, StartWorker)
        core.started(action.worker.name, 100 + number)
    return core


def test_a_killed_rollout_is_announced_and_started_again():
    core = supervisor()
    lost, start = core.exited("rollout/1", KILLED, now=1.0)
    assert lost == Tell("lost", {"worker": "rollout/1", "incarnation": 0, "reason": str(KILLED)})
    assert start == StartWorker(WORKERS[1], 1)


def test_a_worker_whose_gpu_failed_counts_as_killed_and_names_its_gpu():
    core = supervisor(restarts=1)
    core.lives["rollout/1"].entry = WorkerEntry("rollout/1", False, gpus=(3,))
    lost, start = core.exited("rollout/1", FAULT, now=1.0)
    assert lost == Tell(
        "lost", {"worker": "rollout/1", "incarnation": 0, "reason": "exit code 71 (its GPU has failed)"}
    )
    assert isinstance(start, StartWorker)
    assert core.lives["rollout/1"].deaths[0].gpus == (3,)
    core.started("rollout/1", 200)
    core.exited("rollout/1", FAULT, now=2.0)
    assert core.phase == "failing", "not for ever"


def test_a_training_pool_goes_on_after_a_fault_of_a_gpu():
    core = RestartPolicy(WORKERS, TWICE, 30.0, explained, renews=True)
    for number, action in enumerate(core.start_unforked()):
        assert isinstance(action, StartWorker)
        core.started(action.worker.name, 100 + number)
    core.exited("trainer/0", FAULT, 1.0)
    assert (core.phase, core.culprits) == ("running", {"trainer/0"})
    assert core.broken == "trainer/0 was ended by exit code 71 (its GPU has failed)"


def test_restarts_are_counted_for_each_worker():
    core = supervisor(restarts=1)
    for name in ("rollout/0", "rollout/1"):
        assert isinstance(core.exited(name, KILLED, 1.0)[-1], StartWorker)
        core.started(name, 200)
    core.exited("rollout/0", KILLED, 2.0)
    assert core.phase == "failing"


def test_restarts_of_long_ago_do_not_count():
    core = supervisor(restarts=1)
    for now in (1.0, 102.0, 203.0, 304.0):
        assert isinstance(core.exited("rollout/0", KILLED, now)[-1], StartWorker)
        core.started("rollout/0", 200)
    core.exited("rollout/0", KILLED, 403.0)
    assert core.phase == "failing"
    assert core.failure is not None
    assert core.failure.message.endswith(
        "it had been restarted 1 times within 100 s (limits.restarts, limits.restart_window_s)"
    )


def test_a_rollout_that_left_in_order_is_not_started_again_but_announced():
    assert supervisor().exited("rollout/0", Exit(0), 1.0) == [
        Tell("lost", {"worker": "rollout/0", "incarnation": 0, "reason": "exit code 0"})
    ]


def test_after_the_last_training_worker_the_others_have_drain_s_to_leave():
    core = supervisor()
    assert core.exited("trainer/0", Exit(0), now=10.0) == [Tell("stop", {"reason": "training has ended"})]
    assert (core.phase, core.deadline) == ("leaving", 40.0)
    assert core.tick(39.0) == []
    assert core.tick(40.0) == [Signal("rollout/0", 100, signal.SIGTERM), Signal("rollout/1", 101, signal.SIGTERM)]
    assert core.tick(40.0 + GRACE_S)[0] == Signal("rollout/0", 100, signal.SIGKILL)
    core.exited("rollout/0", KILLED, 46.0)
    core.exited("rollout/1", Exit(0), 46.0)
    assert core.outcome is not None
    assert (core.outcome.state, core.outcome.exit_code) == ("done", 0)


def test_the_first_failure_is_the_reason_and_the_others_are_asked_to_save():
    core = supervisor()
    (stop,) = core.exited("rollout/0", Exit(2), 1.0)
    assert isinstance(stop, Tell)
    assert stop.kind == "stop"
    core.exited("trainer/0", Exit(3), 2.0)
    core.exited("rollout/1", Exit(0), 2.0)
    assert core.outcome is not None
    assert core.outcome.exit_code == 2
    assert core.outcome.failure is not None
    assert core.outcome.failure.worker == "rollout/0"


def test_without_a_training_worker_nobody_has_anything_to_save():
    core = supervisor()
    core.exited("trainer/0", KILLED, 1.0)
    assert core.deadline == 1.0 + GRACE_S


def test_stopping_ends_in_130_and_still_tells_who_could_not_save():
    core = supervisor()
    core.stop("wanted", 1.0)
    core.exited("trainer/0", Exit(3), 2.0)
    core.exited("rollout/0", Exit(130), 2.0)
    core.exited("rollout/1", Exit(0), 2.0)
    assert core.outcome is not None
    assert (core.outcome.state, core.outcome.exit_code) == ("stopped", 130)
    assert core.outcome.failure is not None


def test_a_trainer_that_did_not_save_in_time_is_told_with_the_limit_to_raise():
    core = supervisor()
    core.stop("wanted", 1.0)
    for name in ("rollout/0", "rollout/1"):
        core.exited(name, Exit(130), 1.0)
    core.tick(31.0)
    core.exited("trainer/0", Exit(None, signal.SIGTERM), 31.0)
    assert core.outcome is not None
    assert (core.outcome.state, core.outcome.exit_code) == ("stopped", 130)
    assert core.outcome.failure is not None
    assert core.outcome.failure.message.startswith(
        "trainer/0 did not save within limits.drain_s (30 s without progress), which a micro-batch or a file may take "
        "longer than — increase it for the next run. "
    )


@pytest.mark.parametrize("unsaved", [False, True])
def test_a_trainer_that_is_ended_in_stopping_has_failed_only_if_training_steps_are_lost(unsaved: bool):
    core = RestartPolicy(WORKERS, TWICE, 30.0, explained, unsaved=lambda: unsaved)
    for number, action in enumerate(core.start_unforked()):
        assert isinstance(action, StartWorker)
        core.started(action.worker.name, 100 + number)
    core.stop("wanted", 1.0)
    for name in ("rollout/0", "rollout/1"):
        core.exited(name, Exit(130), 1.0)
    core.tick(31.0)
    core.exited("trainer/0", KILLED, 31.0)
    assert core.outcome is not None
    assert core.outcome.state == "stopped"
    assert (core.outcome.failure is not None) == unsaved


@pytest.mark.parametrize(("done", "saved", "lost"), [(0, 0, False), (3, 3, False), (4, 3, True), (2, 0, True)])
def test_training_steps_behind_the_newest_checkpoint_are_not_saved(
    tmp_path: Path, done: int, saved: int, lost: bool
) -> None:
    (tmp_path / "metrics").mkdir()
    lines = [{"step": step, "term": 0, TRAINED: 1.0} for step in range(1, done + 1)]
    begun = {"step": done + 1, "term": 0, "response_length/mean": 3.0}
    text = "".join(json.dumps(line) + "\n" for line in (*lines, begun))
    (tmp_path / "metrics" / "trainer-0.jsonl").write_text(text)
    if saved:
        leave_checkpoint(tmp_path, saved)
    assert has_unsaved(tmp_path) == lost


def test_whoever_saves_gets_more_time_as_long_as_it_makes_progress():
    core = supervisor()
    core.checkpointed("trainer/0", 500, 0.5)
    core.stop("wanted", 1.0)
    assert core.deadline == 31.0
    core.checkpointed("trainer/0", 500, 20.0)
    assert core.deadline == 31.0, "what was written before, told again"
    core.checkpointed("trainer/0", 600, 30.0)
    assert core.deadline == 60.0
    assert core.tick(59.0) == []
    assert core.saved == 100
    assert Signal("trainer/0", 102, signal.SIGTERM) in core.tick(60.0)
    core.checkpointed("trainer/0", 700, 61.0)
    assert core.deadline == 60.0 + GRACE_S, "it has been told to end"


def test_saving_on_another_host_counts_too():
    core = supervisor()
    core.stop("wanted", 1.0)
    core.heard(Elsewhere(living=True, training=True, saved=7), 20.0)
    assert core.deadline == 50.0
    core.heard(Elsewhere(living=True, training=True, saved=7), 40.0)
    assert core.deadline == 50.0


def test_saving_moves_no_deadline_of_who_wants_everything_ended_at_once():
    core = supervisor()
    core.stop("wanted", 1.0, at_once=True)
    before = core.deadline
    core.checkpointed("trainer/0", 600, 2.0)
    assert core.deadline == before


def test_who_wants_everything_ended_at_once_is_not_told_that_nothing_was_saved():
    core = supervisor()
    core.stop("wanted", 1.0)
    core.stop("wanted", 2.0, at_once=True)
    for name in core.lives:
        core.exited(name, KILLED, 2.0)
    assert core.outcome is not None
    assert core.outcome.failure is None


def test_a_worker_that_was_stopped_by_hand_stops_the_run():
    core = supervisor()
    core.exited("trainer/0", Exit(130), 1.0)
    assert core.phase == "stopping"


def test_at_once_kills_at_once_and_waits_for_nobody_unborn():
    core = supervisor()
    core.exited("rollout/0", KILLED, 1.0)
    actions = core.stop("wanted", 2.0, at_once=True)
    assert Signal("trainer/0", 102, signal.SIGKILL) in actions
    core.exited("rollout/1", KILLED, 2.0)
    core.exited("trainer/0", KILLED, 2.0)
    assert core.phase == "over"


# -- one host of many


def test_the_others_leave_only_when_nobody_trains_on_any_host():
    core = supervisor()
    core.elsewhere = Elsewhere(living=True, training=True)
    assert core.exited("trainer/0", Exit(0), 1.0) == []
    assert core.phase == "running"
    assert core.heard(Elsewhere(living=True), 2.0) == [Tell("stop", {"reason": "training has ended"})]
    assert (core.phase, core.deadline) == ("leaving", 32.0)


def test_the_run_is_over_only_when_it_is_on_every_host():
    core = supervisor()
    core.elsewhere = Elsewhere(living=True, training=True)
    core.stop("wanted", 1.0)
    for name in core.lives:
        core.exited(name, Exit(130), 2.0)
    assert core.outcome is None
    core.heard(Elsewhere(), 3.0)
    assert core.outcome is not None
    assert core.outcome.state == "stopped"


def test_a_training_worker_on_another_host_gets_time_to_save_here_too():
    core = supervisor()
    core.elsewhere = Elsewhere(living=True, training=True)
    core.exited("trainer/0", Exit(0), 1.0)
    core.fail(Failure("rollout/7", 3, "StepError", "it raised"), 2.0)
    assert core.deadline == 32.0


# -- workers that join and leave


def test_a_drained_worker_that_left_is_not_restarted_and_its_death_is_told():
    core = supervisor()
    assert core.shrink("rollout/1") == [Tell("drain", {"reason": "distflow scale"}, "rollout/1")]
    assert core.shrink("rollout/1") == []
    assert core.lives["rollout/1"].standing == "draining"
    lost = Tell("lost", {"worker": "rollout/1", "incarnation": 0, "reason": "exit code 0"})
    assert core.exited("rollout/1", Exit(0), 1.0) == [lost]
    assert core.lives["rollout/1"].standing == "left"
    assert core.phase == "running"


@pytest.mark.parametrize("ending", [KILLED, Exit(130)])
def test_a_draining_worker_may_end_as_it_likes_but_not_fail(ending):
    core = supervisor()
    core.shrink("rollout/1")
    assert [type(action) for action in core.exited("rollout/1", ending, 1.0)] == [Tell]
    assert (core.phase, core.lives["rollout/1"].standing) == ("running", "left")
    core.shrink("rollout/0")
    core.exited("rollout/0", Exit(2), 1.0)
    assert core.phase == "failing"


def test_a_worker_that_is_wanted_again_comes_back_as_a_new_life_when_it_has_left():
    core = supervisor(restarts=0)
    core.shrink("rollout/1")
    assert core.grow(WORKERS[1]) == []
    assert core.exited("rollout/1", Exit(0), 1.0)[-1] == StartWorker(WORKERS[1], 1)
    core.started("rollout/1", 200)
    core.shrink("rollout/1")
    core.exited("rollout/1", Exit(0), 2.0)
    assert core.grow(WORKERS[1]) == [StartWorker(WORKERS[1], 2)]


def test_a_worker_that_joined_counts_for_the_end_of_the_run():
    core = supervisor()
    assert core.grow(WorkerEntry("rollout/2", False)) == [StartWorker(WorkerEntry("rollout/2", False), 0)]
    core.started("rollout/2", 200)
    core.stop("wanted", 1.0)
    for worker in WORKERS:
        core.exited(worker.name, Exit(130), 2.0)
    assert core.outcome is None
    core.exited("rollout/2", Exit(130), 2.0)
    assert core.outcome is not None


EVENTS = st.lists(
    st.tuples(
        st.sampled_from(["exit", "stop", "kill", "later"]),
        st.sampled_from([worker.name for worker in WORKERS]),
        st.sampled_from([Exit(0), Exit(1), Exit(2), Exit(3), Exit(130), KILLED, Exit(None, signal.SIGSEGV)]),
    ),
    max_size=30,
)


class Obedient:
    """A world in which workers start when asked to and die of SIGKILL."""

    def __init__(self) -> None:
        self.core = supervisor()
        self.now = 0.0

    def happens(self, kind: str, name: str, ending: Exit) -> None:
        self.now += 1.0
        if self.core.phase == "over":
            return
        if kind == "exit" and self.core.lives[name].state == "running":
            self.obey(self.core.exited(name, ending, self.now))
        elif kind in ("stop", "kill"):
            self.obey(self.core.stop("wanted", self.now, at_once=kind == "kill"))
        else:
            self.obey(self.core.tick(self.now))

    def obey(self, actions: list[StartWorker | Tell | Signal]) -> None:
        for action in actions:
            if isinstance(action, StartWorker):
                self.core.started(action.worker.name, 300)
            elif isinstance(action, Signal) and action.number == signal.SIGKILL and action.pid is not None:
                self.obey(self.core.exited(action.worker, KILLED, self.now))


@given(EVENTS)
def test_whatever_happens_the_run_ends_once_everybody_obeys_signals(events):
    world = Obedient()
    for event in events:
        world.happens(*event)
    world.happens("stop", "trainer/0", Exit(0))
    while world.core.phase != "over":
        assert world.core.deadline < world.now + 60.0
        world.now = max(world.now, world.core.deadline)
        world.obey(world.core.tick(world.now))
    assert world.core.outcome is not None
    assert (world.core.outcome.exit_code == 0) == (world.core.outcome.state == "done")


def test_when_a_training_worker_is_killed_all_of_this_host_begin_anew():
    workers = [WorkerEntry("rollout/0", False), WorkerEntry("trainer/0", True), WorkerEntry("trainer/1", True)]
    core = RestartPolicy(workers, TWICE, 30.0, explained, renews=True)
    core.start_unforked()
    for pid, name in enumerate(core.lives, 1):
        core.started(name, pid)
    lost, kill = core.exited("trainer/0", KILLED, 1.0)
    assert (lost.kind, kill) == ("lost", Signal("trainer/1", 3, signal.SIGKILL))
    assert core.trains
    core.exited("trainer/1", Exit(75), 1.1)
    assert (core.trains, core.phase, core.outcome) == (False, "running", None)
    again = core.renew(1, ["trainer/0", "trainer/1"])
    assert [(action.worker.name, action.incarnation) for action in again] == [("trainer/0", 1), ("trainer/1", 1)]
    assert core.broken is None


def test_generating_workers_that_had_left_come_back_with_the_training_workers():
    """trainer/0 is killed while it saves for the last time, after it has said that all training steps are done."""
    workers = [WorkerEntry(f"rollout/{number}", False) for number in range(3)] + [WorkerEntry("trainer/0", True)]
    core = RestartPolicy(workers, TWICE, 30.0, explained, renews=True)
    for pid, action in enumerate(core.start_unforked(), 1):
        assert isinstance(action, StartWorker)
        core.started(action.worker.name, pid)
    assert len(core.exited("rollout/0", Exit(0), 1.0)) == 1
    core.shrink("rollout/2")
    core.exited("rollout/2", Exit(0), 1.0)
    core.exited("trainer/0", KILLED, 2.0)
    names = [action.worker.name for action in core.renew(1, ["trainer/0"]) if isinstance(action, StartWorker)]
    assert names == ["trainer/0", "rollout/0"]
    # However late it ends: it heard the former term's last word, not this one's.
    assert core.exited("rollout/1", Exit(0, term=0), 400.0)[-1] == StartWorker(workers[1], 1)
    core.started("rollout/1", 9)
    assert len(core.exited("rollout/1", Exit(0, term=1), 400.1)) == 1


def test_who_was_killed_is_blamed_and_not_who_noticed_it_first():
    core = RestartPolicy([WorkerEntry("trainer/0", True), WorkerEntry("trainer/1", True)], TWICE, 30.0, explained)
    core.start_unforked()
    for pid, name in enumerate(core.lives, 1):
        core.started(name, pid)
    core.exited("trainer/0", Exit(75), 1.0)
    assert core.failure is not None
    assert core.failure.worker == "trainer/0"
    core.exited("trainer/1", KILLED, 1.0)
    assert core.outcome is not None
    assert core.outcome.failure is not None
    assert core.outcome.failure.worker == "trainer/1"


def test_who_cannot_come_back_has_left_for_good():
    core = RestartPolicy(
        [WorkerEntry("trainer/0", True), WorkerEntry("trainer/1", True)], TWICE, 30.0, explained, renews=True
    )
    core.start_unforked()
    for pid, name in enumerate(core.lives, 1):
        core.started(name, pid)
    core.exited("trainer/1", KILLED, 1.0)
    core.exited("trainer/0", KILLED, 1.1)
    assert core.culprits == {"trainer/1"}, "the other one was ended by us"
    assert [action.worker.name for action in core.renew(1, ["trainer/0"])] == ["trainer/0"]
    assert (core.lives["trainer/1"].standing, core.culprits) == ("left", set())


def test_a_training_worker_that_is_just_being_forked_is_ended_as_soon_as_it_can_be():
    core = RestartPolicy([WorkerEntry("trainer/0", True)], TWICE, 30.0, explained, renews=True)
    core.start_unforked()
    assert core.break_up("another one was killed") == []
    assert core.started("trainer/0", 7) == [Signal("trainer/0", 7, signal.SIGKILL)]


def test_a_training_worker_that_fails_by_itself_ends_the_run_all_the_same():
    core = RestartPolicy([WorkerEntry("trainer/0", True)], TWICE, 30.0, explained, renews=True)
    core.start_unforked()
    core.started("trainer/0", 7)
    core.exited("trainer/0", Exit(3), 1.0)
    assert core.outcome.state == "failed"
