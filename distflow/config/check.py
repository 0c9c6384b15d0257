"""Checks a mapping against the schema: all problems at once, each with its key, what is allowed, and a hint."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from types import UnionType
from typing import Any, get_args, get_origin

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from distflow.config.data_schema import DataConfig, DifficultyConfig
from distflow.config.meanings import Meaning
from distflow.config.other_tools import VERL, meant
from distflow.config.schema import LONGEST_S, BatchConfig, ModelConfig, Recipe, StepConfig
from distflow.config.section import is_empty_unless_given
from distflow.config.yamlfile import KeyPath, dotted
from distflow.errors import Places, Problem, Problems, did_you_mean, nearest

Where = Callable[[str], str]
"""Key path with dots -> `file:line`."""

_EXPECTED = {
    "int_type": "a whole number",
    "int_from_float": "a whole number",
    "float_type": "a number",
    "string_type": "text",
    "bool_type": "true or false",
    "dict_type": "a mapping",
    "model_type": "a mapping",
    "list_type": "a list",
    "tuple_type": "a list",
}


_POOL_NAME = re.compile(r"[A-Za-z0-9_-]+")
_MISSING = "required, but not given"
_GROUPS = (("flow",), ("layout",), ("data",))
"""Sections that a group of files of the same name goes to."""
_CHOICES = {
    "flow": "choose one, such as flow=grpo",
    "flow.steps": "choose a flow, such as flow=grpo, or give steps of your own",
    "layout": "choose one, such as layout=split",
    "layout.pools": "choose a layout, such as layout=split, or give pools of your own",
    "data": "choose one, such as data=arithmetic, or give data.source",
    "models": "choose one, such as model@models.policy=tiny, or give models.policy a `path` or `init`",
}
"""Sections that cannot be left out or empty, and what fills them."""
_UNKNOWN = "nothing here is known to stand for it (docs/from-other-tools.md)"
_CONVERT = "`distflow convert FILE` makes a recipe of verl's overrides, in a list or a shell script"
_VERL_SECTIONS = {key.partition(".")[0] for key in VERL} - {*Recipe.model_fields}
_NAMES = {
    "name": "letters, digits, '.', '_' and '-', of which the first is a letter or a digit; ",
    "prefix": "lower-case letters, digits and '_', of which the first is a letter; ",
}
"""What keys whose values are names may hold."""


def check(values: Mapping[str, Any], where: Where) -> tuple[Recipe | None, list[Problem]]:
    """The recipe, or None, and everything that is wrong with it."""
    problems = Problems(where)
    check_numbers(values, problems)
    told = {problem.key for problem in problems}
    try:
        recipe = Recipe.model_validate(values)
    except ValidationError as error:
        found = _problems_of(error.errors(include_url=False), where)
        problems += _with_hint([problem for problem in found if problem.key not in told])
        if not any(problem.key.split(".")[0] in ("batch", "recipe") for problem in problems):
            _check_batch(BatchConfig.model_validate(values["batch"]), problems)
        return None, problems
    _check_batch(recipe.batch, problems)
    _check_models(recipe.models, problems)
    _check_data(recipe.data, problems)
    if recipe.data.difficulty is not None:
        _check_difficulty(recipe.data.difficulty, problems)
    if recipe.val is not None and recipe.val.data is not None:
        _check_data(recipe.val.data, problems, "val.data")
        if recipe.val.data.difficulty is not None:
            message = "validation measures the same prompts each time"
            problems.add("val.data.difficulty", message, "leave it out, or give it for training, as data.difficulty")
    if recipe.run.keep_best is None and recipe.run.keep_best_mode != "max":
        message = f"{recipe.run.keep_best_mode} of nothing: run.keep_best is null"
        hint = "run.keep_best=critic/score, or another mean metric of the training workers, or remove it"
        problems.add("run.keep_best_mode", message, hint, others=("run.keep_best",))
    return recipe, problems


def _with_hint(problems: list[Problem]) -> list[Problem]:
    """The same problems; of several missing sections the first tells that the file is most likely laid over none."""
    missing = [problem for problem in problems if problem.message == _MISSING and "." not in problem.key]
    if len(missing) < 2:
        return problems
    hint = "begin the file with `defaults: [quickstart, _self_]`, or another recipe, or give all sections"
    return [replace(problem, hint=hint) if problem is missing[0] else problem for problem in problems]


def check_numbers(value: object, problems: Problems, at: KeyPath = ()) -> None:
    """Refuse nan and numbers beyond 64 bits wherever they stand: no setting means anything with them."""
    if isinstance(value, Mapping):
        for key, below in value.items():
            check_numbers(below, problems, (*at, str(key)))
    elif isinstance(value, list | tuple):
        for index, below in enumerate(value):
            check_numbers(below, problems, (*at, str(index)))
    elif isinstance(value, float) and math.isnan(value):
        problems.add(dotted(at), "nan is not a number", "write the number that is meant")
    elif isinstance(value, int) and abs(value) > 1 << 64:
        message = f"{value:e} does not fit into 64 bits" if abs(value) < 1 << 1000 else "it does not fit into 64 bits"
        problems.add(dotted(at), message, "write a smaller whole number")


def _check_batch(batch: BatchConfig, problems: Problems) -> None:
    """Prompts must divide evenly into ledgers."""
    prompts, ledgers = batch.prompts, batch.ledgers
    if prompts % ledgers == 0:
        _check_minibatches(batch, problems)
        return
    divisors = [n for n in range(1, prompts + 1) if prompts % n == 0]
    near = sorted(sorted(divisors, key=lambda n: abs(n - ledgers))[:2])
    multiples = [n for n in (prompts // ledgers * ledgers, (prompts // ledgers + 1) * ledgers) if n]
    hint = (
        f"nearest prompts: {_either(multiples)} (with {ledgers} ledgers); "
        f"nearest batch.ledgers: {_either(near)} (with {prompts} prompts)"
    )
    message = f"{prompts} prompts do not divide into {ledgers} ledgers"
    problems.add("batch.prompts", message, hint, others=("batch.ledgers",))


def _check_minibatches(batch: BatchConfig, problems: Problems) -> None:
    """Each mini-batch takes as many groups of every ledger, so it does not depend on the number of workers."""
    if batch.target_kl is not None and batch.epochs == 1:
        message = "target_kl leaves out further epochs, and there is only one"
        problems.add("batch.target_kl", message, "batch.epochs=2 or more, or no target_kl", others=("batch.epochs",))
    groups = batch.prompts // batch.ledgers
    if groups % batch.minibatches:
        message = f"{batch.minibatches} mini-batches do not divide the {groups} prompts of a ledger"
        hint = _minibatch_cures(batch.prompts, batch.ledgers, batch.minibatches)
        problems.add("batch.minibatches", message, hint, others=("batch.prompts", "batch.ledgers"))


def _minibatch_cures(prompts: int, ledgers: int, minibatches: int) -> str:
    """Say what makes mini-batches divide the prompts of a ledger: fewer ledgers if that does, more prompts, or fewer
    mini-batches."""
    groups, multiple = prompts // ledgers, ledgers * minibatches
    fewer = [n for n in range(1, ledgers) if prompts % (n * minibatches) == 0]
    divisors = [n for n in range(1, groups + 1) if groups % n == 0]
    near = sorted(sorted(divisors, key=lambda n: abs(n - minibatches))[:2])
    cures = [
        *(f"batch.ledgers={n}" for n in fewer[-1:]),
        f"batch.prompts={-(-prompts // multiple) * multiple} (with {ledgers} ledger{'s' * (ledgers > 1)})",
        f"batch.minibatches={_either(near)}",
    ]
    return ", or ".join(cures)


def _check_models(models: Mapping[str, ModelConfig], problems: Problems) -> None:
    """A model either exists (path) or is created (init), which needs a tokenizer; others are copies of the policy."""
    if models and all(model.path is None and model.init is None for model in models.values()):
        problems.add(f"models.{next(iter(models))}", "neither `path` nor `init` is given", "give exactly one of them")
    for name, model in models.items():
        key = f"models.{name}"
        if model.path is not None and model.init is not None:
            problems.add(key, "both `path` and `init` are given", "give exactly one of them")
        elif model.init is not None:
            if "model_type" not in model.init:
                hint = "for example model_type: qwen2"
                problems.add(f"{key}.init.model_type", "required", hint, at=f"{key}.init")
            if model.tokenizer is None:
                hint = "a folder, a hub id, or one token per character, for example tokenizer: 'chars:0123456789='"
                problems.add(f"{key}.tokenizer", "a new model needs a tokenizer", hint, at=key)


def _check_data(data: DataConfig, problems: Problems, section: str = "data") -> None:
    """Prompts come from one source or from a mixture, whose sources have their own columns and arguments."""
    if data.source is None and not data.mix:
        hint = "a file such as prompts.jsonl, a folder of such files, or a function as module:name or ./file.py:name"
        problems.add(f"{section}.source", _MISSING, hint)
    elif data.source is not None and data.mix:
        problems.add(f"{section}.mix", "`source` is given too", "give one of them", others=(f"{section}.source",))
    of_source = {"fields": data.fields, "with": data.with_} if data.mix else {}
    for key, value in of_source.items():
        if value:
            message = f"it belongs to a single `source`, and {section}.mix has {', '.join(data.mix)}: none reads it"
            hint = f"write it for each of them, as {section}.mix.{next(iter(data.mix))}.{key}.{next(iter(value))}"
            problems.add(f"{section}.{key}", message, hint, others=(f"{section}.mix",))


def _check_difficulty(difficulty: DifficultyConfig, problems: Problems) -> None:
    """Pools must cover all pass rates, and something must be drawn."""
    section, ranges = "data.difficulty", difficulty.ranges
    if not ranges and difficulty.retire_solved is None and difficulty.retire_unsolved is None:
        hint = "give pools, retire_solved or retire_unsolved, or leave it out"
        problems.add(section, "it has no pools and retires nothing", hint)
    for (name, one), (other, next_one) in pairwise(ranges):
        if one.up_to == next_one.up_to:
            key, also = (f"{section}.pools.{pool}.up_to" for pool in (other, name))
            problems.add(key, f"{one.up_to:g} is that of pool {name!r} too", "another pass rate", others=(also,))
    if ranges and ranges[-1][1].up_to < 1.0:
        name, last = ranges[-1]
        message = f"{last.up_to:g} is the highest of all pools: prompts with higher pass rates are in none"
        problems.add(f"{section}.pools.{name}.up_to", message, "1, or a further pool up to 1")
    if ranges and not any(pool.weight for _, pool in ranges):
        problems.add(f"{section}.pools", "all weights are 0", "give a pool a weight above 0")
    for name in difficulty.pools:
        if not _POOL_NAME.fullmatch(name):
            message = f"{name!r} cannot be part of a metric's name"
            problems.add(f"{section}.pools", message, "letters, digits, '_' and '-'")


def _either(numbers: list[int]) -> str:
    return " or ".join(str(number) for number in numbers)


def _problems_of(errors: Sequence[ErrorDetails], where: Where) -> Iterator[Problem]:
    """Schema errors in the terms of a recipe; of a section of another tool, one for each of its keys."""
    told = False
    for details in errors:
        key = tuple(str(part) for part in details["loc"])
        problem, given = problem_of(details, where), details["input"]
        found = [problem]
        if details["type"] == "extra_forbidden" and not _is_typo(key, given):
            leaves = dict(_leaves(given, key))
            # The name of a section says nothing of each of its keys.
            hints = {path: _foreign(path, value, len(key)) for path, value in leaves.items()} if len(leaves) > 1 else {}
            if any(hints.values()):
                found = [
                    Problem(where(dotted(path)), dotted(path), "unknown key", hint or _UNKNOWN)
                    for path, hint in hints.items()
                ]
            if not told and key[0] in _VERL_SECTIONS and isinstance(given, Mapping):
                told, found[0] = True, replace(found[0], hint=f"{found[0].hint}; {_CONVERT}")
        yield from found


def _is_typo(key: KeyPath, given: object) -> bool:
    """Whether an unknown key is like one that there is, and what it is given like that one's values."""
    if len(key) == 1 and not isinstance(given, Mapping) and meant(key[0], given):
        return False  # an argument of another tool, however like a section its name is
    near = nearest(key[-1], _keys_of(key[:-1], Recipe))
    known = [] if near is None else _keys_of((*key[:-1], near), Recipe)
    return near is not None and (not known or not isinstance(given, Mapping) or any(name in known for name in given))


