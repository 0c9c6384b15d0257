"""Ctrl-C, stop, stop_after, resume: ended in order, and gone on with as if never interrupted."""

import os
import signal
from typing import Any

import pytest

from tests.e2e.runs import PROMPTS, SAMPLES, SMALL, Launch, Run, cli


def trained(run: Run) -> dict[tuple[Any, ...], tuple[Any, ...]]:
    return {(*line["uid"], line["sample"]): (line["step"], *line["response_ids"]) for line in run.dumps()}


def test_ctrl_c_saves_and_leaves_nothing_behind(launch: Launch) -> None:
    run = launch("quickstart")
    run.until(lambda: run.steps_done() >= 3, "the third training step")
    os.kill(run.process.pid, signal.SIGINT)
    assert run.wait() == 130, run.output
    assert run.leftovers() == []
    assert run.record()["state"] == "stopped"
    assert len(run.saved()) == 1


def test_ctrl_c_before_the_first_step_leaves_nothing_behind(launch: Launch) -> None:
    run = launch("quickstart")
    run.until(lambda: run.processes(), "the first process")
    os.kill(run.process.pid, signal.SIGINT)
    assert run.wait() == 130, run.output
    assert run.leftovers() == []


def test_the_stop_command_ends_a_run_from_elsewhere(launch: Launch) -> None:
    run = launch("quickstart")
    run.until(lambda: run.steps_done() >= 1, "the first training step")
    stopped = cli("stop", run.name, "--runs-dir", str(run.folder.parent))
    assert stopped.returncode == 0, stopped.stdout + stopped.stderr
    assert run.leftovers() == []
    assert run.wait() == 130


@pytest.mark.long
def test_a_resumed_run_equals_an_undisturbed_one(launch: Launch) -> None:
    """Float64, staleness 0: the same tokens and the same gradients after stop_after and --resume as without."""
    settings = ["models.policy.dtype=float64", "run.training_steps=12"]
    whole = launch("quickstart", *SMALL, *settings)
    assert whole.wait() == 0, whole.output
    first = launch("quickstart", *SMALL, *settings, "run.stop_after=5")
    assert first.wait() == 0, first.output
    assert first.steps_done() == 5
    second = launch("quickstart", *SMALL, *settings, "--resume", name=first.name)
    assert second.wait() == 0, second.output
    assert "step_000005" in second.output
    assert trained(second) == trained(whole)
    pairs = zip(second.metrics(), whole.metrics(), strict=True)
    assert all(abs(a["actor/grad_norm"] / b["actor/grad_norm"] - 1) < 1e-6 for a, b in pairs)


def test_a_run_interrupted_at_any_moment_goes_on_without_loss(launch: Launch) -> None:
    settings = ["models.policy.dtype=float64", "run.training_steps=40"]
    first = launch("quickstart", *SMALL, *settings)
    first.until(lambda: first.steps_done() >= 7, "the seventh training step")
    os.kill(first.process.pid, signal.SIGINT)
    assert first.wait() == 130, first.output
    second = launch("quickstart", *SMALL, *settings, "--resume", name=first.name)
    assert second.wait() == 0, second.output
    assert len(trained(second)) == len(second.dumps()) == 40 * PROMPTS * SAMPLES
    assert {uid[2] for uid in trained(second)} == set(range(40 * PROMPTS))
