"""Runs in which a loss, or what an engine gives, is no number: they go on where they can, and say what it was."""

from __future__ import annotations

import re
import statistics
from pathlib import Path

import pytest

from tests.e2e.runs import PROMPTS, SAMPLES, SMALL, Launch, check_trained_once

PLUGINS = Path(__file__).with_name("bad_numbers.py")
LOSS = f"flow.steps.update.with.loss={PLUGINS}:rare"
TWO = ("layout=split", "layout.pools.trainer.count=2")


def test_one_of_two_trainers_has_a_nan_and_both_skip_the_update(launch: Launch) -> None:
    """With one such step allowed the run ends, saved; resumed, it goes on behind it, and no position is lost."""
    run = launch("quickstart", *TWO, *SMALL, LOSS, "run.training_steps=4", "limits.bad_steps=1")
    assert run.wait() == 3
    assert "model 'policy' has stayed as it was for 1 training steps in a row, up to step 2" in run.output
    assert "Everything is saved behind training step 2" in run.output
    assert run.saved() == [2]
    resumed = launch("--resume", "limits.bad_steps=1", name=run.name)
    assert resumed.wait() == 0, resumed.output
    check_trained_once(run, 4)
    lost = [line for line in run.dumps() if line.get("dropped") == "nonfinite"]
    assert {line["step"] for line in lost} == {2}
    assert len(lost) == PROMPTS * SAMPLES
    metrics = run.metrics()
    assert [line.get("actor/skipped_updates", 0) for line in metrics] == [0, 1, 0, 0]
    assert [line["actor/grad_norm"] is None for line in metrics] == [False, True, False, False]
    logs = "".join(file.read_text() for file in run.folder.glob("logs/trainer-*.log"))
    assert logs.count("an update of model 'policy' is skipped") == 2, "each says what it had"
    assert re.search(r"uids \(epoch, prompt, position\) [^\n]*, 9\)", logs)


def test_one_mini_batch_of_several_is_skipped_and_one_sample_left_out(launch: Launch) -> None:
    """The groups of the other are trained on; and without another engine a sample with bad log-probs is left out."""
    settings = ("layout=colocated", "batch.minibatches=2", "batch.ledgers=4", "run.training_steps=3")
    run = launch("quickstart", *SMALL, *settings, LOSS, f"layout.pools.worker.engine={PLUGINS}:Once")
    assert run.wait() == 0, run.output
    lost = [line for line in run.dumps() if line.get("dropped") == "nonfinite"]
    assert len(lost) == PROMPTS * SAMPLES // 2
    assert 9 in {line["uid"][2] for line in lost}
    metrics = run.metrics()
    assert sum(line.get("actor/skipped_updates", 0) for line in metrics) == 1
    assert all(line["actor/grad_norm"] > 0 for line in metrics)
    assert sum(line.get("engine/bad_logprobs", 0) for line in metrics) == 1
    assert sum(line.get("rollout/left_out", 0) for line in metrics) == 1


def test_a_critic_that_learns_nothing_ends_the_run_of_both_homes(launch: Launch) -> None:
    """Its home tells the owners, and all save one step."""
    critic = f"flow.steps.critic_update.call={PLUGINS}:critic_update"
    run = launch(
        "quickstart", "flow=ppo", "layout=critic", *SMALL, critic, "run.training_steps=30", "limits.bad_steps=3"
    )
    assert run.wait() == 3
    told = re.search(r"model 'critic' has stayed as it was for (\d+) training steps in a row", run.output)
    assert told, run.output
    assert int(told[1]) >= 3, "the owners hear of it a little later"
    (saved,) = run.saved()
    assert saved >= 3
    assert f"Everything is saved behind training step {saved}" in run.output
    assert run.metrics()[0]["critic/skipped_updates"] == 1, "two replicas count one"
    assert run.leftovers() == []


def test_another_engine_makes_the_group_whose_log_probs_are_none(launch: Launch) -> None:
    engine = f"layout.pools.rollout.each={{1: {{engine: '{PLUGINS}:Once'}}}}"
    run = launch("quickstart", "layout=split", *SMALL, engine, "run.training_steps=6")
    assert run.wait() == 0, run.output
    check_trained_once(run, 6)
    told = (run.folder / "logs" / "rollout-1.log").read_text()
    found = re.search(r"engine [^\n]*:Once on rollout/1, version \d+ of term 0, gave -inf [^\n]*, (\d+)\)", told)
    assert found is not None
    assert {line["worker"] for line in run.dumps() if line["uid"][2] == int(found[1])} == {"rollout/0"}
    assert sum(line.get("engine/bad_logprobs", 0) for line in run.metrics()) == 1


@pytest.mark.long
def test_a_run_of_many_faults_learns_its_task(launch: Launch) -> None:
    """2% of the updates have no norm, and 5% of the samples no reward."""
    faults = (
        f"flow.steps.update.with.loss={PLUGINS}:now_and_then",
        f"flow.steps.reward.with.function={PLUGINS}:away_now_and_then",
        "flow.steps.reward.with.on_error=leave_out",
    )
    run = launch("quickstart", *faults, "run.training_steps=300")
    assert run.wait(400) == 0, run.output
    metrics = run.metrics()
    assert sum(line.get("actor/skipped_updates", 0) for line in metrics) >= 6
    failed, judged = (sum(line[f"reward/{key}"] for line in metrics) for key in ("errors", "samples"))
    assert 0.03 < failed / judged < 0.07
    assert statistics.mean(line["critic/score/mean"] for line in metrics[-10:]) >= 0.95