def _leaves(value: object, key: KeyPath) -> Iterator[tuple[KeyPath, object]]:
    """The keys below this one that have values."""
    if isinstance(value, Mapping) and value:
        for name, below in value.items():
            yield from _leaves(below, (*key, str(name)))
    else:
        yield key, value


def _foreign(path: KeyPath, value: object, own: int) -> str:
    """Return what a key of another tool is here; empty: not known.

    By its whole path, as verl has it, else by its words from the last on, without the `own` first ones.
    """
    meaning = VERL.get(dotted(path), Meaning())
    said = meaning.text
    if "." in meaning.to and meaning.to != "run.trackers":
        key = meaning.to.replace("layout.pools.worker.", "layout.pools.NAME.")
        said = f"did you mean {key}{f' ({meaning.text})' if meaning.text else ''}?"
        word = meant(path[-1], value)
        return word if key in word else said
    found = (meant(word, value) or said or _elsewhere(word) for word in path[own:][::-1])
    return next((text for text in found if text), "")


def problem_of(details: ErrorDetails, where: Where, root: type[BaseModel] = Recipe) -> Problem:
    """A schema error in the terms of a recipe. `root` is the schema that was violated."""
    key = tuple(str(part) for part in details["loc"])
    message, hint = _words(details, key, root)
    at = dotted(key)
    if details["type"] == "too_short" and isinstance(where, Places):
        at = where.newest([at, *where.removed(at)])
    return Problem(where(at), dotted(key) or "recipe", message, hint)


