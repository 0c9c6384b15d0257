"""Programs on hosts that are not the run's own: they read its weights with a copy of its record and its key."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

from tests.e2e.runs import PACED
from tests.hosts.conftest import Cluster
from tests.hosts.test_hosts_e2e import hosts_file
from tests.hosts.test_training_on_hosts import await_end, check_exactly_once, folders_of, steps_done
from tests.launch.conftest import REPOSITORY, await_that

STEPS = 60
PROGRAM = REPOSITORY / "tests" / "e2e" / "weights_client.py"
MEMORY_OF_ITS_OWN = 'mount -t tmpfs tmpfs /dev/shm && exec "$@"'


def follow(cluster: Cluster, host: int, folder: Path, *arguments: str, alone: bool) -> subprocess.Popen[str]:
    """A program on a host that prints each version it takes; `alone`: it sees no shared memory of others."""
    program = [sys.executable, str(PROGRAM), str(folder), *arguments]
    apart = ["unshare", "--mount", "sh", "-c", MEMORY_OF_ITS_OWN, "sh"] if alone else []
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1"}
    command = cluster.net.command(host, *apart, *program)
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment)


def copy(run_dir: Path, to: Path) -> None:
    """What a client on another machine needs of a run; the record last, for which programs wait."""
    (to / "keys").mkdir(parents=True)
    shutil.copy(run_dir / "keys" / "run.key", to / "keys")
    shutil.copy(run_dir / "run.json", to / "arriving")
    (to / "arriving").rename(to / "run.json")


def line_of(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


def taken(process: subprocess.Popen[str]) -> dict[int, str]:
    out, err = process.communicate(timeout=60)
    assert process.returncode == 0, err
    lines = [line.split() for line in out.splitlines()]
    return {int(version): total for version, total in lines}


def test_a_program_on_any_host_takes_the_weights_whoever_else_is_killed(cluster: Cluster) -> None:
    """One beside the trainer reads its memory, the other ones get the same over the network."""
    folder, run_dir = cluster.folder / "copy", cluster.runs_dir / "quickstart"
    lost = follow(cluster, 2, folder, "--hang", alone=True)
    far, near = (follow(cluster, host, folder, alone=alone) for host, alone in ((2, True), (0, False)))
    assert [line_of(one) for one in (lost, far, near)] == ["ready"] * 3
    hosts = hosts_file(cluster, "h0 slots=1", "h1 slots=1", shared=True)
    places = ["layout.pools.trainer.hosts=[h0]", "layout.pools.rollout.hosts=[h1]", "layout.pools.rollout.count=1"]
    head = cluster.start(hosts, f"run.training_steps={STEPS}", *PACED, *places)
    await_that(lambda: steps_done(cluster) >= 1, "a training step", 60.0)
    copy(run_dir, folder)
    assert all(line_of(lost) for _ in range(3)), lost.communicate()
    lost.send_signal(signal.SIGKILL)
    lost.communicate()
    out, err = head.communicate(timeout=180)
    assert head.returncode == 0, f"{out}\n{err}"
    by_network, by_memory = taken(far), taken(near)
    both = by_network.keys() & by_memory.keys()
    assert len(both) >= 5
    assert all(by_network[version] == by_memory[version] for version in both)
    assert len({by_network[version] for version in both}) > 1
    check_exactly_once(folders_of(cluster), STEPS)
    await_end(cluster)
