"""`launch --env` with real processes on the loopback device; the agents are stand-ins."""

from __future__ import annotations

import json
import signal
import socket
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import replace
from ipaddress import ip_address

import pytest

from distflow.launch.deploy.fan_out import own_addresses
from distflow.launch.deploy.job_bootstrap import first_of_node, seen_from_outside, stand_by, with_address
from distflow.launch.deploy.job_environment import JobNode
from distflow.launch.deploy.job_rendezvous import Hello, RendezvousFailed
from distflow.launch.run.record import read_record
from tests.launch.conftest import FAKE_WORKERS, await_that
from tests.launch.hosts.conftest import WAIT_S
from tests.warm_start import WarmProcess

KEY = "0123456789abcdef" * 4


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]


def hello(rank: int, address: str) -> Hello:
    return Hello(rank, 2, "life", "host", address, "python", None)


def test_a_name_that_nothing_resolves_gives_way_to_the_address_that_the_job_tells():
    node = JobNode(1, 2, "no-such-name.invalid", 29400, spare="10.0.0.7")
    assert with_address(node).master == "10.0.0.7"
    assert with_address(replace(node, master="localhost")).master == "localhost"
    assert with_address(replace(node, spare=None)).master == "no-such-name.invalid"


def test_a_node_whose_own_name_is_a_loopback_address_is_known_by_the_one_on_the_way_to_the_others():
    outside = [address for address in sorted(own_addresses()) if not ip_address(address.partition("%")[0]).is_loopback]
    if not outside:
        pytest.skip("this machine has loopback addresses only")
    far = hello(1, outside[0])
    assert seen_from_outside({0: hello(0, "127.0.1.1"), 1: far})[0].address == outside[0]
    assert seen_from_outside({0: hello(0, "10.9.9.9"), 1: far})[0].address == "10.9.9.9"
    near = hello(1, "127.0.0.1")
    assert seen_from_outside({0: hello(0, "127.0.0.1"), 1: near})[0].address == "127.0.0.1"


class Job:
    """Starts the processes of a job, each as if on a node of its own."""

    def __init__(self, hosts):
        self.hosts = hosts
        self.port = free_port()
        self.processes = []

    def start(self, rank, nodes, *arguments, key=KEY, local=(0, 1), python=None):
        command = ["launch", "quickstart", "--env", "--runs-dir", str(self.hosts.runs_dir), *arguments]
        environment = self.hosts.environment() | {
            "DISTFLOW_RUN_KEY": key,
            "GROUP_RANK": str(rank),
            "LOCAL_RANK": str(local[0]),
            "LOCAL_WORLD_SIZE": str(local[1]),
            "WORLD_SIZE": str(nodes * local[1]),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(self.port),
        }
        python = str(python or self.hosts.python)
        self.processes.append(WarmProcess("distflow.launch", command, environment=environment, python=python))
        self.hosts.heads.append(self.processes[-1])
        return self.processes[-1]

    def end(self):
        return [(process.communicate(timeout=WAIT_S), process.returncode)[::-1] for process in self.processes]


@pytest.fixture
def job(hosts):
    return Job(hosts)


def test_nodes_meet_start_their_agents_and_stay_until_the_end(hosts, job):
    head, *_ = [job.start(rank, 3) for rank in range(3)]
    run_dir = hosts.runs_dir / "quickstart"
    await_that(lambda: len(list((run_dir / "agents").glob("*.json"))) == 3, "mesh.begin at all three agents")
    told = [json.loads((run_dir / "agents" / f"{n}.json").read_text()) for n in range(3)]
    assert sorted(name for one in told for name in one["workers"]) == ["rollout/0", "rollout/1", "trainer/0"]
    # Interrupted before it watches, it would undo the start.
    await_that(lambda: any((run_dir / "agents").glob("*.asked")), "a head that watches")
    assert all(process.poll() is None for process in job.processes)
    head.send_signal(signal.SIGINT)
    ends = job.end()
    assert [code for code, _ in ends] == [130, 0, 0], ends
    assert len(list((run_dir / "agents").glob("*.ended"))) == 3


def test_a_run_of_real_agents_ends_with_its_exit_code_on_all_nodes(hosts, job):
    fake = "layout.pools.trainer.backend_options={fake: {steps: 3}}"
    for rank in range(2):
        job.start(rank, 2, fake, "run.training_steps=3", *FAKE_WORKERS, python=sys.executable)
    ends = job.end()
    assert [code for code, _ in ends] == [0, 0], ends
    record = read_record(hosts.runs_dir / "quickstart")
    assert (record.state, {entry.host for entry in record.workers}) == ("done", {0, 1})


def test_further_processes_of_a_node_wait_and_end_with_its_first(hosts, job):
    for local in range(2):
        job.start(0, 1, "layout.pools.rollout.count=1", local=(local, 2))
    await_that(lambda: (hosts.runs_dir / "quickstart/agents/0.json").exists(), "mesh.begin")
    assert job.processes[1].poll() is None
    job.processes[0].send_signal(signal.SIGTERM)
    assert [code for code, _ in job.end()] == [130, 130]


@pytest.mark.parametrize(("error", "code"), [(KeyboardInterrupt(), 130), (RendezvousFailed("nobody came"), 3)])
def test_further_processes_of_a_node_end_as_its_first_does_if_that_fails(error, code, monkeypatch, tmp_path):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    node = JobNode(0, 2, "127.0.0.1", 29400)
    others = []

    def fail(pool):
        with first_of_node(node, {}):
            others.append(pool.submit(stand_by, node, {}, 10.0))
            assert not wait(others, timeout=0.5).done
            raise error

    with ThreadPoolExecutor(1) as pool:
        with pytest.raises(type(error)):
            fail(pool)
        assert others[0].result(10.0) == code


def test_a_node_that_does_not_come_is_named_and_nobody_stays(hosts, job):
    for rank in (0, 2):
        job.start(rank, 3, "limits.connect_s=3.0")
    (first, (_, err)), (other, (_, told)) = job.end()
    assert (first, other) == (3, 3), (err, told)
    assert "1 of 3 nodes did not join at tcp://127.0.0.1:" in err
    assert ": node 1 — were they started" in err
    assert not hosts.runs_dir.exists()


def test_a_node_with_another_secret_is_not_let_in(hosts, job):
    job.start(0, 2, "limits.connect_s=4.0")
    job.start(1, 2, "limits.connect_s=4.0", key="f" * 64)
    (first, (_, err)), (other, (_, told)) = job.end()
    assert (first, other) == (3, 3)
    assert "with another DISTFLOW_RUN_KEY were refused" in err
    assert "is DISTFLOW_RUN_KEY the same on both?" in told


def test_what_keeps_node_0_from_starting_ends_the_other_nodes_too(hosts, job):
    for rank in range(2):
        job.start(rank, 2, "--set", "DISTFLOW_TEST_REFUSE=1")
    (first, (_, err)), (other, (_, told)) = job.end()
    assert (first, other) == (2, 3)
    assert "its agent did not start: the stand-in agent refuses to start" in err
    assert "node 0 gave up — see its output" in told
    assert not hosts.runs_dir.exists()
