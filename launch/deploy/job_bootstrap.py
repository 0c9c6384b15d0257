"""`launch --env`: one process a node acts. Node 0 gathers the others and launches; they follow and stay to the end."""

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

from distflow.errors import DistflowError, UserError
from distflow.launch.agent.remote_helper import RemoteHelper
from distflow.launch.agent.start import agent_lives, run_of
from distflow.launch.deploy.fan_out import addresses_of, own_addresses, route_to
from distflow.launch.deploy.hostfile import Host
from distflow.launch.deploy.job_environment import JobNode, read_node
from distflow.launch.deploy.job_rendezvous import (
    RUN_KEY,
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
from distflow.launch.run.exit_status import STOPPED
from distflow.launch.run.process_table import signal_to
from distflow.launch.run.record import agent_name, read_record
from distflow.log import logger

LEAVE = signal.SIGUSR1
"""Asks an agent to end the run in good order, however often it is sent."""
LEAVE_S = 90.0
"""For an agent to leave after another one has written down how the run ended; its farewell is shorter in any case."""
NO_WORD = 3
"""Exit code of a process whose node's first one ended without a word."""
POLL_S = 0.2
SUCCESSOR_S = 30.0
"""For another agent to follow one that was killed: the fork server of its host starts it."""
log = logger(__name__)


def launch_in_job(options: Options) -> int:
    """One process of each node acts; those beside it wait for the end."""
    if options.hosts is not None or options.detach or options.dry_run:
        raise UserError("--env: the hosts are those of the job, and it lasts as long as the run — leave out "
                        "--hosts, --detach and --dry-run")  # fmt: skip
    # A job that is cancelled before its workers run is undone like one that is interrupted.
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
                codes.append(launch_on(options, loaded, plan, place_workers(plan, hosts), ways))
                ways.await_own_agent()
    return codes[0]


class LocalHelper(RemoteHelper):
    """Acts on this node, and knows which agent it has started."""

    run_dir = Path()
    host = 0

    def do(self, verb: str, given: dict[str, Any], payload: bytes) -> dict[str, Any]:
        """One request."""
        if verb == "start":
            self.run_dir, self.host = run_of(given["command"])
        return super().do(verb, given, payload)

    def await_end(self, agent: subprocess.Popen[bytes]) -> int:
        """Until the agent here, or the one that follows it should it be killed, has ended; returns its exit code."""
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
        """To the agent here, or the one that has followed it."""
        if agent.poll() is None:
            agent.send_signal(number)
            return
        signal_to(read_record(self.run_dir).pids.get(agent_name(self.host)), number)


def with_address(node: JobNode) -> JobNode:
    """Node 0 by the address that the job tells where its name leads nowhere: Slurm has names of its own for nodes."""
    return node if node.spare is None or addresses_of(node.master) else replace(node, master=node.spare)


class JobWays:
    """Ways to the nodes of a job that have met."""

    def __init__(self, server: RendezvousServer, hellos: Mapping[int, Hello], helper: LocalHelper) -> None:
        self.here: int | None = 0
        self.resolved: Mapping[int, str] = {rank: hello.address for rank, hello in sorted(hellos.items())}
        self._server = server
        self._helper = helper

    def open(self, number: int) -> Line:
        """A line to a node."""
        return LocalLine(self._helper) if number == self.here else self._server.line(number)

    def await_own_agent(self) -> None:
        """Wait for the end of node 0's own agent: the job may kill whatever is left when this process ends."""
        if self._helper.agent is None:
            return
        deadline = time.monotonic() + LEAVE_S
        while self._helper.agent.poll() is None or agent_lives(self._helper.run_dir, self._helper.host):
            if time.monotonic() > deadline:
                log.warning("the run is over, and the agent of node 0 has not left within %g s", LEAVE_S)
                return
            time.sleep(POLL_S)


@contextmanager
def gathered(
    node: JobNode, environment: Mapping[str, str], workers: int, limit_s: float
) -> Iterator[tuple[tuple[Host, ...], JobWays]]:
    """On node 0: the hosts of the job, once all nodes have come; raises RendezvousFailed, UserError."""
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
    """On another node: come, do as node 0 asks, and stay until the agent here ends; returns its exit code."""
    keys = job_keys(environment)
    helper = LocalHelper(_never_cut)
    try:
        attend(f"tcp://{_numeric(node.master)}:{node.port}", keys, _hello(node), helper, limit_s)
    except RendezvousFailed:
        if helper.agent is None:
            raise
    if helper.agent is None:
        raise RendezvousFailed("node 0 has given up — its output says why")
    return _stay(helper, helper.agent)


@contextmanager
def first_of_node(node: JobNode, environment: Mapping[str, str]) -> Iterator[list[int]]:
    """Lets the other processes of this node wait: what is put into the list is their exit code too."""
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
            raise DistflowError(f"the first process of {node.name(node.rank)} was not there within {limit_s:g} s")
        time.sleep(POLL_S)
    with path.open("rb") as file:
        # It holds the lock for as long as it lives.
        fcntl.flock(file, fcntl.LOCK_SH)
        text = file.read()
    return int(text) if text else NO_WORD


def _exit_file(node: JobNode, environment: Mapping[str, str]) -> Path:
    again = environment.get("TORCHELASTIC_RESTART_COUNT", "0")
    words = (environment.get(RUN_KEY, ""), node.master, str(node.port), str(node.rank), again)
    digest = hashlib.blake2b("\0".join(words).encode(), digest_size=8).hexdigest()
    return Path(tempfile.gettempdir()) / f"distflow-{os.getuid()}-{digest}.exit"


def _listening(node: JobNode) -> str:
    """An address of ours if the job names one. A name may lead the other nodes elsewhere than here: then at all."""
    if node.spare is None and node.master in own_addresses():
        return _numeric(node.master)
    return "[::]" if _numeric(node.master).startswith("[") else "0.0.0.0"


def seen_from_outside(hellos: Mapping[int, Hello]) -> dict[int, Hello]:
    """Node 0's own name may lead it to a loopback address: then by the one on the way to nodes that come from afar."""
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
    """With the slots that the nodes told; else as many as spread the workers evenly."""
    shares = Counter(hello.hostname for hello in hellos.values())
    even = -(-workers // len(hellos))
    return tuple(
        Host(
            name=hello.hostname if shares[hello.hostname] == 1 else f"{hello.hostname}.{rank}",
            slots=tuple(range(hello.slots or even)),
            where=f"job:{rank}",
            address=hello.address,
            python=hello.python,
        )
        for rank, hello in sorted(hellos.items())
    )


def _stay(helper: LocalHelper, agent: subprocess.Popen[bytes]) -> int:
    """Until the agent ends; what this process is told, the agent is told too."""
    told = 0

    def pass_on(number: int, frame: object) -> None:
        nonlocal told
        told += 1
        # The job may have told the agent itself at the same time; that must not count as having been told twice.
        helper.signal(agent, LEAVE if told == 1 else signal.SIGTERM)

    before = {number: signal.signal(number, pass_on) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        return helper.await_end(agent)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _numeric(name: str) -> str:
    """The address of a name; brackets where an IPv6 address needs them."""
    address = next(iter(sorted(addresses_of(name))), name)
    return f"[{address}]" if ":" in address else address


def _never_cut(seconds: float) -> bool:
    """There is no line whose end could be cut: silence is noticed elsewhere."""
    threading.Event().wait(seconds)
    return False
