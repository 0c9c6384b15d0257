"""Runs in which generate steps fail on samples: they go on without these, up to a limit."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.e2e.runs import SMALL, Launch, check_trained_once
from tests.e2e.test_partial import ENGINE

STEPS = Path(__file__).with_name("failing_episodes.py")
WHY = {
    1: "OSError: no sandbox",
    2: "asks for what the engine cannot do",
    3: "TimeoutError: the tool is away",
    4: "returned {}",
}


def test_a_run_goes_on_without_the_samples_on_which_its_step_fails(launch: Launch) -> None:
    """Those that wrote nothing, too; and in validation they score 0."""
    settings = (f"flow.steps.sample.call={STEPS}:tools", "flow.steps.sample.with.max_new_tokens=4")
    validation = ("val.every=3", "val.prompts=4")
    run = launch("quickstart", "layout=split", *SMALL, *settings, *validation, "run.training_steps=3")
    assert run.wait() == 0, run.output
    check_trained_once(run, 3)
    metrics = run.metrics()
    out = [line for line in run.dumps() if "left_out" in line]
    assert {(line["uid"][2], line["sample"]) for line in out} == {(p, s) for p in range(0, 24, 4) for s in WHY}
    assert all(line["left_out"].startswith(WHY[line["sample"]]) for line in out)
    assert {line["finish_reason"] for line in out} == {"error"}
    assert {bool(line["response_ids"]) for line in out if line["sample"] == 1} == {False}
    assert sum(line.get("rollout/left_out", 0) for line in metrics) >= len(out)
    assert sum(line.get("rollout/errors", 0) for line in metrics) >= 3 * len(out)
    assert all(line["actor/grad_norm"] > 0 for line in metrics if line["step"])


@pytest.mark.parametrize("on_error", ["zero", "drop"])
def test_what_became_of_failed_samples_is_told_by_its_name(launch: Launch, on_error: str) -> None:
    """With the reason where they count with reward 0, and as groups where these were replaced."""
    settings = (f"flow.steps.sample.call={STEPS}:tools", "flow.steps.sample.with.max_new_tokens=4")
    fate = {"on_error": on_error, "max_error_rate": 1, "every": 5}
    given = (f"flow.steps.sample.with.{name}={value}" for name, value in fate.items())
    run = launch("quickstart", "layout=split", *SMALL, *settings, *given, "run.training_steps=1")
    assert run.wait() == 0, run.output
    failed = [line for line in run.dumps() if line["finish_reason"] == "error"]
    counted = {name: sum(line.get(f"rollout/{name}", 0) for line in run.metrics()) for name in ("left_out", "dropped")}
    assert counted["left_out"] == 0
    assert bool(failed) == (on_error == "zero")
    assert (counted["dropped"] > 0) == (on_error == "drop")
    assert all(line["extra"]["generate_error"].startswith(WHY[line["sample"]]) for line in failed)
    assert [line for line in run.dumps() if "extra" in line] == failed


def test_too_many_failures_end_the_run_with_the_users_frames_first(launch: Launch) -> None:
    settings = (f"flow.steps.sample.call={STEPS}:half", "flow.steps.sample.with.on_error=leave_out")
    run = launch("quickstart", "layout=colocated", *settings, "run.training_steps=30")
    assert run.wait() == 3
    told = (
        r"(?s)failing_episodes\.py\", line \d+, in half\n.*the sandbox is away\n.*step 'sample' failed on \d+ of \d+ "
    )
    assert re.search(told + r"samples, more than max_error_rate=0\.25 allows", run.output), run.output
    assert run.leftovers() == []


def test_a_worker_with_too_many_threads_that_nobody_waits_for_begins_anew(launch: Launch, tmp_path: Path) -> None:
    """It hands back what it has; nothing else is lost than the attempts that waited in these threads."""
    step = (f"flow.steps.sample.call={STEPS}:stuck", f"flow.steps.sample.with.folder={tmp_path}")
    limits = ("flow.steps.sample.with.max_new_tokens=10", "flow.steps.sample.with.turn_timeout_s=0.3")
    # 0.8 s a training step: it lasts until rollout/1 is there again.
    pool = {"slots": "8", "episodes": "16", "engine": f"{ENGINE}:SlowEngine", "engine_options": "{poll_s: 0.02}"}
    rollouts = [f"layout.pools.rollout.{key}={value}" for key, value in pool.items()]
    run = launch("quickstart", "layout=split", *SMALL, *step, *limits, *rollouts, "run.training_steps=6")
    assert run.wait() == 0, run.output
    check_trained_once(run, 6)
    assert run.lives_of("rollout/1") == 2
    assert run.lives_of("rollout/0") == 1
    told = (run.folder / "logs" / "rollout-1.log").read_text()
    assert re.search(r"\d+ of 32 threads of episodes are still busy at \S+failing_episodes\.py:\d+, and nobody", told)
    assert "it left the run" in (run.folder / "logs" / "trainer-0.log").read_text()
    assert run.leftovers() == []
