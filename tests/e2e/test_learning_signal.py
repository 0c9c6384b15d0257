"""Runs that would learn nothing: filters of the sampler, masks that leave nothing, rewards that never differ."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.e2e.runs import SMALL, Launch

CORRECTION = "flow.steps.update.with.correction"
ROUNDING = 1e-5
"""Some hundred times the float32 ε of a log-prob of a few nats: engine and trainer add up in another order."""


@pytest.mark.parametrize(
    ("filters", "correction"),
    [
        (["top_p=0.8", "temperature=0.7"], "geometric_mask: [0.99, 1.01]"),
        (["top_k=3", "temperature=1.3"], "sequence_mis: [0.9, 1.1]"),
    ],
    ids=str,
)
def test_filters_change_no_weight(launch: Launch, filters: list[str], correction: str) -> None:
    given = [f"flow.steps.sample.with.{one}" for one in filters]
    run = launch(
        "quickstart", "layout=colocated", *SMALL, *given, f"{CORRECTION}={{{correction}}}", "run.training_steps=3"
    )
    assert run.wait() == 0, run.output
    for metrics in run.metrics():
        assert metrics["actor/grad_norm"] > 0.01
        assert metrics["rollout_corr/ratio/mean"] == pytest.approx(1.0, abs=ROUNDING)
        assert metrics["rollout_corr/kept"] == pytest.approx(1.0, abs=ROUNDING)
        assert metrics["rollout_corr/kl"] == pytest.approx(0.0, abs=ROUNDING)


def test_a_mask_that_leaves_nothing_is_told_and_ends_the_run_on_all_trainers(launch: Launch) -> None:
    mask = f"{CORRECTION}={{geometric_mask: [2.0, 3.0]}}"
    run = launch("quickstart", "layout=split", "layout.pools.trainer.count=2", *SMALL, mask, "run.training_steps=9")
    assert run.wait() == 3
    assert "warning: training step 1: corrections for the policy that sampled leave 0.00% of the tokens" in run.output
    assert "for 3 training steps in a row, up to step 3, corrections" in run.record()["failure"]["message"]
    assert [line["step"] for line in run.metrics()] == [1, 2, 3]
    assert run.leftovers() == []


def test_rewards_that_never_differ_end_the_run(launch: Launch, tmp_path: Path) -> None:
    """After 50 training steps and more than a pass over the data: here of 16 prompts, 8 in a step."""
    (tmp_path / "alike.py").write_text("def alike(completion):\n    return 0.25\n")
    rows = "".join(f'{{"prompt": "{n % 10}1=", "answer": "{n}"}}\n' for n in range(16))
    (tmp_path / "rows.jsonl").write_text(rows)
    run = launch(
        "quickstart",
        *SMALL,
        f"data.source={tmp_path / 'rows.jsonl'}",
        f"flow.steps.reward.with.function={tmp_path / 'alike.py'}:alike",
        "batch.samples_per_prompt=2",
        "run.training_steps=90",
    )
    assert run.wait() == 3, run.output
    assert "warning: for 20 training steps the samples of each prompt have all got the same reward" in run.output
    assert "in none of the 50 training steps since the run began" in run.record()["failure"]["message"]
