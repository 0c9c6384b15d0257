"""A run that is rewarded by a sequence classifier, on the pool that generates."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.e2e.runs import SMALL, Launch
from tests.learning.test_reward_model import alone, backend_of, folder_of


def test_samples_get_what_the_model_gives_their_texts(launch: Launch, tmp_path: Path) -> None:
    folder = folder_of("qwen2", tmp_path / "judge")
    settings = [f"+models.judge={{path: '{folder}', head: score}}", "run.training_steps=2", *SMALL]
    step = "flow.steps.reward={call: 'distflow.workers.reward_model:judge', model: judge, with: {scale: 3.0}}"
    run = launch("quickstart", *settings, step)
    assert run.wait() == 0, run.output
    dumps = run.dumps()
    judge = backend_of(folder)
    rows = [judge.encode(line["prompt"], line["response"]) for line in dumps]
    found = [line["reward"] for line in dumps]
    assert found == pytest.approx((3.0 * alone(folder, rows)).tolist(), rel=1e-4, abs=1e-6)
    assert len(set(found)) > 1
    assert run.metrics()[-1]["timing_s/reward"] > 0
