"""Configurations of other tools, from their files: a TRL script, by its syntax tree alone, and verl's overrides."""

from __future__ import annotations

import ast
import re
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from distflow.errors import UserError


@dataclass(frozen=True, slots=True)
class Expression:
    """A value that only running the script would tell."""

    text: str

    def __str__(self) -> str:
        return self.text


@dataclass(frozen=True, slots=True)
class Foreign:
    """A configuration of another tool."""

    tool: str
    given: Mapping[str, Any]
    """By key."""
    file: Path
    names: Mapping[str, ast.expr] = field(default_factory=dict)
    """Of a script, what its top-level names are given."""
    imported: Mapping[str, str] = field(default_factory=dict)
    """Of a script, `module:name` by the names that it imports."""


def read_foreign(file: Path) -> Foreign:
    """Read the configuration in a file, which is never executed. Raises UserError if there is none."""
    try:
        text = file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{file}: cannot be read: {error} — give a TRL script, or verl's overrides") from error
    found = _script(file, text) if file.suffix == ".py" else Foreign("verl", dict(_overrides(text)), file)
    if not found.given:
        raise UserError(
            f"{file}: nothing to convert — expected a Python script (.py) that calls GRPOConfig(…) or GRPOTrainer(…), "
            "or a list or shell script with verl's overrides, such as data.train_batch_size=256"
        )
    return found


def _script(file: Path, text: str) -> Foreign:
    try:
        tree = ast.parse(text, filename=str(file))
    except SyntaxError as error:
        raise UserError(f"{file}:{error.lineno}: {error.msg} — expected a Python script") from error
    names: dict[str, ast.expr] = {}
    imported: dict[str, str] = {}
    for node in ast.walk(tree):
        match node:
            case ast.Assign(targets=[ast.Name(id=name)], value=value):
                names[name] = value
            case ast.ImportFrom(module=str(module), names=aliases, level=0):
                imported |= {alias.asname or alias.name: f"{module}:{alias.name}" for alias in aliases}
    given: dict[str, Any] = {}
    for node in ast.walk(tree):
        called = ast.unparse(node.func).rpartition(".")[2] if isinstance(node, ast.Call) else ""
        if isinstance(node, ast.Call) and called in ("GRPOConfig", "GRPOTrainer"):
            for keyword in node.keywords:
                if keyword.arg is None:
                    given[f"**{ast.unparse(keyword.value)}"] = Expression(ast.unparse(keyword.value))
                elif keyword.arg != "args":
                    given[keyword.arg] = value_of(keyword.value, names)
            given |= {f"{called} argument {n}": Expression(ast.unparse(one)) for n, one in enumerate(node.args)}
    return Foreign("TRL", given, file, names, imported)


def value_of(node: ast.expr, names: Mapping[str, ast.expr], depth: int = 0) -> Any:
    """The literal that an expression is, or a name of the script stands for; else the expression."""
    try:
        return ast.literal_eval(node)
    except ValueError:
        if isinstance(node, ast.Name) and node.id in names and depth < 8:
            found = value_of(names[node.id], names, depth + 1)
            if not isinstance(found, Expression):
                return found
        return Expression(ast.unparse(node))


_OVERRIDE = re.compile(r"^[+~]{0,2}([A-Za-z_]\w*(?:[.@/][\w@/]+)+)=(.*)$", re.S)
_VARIABLE = re.compile(r"^(?:export\s+)?([A-Za-z_]\w*)=(.*)$", re.S)
_USE = re.compile(r"\$(?:(\w+)|\{(\w+)(?::?-([^}]*))?\})")


def _overrides(text: str) -> Iterator[tuple[str, Any]]:
    """Yield the keys and values of overrides, with the variables that the script itself gives."""
    variables: dict[str, str] = {}

    def filled(value: str) -> str:
        def use(found: re.Match[str]) -> str:
            name = found[1] or found[2]
            return variables.get(name, found[3] if found[3] is not None else f"${{oc.env:{name}}}")

        return _USE.sub(use, value)

    for line in text.replace("\\\n", " ").splitlines():
        try:
            words = shlex.split(line, comments=True)
        except ValueError:
            words = line.split()
        for word in words:
            if (override := _OVERRIDE.match(word)) is not None:
                yield override[1], _plain(filled(override[2]))
            elif (variable := _VARIABLE.match(word)) is not None:
                variables[variable[1]] = filled(variable[2])


def _plain(text: str) -> Any:
    """The value of an override, as Hydra would read it."""
    try:
        value = yaml.safe_load(text)
    except yaml.YAMLError:
        return text
    if isinstance(value, str) and re.fullmatch(r"[-+]?\d+(\.\d*)?[eE][-+]?\d+", value):
        return float(value)
    return value
