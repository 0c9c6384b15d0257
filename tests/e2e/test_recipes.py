"""Every shipped recipe runs, and so do the other ways to use it."""

import json
from pathlib import Path

import pytest

from tests.e2e.runs import Launch, cli
from tests.warm_start import WarmProcess

FEW = "run.training_steps=4"
LONG = pytest.mark.long


@pytest.mark.parametrize(
    "arguments",
    [
        ["quickstart", "layout=async"],
        ["quickstart", "layout=colocated", "layout.max_staleness=2"],
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
