"""The real SmolLM2-135M-Instruct, from the package that ships its weights, on a reasoning-gym task."""

from pathlib import Path

import pytest

from distflow.workers.smollm2 import main
from tests.e2e.runs import Launch

pytestmark = [pytest.mark.long, pytest.mark.smollm2, pytest.mark.timeout(600)]
pytest.importorskip("gguf")
pytest.importorskip("reasoning_gym")


def test_it_trains_on_chain_sums(launch: Launch, tmp_path: Path) -> None:
    model = tmp_path / "model"
    assert main([str(model)]) == 0
    small = ["run.training_steps=1", "batch.prompts=2", "batch.ledgers=2", "batch.samples_per_prompt=2"]
    run = launch("smollm2", f"models.policy.path={model}", *small, "flow.steps.sample.with.max_new_tokens=12")
    assert run.wait(400) == 0, run.output
    (line,) = run.metrics()
    # Engine and trainer see the same model: their log-probs agree, and so nothing is corrected away.
    assert line["rollout_corr/ratio/max"] == pytest.approx(1.0, abs=1e-2)
    assert all("=" in sample["prompt"] and sample["response"] for sample in run.dumps())
    assert run.leftovers() == []
