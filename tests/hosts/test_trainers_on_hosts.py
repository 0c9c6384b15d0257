"""Training workers on several hosts, one of which dies or is cut off: who goes on, and from what."""

from __future__ import annotations

import os
import signal
import time
from contextlib import suppress

import psutil
import pytest

from distflow.launch.run.record import RunRecord, read_record
from tests.e2e.runs import SMALL
from tests.hosts.conftest import Cluster
from tests.hosts.test_hosts_e2e import hosts_file
from tests.hosts.test_training_on_hosts import await_end, await_steps, check_exactly_once, folders_of, steps_done
from tests.launch.conftest import await_that
from tests.warm_start import WarmProcess

SILENCE_S = 6.0
GONE_S = SILENCE_S + 3.0
STEPS = 40
COMMON = [f"limits.host_silence_s={SILENCE_S:g}", f"run.training_steps={STEPS}", "run.save_every=4", "layout=async"]


def trainers_on(cluster: Cluster, host: int) -> list[psutil.Process]:
    return training_on(cluster, host, ("trainer",))


def training_on(cluster: Cluster, host: int, pools: tuple[str, ...] = ("trainer", "critic")) -> list[psutil.Process]:
    found = []
    for pid in cluster.net.pids(cluster.net.hosts[host]):
        with suppress(psutil.Error):
            process = psutil.Process(pid)
            title = " ".join(process.cmdline())
            if (
                title.startswith(tuple(f"distflow quickstart {pool}/" for pool in pools))
                and process.status() != psutil.STATUS_ZOMBIE
            ):
                found.append(process)
    return found


def record(cluster: Cluster) -> RunRecord:
    return read_record(cluster.runs_dir / "quickstart")


def start_and_lose_the_third_host(cluster: Cluster, *, shared: bool) -> WarmProcess:
    """A pool of three that may shrink; after the sixth training step a host is gone with all that ran on it."""
    hosts = hosts_file(cluster, "h0 slots=2", "h1 slots=2", "h2 slots=2", shared=shared)
    three = ["layout.pools.trainer.count=3", "layout.pools.rollout.count=3", "layout.on_failure=shrink"]
    head = cluster.start(hosts, *COMMON, *three)
    await_steps(cluster, head, 6)
    cluster.net.unplug(2)
    for pid in cluster.net.pids(cluster.net.hosts[2]):
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    return head


def end_of(cluster: Cluster, head: WarmProcess, code: int) -> str:
    out, err = head.communicate(timeout=240)
    assert head.returncode == code, f"{out}\n{err}"
    await_end(cluster)
    return out + err


@pytest.mark.long
def test_a_killed_training_worker_comes_back_where_hosts_have_folders_of_their_own(shaped: Cluster) -> None:
    hosts = hosts_file(shaped, "h0 slots=2", "h1 slots=2", shared=False)
    two = ["layout.pools.trainer.count=2", "layout.pools.rollout.count=2"]
    head = shaped.start(hosts, *COMMON, *two)
    await_steps(shaped, head, 6)
    (victim,) = trainers_on(shaped, 1)
    os.kill(victim.pid, signal.SIGKILL)
    said = end_of(shaped, head, 0)
    assert "the training workers go on from training step" in said
    assert record(shaped).term == 1
    check_exactly_once(folders_of(shaped), STEPS, prompts=32)


@pytest.mark.long
def test_of_two_and_two_neither_goes_on_until_they_hear_each_other(shaped: Cluster) -> None:
    hosts = hosts_file(shaped, "h0 slots=3", "h1 slots=3", shared=False)
    four = ["layout.pools.trainer.count=4", "layout.pools.rollout.count=2", "layout.on_failure=shrink"]
    head = shaped.start(hosts, *COMMON, *four)
    await_steps(shaped, head, 6)
    assert [len(trainers_on(shaped, host)) for host in (0, 1)] == [2, 2]
    shaped.net.unplug(1)
    await_that(lambda: not trainers_on(shaped, 0) and not trainers_on(shaped, 1), "the end of both halves")
    await_that(lambda: "only 2 of 4 training workers" in record(shaped).waits_for, "a word of why")
    before, until = steps_done(shaped), time.monotonic() + 2 * GONE_S
    await_that(lambda: time.monotonic() > until, "time in which neither half goes on")
    assert not trainers_on(shaped, 0)
    assert not trainers_on(shaped, 1)
    assert steps_done(shaped) == before
    shaped.net.plug(1)
    said = end_of(shaped, head, 0)
    assert "the training workers wait for h1 with trainer/" in said
    assert record(shaped).term == 1
    check_exactly_once(folders_of(shaped), STEPS, prompts=32)


