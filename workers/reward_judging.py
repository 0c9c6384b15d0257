"""Calls reward functions, one or a weighted sum of several, so that every failure becomes a `Verdict`.

Imports no torch: child processes start with this.
"""

from __future__ import annotations

import asyncio
import functools
import inspect
import json
import os
import signal
import threading
import traceback
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from math import isfinite
from typing import Any, Literal, Self, SupportsFloat

from distflow.errors import UserError
from distflow.flow.file_import import without_import
from distflow.flow.resolve import named_function
from distflow.types import Completion
from distflow.workers.reward_functions import REWARDS, TIME_LIMITS, Reward, RewardFunction

Failure = Literal["error", "timeout"]
MOST_PARTS, LONGEST_NAME = 200, 100
"""Parts that a function may return for a sample, and characters of a part's name: each becomes a column and metrics."""
LARGEST = 3.4028234663852886e38
"""The largest number of float32, in which rewards are kept."""
LONGEST_TEXT, SHOWN_VALUE, SHOWN_FRAMES = 2000, 200, 10
"""Characters of an error and of a value in a message, and frames from either end of a traceback."""


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
        values = await asyncio.gather(*(_kept(call, sample) for call in functions))
        for value in values:
            if isinstance(value, BaseException):
                raise value
        return _sum(parts, [_read(one.name, value) for one, value in zip(parts, values, strict=True)])

    return side_by_side if any(is_async(function.func) for function in functions) else together


def is_async(function: RewardFunction) -> bool:
    """Whether calling it gives something to be awaited."""
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(type(function).__call__)


def judge(function: RewardFunction, sample: Completion) -> Verdict:
    """Call the function; only UserErrors (a missing package) pass through, since every sample would fail with them."""
    return judge_together(function, [sample])[0]


def judge_together(
    function: RewardFunction, samples: Sequence[Completion], begin: Callable[[], None] = lambda: None
) -> list[Verdict]:
    """The verdicts of a function; an asynchronous one works on all samples at once. `begin` is called before each call.

    Whatever it raises is the failure of its sample: a cancelled request, a KeyboardInterrupt of its own. Raises
    UserError as `judge`, and KeyboardInterrupt on Ctrl-C.
    """
    with _CtrlC() as ctrl_c:
        if is_async(function):
            begin()
            return _judge_side_by_side(function, samples, ctrl_c)
        verdicts = []
        for sample in samples:
            begin()
            verdicts.append(_judge(function, sample, ctrl_c))
        return verdicts


class _CtrlC:
    """Tells a Ctrl-C from a KeyboardInterrupt that a function raises, where a Ctrl-C would raise one."""

    def __init__(self) -> None:
        self._pressed = self._heard = False

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            self._heard = signal.getsignal(signal.SIGINT) is signal.default_int_handler
        if self._heard:
            signal.signal(signal.SIGINT, self._press)
        return self

    def __exit__(self, *error: object) -> None:
        if self._heard and signal.getsignal(signal.SIGINT) == self._press:
            signal.signal(signal.SIGINT, signal.default_int_handler)

    def _press(self, number: int, frame: object) -> None:
        self._pressed = True
        raise KeyboardInterrupt

    def verdict(self, error: BaseException) -> Verdict:
        """The failure of a sample; raises the error again if it is none."""
        if isinstance(error, UserError) or (self._pressed and isinstance(error, KeyboardInterrupt)):
            raise error
        return _failure(error)


def _judge(function: RewardFunction, sample: Completion, ctrl_c: _CtrlC) -> Verdict:
    process = os.getpid()
    try:
        return Verdict(_read("", function(sample)))
    except BaseException as error:
        return ctrl_c.verdict(error)
    finally:
        _end_copy(process)


def _end_copy(process: int) -> None:
    """End this process if it is a copy that the function has forked: it would go on as a second worker."""
    if os.getpid() != process:
        os._exit(0)


def _judge_side_by_side(function: RewardFunction, samples: Sequence[Completion], ctrl_c: _CtrlC) -> list[Verdict]:
    async def one(sample: Completion) -> Verdict:
        process = os.getpid()
        try:
            return Verdict(_read("", await _awaited(function(sample))))
        except BaseException as error:
            return ctrl_c.verdict(error)
        finally:
            _end_copy(process)

    tasks: list[asyncio.Task[Verdict]] = []

    async def all_of_them() -> None:
        tasks.extend(asyncio.create_task(one(sample)) for sample in samples)
        await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)

    # What a sample has when its task was cancelled after its last wait.
    missing = Verdict({}, "error", "the task of this sample was cancelled")
    try:
        _loops.runner.run(all_of_them())
    except BaseException as error:
        # The function has cancelled all tasks, or stopped the loop: what is done counts.
        missing = ctrl_c.verdict(error)
        _loops.runner.get_loop().close()
        _loops.runner = asyncio.Runner()
    done = [task for task in tasks if task.done() and not task.cancelled()]
    for task in done:
        if (refusal := task.exception()) is not None:
            raise refusal
    return [task.result() if task in done else missing for task in tasks]


