"""What a host agent costs, by workers and hosts. No process, no socket: the agent's own code alone.

    python -m benchmarks.agents [--workers 16 128 1000 4000] [--rounds 9]
    python -m benchmarks.agents --mesh 16 128 1024 4096 [--seconds 5] [--deaths 10] [--loss 0.1] [--cut 40]
    python -m benchmarks.agents --live 64

First, turns of the agent's loop, with eight workers a host. *quiet*: nothing new was heard; *news*: another host's
report has changed, so `run.json` is composed and written. Medians of CPU time, in milliseconds.

With `--mesh`, what the agents tell each other: all agents of a mesh in one process, in virtual time, with messages
encoded and decoded. Of each agent and second, once all know all: messages sent, bytes sent, and CPU time of what it
sends and hears (that of the simulated network is in it), and function calls, since thousands of agents in one process
share one cache, which a host does not. Then one agent dies while another has something to report: after how many
seconds everybody knows (of several deaths, one after another, the longest time), and how many living agents were called
silent by anybody until then. `--loss`: so large a share of the messages is lost; `--cut`: no message of an agent
reaches so many others, drawn at random. `--live` does the same with a process for each agent, on real sockets; there
the CPU time is that of the processes.
"""

from __future__ import annotations

import argparse
import cProfile
import gc
import math
import os
import random
import resource
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from multiprocessing import get_context
from multiprocessing.context import ForkProcess
from pathlib import Path
from typing import Any
from unittest import mock

import psutil
from msgspec import structs

from distflow.cluster.host_report import HostedWorker, HostReport, to_wire
from distflow.cluster.processes import HostEntry, ProcessId, agent_name, nursery_name
from distflow.comm.beats import BEAT, BEAT_S
from distflow.comm.keys import key_file, make_keys, write_keys
from distflow.comm.message import decode, encode
from distflow.comm.roll_call import RollCall
from distflow.launch.agent import agent as agent_module
from distflow.launch.agent import record_writer
from distflow.launch.agent.agent import Agent
from distflow.launch.run.folder import claim
from distflow.launch.run.process_table import process_id
from distflow.launch.run.record import RunRecord, WorkerEntry
from distflow.sim.agent_mesh import KNOWN_S, Mesh
from tests.launch.real_meshes import LiveMesh

WORKERS_A_HOST = 8
KNOWN_WITHIN_S = 15.0
STARTS_WITHIN_S, LIVE_S, ENDS_WITHIN_S = 300.0, 20.0, 10.0
STEP_S = 0.1


class Wire:
    """In place of an Endpoint: encodes what is sent, and forgets it."""

    network_address = "tcp://10.0.0.0:1"

    def __init__(self, name: str, incarnation: int, roster: Mapping[str, str], **more: object) -> None:
        self.roster = dict(roster)
        self._name, self._incarnation = name, incarnation

    def know(self, name: str, address: str) -> None:
        """Take an address."""
        self.roster[name] = address

    learn = know

    def disconnect(self, name: str) -> None:
        """There is no connection."""

    def send(self, to: str, kind: str, body: Mapping[str, Any]) -> None:
        """Encode a message."""
        encode(kind, self._name, self._incarnation, body)


class Quiet:
    """In place of a WorkerGroup: starts nobody."""

    def __init__(self, *parts: object) -> None:
        self.pids: dict[str, ProcessId] = {}
        self.inputs: list[object] = []

    def do(self, actions: Sequence[object]) -> None:
        """Nothing is left to be done in a run that goes on."""
        assert not list(actions), "a run that goes on undisturbed"

    def tell(self, what: object) -> None:
        """Nobody listens."""


def world(workers: int, folder: Path) -> RunRecord:
    """Of a run with one training worker a host."""
    hosts = workers // WORKERS_A_HOST
    entries = [WorkerEntry(f"rollout/{i}", False, 1, i % hosts) for i in range(workers - hosts)]
    entries += [WorkerEntry(f"trainer/{i}", True, 1, i) for i in range(hosts)]
    names = [*(entry.name for entry in entries), *map(agent_name, range(hosts))]
    addresses = tuple(HostEntry(f"node{i}", f"10.0.{i // 250}.{i % 250}") for i in range(hosts))
    roster = dict.fromkeys(names, "")
    record = RunRecord(folder.name, str(folder), 1000, tuple(entries), roster, 30.0, 3, hosts=addresses)
    write_keys(key_file(folder), make_keys())
    return record


