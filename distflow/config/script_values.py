"""What the names of a Python script hold, as it is read in its order, and the objects that it edits meanwhile."""

from __future__ import annotations

import ast
import copy
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from distflow.config.script import ORDER, PARSER_DEFAULTS, Expression, Script, value_of
from distflow.config.trl_keys import TRL_DEFAULTS

Pairs = list[tuple[str | None, ast.expr]]
"""Keys and values of a dictionary or a configuration; None: what `**` adds."""


MARK = "ˑ"
"""It numbers what a name has held, one after another."""


_MARKS = re.compile(rf"{MARK}(?:\d+|by_line\(\d+\))")


BY_LINE = f"{MARK}by_line"


PARSED = f"parsed{MARK}options"


METHODS = (
    "get",
    "items",
    "keys",
    "values",
    "copy",
    "index",
    "count",
    "to_dict",
    "to_json_string",
    "to_sanitized_dict",
)
"""Methods that change nothing."""


CHANGES = ("append", "extend", "insert", "remove", "pop", "clear", "sort", "reverse", "update", "setdefault")


def plain(text: str) -> str:
    """Write an expression with the names that the script has."""
    return _MARKS.sub("", text)


def unknown(name: str, line: int) -> ast.expr:
    """Return what stands for a value that a line may set."""
    return ast.Call(ast.Name(f"{name}{BY_LINE}", ast.Load()), [ast.Constant(line)], [])


def is_unknown(node: ast.expr | None) -> bool:
    """Tell the value of a name that a line may or may not set."""
    return isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id.endswith(BY_LINE)


def unknowns(node: ast.AST, names: Mapping[str, ast.expr], depth: int = 0) -> Iterator[str]:
    """Yield what of an expression is not known, with the line that may set it."""
    for one in ast.walk(node):
        if isinstance(one, ast.Call) and is_unknown(one):
            yield f"{ast.unparse(one.func).removesuffix(BY_LINE)}, which line {ast.unparse(one.args[0])} may set,"
        elif isinstance(one, ast.Name) and one.id in names and depth < 8:
            yield from unknowns(names[one.id], names, depth + 1)


def pairs_of(node: ast.expr | None) -> Pairs | None:
    """Return what a dictionary or a configuration holds; None for anything else."""
    match node:
        case ast.Dict(keys=keys, values=values):
            pairs: Pairs = []
            for key, value in zip(keys, values, strict=True):
                if key is not None and not (isinstance(key, ast.Constant) and isinstance(key.value, str)):
                    return None
                pairs.append((str(key.value) if isinstance(key, ast.Constant) else None, value))
            return pairs
        case ast.Call(func=ast.Name(id="GRPOConfig" | "GRPOTrainer" | "parsedˑoptions"), keywords=words):
            return [(one.arg, one.value) for one in words]
    return None


def with_pairs(node: ast.expr, pairs: Pairs) -> ast.expr:
    """Return the dictionary or configuration with other entries; of a key that comes twice the last counts."""
    last = {key if key is not None else f"**{ast.unparse(value)}": (key, value) for key, value in pairs}
    if isinstance(node, ast.Call):
        made: ast.expr = ast.Call(node.func, [], [ast.keyword(key, value) for key, value in last.values()])
    else:
        keys: list[ast.expr | None] = [None if key is None else ast.Constant(key) for key, _ in last.values()]
        made = ast.Dict(keys, [value for _, value in last.values()])
    return ast.copy_location(made, node)


def merged(name: str, nodes: list[ast.expr], line: int) -> ast.expr:
    """Return what a name holds that holds one of these: in dictionaries and configurations, by key."""
    if len({ast.unparse(one) for one in nodes}) == 1:
        return nodes[0]
    kinds = {one.func.id if isinstance(one, ast.Call) and isinstance(one.func, ast.Name) else "" for one in nodes}
    held = [dict(own) for one in nodes if (own := pairs_of(one)) is not None]
    if len(held) != len(nodes) or len(kinds) > 1 or any(None in one for one in held):
        return unknown(name, line)
    pairs: Pairs = []
    for key in dict.fromkeys(key for one in held for key in one):
        same = len({ast.unparse(one[key]) if key in one else "" for one in held}) == 1
        pairs.append((key, held[0][key] if same else unknown(str(key), line)))
    return with_pairs(nodes[-1], pairs)


