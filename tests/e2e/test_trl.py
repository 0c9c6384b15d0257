"""The data set and the reward functions of a TRL script train as they are."""

from __future__ import annotations

import shutil
from pathlib import Path
from statistics import fmean

import pytest

from distflow.launch.commands.rollouts import read_lines
from distflow.workers.tokenizers import CharTokenizer
from tests.e2e.runs import Launch, Run
from tests.e2e.test_data_files import TEMPLATE

SCRIPT = Path(__file__).with_name("trl_script.py")
RECIPE = """
defaults: [{base}, {{override layout: colocated}}, _self_]
run: {{training_steps: 2}}
batch: {{prompts: 4, samples_per_prompt: 4, ledgers: 4}}
{model}
val: {{prompts: 4, samples_per_prompt: 2}}
data: {{source: "./grpo.py:dataset", max_prompt_tokens: 80}}
flow:
  steps:
    sample: {{with: {{max_new_tokens: 8}}}}
    reward:
      with:
        function:
          digits: {{function: "./grpo.py:digits_reward"}}
          solution: {{function: "./grpo.py:solution_reward", weight: 2.0}}
          warmup: {{function: "./grpo.py:warmup", weight: 0.1}}
          variety: {{function: "./grpo.py:variety", weight: 0.0}}
"""
TINY = "models: {policy: {tokenizer: tokenizer, init: {max_position_embeddings: 128}}}"


def check(launch: Launch, tmp_path: Path, recipe: str, within_s: float = 120.0) -> None:
    """Launch the recipe beside the script, and look at what the functions gave and told."""
    shutil.copy(SCRIPT, tmp_path / "grpo.py")
    (tmp_path / "mine.yaml").write_text(recipe)
    run = launch(str(tmp_path / "mine.yaml"))
    assert run.wait(within_s) == 0, run.output
    lines = run.dumps()
    assert len(lines) == 2 * 4 * 4
    for line in lines:
        parts = line["rewards"]
        assert line["extra"]["digits"] == sum(map(str.isdigit, line["response"]))
        assert parts["variety"] == min(5, len(set(line["response"])))
        assert parts["warmup"] == pytest.approx((1 - (line["step"] - 1) / 2) * len(line["response_ids"]))
        odd = int(line["prompt"].split()[2]) % 2 == 1
        assert (parts["solution"] is not None) == odd
        expected = parts["digits"] + 2.0 * (parts["solution"] or 0.0) + 0.1 * parts["warmup"]
        assert line["reward"] == pytest.approx(expected, abs=1e-4)
    steps = run.metrics()
    check_validated(run, {int(one["step"]): one for one in steps})
    for measured in steps[1:]:
        shares = [line["rewards"]["digits"] for line in lines if line["step"] == measured["step"]]
        assert measured["digit_share"] == pytest.approx(sum(shares) / len(shares), abs=1e-4)


def check_validated(run: Run, measured: dict[int, dict[str, float]]) -> None:
    """Validation shows the mean weighted reward, and that of each function over the samples that it judges."""
    for step in (0, 2):
        lines = read_lines(run.folder / "rollouts" / "val" / f"step_{step:06d}")
        assert len(lines) == 4 * 2
        expected = {"critic/rewards/mean": [line["reward"] for line in lines]}
        for name in ("digits", "solution", "warmup", "variety"):
            given = [line["rewards"][name] for line in lines]
            expected[f"rewards/{name}/mean"] = [value for value in given if value is not None]
        for name, values in expected.items():
            assert measured[step][f"val/{name}"] == pytest.approx(fmean(values), abs=1e-4), name
        assert measured[step]["val/avg@2"] == pytest.approx(fmean(line["score"] for line in lines), abs=1e-4)


def test_a_tiny_model_trains_on_them(launch: Launch, tmp_path: Path) -> None:
    pytest.importorskip("datasets")
    letters = "abcdefghijklmnopqrstuvwxyz"
    tokenizer = CharTokenizer(f"chars:0123456789{letters}{letters.upper()} .,?<>")
    tokenizer.pretrained.chat_template = TEMPLATE
    tokenizer.save(tmp_path / "tokenizer")
    check(launch, tmp_path, RECIPE.format(base="quickstart", model=TINY))


@pytest.mark.long
@pytest.mark.smollm2
@pytest.mark.timeout(600)
def test_smollm2_trains_on_them(launch: Launch, tmp_path: Path) -> None:
    pytest.importorskip("datasets")
    pytest.importorskip("gguf")
    from distflow.workers.smollm2 import main

    assert main([str(tmp_path / "model")]) == 0
    check(launch, tmp_path, RECIPE.format(base="reasoning", model="models: {policy: {path: model}}"), within_s=500.0)