def report(record: RunRecord, host: int) -> HostReport:
    """Of a host whose workers all run."""
    entry = structs.replace(record.hosts[host], agent=f"tcp://10.0.0.{host}:1", nonce="n")
    own = [worker for worker in record.workers if worker.host == host]
    there = {worker.name: HostedWorker(worker.trains, 1, "running", address=f"tcp://10.0.0.{host}:2") for worker in own}
    names = [*there, agent_name(host), nursery_name(host)]
    return HostReport(
        host, entry, 1, workers=there, marks={name: ProcessId(1000 + host, 1.5, "there") for name in names}
    )


def make(record: RunRecord) -> Agent:
    """The agent of the first host, which writes `run.json`, once all workers run everywhere."""
    agent = Agent(record, 0, "none:none", claim(record.path), None)
    for life in agent._core.lives.values():
        life.state, life.pid = "running", os.getpid()
        agent._worker_group.pids[life.entry.name] = process_id(os.getpid())
        body = {"address": f"tcp://10.0.0.0:{len(agent._worker_group.pids)}"}
        agent._peers.here(decode(encode("here", life.entry.name, 0, body)))
    now = time.monotonic()
    agent._peers.mesh.tick(now)
    for host in agent._peers.mesh.others:
        agent._peers.hear(beat(record, host, report(record, host)), now)
    turn(agent)
    return agent


def beat(record: RunRecord, host: int, *reports: HostReport) -> Any:
    """A message from the agent of a host, as it comes in."""
    seen = [[number, 10**6, 10**6] for number in record.numbers]
    body = {"from": host, "seen": seen, "reports": [to_wire(one) for one in reports]}
    return decode(encode(BEAT, agent_name(host), record.launch_term, body))


def turn(agent: Agent) -> None:
    """What follows the wait in the agent's loop."""
    agent._conclude()
    agent._worker_group.do(agent._core.tick(time.monotonic()))
    agent._publish()


def median_ms(rounds: int, work: Callable[[int], None]) -> float:
    """Of `work`, called with the number of the round."""
    found = []
    for number in range(rounds):
        begin = time.thread_time()
        work(number)
        found.append(1e3 * (time.thread_time() - begin))
    return statistics.median(found)


def measure(workers: int, rounds: int) -> dict[str, float]:
    """Milliseconds by name."""
    with tempfile.TemporaryDirectory() as folder:
        record = world(workers, Path(folder))
        agent = make(record)
        one = report(record, 1)
        changed = [
            beat(
                record,
                1,
                structs.replace(one, serial=2 + n, marks={**one.marks, "trainer/1": ProcessId(n, 1.0, "there")}),
            )
            for n in range(rounds)
        ]

        def news(number: int) -> None:
            agent._peers.hear(changed[number], time.monotonic())
            turn(agent)

        # What agents tell each other is measured for itself.
        with mock.patch.object(agent._peers, "tick", return_value=None):
            quiet, fresh = median_ms(rounds, lambda number: turn(agent)), median_ms(rounds, news)
        return {"quiet": quiet, "news": fresh}


def mesh_of(hosts: int, loss: float, cut: int) -> Mesh:
    """In which all know all."""
    mesh = Mesh(hosts, loss=loss)
    mesh.everybody_knows_everything()
    draw = random.Random(0)
    mesh.cut = {(one, other) for one in range(hosts) for other in draw.sample(range(hosts), cut)}
    # What lives as long as the mesh is not searched for garbage again and again: a host has one agent, not thousands.
    gc.collect()
    gc.freeze()
    return mesh


def death(mesh: Mesh, dead: int) -> tuple[float, float, set[int]]:
    """One agent dies and another has something to report: seconds until all know of either, and whom they wronged."""
    died_at, told_s, silent_s, wronged = mesh.now, math.inf, math.inf, set[int]()
    del mesh.agents[dead]
    mesh.publish(1, reason=f"a worker of host {dead} was killed")
    agents, serial = mesh.agents.values(), mesh.agents[1].own.serial
    while math.isinf(max(told_s, silent_s)) and mesh.now < died_at + KNOWN_WITHIN_S:
        mesh.run_for(STEP_S)
        after = mesh.now - died_at
        if math.isinf(told_s) and all(agent.reports[1].serial >= serial for agent in agents):
            told_s = after
        if math.isinf(silent_s) and all(agent.unheard_s(dead) >= 2 * BEAT_S for agent in agents):
            silent_s = after
        wronged |= {host for agent in agents for host in agent.silent(KNOWN_S)} & mesh.agents.keys()
    return told_s, silent_s, wronged


