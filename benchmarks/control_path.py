"""CPU time of a group at its owner and its holder, from the lease to the training loop, over real sockets.

    python -m benchmarks control_path [--rounds 5] [--groups 600] [--gap-ms 2]

Two processes: an owner of 8 ledgers and a holder that asks, gets leases, and finishes a group of 8 samples every
`--gap-ms` (nothing is generated). Each is all of a worker that the control path goes through: node, endpoint, lanes,
lease cores, sample channel, and a loop that waits, takes groups, joins the rows of each step and opens the next one.
Figures are µs of CPU time a group, after a tenth of the groups as warm-up: of the endpoint's thread, of the loop's
thread (the holder's without making the samples), and of the whole process (with ZeroMQ's own threads, and at the holder
with making the samples). Prints JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from distflow.comm.endpoint import Endpoint
from distflow.comm.membership import Identity, Membership
from distflow.data.batch import Batch, Ragged, join
from distflow.exchange.lease_client import HolderCore
from distflow.exchange.lease_lanes import Lanes
from distflow.exchange.lease_settings import LeaseSettings
from distflow.exchange.messages import LeasePrompt
from distflow.exchange.owner import OwnerCore
from distflow.exchange.sample_channel import ArrivedGroup, InboundSamples, OutboundSamples
from distflow.runtime.node import Node
from distflow.runtime.waits import WaitBoard
from distflow.types import Uid

GROUP, LEDGERS, EACH = 8, 8, 4
"""Samples a group, ledgers, and groups that a ledger feeds to a training step."""
OWNER, HOLDER = "trainer/0", "rollout/0"
PROMPT_TOKENS = 32
LIMIT_S = 120.0
HERE = Path(__file__).resolve().parent.parent


def node_of(name: str, peer: str, folder: str) -> Node:
    """A worker up to its lease messages."""
    roster = {one: f"ipc://{folder}/{one.replace('/', '-')}" for one in (OWNER, HOLDER)}
    me = Identity(name, 0, os.getpid(), 0.0, "same", {}, 0)
    endpoint = Endpoint(name, 0, roster, shared_memory=True)
    return Node(endpoint, Membership(me, [peer], lambda pid, started: True), WaitBoard())


def settings_of() -> LeaseSettings:
    """What owner and holder have agreed on."""
    return LeaseSettings(LEDGERS, EACH, GROUP, 1, 10**6, 1 << 40, lambda tokens: 1 << 20, PROMPT_TOKENS)


def meet(node: Node, peer: str) -> None:
    """Start, and wait until the peer is there."""
    node.start()
    with node.board.condition:
        assert node.board.condition.wait_for(lambda: node.membership.present(peer), LIMIT_S), f"{peer} is not there"


class Clocks:
    """CPU time of the endpoint's thread and of the process so far; a first reading begins the measurement."""

    def __init__(self, node: Node) -> None:
        thread = node.endpoint._thread
        self._clock = time.pthread_getcpuclockid(thread.ident)
        self._began = self._read()

    def _read(self) -> tuple[float, float]:
        return time.clock_gettime(self._clock), time.process_time()

    def report(self, loop_s: float, groups: int) -> None:
        """Print µs a group."""
        endpoint, process = (now - began for now, began in zip(self._read(), self._began, strict=True))
        spent = {"endpoint": endpoint, "loop": loop_s, "threads": endpoint + loop_s, "process": process}
        found: dict[str, Any] = {what: 1e6 * seconds / groups for what, seconds in spent.items()}
        print(json.dumps(found), flush=True)


def own(folder: str, groups: int) -> None:
    """The owner's process: takes groups as they arrive, until it has so many, and joins those of each step."""
    node = node_of(OWNER, HOLDER, folder)
    ids = tuple(range(PROMPT_TOKENS))
    prompt = lambda position: LeasePrompt(Uid(0, position, position), ids, "x" * 100, "{}")  # noqa: E731
    core = OwnerCore(OWNER, settings_of(), range(LEDGERS), prompt)
    lanes = Lanes(node.endpoint)
    inbound = InboundSamples(core, lanes.post)
    lanes.register(node.on, inbound.kinds, inbound.on_message)
    node.on_tick(lambda now: inbound.send(core.tick(now)))
    meet(node, HOLDER)
    warm, taken, condition, arrived = groups // 10, 0, node.board.condition, list[ArrivedGroup]()
    clocks, began = Clocks(node), time.thread_time()
    while taken < groups:
        with condition:
            assert condition.wait_for(core.consumable, LIMIT_S), f"no group came; {taken} have"
            positions = core.consumable()
            inbound.send(core.take(positions, time.monotonic()))
            arrived += inbound.pop(positions)
            complete = core.step_complete()
            if complete:
                inbound.send(core.advance(core.version + 1, time.monotonic()))
        if complete:
            join([group.rows for group in arrived])
            arrived.clear()
        before, taken = taken, taken + len(positions)
        if before < warm <= taken:
            clocks, began, warm = Clocks(node), time.thread_time(), taken
    clocks.report(time.thread_time() - began, taken - warm)
    with condition:
        inbound.send(core.finish(time.monotonic()))
        condition.wait_for(lambda: core.all_left, LIMIT_S)
    node.close(orderly=True)


