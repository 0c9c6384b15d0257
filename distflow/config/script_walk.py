"""A Python script, followed statement by statement up to where it makes its trainer: it is never run.

Straight-line code is followed, and functions where they are called. What may or may not run leaves unknown what it
sets: of a branch only itself knows that.
"""

from __future__ import annotations

import ast
import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from distflow.config.script import ORDER, Expression, Script, called, kind_of, read_definitions, value_of
from distflow.config.script_values import (
    CHANGES,
    METHODS,
    PARSED,
    Frame,
    Function,
    Pairs,
    State,
    Values,
    held_in,
    is_config,
    is_unknown,
    key_of,
    kind_of_object,
    merged,
    pairs_of,
    parsed,
    plain,
    unknown,
    unknowns,
    with_pairs,
)

_READS = (
    *("print", "pprint", "len", "str", "repr", "list", "tuple", "set", "sorted", "isinstance", "hasattr", "getattr"),
    *("enumerate", "zip", "range", "sum", "any", "all", "min", "max", "asdict", "info", "debug", "warning", "error"),
    *("dumps", "dump", "partial", "set_seed", "get_peft_config", "get_kbit_device_map", "get_quantization_config"),
    *("load_dataset", "from_pretrained", "get_peft_model", "from_list", "from_dict", "bool", "id", "type"),
)
"""Functions that change nothing of what they are given."""


_COPIED = ("reward_funcs", "train_dataset", "eval_dataset")
"""Of these the user copies what the script has."""


def read_script(tree: ast.Module, options: Mapping[str, Any]) -> Script:
    """Read a script that is given these options on its command line."""
    found = Script()
    read_definitions(found, tree)
    _Reader(found, options).read(tree)
    return found


@dataclass(frozen=True, slots=True)
class _Made:
    """A trainer, as it is made."""

    line: int
    pairs: Pairs
    names: dict[str, ast.expr]
    plain: dict[str, str]
    args: ast.expr | None
    root: str | None
    """The name of its configuration."""


