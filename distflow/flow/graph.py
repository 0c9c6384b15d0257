"""The graph of a flow: which step feeds which, inferred from the fields they read and write."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from distflow.config.plugins import SUPPLIERS
from distflow.config.schema import FlowConfig, StepConfig
from distflow.errors import PluginError, Problem, Problems, did_you_mean, nearest
from distflow.flow.chosen_function import ChosenFunction, chosen_function
from distflow.flow.step import MASK_TRUNCATED, ROLLOUT, SEVERAL_UPDATES, named_fields, reads_of, writes_of
from distflow.flow.step_declaration import StepDeclaration, read_declaration
from distflow.flow.step_settings import complaints, merged
from distflow.types import prefixed, written


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
    reads_if_there: tuple[str, ...] = ()
    """Fields read only if another step writes them."""
    prefix: str = ""
    """What precedes the names of its fields: all names here are those in the flow."""
    function_reads: tuple[str, ...] = ()
    """Of the fields that it reads, those that a function does which its settings choose."""
    unread: tuple[str, ...] = ()
    """Fields that it would write if something read them."""
    weighed: bool = False
    """Of a generate step: another step computes with the log-probs of its samples, not for metrics alone."""

    @property
    def writes(self) -> tuple[str, ...]:
        """Fields it writes."""
        spec = self.declaration.spec
        found = (*writes_of(spec, self.prefix), *named_fields(spec, self.settings).writes)
        return tuple(field for field in found if field not in self.unread)

    @property
    def may_write(self) -> tuple[str, ...]:
        """Fields that it writes sometimes."""
        return tuple(prefixed(field, self.prefix) for field in self.declaration.spec.may_write)

    @property
    def widths(self) -> dict[str, int]:
        """Fields that it writes with several values for each token: how many."""
        found = {field: self.settings[setting] for field, setting in self.declaration.spec.widths.items()}
        # What is no whole number is reported where settings are checked.
        return {prefixed(field, self.prefix): size for field, size in found.items() if isinstance(size, int)}

    @property
    def generates_further(self) -> bool:
        """Whether it generates from prompts that other steps write."""
        return self.role == "generate" and bool(self.prefix)

    @property
    def role(self) -> str:
        """Its role."""
        return self.declaration.spec.role

    def weights_samples_of(self, other: StepNode) -> bool:
        """Tell whether it computes with the engine's log-probs of what `other` generates, not for metrics alone.

        A step that declares settings for that (`reads_when`), or a function, does so while one of them asks for it.
        """
        field, spec = prefixed(ROLLOUT, other.prefix), self.declaration.spec
        if field not in self.reads:
            return False
        asking = [setting for setting, fields in spec.reads_when.items() if ROLLOUT in fields]
        return not asking or field in self.function_reads or any(self.settings.get(setting) for setting in asking)

    @property
    def drops(self) -> str:
        """Tell whether it may drop samples, or leave them out, as far as its source and its settings tell: "",
        "declared" or "named"."""
        keeps = self.settings.get("on_error") in ("zero", "stop")
        return "" if keeps or self.role != "score" else self.declaration.drops


def read_steps(
    flow: FlowConfig, problems: Problems, *, several_updates: bool = False, out_of_loss: bool = False
) -> list[StepNode]:
    """The steps in the order of the file; those that cannot be read are reported and left out.

    `several_updates`: the samples of a training step are trained on in several optimizer steps; `out_of_loss`: tokens
    of responses that were cut off are left out of them.
    """
    holds = {"several_updates": several_updates, "out_of_loss": out_of_loss}
    found = (read_step(name, config, f"flow.steps.{name}", problems, **holds) for name, config in flow.steps.items())
    nodes = [node for node in found if node is not None]
    return [replace(node, reads=(*node.reads, *_there(node, nodes))) for node in nodes]


def _there(node: StepNode, nodes: Sequence[StepNode]) -> Iterator[str]:
    for field in node.reads_if_there:
        if field not in node.reads and any(written(field, other.writes) for other in nodes if other is not node):
            yield field


def read_step(
    name: str,
    config: StepConfig,
    key: str,
    problems: Problems,
    *,
    several_updates: bool = False,
    out_of_loss: bool = False,
) -> StepNode | None:
    """One step; problems are reported at `key`. `several_updates`, `out_of_loss` as in `read_steps`."""
    try:
        declaration = read_declaration(config.call)
    except PluginError as error:
        problems.add(f"{key}.call", str(error))
        return None
    parameters, spec = declaration.parameters, declaration.spec
    function = _function(declaration, config, key, problems)
    if function is not None:
        parameters = function.with_settings_of(parameters)
    # Null takes back what a recipe below gives for a setting that another function does not have.
    given = {name: value for name, value in config.with_.items() if value is not None or name in parameters.settings}
    checks = (spec.plugins, spec.choices, spec.ranges, tuple(spec.arguments))
    for setting, message, hint in complaints(given, parameters, *checks):
        problems.add(f"{key}.with.{setting}", message, hint)
    settings = merged(given, parameters)
    conditions: dict[str, str] = {}
    if function is not None:
        conditions.update(dict.fromkeys((f for f in function.reads if f not in spec.reads), function.setting))
    for setting, fields in spec.reads_when.items():
        if setting == SEVERAL_UPDATES:
            conditions.update(dict.fromkeys(fields, setting) if several_updates else {})
        elif setting not in parameters.settings:
            message = f"reads_when names the setting {setting!r}, which the function lacks"
            problems.append(Problem(f"{declaration.file}:{declaration.line}", f"{key}.call", message))
        elif settings.get(setting):
            conditions.update(dict.fromkeys((f for f in fields if f not in spec.reads), setting))
    if out_of_loss and spec.role == "train" and config.model is not None and "finish_reason" not in spec.reads:
        conditions["finish_reason"] = MASK_TRUNCATED
    prefix = config.prefix or ""
    conditions = {prefixed(field, prefix): setting for field, setting in conditions.items()}
    return StepNode(
        name,
        config.model,
        declaration,
        settings,
        (*reads_of(spec, prefix), *named_fields(spec, settings).reads, *conditions),
        conditions,
        tuple(prefixed(field, prefix) for field in (*spec.reads_if_there, *_asked_for(function))),
        prefix,
        () if function is None else tuple(prefixed(field, prefix) for field in function.reads),
    )


def _asked_for(function: ChosenFunction | None) -> tuple[str, ...]:
    return () if function is None else function.reads_if_there


def generate_settings(steps: Iterable[StepNode]) -> list[Mapping[str, Any]]:
    """The settings of the steps that make samples: of the primary model's first, then those of further models."""
    making = (node for node in steps if node.role in ("generate", "read"))
    generating = sorted(making, key=lambda node: bool(node.prefix))
    return [node.settings for node in generating]


