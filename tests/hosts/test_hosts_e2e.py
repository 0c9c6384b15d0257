"""Whole runs over hosts that share nothing of the network, launched from the first of them by real ssh."""

from __future__ import annotations

import json
import os
import signal

import pytest

from distflow.launch.run.record import read_record
from distflow.metrics.merge import MetricsReader
from tests.launch.conftest import FAKE_WORKERS, await_that

STEPS = 5
ONE = "layout.pools.rollout.count=1"
LONG = "layout.pools.trainer.backend_options={fake: {steps: 10000, step_s: 0.05}}"
SHARED_OR_NOT = pytest.mark.parametrize("shared", [True, False], ids=["shared-folder", "own-folders"])


def hosts_file(cluster, *lines, shared):
    whole = [line if shared else f"{line} dir={cluster.folder / line.split()[0]}" for line in lines]
    return cluster.file(*whole, python=cluster.warm)


def steps_of(run_dir):
    reader = MetricsReader(run_dir)
    reader.read()
    return [int(step["step"]) for step in reader.merged()]


def own_folders(cluster):
    return [path for name in ("h0", "h1", "h2") if (path := cluster.folder / name / "quickstart").exists()]


@SHARED_OR_NOT
def test_a_run_of_fake_workers_from_its_first_line_to_its_last(cluster, shared):
    hosts = hosts_file(cluster, "h1 slots=1", "h0 slots=2", shared=shared)
    fake = f"layout.pools.trainer.backend_options={{fake: {{steps: {STEPS}}}}}"
    code, out, err = cluster.launch(hosts, fake, f"run.training_steps={STEPS}", *FAKE_WORKERS)
    assert (code, err) == (0, "")
    run_dir = cluster.runs_dir / "quickstart"
    assert out.splitlines()[0] == str(run_dir)
    assert f"step {STEPS}/{STEPS}" in out
    record = read_record(run_dir)
    assert (record.state, [host.name for host in record.hosts]) == ("done", ["h0", "h1"])
    assert steps_of(run_dir) == list(range(1, STEPS + 1))
    await_that(lambda: all(read_record(path).state == "done" for path in own_folders(cluster)), "the end on all hosts")


@SHARED_OR_NOT
def test_the_head_may_go_and_stop_ends_everything(cluster, shared):
    hosts = hosts_file(cluster, "h0", "h1", "h2", shared=shared)
    head = cluster.start(hosts, LONG, *FAKE_WORKERS)
    run_dir = cluster.runs_dir / "quickstart"
    await_that(lambda: (run_dir / "run.json").exists() and read_record(run_dir).state == "running", "a run that runs")
    os.kill(head.pid, signal.SIGKILL)
    head.communicate()
    done = cluster.distflow("stop", "quickstart", "--runs-dir", str(cluster.runs_dir))
    assert done.returncode == 0, done.stderr
    assert read_record(run_dir).state == "stopped"
    await_that(
        lambda: all(read_record(path).state == "stopped" for path in own_folders(cluster)), "the others' records"
    )
    await_that(lambda: cluster.processes() == [], "the end of all agents")


def test_a_head_that_is_no_host_of_the_run_watches_and_fetches_its_end(cluster):
    hosts = hosts_file(cluster, "h1 slots=1", "h2 slots=2", shared=False)
    fake = f"layout.pools.trainer.backend_options={{fake: {{steps: {STEPS}}}}}"
    code, out, err = cluster.launch(hosts, fake, f"run.training_steps={STEPS}", *FAKE_WORKERS)
    assert (code, err) == (0, ""), out
    run_dir = cluster.runs_dir / "quickstart"
    assert read_record(run_dir).state == "done"
    assert steps_of(run_dir) == list(range(1, STEPS + 1))


def test_stop_on_a_head_that_is_no_host_of_the_run_ends_it(cluster):
    head = cluster.start(hosts_file(cluster, "h1 slots=1", "h2 slots=2", shared=False), LONG, *FAKE_WORKERS)
    run_dir = cluster.runs_dir / "quickstart"
    await_that(lambda: (run_dir / "run.json").exists() and read_record(run_dir).state == "running", "a run that runs")
    os.kill(head.pid, signal.SIGKILL)
    head.communicate()
    done = cluster.distflow("stop", "quickstart", "--runs-dir", str(cluster.runs_dir))
    assert done.returncode == 0, done.stderr
    assert read_record(run_dir).state == "stopped"
    await_that(
        lambda: [read_record(path).state for path in own_folders(cluster)] == ["stopped"] * 2, "the hosts' records"
    )
    await_that(lambda: cluster.processes() == [], "the end of all agents")