def rows_of(tokens: int) -> Batch:
    """The fields of a group's samples, as the quickstart sends them."""
    number = torch.arange(GROUP)
    ids = Ragged.from_rows([range(tokens)] * GROUP, torch.int64)
    texts = Ragged.from_texts(["x" * tokens] * GROUP)
    return Batch(
        {
            "uid": torch.zeros(GROUP, 3, dtype=torch.int64),
            "group": number,
            "sample": number,
            "prompt_ids": Ragged.from_rows([range(PROMPT_TOKENS)] * GROUP, torch.int64),
            "prompt_text": Ragged.from_texts(["x" * 100] * GROUP),
            "response_ids": ids,
            "response_mask": ids.like(torch.ones(GROUP * tokens, dtype=torch.bool)),
            "response_text": texts,
            "rollout_logprobs": ids.like(torch.zeros(GROUP * tokens)),
            "policy_versions": Ragged(torch.tensor([[0, 0, 0, tokens]] * GROUP), torch.arange(GROUP + 1)),
            "finish_reason": torch.ones(GROUP, dtype=torch.int64),
            "reward": torch.rand(GROUP),
            "score": torch.rand(GROUP),
            "rewards/exact": torch.rand(GROUP),
        }
    )


def hold(folder: str, groups: int, tokens: int, gap_s: float) -> None:
    """The holder's process: finishes a group at every turn, until the owner needs no more."""
    node = node_of(HOLDER, OWNER, folder)
    core = HolderCore(HOLDER, 0, [OWNER], settings_of())
    lanes = Lanes(node.endpoint)
    outbound = OutboundSamples(core, lanes.post)
    lanes.register(node.on, outbound.kinds, outbound.on_message)
    node.on_tick(lambda now: outbound.send(core.tick(now)))
    meet(node, OWNER)
    template, condition, leases = rows_of(tokens), node.board.condition, []
    warm, sent, spent, clocks, next_at = groups // 10, 0, 0.0, Clocks(node), time.monotonic()
    while not core.run_finished:
        began = time.thread_time()
        with condition:
            outbound.send(core.want(4 * GROUP - GROUP * len(leases), time.monotonic()))
            leases += core.take_granted()
            if not leases:
                condition.wait(0.05)
        spent += time.thread_time() - began
        if not leases:
            continue
        time.sleep(max(0.0, next_at - time.monotonic()))
        next_at = max(next_at + gap_s, time.monotonic())
        lease = leases.pop(0)
        versions = Ragged(torch.tensor([[0, lease.min_version, 0, tokens]] * GROUP), torch.arange(GROUP + 1))
        batch = template.with_columns(
            group=torch.full((GROUP,), lease.position), policy_versions=versions, response_ids=template["response_ids"]
        )
        began = time.thread_time()
        with condition:
            outbound.finish(batch, {}, time.monotonic())
        spent += time.thread_time() - began
        sent += 1
        if sent == warm:
            spent, clocks = 0.0, Clocks(node)
        if sent == groups:
            clocks.report(spent, sent - warm)
    node.close(orderly=True)


def once(groups: int, tokens: int, gap_ms: float) -> dict[str, Any]:
    """One run of both processes."""
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        processes = {}
        for side in ("owner", "holder"):
            options = [side, "--folder", folder, "--groups", groups, "--tokens", tokens, "--gap-ms", gap_ms]
            command = [sys.executable, "-m", "benchmarks", "control_path", "--side", *map(str, options)]
            environment = {**os.environ, "OMP_NUM_THREADS": "1"}
            processes[side] = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment, cwd=HERE)
        for side, process in processes.items():
            said, _ = process.communicate(timeout=2 * LIMIT_S)
            if process.returncode:
                raise SystemExit(f"the {side}'s process ended with {process.returncode}")
            found |= {f"{side}_{what}_us": value for what, value in json.loads(said.splitlines()[-1]).items()}
    return found


def main() -> None:
    """All cases: medians of their rounds."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--groups", type=int, default=600)
    parser.add_argument("--gap-ms", type=float, default=2.0)
    parser.add_argument("--tokens", type=int, nargs="+", default=[64, 1024])
    parser.add_argument("--side", choices=("owner", "holder"), help="this process is one of the two")
    parser.add_argument("--folder", default="")
    options = parser.parse_args()
    if options.side == "owner":
        return own(options.folder, options.groups)
    if options.side == "holder":
        return hold(options.folder, options.groups, options.tokens[0], options.gap_ms / 1000)
    report: dict[str, dict[str, float]] = {}
    for tokens in options.tokens:
        rounds = [once(options.groups, tokens, options.gap_ms) for _ in range(options.rounds)]
        medians = {what: round(statistics.median(one[what] for one in rounds), 1) for what in rounds[0]}
        report[f"{GROUP} x {tokens} tokens"] = medians
    print(json.dumps(report, indent=1))
    return None
