"""Trackers of a run: what they are told (`TrackedRun`, `Tracker`), and which ones a recipe asks for (`run.trackers`).

A tracker runs in a process of its own, which reads the files of the run: see docs/trackers.md. Imports no torch.
"""

from __future__ import annotations

import ast
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from distflow.config.check import quoted
from distflow.config.plugins import TRACKERS, full_name
from distflow.config.schema import RunConfig
from distflow.errors import PluginError, Problems, did_you_mean
from distflow.flow.resolve import find_source
from distflow.flow.step_declaration import Parameters, read_parameters

SAMPLES, TIMEOUT_S = 8, 60.0
FOLDER = "trackers"
"""Of a run folder: a folder for each tracker."""
OWN_OPTIONS: Mapping[str, tuple[str, ...]] = {
    TRACKERS["tensorboard"]: ("logdir",),
    TRACKERS["prometheus"]: ("port", "host"),
}
"""Of trackers that pass nothing on to a library."""
_MOST_PORT = (1 << 16) - 1
KEYS = ("call", "samples", "timeout_s")
"""Options of every tracker; all others are its own."""


@dataclass(frozen=True, slots=True)
class TrackedRun:
    """The run that a tracker is to show."""

    name: str
    id: str
    """The same when the run goes on, after a restart or a resume; unlike that of every other run."""
    recipe: Mapping[str, Any]
    """The resolved recipe."""
    folder: Path
    """Where the tracker may write: kept with the run."""
    notes: dict[str, str]
    """For the tracker's own use. Kept: it finds there what it wrote before the run was resumed."""


class Tracker(Protocol):
    """Shows a run. Made by `call(run, **options)`; one thread calls it, in a process of its own.

    It may raise, hang or end its process: that costs the rows of that call, and never anything else.
    """

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """The metrics of one training step (from 1), or of validation after it (0: before the first one).

        Steps of training come in order and once each; validation may come later than its step.
        """

    def samples(self, step: int, rows: Sequence[Mapping[str, Any]]) -> None:
        """Some samples that a training step was trained on, with the same keys each."""

    def close(self) -> None:
        """The run is over, or is being stopped: write what is left."""


@dataclass(frozen=True, slots=True)
class TrackerPlan:
    """One tracker of a recipe."""

    name: str
    call: str
    samples: int
    """Samples shown of a training step; 0: none."""
    timeout_s: float
    """A call that takes longer hangs."""
    options: Mapping[str, Any]


def trackers_of(run: RunConfig) -> tuple[TrackerPlan, ...]:
    """The trackers of a recipe that has been checked."""
    return tuple(_plan(name, given) for name, given in run.trackers.items() if given is not False)


def check_trackers(run: RunConfig, problems: Problems) -> None:
    """Report trackers that nobody knows, and options that they cannot take."""
    for name, given in run.trackers.items():
        options = given if isinstance(given, dict) else {}
        at = f"run.trackers.{name}"
        if not name.replace("_", "").replace("-", "").isalnum():
            problems.add(at, f"{name!r} is no name", "letters, digits, '_' and '-'")
        elif given is not False and _sound(at, options, problems):
            _check_call(at, _plan(name, given), problems)


def _plan(name: str, given: Mapping[str, Any] | bool) -> TrackerPlan:
    options = given if isinstance(given, Mapping) else {}
    return TrackerPlan(
        name=name,
        call=TRACKERS.get(options.get("call", name), options.get("call", name)),
        samples=options.get("samples", SAMPLES),
        timeout_s=float(options.get("timeout_s", TIMEOUT_S)),
        options={key: value for key, value in options.items() if key not in KEYS},
    )


def _sound(at: str, options: Mapping[str, Any], problems: Problems) -> bool:
    """Whether the options of every tracker are what they have to be."""
    samples, timeout_s, call = options.get("samples", SAMPLES), options.get("timeout_s", TIMEOUT_S), options.get("call")
    before = len(problems)
    if type(samples) is not int or samples < 0:
        problems.add(f"{at}.samples", f"expected a whole number of samples, got {samples!r}", "0 shows none")
    if type(timeout_s) not in (int, float) or not 0 < timeout_s <= 1e9:
        problems.add(f"{at}.timeout_s", f"expected seconds above 0, got {timeout_s!r}", f"{TIMEOUT_S:g} is the default")
    if call is not None and not isinstance(call, str):
        problems.add(f"{at}.call", f"expected text, got {call!r}", "a class as module:name or ./file.py:name")
    return len(problems) == before


def _check_call(at: str, plan: TrackerPlan, problems: Problems) -> None:
    try:
        call = full_name(plan.call, TRACKERS)
    except LookupError as error:
        problems.add(at, f"there is no tracker {plan.call!r}", f"{error}, under `call`")
        return
    own: Sequence[str] | None = OWN_OPTIONS.get(call)
    if own is None and call not in TRACKERS.values():
        try:
            own = _options_of(call)
        except PluginError as error:
            problems.add(f"{at}.call", str(error))
            return
    if call in OWN_OPTIONS:
        _check_own(at, plan.options, problems)
    for option in plan.options:
        if own is not None and option not in own:
            problems.add(f"{at}.{option}", f"{plan.name} has no such option", did_you_mean(option, (*KEYS, *own)))


def _check_own(at: str, options: Mapping[str, Any], problems: Problems) -> None:
    """What the options of `OWN_OPTIONS` have to be."""
    port = options.get("port", 0)
    if type(port) is not int or not 0 <= port <= _MOST_PORT:
        hint = f"0 (one that is free) to {_MOST_PORT}, or leave it out"
        problems.add(f"{at}.port", f"expected a port, got {quoted(port)}", hint)
    for name in ("logdir", "host"):
        if not isinstance(options.get(name, ""), str):
            problems.add(f"{at}.{name}", f"expected text, got {quoted(options[name])}", "write text, or leave it out")


def _options_of(call: str) -> Sequence[str] | None:
    """What a user's tracker takes besides the run; None: anything. Raises PluginError if it cannot be called so."""
    source = find_source(call)
    missing = _missing(source.node)
    if missing:
        raise PluginError(
            f"{source.where}: {source.node.name!r} has no {', no '.join(missing)} — a tracker has log(step, values), "
            "samples(step, rows) and close()"
        )
    parameters = _parameters(source.node)
    own = None if parameters is None else [*parameters.positional, *parameters.settings]
    if own is not None and own[:1] == ["self"]:
        own = own[1:]
    if own is not None and not own:
        raise PluginError(f"{source.where}: {source.node.name!r} takes no run — expected (run, *, option=default, …)")
    return None if own is None or (parameters is not None and parameters.open_ended) else own[1:]


def _missing(node: ast.AST) -> list[str]:
    """The methods that a tracker's class lacks; what it inherits is not known here."""
    if not isinstance(node, ast.ClassDef) or node.bases:
        return []
    there = {one.name for one in node.body if isinstance(one, ast.FunctionDef)}
    return [name for name in ("log", "samples", "close") if name not in there]


def _parameters(node: ast.AST) -> Parameters | None:
    if isinstance(node, ast.ClassDef):
        inits = [one for one in node.body if isinstance(one, ast.FunctionDef) and one.name == "__init__"]
        # Of a base class elsewhere, nothing is known here.
        return read_parameters(inits[0]) if inits else None
    assert isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef), "a definition is a class or a function"
    return read_parameters(node)