def _function(declaration: StepDeclaration, config: StepConfig, key: str, problems: Problems) -> ChosenFunction | None:
    """The function that the step's settings choose; a problem with it is reported."""
    spec = declaration.spec
    try:
        return chosen_function(spec, declaration.parameters, config.with_)
    except PluginError as error:
        problems.add(f"{key}.with.{next(iter(spec.arguments))}", str(error), "correct the function or its name")
        return None


def order_steps(steps: Sequence[StepNode], optional: Iterable[str], problems: Problems) -> list[StepNode]:
    """Put each step behind those that write what it reads; otherwise the order of the file stays.

    `optional`: fields that steps of single workers write, with a fill value elsewhere. Reports fields that no step
    writes, fields that two steps write, and cycles.
    """
    producers = _producers(steps, problems)
    known = {*producers, *optional}
    for node in steps:
        for field in node.reads:
            if not written(field, known):
                _report_missing(node, field, steps, known, problems)
    ordered: list[StepNode] = []
    pending = list(steps)
    while pending:
        ready = next((node for node in pending if not _waits(node, pending)), None)
        if ready is None:
            names = ", ".join(node.name for node in pending)
            message = f"the steps {names} wait for each other's fields"
            problems.add("flow.steps", message, "remove a read from one of them")
            return [*ordered, *pending]
        ordered.append(ready)
        pending.remove(ready)
    return ordered


