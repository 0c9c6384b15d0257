"""Every process of a run is killed at a random moment; what is resumed equals an undisturbed run to the last bit.

With backend torch; with others the losses may differ by 1e-5.
"""

import os
import random
import signal
import time
from collections.abc import Callable
from typing import Any

import psutil
import pytest

from tests.e2e.runs import PROMPTS, SMALL, Launch, Run, titled_processes

STEPS = 24
DETERMINISTIC = "run.deterministic=true"
SHORT = [*SMALL, f"run.training_steps={STEPS}", "run.save_every=4"]
UNEQUAL = ("timing_s/", "perf/", "memory/", "checkpoint/", "rollout/", "reward/samples", "lockstep/", "term")
"""Metrics that tell of time, memory, and of who waited for whom or helped out."""


def kill_everything(run: Run) -> None:
    """The agents first: nobody shall see the others die."""
    by_title = sorted(titled_processes(run.name, run.folder), key=lambda found: "agent/" not in found[1])
    processes = [process for process, _ in by_title]
    for process in processes:
        os.kill(process.pid, signal.SIGKILL)
    os.kill(run.process.pid, signal.SIGKILL)
    run.wait()
    psutil.wait_procs(processes, timeout=10.0)


def samples(run: Run) -> dict[tuple[Any, ...], tuple[Any, ...]]:
    """What was trained on: prompt, tokens and reward of every sample; each is there once."""
    lines = run.dumps()
    found = {
        (*line["uid"], line["sample"]): (line["step"], line["prompt"], tuple(line["response_ids"]), line["reward"])
        for line in lines
    }
    assert len(found) == len(lines), "a sample was trained on twice"
    return found


def figures(run: Run) -> dict[int, dict[str, float]]:
    """All metrics of every training step that do not depend on timing."""
    found = {
        line["step"]: {name: value for name, value in line.items() if not name.startswith(UNEQUAL)}
        for line in run.metrics()
    }
    for name in ("actor/grad_norm", "critic/score/mean", "response_length/mean", "rollout_corr/kl", "reward/errors"):
        assert all(name in line for line in found.values()), f"{name} is missing"
    return found


def kill_and_resume(launch: Launch, settings: list[str], when: Callable[[Run], object], what: str) -> Run:
    """A run that is resumed after all its processes were killed, at some moment once `when` is so."""
    first = launch("quickstart", DETERMINISTIC, *settings)
    first.until(lambda: when(first), what)
    delay = random.uniform(0.0, 0.1)
    time.sleep(delay)
    kill_everything(first)
    begin = max(first.saved())
    trained = first.steps_done()
    second = launch("quickstart", DETERMINISTIC, *settings, "--resume", name=first.name)
    assert second.wait(LONG_S) == 0, second.output
    print(f"killed {delay:.3f} s after {what}, {trained} lines of metrics; resumed after step {begin}")
    assert f"resuming after training step {begin}" in second.output
    assert "last bits" not in second.output
    return second


def saved_and_trained(steps: int) -> Callable[[Run], bool]:
    """Whether there is a checkpoint, and so many training steps are done."""
    return lambda run: bool(run.saved()) and run.steps_done() >= steps


LONG_S = 900.0
DIVIDED = ["layout.pools.trainer.count=2"]
DEEPSPEED = ["layout.pools.trainer.backend=deepspeed"]
LAYOUTS = {
    "2 rollouts, 1 trainer": [],
    "2 rollouts, 2 trainers": ["layout.pools.trainer.count=2"],
    "colocated": ["layout=colocated"],
}


def check_equal(second: Run, whole: Run, positions: int) -> None:
    assert samples(second) == samples(whole)
    assert {uid[2] for uid in samples(second)} == set(range(positions))
    assert figures(second) == figures(whole)
    assert {line["rollout_corr/kl"] for line in figures(whole).values()} == {0.0}, "engine and trainer disagree"
    assert second.leftovers() == []


def test_a_killed_run_goes_on_as_if_nothing_had_happened(launch: Launch) -> None:
    whole = launch("quickstart", DETERMINISTIC, *SHORT)
    assert whole.wait() == 0, whole.output
    second = kill_and_resume(launch, SHORT, saved_and_trained(last := random.randrange(4, 17)), f"training step {last}")
    check_equal(second, whole, STEPS * PROMPTS)


@pytest.mark.long
def test_prompts_by_pass_rate_are_drawn_as_if_nothing_had_happened(launch: Launch) -> None:
    """So they are when training workers alone are killed. All prompts are opened again in between."""
    pools = "pools: {hard: {up_to: 0.5}, easy: {up_to: 1, weight: 0.5}}"
    by_rate = [*DIVIDED, "data.with.digits=2", f"data.difficulty={{retire_unsolved: 1, reopen_below: 0.1, {pools}}}"]
    settings = [*SHORT, *by_rate]
    whole = launch("quickstart", DETERMINISTIC, *settings)
    assert whole.wait() == 0, whole.output
    assert sum(line["data/passed_over"] for line in whole.metrics()) > 0
    assert whole.metrics()[-1]["data/reopened"] > 0
    second = kill_and_resume(
        launch, settings, saved_and_trained(last := random.randrange(4, 17)), f"training step {last}"
    )
    assert samples(second) == samples(whole)
    assert figures(second) == figures(whole)
    third = launch("quickstart", DETERMINISTIC, *settings)
    third.until(lambda: saved_and_trained(2 * last)(third), f"training step {last}")
    os.kill(third.pid_of("trainer/1"), signal.SIGKILL)
    assert third.wait() == 0, third.output
    assert third.record()["term"] == 1
    assert samples(third) == samples(whole)


@pytest.mark.long
@pytest.mark.timeout(3 * LONG_S)
@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_the_whole_quickstart_repeats_after_a_kill(launch: Launch, layout: list[str]) -> None:
    """As it is shipped, but for checkpoints."""
    settings = ["run.save_every=50", *layout]
    whole = launch("quickstart", DETERMINISTIC, *settings)
    assert whole.wait(LONG_S) == 0, whole.output
    last = random.randrange(50, 600)
    second = kill_and_resume(launch, settings, saved_and_trained(last), f"training step {last}")
    check_equal(second, whole, 600 * 32)


@pytest.mark.long
@pytest.mark.parametrize(
    "backend",
    [
        pytest.param(["layout.pools.trainer.backend=fsdp"], id="fsdp"),
        pytest.param([*DEEPSPEED, "layout.pools.trainer.zero=2"], id="zero2"),
        pytest.param([*DEEPSPEED, "layout.pools.trainer.zero=3"], id="zero3"),
    ],
)
def test_a_killed_run_with_a_divided_model_goes_on_to_the_same_tokens(launch: Launch, backend: list[str]) -> None:
    settings = [*SHORT, *DIVIDED, *backend]
    whole = launch("quickstart", DETERMINISTIC, *settings)
    assert whole.wait() == 0, whole.output
    second = kill_and_resume(launch, settings, saved_and_trained(4), "the first checkpoint")
    assert samples(second) == samples(whole)
    for step, expected in figures(whole).items():
        assert figures(second)[step] == pytest.approx(expected, rel=1e-5, abs=1e-5)
    assert second.leftovers() == []
