"""Checks a step's settings against its function's parameters, and the plug-ins named in them."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, TypeGuard

from distflow.config.check import quoted
from distflow.config.other_tools import meant
from distflow.config.paths import shipped_steps
from distflow.errors import PluginError, Problem, RecipeError, did_you_mean
from distflow.flow.resolve import Source, find_named, find_source
from distflow.flow.reward_form import OWN_KEYS, REWARD, find_signature, form_complaint, mistaken_form
from distflow.flow.step import within
from distflow.flow.step_declaration import (
    COMPUTED,
    REQUIRED,
    Parameters,
    StepDeclaration,
    read_declaration,
    read_parameters,
)

_ACCEPTS: Mapping[str, tuple[type, ...]] = {
    "int": (int,),
    "float": (int, float),
    "str": (str,),
    "bool": (bool,),
    "None": (type(None),),
    "Sequence": (list, tuple),
    "list": (list,),
    "Mapping": (Mapping,),
    "dict": (dict,),
}
_WORDS = {
    "int": "a whole number",
    "float": "a number",
    "str": "text",
    "bool": "true or false",
    "None": "null",
    **dict.fromkeys(("Sequence", "list"), "a list"),
    **dict.fromkeys(("Mapping", "dict"), "a mapping"),
}
_ITEMS = {"int": "whole numbers", "float": "numbers", "str": "texts"}
_FILE_PLUGIN = re.compile(r"^/.+\.py:[A-Za-z_]\w*$")
_PLUGIN = re.compile(r"^[A-Za-z_][\w.]*:[A-Za-z_]\w*$")

Complaint = tuple[str, str, str]
"""Setting, message and hint."""


def merged(given: Mapping[str, Any], parameters: Parameters) -> dict[str, Any]:
    """The settings of a call, as far as they can be known: literal defaults, and the values given."""
    defaults = {k: v for k, v in parameters.settings.items() if v is not REQUIRED and v is not COMPUTED}
    return {**defaults, **given}


def complaints(
    given: Mapping[str, Any],
    parameters: Parameters,
    plugins: Mapping[str, Sequence[str]],
    choices: Mapping[str, Sequence[str]],
    ranges: Mapping[str, str] = MappingProxyType({}),
    functions: Sequence[str] = (),
) -> list[Complaint]:
    """Unknown, missing and ill-typed settings, numbers out of range, unknown choices and unsuitable plug-ins.

    `plugins`, `choices`, `ranges`: as `@step` declares them; `functions`: settings whose function is checked elsewhere.
    """
    found: list[Complaint] = []
    for name, value in given.items():
        if name not in parameters.settings:
            if not parameters.open_ended:
                found.append((name, "unknown setting", _known_setting(name, parameters.settings)))
        elif not _fits(value, parameters.annotations.get(name)):
            expected = in_words(parameters.annotations[name])
            hint = f"write a value of that kind{_example(parameters.settings[name])}"
            hint += ", or leave it out" if value is None and parameters.settings[name] is not REQUIRED else ""
            found.append((name, f"expected {expected}, got {quoted(value)}", hint))
        elif name in ranges and _is_number(value) and not within(value, ranges[name]):
            found.append((name, f"{value} is not allowed", f"expected a number {ranges[name]}"))
        elif name in choices and isinstance(value, str) and not (name in (*plugins, *functions) and is_plugin(value)):
            found += _choice_complaints(name, value, choices[name], plugin=name in (*plugins, *functions))
            found += _lacking(name, value, plugins, choices[name])
        elif name not in functions:
            found += _plugin_complaints(name, value, plugins, choices)
    for name, default in parameters.settings.items():
        if default is REQUIRED and name not in given:
            found.append((name, "required, but not given", f"add {name}: … to its `with`"))
    return found


def _example(default: Any) -> str:
    """The default of a setting that is a list or a mapping, which may be hard to guess."""
    return f", such as {json.dumps(default)}" if isinstance(default, list | tuple | dict) and default else ""


def _known_setting(name: str, known: Mapping[str, Any]) -> str:
    """Suggest what was meant: a word of another tool, which is no typo of a setting here, or such a typo."""
    return meant(name) or did_you_mean(name, known)


def is_plugin(value: object) -> bool:
    """Whether a value is text that names something in a Python file or module."""
    return isinstance(value, str) and bool(_FILE_PLUGIN.match(value) or _PLUGIN.match(value))


def is_file_plugin(value: str) -> bool:
    """Whether a text reads `/path/file.py:name`."""
    return bool(_FILE_PLUGIN.match(value))


def in_words(annotation: str) -> str:
    """`Sequence[float] | None` as `a list of numbers, or null`."""
    return ", or ".join(map(_part_in_words, _alternatives(_parsed(annotation))))


def _part_in_words(kind: ast.expr) -> str:
    outer, inside = _taken_apart(kind)
    items = [_ITEMS.get(ast.unparse(part)) for part in inside]
    word, (first, *rest) = _WORDS[outer], items or [None]
    if rest and first and rest[0]:
        return f"{word} of {first} to {rest[0]}"
    return f"{word} of {first}" if first and not rest else word


def _parsed(annotation: str) -> ast.expr:
    return ast.parse(annotation, mode="eval").body


def _alternatives(kind: ast.expr) -> Iterator[ast.expr]:
    """The kinds of a union."""
    if isinstance(kind, ast.BinOp):
        yield from (*_alternatives(kind.left), *_alternatives(kind.right))
    else:
        yield kind


def _taken_apart(kind: ast.expr) -> tuple[str, Sequence[ast.expr]]:
    """The name of a kind without its module, and what stands in its brackets."""
    outer = kind.value if isinstance(kind, ast.Subscript) else kind
    inside = kind.slice if isinstance(kind, ast.Subscript) else ast.Tuple([])
    return ast.unparse(outer).rpartition(".")[2], inside.elts if isinstance(inside, ast.Tuple) else [inside]


def _fits(value: object, annotation: str | None) -> bool:
    """False only if the annotation is a union of known types and the value has none of them, or items of another."""
    return annotation is None or _is_of(value, _parsed(annotation))


def _is_of(value: object, kind: ast.expr) -> bool:
    kinds = [*_alternatives(kind)]
    if not all(_taken_apart(one)[0] in _ACCEPTS for one in kinds):
        return True
    return any(_is_of_one(value, *_taken_apart(one)) for one in kinds)


def _is_of_one(value: object, outer: str, inside: Sequence[ast.expr]) -> bool:
    if isinstance(value, bool):
        return outer == "bool"
    if not isinstance(value, _ACCEPTS[outer]):
        return False
    if isinstance(value, Mapping) and len(inside) == 2:
        # A key of YAML may be written as a text.
        return all(_is_of(_as_number(key), inside[0]) and _is_of(item, inside[1]) for key, item in value.items())
    if isinstance(value, list | tuple) and inside:
        return all(_is_of(item, inside[0]) for item in value)
    return True


def _as_number(key: object) -> object:
    return int(key) if isinstance(key, str) and re.fullmatch(r"-?\d+", key) else key


def _is_number(value: object) -> TypeGuard[float]:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _choice_complaints(name: str, value: str, choices: Sequence[str], *, plugin: bool) -> list[Complaint]:
    names = [choice.rpartition(":")[2] for choice in choices]
    if any(_is_choice(value, choice) for choice in names):
        return []
    function = ", or a function as module:name or ./file.py:name" if plugin else ""
    return [(name, f"there is no {quoted(value)}", did_you_mean(value, names) + function)]


def _lacking(
    name: str, value: str, plugins: Mapping[str, Sequence[str]], choices: Sequence[str]
) -> Iterator[Complaint]:
    """Settings without a default of a shipped function that is named alone."""
    call = next((choice for choice in choices if ":" in choice and choice.rpartition(":")[2] == value), None)
    node = None if call is None or name not in plugins else find_source(call).node
    if isinstance(node, ast.FunctionDef):
        for setting, default in read_parameters(node).settings.items():
            if default is REQUIRED:
                hint = f"write it with its settings: {{{value}: {{{setting}: …}}}}"
                yield name, f"{value} needs the setting {setting!r}", hint


def _is_choice(value: str, choice: str) -> bool:
    if not choice.endswith("/N"):
        return value == choice
    number = value.removeprefix(choice[:-1])
    return number != value and bool(re.fullmatch("0*[1-9][0-9]{0,14}", number))


def _plugin_complaints(
    name: str, value: object, plugins: Mapping[str, Sequence[str]], choices: Mapping[str, Sequence[str]]
) -> list[Complaint]:
    declared = name in plugins
    if declared and isinstance(value, Mapping):
        return _component_complaints(name, value, plugins[name], choices.get(name, ()))
    if not isinstance(value, str) or not (is_file_plugin(value) or (declared and is_plugin(value))):
        return []
    try:
        if (
            declared
            and tuple(plugins[name]) == REWARD
            and (found := _reward_complaints(name, name, value, {})) is not None
        ):
            return found
        source = find_source(value)
    except PluginError as error:
        return [(name, str(error), "correct the file or the name")]
    if not declared or isinstance(source.node, ast.ClassDef):
        return []
    parameters = read_parameters(source.node)
    if parameters.open_ended or _takes(parameters, len(plugins[name])):
        return []
    got = ", ".join([*parameters.positional, *(["*", *parameters.settings] if parameters.settings else [])])
    hint = f"expected def {source.node.name}({', '.join(plugins[name])})"
    return [(name, f"{source.where}: {source.node.name!r} has the wrong signature ({got})", hint)]


def functions_of(value: object) -> dict[str, tuple[str, tuple[str, ...]]]:
    """The plug-ins that a setting names, with the settings that each gets, by what follows the setting's key.

    One as text, or several by name: `{NAME: {function: …, weight: …, …}}`.
    """
    if isinstance(value, str):
        return {"": (value, ())} if is_plugin(value) else {}
    given = value.items() if isinstance(value, Mapping) else ()
    named = {name: part for name, part in given if _names_function(part) and is_plugin(part["function"])}
    own = {name: tuple(key for key in part if key not in OWN_KEYS) for name, part in named.items()}
    return {f".{name}.function": (part["function"], own[name]) for name, part in named.items()}


def chosen_shipped(value: object, choices: Sequence[str]) -> list[str]:
    """Find which of the shipped functions, `module:name` in `choices`, a setting names: one as text, or several by
    name."""
    given: Mapping[Any, Any] = value if isinstance(value, Mapping) else {value: None}
    names = [part["function"] if _names_function(part) else name for name, part in given.items()]
    return [call for call in choices if call in names or call.rpartition(":")[2] in names]


def _names_function(part: object) -> bool:
    return isinstance(part, Mapping) and "function" in part


def _component_complaints(
    setting: str, given: Mapping[str, Any], positional: Sequence[str], choices: Sequence[str]
) -> list[Complaint]:
    """Of several functions by name, each with `function` (by default its name), `weight`, and settings of its own."""
    if not given:
        return [(setting, "no function is named", "for example {correct: {function: exact_match}}")]
    found: list[Complaint] = []
    for name, part in given.items():
        key = f"{setting}.{name}"
        if not (isinstance(part, Mapping) or _is_number(part)):
            found.append((key, f"expected a mapping, got {quoted(part)}", "for example {function: math, weight: 1.0}"))
            continue
        own = dict(part) if isinstance(part, Mapping) else {"weight": part}
        function, weight = own.pop("function", name), own.pop("weight", 1.0)
        if not _is_number(weight):
            found.append((f"{key}.weight", f"expected a number, got {quoted(weight)}", "write a number"))
        at = f"{key}.function" if _names_function(part) else key
        found += _function_complaints(key, at, function, own, (positional, choices))
    return found


def _function_complaints(
    key: str, at: str, function: object, own: Mapping[str, Any], may_be: tuple[Sequence[str], Sequence[str]]
) -> list[Complaint]:
    """One function, which `at` names, and its settings; `may_be`: its positional parameters, and names it may have."""
    positional, choices = may_be
    shipped = {call.rpartition(":")[2]: call for call in choices}
    if not isinstance(function, str) or not (function in shipped or is_plugin(function)):
        hint = f"{did_you_mean(str(function), shipped)}, or a function as module:name or ./file.py:name"
        return [(at, f"there is no {quoted(function)}", hint)]
    call = shipped.get(function, function)
    try:
        if tuple(positional) == REWARD and (found := _reward_complaints(key, at, call, own)) is not None:
            return found
        source = find_source(call)
    except PluginError as error:
        return [(at, str(error), "correct the file or the name")]
    if isinstance(source.node, ast.ClassDef):
        return []
    parameters = read_parameters(source.node)
    if not parameters.open_ended and len(parameters.positional) != len(positional):
        hint = f"expected def {source.node.name}({', '.join(positional)}, *, setting=default, …)"
        return [(at, f"{source.where}: {source.node.name!r} has the wrong signature", hint)]
    return [(f"{key}.{name}", message, hint) for name, message, hint in complaints(own, parameters, {}, {})]


def _reward_complaints(key: str, at: str, call: str, own: Mapping[str, Any]) -> list[Complaint] | None:
    """Of a reward function that is called by keyword, or that the file makes; None for one that gets a sample."""
    found = find_signature(call)
    sample = found is None or found.form == "sample"
    wrong = None if found is None else (mistaken_form(found, own) if sample else form_complaint(found, own))
    if wrong is None:
        return None if sample and isinstance(find_named(call), Source) else []
    setting, message, hint = wrong
    return [(f"{key}.{setting}" if setting else at, f"{find_named(call).where}: {message}", hint)]


def _takes(parameters: Parameters, positional: int) -> bool:
    """Whether it can be called with so many positional arguments; further parameters need defaults."""
    return len(parameters.positional) == positional and REQUIRED not in parameters.settings.values()


def explain_setting(step: str, name: str) -> str:
    """Describe a setting of a step of the shipped flows, for each function that one of them calls under this name.

    Raises RecipeError for a step that none of them has, and for a setting that none of its functions has.
    """
    key, found, known = f"flow.steps.{step}.with.{name}", [], dict[str, None]()
    for call in shipped_steps().get(step, ()):
        declaration = read_declaration(call)
        settings = declaration.parameters.settings
        known |= dict.fromkeys(settings)
        if name in settings:
            found += [f"{key}, of {call}", *_about(declaration, name)]
    if not known:
        message, hint = f"no shipped flow has a step {step!r}", did_you_mean(step, list(shipped_steps()))
        raise RecipeError([Problem("command line", key, message, f"{hint}; for steps of your own see their source")])
    if not found:
        raise RecipeError([Problem("command line", key, "there is no such setting", did_you_mean(name, list(known)))])
    return "\n".join(found)


def _about(declaration: StepDeclaration, name: str) -> Iterator[str]:
    spec, parameters = declaration.spec, declaration.parameters
    document = ast.get_docstring(find_source(declaration.call).node) or ""
    sentences = re.split(r"(?<=[.;])\s+", " ".join(document.split()))
    yield from (f"  {sentence}" for sentence in sentences if re.search(rf"\b{re.escape(name)}\b", sentence))
    yield f"  type: {parameters.annotations.get(name, 'any')}"
    if name in spec.choices:
        yield f"  one of: {', '.join(choice.rpartition(':')[2] for choice in spec.choices[name])}"
    if name in spec.ranges:
        yield f"  range: {spec.ranges[name]}"
    if name in spec.only_with:
        yield f"  of use only with: {spec.only_with[name]}"
    default = parameters.settings[name]
    yield "  required" if default is REQUIRED else f"  default: {default}"