def measure_mesh(hosts: int, seconds: int, loss: float, cut: int, deaths: int) -> str:
    """A line about a mesh of so many hosts."""
    mesh = mesh_of(hosts, loss, cut)
    # Long enough for two rolls to be called.
    mesh.run_for(2 * RollCall.length_s(hosts))
    mesh.messages = mesh.bytes = 0
    begin = time.process_time()
    mesh.run_for(float(seconds))
    cpu, each = time.process_time() - begin, hosts * seconds
    cost = f"{mesh.messages / each:.1f} messages, {mesh.bytes / each:.0f} bytes, {1e3 * cpu / each:.2f} ms CPU"
    profile = cProfile.Profile()
    profile.runcall(mesh.run_for, 1.0)
    cost += f", {sum(entry.callcount for entry in profile.getstats()) / hosts:.0f} function calls"
    found = [death(mesh, hosts // 2 + number) for number in range(deaths)]
    told_s, silent_s = max(told for told, _, _ in found), max(silent for _, silent, _ in found)
    wronged = set[int]().union(*(living for _, _, living in found))
    known = f"report known after {told_s:.1f} s, silence {silent_s:.1f} s, {len(wronged)} living called silent"
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10
    return f"{hosts} hosts, each agent and second: {cost}; {known}; {memory} MiB of this process at most"


def measure_live(hosts: int) -> str:
    """A line about agents that are processes of their own, without workers, on this machine."""
    processes: list[ForkProcess] = []

    def start(target: Callable[..., None], args: tuple[Any, ...]) -> Callable[[], None]:
        process = get_context("fork").Process(target=target, args=args)
        process.start()
        processes.append(process)
        return lambda: process.join(ENDS_WITHIN_S) or process.kill()

    def cpu_s() -> float:
        return sum(sum(psutil.Process(process.pid).cpu_times()[:2]) for process in processes)

    with tempfile.TemporaryDirectory() as folder:
        mesh = LiveMesh(Path(folder), hosts, start)
        try:
            mesh.all_know("all", STARTS_WITHIN_S)
            before = cpu_s()
            time.sleep(LIVE_S)
            cost = 1e3 * (cpu_s() - before) / LIVE_S / hosts
            begin, dead = time.monotonic(), hosts // 2
            mesh.tell(1, "publish")
            told_s = mesh.all_know("report", STARTS_WITHIN_S) - begin
            begin = time.monotonic()
            processes[dead].kill()
            mesh.kill(dead)
            silent_s = mesh.all_know("silence", STARTS_WITHIN_S) - begin
        finally:
            mesh.end()
    known = f"report known after {told_s:.1f} s, silence {silent_s:.1f} s"
    return f"{hosts} live agents, each {cost:.1f} ms CPU a second; {known}"


def main() -> None:
    """A line for each number of workers, or of hosts."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, nargs="+", default=[16, 128, 1000, 4000])
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--mesh", type=int, nargs="+", default=[], help="hosts: what agents tell each other instead")
    parser.add_argument(
        "--live", type=int, nargs="+", default=[], help="hosts: the same, with a process for each agent"
    )
    parser.add_argument("--seconds", type=int, default=5, help="of virtual time that are measured")
    parser.add_argument("--deaths", type=int, default=1, help="in a mesh, one after another")
    parser.add_argument("--loss", type=float, default=0.0, help="share of the messages of a mesh")
    parser.add_argument("--cut", type=int, default=0, help="agents that no message of an agent reaches")
    chosen = parser.parse_args()
    if any(2 * chosen.deaths > hosts for hosts in chosen.mesh):
        parser.error(
            f"--deaths {chosen.deaths}: at most half of the hosts of each mesh can die, of {min(chosen.mesh)} here"
        )
    for hosts in chosen.mesh:
        print(measure_mesh(hosts, chosen.seconds, chosen.loss, chosen.cut, chosen.deaths), flush=True)
    for hosts in chosen.live:
        print(measure_live(hosts), flush=True)
    if chosen.mesh or chosen.live:
        return
    with mock.patch.object(record_writer, "Endpoint", Wire), mock.patch.object(agent_module, "WorkerGroup", Quiet):
        for workers in chosen.workers:
            found = measure(workers, chosen.rounds)
            figures = ", ".join(f"{name} {value:.2f} ms" for name, value in found.items())
            print(f"{workers} workers on {workers // WORKERS_A_HOST} hosts: {figures}", flush=True)


if __name__ == "__main__":
    main()
