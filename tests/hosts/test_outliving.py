"""A run whose hosts are replaced one after another while it goes on, those that train and the first one included."""

from __future__ import annotations

import os
import signal
from contextlib import suppress
from pathlib import Path

import pytest

from distflow.launch.run.record import RunRecord, read_record
from tests.e2e.runs import PACED, PROMPTS
from tests.hosts.conftest import Cluster
from tests.hosts.test_hosts_e2e import hosts_file
from tests.hosts.test_training_on_hosts import check_exactly_once, folders_of
from tests.launch.conftest import await_that

STEPS = 600
COMMON = [*PACED, "limits.host_silence_s=6", f"run.training_steps={STEPS}", "layout=async", "run.save_every=10"]
LONG_S = 150.0


def folder_on(cluster: Cluster, host: int) -> Path:
    return cluster.runs_dir if host == 0 else cluster.folder / cluster.net.hosts[host].name


def record_on(cluster: Cluster, host: int) -> RunRecord:
    return read_record(folder_on(cluster, host) / "quickstart")


def trainers_in(record: RunRecord) -> dict[str, int]:
    return {entry.name: entry.host for entry in record.workers if entry.trains}


def trained(cluster: Cluster) -> int:
    """The last training step of which any host has a dump."""
    found = (path.name for folder in folders_of(cluster) for path in folder.glob("rollouts/step_*"))
    return max((int(name.removeprefix("step_")) for name in found), default=0)


def kill_host(cluster: Cluster, host: int) -> None:
    cluster.net.unplug(host)
    for pid in cluster.net.pids(cluster.net.hosts[host]):
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def move(cluster: Cluster, old: int, new: int, asked_on: int, runs_dir: Path, *, shared: bool) -> None:
    """What runs on a host is to run on one that joins."""
    hosts = hosts_file(cluster, f"{cluster.net.hosts[new].name} slots=2", shared=shared)
    options = ["--hosts", str(hosts), "--ssh-config", str(cluster.net.ssh_config), "--runs-dir", str(runs_dir)]
    done = cluster.distflow("scale", "quickstart", "--leave", f"h{old}", *options, host=asked_on)
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"hosts joined: h{new}" in done.stdout


def replace_host(cluster: Cluster, old: int, new: int, asked_on: int) -> None:
    """Move what runs on a host to one that joins, and take the old one away."""
    move(cluster, old, new, asked_on, folder_on(cluster, asked_on), shared=False)
    await_that(
        lambda: {entry.host for entry in record_on(cluster, asked_on).workers}.isdisjoint({old}),
        f"the end of the workers of h{old}",
        LONG_S,
    )
    reached = trained(cluster)
    await_that(lambda: trained(cluster) >= reached + 2, f"training steps without h{old}", LONG_S)
    kill_host(cluster, old)
    await_that(lambda: old in record_on(cluster, new).silent, f"silence of h{old}", LONG_S)


@pytest.mark.long
def test_all_hosts_of_a_run_are_replaced_one_after_another(shaped: Cluster) -> None:
    begin = hosts_file(shaped, "h0 slots=2", "h1 slots=2", shared=False)
    two = ["layout.pools.trainer.count=2", "layout.pools.rollout.count=2"]
    shaped.start(begin, *COMMON, *two)
    await_that(lambda: trained(shaped) >= 3, "the third training step", LONG_S)
    replace_host(shaped, 1, 2, asked_on=0)
    replace_host(shaped, 0, 3, asked_on=2)
    await_that(lambda: record_on(shaped, 2).over and record_on(shaped, 3).over, "the end", LONG_S)
    assert [record_on(shaped, host).state for host in (2, 3)] == ["done", "done"]
    check_exactly_once(folders_of(shaped), STEPS, PROMPTS)


@pytest.mark.long
def test_training_workers_of_a_host_that_is_gone_go_on_elsewhere(shaped: Cluster) -> None:
    begin = hosts_file(shaped, "h0 slots=2", "h1 slots=2", "h2 slots=2", shared=True)
    three = ["layout.pools.trainer.count=3", "layout.pools.rollout.count=3", "layout.on_failure=restart"]
    head = shaped.start(begin, *COMMON, *three)
    await_that(lambda: (shaped.runs_dir / "quickstart/checkpoints/step_000010/COMMIT").exists(), "a checkpoint", LONG_S)
    kill_host(shaped, 2)
    await_that(lambda: "cannot continue without them" in record_on(shaped, 0).waits_for, "a word of why", LONG_S)
    move(shaped, 2, 3, 0, shaped.runs_dir, shared=True)
    trainers = {"trainer/0": 0, "trainer/1": 1, "trainer/3": 3}
    await_that(lambda: trainers_in(record_on(shaped, 0)) == trainers, "the next term", LONG_S)
    await_that(lambda: 2 not in {entry.host for entry in record_on(shaped, 0).workers}, "a record without h2", LONG_S)
    out, err = head.communicate(timeout=240)
    assert head.returncode == 0, out + err
    assert "pool trainer goes from 3 to 3 training workers (trainer/0, trainer/1, trainer/3)" in out
    check_exactly_once(folders_of(shaped), STEPS, PROMPTS)