@pytest.mark.parametrize("end", ["by itself", "by stop"])
def test_commands_on_a_machine_outside_of_the_run_tell_what_its_hosts_know(cluster, end):
    """Nothing watches: the head has gone once the workers run."""
    steps = 60 if end == "by itself" else 10000
    fake = f"layout.pools.trainer.backend_options={{fake: {{steps: {steps}, step_s: 0.05}}}}"
    hosts = hosts_file(cluster, "h1 slots=1", "h2 slots=2", shared=False)
    code, _, err = cluster.launch(hosts, fake, f"run.training_steps={steps}", *FAKE_WORKERS, "--detach")
    assert (code, err) == (0, "")
    run_dir = cluster.runs_dir / "quickstart"

    def told(*words):
        done = cluster.distflow(words[0], "quickstart", *words[1:], "--runs-dir", str(cluster.runs_dir))
        assert done.returncode == 0, done.stderr
        return done.stdout

    # Before the first step of a trainer its metrics are missing, but it says itself which step it does.
    await_that(lambda: json.loads(told("status", "--json"))["step"] >= 2, "steps that the hosts have done")
    if end == "by stop":
        rows = json.loads(told("status", "--json"))["workers"]
        known = {row["name"]: (row["state"], row["pid"]) for row in rows}
        marks = read_record(own_folders(cluster)[0]).pids
        assert known == {row["name"]: ("running", marks[row["name"]].pid) for row in rows}
        assert {row["host"] for row in rows} == {"h1", "h2"}
        assert "does not run" not in told("stacks")
        before = json.loads(told("metrics", "--json"))[-1]["step"]
        assert "(nothing was)" not in told("stop")
        assert steps_of(run_dir)[-1] >= before
    else:
        await_that(lambda: cluster.processes() == [], "the end of all agents")
    seen = json.loads(told("status", "--json"))
    assert (seen["state"], seen["lost"]) == ("done" if end == "by itself" else "stopped", False)
    assert {row["state"] for row in seen["workers"]} == {"ended"}
    assert seen["step"] == max(steps_of(folder)[-1] for folder in own_folders(cluster))
    await_that(lambda: cluster.processes() == [], "the end of all agents")


def test_further_hosts_that_cannot_come_are_named_and_leave_no_trace(cluster):
    head = cluster.start(hosts_file(cluster, "h0", "h1", shared=False), LONG, ONE, *FAKE_WORKERS)
    run_dir = cluster.runs_dir / "quickstart"
    await_that(lambda: (run_dir / "run.json").exists() and read_record(run_dir).state == "running", "a run that runs")
    options = ["--runs-dir", str(cluster.runs_dir), "--ssh-config", str(cluster.net.ssh_config)]

    def refused(change, *lines):
        file = hosts_file(cluster, *lines, shared=False)
        done = cluster.distflow("scale", "quickstart", change, "--hosts", str(file), *options)
        assert (done.returncode, done.stdout) == (2, "")
        assert (cluster.net.pids(cluster.net.hosts[2]), (cluster.folder / "h2").exists()) == ([sshd], False)
        return done.stderr

    (sshd,) = cluster.net.pids(cluster.net.hosts[2])
    assert "h9 — ssh: Could not resolve hostname h9" in refused("rollout=3", "h2", "h9")
    assert "rollout has 1 workers already, and --hosts is only for adding workers" in refused("rollout=1", "h2")
    assert "8 more workers, but the hosts together have 2 slots" in refused("rollout=9", "h2 slots=2")
    message = refused("rollout=2", "h2 address=10.77.0.200")
    assert "it cannot listen on 10.77.0.200" in message
    assert "give an address that this host has" in message
    # The numbers that were kept for them are free again.
    assert [entry.name for entry in read_record(run_dir).hosts] == ["h0", "h1"]
    assert read_record(run_dir).state == "running"
    assert cluster.distflow("stop", "quickstart", "--runs-dir", str(cluster.runs_dir)).returncode == 0
    head.communicate(timeout=60)
    await_that(lambda: cluster.processes() == [], "the end of all agents")
