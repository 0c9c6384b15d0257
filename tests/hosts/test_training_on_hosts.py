"""Real training over hosts that are network namespaces with links of 200 Mbit/s, launched by ssh from the first one.

Rollouts on hosts without a training worker fetch weights over the network, training replicas on different hosts sum
their gradients over it, and neither the head nor a link need live.
"""

from __future__ import annotations

import json
import os
import signal
import time
from collections import Counter
from pathlib import Path

import pytest

from distflow.launch.record import read_record
from tests.hosts.conftest import Cluster
from tests.hosts.test_hosts_e2e import hosts_file
from tests.launch.conftest import await_that

CUT_S = 10.0
LEAVE_S = 30.0
LONG = 400
SHARED = pytest.param(True, id="shared-folder", marks=pytest.mark.long)
SHARED_OR_NOT = pytest.mark.parametrize("shared", [SHARED, pytest.param(False, id="own-folders")])
TWO_REPLICAS = ["layout.pools.trainer.count=2", "layout.pools.rollout.count=2", "layout=async"]


def check_exactly_once(folders: list[Path], steps: int) -> None:
    """Every position of the run was trained on once, by the dumps in all its folders."""
    files = {path.relative_to(folder): path for folder in folders for path in folder.glob("rollouts/step_*/*.jsonl")}
    lines = [json.loads(line) for path in files.values() for line in path.read_text().splitlines()]
    groups = Counter((tuple(line["uid"]), line["sample"]) for line in lines)
    assert set(groups.values()) == {1}
    assert {uid[2] for uid, _ in groups} == set(range(steps * 32))


def folders_of(cluster: Cluster) -> list[Path]:
    """The run folder on the head, and those of hosts that have their own."""
    own = [cluster.folder / host.name / "quickstart" for host in cluster.net.hosts]
    return [cluster.runs_dir / "quickstart", *(path for path in own if path.exists())]


def steps_done(cluster: Cluster) -> int:
    files = {path for folder in folders_of(cluster) for path in folder.glob("metrics/trainer-0.jsonl")}
    return max((path.read_text().count("\n") for path in files), default=0)


def await_end(cluster: Cluster) -> None:
    """Nothing may be left on any host."""
    deadline = time.monotonic() + LEAVE_S
    while left := cluster.processes():
        assert time.monotonic() < deadline, f"left running: {left}"


@SHARED_OR_NOT
def test_replicas_and_rollouts_on_two_hosts(shaped: Cluster, shared: bool) -> None:
    hosts = hosts_file(shaped, "h0 slots=2", "h1 slots=2", shared=shared)
    code, out, err = shaped.launch(hosts, "run.training_steps=12", *TWO_REPLICAS)
    assert code == 0, f"{out}\n{err}"
    record = read_record(shaped.runs_dir / "quickstart")
    assert (record.state, {entry.host for entry in record.workers if entry.trains}) == ("done", {0, 1})
    check_exactly_once(folders_of(shaped), 12)
    assert (shaped.runs_dir / "quickstart" / "checkpoints" / "step_000012" / "COMMIT").exists()
    await_end(shaped)


@SHARED_OR_NOT
def test_four_hosts_without_their_head(shaped: Cluster, shared: bool) -> None:
    hosts = hosts_file(shaped, "h0 slots=1", "h1 slots=1", "h2 slots=1", "h3 slots=1", shared=shared)
    head = shaped.start(hosts, "run.training_steps=30", "layout.pools.rollout.count=3")
    await_that(lambda: steps_done(shaped) >= 3, "the third training step")
    os.kill(head.pid, signal.SIGKILL)
    head.communicate()
    await_that(lambda: read_record(shaped.runs_dir / "quickstart").over, "the end of the run")
    assert read_record(shaped.runs_dir / "quickstart").state == "done"
    check_exactly_once(folders_of(shaped), 30)
    await_end(shaped)


def test_a_link_that_is_cut_and_heals(shaped: Cluster) -> None:
    """The host of a rollout, and then that of the training worker, is out of reach for 10 s each."""
    hosts = hosts_file(shaped, "h0 slots=1", "h1 slots=1", "h2 slots=1", shared=False)
    head = shaped.start(hosts, f"run.training_steps={LONG}", "layout.pools.rollout.count=2")
    await_that(lambda: steps_done(shaped) >= 3, "the third training step")
    record = read_record(shaped.runs_dir / "quickstart")
    trainer = next(entry.host for entry in record.workers if entry.trains)
    rollout = next(entry.host for entry in record.workers if not entry.trains and entry.host != 0)
    for host in (rollout, trainer):
        shaped.net.unplug(host)
        healed_at = time.monotonic() + CUT_S
        await_that(lambda at=healed_at: time.monotonic() > at, "the end of the cut")
        shaped.net.plug(host)
        before = steps_done(shaped)
        assert before < LONG - 10, "the run was over before the cut: train longer"
        await_that(lambda before=before: steps_done(shaped) > before + 2, "steps after the cut")
    out, err = head.communicate(timeout=180)
    assert head.returncode == 0, f"{out}\n{err}"
    check_exactly_once(folders_of(shaped), LONG)
    await_end(shaped)
