"""The form in which a reward function is called, as the names of its parameters tell it. Imports no torch.

| form | for example | gets |
| --- | --- | --- |
| sample | `def mine(sample, *, setting=1.0)` | a `Completion` |
| lists, as in TRL | `def mine(completions, answer, **kwargs)` | by keyword, lists: an item a sample |
| score, as in verl | `def compute_score(data_source, solution_str, ground_truth, …)` | by keyword, one sample |

The source tells it without importing, for what `functools.partial`, a lambda or a class of the same file makes, too.
"""

from __future__ import annotations

import ast
import inspect
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from distflow.errors import PluginError, did_you_mean, nearest
from distflow.flow.resolve import Source, Value, check_call, find_named

Form = Literal["sample", "lists", "score"]
REWARD = ("sample",)
"""Parameters by position of a reward function, as the step that calls it declares its plug-in."""
LISTS = ("prompts", "completions", "completion_ids")
"""What functions of the form lists get of each sample, besides the columns of its row."""
FURTHER = ("trainer_state", "log_extra", "log_metric")
"""What they get once."""
SOLUTION = "solution_str"
SCORE = ("data_source", SOLUTION, "ground_truth", "extra_info")
"""What functions of the form score get."""
OWN_KEYS = ("function", "weight")
"""Keys of one of several functions by name that are no settings of it."""
_BATCHED = "solution_strs"
_NEARLY: Mapping[str, str] = {
    **dict.fromkeys(("source", "dataset", "data"), "data_source"),
    **dict.fromkeys(("solution", "response", "response_str", "solution_string"), SOLUTION),
    **dict.fromkeys(("gt", "truth", "ground_truths", "gold", "label", "reference_answer"), "ground_truth"),
    **dict.fromkeys(("extra", "info", "extras", "extra_infos"), "extra_info"),
    **{"prompt": "prompts", "completion": "completions", "completion_id": "completion_ids"},
}
"""What is written for a name by which functions of the forms score and lists are called, besides mere misspellings."""
_ANSWERS = ("answer", "ground_truth", "gold_answers")
"""Names and keys by which functions reach the gold answer."""
_Function = ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda


@dataclass(frozen=True, slots=True)
class Signature:
    """The parameters of a function."""

    positional: tuple[str, ...]
    """Those that it may be given by position."""
    keywords: tuple[str, ...]
    """Those that it may be given by keyword."""
    required: tuple[str, ...]
    """Those without a default."""
    collects: bool
    """It takes further keywords."""

    @property
    def form(self) -> Form:
        """How it is called."""
        if not set(LISTS).isdisjoint((*self.positional, *self.keywords)):
            return "lists"
        if SOLUTION in self.keywords or _BATCHED in self.keywords:
            return "score"
        return "lists" if self.collects and not self.positional else "sample"

    def bound(self, positional: int, keywords: Collection[str]) -> Signature:
        """Return what is left once so many positional arguments, and these keywords, are given."""
        gone = {*self.positional[:positional], *keywords}
        behind = [name for name in self.positional[positional:] if name not in gone]
        return replace(
            self,
            positional=tuple(behind),
            keywords=tuple(name for name in self.keywords if name not in self.positional[:positional]),
            required=tuple(name for name in self.required if name not in gone),
        )


def signature(function: Callable[..., object]) -> Signature:
    """Return the signature of an imported function, partial or callable object; raises ValueError if it has none."""
    parameters = inspect.signature(function).parameters.values()
    by_position = [one for one in parameters if one.kind in (one.POSITIONAL_ONLY, one.POSITIONAL_OR_KEYWORD)]
    by_keyword = [one for one in parameters if one.kind in (one.KEYWORD_ONLY, one.POSITIONAL_OR_KEYWORD)]
    return Signature(
        tuple(one.name for one in by_position),
        tuple(one.name for one in by_keyword),
        tuple(dict.fromkeys(one.name for one in (*by_position, *by_keyword) if one.default is one.empty)),
        any(one.kind is one.VAR_KEYWORD for one in parameters),
    )


