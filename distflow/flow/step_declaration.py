"""Reads a step's declaration from its source without importing it, so that `plan` need not load torch."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final, Literal

from distflow.config.schema import HEADS
from distflow.errors import PluginError, did_you_mean
from distflow.flow.resolve import Source, find_source, not_a_generate_step
from distflow.flow.step import (
    ATTRIBUTE,
    ENVIRONMENT,
    ERROR_SETTINGS,
    SAMPLING_SETTINGS,
    SomeSteps,
    StepSpec,
    is_range,
    step,
)
from distflow.types import DROP_REASON, LEFT_OUT, ROLES, SCOPES

_KNOWN = (
    *("role", "reads", "writes", "scope", "reads_when", "plugins", "choices"),
    *SomeSteps.__annotations__,
)

_MAPPINGS = ("reads_when", "fills", "plugins", "choices", "only_with", "widths")
_DEFAULTS: Mapping[str, Any] = {
    **{name: {} for name in _MAPPINGS},
    **{"scope": "sample", "may_write": (), "head": None, "samples": 1, "reads_if_there": (), "own_model": False},
}
_POSITIONAL = {"read": "row", "client": "batch"}
"""What steps are given, if that is not a batch with a context."""
_ASKED_BY = {"score": "tokens", "values": "value", "score_texts": "score"}
"""By the methods of a backend, the head that its model needs."""
_ON_ERROR = {"on_error": ("retry", "drop", "leave_out", "zero", "stop")}
_BLOCKING = (
    "time.sleep",
    "requests.",
    "subprocess.run",
    "subprocess.call",
    "subprocess.check_",
    "os.system",
    "urllib.request.urlopen",
    *(f"httpx.{verb}" for verb in ("get", "post", "put", "patch", "delete", "request", "stream")),
)
"""How calls begin that hold up whoever makes them."""
_ERROR_RANGES = {
    "max_attempts": ">= 1",
    "max_error_rate": ">= 0, <= 1",
    "timeout_s": "> 0",
    "turn_timeout_s": "> 0",
    "max_sample_tokens": ">= 1",
}
_ERROR_TYPES = {
    "on_error": "str",
    "max_attempts": "int",
    "max_error_rate": "float | None",
    "timeout_s": "float",
    "turn_timeout_s": "float",
    "max_sample_tokens": "int | None",
}

_SAMPLING_RANGES = {"min_p": ">= 0, <= 1", "min_new_tokens": ">= 0", "repetition_penalty": "> 0"}
_SAMPLING_TYPES = {
    "min_p": "float",
    "min_new_tokens": "int",
    "repetition_penalty": "float",
    "logit_bias": "Mapping[int, float]",
    "stop": "str | Sequence[str]",
    "include_stop_str_in_output": "bool",
}
_SAMPLING_ONLY_WITH = {"min_p": "temperature", "include_stop_str_in_output": "stop"}


class _Marker:
    def __init__(self, name: str) -> None:
        self._name = name

    def __repr__(self) -> str:
        return self._name


REQUIRED: Final = _Marker("required")
"""Marks a setting without a default."""
COMPUTED: Final = _Marker("computed")
"""Marks a default that is not a literal, which only the function itself knows."""


@dataclass(frozen=True, slots=True)
class Parameters:
    """The parameters of a function."""

    positional: tuple[str, ...]
    settings: Mapping[str, Any]
    """Keyword-only parameters and their defaults; REQUIRED or COMPUTED where there is no literal one."""
    annotations: Mapping[str, str]
    """Annotations of the settings, as text."""
    open_ended: bool
    """True with *args or **kwargs."""
    collects: bool = False
    """True with **kwargs alone."""


@dataclass(frozen=True, slots=True)
class StepDeclaration:
    """The declaration of a step, from its source."""

    call: str
    file: Path
    line: int
    text: str
    """The whole file."""
    spec: StepSpec
    parameters: Parameters
    keeps_state: bool
    """Its own source uses `ctx.state`."""
    drops: Literal["", "declared", "named"]
    """How it may drop samples or leave them out: `drop_reason` is among the fields of its declaration, or its own
    source names that, or writes `left_out`."""
    head: str | None
    """What its model has to give (`models.NAME.head`), as it declares or its own source tells; None: not known."""
    blocks: tuple[str, ...] = ()
    """Calls in its own coroutine that hold up the event loop, each with its place."""


def read_declaration(call: str) -> StepDeclaration:
    """The declaration of the step that `call` (module:name or /path/file.py:name) names; raises PluginError."""
    source = find_source(call)
    node = source.node
    if isinstance(node, ast.ClassDef):
        raise PluginError(f"{source.where}: {node.name!r} is a class; a step is a plain function")
    spec = _spec(_decorator(node, source), source)
    parameters = read_parameters(node)
    _check_form(source, spec, parameters)
    _check_choices(source, spec, parameters)
    if spec.role == "generate":
        spec, parameters = _with_further_settings(source, spec, parameters)
    # A read step has no context.
    context = parameters.positional[1] if len(parameters.positional) > 1 else ""
    parts = tuple(ast.walk(node))
    keeps_state = _uses(parts, context, "state")
    head = spec.head or _head(parts, context)
    about = (call, source.file, node.lineno, source.text, spec, parameters)
    blocks = tuple(f"{call}(…) at {source.file}:{line}" for call, line in _blocking(source))
    return StepDeclaration(*about, keeps_state, _drops(node, parts), head, blocks)


def _with_further_settings(source: Source, spec: StepSpec, parameters: Parameters) -> tuple[StepSpec, Parameters]:
    """The declaration of a generate step with the settings that every one has."""
    for name in ERROR_SETTINGS:
        if name in parameters.settings:
            raise PluginError(
                f"{source.where}: {source.node.name!r} has a setting {name!r} of its own, and every generate step has "
                "one of this name, which says what becomes of samples on which it fails; rename it"
            )
    further = {name: value for name, value in SAMPLING_SETTINGS.items() if name not in parameters.settings}
    settings = {**parameters.settings, **ERROR_SETTINGS, **further}
    types = {**parameters.annotations, **_ERROR_TYPES, **{name: _SAMPLING_TYPES[name] for name in further}}
    ranges = {name: bounds for name, bounds in _SAMPLING_RANGES.items() if name in further}
    only_with = {name: other for name, other in _SAMPLING_ONLY_WITH.items() if name in further and other in settings}
    spec = replace(
        spec,
        choices={**spec.choices, **_ON_ERROR},
        ranges={**spec.ranges, **_ERROR_RANGES, **ranges},
        only_with={**spec.only_with, **only_with},
    )
    return spec, replace(parameters, settings=settings, annotations=types)


def _blocking(source: Source) -> Iterator[tuple[str, int]]:
    """Find the calls in a coroutine, and in those of its file that it calls by name, that block, with their lines;
    those of functions within it may run in threads."""
    node, file = source.node, source.module
    if not isinstance(node, ast.AsyncFunctionDef):
        return
    named, theirs = _imported(file), {part.name: part for part in file.body if isinstance(part, ast.AsyncFunctionDef)}
    theirs.pop(node.name, None)
    todo: list[ast.AST] = [*node.body]
    while todo:
        part = todo.pop(0)
        if isinstance(part, ast.FunctionDef | ast.Lambda):
            continue
        if isinstance(part, ast.Call):
            first, dot, rest = ast.unparse(part.func).partition(".")
            name = f"{named.get(first, first)}{dot}{rest}"
            if name.startswith(_BLOCKING):
                yield name, part.lineno
            called = theirs.pop(first, None)
            todo += [] if called is None else called.body
        todo += ast.iter_child_nodes(part)


def _imported(file: ast.Module) -> dict[str, str]:
    """List what a file imports, in full, by the names that it has there."""
    found = dict[str, str]()
    for part in ast.walk(file):
        if isinstance(part, ast.Import):
            found |= {alias.asname: alias.name for alias in part.names if alias.asname}
        elif isinstance(part, ast.ImportFrom) and not part.level:
            found |= {alias.asname or alias.name: f"{part.module}.{alias.name}" for alias in part.names}
    return found


def _head(parts: Iterable[ast.AST], ctx: str) -> str | None:
    """What a function asks its model for, if it does so in its own source, and always for the same."""
    found = set()
    for part in parts:
        match part:
            case ast.Attribute(value=ast.Attribute(value=ast.Name(id=name), attr="backend"), attr=method) if (
                name == ctx
            ):
                found |= {_ASKED_BY[method]} if method in _ASKED_BY else set()
    return found.pop() if len(found) == 1 else None


def _drops(node: ast.FunctionDef | ast.AsyncFunctionDef, parts: Iterable[ast.AST]) -> Literal["", "declared", "named"]:
    if any(_is(DROP_REASON, part) for decorator in node.decorator_list for part in ast.walk(decorator)):
        return "declared"
    named = (_is(DROP_REASON, part) or (isinstance(part, ast.keyword) and part.arg == LEFT_OUT) for part in parts)
    return "named" if any(named) else ""


def _is(name: str, part: ast.AST) -> bool:
    """Whether a text, or an argument of a call, is just this."""
    return (isinstance(part, ast.Constant) and part.value == name) or (
        isinstance(part, ast.keyword) and part.arg == name
    )


def _uses(parts: Iterable[ast.AST], of: str, attribute: str) -> bool:
    """Whether `of.attribute` occurs in the source of a function."""
    found = (part for part in parts if isinstance(part, ast.Attribute) and part.attr == attribute)
    return any(isinstance(part.value, ast.Name) and part.value.id == of for part in found)


def read_parameters(node: ast.FunctionDef | ast.AsyncFunctionDef) -> Parameters:
    """The parameters of a function definition."""
    arguments = node.args
    defaults = zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True)
    return Parameters(
        positional=tuple(a.arg for a in [*arguments.posonlyargs, *arguments.args]),
        settings={argument.arg: _default(default) for argument, default in defaults},
        annotations={a.arg: ast.unparse(a.annotation) for a in arguments.kwonlyargs if a.annotation is not None},
        open_ended=arguments.vararg is not None or arguments.kwarg is not None,
        collects=arguments.kwarg is not None and arguments.vararg is None,
    )


def _default(node: ast.expr | None) -> Any:
    if node is None:
        return REQUIRED
    try:
        return ast.literal_eval(node)
    except ValueError:
        return COMPUTED


def _decorator(node: ast.FunctionDef | ast.AsyncFunctionDef, source: Source) -> ast.Call:
    for decorator in node.decorator_list:
        if isinstance(decorator, ast.Call) and ast.unparse(decorator.func).split(".")[-1] == "step":
            return decorator
    raise PluginError(
        f"{source.where}: {node.name!r} is not a step; declare it: @step(role=…, reads=[…], writes=[…]) "
        "with `from distflow import step`"
    )


def _check_form(source: Source, spec: StepSpec, parameters: Parameters) -> None:
    name, awaits = source.node.name, isinstance(source.node, ast.AsyncFunctionDef)
    if spec.role != "generate":
        if awaits:
            raise PluginError(f"{source.where}: {name!r} is an async function; a step is a plain function")
        _check_parameters(source, parameters, spec)
    elif parameters.open_ended or len(parameters.positional) != 3:
        raise PluginError(f"{source.where}: {name!r} {not_a_generate_step(name)}")


def _check_parameters(source: Source, parameters: Parameters, spec: StepSpec) -> None:
    name, given = source.node.name, _POSITIONAL.get(spec.role, "batch, ctx")
    expected = f"expected def {name}({given}, *, setting=default, …)"
    if len(spec.arguments) > 1 or (spec.arguments and not parameters.collects):
        raise PluginError(
            f"{source.where}: @step(plugins=…) offers arguments by name for one setting only, and {name!r} takes that "
            f"function's own settings: expected def {name}(batch, ctx, *, {next(iter(spec.arguments))}=…, **settings)"
        )
    if parameters.open_ended and not spec.arguments:
        raise PluginError(f"{source.where}: step {name!r} takes *args or **kwargs; {expected}")
    if len(parameters.positional) != len(given.split(", ")):
        given = ", ".join(parameters.positional)
        raise PluginError(f"{source.where}: step {name!r} has the positional parameters ({given}); {expected}")


def _check_choices(source: Source, spec: StepSpec, parameters: Parameters) -> None:
    declared = {
        "choices": (*spec.choices, *spec.ranges),
        "only_with": (*spec.only_with, *spec.only_with.values()),
        "widths": tuple(spec.widths.values()),
    }
    for argument, setting in ((argument, setting) for argument, settings in declared.items() for setting in settings):
        if setting not in parameters.settings and not spec.arguments:
            raise PluginError(
                f"{source.where}: @step({argument}=…) names the setting {setting!r}, which {source.node.name!r} lacks; "
                f"{did_you_mean(setting, parameters.settings)}"
            )


def _spec(decorator: ast.Call, source: Source) -> StepSpec:
    if decorator.args:
        raise PluginError(f"{source.where}: @step takes keywords only: role=, reads=, writes=, …")
    values: dict[str, Any] = {}
    sets_up = False
    for keyword in decorator.keywords:
        if keyword.arg is None:
            raise PluginError(f"{source.where}: @step(**…) cannot be read without running it: write the arguments out")
        if keyword.arg not in _KNOWN:
            raise PluginError(
                f"{source.where}: @step has no argument {keyword.arg!r}; {did_you_mean(str(keyword.arg), _KNOWN)}"
            )
        if keyword.arg == "setup" and isinstance(keyword.value, ast.Name):
            sets_up = True  # the name of what is called in the worker alone
            continue
        try:
            values[keyword.arg] = ast.literal_eval(keyword.value)
        except ValueError as error:
            raise PluginError(
                f"{source.where}: @step({keyword.arg}={ast.unparse(keyword.value)}) is not a literal; "
                "the planner reads declarations without running them"
            ) from error
    missing = [name for name in ("role", "reads", "writes") if name not in values]
    if missing:
        raise PluginError(f"{source.where}: @step lacks {', '.join(missing)}")
    if sets_up and values["role"] != "generate":
        raise PluginError(
            f"{source.where}: @step(setup=…) is for the role generate, whose episodes share what it gives"
        )
    return _typed(values, source)


def _typed(given: dict[str, Any], source: Source) -> StepSpec:
    values = {**_DEFAULTS, **given}
    for name, allowed in (("role", ROLES), ("scope", SCOPES), ("head", (None, *HEADS))):
        if values[name] not in allowed:
            known = [one for one in allowed if one is not None]
            raise PluginError(
                f"{source.where}: @step({name}={values[name]!r}); {did_you_mean(str(values[name]), known)}"
            )
    for name in ("reads", "writes", "may_write", "reads_if_there"):
        _expect_names(values[name], f"@step({name}=…)", source)
    if values["may_write"] and values["role"] != "score":
        raise PluginError(
            f"{source.where}: @step(may_write=…) is for the role score, and {source.node.name!r} has the role "
            f"{values['role']!r}; a step of another role writes all its fields: list them in writes"
        )
    _expect_read(values, source)
    if "environment" in values:
        _expect_environment(values["environment"], values["role"], source)
    for name in _MAPPINGS:
        _expect_mapping(values[name], name, source)
    _expect_settings(values, source)
    spec: StepSpec = getattr(step(**values)(lambda: None), ATTRIBUTE)
    return spec


def _expect_settings(values: Mapping[str, Any], source: Source) -> None:
    for name in ("reads_when", "plugins", "choices"):
        for setting, names in values[name].items():
            if name == "choices" and isinstance(names, str):
                _expect_range(setting, names, source)
            elif not (name == "plugins" and isinstance(names, dict)):
                _expect_names(names, f"@step({name}={{{setting!r}: …}})", source)
    for setting, other in values["only_with"].items():
        if not isinstance(other, str):
            raise PluginError(
                f"{source.where}: @step(only_with={{{setting!r}: …}}) must be the name of a setting, got {other!r}"
            )


def _expect_names(value: object, what: str, source: Source) -> None:
    if not (isinstance(value, list | tuple) and all(isinstance(item, str) for item in value)):
        raise PluginError(f"{source.where}: {what} must be a list of names, got {value!r}")


def _expect_environment(value: object, role: object, source: Source) -> None:
    if role != "generate":
        raise PluginError(
            f"{source.where}: @step(environment=…) is for the role generate, and {source.node.name!r} has the role "
            f"{role!r}"
        )
    _expect_names(value, "@step(environment=…)", source)
    for name in value if isinstance(value, list | tuple) else ():
        if name not in ENVIRONMENT:
            raise PluginError(f"{source.where}: @step(environment=…) names {name!r}; {did_you_mean(name, ENVIRONMENT)}")


def _expect_read(values: Mapping[str, Any], source: Source) -> None:
    name, role, samples = source.node.name, values["role"], values["samples"]
    if role == "read" and (type(samples) is not int or samples < 1):
        raise PluginError(f"{source.where}: @step(samples={samples!r}): expected how many samples a row has, 1 or more")
    if role == "read" and values["reads"]:
        raise PluginError(
            f"{source.where}: @step(reads={values['reads']!r}): {name!r} has the role read, and gets a row of the data"
        )
    if role != "read" and samples != 1:
        raise PluginError(f"{source.where}: @step(samples=…) is for the role read, and {name!r} has the role {role!r}")


def _expect_range(setting: str, text: str, source: Source) -> None:
    if not is_range(text):
        raise PluginError(
            f"{source.where}: @step(choices={{{setting!r}: {text!r}}}) must be a list of names, or bounds as "
            "in '> 0, <= 1'"
        )


def _expect_mapping(value: object, name: str, source: Source) -> None:
    if not isinstance(value, dict):
        raise PluginError(f"{source.where}: @step({name}=…) must be a mapping, got {value!r}")
