"""Files of prompts train without a line of code, and broken ones end the run before it begins."""

import json
from pathlib import Path
from typing import Any

import pytest

from distflow.workers.tokenizers import CharTokenizer
from tests.e2e.runs import Launch

RECIPE = """
defaults: [quickstart, {override layout: colocated}, _self_]
run: {training_steps: 2}
batch: {prompts: 8, samples_per_prompt: 2}
models: {policy: {tokenizer: tokenizer, init: {max_position_embeddings: 128}}}
flow:
  steps:
    reward:
      with:
        function:
          correct: {function: math}
          format: {weight: 0.1, pattern: "\\\\d+"}
          length_penalty: {weight: 0.5, max_tokens: 4, buffer: 2}
data:
  max_prompt_tokens: 80
  mix: {school: {source: train.parquet, weight: 3}, chats: {source: chats.jsonl}}
"""
TEMPLATE = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}<assistant>"


def gsm8k(number: int) -> dict[str, Any]:
    """A row as verl's examples/data_preprocess/gsm8k.py writes it."""
    question = f"Ann has {number} apples and eats 1. How many are left?"
    return {
        "data_source": "openai/gsm8k",
        "prompt": [{"content": question, "role": "user"}],
        "ability": "math",
        "reward_model": {"ground_truth": str(number - 1), "style": "rule"},
        "extra_info": {"answer": f"#### {number - 1}", "index": number, "question": question, "split": "train"},
    }


@pytest.fixture
def recipe(tmp_path: Path) -> str:
    """A recipe beside a tokenizer with a chat template."""
    letters = "abcdefghijklmnopqrstuvwxyz"
    tokenizer = CharTokenizer(f"chars:0123456789{letters}{letters.upper()} .,?<>")
    tokenizer.pretrained.chat_template = TEMPLATE
    tokenizer.save(tmp_path / "tokenizer")
    (tmp_path / "mine.yaml").write_text(RECIPE)
    return str(tmp_path / "mine.yaml")


def test_verls_parquet_and_a_jsonl_of_chats_train(launch: Launch, recipe: str, tmp_path: Path) -> None:
    pa, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    pytest.importorskip("math_verify")
    parquet.write_table(pa.Table.from_pylist([gsm8k(number) for number in range(2, 42)]), tmp_path / "train.parquet")
    system = {"role": "system", "content": "Add."}
    chats = [{"prompt": [system, {"role": "user", "content": f"{n} and 1"}], "answer": n + 1} for n in range(9)]
    (tmp_path / "chats.jsonl").write_text("".join(f"{json.dumps(chat)}\n" for chat in chats))
    run = launch(recipe)
    assert run.wait() == 0, run.output
    samples = run.dumps()
    assert len(samples) == 32
    for line in samples:
        assert line["prompt"].startswith("Ann has " if line["uid"][1] < 40 else "system: Add.\n\nuser: ")
        assert set(line["rewards"]) == {"correct", "format", "length_penalty"}
        parts = line["rewards"]
        expected = parts["correct"] + 0.1 * parts["format"] + 0.5 * parts["length_penalty"]
        assert line["reward"] == pytest.approx(expected, abs=1e-5)
        assert line["score"] == parts["correct"]
    assert sum(line["uid"][1] < 40 for line in samples) == 24, "three of four prompts"
    for step in run.metrics():
        assert {"score/openai/gsm8k/mean", "score/chats/mean", "rewards/format/mean"} <= step.keys()


def test_a_file_on_the_command_line(launch: Launch, tmp_path: Path) -> None:
    rows = [{"question": f"{n:03d}=", "solution": f"{n:03d}"} for n in range(40)]
    rows[7]["question"] = "0123456789" * 3
    path = tmp_path / "prompts.jsonl"
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    fields = ("data.fields.prompt=question", "data.fields.answer=solution")
    small = ("layout=colocated", "batch.prompts=16", "batch.samples_per_prompt=2", "run.training_steps=3")
    run = launch("quickstart", f"data.source={path}", *fields, "data.max_prompt_tokens=8", "data.overlong=drop", *small)
    assert run.wait() == 0, run.output
    samples = run.dumps()
    assert [(line["prompt"], line["uid"][1]) for line in samples] == [
        (rows[line["uid"][1]]["question"], line["uid"][1]) for line in samples
    ]
    first_pass = {line["uid"][1] for line in samples if line["uid"][0] == 0}
    assert first_pass == set(range(40)) - {7}
    assert {line["uid"][2] for line in samples} == set(range(48)), "no position is left out"


def test_a_broken_line_ends_the_run_before_it_begins(launch: Launch, tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"prompt": "1="}\n{"prompt": "2="\n')
    run = launch("quickstart", f"data.source={path}", "layout=colocated")
    assert run.wait() == 2, run.output
    assert "prompts.jsonl:2: broken JSON: Expecting ',' delimiter" in run.output
    assert not run.dumps()
