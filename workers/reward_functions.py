"""The reward functions that ship with distflow. Imports no torch.

A reward function takes a `Completion` and returns the reward, or a mapping with `reward` (trained on), `score` (the
verifiable one) and further parts by name. Its keyword-only parameters are settings.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Awaitable, Callable, Mapping
from functools import cache, lru_cache
from importlib import import_module
from types import ModuleType
from typing import Any

from distflow.errors import UserError
from distflow.types import Completion

Reward = float | Mapping[str, float]
RewardFunction = Callable[..., Reward | Awaitable[Reward]]

_IN_TEXT = re.compile(r"\\boxed|####|[$\n]")
"""Signs of an answer that stands within a text."""
_TAG = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)
_LEAD = re.compile(r"(?:final answer|answer)\s*(?:is|:|=)\s*(.+)", re.IGNORECASE)


def exact_match(sample: Completion) -> float:
    """1 if the stripped response equals `task["answer"]` and the model ended it itself; else 0."""
    return float(sample.finish_reason == "stop" and sample.response.strip() == str(_answer(sample)).strip())


def regex(sample: Completion, *, pattern: str, ignore: str = "") -> float:
    """1 if the last match of `pattern` in the response equals `task["answer"]`, else 0.

    The first group of the pattern counts, or the whole match if it has none. Characters in `ignore`, such as `,$`, are
    removed from both.
    """
    found = re.findall(_compiled(pattern), sample.response)
    given = found[-1] if found else None
    first = given[0] if isinstance(given, tuple) else given
    return float(first is not None and _without(first, ignore) == _without(str(_answer(sample)), ignore))


def format(sample: Completion, *, pattern: str = r"<think>.*?</think>\s*<answer>.*?</answer>") -> float:
    """1 if the whole response, stripped, matches `pattern` (a dot matches line ends too), else 0."""
    return float(re.fullmatch(_compiled(pattern), sample.response.strip()) is not None)


def length_penalty(sample: Completion, *, max_tokens: int, buffer: int) -> float:
    """Soft overlong punishment (DAPO, arXiv 2503.14476, equation 13), from 0 to -1, by tokens of the response.

    0 up to `max_tokens` - `buffer`; from there on linear down to -1 at `max_tokens`. As in flow dapo, the token that
    ends a response does not count. Raises UserError unless 0 < buffer <= max_tokens.
    """
    if not 0 < buffer <= max_tokens:
        raise UserError(f"length_penalty: buffer={buffer}, max_tokens={max_tokens}: expected 0 < buffer <= max_tokens")
    tokens = len(sample.response_ids) - (sample.finish_reason == "stop")
    over = tokens - (max_tokens - buffer)
    return -min(1.0, max(0.0, over / buffer))


def digits_copied(sample: Completion) -> dict[str, float]:
    """Reward: fraction of correct positions, counting the end of the sequence. Score: 1 if all are correct."""
    answer = str(_answer(sample))
    right = sum(given == wanted for given, wanted in zip(sample.response, answer, strict=False))
    right += sample.finish_reason == "stop" and len(sample.response) == len(answer)
    exact = sample.finish_reason == "stop" and sample.response == answer
    return {"reward": right / (len(answer) + 1), "score": float(exact)}


def reasoning_gym(sample: Completion) -> float:
    """The data set's own `score_answer` (0 to 1) for the answer found in the response.

    The answer is, in this order of preference: the last <answer>…</answer>, the last \\boxed{…}, what follows the last
    "answer is" or "answer:" on its line, the last non-empty line. For prompts of
    `distflow.data.sources:reasoning_gym`. Raises UserError if the package is missing.
    """
    package = _package("reasoning_gym", "reasoning-gym", "reasoning_gym")
    score = package.get_score_answer_fn(sample.task["dataset"])
    return float(score(find_answer(sample.response), sample.task["entry"]))


def math(sample: Completion) -> float:
    """1 if math-verify finds the response's final answer equal to `task["answer"]`, else 0.

    It may take forever on some responses, so it always runs in processes that can be killed. Raises UserError if the
    package is missing.
    """
    package = _package("math_verify", "math-verify", "math")
    expected = _expected(str(_answer(sample)))
    # Its own time limit is an alarm signal, which works in main threads alone.
    given = package.parse(sample.response, parsing_timeout=None)
    return float(package.verify(expected, given, timeout_seconds=None))


@lru_cache(maxsize=1024)
def _expected(answer: str) -> Any:
    package = _package("math_verify", "math-verify", "math")
    logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns that we limit its time ourselves
    # An answer alone is read as a whole: in a text, only the first number of 3√2 or of (3, π/2) would be found.
    alone = None if _IN_TEXT.search(answer) else package.parse(f"\\boxed{{{answer}}}", parsing_timeout=None)
    return alone or package.parse(answer, parsing_timeout=None)


def _answer(sample: Completion) -> Any:
    if "answer" not in sample.task:
        there = ", ".join(sample.task) or "nothing"
        raise ValueError(f"the task has no 'answer', only {there}: data.fields.answer=COLUMN says which column it is")
    return sample.task["answer"]


@cache
def _compiled(pattern: str) -> re.Pattern[str]:
    try:
        return re.compile(pattern, re.DOTALL)
    except re.error as error:
        raise UserError(f"pattern {pattern!r} is no regular expression: {error}") from error


def _without(text: str, characters: str) -> str:
    return text.translate(str.maketrans("", "", characters)).strip()


def find_answer(response: str) -> str:
    """The final answer in a response; see `reasoning_gym`."""
    tagged = _TAG.findall(response)
    if tagged:
        return str(tagged[-1]).strip()
    boxed = _last_boxed(response)
    if boxed is not None:
        return boxed
    led = _LEAD.findall(response)
    if led:
        return str(led[-1]).strip().rstrip(".").strip("*$ ")
    lines = [line.strip() for line in response.splitlines() if line.strip()]
    return lines[-1] if lines else ""


def _last_boxed(response: str) -> str | None:
    _, found, rest = response.rpartition("\\boxed{")
    if not found:
        return None
    depth = 1
    for place, char in enumerate(rest):
        depth += (char == "{") - (char == "}")
        if depth == 0:
            return rest[:place].strip()
    return None


@cache
def _package(module: str, distribution: str, function: str) -> ModuleType:
    try:
        return import_module(module)
    except ImportError as error:
        raise UserError(
            f"reward function {function!r} needs the package {distribution}, which is not installed: "
            f"pip install {distribution}"
        ) from error


REWARDS: dict[str, RewardFunction] = {
    "exact_match": exact_match,
    "regex": regex,
    "format": format,
    "length_penalty": length_penalty,
    "digits_copied": digits_copied,
    "reasoning_gym": reasoning_gym,
    "math": math,
}
TIME_LIMITS: Mapping[str, float] = {"math": 10.0}
"""Seconds for a sample where no `timeout_s` is given, of functions that may hang."""