def _words(details: ErrorDetails, key: KeyPath, root: type[BaseModel]) -> tuple[str, str]:
    kind = details["type"]
    given = quoted(details["input"])
    if kind == "extra_forbidden":
        return "unknown key", known_key(key, details["input"], root)
    meaning = _meaning(key, root)
    if kind == "missing":
        return _MISSING, _CHOICES.get(dotted(key), meaning)
    if kind == "too_short":
        return "it is empty", _CHOICES.get(dotted(key), meaning)
    if kind == "distflow":
        message, _, hint = details["msg"].partition("; ")
        return message, hint
    if kind == "literal_error":
        allowed = details["ctx"]["expected"].replace(" or ", ", ").replace("'", "").split(", ")
        return f"{given} is not allowed", did_you_mean(str(details["input"]), allowed)
    if kind == "string_pattern_mismatch":
        return f"{given} is not allowed", _NAMES.get(key[-1], "") + meaning
    if kind == "finite_number" and key[-1].endswith("_s"):
        return f"{given} is not allowed", f"for never give a large number of seconds, up to {LONGEST_S:g}"
    if kind in _EXPECTED:
        hint = (_as_choice(key, details["input"]) or _known(key, root)) if _EXPECTED[kind] == "a mapping" else ""
        return f"expected {_EXPECTED[kind]}, got {given}", f"{_nothing(key, details['input'], root)}{hint or meaning}"
    return f"{given} {_lower(details['msg'])}", meaning