@dataclass(frozen=True, slots=True)
class Function:
    """A function of the script, with the scopes that it sees, and its defaults as they were when it was defined."""

    node: ast.FunctionDef | ast.AsyncFunctionDef
    scopes: list[dict[str, str]]
    defaults: dict[str, ast.expr]


@dataclass(slots=True)
class State:
    """What names stand for, by scope, and what these hold."""

    scopes: list[dict[str, str]]
    values: dict[str, ast.expr]


@dataclass(slots=True)
class Frame:
    """A call of a function that is followed."""

    returned: list[ast.expr] = field(default_factory=list)
    shared: set[str] = field(default_factory=set)
    """Names that it declares global."""


def _literal(value: Any, node: ast.expr) -> ast.expr:
    return node if isinstance(value, Expression) else ast.Constant(value)


def parsed() -> ast.expr:
    """Return what options are parsed into."""
    return ast.Call(ast.Name(PARSED, ast.Load()), [], [])


def kind_of_object(node: ast.expr | None) -> str:
    """Tell a configuration, what options are parsed into, and a trainer."""
    name = node.func.id if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) else ""
    return name if name in (*ORDER, PARSED) else ""


def is_config(node: ast.expr | None) -> bool:
    """Tell a configuration, or what options are parsed into."""
    return kind_of_object(node) in ("GRPOConfig", PARSED)


def key_of(target: ast.Attribute | ast.Subscript) -> str | None:
    """Return the name of an entry; None where only running the script would tell."""
    if isinstance(target, ast.Attribute):
        return target.attr
    key = target.slice.value if isinstance(target.slice, ast.Constant) else None
    return key if isinstance(key, str) else None


def held_in(values: Mapping[str, ast.expr], mark: str) -> ast.expr:
    """Return what a name has in the end of an alternative."""
    node: ast.expr = ast.Name(mark, ast.Load())
    while isinstance(node, ast.Name) and node.id in values:
        node = values[node.id]
    return node


