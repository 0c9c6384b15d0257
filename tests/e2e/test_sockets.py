"""Every listening socket of a run is a Unix socket, or one of a library that `plan` lists, on loopback."""

from __future__ import annotations

import socket

import psutil

from distflow.comm.collective import LOOPBACK
from distflow.flow.plan_text import library_ports
from distflow.flow.recipe_check import plan_recipe
from tests.e2e.runs import Launch, Run
from tests.e2e.sockets import listening, unknown


def known(*overrides: str) -> dict[str, str]:
    """What the plan says of the workers whose libraries open ports."""
    plan = plan_recipe("quickstart", overrides)[1]
    return {worker: LOOPBACK for library in library_ports(plan) for worker in library.workers}


def check(run: Run, having: dict[str, str]) -> None:
    processes = [psutil.Process(run.process.pid), *run.processes()]
    found = list(listening(processes))
    assert unknown(found, having) == []
    # What is listed is there: so the others were looked at, too.
    assert {word for one in found for word in one.title.split()} >= set(having), found


def test_replicas_listen_on_loopback_alone_and_nobody_else_at_all(launch: Launch) -> None:
    overrides = ["layout.pools.trainer.count=2", "run.training_steps=600"]
    run = launch("quickstart", *overrides)
    run.until(lambda: run.steps_done() >= 2, "a training step of two replicas")
    assert sorted(known(*overrides)) == ["trainer/0", "trainer/1"]
    check(run, known(*overrides))


def test_a_socket_that_nobody_knows_is_found() -> None:
    with socket.create_server(("127.0.0.1", 0)) as known_here, socket.create_server(("0.0.0.0", 0)) as elsewhere:
        me = psutil.Process()
        found = list(listening([me]))
        ports = {one.port for one in unknown(found, {found[0].title.split()[0]: "127.0.0.1"})}
        assert elsewhere.getsockname()[1] in ports
        assert known_here.getsockname()[1] not in ports
