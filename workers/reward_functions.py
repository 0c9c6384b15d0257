"""The reward functions that ship with distflow. Imports no torch.

A reward function takes a `Completion` and returns the reward, or a mapping with `reward` (trained on), `score` (the
verifiable one) and further parts by name. Its keyword-only parameters are settings.
"""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable, Mapping
from functools import cache
from importlib import import_module
from types import ModuleType

from distflow.data.answers_in_text import find_answer
from distflow.data.gold import ANSWER, GoldAnswer, as_written, gives, gold_answers, needs
from distflow.errors import UserError
from distflow.types import Completion
from distflow.workers.final_answers import is_answer

Reward = float | Mapping[str, float]
RewardFunction = Callable[..., Reward | Awaitable[Reward]]


@needs("answer")
def exact_match(sample: Completion) -> float:
    """1 if the stripped response is a gold answer (see `distflow.data.gold`) and the model ended it itself; else 0."""
    answers = _answers(sample)
    return float(sample.finish_reason == "stop" and any(gives(sample.response, answer) for answer in answers))


@needs("answer")
def regex(sample: Completion, *, pattern: str, ignore: str = "") -> float:
    """1 if the last match of `pattern` in the response is a gold answer, else 0.

    The first group of the pattern counts, or the whole match if it has none. Characters in `ignore`, such as `,$`, are
    removed from both.
    """
    found = re.findall(_compiled(pattern), sample.response)
    given = found[-1] if found else None
    first = given[0] if isinstance(given, tuple) else given
    answers = _answers(sample)
    return float(first is not None and any(gives(first, answer, ignore) for answer in answers))


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


@needs("answer")
def digits_copied(sample: Completion) -> dict[str, float]:
    """Reward: fraction of correct positions, counting the end of the sequence. Score: 1 if all are correct.

    Of several gold answers, the one that gets the most.
    """
    found = [_copied(sample, as_written(answer)) for answer in _answers(sample)]
    return max(found, key=lambda values: values["reward"])


def _copied(sample: Completion, answer: str) -> dict[str, float]:
    right = sum(given == wanted for given, wanted in zip(sample.response, answer, strict=False))
    right += sample.finish_reason == "stop" and len(sample.response) == len(answer)
    exact = sample.finish_reason == "stop" and sample.response == answer
    return {"reward": right / (len(answer) + 1), "score": float(exact)}


@needs("dataset", "entry")
def reasoning_gym(sample: Completion) -> float:
    """The data set's own `score_answer` (0 to 1) for the answer found in the response, as `find_answer` has it.

    For prompts of `distflow.data.sources:reasoning_gym`. Raises UserError if the package is missing.
    """
    package = _package("reasoning_gym", "reasoning-gym", "reasoning_gym")
    score = package.get_score_answer_fn(sample.task["dataset"])
    return float(score(find_answer(sample.response), sample.task["entry"]))


@needs("answer")
def math(sample: Completion) -> float:
    """1 if the response's final answer, outside its thinking, is a gold answer, by math-verify or as text; else 0.

    The answer is what stands in <answer>…</answer>, in there in \\boxed{…} or behind ####, or else what math-verify
    finds; a response that was cut off must say which its answer is. It may take forever on some responses, so it always
    runs in processes that can be killed. Raises UserError if the package is missing.
    """
    package = _package("math_verify", "math-verify", "math")
    given, cut_off = sample.response, sample.finish_reason != "stop"
    return float(any(is_answer(given, as_written(gold), package, cut_off=cut_off) for gold in _answers(sample)))


def _answers(sample: Completion) -> tuple[GoldAnswer, ...]:
    """The gold answers of a sample's task; raises ValueError if there is none."""
    answers = gold_answers(sample.task)
    if not answers:
        there = ", ".join(sample.task) or "nothing"
        missing = "gold answer (`answer` is null or blank)" if ANSWER in sample.task else "'answer'"
        raise ValueError(f"the task has no {missing}, only {there}: data.fields.answer=COLUMN says which column it is")
    return answers


@cache
def _compiled(pattern: str) -> re.Pattern[str]:
    try:
        return re.compile(pattern, re.DOTALL)
    except re.error as error:
        raise UserError(f"pattern {pattern!r} is no regular expression: {error}") from error


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
