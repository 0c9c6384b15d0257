"""Reward functions of TRL's form, tested with prompts that are conversations."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from distflow.errors import UserError
from distflow.testing.plugins.child import run_suite
from distflow.testing.plugins.process import find_subjects
from tests.plugins.test_shipped import Told

FUNCTIONS = """
def of_messages(completions, **kwargs):
    return [float(len(turns[0]["content"])) for turns in completions]


async def of_the_last_turn(prompts, completions, level, **kwargs):
    assert all(turns[-1]["role"] == "user" for turns in prompts)
    return [float(turns[-1]["content"] == gold) for turns, gold in zip(completions, level)]


def of_texts(completions, **kwargs):
    return [float(len(text.strip())) for text in completions]


def chats():
    return [{"prompt": [{"role": "user", "content": f"{n}+1="}], "level": n} for n in range(3)]
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "judge.py").write_text(FUNCTIONS)
    row = {"prompt": [{"role": "user", "content": "1+1="}], "level": 2}
    (tmp_path / "chats.jsonl").write_text(f"{json.dumps(row)}\n")
    (tmp_path / "texts.jsonl").write_text('{"prompt": "1+1=", "level": 2}\n')
    monkeypatch.chdir(tmp_path)
    return tmp_path


def told_with(name: str, data: str | None, *words: str) -> Told:
    """What is found out with `--data`, or with the overrides of a recipe."""
    function = f"./judge.py:{name}"
    given = ["quickstart", f"flow.steps.reward.with.function={function}", *words] if words else [function]
    (subject,) = find_subjects(given, None, (), data)
    report = Told()
    run_suite(subject, report)
    return report


@pytest.mark.parametrize(
    "data, words",
    [
        ("chats.jsonl", ()),
        ("./judge.py:chats", ()),
        (None, ("data.source=chats.jsonl",)),
    ],
)
def test_completions_are_messages_where_prompts_are(folder: Path, data: str | None, words: tuple[str, ...]) -> None:
    for name in ("of_messages", "of_the_last_turn"):
        assert told_with(name, data, *words).of("wrong") == [], name
    found = told_with("of_texts", data, *words).of("wrong")
    assert "'list' object has no attribute 'strip'" in found[0]


def test_completions_are_texts_where_prompts_are(folder: Path) -> None:
    for data, words in (("texts.jsonl", ()), (None, ("data.source=texts.jsonl", "data.chat=true"))):
        assert told_with("of_texts", data, *words).of("wrong") == []
        assert told_with("of_messages", data, *words).of("wrong")


@pytest.mark.parametrize(
    "name, form",
    [("of_messages", "lists of messages"), ("of_the_last_turn", "lists of messages"), ("of_texts", "texts")],
)
def test_made_up_completions_are_what_the_function_takes(folder: Path, name: str, form: str) -> None:
    report = told_with(name, None)
    assert report.of("wrong") == []
    assert any(re.search(rf"by one call, made up as {form}: --data FILE", text) for text in report.of("ok"))


def test_overrides_without_a_recipe(folder: Path) -> None:
    with pytest.raises(UserError, match=r"run\.seed=3: overrides belong to a recipe"):
        find_subjects(["./judge.py:of_texts", "run.seed=3"], None, (), None)
