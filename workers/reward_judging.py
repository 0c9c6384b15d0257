"""Calls reward functions, one or a weighted sum of several, so that every failure becomes a `Verdict`.

Imports no torch: child processes start with this.
"""

from __future__ import annotations

import asyncio
import functools
import inspect
import json
import os
import threading
import traceback
from collections.abc import Awaitable, Mapping, Sequence
from dataclasses import dataclass
from math import isfinite
from typing import Any, Literal, SupportsFloat

from distflow.errors import UserError
from distflow.flow.file_import import without_import
from distflow.flow.resolve import named_function
from distflow.types import Completion
from distflow.workers.reward_functions import REWARDS, TIME_LIMITS, Reward, RewardFunction

Failure = Literal["error", "timeout"]


@dataclass(frozen=True, slots=True)
class Verdict:
    """`values` with at least reward and score, or after a failure its kind and text (the user's frames first)."""

    values: Mapping[str, float]
    failure: Failure | None = None
    message: str = ""


@dataclass(frozen=True, slots=True)
class Component:
    """One of several reward functions. `function`: its short name, or a plug-in."""

    name: str
    function: str
    weight: float
    settings: Mapping[str, Any]


def spec_of(function: str | Mapping[str, Any]) -> str:
    """The setting `function` as one text, as child processes get it: a name, or components as JSON."""
    return function if isinstance(function, str) else json.dumps(function)


def shown(spec: str) -> str:
    """A spec for messages: the name of the function, or those of the components."""
    return spec if not spec.startswith("{") else " + ".join(component.name for component in components(spec))


def components(spec: str) -> list[Component]:
    """The functions of a spec; one alone has no name. Raises UserError for what is no weight or function."""
    if not spec.startswith("{"):
        return [Component("", spec, 1.0, {})]
    found = []
    for name, given in json.loads(spec).items():
        settings = {"weight": given} if not isinstance(given, dict) else dict(given)
        function, weight = settings.pop("function", name), settings.pop("weight", 1.0)
        if not isinstance(weight, int | float) or not isfinite(weight) or not isinstance(function, str):
            raise UserError(f"reward component {name!r}: weight {weight!r} or function {function!r} is none")
        found.append(Component(name, function, float(weight), settings))
    if not found:
        raise UserError("function={}: expected at least one reward function by name")
    return found


def time_limit(spec: str) -> float | None:
    """Seconds for a sample where the recipe gives none; None: the functions need no limit."""
    limits = [TIME_LIMITS[one.function] for one in components(spec) if one.function in TIME_LIMITS]
    return sum(limits) if limits else None


@functools.cache
def reward_function(spec: str) -> RewardFunction:
    """The function of a spec; raises UserError or PluginError."""
    parts = components(spec)
    functions = [functools.partial(named_function("function", one.function, REWARDS), **one.settings) for one in parts]
    if not parts[0].name:
        return functions[0].func

    def together(sample: Completion) -> dict[str, float]:
        return _sum(parts, [_read(one.name, call(sample)) for one, call in zip(parts, functions, strict=True)])

    async def side_by_side(sample: Completion) -> dict[str, float]:
        given = [call(sample) for call in functions]
        values = await asyncio.gather(*map(_awaited, given))
        return _sum(parts, [_read(one.name, value) for one, value in zip(parts, values, strict=True)])

    return side_by_side if any(is_async(function.func) for function in functions) else together


def is_async(function: RewardFunction) -> bool:
    """Whether calling it gives something to be awaited."""
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(type(function).__call__)


def judge(function: RewardFunction, sample: Completion) -> Verdict:
    """Call the function; only UserErrors (a missing package) pass through, since every sample would fail with them."""
    return judge_together(function, [sample])[0]


def _judge(function: RewardFunction, sample: Completion) -> Verdict:
    process = os.getpid()
    try:
        return Verdict(_read("", function(sample)))
    except UserError:
        raise
    except (Exception, SystemExit) as error:
        return _failure(error)
    finally:
        _end_copy(process)


def _end_copy(process: int) -> None:
    """End this process if it is a copy that the function has forked: it would go on as a second worker."""
    if os.getpid() != process:
        os._exit(0)


def judge_together(function: RewardFunction, samples: Sequence[Completion]) -> list[Verdict]:
    """The verdicts of a function; an asynchronous one works on all samples at once."""
    if not is_async(function):
        return [_judge(function, sample) for sample in samples]

    async def one(sample: Completion) -> Verdict:
        process = os.getpid()
        try:
            return Verdict(_read("", await _awaited(function(sample))))
        except UserError:
            raise
        except (Exception, SystemExit) as error:
            return _failure(error)
        finally:
            _end_copy(process)

    async def all_of_them() -> list[Verdict]:
        return list(await asyncio.gather(*map(one, samples)))

    return _loop().run(all_of_them())


class _Loops(threading.local):
    """An event loop for each thread, kept from call to call: what a function holds, such as connections, needs it."""

    def __init__(self) -> None:
        self.runner = asyncio.Runner()


_loops = _Loops()


def _loop() -> asyncio.Runner:
    return _loops.runner


async def _awaited(given: Reward | Awaitable[Reward]) -> Reward:
    return await given if inspect.isawaitable(given) else given


def _failure(error: BaseException) -> Verdict:
    # Without the frames of this file: the user's come first.
    found = without_import(traceback.extract_tb(error.__traceback__))
    frames = [frame for frame in found if frame.filename != __file__]
    text = "".join(traceback.format_list(frames)) + "".join(traceback.format_exception_only(error))
    return Verdict({}, "error", text.rstrip())


def _sum(parts: Sequence[Component], values: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """The weighted sum as reward, the first one's score, and what each gave: `NAME`, and `NAME/PART` of its parts."""
    found = {"reward": sum(part.weight * given["reward"] for part, given in zip(parts, values, strict=True))}
    found["score"] = values[0]["score"]
    for part, given in zip(parts, values, strict=True):
        found[part.name] = given["reward"]
        found |= {f"{part.name}/{name}": value for name, value in given.items() if name not in ("reward", "score")}
    return found


def _read(component: str, given: object) -> dict[str, float]:
    of = f" {component!r}" if component else ""
    values = dict(given) if isinstance(given, Mapping) else {"reward": given}
    if "reward" not in values:
        raise TypeError(f"the reward function{of} returned keys {sorted(values)}; expected a number, or a key 'reward'")
    numbers = {str(name): _number(of, str(name), value) for name, value in values.items()}
    return {"score": numbers["reward"], **numbers}


def _number(of: str, name: str, value: object) -> float:
    # numpy and torch scalars are accepted; plain types are tested first because a protocol check is slow.
    if not isinstance(value, (float, int)) and not isinstance(value, SupportsFloat):
        raise TypeError(f"the reward function{of} returned {name} = {value!r}; expected a number")
    number = float(value)
    if not isfinite(number):
        raise ValueError(f"the reward function{of} returned {name} = {number}; expected a finite number")
    return number