class _Reader(Values):
    """A reader of scripts, which does what their statements and calls do."""

    def __init__(self, found: Script, options: Mapping[str, Any]) -> None:
        super().__init__(found, options)
        self._trainers: dict[tuple[tuple[int, int], ...], _Made] = {}
        """By where they are made, with the calls that lead there."""
        self._configs: dict[tuple[int, int], ast.expr] = {}

    def read(self, tree: ast.Module) -> None:
        """Read all that runs; functions that nothing calls, where the trainer is made in one of them."""
        for one in tree.body:
            self._walk([one])
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and id(node) not in self._entered:
                makes = any(isinstance(one, ast.Call) and kind_of(self._found, one) for one in ast.walk(node))
                if makes and not (self._trainers and all(is_config(one.args) for one in self._trainers.values())):
                    self._enter(Function(node, [self._scopes[0]], {}), None)
        trainers = [*self._trainers.values()]
        if len(trainers) > 1 or (not trainers and len(self._configs) > 1):
            self._found.several = [one.line for one in trainers] or [line for line, _ in self._configs]
        elif trainers or self._configs:
            self._give_all(trainers[0] if trainers else None)

    def _give_all(self, trainer: _Made | None) -> None:
        """Say what the trainer is given, or the one configuration where there is no trainer."""
        made, found = trainer or self._snapshot(0, [], None), self._found
        args, root = made.args, made.root
        if not is_config(args) and (args is not None or trainer is None):
            if args is not None:
                told = f"line {made.line}: where this is made is not followed: write what it has"
                found.given["args"], found.unread["args"] = Expression(plain(ast.unparse(args))), told
            args, root = self._only_config()
            made = self._snapshot(made.line, made.pairs, None) if trainer is None else made
        pairs = pairs_of(args) or []
        found.parsed = args is None or kind_of_object(args) == PARSED
        if found.parsed:
            usual: Pairs = [one for own in found.defaults.values() for one in own if one[0] not in self._options]
            pairs = [*usual, *pairs]
        for key, value in (*pairs, *made.pairs):
            self._give(key, self._renamed(value, made.plain), made)
        now = dict(pairs_of(self._values.get(root or "")) or []) if trainer is not None else {}
        for key, value in now.items():
            former = dict(pairs).get(key)
            if key is not None and (former is None or ast.unparse(value) != ast.unparse(former)):
                told = "sets it when the trainer has been made: see whether it counts"
                self._notes.append((root, f"args.{key}", f"line {self._edited[root or '']} {told}"))
        for of, text, told in self._notes:
            if of is None or of == root:
                found.given[text], found.unread[text] = Expression("…"), told
        found.names = made.names

    def _only_config(self) -> tuple[ast.expr | None, str | None]:
        """Return the configuration that the script makes, as it is in the end, and its name."""
        if len(self._configs) != 1:
            return None, None
        ((place, made),) = self._configs.items()
        for name, value in reversed(self._values.items()):
            if is_config(value) and (value.lineno, value.col_offset) == place:
                return value, name
        return made, None

    def _give(self, key: str | None, value: ast.expr, made: _Made) -> None:
        found = self._found
        if key is None:
            text = f"**{plain(ast.unparse(value))}"
            found.given[text] = Expression(text[2:])
            found.unread[text] = "which arguments these are only the script tells: write what they are here"
            return
        found.unread.pop(key, None)
        found.given[key] = value_of(value, made.names)
        unknown = list(dict.fromkeys(unknowns(value, made.names)))
        if unknown and isinstance(found.given[key], Expression) and key not in _COPIED:
            what = f"line {made.line}: {', '.join(unknown)} has no value that the script tells"
            found.unread[key] = f"{what}: write what it is"

    def _snapshot(self, line: int, pairs: Pairs, args: ast.expr | None) -> _Made:
        """Return what is known now, by the names that the script has."""
        visible = {mark: name for scope in self._scopes for name, mark in scope.items()}
        shown = {name for scope in self._scopes for name in scope}
        hidden = {mark: plain(mark) for mark in (*self._values, *self._functions) if plain(mark) not in shown}
        names = {**hidden, **visible}
        # What a name was before the script bound it, as one that is imported, is not what it holds now.
        former = {name: f"{name}ˑ0" for name in visible.values()}
        values = {names.get(mark, mark): self._renamed(value, former | names) for mark, value in self._values.items()}
        root = None if args is None else self._root(args)
        return _Made(line, pairs, values, names, None if args is None else self._held(args), root)

    def _walk(self, body: Sequence[ast.stmt]) -> bool:
        """Follow statements; true where what comes behind is not run."""
        for node in body:
            self._line = node.lineno
            if self._statement(node):
                return True
        return False

    def _statement(self, node: ast.stmt) -> bool:
        match node:
            case ast.FunctionDef() | ast.AsyncFunctionDef():
                self._define(node)
            case ast.Return(value=value):
                self._frames[-1].returned.append(ast.Constant(None) if value is None else self._closed(value))
                return True
            case ast.Raise():
                return True
            case ast.If() | ast.For() | ast.AsyncFor() | ast.While() | ast.Try() | ast.TryStar() | ast.Match():
                return self._branch(node)
            case ast.With(items=items, body=body) | ast.AsyncWith(items=items, body=body):
                for one in items:
                    value = self._closed(one.context_expr)
                    if one.optional_vars is not None:
                        self._assign(one.optional_vars, value)
                return self._walk(body)
            case _:
                return self._simple(node)
        return False

    def _simple(self, node: ast.stmt) -> bool:
        match node:
            case ast.ClassDef(name=name):
                self._scopes[-1].pop(name, None)
            case ast.Import(names=aliases) | ast.ImportFrom(names=aliases):
                for alias in aliases:
                    self._scopes[-1].pop(alias.asname or alias.name, None)
            case ast.Global(names=names) | ast.Nonlocal(names=names):
                self._frames[-1].shared.update(names)
            case _:
                return self._effect(node)
        return False

    def _effect(self, node: ast.stmt) -> bool:
        match node:
            case ast.Expr(value=value):
                closed = self._closed(value)
                return isinstance(closed, ast.Call) and ast.unparse(closed.func) in ("sys.exit", "exit", "quit")
            case ast.Assign(targets=targets, value=value):
                closed = self._closed(value)
                for target in targets:
                    self._assign(target, closed)
            case ast.AnnAssign(target=target, value=ast.expr() as value):
                self._assign(target, self._closed(value))
            case ast.AugAssign(target=target, op=op, value=value):
                self._augment(target, op, self._closed(value))
            case ast.Delete(targets=targets):
                for target in targets:
                    if isinstance(target, ast.Subscript):
                        self._edit(target.value, key_of(target), None)
        return False

    def _define(self, node: ast.FunctionDef | ast.AsyncFunctionDef) -> None:
        arguments = node.args
        places = [*arguments.posonlyargs, *arguments.args]
        last = [one.arg for one in places][len(places) - len(arguments.defaults) :]
        usual = dict(zip(last, arguments.defaults, strict=True))
        words = zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True)
        usual |= {one.arg: own for one, own in words if own is not None}
        defaults = {name: self._closed(value) for name, value in usual.items()}
        self._functions[self._bind(node.name, None)] = Function(node, list(self._scopes), defaults)

    def _branch(self, node: ast.stmt) -> bool:
        match node:
            case ast.If(test=test, body=body, orelse=other):
                truth = self._truth(self._closed(test))
                if truth is not None:
                    return self._walk(body if truth else other)
                return self._either([body, other])
            case ast.For() | ast.AsyncFor() | ast.While():
                return self._loop(node)
            case (
                ast.Try(body=body, handlers=handlers, orelse=other, finalbody=final)
                | ast.TryStar(body=body, handlers=handlers, orelse=other, finalbody=final)
            ):
                ways = [[*body, *other]]
                for handler in handlers:
                    ways += [handler.body, [*body, *handler.body]]
                left = self._either(ways)
                return self._walk(final) or left
            case ast.Match(subject=subject, cases=cases):
                self._closed(subject)
                return self._either([*(one.body for one in cases), []])
        return False

    def _loop(self, node: ast.For | ast.AsyncFor | ast.While) -> bool:
        self._closed(node.test if isinstance(node, ast.While) else node.iter)
        # What one round sets is not known in the next.
        for _ in range(2):
            for one in ast.walk(node.target) if not isinstance(node, ast.While) else ():
                if isinstance(one, ast.Name):
                    self._line = node.lineno
                    self._bind(one.id, unknown(one.id, node.lineno))
            self._either([node.body, []])
        return self._walk(node.orelse)

    def _either(self, ways: Sequence[Sequence[ast.stmt]]) -> bool:
        """Follow alternatives, each from here; what they leave differently is not known behind them."""
        before, ends = self._state(), list[State]()
        for body in ways:
            self._restore(before)
            if not self._walk(body):
                ends.append(self._state())
        self._restore(before)
        for one in ends:
            self._values = {**one.values, **self._values}
        if not ends:
            return True
        for number, scope in enumerate(self._scopes):
            for name in dict.fromkeys(name for one in ends for name in one.scopes[number]):
                # Where it has no value it is not used.
                marks = [(one.scopes[number][name], one) for one in ends if name in one.scopes[number]]
                last, line = marks[-1][0], max(self._edited[mark] for mark, _ in marks)
                if len({mark for mark, _ in marks}) > 1:
                    held = [held_in(one.values, mark) for mark, one in marks]
                    self._count += 1
                    last = f"{last}0{self._count}"
                    self._values[last], self._edited[last] = merged(name, held, line), line
                scope[name] = last
        for mark in self._values:
            own = [one.values[mark] for one in ends if mark in one.values]
            if own:
                self._values[mark] = merged(plain(mark), own, self._edited.get(mark, 0))
        return False

    def visit_IfExp(self, node: ast.IfExp) -> ast.expr:
        """Choose, where the script tells."""
        node.test = self.visit(node.test)
        truth = self._truth(node.test)
        if truth is not None:
            return self.visit(node.body if truth else node.orelse)  # type: ignore[no-any-return]
        node.body, node.orelse = self._perhaps(node.body), self._perhaps(node.orelse)
        return node

    def visit_BoolOp(self, node: ast.BoolOp) -> ast.expr:
        """Do what the first part does, and leave unknown what the others may do."""
        node.values = [self.visit(node.values[0]), *(self._perhaps(one) for one in node.values[1:])]
        return node

    def visit_ListComp(self, node: ast.ListComp) -> ast.expr:
        """Leave unknown what it may do."""
        return self._perhaps(node)

    def _perhaps(self, node: ast.expr) -> ast.expr:
        """Leave unknown what an expression may do, which may or may not be computed."""
        if not self._still:
            parts = [one for one in ast.walk(node) if isinstance(one, ast.Call)]
            self._either([[ast.copy_location(ast.Expr(copy.deepcopy(one)), one) for one in parts], []])
        still, self._still = self._still, True
        if isinstance(node, ast.ListComp):
            self.generic_visit(node)
            closed: ast.expr = node
        else:
            closed = self.visit(node)
        self._still = still
        return closed

    def visit_Call(self, node: ast.Call) -> ast.expr:
        """Do what a call does, as far as it is followed."""
        raw = copy.deepcopy(node.func)
        self.generic_visit(node)
        target = self._last(node.func)
        function = self._functions.get(target.id) if isinstance(target, ast.Name) else None
        name = plain(called(target))
        if self._still:
            return node
        if kind := kind_of(self._found, ast.Call(target, [], [])):
            return self._make(node, kind, name)
        if function is not None:
            return self._follow(function, node)
        if name == "get_quantization_config" and "load_in_4bit" in self._known:
            made = "BitsAndBytesConfig(load_in_4bit=True)" if self._known["load_in_4bit"] else "None"
            return ast.parse(made, mode="eval").body
        if name.startswith("parse_"):
            return parsed()
        done = self._method(node, raw) if isinstance(raw, ast.Attribute) else None
        return done or self._built_in(node, name)

    def _make(self, node: ast.Call, kind: str, name: str) -> ast.expr:
        """Make the configuration, or the trainer."""
        order = ORDER[kind]
        pairs: Pairs = list(self._found.defaults.get(name, ()))
        for number, one in enumerate(node.args):
            key = order[number] if number < len(order) else f"{kind} argument {number}"
            pairs.append((None if isinstance(one, ast.Starred) else key, one))
        pairs += self._spread([(one.arg, one.value) for one in node.keywords])
        made = with_pairs(ast.copy_location(ast.Call(ast.Name(kind, ast.Load()), [], []), node), pairs)
        place = (node.lineno, node.col_offset)
        if kind == "GRPOConfig":
            self._configs[place] = made
        else:
            taken = pairs_of(made) or []
            own = [one for one in taken if one[0] != "args"]
            args = dict(taken).get("args")
            is_none = isinstance(args, ast.Constant) and args.value is None
            self._trainers[(*self._calls, place)] = self._snapshot(node.lineno, own, None if is_none else args)
        return made

    def _follow(self, function: Function, call: ast.Call) -> ast.expr:
        """Run a function of the script, and return what it gives; where that is nothing to read, the call."""
        inner = [one for one in ast.walk(function.node) if isinstance(one, ast.Yield | ast.YieldFrom)]
        if len(self._calls) > 8 or inner:
            return self._built_in(call, function.node.name)
        given = self._enter(function, call)
        held = self._held(given)
        if is_config(held) or isinstance(held, ast.Dict):
            return given
        if isinstance(held, ast.List | ast.Tuple):
            return held
        value = self._value(given)
        return call if isinstance(value, Expression) else ast.parse(repr(value), mode="eval").body

    def _enter(self, function: Function, call: ast.Call | None) -> ast.expr:
        """Run a function. `call`: None: nothing calls it, so that its arguments are not known."""
        node, line, scopes = function.node, self._line, self._scopes
        self._entered.add(id(node))
        given = self._parameters(function, call)
        self._scopes = [*function.scopes, {}]
        self._frames.append(Frame())
        place = (node.lineno, node.col_offset) if call is None else (call.lineno, call.col_offset)
        self._calls = (*self._calls, place)
        self._line = node.lineno
        for name, value in given.items():
            self._bind(name, value)
        left = self._walk(node.body)
        self._calls = self._calls[:-1]
        returned = self._frames.pop().returned
        self._scopes, self._line = scopes, line
        if len(returned) == 1 and left:
            return returned[0]
        ends = [*returned, *([] if left else [ast.Constant(None)])]
        return merged(node.name, [self._held(one) for one in ends], node.lineno) if ends else ast.Constant(None)

    def _parameters(self, function: Function, call: ast.Call | None) -> dict[str, ast.expr]:
        """Return what the parameters of a function are in a call."""
        node, arguments = function.node, function.node.args
        places = [*arguments.posonlyargs, *arguments.args]
        values, words = (call.args, call.keywords) if call is not None else ([], [])
        given: dict[str, ast.expr] = {}
        for parameter, value in zip(places, values, strict=False):
            if isinstance(value, ast.Starred):
                break
            given[parameter.arg] = value
        more = dict(self._spread([(one.arg, one.value) for one in words]))
        whole = call is not None and None not in more and not any(isinstance(one, ast.Starred) for one in values)
        given |= {key: value for key, value in more.items() if key is not None}
        found: dict[str, ast.expr] = {}
        for one in (*places, *arguments.kwonlyargs):
            usual = function.defaults.get(one.arg) if whole else None
            value = given.pop(one.arg, usual)  # type: ignore[arg-type]
            opaque = isinstance(value, ast.Call) and not is_unknown(value) and not kind_of_object(value)
            if one.arg.endswith("args") and (value is None or opaque):
                value = parsed()
            found[one.arg] = unknown(one.arg, node.lineno) if value is None else value
        if arguments.kwarg is not None:
            rest: Pairs = list(given.items())
            name = arguments.kwarg.arg
            found[name] = with_pairs(ast.Dict([], []), rest) if whole else unknown(name, node.lineno)
        if arguments.vararg is not None:
            found[arguments.vararg.arg] = unknown(arguments.vararg.arg, node.lineno)
        return found

    def _method(self, node: ast.Call, raw: ast.Attribute) -> ast.expr | None:
        """Do what a method does to a configuration, a dictionary or a list; None: it does nothing to one."""
        assert isinstance(node.func, ast.Attribute)
        base, name = node.func.value, node.func.attr
        root, held = self._root(base), self._held(base)
        if root is None or not (pairs_of(held) is not None or isinstance(held, ast.List)):
            if name in CHANGES and isinstance(raw.value, ast.Attribute | ast.Subscript):
                self._edit(raw.value, None, None)
            return None
        if is_config(held):
            if name not in METHODS and not name.startswith("get_"):
                told = "may change the configuration, which is not followed: see what it sets"
                self._note(root, ast.unparse(node), told)
        elif isinstance(held, ast.List):
            self._change_list(root, held, name, node)
        else:
            return self._change_dictionary(root, held, name, node)
        return node

    def _change_list(self, root: str, held: ast.List, name: str, node: ast.Call) -> None:
        more = self._held(node.args[0]) if len(node.args) == 1 else None
        if name == "append" and node.args:
            self._put(root, ast.List([*held.elts, node.args[0]], ast.Load()))
        elif name == "extend" and isinstance(more, ast.List | ast.Tuple):
            self._put(root, ast.List([*held.elts, *more.elts], ast.Load()))
        elif name not in METHODS:
            self._put(root, unknown(plain(root), self._line))

    def _change_dictionary(self, root: str, held: ast.expr, name: str, node: ast.Call) -> ast.expr:
        pairs = pairs_of(held) or []
        key = self._value(node.args[0]) if node.args else None
        former = dict(pairs).get(key) if isinstance(key, str) else None
        whole = all(one is not None for one, _ in pairs) and isinstance(key, str)
        if name == "update":
            more: Pairs = [(None, one) for one in node.args] + [(one.arg, one.value) for one in node.keywords]
            self._put(root, with_pairs(held, [*pairs, *self._spread(more)]))
        elif name == "setdefault" and whole and len(node.args) == 2:
            if former is None:
                self._put(root, with_pairs(held, [*pairs, (key, node.args[1])]))
        elif name == "pop" and whole:
            self._put(root, with_pairs(held, [one for one in pairs if one[0] != key]))
        elif name not in METHODS:
            self._put(root, unknown(plain(root), self._line))
        if whole and name in ("get", "pop", "setdefault"):
            usual = node.args[1] if len(node.args) > 1 else ast.Constant(None)
            return usual if former is None else copy.deepcopy(former)
        return node

    def _built_in(self, node: ast.Call, name: str) -> ast.expr:
        """Do what functions of Python's own do; what another may change of its arguments is not known."""
        first = self._held(node.args[0]) if node.args else node
        if pairs_of(first) is not None and name in ("replace", "copy", "deepcopy"):
            more: Pairs = [(one.arg, one.value) for one in node.keywords] if name == "replace" else []
            return with_pairs(copy.deepcopy(first), [*(pairs_of(first) or []), *self._spread(more)])
        if name == "dict":
            more = [(None, one) for one in node.args] + [(one.arg, one.value) for one in node.keywords]
            return with_pairs(ast.Dict([], []), self._spread(more))
        if name == "setattr" and len(node.args) == 3:
            key = self._value(node.args[1])
            self._edit(node.args[0], key if isinstance(key, str) else None, node.args[2])
            return node
        if name in _READS:
            return node
        for value in (*node.args, *(one.value for one in node.keywords if one.arg is not None)):
            root, held = self._root(value), self._held(value)
            if root is not None and is_config(held):
                told = "may change the configuration, which is not followed: see what it sets"
                self._note(root, ast.unparse(node), told)
            elif root is not None and isinstance(held, ast.Dict | ast.List) and not name[:1].isupper():
                self._put(root, unknown(plain(root), self._line))
        return node
