"""Generating workers join and leave a run that goes on; nothing is lost, nothing is trained on twice."""

from __future__ import annotations

import pytest

from tests.e2e.runs import PACED, Launch, Run, check_trained_once, cli

STEPS = 120


def scale(run: Run, change: str) -> str:
    done = cli("scale", run.name, change, "--runs-dir", str(run.folder.parent))
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def workers_of(run: Run, after: int) -> set[str]:
    """Who generated what was trained on after this training step."""
    return {line["worker"] for line in run.dumps() if line["step"] > after}


@pytest.mark.parametrize("layout", ["split", pytest.param("async", marks=pytest.mark.long)])
def test_one_worker_three_workers_one_worker(launch: Launch, layout: str) -> None:
    run = launch(
        "quickstart", *PACED, f"layout={layout}", f"run.training_steps={STEPS}", "layout.pools.rollout.count=1"
    )
    run.until(lambda: run.steps_done() >= 3, "the third training step")
    trainer = run.pid_of("trainer/0")
    assert "rollout: 1 → 3; joining: rollout/1, rollout/2" in scale(run, "rollout=3")
    run.until(lambda: workers_of(run, 3) == {"rollout/0", "rollout/1", "rollout/2"}, "samples of all three workers")
    assert "rollout: 3 → 1; leaving" in scale(run, "rollout=1")
    run.until(
        lambda: [entry["name"] for entry in run.record()["workers"]] == ["rollout/0", "trainer/0"], "the end of two"
    )
    assert run.steps_done() < STEPS, "the run was over before it was scaled down: train longer"
    assert run.pid_of("trainer/0") == trainer
    assert run.wait() == 0, run.output
    check_trained_once(run, STEPS)
    assert workers_of(run, STEPS - 5) == {"rollout/0"}
    for name in ("rollout-1", "rollout-2"):
        assert "Traceback" not in (run.folder / "logs" / f"{name}.log").read_text()
    assert "ended with exit code 0" in (run.folder / "logs" / "agent-0.log").read_text()
    assert run.leftovers() == []
