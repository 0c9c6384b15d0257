"""The host agent with real processes; the workers are fakes that start in milliseconds."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from msgspec import structs

from distflow.cluster.processes import nursery_name
from distflow.comm.client import ask
from distflow.launch.agent.record_writer import read_journal
from distflow.launch.agent.start import agent_command, start_agent
from distflow.launch.cli import run as distflow
from distflow.launch.deploy.stop_run import stop_run
from distflow.launch.run.process_table import await_end, elsewhere, host_part, processes_of, running
from distflow.launch.run.record import AGENT
from tests.launch.conftest import FAKE, await_that, environment

LONG = {"steps": 10_000}
NURSERY = nursery_name(0)


def test_a_run_is_done_when_its_training_workers_are(fake_run):
    run = fake_run({"rollout/0": {}, "rollout/1": {}, "trainer/0": {"steps": 5}})
    assert run.run() == 0
    record = run.record()
    assert (record.state, record.exit_code, record.failure) == ("done", 0, None)
    assert run.leftovers() == []


def test_workers_that_do_not_leave_after_training_are_ended(fake_run):
    run = fake_run({"rollout/0": {"stubborn": True}, "trainer/0": {"steps": 1}}, drain_s=0.2)
    assert run.run() == 0
    assert "sent SIGKILL to rollout/0" in run.log("agent-0")
    assert run.leftovers() == []


def test_a_trainer_that_is_ended_before_the_end_of_its_first_training_step_had_nothing_to_save(
    fake_run, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = fake_run({"trainer/0": {**LONG, "step_s": 60.0, "held_by": str(tmp_path / "nowhere")}}, drain_s=0.2)
    run.start()
    run.await_up("trainer/0")
    stop_run(run.run_dir, timeout_s=60.0)
    record = run.record()
    assert (record.state, record.exit_code, record.failure) == ("stopped", 130, None)
    assert distflow(["watch", run.run_dir.name, "--runs-dir", str(run.run_dir.parent)]) == 130
    out, err = capsys.readouterr()
    assert err == ""
    assert "nothing to save before the end of the first training step: no checkpoint is here yet: " in out


def test_who_saves_for_longer_than_drain_s_is_waited_for_by_its_agent_and_by_stop(fake_run):
    run = fake_run({"rollout/0": {}, "trainer/0": {**LONG, "saves_s": 5.0}}, drain_s=1.0)
    run.start()
    run.await_up("rollout/0", "trainer/0")
    told: list[str] = []
    stop_run(run.run_dir, timeout_s=4.0, tell=told.append)
    assert "trainer/0 ended with exit code 130" in run.log("agent-0")
    assert (run.record().state, run.record().failure) == ("stopped", None)
    assert any(line.startswith("saving: ") for line in told), told


def test_a_killed_rollout_comes_back_and_the_others_are_told(fake_run):
    run = fake_run({"rollout/0": {}, "rollout/1": {}, "trainer/0": LONG})
    run.start()
    run.await_up("rollout/0", "rollout/1", "trainer/0")
    os.kill(run.pid("rollout/1"), signal.SIGKILL)
    run.await_up("rollout/1", incarnation=1)
    await_that(lambda: '"worker": "rollout/1", "incarnation": 0' in run.log("trainer-0"), "trainer/0 to hear of it")
    assert "lost" not in run.log("rollout-1")
    ask(run.record().roster[AGENT], "stop", {"reason": "test"}, 5.0)
    assert run.agent.wait(30) == 130


def test_a_rollout_that_keeps_dying_ends_the_run(fake_run):
    run = fake_run({"rollout/0": {}, "trainer/0": LONG}, restarts=1)
    run.start()
    run.await_up("rollout/0")
    first = run.pid("rollout/0")
    os.kill(first, signal.SIGKILL)
    os.kill(run.await_another("rollout/0", first), signal.SIGKILL)
    assert run.agent.wait(30) == 3
    assert run.record().failure.worker == "rollout/0"


def test_a_killed_training_worker_ends_the_run_with_a_cure_where_that_is_wished(fake_run):
    run = fake_run({"rollout/0": {}, "trainer/0": LONG}, on_failure="stop")
    run.start()
    run.await_up("rollout/0", "trainer/0")
    os.kill(run.pid("trainer/0"), signal.SIGKILL)
    assert run.agent.wait(30) == 3
    failure = run.record().failure
    assert "trainer/0 was killed by signal 9 (SIGKILL" in failure.message
    assert f"--run fake-0 --runs-dir {run.run_dir.parent} --resume" in failure.message
    assert run.leftovers() == []


@pytest.mark.parametrize("how, code, message", [("raise", 3, "step 'bonus' raised"), ("exit:2", 2, "exit code 2")])
def test_a_worker_that_fails_ends_the_run_with_its_code_and_reason(fake_run, how, code, message):
    run = fake_run({"rollout/0": {}, "trainer/0": {**LONG, "fail_at": 2, "how": how}})
    assert run.run() == code
    record = run.record()
    assert record.state == "failed"
    assert message in record.failure.message
    assert record.failure.log.endswith("logs/trainer-0.log")
    assert run.leftovers() == []


def test_the_helpers_of_a_killed_worker_do_not_outlive_it(fake_run):
    run = fake_run({"rollout/0": {"helper": True}, "trainer/0": LONG})
    run.start()
    run.await_up("rollout/0", "trainer/0")
    worker = psutil.Process(run.pid("rollout/0"))
    deadline = time.monotonic() + 10
    while not (helpers := worker.children()) and time.monotonic() < deadline:
        time.sleep(0.01)
    worker.kill()
    assert helpers
    assert await_end(helpers, 10.0) == []


def test_a_launcher_that_passes_sigterm_on_to_an_agent_that_got_it_too_does_not_hurry_it(fake_run):
    run = fake_run({"rollout/0": {}, "trainer/0": LONG}, drain_s=600.0)
    agent = run.start()
    run.await_up("rollout/0", "trainer/0")
    for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR1):
        agent.send_signal(number)
    agent.wait(30)
    assert run.record().state == "stopped"
    assert "trainer/0 ended with exit code 130" in run.log("agent-0")


def test_the_second_sigterm_does_not_wait_for_anybody(fake_run):
    run = fake_run({"rollout/0": {"stubborn": True}, "trainer/0": {**LONG, "stubborn": True}}, drain_s=600.0)
    agent = run.start()
    run.await_up("rollout/0", "trainer/0")
    agent.terminate()
    agent.terminate()
    # Two signals may arrive as one: repeat until it is over.
    while agent.poll() is None:
        agent.terminate()
        time.sleep(0.1)
    assert run.record().state == "stopped"
    assert run.leftovers() == []


def test_an_agent_that_is_killed_is_followed_by_one_that_goes_on_as_before(fake_run):
    """Twice. What dies later is started again, a stop is heard, and nothing is left."""
    run = fake_run({"rollout/0": {}, "rollout/1": {}, "trainer/0": LONG})
    agent = run.start()
    run.await_up("rollout/0", "rollout/1", "trainer/0")
    before = {name: run.pid(name) for name in ("rollout/0", "rollout/1", "trainer/0", NURSERY)}
    agent.kill()
    agent.wait(10)
    os.kill(before["rollout/1"], signal.SIGKILL)
    second = run.await_another(AGENT, agent.pid)
    run.await_up("rollout/1", incarnation=1)
    await_that(lambda: '"worker": "rollout/1", "incarnation": 0' in run.log("trainer-0"), "trainer/0 to hear of it")
    assert {name: run.pid(name) for name in before if name != "rollout/1"} == {
        name: pid for name, pid in before.items() if name != "rollout/1"
    }
    os.kill(run.pid("trainer/0"), signal.SIGKILL)
    run.await_up("trainer/0", incarnation=1)
    os.kill(second, signal.SIGKILL)
    run.await_another(AGENT, second)
    assert run.record().term == 1
    os.kill(run.pid("rollout/0"), signal.SIGKILL)
    run.await_up("rollout/0", incarnation=1)
    assert ask(run.record().roster[AGENT], "stop", {"reason": "test"}, 5.0) == {"stopping": True}
    assert (run.await_over().state, run.leftovers()) == ("stopped", [])


FAILS = {**LONG, "fail_at": 2, "how": "raise"}


@pytest.mark.parametrize(
    ("phase", "held", "trainer", "told"),
    [
        ("stopping", "trainer/0", LONG, ("stopped", 130)),
        ("leaving", "rollout/0", {"steps": 2}, ("done", 0)),
        ("failing", "rollout/0", FAILS, ("failed", 3)),
    ],
)
def test_an_agent_that_is_killed_while_the_run_winds_up_is_followed_by_one_that_waits_too(
    fake_run, tmp_path, phase, held, trainer, told
):
    """For a save that goes on, say; and what has ended the run is not forgotten."""
    release = tmp_path / "release"
    behaviour = {"rollout/0": {}, "trainer/0": trainer}
    behaviour[held] = {**behaviour[held], "held_by": str(release)}
    run = fake_run(behaviour, drain_s=600.0)
    agent = run.start()
    run.await_up(held)
    if phase == "stopping":
        agent.terminate()

    def known() -> bool:
        journal = read_journal(run.run_dir, 0, 0)
        return journal is not None and journal.report.phase == phase

    await_that(known, f"a journal that says {phase}")
    agent.kill()
    agent.wait(10)
    second, pid = run.start(), run.pid(held)
    run.await_another(AGENT, agent.pid)
    assert run.pid(held) == pid, "was ended before it was done"
    release.touch()
    second.wait(30)
    record = run.record()
    assert (record.state, record.exit_code) == told
    assert f"{held} ended with exit code {0 if phase == 'leaving' else 130}" in run.log("agent-0")
    assert record.failure is None or "step 'bonus' raised" in record.failure.message
    assert run.leftovers() == []


def test_an_agent_that_is_killed_while_its_nursery_starts_is_followed_too(fake_run):
    run = fake_run({"rollout/0": {}, "trainer/0": {"steps": 20, "step_s": 0.05}})
    agent = run.start(cold=True)
    begun = psutil.Process(agent.pid).children
    await_that(
        lambda: any("distflow.launch.agent.fork_server" in child.cmdline() for child in begun()),
        "the fork server's process",
    )
    agent.kill()
    agent.wait(10)
    assert (run.await_over().state, run.leftovers()) == ("done", [])


def test_workers_whose_nursery_and_then_agent_were_killed_go_on_and_are_watched(fake_run, tmp_path):
    """Nobody is left whose children they are: that they end, and how, is seen all the same."""
    trained = tmp_path / "trained"
    run = fake_run({"rollout/0": {}, "rollout/1": {}, "trainer/0": {**LONG, "until": str(trained)}})
    agent = run.start()
    run.await_up("rollout/0", "rollout/1", "trainer/0")
    before = {name: run.pid(name) for name in ("rollout/0", "rollout/1", "trainer/0")}
    nursery = run.pid(NURSERY)
    os.kill(nursery, signal.SIGKILL)
    run.await_another(NURSERY, nursery)
    agent.kill()
    agent.wait(10)
    run.await_another(AGENT, agent.pid)
    assert {name: run.pid(name) for name in before} == before
    os.kill(before["rollout/1"], signal.SIGKILL)
    run.await_up("rollout/1", incarnation=1)
    trained.touch()
    assert run.await_over().state == "done"
    assert "trainer/0 ended with exit code 0" in run.log("agent-0")
    assert "starting trainer/0, incarnation 1" not in run.log("agent-0")
    assert run.leftovers() == []


def test_of_many_that_start_an_agent_one_has_it(fake_run):
    run = fake_run({"rollout/0": {}, "trainer/0": LONG})
    first = run.start()
    run.await_up("rollout/0", "trainer/0")
    first.kill()
    first.wait(10)
    command = agent_command(run.run_dir, entry=FAKE)
    agents = [start_agent(run.run_dir, command) for _ in range(4)]
    pid = run.await_another(AGENT, first.pid)
    part, names = host_part(run.record()), (AGENT, NURSERY, "rollout/0", "trainer/0")
    # The fork server may have started one more.
    await_that(lambda: len(processes_of(part)) == len(names), "the other agents to leave")
    assert {name: mark.pid for name, mark in run.record().pids.items()} == {
        name: pid if name == AGENT else run.pid(name) for name in names
    }
    assert {agent.poll() for agent in agents if agent.pid != pid} == {2}
    stop_run(run.run_dir, timeout_s=10.0)
    assert run.record().state == "stopped"


def test_a_worker_that_leaves_in_the_midst_of_its_work_is_started_again_and_named(fake_run):
    """`os._exit(0)` in a reward: neither the end of its work nor a reason to wait for ever."""
    run = fake_run({"rollout/0": {"fail_at": 3, "how": "leave:0"}, "trainer/0": LONG}, restarts=1)
    run.start()
    run.await_up("rollout/0", incarnation=1)
    assert "rollout/0 ended with exit code 0 before its work was done" in run.log("agent-0")
    os.kill(run.pid("rollout/0"), signal.SIGKILL)
    assert run.agent.wait(30) == 3


def test_a_worker_that_leaves_again_and_again_ends_the_run_and_is_named(fake_run):
    run = fake_run({"rollout/0": {"fail_at": 3, "how": "leave:0"}, "trainer/0": LONG}, restarts=0)
    assert run.run() == 3
    message = run.record().failure.message
    assert "rollout/0 ended with exit code 0 before its work was done (does a plug-in call os._exit?)" in message


def test_workers_survive_their_nursery_and_are_still_watched(fake_run):
    run = fake_run({"rollout/0": {}, "trainer/0": LONG})
    run.start()
    run.await_up("rollout/0", "trainer/0")
    before = run.pid(NURSERY), run.pid("trainer/0")
    os.kill(before[0], signal.SIGKILL)
    deadline = time.monotonic() + 20
    while NURSERY not in run.record().pids or run.pid(NURSERY) == before[0]:
        assert time.monotonic() < deadline
        time.sleep(0.02)
    assert run.pid("trainer/0") == before[1]
    os.kill(run.pid("rollout/0"), signal.SIGKILL)
    run.await_up("rollout/0", incarnation=1)
    os.kill(run.pid("trainer/0"), signal.SIGKILL)
    run.await_up("trainer/0", incarnation=1)
    assert run.record().term == 1
    stop_run(run.run_dir, timeout_s=10.0)
    assert run.agent.wait(30) == 130


def test_a_training_worker_that_is_killed_again_and_again_ends_the_run(fake_run):
    run = fake_run({"rollout/0": {}, "trainer/0": LONG}, restarts=1)
    run.start()
    for incarnation in (0, 1):
        run.await_up("trainer/0", incarnation=incarnation)
        os.kill(run.pid("trainer/0"), signal.SIGKILL)
    assert run.agent.wait(30) == 3
    message = run.record().failure.message
    assert "SIGKILL" in message
    assert "2 times in a row now since the beginning of the run (limits.restarts: 1)" in message
    assert run.leftovers() == []


def test_every_process_of_a_run_carries_its_title(fake_run):
    run = fake_run({"rollout/0": {}, "trainer/0": LONG})
    run.start()
    run.await_up("rollout/0", "trainer/0")
    titles = {name: " ".join(psutil.Process(mark.pid).cmdline()).strip() for name, mark in run.record().pids.items()}
    assert titles == {name: f"distflow fake-0 {name}" for name in ("rollout/0", "trainer/0", AGENT, NURSERY)}


def test_a_second_agent_in_a_run_folder_is_refused(fake_run):
    run = fake_run({"rollout/0": {}, "trainer/0": LONG})
    run.start()
    run.await_up("rollout/0", "trainer/0")
    command = [sys.executable, "-m", "distflow.launch.agent.agent", str(run.run_dir), "--entry", FAKE]
    second = subprocess.run(command, capture_output=True, text=True, env=environment(), timeout=30, check=False)
    assert second.returncode != 0
    assert "this run is still running" in second.stderr
    assert run.record().pids[AGENT].pid == run.agent.pid


def test_a_process_of_another_machine_is_not_looked_for_here(fake_run):
    run = fake_run({"rollout/0": {}, "trainer/0": LONG})
    run.start()
    run.await_up("rollout/0", "trainer/0")
    here = run.record().pids["rollout/0"]
    there = structs.replace(here, space="another machine/pid:[1]")
    assert running(here)
    assert not running(there)
    assert elsewhere(there)
    assert not elsewhere(here)
