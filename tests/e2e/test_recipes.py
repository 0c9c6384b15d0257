"""Every shipped recipe runs, and so do the other ways to use it."""

import json
import shutil
from pathlib import Path

import pytest

from distflow.comm.addresses import socket_dir
from tests.e2e.runs import Launch, cli
from tests.warm_start import WarmProcess

FEW = "run.training_steps=4"
LONG = pytest.mark.long


@pytest.mark.parametrize(
    "arguments",
    [
        ["quickstart", "layout=async", "flow=aipo"],
        ["quickstart", "layout=async", "flow=decoupled_ppo", "batch.minibatches=2"],
        ["quickstart", "flow=gspo", "batch.epochs=2"],
        ["quickstart", "layout=async", "layout.max_staleness=3", "layout.refresh=at_bound"],
        ["quickstart", "layout=colocated", "layout.max_staleness=2", "layout.refresh=when_idle"],
        ["quickstart", "layout.hedging=false", "layout.partial_rollouts=false"],
        ["custom_step"],
        ["two_turns"],
        ["two_turns", "flow.steps.sample.with.strip=true"],
        pytest.param(
            ["quickstart", "layout=async", "layout.max_staleness=2", "layout.pools.rollout.slots=8"], marks=LONG
        ),
        pytest.param(["quickstart", "layout=async", "layout.refresh=when_idle"], marks=LONG),
        pytest.param(["quickstart", "flow=reinforce_plus_plus", "batch.epochs=2"], marks=LONG),
        pytest.param(["quickstart", "layout=colocated", "layout.max_staleness=2"], marks=LONG),
        pytest.param(["quickstart", "layout.pools.rollout.slots=16", "batch.tokens_per_microbatch=100"], marks=LONG),
        pytest.param(["quickstart", "run.deterministic=true"], marks=LONG),
    ],
    ids=" ".join,
)
def test_it_runs_and_keeps_the_staleness_bound(launch: Launch, arguments: list[str]) -> None:
    run = launch(*arguments, FEW)
    assert run.wait() == 0, run.output
    lines = run.metrics()
    assert [line["step"] for line in lines] == [1, 2, 3, 4]
    bound = json.loads(cli("config", "show", *arguments, "--json").stdout)["layout"]["max_staleness"]
    assert max(line["staleness/max"] for line in lines) <= bound
    for line in run.dumps():
        assert line["step"] - 1 - min(span[1] for span in line["policy_versions"]) <= bound
    assert run.leftovers() == []


def test_a_schedule_trains_on_the_same_samples_as_the_order_of_the_data(launch: Launch) -> None:
    """Few slots, so that several waves of groups of ten prompts are generated one after another."""
    shared = ("quickstart", "layout.pools.rollout.count=2", "layout.pools.rollout.slots=8", "data.with.digits=1", FEW)
    found = []
    for order in ("fifo", "longest_first", "skew_aware"):
        run = launch(*shared, f"layout.schedule={order}")
        assert run.wait() == 0, run.output
        rows = [(line["step"], line["uid"], line["sample"], line["response_ids"]) for line in run.dumps()]
        trained = sorted((step, tuple(uid), sample) for step, uid, sample, _ in rows)
        first = sorted((tuple(uid), sample, tuple(ids)) for step, uid, sample, ids in rows if step == 1)
        found.append((trained, first))
        recalls = [line["rollout/length_rank_recall"] for line in run.metrics() if "rollout/length_rank_recall" in line]
        assert len(recalls) == (0 if order == "fifo" else 4)
    assert found[0] == found[1] == found[2]


def test_workers_can_be_started_by_hand(tmp_path: Path) -> None:
    """`plan --write`, an edit of one script, `distflow worker` for each: no launcher, no agent."""
    written = cli("plan", "quickstart", FEW, "layout.pools.rollout.count=1", "--write", str(tmp_path))
    assert written.returncode == 0, written.stdout + written.stderr
    script = tmp_path / "trainer-0.py"
    script.write_text(script.read_text().replace("w.save(t + 1)", "w.save(t + 1)\n        print('edited', t)"))
    workers = [
        WarmProcess("distflow.launch", ["worker", str(tmp_path / f"{name}.yaml")], merged=True)
        for name in ("rollout-0", "trainer-0")
    ]
    outputs = [worker.communicate(timeout=120)[0] for worker in workers]
    assert [worker.returncode for worker in workers] == [0, 0], outputs
    assert "edited 3" in outputs[1]


def test_workers_of_two_hosts_can_be_started_by_hand(tmp_path: Path) -> None:
    """Without agents: who listens where, and whose key is whose, stands in what `plan --write --hosts` wrote."""
    folder, there = tmp_path / "by-hand", tmp_path / "b" / "by-hand"
    hosts = tmp_path / "hosts"
    hosts.write_text(f"127.0.0.1 slots=1\n127.0.0.2 slots=2 dir={there.parent}\n")
    pins = ["layout.pools.trainer.hosts=[0]", "layout.pools.rollout.hosts=[1]"]
    written = cli("plan", "quickstart", FEW, *pins, "--hosts", str(hosts), "--write", str(folder))
    assert written.returncode == 0, written.stdout + written.stderr
    shutil.copytree(folder, there)
    for document in (folder / "trainer-0.yaml", there / "rollout-1.yaml"):
        mine, border, filled = document.read_text().partition("\n# Filled in")
        document.write_text(mine.replace("  threads: 1\n", "  threads: 2\n") + border + filled)
    commands = [line for line in written.stdout.splitlines() if line.strip().startswith("distflow worker")]
    assert [line.partition("  # ")[2] for line in commands] == ["GPU 0", "GPU 0", "GPU 1"]
    started = [line.partition("#")[0].split()[-1] for line in commands]
    workers = [WarmProcess("distflow.launch", ["worker", path], merged=True) for path in started]
    outputs = [worker.communicate(timeout=120)[0] for worker in workers]
    assert [worker.returncode for worker in workers] == [0, 0, 0], outputs
    assert (folder / "metrics").exists()
    assert not any(list((there / name).glob("trainer*")) for name in ("metrics", "logs"))
    assert not [path for path in (socket_dir(folder), socket_dir(there, 1)) if path.exists()]
