"""A Python script for TRL, as its syntax tree tells: it is never run."""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class Expression:
    """A value that only running the script would tell."""

    text: str

    def __str__(self) -> str:
        return self.text


@dataclass(slots=True)
class Script:
    """What a script gives a trainer and its configuration, and the names by which it does."""

    given: dict[str, Any] = field(default_factory=dict)
    """By argument."""
    names: dict[str, ast.expr] = field(default_factory=dict)
    """What names are given, as the trainer is made; what they held before has names with `ˑ`."""
    imported: dict[str, str] = field(default_factory=dict)
    """`module:name` by the names that it imports; a module has no colon."""
    defined: set[str] = field(default_factory=set)
    """Its functions and classes."""
    own: dict[str, Any] = field(default_factory=dict)
    """Options that it defines itself, with their defaults."""
    parses: bool = False
    """It takes options for TRL's configuration from the command line."""
    unread: dict[str, str] = field(default_factory=dict)
    """Keys of which the script does not tell what they are, with what is to be said."""
    kinds: dict[str, str] = field(default_factory=dict)
    """The trainer or configuration of TRL that a name stands for."""
    defaults: dict[str, list[tuple[str | None, ast.expr]]] = field(default_factory=dict)
    """Those of its own classes of configurations."""
    parsed: bool = True
    """The configuration of its trainer is parsed of the command line."""
    several: list[int] = field(default_factory=list)
    """The lines of its trainers, or of its configurations without one, where it has more than one."""


ORDER = {
    "GRPOTrainer": ("model", "reward_funcs", "args", "train_dataset", "eval_dataset", "processing_class"),
    "GRPOConfig": ("output_dir",),
}
"""Arguments by position."""
_PARSERS = ("TrlParser", "HfArgumentParser")
PARSER_DEFAULTS: dict[str, Any] = {"dataset_name": None, "dataset_config": None, "dataset_train_split": "train"}
PARSER_DEFAULTS |= {"dataset_test_split": "test", "dataset_streaming": False, "eval_strategy": "no", "dtype": None}
PARSER_DEFAULTS |= {"model_revision": "main", "attn_implementation": None, "use_peft": False, "load_in_4bit": False}
"""Options that TRL's own dataclasses add, with their defaults."""


def read_definitions(found: Script, tree: ast.Module) -> None:
    """Read what does not depend on the order of the statements."""
    for node in ast.walk(tree):
        _read_definition(found, node)
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef) and node.name in found.kinds:
            _read_subclass(found, node)


def called(node: ast.expr) -> str:
    """Return the last name of what is called."""
    return ast.unparse(node).rpartition(".")[2]


def kind_of(found: Script, call: ast.Call) -> str:
    """Tell the trainer or configuration that is called; empty: none."""
    name = called(call.func)
    return found.kinds.get(name, name if name in ORDER else "")


def _read_definition(found: Script, node: ast.AST) -> None:
    """Read what is imported and defined, and which options are parsed."""
    match node:
        case ast.ImportFrom(module=str(module), names=aliases, level=0):
            found.imported |= {alias.asname or alias.name: f"{module}:{alias.name}" for alias in aliases}
            found.kinds |= {alias.asname or alias.name: alias.name for alias in aliases if alias.name in ORDER}
        case ast.Import(names=aliases):
            found.imported |= {alias.asname or alias.name: alias.name for alias in aliases}
        case ast.ClassDef(name=name, bases=bases):
            found.defined.add(name)
            above = [found.kinds.get(called(base), called(base)) for base in bases]
            if kind := next((one for one in above if one in ORDER), ""):
                found.kinds[name] = kind
            elif any("dataclass" in ast.unparse(one) for one in node.decorator_list):
                found.own |= {key: value_of(value, {}) for key, value in _fields(node)}
        case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name):
            found.defined.add(name)
        case ast.Call():
            _read_parser(found, node)


def _read_parser(found: Script, node: ast.Call) -> None:
    """Read a parser of TRL's options, or an option of the script's own."""
    found.parses |= called(node.func) in _PARSERS
    flags = [one.value for one in node.args if isinstance(one, ast.Constant) and isinstance(one.value, str)]
    long = [flag for flag in flags if flag.startswith("--")]
    if called(node.func) == "add_argument" and long:
        own = {str(one.arg): value_of(one.value, {}) for one in node.keywords}
        usual = own.get("default", False if own.get("action") == "store_true" else None)
        found.own[str(own.get("dest", long[0][2:].replace("-", "_")))] = usual


def _fields(node: ast.ClassDef) -> Iterator[tuple[str, ast.expr]]:
    """Yield the fields of a dataclass that have a default, with that."""
    for one in node.body:
        if isinstance(one, ast.AnnAssign) and isinstance(one.target, ast.Name) and one.value is not None:
            value = one.value
            if isinstance(value, ast.Call) and called(value.func) == "field":
                defaults = [word.value for word in value.keywords if word.arg == "default"]
                value = defaults[0] if defaults else value
            yield one.target.id, value


def _read_subclass(found: Script, node: ast.ClassDef) -> None:
    """Read the defaults of a configuration of the script's own, and what its trainer does in its own way."""
    for one in node.body:
        if isinstance(one, ast.FunctionDef | ast.AsyncFunctionDef):
            key = f"{node.name}.{one.name}"
            found.given[key] = Expression("…")
            found.unread[key] = f"a method of the script's {found.kinds[node.name]}: steps or a loss of your own"
            found.unread[key] += " (docs/custom-steps.md)"
    above = [one for base in node.bases for one in found.defaults.get(called(base), ())]
    found.defaults[node.name] = [*above, *_fields(node)]


def value_of(node: ast.expr, names: Mapping[str, ast.expr], depth: int = 0) -> Any:
    """Return the literal that an expression is, or a name of the script stands for; else the expression."""
    try:
        return ast.literal_eval(node)
    except (ValueError, TypeError):
        if isinstance(node, ast.BinOp) and depth < 8:
            number = _computed(node, names, depth)
            return Expression(ast.unparse(node)) if number is None else number
        if isinstance(node, ast.Name) and node.id in names and depth < 8:
            found = value_of(names[node.id], names, depth + 1)
            if not isinstance(found, Expression):
                return found
        return Expression(ast.unparse(node))


_SIGNS: Mapping[type[ast.operator], Callable[[Any, Any], Any]] = {
    **{ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul},
    **{ast.FloorDiv: operator.floordiv, ast.Div: operator.truediv},
}


def _computed(node: ast.BinOp, names: Mapping[str, ast.expr], depth: int) -> int | float | None:
    """Compute with numbers that the script names; None where they are none."""
    sides = [value_of(one, names, depth + 1) for one in (node.left, node.right)]
    sign = _SIGNS.get(type(node.op))
    if sign is None or not all(isinstance(one, int | float) for one in sides):
        return None
    try:
        number: int | float = sign(*sides)
    except (ZeroDivisionError, OverflowError):
        return None
    return number
