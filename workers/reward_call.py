"""The edge of a user's reward function: calls it, and turns whatever happens into a `Verdict`. Imports no torch."""

from __future__ import annotations

import math
import traceback
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, SupportsFloat

from distflow.errors import UserError
from distflow.types import Completion
from distflow.workers.named_functions import named_function
from distflow.workers.reward_functions import REWARDS, RewardFunction

Failure = Literal["error", "timeout"]


@dataclass(frozen=True, slots=True)
class Verdict:
    """`values` with at least reward and score, or, after a failure, its kind and text (the user's frames first)."""

    values: Mapping[str, float]
    failure: Failure | None = None
    message: str = ""


def reward_function(name: str) -> RewardFunction:
    """By short name or as a plug-in; raises UserError or PluginError."""
    return named_function("function", name, REWARDS)


def judge(function: RewardFunction, sample: Completion) -> Verdict:
    """Call the function; only UserErrors (a missing package) pass through, as every other sample would fail too."""
    try:
        return Verdict(_read(function(sample)))
    except UserError:
        raise
    except (Exception, SystemExit) as error:
        # The first frame is this one: the user's stand on top.
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
    # numpy and torch scalars are welcome; the plain types come first because a protocol check is slow.
    if not isinstance(value, (float, int)) and not isinstance(value, SupportsFloat):
        raise TypeError(f"the reward function returned {name} = {value!r}; expected a number")
    number = float(value)
    if not math.isfinite(number):
        raise ValueError(f"the reward function returned {name} = {number}; expected a finite number")
    return number
