"""Rewards and a frozen reference on hosts of their own: the same run as on one host, whoever of them is cut off."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest

from distflow.launch.run.record import read_record
from distflow.metrics.merge import MetricsReader
from tests.e2e.runs import PACED, PROMPTS, SAMPLES, SMALL
from tests.hosts.conftest import Cluster
from tests.hosts.test_hosts_e2e import hosts_file
from tests.hosts.test_training_on_hosts import (
    LONG,
    SHARED_OR_NOT,
    await_end,
    await_steps,
    check_exactly_once,
    dumped,
    folders_of,
    steps_done,
)
from tests.launch.conftest import await_that
from tests.warm_start import WarmProcess

STEPS = 6
CUT_S = 15.0
SERVICES = ["layout=services", "flow=grpo_kl", "flow.steps.update.with.kl_coef=0.1", "layout.pools.rollout.count=1"]
PLACED = [f"layout.pools.{pool}.hosts=[{host}]" for pool, host in (("trainer", "h0"), ("rollout", "h1"))]


def placed(**pools: str) -> list[str]:
    """The trainer on the first host, the rollout on the second, services as is said."""
    return [*SERVICES, *PLACED, *(f"layout.pools.{pool}.hosts=[{hosts}]" for pool, hosts in pools.items())]


def norms(folder: Path) -> list[float]:
    reader = MetricsReader(folder)
    reader.read()
    return [step["actor/grad_norm"] for step in reader.merged()]


def tokens(folder: Path) -> dict[tuple[int, ...], list[int]]:
    return {(*line["uid"], line["sample"]): line["response_ids"] for line in dumped([folder])}


def waits_of(cluster: Cluster, worker: str) -> str:
    """What a worker waits for, as `distflow status` says."""
    told = cluster.distflow("status", "quickstart", "--json", "--runs-dir", str(cluster.runs_dir))
    rows = json.loads(told.stdout)["workers"] if told.returncode == 0 else []
    return next((row.get("waiting_for") or "" for row in rows if row["name"] == worker), "")


def ends(cluster: Cluster, head: WarmProcess, steps: int) -> None:
    out, err = head.communicate(timeout=240)
    assert head.returncode == 0, f"{out}\n{err}"
    check_exactly_once(folders_of(cluster), steps)
    await_end(cluster)


@SHARED_OR_NOT
def test_services_on_other_hosts_give_the_same_run_as_on_one(shaped: Cluster, shared: bool) -> None:
    exact = ["models.policy.dtype=float64", f"run.training_steps={STEPS}", *SMALL]
    one = hosts_file(shaped, "h0 slots=4", shared=shared)
    code, out, err = shaped.launch(one, "run.name=alone", *SERVICES, *exact)
    assert code == 0, f"{out}\n{err}"
    four = hosts_file(shaped, "h0 slots=1", "h1 slots=1", "h2 slots=1", "h3 slots=1", shared=shared)
    code, out, err = shaped.launch(four, *placed(reward="h2", reference="h3"), *exact)
    assert code == 0, f"{out}\n{err}"
    record = read_record(shaped.runs_dir / "quickstart")
    where = {entry.name: entry.host for entry in record.workers}
    assert where == {"trainer/0": 0, "rollout/0": 1, "reward/0": 2, "reference/0": 3}
    alone, apart = shaped.runs_dir / "alone", shaped.runs_dir / "quickstart"
    assert len(tokens(alone)) == STEPS * PROMPTS * SAMPLES
    assert tokens(apart) == tokens(alone)
    assert norms(apart) == pytest.approx(norms(alone), rel=1e-6)
    assert len(norms(apart)) == STEPS
    await_end(shaped)


@pytest.mark.long
@pytest.mark.parametrize("cut", [2, 3], ids=["of the reference", "of the rewards"])
def test_a_service_on_a_host_that_is_cut_off_is_done_without(shaped: Cluster, cut: int) -> None:
    """Its calls go to the other one; when the link heals it takes its part again."""
    hosts = hosts_file(shaped, "h0 slots=2", "h1 slots=2", "h2 slots=1", "h3 slots=1", shared=False)
    reference, reward = ("h1,h2", "h0") if cut == 2 else ("h0", "h1,h3")
    two = ["layout.pools.reference.count=2"] if cut == 2 else ["layout.pools.reward.count=2"]
    spread = placed(reference=reference, reward=reward)
    head = shaped.start(hosts, f"run.training_steps={LONG}", *PACED, *spread, *two)
    await_steps(shaped, head, 3)
    shaped.net.unplug(cut)
    until, last, done, longest = time.monotonic() + CUT_S, time.monotonic(), steps_done(shaped), 0.0
    while time.monotonic() < until:
        time.sleep(0.05)
        if steps_done(shaped) > done:
            longest, last, done = max(longest, time.monotonic() - last), time.monotonic(), steps_done(shaped)
    assert max(longest, time.monotonic() - last) < 10, "training stood still"
    assert done < LONG - 10, "the run was over before the end of the cut: train longer"
    shaped.net.plug(cut)
    ends(shaped, head, LONG)


@pytest.mark.long
def test_a_run_whose_only_service_is_cut_off_waits_for_it_by_name_and_goes_on(shaped: Cluster) -> None:
    hosts = hosts_file(shaped, "h0 slots=2", "h1 slots=1", "h2 slots=1", shared=False)
    head = shaped.start(hosts, f"run.training_steps={LONG}", *PACED, *placed(reference="h2", reward="h0"))
    await_steps(shaped, head, 3)
    shaped.net.unplug(2)
    await_that(lambda: "reference/0" in waits_of(shaped, "trainer/0"), "the wait for the reference", 60.0)
    assert "answers of 'reference'" in waits_of(shaped, "trainer/0")
    before, until = steps_done(shaped), time.monotonic() + CUT_S
    await_that(lambda: time.monotonic() > until, "the end of the cut")
    assert steps_done(shaped) <= before + 1, "nothing answers"
    shaped.net.plug(2)
    await_that(lambda: steps_done(shaped) > before + 2, "steps after the cut", 60.0)
    ends(shaped, head, LONG)
