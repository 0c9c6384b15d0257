"""Generating workers join and leave a run that goes on; nothing is lost, nothing is trained on twice."""

from __future__ import annotations

import os
import re
import signal
from contextlib import suppress

import pytest

from distflow.cluster.processes import STOPPED
from tests.e2e.runs import PACED, SMALL, Launch, Run, check_trained_once, cli
from tests.warm_start import WarmProcess

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


def terms_of(run: Run) -> dict[int, list[int]]:
    """The training steps that each term has done, in order."""
    found: dict[int, list[int]] = {}
    for line in run.metrics():
        if "timing_s/step" in line:
            found.setdefault(int(line["term"]), []).append(int(line["step"]))
    return found


def test_one_trainer_two_trainers_one_trainer(launch: Launch) -> None:
    run = launch("quickstart", *PACED, "layout=split", f"run.training_steps={STEPS}")
    run.until(lambda: run.steps_done() >= 3, "the third training step")
    assert "trainer: 1 → 2; joining: trainer/1; the pool saves" in scale(run, "trainer=2")
    run.until(lambda: terms_of(run).get(1), "a training step of the next term")
    assert [entry["name"] for entry in run.record()["workers"]] == ["rollout/0", "rollout/1", "trainer/0", "trainer/1"]
    run.until(lambda: len(terms_of(run)[1]) >= 3, "the third step of two")
    assert "trainer: 2 → 1; leaving: trainer/1; the pool saves" in scale(run, "trainer=1")
    run.until(lambda: terms_of(run).get(2), "a training step of the term after that")
    assert [entry["name"] for entry in run.record()["workers"]] == ["rollout/0", "rollout/1", "trainer/0"]
    assert run.wait() == 0, run.output
    terms = terms_of(run)
    assert [step for term in sorted(terms) for step in terms[term]] == list(range(1, STEPS + 1)), "none was repeated"
    check_trained_once(run, STEPS)
    assert "pool trainer goes from 1 to 2 training workers (trainer/0, trainer/1); " in run.output
    assert "pool trainer goes from 2 to 1 training workers (trainer/0); " in run.output
    assert [run.lives_of(name) for name in ("rollout/0", "rollout/1", "trainer/0", "trainer/1")] == [1, 1, 3, 1]
    for name in ("rollout-0", "rollout-1", "trainer-0", "trainer-1"):
        assert "Traceback" not in (run.folder / "logs" / f"{name}.log").read_text()
    assert run.leftovers() == []


@pytest.mark.parametrize(
    "victim",
    [
        "nursery/0",
        *(pytest.param(name, marks=pytest.mark.long) for name in ("agent/0", "trainer/0", "trainer/1", "rollout/0")),
    ],
)
def test_a_pool_that_trains_changes_its_size_whoever_is_killed_meanwhile(launch: Launch, victim: str) -> None:
    run = launch("quickstart", *PACED, "layout=split", f"run.training_steps={STEPS}", "run.save_every=5")
    run.until(lambda: run.saved(), "a checkpoint")
    scale(run, "trainer=2")
    if victim == "trainer/1":
        run.until(lambda: run.pids_of("trainer/1"), "the new one")
    for pid in run.pids_of(victim):
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    run.until(lambda: run.record()["term"] and run.pids_of("trainer/1"), "the new one in a new term")
    scale(run, "trainer=1")
    run.until(lambda: len(run.record()["workers"]) == 3, "the end of one of two")
    assert run.wait() == 0, run.output
    check_trained_once(run, STEPS)
    assert "layout.pools.trainer.count=1" in (run.folder / "overrides.txt").read_text()
    assert run.leftovers() == []


