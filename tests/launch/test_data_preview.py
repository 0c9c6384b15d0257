"""`distflow data preview`: prompts with special tokens, lengths, what is left out, and rewards of gold answers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from distflow.launch.cli import run
from distflow.workers.tokenizers import CharTokenizer

RECIPE = """
defaults: [quickstart, _self_]
models: {policy: {tokenizer: tokenizer, init: {max_position_embeddings: 128}}}
data: {source: prompts.jsonl, max_prompt_tokens: 16}
flow: {steps: {reward: {with: {function: {exact_match: {}, mine: {function: "./mine.py:tagged", weight: 0.5}}}}}}
"""
MINE = """
def tagged(sample):
    return float(sample.response.startswith("<answer>"))

def picky(sample):
    raise RuntimeError("nothing suits")

def tags_only(sample):
    return float(sample.response == f"<answer>{sample.task['answer']}</answer>")
"""


@pytest.fixture
def recipe(tmp_path: Path) -> str:
    tokenizer = CharTokenizer("chars:0123456789=<>/answerW")
    tokenizer.pretrained.chat_template = "{% for m in messages %}<a>{{ m.content }}{{ eos_token }}{% endfor %}"
    tokenizer.save(tmp_path / "tokenizer")
    (tmp_path / "mine.py").write_text(MINE)
    (tmp_path / "mine.yaml").write_text(RECIPE)
    rows(tmp_path, *({"prompt": [{"role": "user", "content": f"{n:02d}="}], "answer": n} for n in range(30)))
    return str(tmp_path / "mine.yaml")


def rows(folder: Path, *found: Any) -> None:
    (folder / "prompts.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in found))


def preview(recipe: str, *arguments: str, code: int = 0) -> None:
    assert run(["data", "preview", recipe, *arguments]) == code


def test_prompts_with_special_tokens_and_gold_answers(recipe: str, capsys: pytest.CaptureFixture[str]) -> None:
    preview(recipe, "-n", "2", "data.shuffle=false")
    out = capsys.readouterr().out
    assert "position 0: prompt 0 (" in out
    assert "prompts.jsonl:1), 7 tokens\n  | <a>00=<eos>\n" in out
    assert "position 1: prompt 1 (" in out
    assert "position 2" not in out
    assert "gold answer '1': reward 1, score 1, rewards/exact_match 1, rewards/mine 0\n" in out
    assert "30 of 30 prompts: 7 to 7 tokens, 7.0 on average (data.max_prompt_tokens 16)" in out
    assert "gold answers: score 1 on average, reward of 30 looked at" in out
    assert "gets 1 from exact_match and from mine: the first takes '0', the second '<answer>0</answer>' — " in out
    assert out.count("warning") == 1


def test_what_ends_responses_is_named(recipe: str, capsys: pytest.CaptureFixture[str]) -> None:
    preview(recipe, "-n", "1")
    assert "responses end with '<eos>' (1)\n" in capsys.readouterr().out


def test_which_turns_of_a_conversation_are_trained_on(
    recipe: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    contents = [("user", "1="), ("assistant", "1"), ("user", "23="), ("assistant", "23")]
    rows(tmp_path, {"messages": [{"role": role, "content": text} for role, text in contents]})
    about = (f"models.policy.tokenizer={tmp_path}/tokenizer", f"data.source={tmp_path}/prompts.jsonl", "flow=sft")
    about = (*about, "data.max_prompt_tokens=18")
    preview("quickstart", *about)
    out = capsys.readouterr().out
    assert "response 0 (18 tokens, 11 of them trained on): '[<a>1<eos>]<a>23=<eos>[<a>23<eos>]'" in out
    preview("quickstart", *about, "flow.steps.read.with.turns=last")
    assert "response 0 (6 tokens): '[<a>23<eos>]'" in capsys.readouterr().out


def test_a_gold_answer_is_given_in_the_form_that_the_reward_expects(
    recipe: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    preview(recipe, "-n", "1", f"flow.steps.reward.with.function={tmp_path}/mine.py:tags_only", "data.shuffle=false")
    out = capsys.readouterr().out
    assert "gold answer '<answer>0</answer>': reward 1, score 1" in out
    assert "warning" not in out


def test_a_reward_that_does_not_fit_the_answers(
    recipe: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    only = "{exact_match: null, mine: null, regex: {pattern: W}}"
    preview(recipe, "-n", "1", f"flow.steps.reward.with.function={only}", "data.shuffle=false")
    out = capsys.readouterr().out
    assert "warning: 30 of 30 gold answers get a score below 1, first that of prompt 0 (" in out
    assert "'0' gets 0 — check the reward function and the answer" in out
    preview(recipe, "-n", "1", f"flow.steps.reward.with.function={tmp_path}/mine.py:picky")
    out = capsys.readouterr().out
    assert "warning: the reward fails on gold answers:\n" in out
    assert "RuntimeError: nothing suits" in out


def test_what_is_too_long(recipe: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    texts = ["1=", "12345678=", "2="]
    rows(tmp_path, *({"prompt": text, "answer": "1"} for text in texts))
    preview(recipe, "data.max_prompt_tokens=4", "data.shuffle=false", code=2)
    told = capsys.readouterr()
    assert "data.max_prompt_tokens — 1 of 3 prompts are longer, or empty, first prompt 1 (" in told.err
    preview(recipe, "data.max_prompt_tokens=4", "data.overlong=drop", "data.shuffle=false")
    out = capsys.readouterr().out
    assert "1 of 3 prompts are longer than data.max_prompt_tokens=4 and left out (data.overlong=drop)" in out
    assert "2 of 3 prompts: 2 to 2 tokens" in out, "no prompt is looked at twice"
    assert "12345678" not in out


def test_gold_answers_as_the_run_will_see_them(recipe: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    function, mine = "flow.steps.reward.with.function", f"{tmp_path}/mine.py:tags_only"
    rows(tmp_path, *({"prompt": "1=", "answer": answer} for answer in (11.0, ["12", "twelve"], None, 1e20, [None])))
    preview(recipe, "data.shuffle=false", f"{function}={{mine: null}}")
    out = capsys.readouterr().out
    assert "gold answer '11': reward 1, score 1" in out
    assert "gold answer '12': reward 1, score 1" in out
    assert "gold answer '100000000000000000000': reward 1, score 1" in out
    assert "2 of 5 prompts have no gold answer, which reward exact_match needs, and are left out" in out
    assert "3 of 5 prompts: " in out
    assert "gold answers: score 1 on average, reward of 3 looked at" in out
    # What a function of the user needs is not known: nothing is left out for it.
    preview(recipe, "data.shuffle=false", f"{function}={{exact_match: null, mine: {{function: '{mine}'}}}}")
    out = capsys.readouterr().out
    assert "2 of 5 prompts have no gold answer: `answer` of the task is null, or not there (data.fields.answer)" in out
    assert "5 of 5 prompts: " in out


def test_rewards_that_ask_for_no_gold_answer(recipe: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """That there is none is told of functions that name it, themselves or by others of their file."""
    (tmp_path / "own.py").write_text(
        "def short(sample):\n    return -float(len(sample.response))\n\n"
        "def any_column(completions, **kwargs):\n    return [float(len(text)) for text in completions]\n\n"
        "def by_column(completions, answer=None, **kwargs):\n    return [0.0 for text in completions]\n\n"
        "def truth(task):\n    return task.get('answer')\n\n"
        "def by_another(sample):\n    return float(sample.response == truth(sample.task))\n"
    )
    rows(tmp_path, {"prompt": "1="}, {"prompt": "2="})
    for name, told in (("short", False), ("any_column", False), ("by_column", True), ("by_another", True)):
        preview(recipe, f"flow.steps.reward.with.function={tmp_path}/own.py:{name}")
        assert ("2 of 2 prompts have no gold answer" in capsys.readouterr().out) == told, name


def test_rows_without_any_gold_answer(recipe: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows(tmp_path, {"prompt": "1=", "solution": 1}, {"prompt": "2=", "solution": 2})
    preview(recipe, code=2)
    told = capsys.readouterr().err
    assert "2 of 2 prompts have no gold answer, which reward exact_match needs, and are left out; the task of " in told
    assert "has solution — data.fields.answer=COLUMN says which column it is" in told
    preview(recipe, "data.fields.answer=solution")


def test_rewards_that_no_response_can_suit_together(
    recipe: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pattern = "format: {pattern: '<answer>.*</answer>'}"
    function = "flow.steps.reward.with.function"
    preview(recipe, f"{function}={{mine: null, {pattern}}}")
    assert "gets 1 from exact_match and from format: the first takes '" in capsys.readouterr().out
    regex = "regex: {pattern: '<answer>(.*)</answer>'}"
    preview(recipe, f"{function}={{mine: null, exact_match: null, {regex}, {pattern}}}")
    assert "warning" not in capsys.readouterr().out


def test_a_source_of_one_row(recipe: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows(tmp_path, {"prompt": "1=", "answer": 1})
    preview(recipe)
    out = capsys.readouterr().out
    assert "1 of 1 prompts: 2 to 2 tokens" in out
    assert out.count("position ") == 1


def test_broken_data_is_told(recipe: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "1="}\n{"prompt": \n')
    preview(recipe, code=2)
    assert "mine.yaml:4: data — " in (told := capsys.readouterr().err)
    assert "prompts.jsonl:2: broken JSON: " in told


def test_rewards_of_models_are_not_shown(capsys: pytest.CaptureFixture[str]) -> None:
    preview("two_turns", "-n", "1")
    assert "rewards of gold answers are not shown: no score step gives them" in capsys.readouterr().out


def test_responses_that_the_data_gives(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows(tmp_path, *({"prompt": f"{n}=", "response": str(n) * (n + 1), "label": n % 2 == 0} for n in range(4)))
    data = ["data.shuffle=false", f"data.source={tmp_path}/prompts.jsonl"]
    preview("quickstart", "flow=kto", *data, "-n", "1")
    out = capsys.readouterr().out
    assert "position 0: prompt 0 (" in out
    assert "  | 0=\n  response 0 (2 tokens, label 1): '[0<eos>]'\n" in out
    assert "  response 1 (3 tokens, label 0, not trained on): '11<eos>'\n" in out
    assert "their 8 responses: 2 to 5 tokens, 3.5 on average, end tokens included (max_response_tokens 1024)" in out
    assert "gold answer" not in out
    preview("quickstart", "flow=kto", *data, "flow.steps.read.with.max_response_tokens=4", code=2)
    assert "responses of 2 of 4 prompts are longer, first of prompt 2 (" in capsys.readouterr().err
    preview("quickstart", "flow=dpo", *data, code=2)
    assert "prompts.jsonl:1): there is no column 'chosen' or 'answer'; there are response, label" in (
        capsys.readouterr().err
    )
