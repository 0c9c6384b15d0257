"""The graph of a flow: which step feeds which, inferred from the fields they read and write."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from distflow.config.check import Where
from distflow.config.plugins import SUPPLIERS
from distflow.config.schema import FlowConfig, StepConfig
from distflow.errors import PluginError, Problem, did_you_mean, nearest
from distflow.flow.step_declaration import StepDeclaration, read_declaration
from distflow.flow.step_settings import complaints, merged
from distflow.types import written


@dataclass(frozen=True, slots=True)
class StepNode:
    """One step with everything its declaration says, under the settings of this recipe."""

    name: str
    model: str | None
    declaration: StepDeclaration
    settings: Mapping[str, Any]
    """Literal defaults and what the recipe gives."""
    reads: tuple[str, ...]
    conditions: Mapping[str, str]
    """Fields read only because of a setting, and that setting."""

    @property
    def writes(self) -> tuple[str, ...]:
        """Fields it writes."""
        return self.declaration.spec.writes

    @property
    def role(self) -> str:
        """Its role."""
        return self.declaration.spec.role


def read_steps(flow: FlowConfig, where: Where, problems: list[Problem]) -> list[StepNode]:
    """The steps in the order of the file; those that cannot be read are reported and left out."""
    found = (read_step(name, config, f"flow.steps.{name}", where, problems) for name, config in flow.steps.items())
    return [node for node in found if node is not None]


def read_step(name: str, config: StepConfig, key: str, where: Where, problems: list[Problem]) -> StepNode | None:
    """One step; problems are reported at `key`."""
    try:
        declaration = read_declaration(config.call)
    except PluginError as error:
        problems.append(Problem(where(f"{key}.call"), f"{key}.call", str(error)))
        return None
    parameters, spec = declaration.parameters, declaration.spec
    for setting, message, cure in complaints(config.with_, parameters, spec.plugins, spec.choices, spec.ranges):
        problems.append(Problem(where(f"{key}.with.{setting}"), f"{key}.with.{setting}", message, cure))
    settings = merged(config.with_, parameters)
    conditions: dict[str, str] = {}
    for setting, fields in spec.reads_when.items():
        if setting not in parameters.settings:
            message = f"reads_when names the setting {setting!r}, which the function lacks"
            problems.append(Problem(f"{declaration.file}:{declaration.line}", f"{key}.call", message))
        elif settings.get(setting):
            conditions.update(dict.fromkeys((f for f in fields if f not in spec.reads), setting))
    return StepNode(name, config.model, declaration, settings, (*spec.reads, *conditions), conditions)


def order_steps(
    steps: Sequence[StepNode], optional: Iterable[str], where: Where, problems: list[Problem]
) -> list[StepNode]:
    """Each step after those that write what it reads; otherwise in the order of the file.

    `optional`: fields that steps of single workers write, with a fill value elsewhere. Reports fields that nobody
    produces, fields with two producers, and circles.
    """
    producers = _producers(steps, where, problems)
    known = {*producers, *optional}
    unread = [(node, field) for node in steps for field in node.reads if not written(field, known)]
    problems += [_unproduced(node, field, known, where) for node, field in unread]
    ordered: list[StepNode] = []
    pending = list(steps)
    while pending:
        ready = next((node for node in pending if not _waits(node, pending)), None)
        if ready is None:
            names = ", ".join(node.name for node in pending)
            message = f"the steps {names} wait for each other's fields"
            problems.append(Problem(where("flow.steps"), "flow.steps", message, "remove a read from one of them"))
            return [*ordered, *pending]
        ordered.append(ready)
        pending.remove(ready)
    return ordered


def _waits(node: StepNode, pending: Sequence[StepNode]) -> bool:
    return any(written(field, other.writes) for other in pending if other is not node for field in node.reads)


def _producers(steps: Sequence[StepNode], where: Where, problems: list[Problem]) -> dict[str, StepNode]:
    producers: dict[str, StepNode] = {}
    for node in steps:
        for field in node.writes:
            if field in producers:
                key = f"flow.steps.{node.name}"
                message = f"writes the field {field!r}, and so does step {producers[field].name!r}"
                problems.append(Problem(where(key), key, message, "keep one of them, or write a field of another name"))
            producers[field] = node
    return producers


def _unproduced(node: StepNode, field: str, known: set[str], where: Where) -> Problem:
    key = f"flow.steps.{node.name}"
    # The function is what reads: a recipe may have changed no more than the call of a shipped step.
    place = where(f"{key}.call")
    why = (
        f" because {node.conditions[field]} is {node.settings[node.conditions[field]]!r}"
        if field in node.conditions
        else ""
    )
    message = f"reads the field {field!r}{why}, which no step of the flow writes"
    if field in SUPPLIERS:
        return Problem(place, key, message, f"add to flow.steps:  {SUPPLIERS[field]}")
    close = nearest(field, known)
    if close is not None:
        return Problem(place, key, message, f"did you mean {close!r}? Or add a step that writes {field!r}")
    return Problem(place, key, message, f"add a step that writes it; {did_you_mean(field, known)}")