@pytest.mark.long
def test_a_policy_cut_off_from_most_of_its_critics_waits_for_them_and_they_for_it(shaped: Cluster) -> None:
    """Three critics are most of five, and no more able to go on without a policy than it is without them."""
    hosts = hosts_file(shaped, "h0 slots=3", "h1 slots=3", shared=False)
    pools = ["layout.pools.critic.count=3", "layout.pools.critic.hosts=[h1]", "layout.pools.trainer.hosts=[h0]"]
    pools += [
        "layout.pools.trainer.count=2",
        "layout.pools.rollout.count=1",
        "layout.pools.rollout.hosts=[h0]",
        "layout.on_failure=shrink",
    ]
    head = shaped.start(hosts, *COMMON[:-1], "flow=ppo", "layout=critic", *SMALL, *pools, "run.training_steps=20")
    await_steps(shaped, head, 6)
    shaped.net.unplug(1)
    await_that(lambda: not training_on(shaped, 0) and not training_on(shaped, 1), "the end of both homes")
    await_that(lambda: "only 2 of 5 training workers" in record(shaped).waits_for, "a word of why")
    before, until = steps_done(shaped), time.monotonic() + 2 * GONE_S
    await_that(lambda: time.monotonic() > until, "time in which neither home goes on")
    assert not training_on(shaped, 0)
    assert not training_on(shaped, 1)
    assert steps_done(shaped) == before
    shaped.net.plug(1)
    said = end_of(shaped, head, 0)
    assert "the training workers wait for h1 with critic/" in said
    assert record(shaped).term == 1
    check_exactly_once(folders_of(shaped), 20)


@pytest.mark.long
def test_of_two_and_one_the_two_go_on_after_the_one_has_ended(shaped: Cluster) -> None:
    hosts = hosts_file(shaped, "h0 slots=2", "h1 slots=2", "h2 slots=2", shared=True)
    three = ["layout.pools.trainer.count=3", "layout.pools.rollout.count=3", "layout.on_failure=shrink"]
    head = shaped.start(hosts, *COMMON, *three)
    await_steps(shaped, head, 6)
    shaped.net.unplug(2)
    await_that(lambda: not trainers_on(shaped, 2), "the end of the one that was cut off")
    assert record(shaped).term == 0, "the others have not begun anew yet"
    await_that(lambda: record(shaped).term == 1, "the next term, of the two others")
    assert not trainers_on(shaped, 2)
    shaped.net.plug(2)
    said = end_of(shaped, head, 0)
    assert "nothing was heard from h2 for 9 s; trainer/2 cannot come back (2 training workers are left)" in said
    assert {entry.name for entry in record(shaped).workers if entry.trains} == {"trainer/0", "trainer/1"}
    check_exactly_once(folders_of(shaped), STEPS, prompts=32)


@pytest.mark.long
def test_parts_that_are_lost_with_their_host_are_named(shaped: Cluster) -> None:
    head = start_and_lose_the_third_host(shaped, shared=False)
    said = end_of(shaped, head, 3)
    assert "lacks model-policy-trainer-2.safetensors, worker-trainer-2.json" in said
    assert "--resume" in said


@pytest.mark.long
def test_a_host_that_never_comes_back_is_done_without(shaped: Cluster) -> None:
    head = start_and_lose_the_third_host(shaped, shared=True)
    said = end_of(shaped, head, 0)
    assert "trainer/2 cannot come back (2 training workers are left)" in said
    check_exactly_once(folders_of(shaped), STEPS, prompts=32)


@pytest.mark.long
def test_a_killed_agent_is_no_reason_to_begin_anew(shaped: Cluster) -> None:
    hosts = hosts_file(shaped, "h0 slots=2", "h1 slots=2", shared=True)
    two = ["layout.pools.trainer.count=2", "layout.pools.rollout.count=2", "layout.on_failure=shrink"]
    head = shaped.start(hosts, *COMMON, *two, "run.training_steps=1000")
    await_steps(shaped, head, 6)
    os.kill(record(shaped).pids["agent/1"].pid, signal.SIGKILL)
    until = time.monotonic() + 2 * GONE_S
    await_that(lambda: time.monotonic() > until, "time in which the agent would have to say something")
    before = steps_done(shaped)
    await_steps(shaped, head, before + 3)
    assert (record(shaped).term, record(shaped).state) == (0, "running")
    head.send_signal(signal.SIGINT)
    end_of(shaped, head, 130)
