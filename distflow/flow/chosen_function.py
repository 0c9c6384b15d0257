"""The function that a step's setting names, such as the loss of an update: its own settings, and the fields it reads.

Found in the source without importing it, as declarations are. Example: with `@step(plugins={"loss": {"terms":
{"ref_logprobs": "ref_logprobs"}}})` and

    def mine(terms: TokenTerms, *, scale: float = 1.0) -> TokenLoss:
        return TokenLoss(scale * (terms.logprobs - terms.ref_logprobs), …)

`loss: ./mine.py:mine` gives the step the setting `scale`, and it reads the field ref_logprobs.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from distflow.errors import PluginError
from distflow.flow.resolve import Source, find_source
from distflow.flow.step import Arguments, StepSpec
from distflow.flow.step_declaration import Parameters, read_parameters
from distflow.flow.step_settings import is_plugin


@dataclass(frozen=True, slots=True)
class ChosenFunction:
    """A function that was found, and fits."""

    setting: str
    """The step's setting that names it."""
    call: str
    """module:name, or /path/file.py:name."""
    arguments: tuple[str, ...]
    """What it takes of what the step offers."""
    own: Parameters
    """Its settings: parameters that the step does not offer."""
    reads: tuple[str, ...]
    reads_if_there: tuple[str, ...]
    """Fields that it asks for by `has`, and reads if a step writes them."""

    def with_settings_of(self, step: Parameters) -> Parameters:
        """The settings of the step and of the function together."""
        return replace(
            step,
            settings={**self.own.settings, **step.settings},
            annotations={**self.own.annotations, **step.annotations},
            open_ended=self.own.open_ended,
        )


def chosen_function(spec: StepSpec, step: Parameters, given: Mapping[str, Any]) -> ChosenFunction | None:
    """The function that a step's settings choose; None if they choose none. Raises PluginError if it does not fit.

    `step`: the parameters of the step; `given`: what a recipe gives for them.
    """
    if not spec.arguments:
        return None
    setting, offered = next(iter(spec.arguments.items()))
    value = given.get(setting, step.settings.get(setting))
    if not isinstance(value, str):
        return None
    shipped = {call.rpartition(":")[2]: call for call in spec.choices.get(setting, ())}
    call = shipped.get(value, value)
    if not is_plugin(call):
        return None
    source = find_source(call)
    node = source.node
    if not isinstance(node, ast.FunctionDef):
        kind = "a class" if isinstance(node, ast.ClassDef) else "an async function"
        raise PluginError(f"{source.where}: {node.name!r} is {kind}; expected a plain function")
    parameters = read_parameters(node)
    taken = tuple(name for name in (*parameters.positional, *parameters.settings) if name in offered)
    _check(source, parameters, offered, step)
    fields = dict(_reads(node, offered))
    return ChosenFunction(
        setting=setting,
        call=call,
        arguments=taken,
        own=replace(
            parameters,
            settings={name: default for name, default in parameters.settings.items() if name not in offered},
            annotations={name: text for name, text in parameters.annotations.items() if name not in offered},
        ),
        reads=tuple(field for field, always in fields.items() if always),
        reads_if_there=tuple(field for field, always in fields.items() if not always),
    )


def _check(source: Source, parameters: Parameters, offered: Arguments, step: Parameters) -> None:
    name = source.node.name
    fits = all(argument in offered for argument in parameters.positional)
    if not fits or not (parameters.open_ended or any(argument in offered for argument in parameters.positional)):
        got = ", ".join([*parameters.positional, *(["*", *parameters.settings] if parameters.settings else [])])
        raise PluginError(
            f"{source.where}: {name!r} has the wrong signature ({got}) — expected def {name}({', '.join(offered)}, "
            "*, setting=default, …)" + (", with any of these arguments" if len(offered) > 1 else "")
        )
    both = sorted(set(parameters.settings) & set(step.settings))
    if both:
        raise PluginError(f"{source.where}: {name!r} has a setting {both[0]!r}, and so has the step itself: rename it")


def _reads(node: ast.FunctionDef, offered: Arguments) -> Iterator[tuple[str, bool]]:
    """Fields that a function reads, and whether always (True) or only where they are there (False)."""
    taken = [a.arg for a in (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs) if a.arg in offered]
    for name in taken:
        fields = offered[name]
        if isinstance(fields, str):
            yield fields, True
        elif fields is not None:
            yield from _attributes(node, name, fields)


def _attributes(node: ast.FunctionDef, argument: str, fields: Mapping[str, str]) -> Iterator[tuple[str, bool]]:
    mentioned: dict[str, None] = {}
    asked: dict[str, None] = {}
    for part in ast.walk(node):
        match part:
            case ast.Call(func=ast.Attribute(value=ast.Name(id=of), attr="has"), args=[ast.Constant(value=str(name))]):
                asked |= {fields.get(name, name): None} if of == argument else {}
            case ast.Attribute(value=ast.Name(id=of), attr=name) if of == argument and name in fields:
                mentioned[fields[name]] = None
            case ast.Subscript(value=ast.Name(id=of), slice=ast.Constant(value=str(name))) if of == argument:
                mentioned[fields.get(name, name)] = None
    for field in (*mentioned, *asked):
        yield field, field not in asked
