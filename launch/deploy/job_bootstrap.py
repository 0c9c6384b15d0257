"""`launch --env`: one process per node is active. Node 0 waits for the others and launches; all stay to the end."""

from __future__ import annotations

import fcntl
import hashlib
import ipaddress
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from distflow.cluster.processes import STOPPED, agent_name
from distflow.errors import DistflowError, UserError
from distflow.launch.agent.remote_helper import RemoteHelper
from distflow.launch.agent.start import agent_lives, run_of
from distflow.launch.deploy.fan_out import addresses_of, own_addresses, route_to
from distflow.launch.deploy.hostfile import Host
from distflow.launch.deploy.job_environment import RUN_KEY, JobNode, read_node
from distflow.launch.deploy.job_rendezvous import (
    Hello,
    JobRendezvous,
    LocalLine,
    RendezvousFailed,
    RendezvousServer,
    attend,
    job_keys,
    new_start_id,
)
from distflow.launch.deploy.launch_request import Options, recipe_of
from distflow.launch.deploy.launcher import launch_on
from distflow.launch.deploy.placement import place_workers
from distflow.launch.deploy.ssh import Line
from distflow.launch.run.process_table import signal_to
from distflow.launch.run.record import read_record
from distflow.log import logger

LEAVE = signal.SIGUSR1
"""Asks an agent to end the run in an orderly way; repeating it does not escalate."""
LEAVE_S = 90.0
"""Limit for an agent to exit after the end of the run was recorded; longer than its exit barrier."""
NO_WORD = 3
"""Exit code of a process if the first one on its node ended without telling its own."""
POLL_S = 0.2
SUCCESSOR_S = 30.0
"""Limit for the fork server of a host to replace a killed agent."""
log = logger(__name__)


def launch_in_job(options: Options) -> int:
    """Launch from within a job: one process per node is active, the others on the node wait for the end."""
    if options.detach or options.dry_run:
        raise UserError("--env: the job lasts as long as the run — leave out --detach and --dry-run")
    # A job that is cancelled before its workers run is cleaned up as if interrupted.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    node = with_address(read_node(os.environ))
    loaded, plan = recipe_of(options, need_files=False)
    limit_s = loaded.recipe.limits.connect_s
    if node.local_rank > 0:
        return stand_by(node, os.environ, limit_s)
    with first_of_node(node, os.environ) as codes:
        if node.rank > 0:
            codes.append(follow(node, os.environ, limit_s))
        else:
            with gathered(node, os.environ, len(plan.workers), limit_s) as (hosts, ways):
                placement = place_workers(plan, hosts, loaded.origin)
                codes.append(launch_on(options, loaded, plan, placement, ways))
                ways.await_own_agent()
    return codes[0]


class LocalHelper(RemoteHelper):
    """The remote helper's requests executed in this process, which also follows the agent it started."""

    run_dir = Path()
    host = 0

    def do(self, verb: str, given: dict[str, Any], payload: bytes) -> dict[str, Any]:
        """Execute one request."""
        if verb == "start":
            self.run_dir, self.host = run_of(given["command"])
        return super().do(verb, given, payload)

    def await_end(self, agent: subprocess.Popen[bytes]) -> int:
        """Wait until the agent here, or its replacement if it is killed, has ended; returns its exit code."""
        code = agent.wait()
        if code >= 0:
            return code
        deadline = time.monotonic() + SUCCESSOR_S
        while time.monotonic() < deadline and not (record := read_record(self.run_dir)).over:
            if agent_lives(self.run_dir, self.host):
                deadline = time.monotonic() + SUCCESSOR_S
            time.sleep(POLL_S)
        while agent_lives(self.run_dir, self.host):
            time.sleep(POLL_S)
        return NO_WORD if record.exit_code is None else record.exit_code

    def signal(self, agent: subprocess.Popen[bytes], number: int) -> None:
        """Send a signal to the agent here, or to its replacement."""
        if agent.poll() is None:
            agent.send_signal(number)
            return
        signal_to(read_record(self.run_dir).pids.get(agent_name(self.host)), number)


def with_address(node: JobNode) -> JobNode:
    """Use the address of node 0 given by the job if its name does not resolve: Slurm's node names may be its own."""
    return node if node.spare is None or addresses_of(node.master) else replace(node, master=node.spare)


class JobWays:
    """How to reach the nodes of a job, once all have joined."""

    def __init__(self, server: RendezvousServer, hellos: Mapping[int, Hello], helper: LocalHelper) -> None:
        self.here: int | None = 0
        self.resolved: Mapping[int, str] = {rank: hello.address for rank, hello in sorted(hellos.items())}
        self._server = server
        self._helper = helper

    def open(self, number: int) -> Line:
        """Connect to a node."""
        return LocalLine(self._helper) if number == self.here else self._server.line(number)

    def await_own_agent(self) -> None:
        """Wait for the end of node 0's own agent: the job may kill whatever is left when this process ends."""
        if self._helper.agent is None:
            return
        deadline = time.monotonic() + LEAVE_S
        while self._helper.agent.poll() is None or agent_lives(self._helper.run_dir, self._helper.host):
            if time.monotonic() > deadline:
                log.warning("the run is over, but the agent of node 0 did not exit within %g s", LEAVE_S)
                return
            time.sleep(POLL_S)


