"""The real SmolLM2-135M-Instruct, from the package that ships its weights, on a reasoning-gym task."""

import json
from pathlib import Path

import pytest

from distflow.workers.smollm2 import main
from tests.e2e.runs import Launch

pytestmark = [pytest.mark.long, pytest.mark.smollm2, pytest.mark.timeout(600)]
pytest.importorskip("gguf")
pytest.importorskip("reasoning_gym")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("smollm2") / "model"
    assert main([str(folder)]) == 0
    return folder


def test_it_trains_on_chain_sums(launch: Launch, model: Path) -> None:
    small = ["run.training_steps=1", "batch.prompts=2", "batch.ledgers=2", "batch.samples_per_prompt=2"]
    run = launch("reasoning", f"models.policy.path={model}", *small, "flow.steps.sample.with.max_new_tokens=12")
    assert run.wait(400) == 0, run.output
    (line,) = run.metrics()
    # Engine and trainer see the same model: their log-probs agree, and so nothing is corrected away.
    assert line["rollout_corr/ratio/max"] == pytest.approx(1.0, abs=1e-2)
    assert all("=" in sample["prompt"] and sample["response"] for sample in run.dumps())
    assert run.leftovers() == []


def test_it_trains_on_questions_as_gsm8k_has_them(launch: Launch, model: Path, tmp_path: Path) -> None:
    sources = []
    for key, numbers in (("data", range(1, 9)), ("val.data", range(10, 14))):
        rows = [
            {"question": f"Tom has {n} apples and buys 4. How many has he?", "answer": f"{n}+4={n + 4}\n#### {n + 4}"}
            for n in numbers
        ]
        file = tmp_path / f"{key}.jsonl"
        file.write_text("".join(json.dumps(row) + "\n" for row in rows))
        sources += [f"{key}.source={file}", f"{key}.fields.prompt=question"]
    small = ["run.training_steps=2", "val.every=1", "run.save_every=1", "val.prompts=4", "models.policy.dtype=float32"]
    small += ["batch.prompts=8", "batch.samples_per_prompt=2", "flow.steps.sample.with.max_new_tokens=16"]
    run = launch("gsm8k", f"models.policy.path={model}", *small, *sources)
    assert run.wait(500) == 0, run.output
    assert all("apples" in sample["prompt"] for sample in run.dumps())
    assert "validation: avg@1" in run.output
    assert "--best" in run.output
