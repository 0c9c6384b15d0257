"""What users' code raises is shown with its own frames alone, and logged whole."""

from __future__ import annotations

import asyncio
import logging
import re
from pathlib import Path

import pytest
import torch

from distflow.errors import DistflowError, StepError
from distflow.flow.resolve import resolve
from distflow.runtime.steps import user_code
from distflow.types import Completion
from distflow.workers.reward_judging import judge, reward_function

SOURCE = """
import asyncio, json
import torch
from distflow.data.samples import by_sample

def of_python(given):
    return json.loads("{bad")

def of_ours(given):
    return helper(given)

def helper(given):
    return by_sample(7)

def of_a_library(given):
    return torch.nn.Linear(2, 3)(torch.zeros(5))

async def awaiting(given):
    await asyncio.wait_for(asyncio.sleep(0), 1.0)
    return await later()

async def later():
    return {}["nothing"]

def caused(given):
    try:
        helper(given)
    except TypeError as error:
        raise ValueError("no answer today") from error

def of_lists(prompts, completions, **kwargs):
    return [helper(one) for one in completions]

def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    return of_python(solution_str)
"""
INNERMOST = {
    "of_python": ("of_python", "JSONDecodeError"),
    "of_ours": ("helper", "TypeError"),
    "of_a_library": ("of_a_library", "RuntimeError"),
    "awaiting": ("later", "KeyError"),
    "caused": ("caused", "ValueError"),
}
OF_OTHER_TOOLS = {"of_lists": ("helper", "TypeError"), "compute_score": ("of_python", "JSONDecodeError")}
SAMPLE = Completion("1+1=", "2", {"answer": "2"}, "stop")


@pytest.fixture
def mine(tmp_path: Path) -> Path:
    (tmp_path / "mine.py").write_text(SOURCE)
    return tmp_path / "mine.py"


def shown(text: str) -> list[tuple[str, str]]:
    """Each frame's file and function."""
    return re.findall(r'File "([^"]+)", line \d+, in (.+)', text)


@pytest.mark.parametrize("name", INNERMOST)
def test_a_step_or_source_shows_the_users_frames_alone(mine: Path, name: str) -> None:
    function = resolve(f"{mine}:{name}")
    with pytest.raises(StepError) as caught, user_code("step 'mine'"):
        asyncio.run(function(None)) if name == "awaiting" else function(None)
    innermost, error = INNERMOST[name]
    assert {file for file, _ in shown(str(caught.value))} == {__file__, str(mine)}
    assert shown(str(caught.value))[-1] == (str(mine), innermost)
    assert f"{error}: " in str(caught.value)


@pytest.mark.parametrize("name", {**INNERMOST, **OF_OTHER_TOOLS})
def test_a_reward_shows_the_users_frames_alone(
    mine: Path, name: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All frames, with those of the cause, are in the log: once, however many samples fail."""
    monkeypatch.setattr(logging.getLogger("distflow"), "propagate", True)
    caplog.set_level(logging.INFO, "distflow")
    rewards = reward_function(f"{mine}:{name}")
    told = [judge(rewards, SAMPLE).message for _ in range(3)]
    innermost, error = {**INNERMOST, **OF_OTHER_TOOLS}[name]
    for text in told:
        assert {file for file, _ in shown(text)} == {str(mine)}
        assert shown(text)[-1] == (str(mine), innermost)
        assert f"{error}: " in text
    (logged,) = [record.getMessage() for record in caplog.records if "Traceback" in record.getMessage()]
    assert any(file.endswith("reward_judging.py") for file, _ in shown(logged))
    assert ("direct cause" in logged) == (name == "caused")


def test_importing_a_file_shows_its_frames_alone(mine: Path) -> None:
    mine.write_text(f"{SOURCE}\nof_a_library(None)\n")
    with pytest.raises(DistflowError, match="RuntimeError") as caught:
        resolve(f"{mine}:helper")
    assert [one for one in shown(str(caught.value)) if one[0] != str(mine)] == []
    assert torch.__file__.rpartition("/")[0] not in str(caught.value)