@contextmanager
def gathered(
    node: JobNode, environment: Mapping[str, str], workers: int, limit_s: float
) -> Iterator[tuple[tuple[Host, ...], JobWays]]:
    """On node 0: the hosts of the job, once all nodes have joined; raises RendezvousFailed, UserError."""
    keys = job_keys(environment)
    hello = _hello(node)
    rendezvous = JobRendezvous(node.nodes, time.monotonic() + limit_s, node.name)
    rendezvous.heard(hello)
    server = RendezvousServer(f"tcp://{_listening(node)}:{node.port}", keys, rendezvous)
    try:
        hellos = seen_from_outside(server.gather())
        yield _hosts(hellos, workers), JobWays(server, hellos, LocalHelper(_never_cut))
    finally:
        server.close()


def follow(node: JobNode, environment: Mapping[str, str], limit_s: float) -> int:
    """On another node: join, execute node 0's requests, and wait until the agent here ends; returns its exit code."""
    keys = job_keys(environment)
    helper = LocalHelper(_never_cut)
    try:
        attend(f"tcp://{_numeric(node.master)}:{node.port}", keys, _hello(node), helper, limit_s)
    except RendezvousFailed:
        if helper.agent is None:
            raise
    if helper.agent is None:
        raise RendezvousFailed("node 0 gave up — see its output")
    return _stay(helper, helper.agent)


@contextmanager
def first_of_node(node: JobNode, environment: Mapping[str, str]) -> Iterator[list[int]]:
    """Make the other processes of this node wait; the exit code put into the list is passed to them."""
    path = _exit_file(node, environment)
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    codes: list[int] = []
    try:
        yield codes
    except KeyboardInterrupt:
        codes.append(STOPPED)
        raise
    except DistflowError as error:
        codes.append(error.exit_code)
        raise
    finally:
        os.write(descriptor, str(codes[0] if codes else NO_WORD).encode())
        os.close(descriptor)
        path.unlink(missing_ok=True)


def stand_by(node: JobNode, environment: Mapping[str, str], limit_s: float) -> int:
    """In another process of a node: wait for the first one's end; returns its exit code."""
    path = _exit_file(node, environment)
    deadline = time.monotonic() + limit_s
    while not path.exists():
        if time.monotonic() > deadline:
            raise DistflowError(f"the first process of {node.name(node.rank)} did not start within {limit_s:g} s")
        time.sleep(POLL_S)
    with path.open("rb") as file:
        # The first process holds the lock until it ends.
        fcntl.flock(file, fcntl.LOCK_SH)
        text = file.read()
    return int(text) if text else NO_WORD


def _exit_file(node: JobNode, environment: Mapping[str, str]) -> Path:
    again = environment.get("TORCHELASTIC_RESTART_COUNT", "0")
    words = (environment.get(RUN_KEY, ""), node.master, str(node.port), str(node.rank), again)
    digest = hashlib.blake2b("\0".join(words).encode(), digest_size=8).hexdigest()
    return Path(tempfile.gettempdir()) / f"distflow-{os.getuid()}-{digest}.exit"


def _listening(node: JobNode) -> str:
    """The address to listen on: ours if the job gives it; else any, since a name may resolve differently elsewhere."""
    if node.spare is None and node.master in own_addresses():
        return _numeric(node.master)
    return "[::]" if _numeric(node.master).startswith("[") else "0.0.0.0"


def seen_from_outside(hellos: Mapping[int, Hello]) -> dict[int, Hello]:
    """If node 0's own name resolves to loopback, use its address on the route to the other machines instead."""
    afar = [hello.address for rank, hello in hellos.items() if rank > 0 and not _loopback(hello.address)]
    found = dict(hellos)
    if afar and _loopback(found[0].address):
        found[0] = replace(found[0], address=route_to(afar[0]) or found[0].address)
    return found


def _loopback(address: str) -> bool:
    return any(ipaddress.ip_address(found).is_loopback for found in addresses_of(address))


def _hello(node: JobNode) -> Hello:
    if node.rank == 0:
        own = addresses_of(node.master) & own_addresses()
        address = next(iter(sorted(own)), _numeric(node.master))
    else:
        address = route_to(node.master) or socket.gethostname()
    return Hello(node.rank, node.nodes, new_start_id(), socket.gethostname(), address, sys.executable, node.slots)


def _hosts(hellos: Mapping[int, Hello], workers: int) -> tuple[Host, ...]:
    """The hosts, with the slots the nodes reported, or else enough to spread the workers evenly."""
    processes = Counter(hello.hostname for hello in hellos.values())
    even = -(-workers // len(hellos))
    return tuple(
        Host(
            name=hello.hostname if processes[hello.hostname] == 1 else f"{hello.hostname}.{rank}",
            slots=tuple(range(hello.slots or even)),
            where=f"job:{rank}",
            address=hello.address,
            python=hello.python,
        )
        for rank, hello in sorted(hellos.items())
    )


def _stay(helper: LocalHelper, agent: subprocess.Popen[bytes]) -> int:
    """Wait until the agent ends, passing on signals that this process gets."""
    told = 0

    def pass_on(number: int, frame: object) -> None:
        nonlocal told
        told += 1
        # The job may signal the agent at the same time; that must not count as a second request.
        helper.signal(agent, LEAVE if told == 1 else signal.SIGTERM)

    before = {number: signal.signal(number, pass_on) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        return helper.await_end(agent)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _numeric(name: str) -> str:
    """The address of a name, in brackets if it is IPv6."""
    address = next(iter(sorted(addresses_of(name))), name)
    return f"[{address}]" if ":" in address else address


def _never_cut(seconds: float) -> bool:
    """There is no connection to be cut here; silence is detected elsewhere."""
    threading.Event().wait(seconds)
    return False
