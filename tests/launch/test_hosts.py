"""Two and three agents with real processes, on loopback addresses; the workers are fakes."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from distflow.comm.client import ask
from distflow.launch.run.process_table import await_end, host_part, processes_of
from tests.launch.conftest import await_that
from tests.launch.many import Hosts

LONG = {"steps": 10_000}
TWO = {"rollout/0": (0, {}), "trainer/0": (0, LONG), "rollout/1": (1, {}), "rollout/2": (1, {})}
MakeHosts = Callable[..., Hosts]


@pytest.fixture
def hosts(tmp_path: Path) -> Iterator[MakeHosts]:
    made: list[Hosts] = []

    def make(workers, *, shared: bool = True, **limits) -> Hosts:
        made.append(Hosts(tmp_path / str(len(made)), workers, shared=shared, **limits))
        return made[-1]

    yield make
    for run in made:
        run.end()


both = pytest.mark.parametrize("shared", [True, False], ids=["one folder", "a folder each"])


def until(trained: Path) -> dict:
    """Training goes on until this file exists."""
    return {**TWO, "trainer/0": (0, {**LONG, "until": str(trained)})}


@both
def test_a_run_is_done_everywhere_and_nothing_is_left(hosts: MakeHosts, shared: bool):
    run = hosts({**TWO, "trainer/0": (0, {"steps": 20, "step_s": 0.05})}, shared=shared)
    run.start()
    assert run.exit_codes() == [0, 0]
    for host in (0, 1):
        record = run.record(host)
        assert (record.state, record.exit_code, record.failure, record.pids) == ("done", 0, None, {})
        assert {entry.name: entry.host for entry in record.workers} == {name: where for name, (where, _) in TWO.items()}
    assert run.leftovers() == []


def test_all_training_workers_must_have_left_before_the_others_do(hosts: MakeHosts):
    trainers = {"trainer/0": (0, {"steps": 5}), "trainer/1": (1, {"steps": 40, "step_s": 0.05})}
    run = hosts({**trainers, "rollout/0": (0, {}), "rollout/1": (2, {"step_s": 0.1})})
    run.start()
    assert run.exit_codes() == [0, 0, 0]
    assert (run.record().state, run.leftovers()) == ("done", [])


def test_every_worker_gets_the_addresses_of_all_as_it_reaches_them(hosts: MakeHosts):
    run = hosts(TWO)
    run.start()
    for line in ("knows rollout/1 tcp", "knows rollout/2 tcp", "knows agent/1 tcp"):
        run.await_log("rollout/0", line)
    for line in ("knows rollout/0 tcp", "knows trainer/0 tcp", "knows agent/0 tcp"):
        run.await_log("rollout/1", line)
    assert "knows rollout/2 tcp" not in run.log("rollout/1")
    await_that(lambda: all(run.record().roster.values()), "all addresses in run.json")
    assert {address.partition(":")[0] for address in run.record().roster.values()} == {"tcp"}


@both
def test_a_death_is_told_on_all_hosts_once_and_the_new_address_too(hosts: MakeHosts, shared: bool):
    run = hosts(TWO, shared=shared)
    run.start()
    run.await_up()
    before = {name: run.log(name).count("knows rollout/1 tcp") for name in ("trainer/0", "rollout/0")}
    former = address_of(run, "rollout/1")
    run.kill("rollout/1")
    run.await_log("rollout/1", "rollout/1 incarnation 1 is up")
    for name in ("trainer/0", "rollout/0", "rollout/2"):
        run.await_log(name, 'lost {"worker": "rollout/1", "incarnation": 0')
    for name, count in before.items():
        await_that(lambda n=name, c=count: run.log(n).count("knows rollout/1 tcp") > c, f"the new address at {name}")
        assert run.log(name).count('lost {"worker": "rollout/1"') == 1
    await_that(lambda: address_of(run, "rollout/1") not in ("", former), "the new address for clients of another host")


def address_of(run: Hosts, name: str) -> str:
    """As any agent tells it."""
    answer = run.ask(0, "status", {})
    assert answer is not None
    return str(answer["roster"][name])


@both
@pytest.mark.parametrize("asked", [0, 1])
def test_a_stop_may_come_to_any_agent(hosts: MakeHosts, shared: bool, asked: int):
    run = hosts(TWO, shared=shared)
    run.start()
    run.await_up()
    assert run.ask(asked, "stop", {"reason": "test"}) == {"stopping": True}
    assert run.exit_codes() == [130, 130]
    assert [run.record(host).state for host in (0, 1)] == ["stopped", "stopped"]
    assert run.leftovers() == []


def test_saving_on_one_host_gives_those_that_wait_for_it_on_others_time(hosts: MakeHosts, tmp_path: Path):
    released = tmp_path / "released"
    held, saving = {**LONG, "held_by": str(released)}, {**LONG, "saves_s": 6.0}
    run = hosts({"trainer/0": (0, held), "trainer/1": (1, saving)}, drain_s=3.0)
    run.start()
    run.await_up()
    run.ask(0, "stop", {"reason": "wanted"})
    run.await_log("agent/1", "trainer/1 ended with exit code 130")
    released.touch()
    assert run.exit_codes() == [130, 130]
    assert "sent SIG" not in run.log("agent/0") + run.log("agent/1")
    assert run.record().failure is None


@both
def test_a_worker_that_fails_on_one_host_ends_the_run_on_all_with_its_reason(hosts: MakeHosts, shared: bool):
    run = hosts({**TWO, "rollout/2": (1, {"fail_at": 30, "how": "raise"})}, shared=shared)
    run.start()
    assert run.exit_codes() == [3, 3]
    for host in (0, 1):
        record = run.record(host)
        assert (record.state, record.exit_code) == ("failed", 3)
        assert (record.failure.worker, record.failure.message) == ("rollout/2", "step 'bonus' raised")
        assert Path(record.failure.log).parent.parent == run.folders[host]
        assert "rollout/2 incarnation 0 is up" in Path(record.failure.log).read_text()
    assert run.leftovers() == []


@both
def test_an_agent_that_is_killed_is_followed_by_one_where_the_others_look_for_it(
    hosts: MakeHosts, shared: bool, tmp_path: Path
):
    """It has the same address, hears what has happened meanwhile, and starts again what dies on its host."""
    trained = tmp_path / "trained"
    run = hosts(until(trained), shared=shared)
    run.start()
    run.await_up()
    run.agents[0].kill()
    run.kill("rollout/1")
    run.await_log("agent/0", "the previous agent was killed")
    run.await_log("trainer/0", 'lost {"worker": "rollout/1", "incarnation": 0')
    run.await_log("rollout/1", "rollout/1 incarnation 1 is up")
    run.kill("rollout/0")
    run.await_log("rollout/0", "rollout/0 incarnation 1 is up")
    run.await_log("rollout/2", 'lost {"worker": "rollout/0", "incarnation": 0')
    lives = {**dict.fromkeys(TWO, 0), "rollout/0": 1, "rollout/1": 1}

    def seen() -> dict[str, int]:
        answer = run.ask(0, "status", {})
        return {} if answer is None else {row["name"]: row["incarnation"] for row in answer["workers"]}

    # The other host's report takes a beat or two to reach the new agent.
    await_that(lambda: seen() == lives, "the lives of all workers in its status")
    trained.touch()
    assert run.exit_codes(1) == [0]
    await_that(lambda: run.record(0).over and run.leftovers() == [], "the end of what the second agent sees to")
    assert [run.record(host).state for host in (0, 1)] == ["done", "done"]


def test_the_run_goes_on_when_an_agent_and_its_nursery_are_killed(hosts: MakeHosts, tmp_path: Path):
    """Its workers are told by another agent what theirs cannot tell, and say themselves how they ended."""
    trained = tmp_path / "trained"
    run = hosts(until(trained))
    run.start()
    run.await_up()
    part = host_part(run.record(), 0)
    run.kill_for_good(0)
    run.kill("rollout/1")
    run.await_log("rollout/1", "rollout/1 incarnation 1 is up")
    run.await_log("agent/1", "taking over run.json")
    run.await_log("trainer/0", 'lost {"worker": "rollout/1", "incarnation": 0')
    trained.touch()
    assert run.exit_codes(1) == [0]
    assert await_end(processes_of(part), 30.0) == []
    assert run.record(0).state == "done"


def test_the_run_ends_in_order_when_another_agent_and_its_nursery_are_killed(hosts: MakeHosts, tmp_path: Path):
    trained = tmp_path / "trained"
    run = hosts(until(trained))
    run.start()
    run.await_up()
    part = host_part(run.record(), 1)
    run.kill_for_good(1)
    await_that(lambda: run.record().silent == (1,), "the silence in run.json")
    trained.touch()
    assert run.exit_codes(0) == [0]
    assert await_end(processes_of(part), 30.0) == []
    assert run.record().state == "done"


def test_a_training_worker_whose_end_nobody_saw_is_not_taken_for_done(hosts: MakeHosts, tmp_path: Path):
    """Also if the others have finished, as they have here before anybody knows that the host is silent."""
    trained = tmp_path / "trained"
    run = hosts({**until(trained), "trainer/1": (1, LONG)}, shared=False, host_silence_s=8.0)
    run.start()
    run.await_up()
    run.lose(1)
    trained.touch()
    assert run.exit_codes(0) == [3], run.log("agent/0")
    assert "trainer/0 ended with exit code 0" in run.log("agent/0")
    assert "it is unknown how trainer/1 ended" in run.record().failure.message


def test_a_run_that_waits_for_a_lost_host_can_be_stopped(hosts: MakeHosts):
    """Its own training worker was ended: with one of two it is not with most of them."""
    run = hosts({**TWO, "trainer/1": (1, LONG), "trainer/0": (0, LONG)})
    run.start()
    run.await_up()
    run.lose(1)
    run.await_log("agent/0", "trainer/0 ended with")
    await_that(lambda: run.record().silent == (1,), "the silence in run.json")
    run.ask(0, "stop", {"reason": "nothing is trained any more"})
    assert run.exit_codes(0) == [130], run.log("agent/0")


def test_an_agent_that_nobody_tells_to_begin_ends_and_cleans_up(hosts: MakeHosts):
    run = hosts(TWO, connect_s=1.0)
    agent = run.start_agent(1)
    assert agent.wait(timeout=30) == 3
    assert "agent/1 received no start signal within limits.connect_s (1 s)" in run.log("agent/1")
    assert not (run.folders[1] / "logs" / "rollout-1.log").exists()
    assert run.leftovers() == []


def test_an_agent_whose_fork_server_breaks_before_it_may_begin_says_why(hosts: MakeHosts):
    run = hosts(TWO)
    assert run.start_agent(1, entry="distflow.no_such_module:run_worker").wait(timeout=30) == 1
    assert "No module named 'distflow.no_such_module'" in run.record(1).failure.message
    assert run.leftovers() == []


def test_a_stranger_cannot_make_an_agent_begin(hosts: MakeHosts):
    from distflow.comm.keys import make_keys
    from distflow.errors import ProtocolError

    run = hosts(TWO)
    run.start_agent(0)
    with pytest.raises(ProtocolError, match="refused the connection"):
        ask(run.addresses["0"], "mesh.begin", {"agents": run.addresses}, 5.0, make_keys())


def test_titles_and_logs_tell_the_hosts_apart(hosts: MakeHosts):
    run = hosts(TWO)
    run.start()
    run.await_up()
    titles = {name: " ".join(psutil.Process(mark.pid).cmdline()).strip() for name, mark in run.record().pids.items()}
    processes = ("agent/0", "agent/1", "nursery/0", "nursery/1")
    assert titles == {name: f"distflow many {name}" for name in (*TWO, *processes)}
    for host in (0, 1):
        found = {process.pid for process in processes_of(host_part(run.record(), host))}
        names = [*processes[host::2], *(name for name, (where, _) in TWO.items() if where == host)]
        assert found == {run.pid(name) for name in names}


def test_a_stopped_agent_is_slow_and_not_gone(hosts: MakeHosts, tmp_path: Path):
    trained = tmp_path / "trained"
    run = hosts(until(trained), host_silence_s=30.0)
    run.start()
    run.await_up()
    os.kill(run.agents[1].pid, signal.SIGSTOP)
    trained.touch()
    await_that(lambda: len(processes_of(host_part(run.record(), 0))) == 2, "host 0's end")
    assert run.agents[0].poll() is None
    os.kill(run.agents[1].pid, signal.SIGCONT)
    assert run.exit_codes() == [0, 0]
    assert run.record().state == "done"
