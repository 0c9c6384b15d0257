"""What one can see of a real run: its trace, shares of time, who waits for whom, the stacks of a stuck worker."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.runs import Launch, cli
from tests.launch.test_tracing import check_format, spans_of

STUCK = """# file: stuck.py
import itertools
from distflow import Batch, StepContext, step

@step(role="train", reads=["advantage"], writes=[], scope="group")
def stuck(batch: Batch, ctx: StepContext) -> Batch:
    sum(itertools.repeat(0, 1 << 60))
    return batch
"""


def trace_of(run: Any, folder: Path, *options: str) -> dict[str, Any]:
    out = folder / "trace.json"
    done = cli("trace", str(run.folder), "-o", str(out), *options)
    assert done.returncode == 0, done.stderr
    trace: dict[str, Any] = json.loads(out.read_text())
    check_format(trace)
    return trace


@pytest.mark.parametrize("layout", ["split", "colocated"])
def test_a_run_leaves_a_trace_and_shares_of_time(launch: Launch, tmp_path: Path, layout: str) -> None:
    run = launch("quickstart", f"layout={layout}", "run.training_steps=4")
    assert run.wait() == 0, run.output
    trace = trace_of(run, tmp_path)
    groups = [event["name"] for event in trace["traceEvents"] if event["ph"] == "f" and event["cat"] == "group"]
    assert sorted(groups, key=lambda name: int(name.split()[1])) == [f"group {position}" for position in range(4 * 32)]
    weights = {event["name"] for event in trace["traceEvents"] if event["ph"] == "f" and event["cat"] == "weights"}
    assert weights >= {f"weights policy:0:{version}" for version in range(4)}
    for step in range(1, 5):
        assert len(spans_of(trace, f"training step {step}")) == 1
    for name in ("gen", "reward", "send", "take", "advantage", "update", "apply", "publish", "weight_sync"):
        assert spans_of(trace, name), name
    last = trace_of(run, tmp_path, "--last", "1")
    assert not spans_of(last, "training step 3")
    assert spans_of(last, "training step 4")
    for line in run.metrics():
        assert 0 <= line["perf/trainer_idle_share"] <= 1
        assert line["perf/generate_share"] > 0
        assert ("perf/generation_share" in line) == (layout == "colocated")
    bound = "generation took" if layout == "colocated" else "trainers waited"
    assert bound in run.output, "the last lines say where the time went"


def test_a_run_without_trace(launch: Launch) -> None:
    run = launch("quickstart", "run.training_steps=1", "run.trace=false")
    assert run.wait() == 0, run.output
    assert not (run.folder / "trace").exists()
    done = cli("trace", str(run.folder), "-o", os.devnull)
    assert (done.returncode, "launched with run.trace=false" in done.stderr) == (2, True)


def test_a_step_that_never_lets_go_is_found(launch: Launch, tmp_path: Path) -> None:
    (tmp_path / "stuck.py").write_text(STUCK)
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text('defaults: [quickstart, _self_]\nflow: {steps: {stuck: {call: "./stuck.py:stuck"}}}\n')
    run = launch(str(recipe))
    state = run.folder / "metrics" / "rollout-0.jsonl"
    run.until(lambda: state.exists() and "stuck" in cli("stacks", str(run.folder)).stdout, "a stuck trainer")
    out = cli("stacks", str(run.folder), "--worker", "trainer/0").stdout
    assert "asked by a signal" in out
    assert 'stuck.py", line 7 in stuck' in out
    told = json.loads(cli("status", str(run.folder), "--json").stdout)
    assert told["verdict"] == "everything waits for trainer/0, which does not answer"
    assert {wait["worker"]: wait["from"] for wait in told["waits"]} == {
        "rollout/0": ["trainer/0"],
        "rollout/1": ["trainer/0"],
    }
    os.kill(run.pid_of("rollout/1"), signal.SIGSTOP)
    try:
        assert "it is stopped (state T)" in cli("stacks", str(run.folder), "--worker", "rollout/1").stdout
    finally:
        os.kill(run.pid_of("rollout/1"), signal.SIGCONT)
