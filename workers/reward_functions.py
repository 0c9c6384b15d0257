"""Reward functions: those that ship with distflow, and calling one so that every failure becomes a `Verdict`.

Imports no torch. A reward function takes a `Completion` and returns the reward, or a mapping with `reward` (trained
on), `score` (the verifiable one) and further parts by name.
"""

from __future__ import annotations

import functools
import re
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from math import isfinite
from types import ModuleType
from typing import Literal, SupportsFloat

from distflow.errors import UserError
from distflow.flow.resolve import named_function
from distflow.types import Completion

Reward = float | Mapping[str, float]
RewardFunction = Callable[[Completion], Reward]

_TAG = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)
_LEAD = re.compile(r"(?:final answer|answer)\s*(?:is|:|=)\s*(.+)", re.IGNORECASE)


def exact_match(sample: Completion) -> float:
    """1 if the stripped response equals `task["answer"]` and the model ended it itself; else 0."""
    return float(sample.finish_reason == "stop" and sample.response.strip() == str(sample.task["answer"]).strip())


def digits_copied(sample: Completion) -> dict[str, float]:
    """Reward: fraction of correct positions, counting the end of the sequence. Score: 1 if all are correct."""
    answer = str(sample.task["answer"])
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

    Raises UserError if the package is missing.
    """
    package = _package("math_verify", "math-verify", "math")
    expected, given = package.parse(str(sample.task["answer"])), package.parse(sample.response)
    return float(package.verify(expected, given))


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
    "digits_copied": digits_copied,
    "reasoning_gym": reasoning_gym,
    "math": math,
}


Failure = Literal["error", "timeout"]


@dataclass(frozen=True, slots=True)
class Verdict:
    """`values` with at least reward and score, or after a failure its kind and text (the user's frames first)."""

    values: Mapping[str, float]
    failure: Failure | None = None
    message: str = ""


@functools.cache
def reward_function(name: str) -> RewardFunction:
    """The function by its short name or as a plug-in; raises UserError or PluginError."""
    return named_function("function", name, REWARDS)


def judge(function: RewardFunction, sample: Completion) -> Verdict:
    """Call the function; only UserErrors (a missing package) pass through, since every sample would fail with them."""
    try:
        return Verdict(_read(function(sample)))
    except UserError:
        raise
    except (Exception, SystemExit) as error:
        # Without the first frame, which is this one: the user's frames come first.
        frames = traceback.extract_tb(error.__traceback__)[1:]
        text = "".join(traceback.format_list(frames)) + "".join(traceback.format_exception_only(error))
        return Verdict({}, "error", text.rstrip())


def _read(given: object) -> dict[str, float]:
    values = dict(given) if isinstance(given, Mapping) else {"reward": given}
    if "reward" not in values:
        raise TypeError(f"the reward function returned keys {sorted(values)}; expected a number, or a key 'reward'")
    numbers = {str(name): _number(str(name), value) for name, value in values.items()}
    return {"score": numbers["reward"], **numbers}


def _number(name: str, value: object) -> float:
    # numpy and torch scalars are accepted; plain types are tested first because a protocol check is slow.
    if not isinstance(value, (float, int)) and not isinstance(value, SupportsFloat):
        raise TypeError(f"the reward function returned {name} = {value!r}; expected a number")
    number = float(value)
    if not isfinite(number):
        raise ValueError(f"the reward function returned {name} = {number}; expected a finite number")
    return number
