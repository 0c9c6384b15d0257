"""Runs whose samples come from SGLang."""

from __future__ import annotations

import importlib.util
import math
import os
import signal
import statistics
import time

import psutil
import pytest

from tests.e2e.runs import SMALL, Launch, Run

pytestmark = [
    pytest.mark.skipif(
        importlib.util.find_spec("sglang") is None,
        reason="SGLang is not installed here; `make test-venv` or requirements/install_sglang_cpu.sh does it",
    ),
    pytest.mark.timeout(600),
]
SGLANG = ("layout.pools.rollout.engine=sglang", "layout.pools.rollout.count=1")
OPTIONS = "layout.pools.rollout.engine_options"
IN_TWO = (f"{OPTIONS}.tensor_parallel=2", f"{OPTIONS}.update_by=group")
ADAPTERS = (
    "models.policy.lora.rank=4",
    "models.policy.optimizer.lr=0.02",
    "layout.pools.trainer={backend: deepspeed, zero: 2, count: 2}",
)
START_S = 400.0
"""A start of SGLang takes a quarter of a minute on a quiet machine."""


def check_whole(run: Run, steps: int) -> None:
    lines = run.metrics()
    assert len(lines) == steps
    for line in lines:
        assert all(math.isfinite(value) for value in line.values() if isinstance(value, float)), line
        # Engine and trainer see the same weights: their log-probs agree.
        assert abs(line["rollout_corr/kl"]) < 1e-5
        assert line["rollout_corr/ratio/max"] == pytest.approx(1.0, abs=1e-3)
    assert run.leftovers() == []


@pytest.mark.parametrize("options", [(), pytest.param(IN_TWO, id="in_two_by_group", marks=pytest.mark.long)])
def test_a_run_on_the_newest_weights(launch: Launch, options: tuple[str, ...]) -> None:
    run = launch("quickstart", *SMALL, *SGLANG, *options, "run.training_steps=8")
    assert run.wait(START_S) == 0, run.output
    check_whole(run, 8)
    for line in run.dumps():
        # With max_staleness 0, version t trains step t + 1, and every token is of that version.
        assert [span[1] for span in line["policy_versions"]] == [line["step"] - 1]
        assert line["finish_reason"] == ("stop" if line["response_ids"][-1] == 1 else "length")


@pytest.mark.long
def test_adapters_are_merged_on_arrival(launch: Launch) -> None:
    """The trainer's two replicas divide their optimizer by ZeRO 2; the engine loads the base by itself."""
    pytest.importorskip("peft")
    run = launch("quickstart", *SMALL, *SGLANG, *ADAPTERS, "run.training_steps=8")
    assert run.wait(START_S) == 0, run.output
    check_whole(run, 8)
    assert run.metrics()[-1]["actor/grad_norm"] > 0


@pytest.mark.long
@pytest.mark.parametrize("options", [(), pytest.param(IN_TWO, id="in_two_by_group")])
def test_an_sglang_that_dies_is_started_again(launch: Launch, options: tuple[str, ...]) -> None:
    """The worker lives on, says in its log what happened, and the run is none the worse for it."""
    run = launch("quickstart", *SGLANG, *options, "run.training_steps=20")
    run.until(lambda: run.steps_done() > 2, "the third training step", START_S)
    worker = run.pid_of("rollout/0")
    sglang = psutil.Process(run.pid_of("rollout/0 sglang"))
    family = [sglang, *sglang.children(recursive=True)]
    os.kill(sglang.pid, signal.SIGKILL)
    log = run.folder / "logs/rollout-0.log"
    run.until(lambda: log.read_text().count("started in") == 2, "SGLang's second start", START_S)
    assert run.pid_of("rollout/0") == worker
    assert f"engine sglang: its process {sglang.pid} ended with exit code -9" in log.read_text()
    assert run.wait(START_S) == 0, run.output
    check_whole(run, 20)
    assert psutil.wait_procs(family, timeout=30)[1] == []


@pytest.mark.long
def test_a_run_is_stopped_while_sglang_starts(launch: Launch) -> None:
    """At once, and nothing stays behind."""
    run = launch("quickstart", *SGLANG)
    run.until(lambda: run.pids_of("rollout/0 sglang"), "SGLang's process", START_S)
    os.kill(run.process.pid, signal.SIGINT)
    began = time.monotonic()
    assert run.wait() == 130, run.output
    assert time.monotonic() - began < 20.0
    assert run.leftovers() == []


@pytest.mark.long
def test_a_colocated_run(launch: Launch) -> None:
    run = launch("quickstart", "layout=colocated", "layout.pools.worker.engine=sglang", "run.training_steps=20")
    assert run.wait(START_S) == 0, run.output
    check_whole(run, 20)


@pytest.mark.long
def test_a_killed_worker_is_replaced_and_goes_on(launch: Launch) -> None:
    """With all of SGLang."""
    run = launch("quickstart", *SGLANG, "run.training_steps=30")
    run.until(lambda: run.steps_done() > 2, "the third training step", START_S)
    os.kill(run.pid_of("rollout/0"), signal.SIGKILL)
    assert run.wait(START_S) == 0, run.output
    check_whole(run, 30)


@pytest.mark.long
def test_it_learns(launch: Launch) -> None:
    """Swapped in mid-sample (staleness 1), over so many steps that a wrong weight or version would show."""
    run = launch("quickstart", "layout=async", *SGLANG, "run.training_steps=120")
    assert run.wait(560) == 0, run.output
    lines = run.metrics()
    rewards = [line["critic/rewards/mean"] for line in lines]
    assert statistics.mean(rewards[-10:]) > statistics.mean(rewards[:10]) + 0.2
    assert max(line["staleness/max"] for line in lines) == 1
    assert max(line["rollout_corr/ratio/max"] for line in lines) < 3
