"""Runs whose samples come from vLLM, in an environment of its own; the trainer is in the one that runs the tests."""

from __future__ import annotations

import os
import signal
import statistics
from pathlib import Path

import pytest

from tests.e2e.runs import SMALL, Launch, Run
from tests.e2e.test_sglang import ADAPTERS
from tests.e2e.test_sglang import check_whole as check_whole_run

PYTHON = Path(__file__).resolve().parents[2] / ".venv-vllm" / "bin" / "python"
pytestmark = [
    pytest.mark.skipif(not PYTHON.exists(), reason=f"there is no {PYTHON}: `make vllm-venv` makes it"),
    pytest.mark.long,
    pytest.mark.timeout(600),
]
# vLLM has no kernels for heads as narrow as the quickstart's on a CPU.
HEADS = ("models.policy.init.num_attention_heads=2", "models.policy.init.num_key_value_heads=1")
ROLLOUT = ("layout.pools.rollout.engine=vllm", f"layout.pools.rollout.python={PYTHON}", "layout.pools.rollout.count=1")
START_S = 400.0


def check_whole(run: Run, steps: int) -> None:
    check_whole_run(run, steps)
    assert f"executed by {PYTHON}, Python" in (run.folder / "logs" / "rollout-0.log").read_text()
    assert "executed by" in (run.folder / "logs" / "trainer-0.log").read_text()
    assert str(PYTHON) not in (run.folder / "logs" / "trainer-0.log").read_text()


def test_a_run_on_the_newest_weights_in_any_layout(launch: Launch) -> None:
    """The same samples whether or not the worker also trains: each has random numbers of its own."""
    run = launch("quickstart", *ROLLOUT, *HEADS, "run.training_steps=12")
    assert run.wait(START_S) == 0, run.output
    check_whole(run, 12)
    for line in run.dumps():
        # With max_staleness 0, version t trains step t + 1, and every token is of that version.
        assert [span[1] for span in line["policy_versions"]] == [line["step"] - 1]
        assert line["finish_reason"] == ("stop" if line["response_ids"][-1] == 1 else "length")
    worker = ("layout.pools.worker.engine=vllm", f"layout.pools.worker.python={PYTHON}")
    other = launch("quickstart", "layout=colocated", *worker, *HEADS, "run.training_steps=5")
    assert other.wait(START_S) == 0, other.output
    for line, same in zip(run.metrics(), other.metrics(), strict=False):
        assert line["actor/grad_norm"] == pytest.approx(same["actor/grad_norm"], rel=1e-3), line["step"]


def test_adapters_are_merged_on_arrival(launch: Launch) -> None:
    """The trainer's two replicas divide their optimizer by ZeRO 2; vLLM's Python needs no peft."""
    pytest.importorskip("peft")
    run = launch("quickstart", *SMALL, *ROLLOUT, *HEADS, *ADAPTERS, "run.training_steps=8")
    assert run.wait(START_S) == 0, run.output
    check_whole(run, 8)
    assert run.metrics()[-1]["actor/grad_norm"] > 0


def test_a_killed_worker_is_replaced_and_goes_on(launch: Launch) -> None:
    run = launch("quickstart", *ROLLOUT, *HEADS, "run.training_steps=20")
    run.until(lambda: run.steps_done() > 2, "the third training step", START_S)
    os.kill(run.pid_of("rollout/0"), signal.SIGKILL)
    assert run.wait(START_S) == 0, run.output
    check_whole(run, 20)


def test_it_learns(launch: Launch) -> None:
    """Swapped in mid-sample (staleness 1), over so many steps that a wrong weight or version would show."""
    run = launch("quickstart", "layout=async", *ROLLOUT, *HEADS, "run.training_steps=120")
    assert run.wait(560) == 0, run.output
    lines = run.metrics()
    rewards = [line["critic/rewards/mean"] for line in lines]
    assert statistics.mean(rewards[-10:]) > statistics.mean(rewards[:10]) + 0.2
    assert max(line["staleness/max"] for line in lines) == 1
    # A token that was unlikely may be several times as likely one step later, under the torch engine, too: not in most.
    assert statistics.median(line["rollout_corr/ratio/max"] for line in lines) < 2.5
    assert abs(statistics.mean(line["rollout_corr/kl"] for line in lines)) < 0.02
