"""Whatever a reward function raises or returns costs its own sample, in this process and in children."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from distflow.types import Completion
from distflow.workers.reward import _Judge
from distflow.workers.reward_judging import (
    LONGEST_NAME,
    LONGEST_TEXT,
    MOST_PARTS,
    JudgingPart,
    Rewards,
    Verdict,
    is_name,
    judge,
    judge_together,
    reward_function,
    spec_of,
)
from distflow.workers.reward_pool import RewardPool

PLUGINS = """
import asyncio, os, signal, sys, time

class Mine(BaseException):
    pass

RAISED = {"ctrl-c": KeyboardInterrupt, "generator": GeneratorExit, "cancelled": asyncio.CancelledError, "mine": Mine}

def raises(sample):
    return helper(sample.response)

def helper(word):
    if word in RAISED:
        raise RAISED[word]("no reward")
    if word == "signal":
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(10)
    if word == "long error":
        raise ValueError("z" * 20_000_000 + "\\ud800")
    if word == "long value":
        return "z" * 20_000_000
    if word == "no text":
        raise ValueError("bad \\ud800")
    if word == "deep":
        return deep(1)
    if word == "close":
        for descriptor in (0, 1, 2):
            os.close(descriptor)
    if word == "close stdin":
        sys.stdin.close()
    return 1.0

def deep(n):
    return deeper(n)

def deeper(n):
    return deep(n)

async def waits(sample):
    await asyncio.sleep(0.01)
    if sample.response == "cancel itself":
        asyncio.current_task().cancel()
    if sample.response == "stop":
        asyncio.get_running_loop().stop()
        await asyncio.sleep(0.01)
    return helper(sample.response)
"""
WORDS = ("ctrl-c", "generator", "cancelled", "mine")


@pytest.fixture
def plugins(tmp_path: Path) -> str:
    path = tmp_path / "rewards.py"
    path.write_text(PLUGINS)
    return str(path)


def _completion(response: str) -> Completion:
    return Completion("407=", response, {}, "stop", (1,))


@pytest.fixture(params=["raises", "waits", "two"])
def together(plugins: str, request: pytest.FixtureRequest) -> str:
    """Specs of a function, of an asynchronous one, and of one with another beside it."""
    if request.param != "two":
        return f"{plugins}:{request.param}"
    return spec_of({"one": {"function": f"{plugins}:waits"}, "other": {"function": f"{plugins}:raises"}})


@pytest.mark.parametrize("word", WORDS)
def test_what_is_no_exception_costs_one_sample_with_the_users_frames(together: str, word: str) -> None:
    verdicts = judge_together(reward_function(together), [_completion(text) for text in ("1", word, "2")])
    assert [verdict.failure for verdict in verdicts] == [None, "error", None]
    message = verdicts[1].message
    assert "in helper" in message
    assert message.endswith("no reward")


def test_a_real_ctrl_c_ends_the_judging(together: str) -> None:
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    with pytest.raises(KeyboardInterrupt):
        judge_together(reward_function(together), [_completion(text) for text in ("1", "signal", "2")])
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_a_function_that_cancels_its_task_or_stops_the_loop_can_be_called_again(plugins: str) -> None:
    function = reward_function(f"{plugins}:waits")
    for word in ("cancel itself", "stop"):
        verdicts = judge_together(function, [_completion("1"), _completion(word)])
        assert verdicts[1].failure == "error"
        assert judge(function, _completion("1")).failure is None


@pytest.fixture
def pool(plugins: str) -> Iterator[RewardPool]:
    pool = RewardPool(f"{plugins}:raises", 1, 20.0)
    yield pool
    pool.close()


def _judged(pool: RewardPool, *words: str) -> list[Verdict]:
    found = sorted((one for some in pool.judge(map(_completion, words)) for one in some), key=lambda one: one[0])
    return [verdict for _, verdict in found]


def test_children_report_the_same(pool: RewardPool) -> None:
    verdicts = _judged(pool, *WORDS)
    assert [verdict.failure for verdict in verdicts] == ["error"] * len(WORDS)
    assert all("in helper" in verdict.message and verdict.message.endswith("no reward") for verdict in verdicts)


def test_long_and_unprintable_errors_are_cut_before_they_are_sent(pool: RewardPool) -> None:
    began = time.monotonic()
    error, value, no_text, deep = _judged(pool, "long error", "long value", "no text", "deep")
    assert time.monotonic() - began < 15.0
    assert {error.failure, value.failure} == {"error"}
    assert "in helper" in error.message
    assert error.message.endswith("z… (20000001 characters)")
    assert value.message.endswith("zzz… (20000002 characters); expected a number")
    assert no_text.message.endswith("ValueError: bad \\ud800")
    assert "RecursionError" in deep.message
    assert " more …" in deep.message
    assert max(len(verdict.message) for verdict in (error, value, deep)) < 3 * LONGEST_TEXT


@pytest.mark.parametrize("word", ["close", "close stdin"])
def test_closing_the_standard_streams_costs_no_sample(pool: RewardPool, word: str) -> None:
    """Not even the next one, which the same child judges."""
    assert [verdict.failure for verdict in _judged(pool, "1", word, "2", "3")] == [None] * 4


def _giving(values: dict[Any, float]) -> Rewards:
    """A function that returns these parts besides a reward."""
    return Rewards((JudgingPart("", 1.0, lambda sample: {"reward": 1.0, **values}, None, awaited=False),))


@pytest.mark.parametrize("name", ["a", "Länge", "format/has tags", "x" * LONGEST_NAME])
def test_names_of_parts(name: str) -> None:
    verdict = judge(_giving({name: 2.0}), _completion(""))
    assert verdict.values == {"score": 1.0, "reward": 1.0, name: 2.0}


@pytest.mark.parametrize(
    "name",
    ["", " a", "a\nb", "a\0", "\ud800", "../up", "a/../b", "a//b", "/a", "a/", ".", "x" * (LONGEST_NAME + 1), 5, None],
)
def test_what_cannot_name_a_part_is_the_error_of_its_sample(name: object) -> None:
    assert not is_name(name)
    verdict = judge(_giving({name: 2.0}), _completion(""))
    assert verdict.failure == "error"
    assert "returned the key" in verdict.message
    assert verdict.message.isprintable()


def test_parts_are_limited_for_a_sample_and_for_a_run() -> None:
    many = {f"k{number}": 1.0 for number in range(100_000)}
    message = judge(_giving(many), _completion("")).message
    assert message.endswith(f"the reward function returned 100001 parts; expected at most {MOST_PARTS}")
    judging = _Judge(lambda samples, state: iter(()))
    found = judging.checked([(row, Verdict({"reward": 1.0, "score": 1.0, f"k{row}": 2.0})) for row in range(300)])
    assert [verdict.failure for _, verdict in found] == [None] * MOST_PARTS + ["error"] * (300 - MOST_PARTS)
    assert f"returned the further part 'k{MOST_PARTS}': it has returned {MOST_PARTS} others" in found[-100][1].message
    assert judging.checked([(0, Verdict({"reward": 1.0, "score": 1.0, "k0": 2.0}))])[0][1].failure is None
