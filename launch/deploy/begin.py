"""Tells all agents of a run who the others are: from then on they start their workers and need no launcher."""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from distflow.comm.client import ask
from distflow.comm.keys import key_file, read_keys
from distflow.errors import Problem, ProtocolError
from distflow.launch.deploy.hostfile import Host, HostsError

AT_ONCE = 64
NOBODY: Mapping[int, str] = {}


def begin_agents(
    hosts: Mapping[int, Host],
    agents: Mapping[int, str],
    run_dir: Path,
    limit_s: float,
    others: Mapping[int, str] = NOBODY,
) -> None:
    """Send `mesh.begin` to every agent and await its answer; raises HostsError naming those that did not answer.

    `others`: agents that have begun already; they are told of the new ones, so that they let them in. One that does not
    hear of it now learns it from the reports of the rest.
    """
    keys = read_keys(key_file(run_dir))
    body = {"agents": {str(number): address for number, address in {**others, **agents}.items()}}

    def one(number: int) -> str | None:
        try:
            answer = ask({**others, **agents}[number], "mesh.begin", body, limit_s, keys)
        except ProtocolError as error:
            return str(error)
        return None if answer is not None else f"no answer to mesh.begin within {limit_s:g} s"

    with ThreadPoolExecutor(max_workers=AT_ONCE) as pool:
        numbers = [*agents, *others]
        faults = {n: fault for n, fault in zip(numbers, pool.map(one, numbers), strict=True) if n in agents}
    problems = [
        Problem(hosts[n].where, hosts[n].name, f"its agent at {agents[n]}: {fault}", "did the host go down?")
        for n, fault in faults.items()
        if fault is not None
    ]
    if problems:
        raise HostsError(problems)