def _nothing(key: KeyPath, given: object, root: type[BaseModel]) -> str:
    """Say how nothing is written, where nothing seems to be meant."""
    section = section_at(key[:-1], root)
    fields = {} if section is None else {key_of(section, name): info for name, info in section.model_fields.items()}
    field = fields.get(key[-1])
    if field is None or given not in (None, "", "none", "None", "null", [], {}, False):
        return ""
    if given is None and dotted(key) in _CHOICES:
        return f"{_CHOICES[dotted(key)]}; "
    if is_empty_unless_given(field):
        return "null for none; "
    return "leave it out for its defaults; " if isinstance(field.default, BaseModel) else ""


def _as_choice(key: KeyPath, given: object) -> str:
    """What stands for `layout: async` outside of `defaults`; empty if no group of files goes to this section."""
    group = key[0] if key in _GROUPS else f"model@{dotted(key)}" if key[:-1] == ("models",) else ""
    return f"a file is chosen in `defaults`: `- override /{group}: {given}`" if group and isinstance(given, str) else ""


def _known(key: KeyPath, root: type[BaseModel]) -> str:
    keys = _keys_of(key, root)
    return f"its keys: {', '.join(sorted(keys))}" if keys else ""


def known_key(key: KeyPath, given: object = None, root: type[BaseModel] = Recipe) -> str:
    """What an unknown key may have meant: a typo, another tool's word, or a key of another section."""
    siblings = _keys_of(key[:-1], root)
    if section_at(key[:-1], root) is StepConfig and nearest(key[-1], siblings) is None:
        return f"did you mean {dotted((*key[:-1], 'with', key[-1]))}? allowed: {', '.join(sorted(siblings))}"
    if root is not Recipe or _is_typo(key, given):
        return did_you_mean(key[-1], siblings)
    # Of several keys below it each has a hint of its own.
    path, value = next(_leaves(given, key)) if len([*_leaves(given, key)]) == 1 else (key, None)
    told = _foreign(path, value, len(key) - 1) or did_you_mean(key[-1], siblings)
    return told.replace("models.policy.", "models.critic.") if key[-1] == "critic" else told


