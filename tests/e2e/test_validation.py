"""Validation while training goes on: the same figures on any layout, every prompt once, on the version that is due."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest

from distflow.launch.commands.rollouts import read_lines
from tests.e2e.runs import PACED, SMALL, WAIT_S, Launch, Run, check_trained_once, cli

EVERY, STEPS, PROMPTS, K = 3, 8, 12, 2
VALIDATED = (
    *("val.every=3", f"val.prompts={PROMPTS}", f"val.samples_per_prompt={K}", "val.sampling={temperature: 0.7}"),
    f"run.training_steps={STEPS}",
)
DUE = [0, 3, 6, 8]
ALONE = "layout.pools.checks={roles: [validate], count: 1}"
TRAINERS = "layout.pools.trainer.count=2"


def validation(run: Run) -> dict[int, dict[str, float]]:
    """What was measured, by training steps done before."""
    lines = [json.loads(line) for path in run.folder.glob("metrics/*.jsonl") for line in path.read_text().splitlines()]
    return {line["step"]: line for line in lines if any(name.startswith("val/") for name in line)}


def spans(line: dict[str, Any]) -> list[int]:
    """The versions of the weights that a sample was made with."""
    return [number for _, number, *_ in line["policy_versions"]]


def check_validated(run: Run, due: Sequence[int] = DUE) -> dict[int, dict[str, float]]:
    found = validation(run)
    assert sorted(found) == list(due)
    assert {line["val/prompts"] for line in found.values()} == {PROMPTS}
    return found


@pytest.mark.parametrize(
    "layout",
    [
        pytest.param(["layout=split"], marks=pytest.mark.long),
        ["layout=split", TRAINERS, "layout.stealing=false"],
        ["layout=colocated", "layout.pools.worker.count=2"],
        pytest.param(["layout=services", "layout.pools.reward={count: 1, steps: [reward]}"], marks=pytest.mark.long),
        ["layout=services", "layout.pools.reward={count: 1, steps: [reward]}", ALONE],
        pytest.param(["layout=async"], marks=pytest.mark.long),
        pytest.param(["layout=async", ALONE], marks=pytest.mark.long),
        pytest.param(["layout=critic", "flow=ppo"], marks=pytest.mark.long),
    ],
)
def test_the_version_that_is_due_is_measured_on_every_prompt(launch: Launch, layout: list[str]) -> None:
    run = launch("quickstart", *SMALL, *layout, *VALIDATED)
    assert run.wait() == 0, run.output
    check_trained_once(run, STEPS)
    found = check_validated(run)
    if ALONE not in layout:  # training waits for nothing in a pool of its own, which may be late
        assert {line["val/newer_version_share"] for line in found.values()} == {0.0}
    assert all(f"val/{name}@{K}" in line for line in found.values() for name in ("avg", "pass", "maj"))
    merged = {int(line["step"]): line for line in run.metrics()}
    assert sorted(merged) == list(range(STEPS + 1)), "version 0 has an object of its own"
    assert merged[3]["val/avg@2"] == found[3]["val/avg@2"]
    assert "val/avg@2" in cli("metrics", run.name, "--runs-dir", str(run.folder.parent)).stdout
    assert "timing_s/step" in merged[3]
    for version in DUE:
        samples = read_lines(run.folder / "rollouts" / "val" / f"step_{version:06d}")
        every = [(prompt, number) for prompt in range(PROMPTS) for number in range(K)]
        assert sorted((line["uid"][1], line["sample"]) for line in samples) == every
        assert fmean(line["score"] for line in samples) == pytest.approx(found[version][f"val/avg@{K}"])
        newer = [{*spans(line)} != {version} for line in samples]
        assert fmean(newer) == found[version]["val/newer_version_share"]
        assert min(span for line in samples for span in spans(line)) >= version
    assert run.leftovers() == []


def test_it_does_not_depend_on_the_layout_and_does_not_change_training(launch: Launch) -> None:
    settings = ["models.policy.dtype=float64", "run.deterministic=true", *SMALL]
    runs = [
        launch("quickstart", *settings, "layout=colocated", *VALIDATED),
        launch("quickstart", *settings, "layout=split", *VALIDATED),
        launch("quickstart", *settings, "layout=split", *VALIDATED, ALONE),
        launch("quickstart", *settings, "layout=split", f"run.training_steps={STEPS}"),
    ]
    for run in runs:
        assert run.wait() == 0, run.output
    one, *others = map(check_validated, runs[:3])
    assert others == [one, one]
    norms = [[line["actor/grad_norm"] for line in run.metrics() if "actor/grad_norm" in line] for run in runs]
    assert norms[1] == norms[2] == norms[3]


@pytest.mark.parametrize("worker, pools", [("rollout/0", []), ("checks/0", [ALONE])])
def test_a_worker_that_dies_loses_no_prompt(launch: Launch, worker: str, pools: list[str]) -> None:
    settings = [*PACED, "val.every=2", f"val.prompts={PROMPTS}", "run.training_steps=8"]
    run = launch("quickstart", "layout=split", *settings, *pools)
    run.until(lambda: len(validation(run)) > 1, "the second round of validation")
    os.kill(run.pid_of(worker), signal.SIGKILL)
    assert run.wait() == 0, run.output
    check_trained_once(run, 8)
    check_validated(run, [0, 2, 4, 6, 8])
    assert run.leftovers() == []


def test_a_round_that_takes_longer_than_training_is_on_its_version(launch: Launch) -> None:
    """More prompts than the reader is ahead; workers that have done their part take the next weights that are due."""
    few = ["batch.prompts=8", "batch.samples_per_prompt=2", "run.training_steps=6"]
    run = launch("quickstart", "layout=async", *few, "val.every=2", "val.prompts=150", "val.samples_per_prompt=4")
    assert run.wait() == 0, run.output
    found = validation(run)
    assert {step: line["val/newer_version_share"] for step, line in found.items()} == dict.fromkeys((0, 2, 4, 6), 0.0)


def test_a_resumed_run_validates_what_is_due(launch: Launch) -> None:
    settings = ["layout=split", *SMALL, *VALIDATED, "run.save_every=3"]
    run = launch("quickstart", *settings, "run.stop_after=3")
    assert run.wait() == 0, run.output
    check_validated(run, [0, 3])
    again = launch("quickstart", "run.stop_after=null", "--resume", name=run.name)
    assert again.wait() == 0, again.output
    check_trained_once(again, STEPS)
    check_validated(again)


def test_the_best_checkpoint_by_validation_is_kept(launch: Launch) -> None:
    best = [
        "run.save_every=2",
        "run.keep_checkpoints=1",
        "run.keep_best=val/response_length/mean",
        "run.keep_best_mode=min",
    ]
    run = launch(
        "quickstart", "layout=split", TRAINERS, *PACED, "val.every=2", "val.prompts=8", "run.training_steps=16", *best
    )
    assert run.wait() == 0, run.output
    measured = {step: line["val/response_length/mean"] for step, line in validation(run).items() if step}
    known = json.loads((run.folder / "checkpoints" / "step_000016" / "COMMIT").read_text())["validated"]
    assert len(known) > 4, "each is known a few training steps later"
    assert all(score["value"] == pytest.approx(measured[int(step)]) for step, score in known.items() if int(step))
    waiting = {step for step in measured if step > max(map(int, known))}
    assert waiting, "values that came after the last COMMIT"
    assert set(run.saved()) == {16, min(measured, key=lambda step: (measured[step], -step))}
    again = launch("quickstart", "--resume", "run.training_steps=18", name=run.name)
    assert again.wait() == 0, again.output
    measured |= {step: line["val/response_length/mean"] for step, line in validation(again).items() if step}
    assert set(again.saved()) == {18, min(measured, key=lambda step: (measured[step], -step))}


def test_a_checkpoint_and_a_folder_are_evaluated_as_in_the_run(launch: Launch, tmp_path: Path) -> None:
    settings = ["layout=split", *SMALL, *VALIDATED, "val.sampling={temperature: 0}", "run.save_every=3"]
    run = launch("quickstart", *settings)
    assert run.wait() == 0, run.output
    where = ["--runs-dir", str(run.folder.parent)]
    greedy = ["layout=colocated", "val.sampling={temperature: 0}", *VALIDATED[1:3]]
    folder = str(tmp_path / "exported")
    assert cli("export", run.name, "--to", folder, *where).returncode == 0
    expected = {name: value for name, value in check_validated(run)[STEPS].items() if name.startswith("val/")}
    for target in ([run.name], [folder, "quickstart", *greedy]):
        done = cli("evaluate", *target, "--json", *where, timeout_s=WAIT_S)
        assert done.returncode == 0, done.stderr
        assert json.loads(done.stdout) == pytest.approx(expected)
    shown = cli("evaluate", run.name, "--step", "6", *greedy, *where, timeout_s=WAIT_S)
    assert f"val/avg@{K} " in shown.stdout, shown.stderr
    assert (run.folder.parent / f"{run.name}-eval-2").is_dir()
    assert (run.folder.parent / "exported-eval").is_dir()
    alone = cli("evaluate", folder, *where)
    assert alone.returncode == 2
    assert "which recipe says how to validate it?" in alone.stderr


def test_a_run_that_is_stopped_does_not_finish_validation(launch: Launch) -> None:
    many = ["val.every=1", "val.prompts=1000", "val.samples_per_prompt=8"]
    run = launch("quickstart", "layout=split", *SMALL, *many, "run.training_steps=50")
    run.until(run.steps_done, "a training step")
    began = time.monotonic()
    run.process.send_signal(signal.SIGINT)
    assert run.wait(60) == 130, run.output
    assert time.monotonic() - began < 30
    assert run.leftovers() == []