def _waits(node: StepNode, pending: Sequence[StepNode]) -> bool:
    return any(written(field, other.writes) for other in pending if other is not node for field in node.reads)


def _producers(steps: Sequence[StepNode], problems: Problems) -> dict[str, StepNode]:
    producers: dict[str, StepNode] = {}
    for node in steps:
        for field in node.writes:
            # Two that generate are reported once, not for each of their fields.
            if field in producers and not {node.role, producers[field].role} <= {"generate", "read"}:
                other = producers[field].name
                key = problems.where.newest([f"flow.steps.{node.name}.call", f"flow.steps.{other}.call"])
                one, two = (node.name, other) if key == f"flow.steps.{node.name}.call" else (other, node.name)
                message = f"writes the field {field!r}, and so does step {two!r}"
                hint = "keep one of them, or write a field of another name"
                meant = f"did you mean flow.steps.{two}? Otherwise " if nearest(one, [two], 0.8) is not None else ""
                problems.add(f"flow.steps.{one}", message, meant + hint, at=key)
            producers[field] = node
    return producers


def _report_missing(node: StepNode, field: str, steps: Sequence[StepNode], known: set[str], problems: Problems) -> None:
    setting = node.conditions.get(field)
    why = "" if setting is None else f" because {_condition(node, setting)}"
    close, plain = nearest(field, known), field.removeprefix(f"{node.prefix}/")
    bare = field.partition("/")[2] or field
    elsewhere = [n for n in steps if {prefixed(plain, n.prefix), prefixed(bare, n.prefix)} & {*n.writes}]
    misspelt = nearest(node.prefix, [other.prefix for other in elsewhere]) if node.prefix else None
    if misspelt:
        hint = f"did you mean prefix {misspelt!r}? One and the same prefix for all steps of a model"
    elif plain in SUPPLIERS:
        hint = f"add to flow.steps:  {_supplier(plain, node)}"
    elif close is not None:
        hint = f"did you mean {close!r}? Or add a step that writes {field!r}"
    else:
        hint = f"add a step that writes it; {did_you_mean(field, known)}"
    key = f"flow.steps.{node.name}"
    message = f"reads the field {field!r}{why}, which no step of the flow writes"
    # The function reads it, and its call may be all that a recipe has changed of a shipped step.
    causes = [f"{key}.call", *problems.where.removed("flow.steps")]
    if setting is not None:
        causes += _OF_BATCH.get(setting, (f"{key}.with.{setting}",))
    causes += [f"flow.steps.{other.name}.prefix" for other in (node, *elsewhere)]
    newest = problems.where.newest(causes)
    if node.prefix and newest in [f"flow.steps.{other.name}.prefix" for other in elsewhere]:
        key, message = newest, f"step {node.name!r} reads fields under {node.prefix!r}, which this takes away"
        hint = f"{newest}={node.prefix}, or one and the same prefix for both steps"
    elif newest != causes[0]:
        key, message = newest, f"step {node.name!r} {message}"
    problems.add(key, message, hint, at=newest)


_OF_BATCH: Mapping[str, tuple[str, ...]] = {
    SEVERAL_UPDATES: ("batch.minibatches", "batch.epochs"),
    MASK_TRUNCATED: (MASK_TRUNCATED,),
}
"""The keys behind conditions that no setting of the step states."""


def _condition(node: StepNode, setting: str) -> str:
    """Why a field is read, as a sentence."""
    if setting == SEVERAL_UPDATES:
        return "batch.minibatches × batch.epochs is more than 1"
    return f"{MASK_TRUNCATED} is given" if setting == MASK_TRUNCATED else f"{setting} is {node.settings[setting]!r}"


def _supplier(plain: str, node: StepNode) -> str:
    """The line of a step that writes what this one lacks, for the samples of the same model."""
    line, prefix = SUPPLIERS[plain], node.prefix
    if not prefix:
        return line
    line = line.replace("model: policy", f"model: {node.model or prefix}")
    return f"{prefix}_{line.removesuffix('}')}, prefix: {prefix}}}"
