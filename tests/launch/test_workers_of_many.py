"""Workers of many hosts in virtual time: who is present, who is known to be dead, and what it costs.

Agents are as in `meshes.py`. What workers send each other is lost, late, or does not arrive at all for a while.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import structs

from distflow.cluster.host_report import Death, HostedWorker
from distflow.comm.beat_order import FEW
from distflow.comm.membership import Identity, Joined, Lost, MemberMessage, Membership
from tests.budget import within
from tests.search.agent_mesh import Mesh

HOSTS, EACH = 18, 3
KNOWN_S = 5.0


@dataclass
class Worker:
    core: Membership
    lost: set[str] = field(default_factory=set)
    alive: bool = True
    slow: bool = False
    """It handles what has arrived every few seconds only."""
    inbox: list[tuple[str, MemberMessage]] = field(default_factory=list)
    sent: int = 0


class Run:
    """All workers are each other's peers."""

    def __init__(self, seed: int, loss: float) -> None:
        self.mesh = Mesh(HOSTS, seed, loss=min(loss, 0.1), doubling=loss, late_s=0.1)
        self.loss = loss
        names = [f"rollout/{number}" for number in range(HOSTS * EACH)]
        self.workers = {
            name: Worker(Membership(self.identity(name), set(names) - {name}, lambda pid, at: self.runs(pid)))
            for name in names
        }
        self.apart: set[str] = set()
        """Workers that hear nothing of the others, nor they of them."""
        self.told: set[tuple[int, str]] = set()
        self.seconds = 0
        for host in range(HOSTS):
            here = {name: HostedWorker(False, 1, "running") for name in names if self.host(name) == host}
            self.mesh.publish(host, workers=here)

    @staticmethod
    def host(name: str) -> int:
        return int(name.partition("/")[2]) // EACH

    def identity(self, name: str) -> Identity:
        return Identity(name, 0, int(name.partition("/")[2]), 1.0, "d", {}, self.host(name))

    def runs(self, pid: int) -> bool:
        return self.workers[f"rollout/{pid}"].alive

    def run(self, seconds: int) -> None:
        for _ in range(seconds):
            self.mesh.run_for(1.0)
            self.seconds += 1
            for worker in self.living():
                out, events = worker.core.tick(float(self.seconds), self.seconds, {"state": "generating"})
                self.take(worker, out, events)
            # Greetings are answered within the same second.
            for _ in range(3):
                self.deliver()
            self.tell_deaths()

    def living(self) -> list[Worker]:
        return [worker for worker in self.workers.values() if worker.alive]

    def take(self, worker: Worker, out: list[MemberMessage], events: list[Any]) -> None:
        worker.lost |= {event.name for event in events if isinstance(event, Lost)}
        worker.lost -= {event.name for event in events if isinstance(event, Joined)}
        worker.sent += len(out)
        for item in out:
            cut = (worker.core.me.name in self.apart) != (item.to in self.apart)
            if not cut and self.mesh.random.random() >= self.loss:
                self.workers[item.to].inbox.append((worker.core.me.name, item))

    def deliver(self) -> None:
        for worker in self.living():
            if worker.slow and self.seconds % 7:
                continue
            arrived, worker.inbox = worker.inbox, []
            for sender, item in arrived:
                self.take(worker, *worker.core.handle(item.kind, sender, 0, item.body, float(self.seconds)))

    def kill(self, name: str) -> None:
        """Its agent sees it at once."""
        self.workers[name].alive = False
        report = self.mesh.agents[self.host(name)].own
        dead = structs.replace(report.workers[name], state="ended", deaths=(Death(0, "killed"),))
        self.mesh.publish(self.host(name), workers={**report.workers, name: dead})

    def tell_deaths(self) -> None:
        """Each agent tells its workers of what is in the reports, once."""
        for host, agent in self.mesh.agents.items():
            for report in agent.reports.values():
                dead = [name for name, hosted in report.workers.items() if hosted.deaths]
                for name in dead:
                    if (host, name) not in self.told:
                        self.told.add((host, name))
                        self.tell(host, name)

    def tell(self, host: int, name: str) -> None:
        body = {"worker": name, "incarnation": 0, "reason": "killed"}
        for worker in self.living():
            if self.host(worker.core.me.name) == host:
                self.take(worker, *worker.core.handle("lost", f"agent/{host}", 0, body, float(self.seconds)))


@settings(max_examples=4)
@given(st.integers(0, 10_000), st.sampled_from([0.0, 0.1, 0.3]), st.integers(0, 3), st.integers(0, 9))
@within(60, examples=4)
def test_every_death_is_known_in_time_and_nobody_is_taken_for_dead(seed: int, loss: float, slow: int, cut: int) -> None:
    run = Run(seed, loss)
    run.loss = 0.0
    run.run(8)
    run.loss = loss
    names = list(run.workers)
    assert all(worker.core.present(name) for worker in run.living() for name in names if name != worker.core.me.name)
    run.apart = set(run.mesh.random.sample(names, cut))
    for name in run.mesh.random.sample(names, slow):
        run.workers[name].slow = True
    run.run(15)
    assert not any(worker.lost for worker in run.living()), "silence is no death"
    dead = set(run.mesh.random.sample(names, 3))
    for name in dead:
        run.kill(name)
    run.run(int(KNOWN_S))
    assert all(worker.lost == dead for worker in run.living())


def test_without_an_agent_that_tells_it_a_death_on_the_same_host_is_known_in_time() -> None:
    run = Run(1, 0.0)
    run.run(8)
    run.workers["rollout/0"].alive = False
    run.run(int(KNOWN_S))
    assert {name for name, worker in run.workers.items() if worker.lost} == {"rollout/1", "rollout/2"}


def test_a_worker_sends_so_many_beats_and_hears_of_everybody_in_turn() -> None:
    run = Run(3, 0.0)
    run.run(12)
    before = {name: worker.sent for name, worker in run.workers.items()}
    run.run(20)
    assert all(worker.sent - before[name] <= 20 * FEW for name, worker in run.workers.items())
    oldest = [peer.progress for worker in run.living() for peer in worker.core.peers.values()]
    assert run.seconds - min(oldest) <= 4
