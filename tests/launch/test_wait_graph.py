"""The wait-for graph in words: who is at the end of it, and circles."""

from __future__ import annotations

import json
import os
import signal
from typing import Any

import distflow.launch.commands.status as status
from distflow.launch.cli import run as distflow
from distflow.launch.observe.wait_graph import wait_graph


def row(
    name: str, state: str = "generating", *peers: str, seconds: float = 3.2, what: str = "leases"
) -> dict[str, Any]:
    waits = [{"name": what, "peers": list(peers), "seconds": seconds}] if peers else []
    return {"name": name, "state": state, "waits": waits}


TRAINER = row("trainer/0", "training", "rollout/0", "rollout/1", what="samples of training step 12")
SILENT = {"name": "rollout/1", "state": "no answer"}


def test_the_one_that_does_not_answer_is_at_the_end_of_it_all():
    graph = wait_graph(
        [TRAINER, row("rollout/0", "generating", "trainer/0"), SILENT], {"rollout/1": "stopped (state T)"}
    )
    assert graph.lines() == [
        "trainer/0 waits for samples of training step 12 from rollout/0, rollout/1 since 3.2 s",
        "rollout/0 waits for leases from trainer/0 since 3.2 s",
        "rollout/1 does not answer: it is stopped (state T)",
        "everything waits for rollout/1, which does not answer",
    ]


def test_that_no_generating_worker_is_left_is_said_while_samples_are_needed():
    gone = [{**row("rollout/0", "gone"), "generates": True}, {**row("rollout/1", "ended"), "generates": True}]
    alone = {**TRAINER, "waits": [{"name": "samples of training step 12", "peers": [], "seconds": 3.0}]}
    assert wait_graph([alone, *gone], {}).verdict() == (
        "no generating worker is left (rollout/0, rollout/1): nothing is sampled until one of them is restarted"
    )
    assert wait_graph([alone, gone[0], {**row("rollout/1"), "generates": True}], {}).verdict() == ""
    saving = row("trainer/0", "saving", "trainer/1", what="the other parts of the checkpoint")
    assert "generating" not in wait_graph([saving, *gone], {}).verdict()


def test_while_another_still_works_not_everything_waits():
    graph = wait_graph([TRAINER, row("rollout/0"), SILENT], {"rollout/1": "stopped (state T)"})
    assert graph.verdict() == "trainer/0 ultimately waits for rollout/1, which does not answer"


def test_healthy_work_is_named_where_all_wait_for_one():
    healthy = wait_graph([row("trainer/0", "training"), row("rollout/0", "generating", "trainer/0")], {})
    assert healthy.verdict() == "everything waits for trainer/0, which is training"
    assert healthy.trouble() == ""
    assert wait_graph([TRAINER, row("rollout/0"), row("rollout/1")], {}).verdict() == ""
    assert wait_graph([row("trainer/0", "training"), row("rollout/0")], {}).lines() == []


IDLE = {**row("reward/0", "serving"), "waits": [{"name": "requests of reward", "peers": [], "seconds": 9.0}]}


def test_a_service_without_requests_waits_for_nobody_and_is_no_reason_for_others_to_wait():
    rows = [row("trainer/0", "training"), row("rollout/0", "generating", "trainer/0"), IDLE]
    assert wait_graph(rows, {}).verdict() == "everything waits for trainer/0, which is training"
    asked = row("rollout/0", "generating", "reward/1", what="answers of 'reward'")
    rows = [row("trainer/0", "training", "rollout/0"), asked, IDLE, {"name": "reward/1", "state": "gone"}]
    assert wait_graph(rows, {}).verdict() == "everything waits for reward/1, which is gone"


def test_a_circle_is_a_deadlock_only_after_a_while():
    def circle(seconds: float) -> str:
        rows = [
            TRAINER,
            *(row(name, "generating", "trainer/0", seconds=seconds) for name in ("rollout/0", "rollout/1")),
        ]
        return wait_graph(rows, {}).verdict()

    assert circle(2.5).startswith("rollout/0, rollout/1, trainer/0 wait for each other (deadlock)")
    assert circle(0.1) == "", "a grant may be on its way"


def test_waiting_for_one_that_is_gone():
    rows = [row("trainer/0", "training", "rollout/0"), {"name": "rollout/0", "state": "gone"}]
    assert wait_graph(rows, {}).verdict() == "everything waits for rollout/0, which is gone"
    both = [row("trainer/0", "training", "rollout/0", "rollout/1"), {"name": "rollout/1", "state": "ended"}]
    assert wait_graph([*rows[1:], *both], {}).verdict() == (
        "everything waits for rollout/0, rollout/1, which are gone and ended"
    )
    starting = [row("trainer/0", "starting", "rollout/0", what="first contact"), row("rollout/0", "starting")]
    assert wait_graph(starting, {}).trouble() == ""
    rows.append({"name": "rollout/1", "state": "ended"})
    assert wait_graph(rows, {}).verdict() == "trainer/0 ultimately waits for rollout/0, which is gone"


def test_status_shows_the_graph_of_real_processes(fake_run, capsys, monkeypatch):
    monkeypatch.setattr(status, "ANSWER_S", 0.5)
    waits = [{"name": "samples", "peers": ["rollout/0"], "seconds": 4.0}]
    run = fake_run({"rollout/0": {}, "trainer/0": {"steps": 10_000, "waits": waits}})
    run.start()
    run.await_up("rollout/0", "trainer/0")
    place = ["--runs-dir", str(run.run_dir.parent)]
    os.kill(run.pid("rollout/0"), signal.SIGSTOP)
    try:
        assert distflow(["status", *place]) == 0
        lines = capsys.readouterr().out.splitlines()
        distflow(["status", "--json", *place])
    finally:
        os.kill(run.pid("rollout/0"), signal.SIGCONT)
    assert lines[-3:] == [
        "trainer/0 waits for samples from rollout/0 since 4.0 s",
        "rollout/0 does not answer: it is stopped (state T)",
        "everything waits for rollout/0, which does not answer",
    ]
    told = json.loads(capsys.readouterr().out)
    assert told["waits"] == [{"worker": "trainer/0", "for": "samples", "from": ["rollout/0"], "since_s": 4.0}]
    assert told["verdict"] == lines[-1]
