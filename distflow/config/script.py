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
    """What names are given; where a name is given what is made of itself, with that in its place."""
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
    parsed: set[str] = field(default_factory=set)
    """Names of what options are parsed into."""
    kinds: dict[str, str] = field(default_factory=dict)
    """The trainer or configuration of TRL that a name stands for."""
    added: dict[str, list[tuple[str, ast.expr]]] = field(default_factory=dict)
    """What names that hold dictionaries or configurations are given later, by key."""


_ORDER = {
    "GRPOTrainer": ("model", "reward_funcs", "args", "train_dataset", "eval_dataset", "processing_class"),
    "GRPOConfig": ("output_dir",),
}
"""Arguments by position."""
_PARSERS = ("TrlParser", "HfArgumentParser")
_OF_PARSER: dict[str, Any] = {"dataset_name": None, "dataset_config": None, "dataset_train_split": "train"}
_OF_PARSER |= {"dataset_test_split": "test", "dataset_streaming": False, "eval_strategy": "no", "dtype": None}
_OF_PARSER |= {"model_revision": "main", "attn_implementation": None, "use_peft": False, "load_in_4bit": False}
"""Options that TRL's own dataclasses add, with their defaults."""


def read_script(tree: ast.Module, options: Mapping[str, Any]) -> Script:
    """Read a script that is given these options on its command line."""
    found = Script()
    for node in ast.walk(tree):
        _read_definition(found, node)
    known = {**(_OF_PARSER if found.parses else {}), **found.own, **options}
    tree = _Filled(found.parsed, known).visit(tree)
    of_classes = {id(one) for node in ast.walk(tree) if isinstance(node, ast.ClassDef) for one in node.body}
    for node in ast.walk(tree):
        if id(node) not in of_classes:
            _read_assignment(found, node)
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef) and node.name in found.kinds:
            _read_subclass(found, node)
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and (kind := _kind(found, node)):
            found.given |= _arguments(found, node, kind)
    configured = [name for name, value in found.names.items() if isinstance(value, ast.Call) and _kind(found, value)]
    for name in (*configured, *(found.parsed if found.parses else ())):
        found.given |= {key: value_of(value, found.names) for key, value in found.added.get(name, ())}
    return found


def _called(node: ast.expr) -> str:
    return ast.unparse(node).rpartition(".")[2]


def _kind(found: Script, call: ast.Call) -> str:
    """Tell the trainer or configuration that is called; empty: none."""
    name = _called(call.func)
    return found.kinds.get(name, name if name in _ORDER else "")


def _read_definition(found: Script, node: ast.AST) -> None:
    """Read what is imported and defined, and which options are parsed."""
    match node:
        case ast.ImportFrom(module=str(module), names=aliases, level=0):
            found.imported |= {alias.asname or alias.name: f"{module}:{alias.name}" for alias in aliases}
            found.kinds |= {alias.asname or alias.name: alias.name for alias in aliases if alias.name in _ORDER}
        case ast.Import(names=aliases):
            found.imported |= {alias.asname or alias.name: alias.name for alias in aliases}
        case ast.ClassDef(name=name, bases=bases):
            found.defined.add(name)
            above = [found.kinds.get(_called(base), _called(base)) for base in bases]
            if kind := next((one for one in above if one in _ORDER), ""):
                found.kinds[name] = kind
            elif any("dataclass" in ast.unparse(one) for one in node.decorator_list):
                found.own |= {key: value_of(value, {}) for key, value in _fields(node)}
        case ast.FunctionDef(name=name, args=arguments) | ast.AsyncFunctionDef(name=name, args=arguments):
            found.defined.add(name)
            found.parsed |= {one.arg for one in arguments.args if one.arg.endswith("args")}
        case ast.Call():
            _read_parser(found, node)
        case ast.Assign(targets=[target], value=ast.Call(func=function)) if _called(function).startswith("parse_"):
            found.parsed |= {one.id for one in ast.walk(target) if isinstance(one, ast.Name)}


def _read_parser(found: Script, node: ast.Call) -> None:
    """Read a parser of TRL's options, or an option of the script's own."""
    found.parses |= _called(node.func) in _PARSERS
    flags = [one.value for one in node.args if isinstance(one, ast.Constant) and isinstance(one.value, str)]
    long = [flag for flag in flags if flag.startswith("--")]
    if _called(node.func) == "add_argument" and long:
        own = {str(one.arg): value_of(one.value, {}) for one in node.keywords}
        usual = own.get("default", False if own.get("action") == "store_true" else None)
        found.own[str(own.get("dest", long[0][2:].replace("-", "_")))] = usual


def _fields(node: ast.ClassDef) -> Iterator[tuple[str, ast.expr]]:
    """Yield the fields of a dataclass that have a default, with that."""
    for one in node.body:
        if isinstance(one, ast.AnnAssign) and isinstance(one.target, ast.Name) and one.value is not None:
            value = one.value
            if isinstance(value, ast.Call) and _called(value.func) == "field":
                defaults = [word.value for word in value.keywords if word.arg == "default"]
                value = defaults[0] if defaults else value
            yield one.target.id, value


