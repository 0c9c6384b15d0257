"""Weights that two hosts read in the memory of a third one, by NIXL over TCP; its processes are killed meanwhile."""

from __future__ import annotations

import importlib.util
from functools import partial
from pathlib import Path

import psutil
import pytest

from distflow.flow.plan_text import library_ports
from distflow.flow.recipe_check import plan_recipe
from tests.e2e.runs import PACED
from tests.e2e.sockets import listening, unknown
from tests.hosts.conftest import Cluster
from tests.hosts.test_hosts_e2e import hosts_file
from tests.hosts.test_training_on_hosts import await_end, check_exactly_once, folders_of
from tests.launch.conftest import await_that

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("nixl_cu12") is None,
    reason="needs NIXL: `make nixl-venv`, then .venv-nixl/bin/python -m pytest",
)
STEPS = 60
SETTINGS = (*PACED, f"run.training_steps={STEPS}", "weights.link=nixl", "layout.pools.rollout.count=2")
READERS = ("rollout-0", "rollout-1")


def taken(cluster: Cluster) -> list[int]:
    """How many versions came by NIXL to each engine's host."""
    logs = [Path(folder, "logs", f"{name}.log") for name in READERS for folder in folders_of(cluster)]
    return [log.read_text().count("came by NIXL") for log in logs if log.exists()]


def has_taken(cluster: Cluster, versions: int) -> bool:
    """Whether each of the two has."""
    return len(taken(cluster)) == 2 and min(taken(cluster)) >= versions


def processes(cluster: Cluster, host: int) -> list[psutil.Process]:
    """Those with NIXL."""
    found = [psutil.Process(pid) for pid in cluster.net.pids(cluster.net.hosts[host])]
    return [one for one in found if " ".join(one.cmdline()).strip().endswith(" weights")]


def test_versions_are_read_whichever_process_is_killed(cluster: Cluster) -> None:
    hosts = hosts_file(cluster, "h0 slots=1", "h1 slots=1", "h2 slots=1", shared=False)
    places = ["layout.pools.trainer.hosts=[h0]", "layout.pools.rollout.hosts=[h1,h2]"]
    head = cluster.start(hosts, *SETTINGS, *places)
    await_that(partial(has_taken, cluster, 2), "versions that were read", 60.0)
    check_sockets(cluster)
    for host in (0, 1):
        (process,) = processes(cluster, host)
        process.kill()
        await_that(partial(has_taken, cluster, min(taken(cluster)) + 3), "more of them", 60.0)
    out, err = head.communicate(timeout=180)
    assert head.returncode == 0, f"{out}\n{err}"
    check_exactly_once(folders_of(cluster), STEPS)
    await_end(cluster)


def check_sockets(cluster: Cluster) -> None:
    """UCX listens on the address of its host alone, where the plan says that it does."""
    plan = plan_recipe("quickstart", SETTINGS)[1]
    for host, worker in enumerate(("trainer/0", "rollout/0", "rollout/1")):
        assert worker in {name for library in library_ports(plan) for name in library.workers}
        found = list(listening(processes(cluster, host)))
        assert found
        assert unknown(found, {worker: cluster.net.hosts[host].address}) == []