def find_signature(call: str) -> Signature | None:
    """Find the signature of what `call` names without importing it; None if its source does not tell.

    Raises PluginError if there is no such name.
    """
    found = find_named(call)
    if isinstance(found, Source):
        return None if isinstance(found.node, ast.ClassDef) else _written(found.node)
    return _made(found.made_by, found)


def may_take_lists(call: str) -> bool:
    """Tell whether what `call` names may be of the form lists, which gets conversations as messages.

    True where its source does not tell. Raises PluginError if there is no such name.
    """
    found = find_signature(call)
    return found is None or found.form == "lists"


def needed_columns(found: Signature, own: Collection[str]) -> list[str]:
    """List the columns of the data without which a function of the form lists cannot be called. `own`: its settings."""
    given = (*LISTS, *FURTHER, *own)
    return [name for name in found.required if name not in given]


def names_answer(call: str) -> bool:
    """Tell whether the source of a reward function names the gold answer: as a parameter, a key, or what reads one.

    Functions of its file that it names count too. False for what cannot be found.
    """
    try:
        found = find_named(call)
    except PluginError:
        return False
    tree = found.module if isinstance(found, Source) else ast.parse(found.text)
    definitions = {node.name: node for node in tree.body if isinstance(node, _Function | ast.ClassDef)}
    reached: list[ast.AST] = []
    ahead: list[ast.AST] = [found.node]
    while ahead:
        reached.append(ahead.pop())
        for node in ast.walk(reached[-1]):
            words = {getattr(node, name, None) for name in ("arg", "id", "attr", "value")} if _is_word(node) else set()
            if not words.isdisjoint(_ANSWERS):
                return True
            named = definitions.get(node.id) if isinstance(node, ast.Name) else None
            if named is not None and named not in (*reached, *ahead):
                ahead.append(named)
    return False


def _is_word(node: ast.AST) -> bool:
    named = isinstance(node, ast.arg | ast.Name)
    return named or (isinstance(node, ast.Constant) and isinstance(node.value, str))


def mistaken_form(found: Signature, own: Collection[str]) -> tuple[str, str, str] | None:
    """Tell which names keep a function from being of verl's or TRL's form, which it resembles: setting, message, cure.

    None for one that resembles neither, and for one that can be called with a sample.
    """
    names = list(dict.fromkeys((*found.positional, *found.keywords)))
    further = [name for name in found.required if name not in (*found.positional[:1], *own)]
    if found.form == "sample" and not further:
        return None
    # What has a name of TRL's may have columns for the others.
    for tool, forms, least, all_names in (("verl", ("sample", "score"), 2, SCORE), ("TRL", ("sample",), 1, LISTS)):
        wrong = _nearly(names, all_names, own)
        right = [name for name in names if name in all_names]
        # Functions of any form may take a prompt.
        resembles = len({*wrong.values(), *right} - {LISTS[0]}) >= least
        if wrong and resembles and found.form in forms:
            renamed = " and ".join(f"`{name}` to `{meant}`" for name, meant in wrong.items())
            message = f"{', '.join(wrong)}: no name by which functions of {tool}'s form are called"
            columns = " and columns" if tool == "TRL" else ""
            called = f"called by keyword, with {', '.join(all_names)}{columns}"
            return "", message, f"rename {renamed}: these functions are {called}"
    return None


def _nearly(names: Sequence[str], known: Sequence[str], own: Collection[str]) -> dict[str, str]:
    """Find what is nearly one of the known names: by its spelling, or by its place among verl's parameters."""
    found: dict[str, str] = {}
    for n, name in enumerate(names):
        if name in (*SCORE, *LISTS, *FURTHER, *own):
            continue
        free = [one for one in known if one not in names and one not in found.values()]
        close = _NEARLY.get(name.lower()) or nearest(name, free, cutoff=0.75)
        at_its_place = known[n] if known is SCORE and n < 3 and names[0] == known[0] else None
        meant = close if close in free else at_its_place
        if meant in free and meant is not None:
            found[name] = meant
    return found


