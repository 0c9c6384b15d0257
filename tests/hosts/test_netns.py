"""The launcher against real sshds: every host has a network of its own, links can be cut. Agents are stand-ins."""

from __future__ import annotations

import json

from distflow.launch.run.record import read_record
from tests.launch.conftest import await_that

THREE = ("h0", "h1", "h2")


def own(cluster, *names):
    return [f"{name} dir={cluster.folder / name}" for name in names]


def nothing_left(cluster):
    assert not cluster.runs_dir.exists()
    assert not any((cluster.folder / name).exists() for name in THREE)


def test_hosts_reach_each_other_by_ssh_until_the_cable_is_out(cluster):
    done = cluster.net.ssh(0, 1, "ip -o -4 addr show dev eth0")
    assert (done.returncode, "10.77.0.2" in done.stdout) == (0, True), done.stderr
    assert cluster.net.ssh(2, 0, "true").returncode == 0


def test_agents_begin_on_all_hosts_and_the_head_is_one_of_them(cluster):
    code, _, err = cluster.launch(cluster.file(*own(cluster, *THREE)), "--detach")
    assert (code, err) == (0, "")
    # The head is host 0: its own run folder is the one it was told, whatever `dir` says.
    run_dirs = [cluster.runs_dir / "quickstart", *(cluster.folder / name / "quickstart" for name in THREE[1:])]
    told = [json.loads((path / "agents" / f"{n}.json").read_text()) for n, path in enumerate(run_dirs)]
    assert [found["workers"] for found in told] == [["rollout/0"], ["rollout/1"], ["trainer/0"]]
    assert [told[0]["agents"][str(n)].split(":")[1] for n in range(3)] == [f"//10.77.0.{n + 1}" for n in range(3)]
    assert read_record(run_dirs[2]).hosts[1].address == "10.77.0.2"
    # ssh has gone, and the agents have not.
    left = cluster.processes()
    assert len([title for title in left if "standin_agent.py" in title]) == 3
    assert len(left) == 3


def test_a_link_that_is_blocked_is_shown_in_the_matrix(cluster):
    cluster.net.block(2, 1)
    code, _, err = cluster.launch(cluster.file(*own(cluster, *THREE)))
    assert code == 2
    assert "h2 cannot reach h1 at 10.77.0.2: 10.77.0.2:" in err
    assert "h1 cannot reach h2 at 10.77.0.3: no answer from 10.77.0.3:" in err
    rows = [line.split() for line in err.splitlines() if line.startswith("  h") and "cannot" not in line]
    assert rows == [["h0", "-", "ok", "ok"], ["h1", "ok", "-", "NO"], ["h2", "ok", "NO", "-"]]
    nothing_left(cluster)


def test_a_host_that_is_unplugged_is_named(cluster):
    cluster.net.unplug(2)
    code, _, err = cluster.launch(cluster.file(*own(cluster, *THREE)), "--ssh-options", "-oConnectTimeout=2")
    assert code == 2
    assert "hosts:3: h2 — ssh: connect to host 10.77.0.3 port 22:" in err
    nothing_left(cluster)


def test_a_host_with_another_key_is_refused(cluster):
    known = cluster.folder / "known_hosts"
    lines = known.read_text().splitlines(keepends=True)
    other = cluster.folder / "user_key.pub"
    known.write_text("".join([lines[0], lines[1], f"10.77.0.3 {other.read_text()}"]))
    code, _, err = cluster.launch(cluster.file(*own(cluster, *THREE)))
    assert code == 2
    assert "hosts:3: h2 — Host key verification failed." in err
    nothing_left(cluster)


def test_a_user_who_is_not_let_in(cluster):
    (cluster.folder / "user_key.pub").write_text("")
    code, _, err = cluster.launch(cluster.file(*own(cluster, *THREE)))
    assert code == 2
    assert "hosts:2: h1 — root@10.77.0.2: Permission denied" in err
    assert "allow login without a password: ssh-copy-id h1" in err
    nothing_left(cluster)


def test_a_host_that_dies_between_preflight_and_start_takes_nothing_down_but_the_launch(cluster):
    """Its agent is awaited, not yet there, when its cable is pulled; the other hosts tidy up at once."""
    slow = cluster.folder / "slow"
    slow.write_text(f'#!/bin/sh\ncase $1 in -m) exec sleep 60;; esac\nexec {cluster.python} "$@"\n')
    slow.chmod(0o755)
    path = cluster.file(*own(cluster, *THREE))
    path.write_text(
        path.read_text().replace(
            f"dir={cluster.folder}/h2 python={cluster.python}", f"dir={cluster.folder}/h2 python={slow}"
        )
    )
    head = cluster.start(path, "--ssh-options", "-oServerAliveInterval=1 -oServerAliveCountMax=1")
    log = cluster.folder / "h2/quickstart/logs/agent-2.log"
    await_that(log.exists, "the start of the third host's agent")
    cluster.net.unplug(2)
    _, err = head.communicate(timeout=90)
    assert head.returncode == 2
    assert "hosts:3: h2 — the connection was lost" in err
    assert not (cluster.folder / "h1").exists()
    assert not cluster.runs_dir.exists()
