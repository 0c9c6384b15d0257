"""Calls reward functions, one or a weighted sum of several, so that every failure becomes a `Verdict`.

Imports no torch: child processes start with this.
"""

from __future__ import annotations

import asyncio
import functools
import inspect
import json
import signal
import threading
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from math import isfinite
from typing import Any, Literal, Self, SupportsFloat

from distflow.comm.users_code import UsersCode, UsersLoop
from distflow.errors import PluginError, UserError, loop_cure
from distflow.flow.resolve import named_function
from distflow.flow.reward_form import Signature, check_reward, find_signature
from distflow.flow.user_frames import frames_of, log_whole
from distflow.types import Completion
from distflow.workers.reward_calls import (
    NO_STATE,
    Logged,
    TrainerState,
    list_arguments,
    rewards_of,
    score_arguments,
    score_values,
)
from distflow.workers.reward_functions import REWARDS, TIME_LIMITS

Failure = Literal["error", "timeout"]
MOST_PARTS, LONGEST_NAME = 200, 100
"""Parts that a function may return for a sample, and characters of a part's name: each becomes a column and metrics."""
LARGEST = 3.4028234663852886e38
"""The largest number of float32, in which rewards are kept."""
LONGEST_TEXT, SHOWN_VALUE, SHOWN_FRAMES = 2000, 200, 10
"""Characters of an error and of a value in a message, and frames from either end of a traceback."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """`values` with at least reward and score, or after a failure its kind and text (the user's frames first); neither
    where no function judged the sample."""

    values: Mapping[str, float]
    failure: Failure | None = None
    message: str = ""
    logged: Mapping[str, str] = field(default_factory=dict)
    """What functions told of the sample besides, by name, each as JSON text."""
    metrics: Sequence[tuple[str, float]] = ()
    """What they told of the call, at its first sample."""

    @property
    def unjudged(self) -> bool:
        """Tell whether no function judged the sample."""
        return self.failure is None and not self.values


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


@dataclass(frozen=True, slots=True)
class JudgingPart:
    """One component, ready to be called."""

    name: str
    weight: float
    call: Callable[..., object]
    signature: Signature | None
    """Of a function of TRL's or verl's form; None for one that gets a sample."""
    awaited: bool

    @property
    def lists(self) -> bool:
        """It judges several samples by one call."""
        return self.signature is not None and self.signature.form == "lists"


@dataclass(frozen=True, slots=True)
class Rewards:
    """The functions of a spec."""

    parts: tuple[JudgingPart, ...]


def takes_lists(spec: str) -> bool:
    """Whether a function of the spec judges all samples of a group by one call; False for what cannot be found."""
    calls = [one.function for one in components(spec) if one.function not in REWARDS and ":" in one.function]
    try:
        signatures = [find_signature(call) for call in calls]
    except PluginError:
        return False  # whoever loads it says so
    # It is imported here only where its source does not tell.
    known = any(found is not None and found.form == "lists" for found in signatures)
    return known or (None in signatures and any(part.lists for part in reward_function(spec).parts))


@functools.cache
def reward_function(spec: str) -> Rewards:
    """The functions of a spec; raises UserError or PluginError."""
    return Rewards(tuple(_part(one) for one in components(spec)))


def _part(one: Component) -> JudgingPart:
    function = named_function("function", one.function, REWARDS)
    found = None if one.function in REWARDS else check_reward(one.function, function, one.settings)
    call = functools.partial(function, **one.settings) if one.settings else function
    keyword = None if found is None or found.form == "sample" else found
    return JudgingPart(one.name, one.weight, call, keyword, is_async(function))


def is_async(function: Callable[..., object]) -> bool:
    """Whether calling it gives something to be awaited."""
    while isinstance(function, functools.partial):
        function = function.func
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(type(function).__call__)


def judge(rewards: Rewards, sample: Completion) -> Verdict:
    """Call the function; only UserErrors (a missing package) pass through, since every sample would fail with them."""
    return judge_together(rewards, [sample])[0]


def judge_together(
    rewards: Rewards,
    samples: Sequence[Completion],
    begin: Callable[[], None] = lambda: None,
    state: TrainerState = NO_STATE,
) -> list[Verdict]:
    """The verdicts on samples; asynchronous functions work on all of them at once. `begin` is called before each call.

    Whatever a function raises is the failure of its sample, or of all samples if it judges them by one call: a
    cancelled request, a KeyboardInterrupt of its own. Raises UserError as `judge`, and KeyboardInterrupt on Ctrl-C.
    """
    jobs = list(_jobs(rewards, samples, state))
    found: dict[tuple[int, int], Verdict] = {}
    """By the numbers of the sample and of the component."""
    with _CtrlC() as ctrl_c:
        if jobs and any(part.awaited for part in rewards.parts):
            begin()
            for job, verdicts in zip(jobs, _judge_side_by_side(jobs, ctrl_c), strict=True):
                found |= job.numbered(verdicts)
        else:
            failed: set[int] = set()
            for job in jobs:
                if failed.issuperset(job.rows):
                    continue  # an earlier component has failed on it
                begin()
                verdicts = _judge(job, ctrl_c)
                found |= job.numbered(verdicts)
                failed |= {row for row, verdict in zip(job.rows, verdicts, strict=True) if verdict.failure is not None}
    return [
        _sum(rewards.parts, [found[row, part] for part in range(len(rewards.parts)) if (row, part) in found])
        for row in range(len(samples))
    ]


@dataclass(frozen=True, slots=True)
class _Job:
    """One call of one function."""

    part: int
    rows: Sequence[int]
    """The samples that it judges."""
    call: Callable[[], object]
    read: Callable[[object], list[Verdict]]

    def numbered(self, verdicts: Sequence[Verdict]) -> dict[tuple[int, int], Verdict]:
        """The verdicts by sample and component."""
        return {(row, self.part): verdict for row, verdict in zip(self.rows, verdicts, strict=True)}


def _jobs(rewards: Rewards, samples: Sequence[Completion], state: TrainerState) -> Iterator[_Job]:
    """Yield all calls: those for all samples first, then sample by sample."""
    for number, part in enumerate(rewards.parts):
        if part.lists and samples:
            yield _list_job(number, part, samples, state)
    for row, sample in enumerate(samples):
        for number, part in enumerate(rewards.parts):
            if not part.lists:
                yield _sample_job(number, part, row, sample)


def _list_job(number: int, part: JudgingPart, samples: Sequence[Completion], state: TrainerState) -> _Job:
    signature, logged = part.signature, Logged(len(samples))
    assert signature is not None, "one that takes lists has a signature"

    def read(given: object) -> list[Verdict]:
        values = rewards_of(given, len(samples))
        metrics = tuple(logged.metrics)
        return [
            replace(
                Verdict({}) if value is None else _listed(part.name, value),
                logged=logged.of(row),
                metrics=() if row else metrics,
            )
            for row, value in enumerate(values)
        ]

    def call() -> object:
        return part.call(**list_arguments(signature, samples, logged, state))

    return _Job(number, range(len(samples)), call, read)


def _listed(name: str, value: object) -> Verdict:
    """The verdict on one of the samples in a list: what is no number is the failure of this sample alone."""
    try:
        return Verdict(_read(name, value))
    except (TypeError, ValueError) as error:
        return _failure(error)


def _sample_job(number: int, part: JudgingPart, row: int, sample: Completion) -> _Job:
    signature = part.signature
    if signature is None:
        return _Job(number, (row,), lambda: part.call(sample), lambda given: [Verdict(_read(part.name, given))])

    def read(given: object) -> list[Verdict]:
        values, texts = score_values(given)
        return [Verdict(_read(part.name, values), logged=texts)]

    return _Job(number, (row,), lambda: part.call(**score_arguments(signature, sample)), read)


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


def _judge(job: _Job, ctrl_c: _CtrlC) -> list[Verdict]:
    try:
        with UsersCode():
            return job.read(job.call())
    except BaseException as error:
        return [ctrl_c.verdict(error)] * len(job.rows)


def _judge_side_by_side(jobs: Sequence[_Job], ctrl_c: _CtrlC) -> list[list[Verdict]]:
    async def one(job: _Job) -> list[Verdict]:
        try:
            with UsersCode():
                return job.read(await _awaited(job.call()))
        except BaseException as error:
            return [ctrl_c.verdict(error)] * len(job.rows)

    tasks: list[asyncio.Task[list[Verdict]]] = []

    async def all_of_them() -> None:
        tasks.extend(asyncio.create_task(one(job)) for job in jobs)
        await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)

    # What a sample has when its task was cancelled after its last wait.
    missing = Verdict({}, "error", "the task of this sample was cancelled")
    try:
        _loops.runner.run(all_of_them())
    except BaseException as error:
        # What is left must not go on within the next call: after a Ctrl-C the loop is kept.
        for task in tasks:
            task.cancel()
        # The function has cancelled all tasks, or stopped the loop: what is done counts.
        missing = ctrl_c.verdict(error)
        _loops.runner.get_loop().close()
        _loops.runner = asyncio.Runner(loop_factory=UsersLoop)
    done = {task for task in tasks if task.done() and not task.cancelled()}
    for task in done:
        if (refusal := task.exception()) is not None:
            raise refusal
    return [task.result() if task in done else [missing] * len(job.rows) for task, job in zip(tasks, jobs, strict=True)]


class _Loops(threading.local):
    """An event loop for each thread, kept from call to call: what a function holds, such as connections, needs it."""

    def __init__(self) -> None:
        self.runner = asyncio.Runner(loop_factory=UsersLoop)


_loops = _Loops()


async def _awaited(given: object) -> object:
    return await given if inspect.isawaitable(given) else given


def _failure(error: BaseException) -> Verdict:
    if isinstance(error, Exception):  # a coroutine that is closed while Python parses something must not parse
        log_whole(error)
    frames = traceback.format_list(frames_of(error))
    if len(frames) > 2 * SHOWN_FRAMES:
        frames[SHOWN_FRAMES:-SHOWN_FRAMES] = [f"  … {len(frames) - 2 * SHOWN_FRAMES} more …\n"]
    cure = loop_cure(error)
    return Verdict({}, "error", "".join(frames) + _described(error) + (f" — {cure}" if cure else ""))


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


def _sum(parts: Sequence[JudgingPart], verdicts: Sequence[Verdict]) -> Verdict:
    """The verdict of all components: the weighted sum as reward, the score of the first that judged the sample, and
    what each gave: `NAME`, and `NAME/PART` of its parts. The first failure is that of the sample."""
    failed = next((verdict for verdict in verdicts if verdict.failure is not None), None)
    if failed is not None:
        return failed
    logged = {name: text for verdict in verdicts for name, text in verdict.logged.items()}
    metrics = tuple(metric for verdict in verdicts for metric in verdict.metrics)
    if not parts[0].name:
        return verdicts[0]
    judged = [(part, verdict.values) for part, verdict in zip(parts, verdicts, strict=True) if verdict.values]
    if not judged:
        return Verdict({}, logged=logged, metrics=metrics)
    found = {"reward": sum(part.weight * given["reward"] for part, given in judged), "score": judged[0][1]["score"]}
    for part, given in judged:
        found[part.name] = given["reward"]
        found |= {f"{part.name}/{name}": value for name, value in given.items() if name not in ("reward", "score")}
    return Verdict(found, logged=logged, metrics=metrics)


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