@pytest.mark.parametrize(
    ("layout", "change", "back"),
    [
        (["layout=colocated"], "worker=2", "worker=1"),
        (
            ["layout=split", "layout.pools.trainer.count=2", "layout.pools.trainer.backend=fsdp"],
            "trainer=3",
            "trainer=1",
        ),
        pytest.param(["flow=ppo", "layout=critic"], "critic=3", "critic=1", marks=pytest.mark.long),
        pytest.param(["flow=ppo", "layout=critic"], "trainer=2", "trainer=1", marks=pytest.mark.long),
        pytest.param(["layout=async", "layout.max_staleness=2"], "trainer=2", "trainer=1", marks=pytest.mark.long),
    ],
    ids=["colocated", "of a divided model", "of a critic", "beside a critic", "asynchronous"],
)
def test_pools_that_train_otherwise(launch: Launch, layout: list[str], change: str, back: str) -> None:
    steps = 80
    run = launch("quickstart", *PACED, *layout, f"run.training_steps={steps}")
    run.until(lambda: run.steps_done() >= 6, "the first training steps")
    scale(run, change)
    run.until(lambda: terms_of(run).get(1), "a training step of the next term")
    scale(run, back)
    run.until(lambda: terms_of(run).get(2), "a training step of the term after that")
    assert run.wait() == 0, run.output
    terms = terms_of(run)
    assert sorted(terms) == [0, 1, 2]
    assert [step for term in sorted(terms) for step in terms[term]] == list(range(1, steps + 1)), "none was repeated"
    check_trained_once(run, steps)
    assert run.leftovers() == []


EMULATED = (
    *SMALL,
    "layout=async",
    "layout.pools.rollout={count: 1, engine: 'distflow.testing.emulated:EmulatedEngine', slots: 16}",
    "layout.pools.rollout.engine_options={device: h200-torch-qwen2.5-1.5b, time_scale: 1.0, median: 30, sigma: 0.4}",
    "layout.pools.trainer.backend=distflow.testing.emulated:EmulatedBackend",
    "layout.pools.trainer.backend_options={device: h200-torch-qwen2.5-1.5b, time_scale: 0.02, size: 1024}",
    "flow.steps.sample.with.max_new_tokens=100",
    "run.training_steps=400",
)
"""Generation takes all the time."""


def test_workers_are_added_by_what_the_run_measures(launch: Launch) -> None:
    run = launch("quickstart", *EMULATED)
    run.until(lambda: run.steps_done() >= 1, "the first training step")
    where = ["--runs-dir", str(run.folder.parent)]
    scaling = WarmProcess("distflow.launch", ["scale", run.name, "rollout=auto", "--max", "3", *where])
    try:
        run.until(lambda: workers_of(run, 0) >= {"rollout/0", "rollout/1"}, "samples of a second worker")
        told = cli("status", run.name, *where).stdout
        assert "one more rollout is predicted to make training steps" in told
        scaling.send_signal(signal.SIGINT)
        said, _ = scaling.communicate(timeout=30.0)
    finally:
        if scaling.poll() is None:
            scaling.kill()
            scaling.wait()
    assert scaling.returncode == STOPPED, said
    assert f"{run.name}: rollout has 1 workers, and will have 1 to 3" in said
    assert re.search(
        r"step \d+: training waits \d+% of the time for samples, and steps should become \d+% shorter", said
    )
    assert "rollout: 1 → 2; joining: rollout/1" in said
    assert f"no longer scaling; {run.name} continues with the workers that it has" in said
    done = run.steps_done()
    run.until(lambda: run.steps_done() > done + 1, "further training steps")
    assert cli("stop", run.name, *where).returncode == 0
    assert run.wait() == STOPPED
    assert run.leftovers() == []


def test_pools_and_numbers_that_do_not_scale_by_themselves_are_refused(launch: Launch) -> None:
    run = launch("quickstart", *EMULATED, "layout.pools.rollout.slots=8")
    run.until(lambda: run.steps_done() >= 1, "the first training step")
    for words, expected in (
        (["trainer=auto"], "pool 'trainer' trains, and auto is for pools that do not"),
        (["critic=auto"], "there is no pool 'critic'; this run has rollout, trainer"),
        (["rollout=auto", "--min", "3", "--max", "2"], "--min 3 is more than --max 2"),
        (["rollout=2", "--max", "2"], "--min, --max: only with POOL=auto"),
        (["rollout=some"], "expected POOL=N or POOL=auto"),
        (["rollout=auto", "--ship-code"], "--ship-code: only for hosts that join"),
    ):
        done = cli("scale", run.name, *words, "--runs-dir", str(run.folder.parent))
        assert done.returncode == 2
        assert expected in done.stderr
    assert [entry["name"] for entry in run.record()["workers"]] == ["rollout/0", "trainer/0"]
