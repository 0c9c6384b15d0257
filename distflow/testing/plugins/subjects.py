"""Plug-ins to be tested: what each is, as its source tells, and the step that would call it. Imports no torch."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from distflow.config.paths import HUB_PREFIX, is_data_file
from distflow.config.yamlfile import shown
from distflow.errors import PluginError, UserError, did_you_mean
from distflow.flow.chosen_function import chosen_function
from distflow.flow.data_check import keyed_sources, reward_calls
from distflow.flow.plan import Plan, StepPlan
from distflow.flow.resolve import Source, find_source, split_call
from distflow.flow.reward_form import LISTS, SOLUTION, find_signature, may_take_lists
from distflow.flow.step_declaration import read_declaration, read_parameters
from distflow.flow.step_settings import functions_of
from distflow.flow.trackers import trackers_of

KINDS: Mapping[str, str] = {
    "step": "a step",
    "generate": "a generate step",
    "reward": "a reward function",
    "advantage": "an advantage function",
    "loss": "a loss function",
    "kl": "a KL estimator",
    "source": "a data source",
    "read": "a read step",
    "tracker": "a tracker",
    "engine": "an engine",
    "backend": "a backend",
}
ADVANTAGE = "distflow.workers.trainer:advantage"
BATCH_ADVANTAGE = "distflow.workers.trainer:batch_advantage"
UPDATE = "distflow.workers.trainer:update"
_METHODS = {
    "engine": {"poll", "submit"},
    "backend": {"score", "accumulate"},
    "tracker": {"log", "samples", "close"},
    "source": {"__len__", "__getitem__"},
}


@dataclass(frozen=True, slots=True)
class Subject:
    """A plug-in with the settings that it is tested with."""

    name: str
    """As the user wrote it."""
    call: str
    """module:name, or /path/file.py:name."""
    kind: str
    settings: Mapping[str, Any] = field(default_factory=dict)
    """Of the function itself."""
    data: str | None = None
    """A data source, whose tasks it gets; None: tasks are made up."""
    data_settings: Mapping[str, Any] = field(default_factory=dict)
    data_fields: Mapping[str, str] = field(default_factory=dict)
    data_prompts: bool = False
    """Reward functions may ask for the messages of a conversation: they are in the task."""

    host: tuple[str, Mapping[str, Any]] | None = None
    """The step that calls it in a recipe, and the settings of that step; None: the shipped one."""

    def step(self) -> tuple[str, dict[str, Any]]:
        """The step that calls it, and the settings of that step; of a step, itself."""
        if self.host is not None:
            return self.host[0], dict(self.host[1])
        if self.kind == "advantage":
            parameters = read_parameters(_function(find_source(self.call)))
            whole = "moments" in (*parameters.positional, *parameters.settings)
            return BATCH_ADVANTAGE if whole else ADVANTAGE, {"function": self.call, **self.settings}
        if self.kind == "loss":
            return UPDATE, {"loss": self.call, **self.settings}
        if self.kind == "kl":
            return UPDATE, {"kl": self.call, "kl_coef": 0.1, **self.settings}
        return self.call, dict(self.settings)


def absolute(call: str) -> str:
    """`./file.py:name` from the current folder, with its whole path; others as they are. Raises PluginError."""
    place, name = split_call(call)
    return f"{Path(place).resolve()}:{name}" if place.endswith(".py") else call


def kind_of(call: str) -> str:
    """What a plug-in is, by its source; raises PluginError if there is none, UserError if that cannot be told."""
    if _is_reward(call):
        return "reward"
    source = find_source(call)
    found = _class_kind(source.node) if isinstance(source.node, ast.ClassDef) else _function_kind(call, source)
    if found is None:
        raise UserError(
            f"{source.where}: what {source.node.name!r} is cannot be told from its parameters — say it with --as: "
            f"{', '.join(KINDS)}"
        )
    return found


def _is_reward(call: str) -> bool:
    """Tell whether the parameters are those of a reward function of TRL or verl."""
    found = find_signature(call)
    return found is not None and not {*LISTS, SOLUTION}.isdisjoint(found.keywords)


def check_kind(kind: str) -> None:
    """Raises UserError for an unknown kind."""
    if kind not in KINDS:
        raise UserError(f"--as {kind}: {did_you_mean(kind, KINDS)}")


def subjects_of(plan: Plan) -> list[Subject]:
    """All plug-ins that a recipe names outside of distflow, with the settings that it gives them."""
    found = {subject.call: subject for subject in _named_in(plan) if not subject.call.startswith("distflow.")}
    return list(found.values())


def _named_in(plan: Plan) -> Iterator[Subject]:
    data: dict[str, Any] = {}
    for _, source in keyed_sources(plan.recipe.data):
        data = data or {
            "data": source.source,
            "data_settings": source.with_,
            "data_fields": source.fields,
            "data_prompts": any(may_take_lists(call) for call, _ in reward_calls(plan)),
        }
        if not (is_data_file(source.source) or source.source.startswith(HUB_PREFIX)):
            yield Subject(_short(source.source), source.source, "source", source.with_, data_fields=source.fields)
    for step in plan.steps:
        yield from _named_by(step, data)
    for tracker in trackers_of(plan.recipe.run):
        if ":" in tracker.call:
            yield Subject(_short(tracker.call), tracker.call, "tracker", tracker.options)
    for worker in plan.workers:
        for kind, call in (("engine", worker.engine), ("backend", worker.backend)):
            if call is not None:
                yield Subject(_short(call), call, kind)


def _named_by(step: StepPlan, data: Mapping[str, Any]) -> Iterator[Subject]:
    yield Subject(_short(step.call), step.call, _step_kind(step.role), step.settings, **data)
    declaration = read_declaration(step.call)
    function = chosen_function(declaration.spec, declaration.parameters, step.settings)
    if function is not None:
        kind = "loss" if "terms" in function.arguments else "advantage"
        own = {name: value for name, value in step.settings.items() if name in function.own.settings}
        yield Subject(_short(function.call), function.call, kind, own, **data, host=(step.call, step.settings))
    for setting, positional in declaration.spec.plugins.items():
        for below, (call, own_names) in functions_of(step.settings.get(setting)).items():
            kind = "reward" if len(positional) == 1 else "kl"
            part = step.settings[setting][below.split(".")[1]] if below else {}
            settings = {name: part[name] for name in own_names}
            host = None if kind == "reward" else (step.call, step.settings)
            yield Subject(_short(call), call, kind, settings, **data, host=host)


def _short(call: str) -> str:
    """A file as seen from the current folder."""
    place, name = split_call(call)
    return f"{shown(Path(place))}:{name}" if place.endswith(".py") else call


def _class_kind(node: ast.ClassDef) -> str | None:
    methods = {part.name for part in node.body if isinstance(part, ast.FunctionDef)}
    for kind, needed in _METHODS.items():
        if needed <= methods:
            return kind
    bases = " ".join(ast.unparse(base) for base in node.bases)
    return next((kind for kind in ("engine", "backend") if kind in bases.lower()), None)


def _function_kind(call: str, source: Source) -> str | None:
    node = _function(source)
    named = [ast.unparse(one.func if isinstance(one, ast.Call) else one) for one in node.decorator_list]
    positional = read_parameters(node).positional
    if any(name.split(".")[-1] == "step" for name in named) or tuple(positional) == ("batch", "ctx"):
        return _step_kind(read_declaration(call).spec.role)
    return _kind_by_parameters(node, positional)


def _step_kind(role: str) -> str:
    return role if role in ("generate", "read") else "step"


def _kind_by_parameters(node: ast.FunctionDef | ast.AsyncFunctionDef, positional: Sequence[str]) -> str | None:
    offered = read_declaration(BATCH_ADVANTAGE).spec.arguments["function"]
    if tuple(positional) == ("terms",):
        return "loss"
    if positional and set(positional) <= set(offered):
        return "advantage"
    if len(positional) == 2 and all("logprobs" in name for name in positional):
        return "kl"
    return {0: "source", 1: "reward"}.get(len(positional))


def _function(source: Source) -> ast.FunctionDef | ast.AsyncFunctionDef:
    if isinstance(source.node, ast.ClassDef):
        raise PluginError(f"{source.where}: {source.node.name!r} is a class; expected a function")
    return source.node