class _Loops(threading.local):
    """An event loop for each thread, kept from call to call: what a function holds, such as connections, needs it."""

    def __init__(self) -> None:
        self.runner = asyncio.Runner()


_loops = _Loops()


async def _awaited(given: Reward | Awaitable[Reward]) -> Reward:
    return await given if inspect.isawaitable(given) else given


async def _kept(call: RewardFunction, sample: Completion) -> Reward | BaseException:
    """What it gives or raises; a task that raises SystemExit or KeyboardInterrupt would end the loop."""
    try:
        return await _awaited(call(sample))
    except BaseException as error:
        return error


def _failure(error: BaseException) -> Verdict:
    # Without the frames of this file: the user's come first.
    found = without_import(traceback.extract_tb(error.__traceback__))
    frames = traceback.format_list([frame for frame in found if frame.filename != __file__])
    if len(frames) > 2 * SHOWN_FRAMES:
        frames[SHOWN_FRAMES:-SHOWN_FRAMES] = [f"  … {len(frames) - 2 * SHOWN_FRAMES} more …\n"]
    return Verdict({}, "error", "".join(frames) + _described(error))


def _described(error: BaseException) -> str:
    """Its type and text. Of a long text only the beginning is ever copied."""
    with suppress(Exception):
        text = str(error)
        if len(text) > LONGEST_TEXT:
            return f"{type(error).__qualname__}: {shortened(text)}"
    return shortened("".join(traceback.format_exception_only(error)).rstrip())


def shortened(text: str, most: int = LONGEST_TEXT) -> str:
    """Text for messages and logs: its beginning where it is longer than `most`, and what is no text escaped."""
    begin = text if len(text) <= most else f"{text[:most]}… ({len(text)} characters)"
    return begin.encode(errors="backslashreplace").decode()


def _sum(parts: Sequence[Component], values: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """The weighted sum as reward, the first one's score, and what each gave: `NAME`, and `NAME/PART` of its parts."""
    found = {"reward": sum(part.weight * given["reward"] for part, given in zip(parts, values, strict=True))}
    found["score"] = values[0]["score"]
    for part, given in zip(parts, values, strict=True):
        found[part.name] = given["reward"]
        found |= {f"{part.name}/{name}": value for name, value in given.items() if name not in ("reward", "score")}
    return found


def _read(component: str, given: object) -> dict[str, float]:
    of = f"the reward function{f' {component!r}' if component else ''} returned"
    values = given if isinstance(given, Mapping) else {"reward": given}
    if len(values) > MOST_PARTS:
        raise ValueError(f"{of} {len(values)} parts; expected at most {MOST_PARTS}")
    for name in values:
        if not is_name(name):
            raise ValueError(
                f"{of} the key {shortened(ascii(name), SHOWN_VALUE)}; expected a name of at most {LONGEST_NAME} "
                "printable characters, of which / stands only between others"
            )
    if "reward" not in values:
        raise TypeError(f"{of} keys {sorted(values)}; expected a number, or a key 'reward'")
    numbers = {str(name): _number(of, str(name), value) for name, value in values.items()}
    return {"score": numbers["reward"], **numbers}


def is_name(name: object) -> bool:
    """Whether a part of a reward can be called so: columns and metrics are named after it, and shown."""
    if not isinstance(name, str) or len(name) > LONGEST_NAME or not name.isprintable():
        return False
    return all(word == word.strip() and word not in ("", ".", "..") for word in name.split("/"))


def _number(of: str, name: str, value: object) -> float:
    # numpy and torch scalars are accepted; plain types are tested first because a protocol check is slow.
    if not isinstance(value, (float, int)) and not isinstance(value, SupportsFloat):
        raise TypeError(f"{of} {name} = {shortened(repr(value), SHOWN_VALUE)}; expected a number")
    number = float(value)
    if not abs(number) <= LARGEST:
        most = f", of at most {LARGEST:.3g}" if isfinite(number) else ""
        raise ValueError(f"{of} {name} = {number}; expected a finite number{most}")
    return number
