"""What it costs a worker that its peers are there: CPU of one worker that does nothing else, by how many peers it has.

    python -m benchmarks heartbeats                     # 8, 64 and 256 workers

The worker is real, with its sockets and its thread for messages. So are the sockets of its peers, in another process,
each as in a run in which all are each other's peers; but what they send one another is dropped. The CPU is that of the
worker's process, over so many seconds after all have met.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Mapping
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path

from distflow.comm.endpoint import Endpoint
from distflow.comm.membership import Identity, Member, Membership
from distflow.comm.message import Body, Buffer
from distflow.comm.outbox import Delivery, delivered
from distflow.exchange.facts import CHANGING, read_facts
from distflow.runtime.node import Node
from distflow.runtime.waits import WaitBoard

MEET_S = 120.0
SETTLE_S = 5.0
COUNTERS = {f"perf/counter_{number}": 1234.5 for number in range(30)}
"""As many as a generating worker has."""
Roster = Mapping[str, str]


class OnlyTo(Endpoint):
    """Sends to one peer, and drops what is for others."""

    only = ""

    def send(self, to: str, kind: str, body: Body, payload: list[Buffer] | tuple[Buffer, ...] = ()) -> Delivery:
        """As Endpoint."""
        return super().send(to, kind, body, payload) if to == self.only else delivered()


def make(endpoint: Endpoint, host: int, peers: list[str]) -> Node:
    """A worker that is there and does nothing."""
    me = Identity(endpoint.name, 0, 1, 1.0, "digest", {}, host)
    membership = Membership(me, peers, lambda pid, started: True, read_facts, minor=CHANGING)
    node = Node(endpoint, membership, WaitBoard())
    node.counts = lambda: COUNTERS
    node.facts |= {"announced": {"policy": [0, 7]}, "state": "generating", "version": 7}

    def judge(now: float) -> None:
        node.facts["judged"] = {"reward": [int(now), 0]}
        node.work_done()

    node.on_tick(judge)
    return node


def be_peers(roster: Roster, pipe: Connection) -> None:
    """All workers but the first, until the pipe is closed."""
    first, *others = roster
    nodes = []
    for host, name in enumerate(others, 1):
        endpoint = OnlyTo(name, 0, {first: roster[first], name: roster[name]})
        endpoint.only = first
        node = make(endpoint, host, [one for one in roster if one != name])
        for other in others:
            if other != name:
                node.membership.peers[other] = Member(
                    incarnation=0, host=-1, state="present", heard_at=time.monotonic()
                )
        nodes.append(node)
    for node in nodes:
        node.start()
    pipe.send("started")
    pipe.poll(None)
    for node in nodes:
        node.endpoint.close(linger_s=0.0)


def measure(workers: int, seconds: float) -> tuple[float, float, float]:
    """CPU milliseconds a second, and messages sent and received a second."""
    context = get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        roster = {f"rollout/{number}": f"ipc://{Path(folder)}/{number}" for number in range(workers)}
        ours, theirs = context.Pipe()
        process = context.Process(target=be_peers, args=(roster, theirs), daemon=True)
        process.start()
        theirs.close()
        try:
            if not ours.poll(MEET_S):
                raise TimeoutError(f"the peers have not started within {MEET_S:g} s")
            name, *others = roster
            node = make(Endpoint(name, 0, roster, shared_memory=True), 0, others)
            node.start()
            deadline = time.monotonic() + MEET_S
            while not all(map(node.membership.present, others)):
                if time.monotonic() > deadline:
                    raise TimeoutError(f"not all of {workers} workers have met within {MEET_S:g} s")
                time.sleep(0.1)
            time.sleep(SETTLE_S)
            traffic = node.endpoint.traffic
            cpu, sent, received = time.process_time(), traffic.sent, traffic.received
            time.sleep(seconds)
            found = (
                1e3 * (time.process_time() - cpu) / seconds,
                (traffic.sent - sent) / seconds,
                (traffic.received - received) / seconds,
            )
            node.endpoint.close(linger_s=0.0)
            return found
        finally:
            ours.close()
            process.join(10.0)
            process.terminate()


def main() -> None:
    """A line for each number of workers."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, nargs="+", default=[8, 64, 256])
    parser.add_argument("--seconds", type=float, default=20.0)
    chosen = parser.parse_args()
    for workers in chosen.workers:
        cpu, sent, received = measure(workers, chosen.seconds)
        print(
            f"{workers:3d} workers: {cpu:5.1f} ms of CPU a second, {sent:.0f} messages sent, {received:.0f} received",
            flush=True,
        )
