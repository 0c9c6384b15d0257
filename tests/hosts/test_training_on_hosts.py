"""Real training over hosts that are network namespaces with links of 200 Mbit/s, launched by ssh from the first one.

Rollouts on hosts without a training worker fetch weights over the network, training replicas on different hosts sum
their gradients over it, and neither the head nor a link need live.
"""

from __future__ import annotations

import json
import os
import signal
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest

from distflow.comm.addresses import place_of
from distflow.flow.recipe_check import plan_recipe
from distflow.flow.sizes import model_size
from distflow.launch.run.record import read_record
from distflow.runtime.checkpoint.commit import fingerprint
from tests.e2e.runs import PACED, PROMPTS, SMALL, check_positions
from tests.e2e.sockets import listening, unknown
from tests.hosts.conftest import Cluster, reason
from tests.hosts.netns import NetHosts
from tests.hosts.test_hosts_e2e import hosts_file
from tests.launch.conftest import await_that
from tests.polling import Patience
from tests.warm_start import WarmProcess

CUT_S = 10.0
LEAVE_S = 30.0
START_S = 120.0
LONG = 400
PART = "large.bin"
SHARED = pytest.param(True, id="shared-folder", marks=pytest.mark.long)
SHARED_OR_NOT = pytest.mark.parametrize("shared", [SHARED, pytest.param(False, id="own-folders")])
TWO_REPLICAS = [*SMALL, "layout.pools.trainer.count=2", "layout.pools.rollout.count=2", "layout=async"]


def dumped(folders: list[Path]) -> list[dict[str, Any]]:
    """What was trained on, by the dumps in all folders of the run."""
    files = {path.relative_to(folder): path for folder in folders for path in folder.glob("rollouts/step_*/*.jsonl")}
    return [json.loads(line) for path in files.values() for line in path.read_text().splitlines()]


def check_exactly_once(folders: list[Path], steps: int, prompts: int = PROMPTS) -> None:
    """Every position of the run was trained on once."""
    check_positions(dumped(folders), steps, prompts)


def folders_of(cluster: Cluster) -> list[Path]:
    """The run folder on the head, and those of hosts that have their own."""
    own = [cluster.folder / host.name / "quickstart" for host in cluster.net.hosts]
    return [cluster.runs_dir / "quickstart", *(path for path in own if path.exists())]


def steps_done(cluster: Cluster) -> int:
    files = {path for folder in folders_of(cluster) for path in folder.glob("metrics/trainer-0.jsonl")}
    return max((path.read_text().count("\n") for path in files), default=0)


def await_steps(cluster: Cluster, head: WarmProcess, number: int) -> None:
    """Start-up is included: agents, workers and their libraries on all hosts, on few cores."""
    patience = Patience(START_S)
    while steps_done(cluster) < number:
        if head.poll() is not None or patience.over:
            said = cluster.distflow("status", "quickstart", "--runs-dir", str(cluster.runs_dir))
            raise AssertionError(f"{steps_done(cluster)} training steps of {number}\n{said.stdout}{said.stderr}")
        time.sleep(0.05)


def workers_since(cluster: Cluster, step: int) -> set[str]:
    """Who generated what was trained on after a training step."""
    return {line["worker"] for line in dumped(folders_of(cluster)) if line["step"] > step}


def await_end(cluster: Cluster) -> None:
    """Nothing may be left on any host."""
    patience = Patience(LEAVE_S)
    while left := cluster.processes():
        assert not patience.over, f"left running: {left}"


def check_sockets(cluster: Cluster, hosts: int) -> None:
    """All of a host listen on its address alone: ours on ports that the run knows, libraries in trainers."""
    record = read_record(cluster.runs_dir / "quickstart")
    ours = {place_of(address) for address in (*record.roster.values(), *(entry.agent for entry in record.hosts))}
    for host in cluster.net.hosts[:hosts]:
        processes = [psutil.Process(pid) for pid in cluster.net.pids(host)]
        found = [one for one in listening(processes) if one.title.startswith("distflow ")]
        names = [f"{pool}/{number}" for pool in ("agent", "rollout", "trainer") for number in range(hosts)]
        assert unknown(found, dict.fromkeys(names, host.address)) == []
        strange = [one for one in found if f"tcp://{one.address}:{one.port}" not in ours and "trainer" not in one.title]
        assert strange == []
        # An agent and two workers of ours; a trainer's libraries and its weights beside.
        assert len(found) >= 4