def form_complaint(found: Signature, own: Mapping[str, Any]) -> tuple[str, str, str] | None:
    """Tell what is wrong with a function of TRL's or verl's form and its settings: setting, message, and cure."""
    if _BATCHED in found.keywords:
        message = f"it takes {_BATCHED}, as functions of verl's reward manager `batch` do, which are not called here"
        return "", message, f"def compute_score({', '.join(SCORE)}), for one sample, or lists as in TRL: {LISTS[1]}"
    only = [name for name in found.positional if name not in found.keywords]
    if only:
        return "", f"it takes {', '.join(only)} by position alone", "it is called by keyword: remove the / behind them"
    if (mistaken := mistaken_form(found, own)) is not None:
        return mistaken
    others = [name for name in own if name not in found.keywords]
    mistyped = [name for name in others if nearest(name, OWN_KEYS, cutoff=0.8) is not None]
    if mistyped:  # also where a function takes any keyword
        return mistyped[0], "unknown setting", did_you_mean(mistyped[0], (*OWN_KEYS, *found.keywords))
    unknown = [] if found.collects else others
    if unknown:
        return unknown[0], "unknown setting", did_you_mean(unknown[0], found.keywords)
    missing = [name for name in found.required if name not in (*SCORE, *own)] if found.form == "score" else []
    if missing:
        cure = f"write it beside `function`: {{…, {missing[0]}: …}}; what verl calls with is {', '.join(SCORE)}"
        return missing[0], "required, but not given", cure
    return None


def _written(node: _Function) -> Signature:
    given = node.args
    by_position = [*given.posonlyargs, *given.args]
    without = by_position[: len(by_position) - len(given.defaults)]
    required = [
        *without,
        *(one for one, default in zip(given.kwonlyargs, given.kw_defaults, strict=True) if not default),
    ]
    return Signature(
        tuple(one.arg for one in by_position),
        tuple(one.arg for one in (*given.args, *given.kwonlyargs)),
        tuple(one.arg for one in required),
        given.kwarg is not None,
    )


def _made(made_by: ast.expr | None, at: Value) -> Signature | None:
    """Find the signature of what an expression makes; None if that cannot be told."""
    match made_by:
        case ast.Lambda():
            return _written(made_by)
        case ast.Name(id=name) if name in at.definitions:
            node = at.definitions[name]
            return None if isinstance(node, ast.ClassDef) else _written(node)
        case ast.Call(func=function, args=[first, *others], keywords=keywords) if _is_partial(function):
            inner = _made(first, at)
            names = [keyword.arg for keyword in keywords]
            unknown = any(isinstance(one, ast.Starred) for one in others) or None in names
            return None if inner is None or unknown else inner.bound(len(others), [str(name) for name in names])
        case ast.Call(func=ast.Name(id=name)) if isinstance(at.definitions.get(name), ast.ClassDef):
            return _called(at.definitions[name].body)
    return None


def _is_partial(function: ast.expr) -> bool:
    return ast.unparse(function) in ("partial", "functools.partial")


def _called(body: Sequence[ast.stmt]) -> Signature | None:
    """Find the signature of the objects of a class: that of its own `__call__`."""
    for node in body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name == "__call__":
            return _written(node).bound(1, ())
    return None


def check_reward(call: str, function: object, own: Collection[str]) -> Signature:
    """Return the signature of an imported reward function with these settings; raises PluginError if it is none."""
    if not callable(function):
        raise PluginError(f"{call!r} is a {type(function).__name__}; expected a function")
    try:
        found = signature(function)
    except (TypeError, ValueError) as error:
        raise PluginError(f"{call}: {function!r} has no signature: {error}") from error
    wrong = mistaken_form(found, own) if found.form == "sample" else form_complaint(found, dict.fromkeys(own))
    if wrong is not None:
        setting, message, cure = wrong
        raise PluginError(f"{call}: {f'{setting}: ' if setting else ''}{message} — {cure}")
    if found.form == "sample":
        check_call(call, function, ("sample",), tuple(own))
    return found
