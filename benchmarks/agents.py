"""CPU and messages of a host agent, by workers and hosts.

    python -m benchmarks agents [--hosts 2 16 125 500 1024 4096] [--rounds 9]
    python -m benchmarks agents --mesh 16 128 1024 4096 [--seconds 5] [--deaths 10] [--loss 0.1] [--cut 40]
    python -m benchmarks agents --live 64

First, turns of the agent's loop, with eight workers a host. *quiet*: nothing new was heard; *news*: in another host's
report one process and the address of one worker have changed, of which our workers are told (what they are sent is
encoded, and what is heard was decoded before). *burst*: so have 100 hosts' since the last turn. *silent*: nothing new
was heard, and a host has been silent for a while; *broken*: nor there, and the training workers are to restart, for
which this host waits. All of these of an agent that does not write `run.json`; *writes*: one that does, with news of
one host. *begin*: what the first `mesh.begin` takes. Medians of CPU time, in milliseconds.

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
import hashlib
import math
import os
import random
import resource
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
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
from distflow.comm.endpoint import Endpoint
from distflow.comm.keys import key_file, make_keys, write_keys
from distflow.comm.message import decode, encode
from distflow.comm.outbox import Delivery, delivered
from distflow.comm.roll_call import RollCall
from distflow.launch.agent import agent as agent_module
from distflow.launch.agent import record_writer
from distflow.launch.agent.agent import Agent
from distflow.launch.agent.restart_policy import RestartPolicy, Tell
from distflow.launch.run.folder import claim
from distflow.launch.run.process_table import process_id
from distflow.launch.run.record import RunRecord, WorkerEntry
from tests.launch.real_meshes import LiveMesh
from tests.search.agent_mesh import KNOWN_S, Mesh

WORKERS_A_HOST = 8
BURST = 100
KNOWN_WITHIN_S = 15.0
STARTS_WITHIN_S, LIVE_S, ENDS_WITHIN_S = 300.0, 20.0, 10.0
STEP_S = 0.1


class Wire(Endpoint):
    """An Endpoint that is not started: encodes what is sent, and forgets it."""

    def __init__(self, name: str, incarnation: int, *more: Any, **further: Any) -> None:
        super().__init__(name, incarnation, *more, **further)
        self.network_address = address_of(0)

    def disconnect(self, name: str) -> None:
        """There is no connection."""

    def send(self, to: str, kind: str, body: Any, payload: Sequence[Any] = ()) -> Delivery:
        """Encode a message."""
        encode(kind, self.name, self.incarnation, body)
        return delivered()


class Quiet:
    """In place of a WorkerGroup: starts nobody."""

    def __init__(self, record: RunRecord, host: int, entry: str, core: RestartPolicy, send: Callable[..., Any]) -> None:
        self.pids: dict[str, ProcessId] = {}
        self.inputs: list[object] = []
        self._core, self._send = core, send

    def do(self, actions: Sequence[object]) -> None:
        """Nothing is left to be done in a run that goes on."""
        assert not list(actions), "a run that goes on undisturbed"

    def tell(self, what: Tell) -> None:
        """Nobody listens."""
        for name in self._core.lives:
            if what.to in (None, name):
                self._send(name, what.kind, what.body)


def address_of(host: int, process: int = 0) -> str:
    """Of a process of a host, with a key of its own."""
    key = hashlib.sha256(f"{host} {process}".encode()).hexdigest()
    return f"tcp://10.0.{host // 250}.{host % 250}:{40_000 + process}#{key}"


def world(hosts: int, folder: Path) -> RunRecord:
    """Of a run with one training worker a host."""
    workers = hosts * WORKERS_A_HOST
    entries = [WorkerEntry(f"rollout/{i}", False, 1, i % hosts) for i in range(workers - hosts)]
    entries += [WorkerEntry(f"trainer/{i}", True, 1, i) for i in range(hosts)]
    names = [*(entry.name for entry in entries), *map(agent_name, range(hosts))]
    addresses = tuple(HostEntry(f"node{i}", f"10.0.{i // 250}.{i % 250}") for i in range(hosts))
    roster = dict.fromkeys(names, "")
    record = RunRecord(folder.name, str(folder), 1000, tuple(entries), roster, 30.0, 3, hosts=addresses)
    write_keys(key_file(folder), make_keys())
    return record


def reports(record: RunRecord) -> list[HostReport]:
    """Of all hosts, whose workers all run."""
    own: dict[int, list[WorkerEntry]] = {}
    for worker in record.workers:
        own.setdefault(worker.host, []).append(worker)
    return [report(record, host, own[host]) for host in record.numbers]


def report(record: RunRecord, host: int, own: Sequence[WorkerEntry]) -> HostReport:
    """Of a host."""
    entry = structs.replace(record.hosts[host], agent=address_of(host), nonce="n")
    there = {
        worker.name: HostedWorker(worker.trains, 1, "running", address=address_of(host, 1 + number))
        for number, worker in enumerate(own)
    }
    names = [*there, agent_name(host), nursery_name(host)]
    return HostReport(
        host, entry, 1, workers=there, marks={name: ProcessId(1000 + host, 1.5, "there") for name in names}
    )


def changed(before: HostReport, number: int) -> HostReport:
    """What a host reports next: a worker has another address, and a process another number."""
    name, first = next(iter(before.workers.items()))
    workers = {**before.workers, name: structs.replace(first, address=address_of(before.host, 10 + number))}
    marks = {**before.marks, name: ProcessId(number, 1.0, "there")}
    return structs.replace(before, serial=2 + number, workers=workers, marks=marks)


def make(record: RunRecord, told: Sequence[HostReport], *, writes: bool) -> Agent:
    """The agent of the first host, once all workers run everywhere."""
    # Somebody has the lock of the folder.
    lock = claim(record.path)
    agent = Agent(record, 0, "none:none", lock if writes else None, None)
    for life in agent._core.lives.values():
        life.state, life.pid = "running", os.getpid()
        agent._worker_group.pids[life.entry.name] = process_id(os.getpid())
        body = {"address": address_of(0, len(agent._worker_group.pids))}
        agent._peers.here(decode(encode("here", life.entry.name, 0, body)))
    agent._peers.begin({"agents": {str(one.host): one.entry.agent for one in told}})
    now = time.monotonic()
    agent._peers.mesh.tick(now)
    for one in told[1:]:
        agent._peers.hear(beat(record, one), now)
    turn(agent)
    return agent


def beat(record: RunRecord, *told: HostReport) -> Any:
    """A message from the agent of a host, with reports, as it comes in."""
    sender = told[0].host
    seen = [[sender, told[0].serial, told[0].serial], [0, 10**6, 10**6]]
    # As in a large mesh, whatever the size: with a checksum, a beat need not list all hosts.
    body = {"from": sender, "seen": seen, "reports": [to_wire(one) for one in told], "checksum": 1}
    return decode(encode(BEAT, agent_name(sender), record.launch_term, body))


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


def hears(agent: Agent, beats: Sequence[Any]) -> None:
    """What an agent does once it has received these."""
    for one in beats:
        agent._peers.hear(one, time.monotonic())
    turn(agent)


def turns(record: RunRecord, rounds: int, *, writes: bool) -> dict[str, Callable[[int], None]]:
    """Of one agent, by name: a turn of its loop, with the number of the round."""
    told = reports(record)
    agent = make(record, told, writes=writes)
    # What agents tell each other is measured for itself.
    agent._peers.tick = lambda now: None  # type: ignore[method-assign]
    some = told[1 : 1 + BURST]
    news = [[beat(record, changed(told[1], number))] for number in range(rounds)]
    if writes:

        def write(number: int) -> None:
            agent._recorder._rests_until = 0.0
            hears(agent, news[number])

        return {"writes": write}
    burst = [[beat(record, changed(one, rounds + number)) for one in some] for number in range(rounds)]
    beginning = {"agents": {str(one.host): one.entry.agent for one in told}}

    def silent(number: int) -> None:
        with mock.patch.object(agent._peers.mesh, "silent", return_value=frozenset({1})):
            turn(agent)

    def broken(number: int) -> None:
        agent._core.broken, agent._core.lives["trainer/0"].state = "trainer/0 was killed", "ended"
        turn(agent)

    def begin(number: int) -> None:
        Agent(record, 0, "none:none", None, None)._peers.begin(beginning)

    return {
        "quiet": lambda number: turn(agent),
        "news": lambda number: hears(agent, news[number]),
        "burst": lambda number: hears(agent, burst[number]),
        "silent": silent,
        "broken": broken,
        "begin": begin,
    }


def measure(hosts: int, rounds: int) -> dict[str, float]:
    """Milliseconds by name."""
    found: dict[str, float] = {}
    for writes in (False, True):
        with tempfile.TemporaryDirectory() as folder:
            for name, work in turns(world(hosts, Path(folder)), rounds, writes=writes).items():
                found[name] = median_ms(rounds, work)
    return found


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
    parser.add_argument("--hosts", type=int, nargs="+", default=[2, 16, 125, 500, 1024, 4096])
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
        for hosts in chosen.hosts:
            found = measure(hosts, chosen.rounds)
            figures = ", ".join(f"{name} {value:.2f} ms" for name, value in found.items())
            print(f"{hosts * WORKERS_A_HOST} workers on {hosts} hosts: {figures}", flush=True)