def add_part(checkpoint: Path, size: int) -> int:
    """Add a part to a checkpoint; returns its size in bytes."""
    with (checkpoint / PART).open("wb") as file:
        for _ in range(size // 1_000_000):
            file.write(os.urandom(1_000_000))
    commit = json.loads((checkpoint / "COMMIT").read_text())
    commit["parts"][PART] = fingerprint(checkpoint / PART)
    (checkpoint / "COMMIT").write_text(json.dumps(commit))
    return size


def memory(net: NetHosts) -> int:
    """Bytes in memory that the processes of the hosts share with no others, the sum of all."""
    found = 0
    for pid in [pid for host in net.hosts for pid in net.pids(host)]:
        with suppress(psutil.Error):
            found += psutil.Process(pid).memory_full_info().uss
    return found


@SHARED_OR_NOT
def test_replicas_and_rollouts_on_two_hosts(shaped: Cluster, shared: bool) -> None:
    hosts = hosts_file(shaped, "h0 slots=2", "h1 slots=2", shared=shared)
    head = shaped.start(hosts, "run.training_steps=30", *TWO_REPLICAS)
    await_steps(shaped, head, 2)
    check_sockets(shaped, hosts=2)
    out, err = head.communicate(timeout=180)
    assert head.returncode == 0, f"{out}\n{err}"
    record = read_record(shaped.runs_dir / "quickstart")
    assert (record.state, {entry.host for entry in record.workers if entry.trains}) == ("done", {0, 1})
    check_exactly_once(folders_of(shaped), 30)
    assert (shaped.runs_dir / "quickstart" / "checkpoints" / "step_000030" / "COMMIT").exists()
    await_end(shaped)


@pytest.mark.long
def test_hosts_with_folders_of_their_own_go_on_from_a_checkpoint_of_all_of_them(shaped: Cluster) -> None:
    hosts = hosts_file(shaped, "h0 slots=2", "h1 slots=2", shared=False)
    code, out, err = shaped.launch(hosts, "run.training_steps=12", "run.stop_after=6", *TWO_REPLICAS)
    assert code == 0, f"{out}\n{err}"
    code, out, err = shaped.launch(hosts, "run.training_steps=12", "--run", "quickstart", "--resume", *TWO_REPLICAS)
    assert code == 0, f"{out}\n{err}"
    assert "resuming after training step 6" in out
    check_exactly_once(folders_of(shaped), 12)
    await_end(shaped)


@SHARED_OR_NOT
def test_four_hosts_without_their_head(shaped: Cluster, shared: bool) -> None:
    hosts = hosts_file(shaped, "h0 slots=1", "h1 slots=1", "h2 slots=1", "h3 slots=1", shared=shared)
    head = shaped.start(hosts, "run.training_steps=30", *SMALL, "layout.pools.rollout.count=3")
    await_steps(shaped, head, 3)
    os.kill(head.pid, signal.SIGKILL)
    head.communicate()
    await_that(lambda: read_record(shaped.runs_dir / "quickstart").over, "the end of the run")
    assert read_record(shaped.runs_dir / "quickstart").state == "done"
    check_exactly_once(folders_of(shaped), 30)
    await_end(shaped)


def test_what_has_changed_in_the_weights_crosses_to_a_host_of_rollouts(shaped: Cluster) -> None:
    """Of a version that a small step has made; the trainer's host sends little else, samples come to it."""
    steps, policy = 20, ["models.policy.dtype=bfloat16", "models.policy.optimizer.lr=1e-6"]
    hosts = hosts_file(shaped, "h0 slots=1", "h1 slots=2", shared=True)
    places = ["layout.pools.trainer.hosts=[h0]", "layout.pools.rollout.hosts=[h1]", "layout.pools.rollout.count=2"]
    code, out, err = shaped.launch(hosts, f"run.training_steps={steps}", *SMALL, *policy, *places)
    assert code == 0, f"{out}\n{err}"
    check_exactly_once(folders_of(shaped), steps)
    size = model_size(plan_recipe("quickstart", policy)[1].recipe.models["policy"])
    assert size is not None
    assert size.published < shaped.net.sent(0) < size.published * steps / 3
    await_end(shaped)


@pytest.mark.long
def test_a_link_that_is_cut_and_heals(shaped: Cluster) -> None:
    """The host of a rollout, and then that of the training worker, is out of reach for 10 s each."""
    hosts = hosts_file(shaped, "h0 slots=1", "h1 slots=1", "h2 slots=1", shared=False)
    head = shaped.start(hosts, f"run.training_steps={LONG}", *PACED, "layout.pools.rollout.count=2")
    await_steps(shaped, head, 3)
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


@pytest.mark.long
def test_without_hedging_the_leases_of_a_host_that_is_gone_go_to_others(shaped: Cluster) -> None:
    """As by a loss of power: nobody says that its processes ended, and it never comes back."""
    hosts = hosts_file(shaped, "h0 slots=1", "h1 slots=1", "h2 slots=1", shared=False)
    settings = ["layout.hedging=false", "limits.host_silence_s=6", "layout.pools.rollout.count=2", "layout=async"]
    head = shaped.start(hosts, f"run.training_steps={LONG}", *PACED, *settings)
    await_steps(shaped, head, 3)
    record = read_record(shaped.runs_dir / "quickstart")
    gone = next(entry for entry in record.workers if not entry.trains and entry.host != 0)
    shaped.net.unplug(gone.host)
    before = steps_done(shaped)
    assert before < LONG - 10, "the run was over before the cut: train longer"
    out, err = head.communicate(timeout=240)
    shaped.net.plug(gone.host)
    assert head.returncode == 0, f"{out}\n{err}"
    check_exactly_once(folders_of(shaped), LONG)
    logs = [path for folder in folders_of(shaped) for path in folder.glob("logs/trainer-0.log")]
    said = f"no message from {gone.name} for limits.host_silence_s"
    assert any(said in path.read_text() for path in logs)
    await_end(shaped)


@SHARED_OR_NOT
def test_hosts_come_to_a_run_that_goes_on(shaped: Cluster, shared: bool) -> None:
    hosts = hosts_file(shaped, "h0 slots=1", "h1 slots=1", shared=shared)
    head = shaped.start(hosts, "run.training_steps=10000", *PACED, "layout.pools.rollout.count=1", "layout=async")
    await_steps(shaped, head, 3)
    more = hosts_file(shaped, "h1 slots=1", "h2 slots=1", "h3 slots=2", shared=shared)
    ssh = ["--ssh-config", str(shaped.net.ssh_config), "--runs-dir", str(shaped.runs_dir)]
    done = shaped.distflow("scale", "quickstart", "rollout=4", "--hosts", str(more), *ssh)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [
        "hosts joined: h2, h3",
        "rollout: 1 → 4; joining: rollout/1 on h2, rollout/2 on h3, rollout/3 on h3",
    ]
    all_four = {f"rollout/{n}" for n in range(4)}
    await_that(lambda: workers_since(shaped, 3) == all_four, "samples of all four", START_S)
    record = read_record(shaped.runs_dir / "quickstart")
    assert [entry.name for entry in record.hosts] == ["h0", "h1", "h2", "h3"]
    done = shaped.distflow("scale", "quickstart", "rollout=1", "--runs-dir", str(shaped.runs_dir))
    assert "rollout: 4 → 1; leaving" in done.stdout, done.stderr
    scaled_at = steps_done(shaped)
    await_steps(shaped, head, scaled_at + 10)
    assert shaped.distflow("stop", "quickstart", "--runs-dir", str(shaped.runs_dir)).returncode == 0
    out, err = head.communicate(timeout=180)
    assert head.returncode == 130, f"{out}\n{err}"
    folders = folders_of(shaped)
    check_exactly_once(folders, max(line["step"] for line in dumped(folders)))
    assert (shaped.runs_dir / "quickstart" / "logs" / "rollout-3.log").exists(), "the first host keeps all logs"
    await_end(shaped)


@pytest.mark.long
@pytest.mark.timeout(1200)
def test_a_checkpoint_of_three_gigabytes_reaches_other_hosts_over_a_slow_link_that_is_cut(tmp_path: Path) -> None:
    """The part never lies in anybody's memory, and no deadline is for the whole of it."""
    if (why := reason()) is not None:
        pytest.skip(why)
    with NetHosts(3, tmp_path, rate="100mbit") as net:
        cluster = Cluster(net, tmp_path)
        first = hosts_file(cluster, "h0 slots=3", shared=False)
        code, out, err = cluster.launch(first, "run.training_steps=4", "run.stop_after=2", *SMALL)
        assert code == 0, f"{out}\n{err}"
        size = add_part(cluster.runs_dir / "quickstart" / "checkpoints" / "step_000002", 3_000_000_000)
        others = hosts_file(cluster, "h1 slots=2", "h2 slots=2", shared=False)
        head = cluster.start(others, "run.training_steps=4", "--run", "quickstart", "--resume", *SMALL)
        arriving = cluster.folder / "h1" / "quickstart" / "checkpoints" / "step_000002" / f"{PART}.0.draft"
        await_that(lambda: arriving.exists() and arriving.stat().st_size > size // 10, "a tenth of the part", 120.0)
        before, cut = memory(net), time.monotonic()
        net.unplug(1)
        time.sleep(CUT_S)
        net.plug(1)
        most = 0
        while arriving.exists():
            assert head.poll() is None, head.communicate()
            assert time.monotonic() < cut + 600.0, f"{arriving.stat().st_size} of {size} bytes have arrived"
            most = max(most, memory(net))
            time.sleep(0.5)
        assert most < before + (64 << 20), f"{most - before} bytes more than when a tenth had arrived"
        out, err = head.communicate(timeout=300)
        assert head.returncode == 0, f"{out}\n{err}"
        assert "resuming after training step 2" in out
        assert fingerprint(arriving.with_name(PART))[0] == size
        await_end(cluster)
