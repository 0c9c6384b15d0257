"""`validate --deep` makes the data source and renders the first prompt, as a training worker would."""

from __future__ import annotations

from pathlib import Path

import pytest

from distflow.launch.cli import run

RECIPE = """\
defaults: [quickstart, _self_]
data: {source: "./mine.py:lines", with: {path: ./prompts.txt}}
"""
SOURCE = """\
from pathlib import Path
from distflow.data.sources import PromptText

def lines(*, path: str) -> list[PromptText]:
    return [PromptText(line, {"answer": line}) for line in Path(path).read_text().split()]
"""


@pytest.fixture
def recipe(tmp_path: Path) -> str:
    (tmp_path / "mine.py").write_text(SOURCE)
    (tmp_path / "mine.yaml").write_text(RECIPE)
    return str(tmp_path / "mine.yaml")


def test_the_first_prompt_is_shown(recipe: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "prompts.txt").write_text("12=")
    assert run(["validate", recipe, "--deep"]) == 0
    assert "prompt 0 (number 0 of the source, 3 tokens): '12=', task '{\"answer\": \"12=\"}'" in capsys.readouterr().out


@pytest.mark.parametrize(
    "text, message",
    [
        (None, r"mine.yaml:2: data.source — it fails:\n  File \"TMP/mine.py\", line 5, in lines"),
        ("12+", "data.source — data: prompt 0 cannot be written in this model's tokens: character '+'"),
        ("", "data.source — the data source list is empty"),
        ("1" * 17, "data.source — data: prompt 0 has 17 tokens, expected 1 to 16 (data.max_prompt_tokens)"),
    ],
    ids=["no file", "characters", "empty", "long"],
)
def test_a_source_that_cannot_give_its_first_prompt_is_refused(
    recipe: str, tmp_path: Path, text: str | None, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    if text is not None:
        (tmp_path / "prompts.txt").write_text(text)
    assert run(["validate", recipe, "--deep"]) == 2
    error = capsys.readouterr().err
    assert message.replace("TMP", str(tmp_path)).replace("\\n", "\n").replace('\\"', '"') in error


def test_chat_without_a_chat_template_is_refused(
    recipe: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "prompts.txt").write_text("12=")
    assert run(["validate", recipe, "--deep", "data.chat=true"]) == 2
    told = (
        "data.source — chat messages, and texts where data.chat is true, are written by a chat template, but tokenizer"
    )
    assert told in capsys.readouterr().err


@pytest.mark.parametrize(
    "override, message",
    [
        ("layout.pools.rollout.script=/no/such.py", "layout.pools.rollout.script — there is no file /no/such.py — "),
        ("layout.pools.rollout.each.1.script=/no/such.py", "layout.pools.rollout.each.1.script — there is no file"),
        ("models.policy.init.num_hidden_layers=0", "init.num_hidden_layers — 0 is not a size — 1 or more"),
        ("models.policy.init.hidden_size=-64", "init.hidden_size — -64 is not a size — 1 or more"),
    ],
)
def test_more_that_no_worker_could_start_with(override: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["validate", "quickstart", override]) == 2
    assert message in capsys.readouterr().err


def test_a_stop_token_outside_the_vocabulary_is_refused(
    recipe: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "prompts.txt").write_text("12=")
    key = "flow.steps.sample.with.stop_token_ids"
    assert run(["validate", recipe, "--deep", f"{key}=[12]"]) == 0
    assert run(["validate", recipe, "--deep", f"{key}=[1,99]"]) == 2
    assert f"{key} — 99 is no token id of model 'policy', which has 0 to 1" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("stop_token_ids=[a]", "expected a list of whole numbers, got ['a']"),
        ("stop_token_ids=[1, true]", "expected a list of whole numbers, got [1, True]"),
        ("stop_token_ids=[[1]]", "expected a list of whole numbers, got [[1]]"),
        ("stop=[1]", "expected text, or a list of texts, got [1]"),
        ("logit_bias={a: 1}", "expected a mapping of whole numbers to numbers, got {'a': 1}"),
        ("logit_bias={1: x}", "expected a mapping of whole numbers to numbers, got {'1': 'x'}"),
        ("stop_token_ids=[1,13]", "13 is no token id of model 'policy', which has 0 to 12"),
        ("stop_token_ids=[-1]", "-1 is no token id of model 'policy'"),
        ("logit_bias={5: 1, 99: 1.0}", "99 is no token id of model 'policy'"),
    ],
)
def test_what_is_no_token_is_refused_without_deep(
    setting: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Items of a list or a mapping as well as the whole; ids, since the model's configuration is at hand."""
    assert run(["validate", "quickstart", f"flow.steps.sample.with.{setting}"]) == 2
    key = setting.partition("=")[0]
    assert f"flow.steps.sample.with.{key} — {message}" in capsys.readouterr().err


def test_ids_of_a_model_in_a_folder_and_of_validation_are_looked_up(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "llama", "vocab_size": 200}')
    model = [
        "models.policy.init=null",
        f"models.policy.path={tmp_path}",
        'models.policy.tokenizer="chars:0123456789+="',
    ]
    key = "flow.steps.sample.with.stop_token_ids"
    run(["validate", "quickstart", *model, f"{key}=[199]"])
    assert "is no token id" not in capsys.readouterr().err
    assert run(["validate", "quickstart", *model, f"{key}=[200]"]) == 2
    assert "200 is no token id of model 'policy', which has 0 to 199" in capsys.readouterr().err
    assert run(["validate", "quickstart", "val.every=5", "val.sampling={stop_token_ids: [44]}"]) == 2
    assert "val.sampling.stop_token_ids — 44 is no token id of model 'policy'" in capsys.readouterr().err


def test_stop_strings_that_no_text_has_are_refused(
    recipe: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "prompts.txt").write_text("12=")
    key = "flow.steps.sample.with.stop"
    assert run(["validate", recipe, "--deep", f"{key}=['=', '12']", "flow.steps.sample.with.logit_bias={5: 1.0}"]) == 0
    assert run(["validate", recipe, "--deep", f"{key}=['x']"]) == 2
    assert f"{key} — stop 'x' can never come: character 'x'" in capsys.readouterr().err