def _elsewhere(word: str) -> str:
    """Keys of this name, or of a similar one, in other sections."""
    paths = [path for path in _paths(Recipe) if "each" not in path]
    close = nearest(word, {path[-1] for path in paths}, cutoff=0.8)
    places = sorted((path for path in paths if path[-1] == close), key=len)
    return f"did you mean {' or '.join(map(dotted, places[:2]))}?" if places else ""


def _paths(section: type[BaseModel], above: KeyPath = ()) -> Iterator[KeyPath]:
    """All keys of the schema; names that users choose are NAME, or the one that most recipes have."""
    for name in section.model_fields:
        path = (*above, key_of(section, name))
        yield path
        below = section_at(path)
        if below is None:
            path = (*path, "policy" if path == ("models",) else "NAME")
            below = section_at(path)
        if below is not None:
            yield from _paths(below, path)


def _meaning(key: KeyPath, root: type[BaseModel]) -> str:
    """The documentation of the key, shown as the hint at a wrong value."""
    while key and key[-1].isdigit():
        key = key[:-1]
    section = section_at(key[:-1], root)
    fields = {} if section is None else {key_of(section, name): info for name, info in section.model_fields.items()}
    description = fields[key[-1]].description if key and key[-1] in fields else None
    return f"{key[-1]}: {first_sentence(description)}" if description else ""


def first_sentence(text: str) -> str:
    """Of the documentation of a key, whose lines are wrapped."""
    sentence, dot, _ = " ".join(text.split()).partition(". ")
    return f"{sentence}{dot.strip()}"


def _lower(message: str) -> str:
    return re.sub(r"^\w+ should", "should", message)


def quoted(value: object) -> str:
    """As it would be written in YAML, as far as that differs from Python."""
    text = json.dumps(value) if value is None or isinstance(value, bool) else repr(value)
    return text if len(text) <= 60 else text[:57] + "…"


def _keys_of(key: KeyPath, root: type[BaseModel]) -> list[str]:
    """The keys that the section under `key` allows."""
    section = section_at(key, root)
    return [] if section is None else [key_of(section, name) for name in section.model_fields]


def key_of(section: type[BaseModel], field: str) -> str:
    """How a field is written in YAML."""
    return section.model_fields[field].alias or field


def section_at(key: KeyPath, root: type[BaseModel] = Recipe) -> type[BaseModel] | None:
    """The schema class of the section under a key path; None where there is none."""
    current: Any = root
    for part in key:
        if isinstance(current, type) and issubclass(current, BaseModel):
            names = {key_of(current, name): name for name in current.model_fields}
            if part not in names:
                return None
            current = _without_null(current.model_fields[names[part]].annotation)
        elif get_origin(current) is list:
            current = get_args(current)[0] if part.isdigit() else None
        else:
            arguments = get_args(current)
            current = arguments[1] if len(arguments) == 2 else None
    return current if isinstance(current, type) and issubclass(current, BaseModel) else None


def _without_null(annotation: Any) -> Any:
    """X of `X | None`."""
    arguments = [one for one in get_args(annotation) if one is not type(None)]
    return arguments[0] if isinstance(annotation, UnionType) and len(arguments) == 1 else annotation