class Values(ast.NodeTransformer):
    """The state of a script; visiting an expression puts in what is known."""

    def __init__(self, found: Script, options: Mapping[str, Any]) -> None:
        self._found, self._options = found, options
        self._known = {**(PARSER_DEFAULTS if found.parses else {}), **found.own, **options}
        self._scopes: list[dict[str, str]] = [{}]
        self._values: dict[str, ast.expr] = {}
        self._functions: dict[str, Function] = {}
        self._frames = [Frame()]
        self._calls: tuple[tuple[int, int], ...] = ()
        self._entered = set[int]()
        self._line = 0
        self._count = 0
        self._still = False
        """Calls do nothing."""
        self._edited: dict[str, int] = {}
        self._notes: list[tuple[str | None, str, str]] = []
        """To do, of the configuration that a name holds, or of any."""

    def _renamed(self, node: ast.expr, names: Mapping[str, str]) -> ast.expr:
        node = copy.deepcopy(node)
        for one in ast.walk(node):
            if isinstance(one, ast.Name) and not one.id.endswith(BY_LINE):
                one.id = names.get(one.id, one.id)
        return node

    def _lookup(self, name: str) -> str | None:
        return next((scope[name] for scope in reversed(self._scopes) if name in scope), None)

    def _bind(self, name: str, value: ast.expr | None) -> str:
        self._count += 1
        mark = f"{name}{MARK}{self._count}"
        shared = name in self._frames[-1].shared
        (self._scopes[0] if shared else self._scopes[-1])[name] = mark
        self._edited[mark] = self._line
        if value is not None:
            self._values[mark] = value
        return mark

    def _last(self, node: ast.expr) -> ast.expr:
        """Return what a name stands for, where that is another one, the name that an object had first."""
        while isinstance(node, ast.Name) and isinstance(inner := self._values.get(node.id), ast.Name):
            node = inner
        return node

    def _root(self, node: ast.expr) -> str | None:
        node = self._last(node)
        return node.id if isinstance(node, ast.Name) and node.id in self._values else None

    def _held(self, node: ast.expr) -> ast.expr:
        return held_in(self._values, node.id) if isinstance(node, ast.Name) else node

    def _closed(self, node: ast.expr) -> ast.expr:
        """Return an expression with what is known in it; the script itself stays, since it may be read again."""
        closed: ast.expr = self.visit(copy.deepcopy(node))
        return closed

    def _value(self, node: ast.expr) -> Any:
        return value_of(node, self._values)

    def _put(self, root: str, value: ast.expr) -> None:
        self._values[root], self._edited[root] = value, self._line

    def _edit(self, base: ast.expr, key: str | None, value: ast.expr | None) -> None:
        """Set an entry of what an expression holds, or take it away. `key`: None: one that is not known."""
        closed = self._closed(base)
        root = self._root(closed)
        held = self._held(closed)
        if kind_of_object(held) == "GRPOTrainer":
            self._note(None, f"{ast.unparse(base)}.{key}", "sets something of the trainer: see whether it counts")
        elif root is not None:
            self._put(root, self._edited_object(root, held, key, value))
        elif isinstance(base, ast.Attribute | ast.Subscript):
            inner = key_of(base)
            if (pairs_of(held)) is None or is_config(held):
                held = unknown(inner or "", self._line)
            else:
                held = self._edited_object(inner or "", held, key, value)
            self._edit(base.value, inner, held)

    def _edited_object(self, name: str, held: ast.expr, key: str | None, value: ast.expr | None) -> ast.expr:
        pairs = pairs_of(held)
        if pairs is None:
            return unknown(plain(name), self._line) if isinstance(held, ast.List | ast.Dict) else held
        if key is None and is_config(held):
            self._note(name, f"{plain(name)}[…]", "sets what is not known of it: see what it sets")
            return held
        if key is None or (value is None and any(one is None for one, _ in pairs)):
            return unknown(plain(name), self._line)
        rest: Pairs = [(one, own) for one, own in pairs if one != key]
        return with_pairs(held, rest if value is None else [*rest, (key, value)])

    def _note(self, root: str | None, text: str, told: str) -> None:
        self._notes.append((root, plain(" ".join(text.split())), f"line {self._line}: {told}"))

    def _assign(self, target: ast.expr, value: ast.expr) -> None:
        match target:
            case ast.Name(id=name):
                self._bind(name, value)
            case ast.Starred(value=inner):
                self._assign(inner, unknown(ast.unparse(inner), self._line))
            case ast.Tuple(elts=targets) | ast.List(elts=targets):
                parts = value.elts if isinstance(value, ast.Tuple | ast.List) else None
                starred = any(isinstance(one, ast.Starred) for one in targets)
                for number, one in enumerate(targets):
                    if kind_of_object(value) == PARSED:
                        self._assign(one, parsed())
                    elif parts is not None and len(parts) == len(targets) and not starred:
                        self._assign(one, parts[number])
                    elif starred:
                        self._assign(one, unknown(ast.unparse(one), self._line))
                    else:
                        self._assign(one, ast.Subscript(value, ast.Constant(number), ast.Load()))
            case ast.Subscript() | ast.Attribute():
                self._edit(target.value, key_of(target), value)

    def _augment(self, target: ast.expr, op: ast.operator, value: ast.expr) -> None:
        former = copy.deepcopy(target)
        former.ctx = ast.Load()  # type: ignore[attr-defined]
        closed = self.visit(former)
        root, held, more = self._root(closed), self._held(closed), self._held(value)
        if root is not None and isinstance(held, ast.List) and isinstance(op, ast.Add):
            rest = more.elts if isinstance(more, ast.List | ast.Tuple) else [ast.Starred(value, ast.Load())]
            self._put(root, ast.List([*held.elts, *rest], ast.Load()))
        elif root is not None and (pairs := pairs_of(held)) is not None and isinstance(op, ast.BitOr):
            self._put(root, with_pairs(held, [*pairs, *(pairs_of(more) or [(None, value)])]))
        else:
            self._assign(target, self._folded(ast.BinOp(closed, op, value)))

    def _folded(self, node: ast.expr) -> ast.expr:
        value = self._value(node)
        return ast.Constant(value) if isinstance(value, int | float) else node

    def _truth(self, test: ast.expr) -> bool | None:
        """Tell what a condition is, where the script says it."""
        match test:
            case ast.Compare(left=ast.Name(id="__name__"), ops=[ast.Eq()]):
                return True
            case ast.Name(id="TYPE_CHECKING"):
                return False
            case ast.UnaryOp(op=ast.Not(), operand=operand):
                inner = self._truth(operand)
                return None if inner is None else not inner
            case ast.Compare(
                left=left, ops=[ast.Eq() | ast.NotEq() | ast.Is() | ast.IsNot() as how], comparators=[one]
            ):
                sides = [self._value(left), self._value(one)]
                if any(isinstance(side, Expression) for side in sides):
                    return None
                return bool(sides[0] == sides[1]) == isinstance(how, ast.Eq | ast.Is)
        value = self._value(test)
        return None if isinstance(value, Expression) else bool(value)

    def _state(self) -> State:
        return State([dict(one) for one in self._scopes], dict(self._values))

    def _restore(self, state: State) -> None:
        for scope, former in zip(self._scopes, state.scopes, strict=True):
            scope.clear()
            scope.update(former)
        self._values = dict(state.values)

    def visit_Name(self, node: ast.Name) -> ast.expr:
        """Name what the name holds now."""
        mark = self._lookup(node.id) if isinstance(node.ctx, ast.Load) else None
        return node if mark is None else ast.Name(mark, ast.Load())

    def visit_Lambda(self, node: ast.Lambda) -> ast.expr:
        """Leave what is not run here."""
        return node

    def visit_Await(self, node: ast.Await) -> ast.expr:
        """Take what it waits for."""
        return self.visit(node.value)  # type: ignore[no-any-return]

    def visit_NamedExpr(self, node: ast.NamedExpr) -> ast.expr:
        """Assign."""
        return ast.Name(self._bind(node.target.id, self.visit(node.value)), ast.Load())

    def visit_BinOp(self, node: ast.BinOp) -> ast.expr:
        """Join dictionaries."""
        self.generic_visit(node)
        left, right = self._held(node.left), self._held(node.right)
        if isinstance(node.op, ast.BitOr) and isinstance(left, ast.Dict) and isinstance(right, ast.Dict):
            return self.visit_Dict(ast.Dict([None, None], [left, right]))
        return node

    def visit_Dict(self, node: ast.Dict) -> ast.expr:
        """Put in what other dictionaries add."""
        self.generic_visit(node)
        keys = [one if one is None else _literal(self._value(one), one) for one in node.keys]
        pairs = pairs_of(ast.Dict(keys, node.values))
        return node if pairs is None else with_pairs(node, self._spread(pairs))

    def _spread(self, pairs: Pairs) -> Pairs:
        """Put in what dictionaries add of which it is known."""
        found: Pairs = []
        for key, value in pairs:
            inner = self._held(value) if key is None else value
            more = pairs_of(inner) if key is None and isinstance(inner, ast.Dict) else None
            found += [(key, value)] if more is None else more
        return found

    def visit_Attribute(self, node: ast.Attribute) -> ast.expr:
        """Take what a configuration or an option is."""
        self.generic_visit(node)
        held = self._held(node.value)
        if not isinstance(node.ctx, ast.Load) or not is_config(held):
            return node
        own = dict(pairs_of(held) or [])
        if node.attr in own:
            return copy.deepcopy(own[node.attr])
        known = self._known if kind_of_object(held) == PARSED else TRL_DEFAULTS
        known = {**TRL_DEFAULTS, **known} if self._options else known
        value = known.get(node.attr, node)
        return node if isinstance(value, Expression | ast.expr) else ast.parse(repr(value), mode="eval").body

    def visit_Subscript(self, node: ast.Subscript) -> ast.expr:
        """Take an entry of a dictionary."""
        self.generic_visit(node)
        held, key = self._held(node.value), self._value(node.slice)
        if kind_of_object(held) == PARSED and isinstance(key, int):
            return parsed()
        if isinstance(held, ast.Dict) and isinstance(key, str) and key in (own := dict(pairs_of(held) or [])):
            return copy.deepcopy(own[key])
        return node