class _Filled(ast.NodeTransformer):
    """The values of options in the places where a script uses them."""

    def __init__(self, parsed: set[str], known: Mapping[str, Any]) -> None:
        self._parsed, self._known = parsed, known

    def visit_Attribute(self, node: ast.Attribute) -> ast.expr:
        """Replace what is read of parsed options."""
        self.generic_visit(node)
        is_option = isinstance(node.value, ast.Name) and node.value.id in self._parsed and node.attr in self._known
        value = self._known.get(node.attr)
        if not is_option or not isinstance(node.ctx, ast.Load) or isinstance(value, Expression):
            return node
        return ast.copy_location(ast.parse(repr(value), mode="eval").body, node)

    def visit_Call(self, node: ast.Call) -> ast.expr:
        """Replace what TRL makes of the options for quantized models."""
        self.generic_visit(node)
        if _called(node.func) != "get_quantization_config" or "load_in_4bit" not in self._known:
            return node
        made = "BitsAndBytesConfig(load_in_4bit=True)" if self._known["load_in_4bit"] else "None"
        return ast.copy_location(ast.parse(made, mode="eval").body, node)

    def visit_IfExp(self, node: ast.IfExp) -> ast.expr:
        """Choose, where the options tell."""
        self.generic_visit(node)
        match node.test:
            case ast.Compare(left=ast.Constant(value=left), ops=[ast.Eq() | ast.NotEq() as how], comparators=[right]):
                if isinstance(right, ast.Constant):
                    return node.body if (left == right.value) == isinstance(how, ast.Eq) else node.orelse
            case ast.Constant(value=value):
                return node.body if value else node.orelse
        return node


class _Replaced(ast.NodeTransformer):
    """An expression with what a name stood for in its place."""

    def __init__(self, name: str, former: ast.expr) -> None:
        self._name, self._former = name, former

    def visit_Name(self, node: ast.Name) -> ast.expr:
        """Replace the name."""
        return self._former if node.id == self._name else node


def _read_assignment(found: Script, node: ast.AST) -> None:
    match node:
        case ast.Assign(targets=[target], value=value) | ast.AnnAssign(target=target, value=ast.expr() as value):
            _assign(found, target, value)
        case ast.AugAssign(target=ast.Name() as target, op=ast.Add(), value=value):
            former = ast.Name(target.id, ast.Load())
            _assign(found, target, ast.BinOp(former, ast.Add(), value))
        case ast.Call(func=ast.Attribute(value=ast.Name(id=name), attr="update"), args=places, keywords=words):
            added = found.added.setdefault(name, [])
            for one in (*places, *(word.value for word in words if word.arg is None)):
                added += _entries(found, one) or []
            added += [(word.arg, word.value) for word in words if word.arg is not None]


def _assign(found: Script, target: ast.expr, value: ast.expr) -> None:
    match target:
        case ast.Name(id=name):
            former = found.names.get(name)
            inner = {one.id for one in ast.walk(value) if isinstance(one, ast.Name)}
            if former is not None and name in inner:
                copied = ast.parse(ast.unparse(value), mode="eval").body
                value = _Replaced(name, former).visit(copied)
            found.names[name] = value
        case ast.Tuple(elts=targets) | ast.List(elts=targets):
            parts = value.elts if isinstance(value, ast.Tuple | ast.List) else None
            for number, one in enumerate(targets):
                if parts is None or len(parts) != len(targets):
                    _assign(found, one, ast.Subscript(value, ast.Constant(number), ast.Load()))
                else:
                    _assign(found, one, parts[number])
        case ast.Subscript(value=ast.Name(id=name), slice=ast.Constant(value=str(key))):
            found.added.setdefault(name, []).append((key, value))
        case ast.Attribute(value=ast.Name(id=name), attr=key):
            found.added.setdefault(name, []).append((key, value))


def _read_subclass(found: Script, node: ast.ClassDef) -> None:
    """Read the defaults of a configuration of the script's own, and what its trainer does in its own way."""
    for one in node.body:
        if isinstance(one, ast.FunctionDef | ast.AsyncFunctionDef):
            key = f"{node.name}.{one.name}"
            found.given[key] = Expression("…")
            found.unread[key] = f"a method of the script's {found.kinds[node.name]}: steps or a loss of your own"
            found.unread[key] += " (docs/custom-steps.md)"
    if found.kinds[node.name] == "GRPOConfig":
        found.given |= {key: value_of(value, found.names) for key, value in _fields(node)}


def _arguments(found: Script, node: ast.Call, kind: str) -> dict[str, Any]:
    """Return the arguments of a call of a trainer or its configuration, by name."""
    ordered = _ORDER[kind]
    given = {
        ordered[number] if number < len(ordered) else f"{kind} argument {number}": value_of(one, found.names)
        for number, one in enumerate(node.args)
    }
    for keyword in node.keywords:
        if keyword.arg is not None:
            given[keyword.arg] = value_of(keyword.value, found.names)
        elif (entries := _entries(found, keyword.value)) is not None:
            given |= {key: value_of(value, found.names) for key, value in entries}
        else:
            text = f"**{ast.unparse(keyword.value)}"
            given[text] = Expression(text[2:])
            found.unread[text] = "which arguments these are only the script tells: write what they are here"
    given.pop("args", None)
    return given


def _entries(found: Script, node: ast.expr, depth: int = 0) -> list[tuple[str, ast.expr]] | None:
    """Return what a dictionary holds, with what it is given later; None where the script computes it."""
    later: list[tuple[str, ast.expr]] = []
    while isinstance(node, ast.Name) and node.id in found.names and depth < 8:
        later = [*found.added.get(node.id, ()), *later]
        node, depth = found.names[node.id], depth + 1
    pairs: list[tuple[str | None, ast.expr]]
    if isinstance(node, ast.Dict):
        keys = [None if key is None else str(value_of(key, found.names)) for key in node.keys]
        pairs = list(zip(keys, node.values, strict=True))
    elif isinstance(node, ast.Call) and _called(node.func) == "dict":
        pairs = [(None, one) for one in node.args] + [(one.arg, one.value) for one in node.keywords]
    else:
        return None
    entries: list[tuple[str, ast.expr]] = []
    for key, value in pairs:
        below = [(key, value)] if key is not None else _entries(found, value, depth + 1)
        if below is None or depth > 8:
            return None
        entries += below
    return entries + later


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
