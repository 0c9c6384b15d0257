"""Models that cannot be built, or cannot read the data, as far as that is known without torch and transformers."""

from __future__ import annotations

import ast
import functools
import importlib.util
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from distflow.config.check import Where
from distflow.config.schema import DataConfig, ModelConfig
from distflow.config.suggest import nearest
from distflow.errors import PluginError, Problem
from distflow.flow.plan import Plan
from distflow.flow.sizes import configuration
from distflow.flow.source import find_source, split_call

_AUTO = Path("models", "auto", "modeling_auto.py")
_MAPPING = "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES"
_CHARS = "chars:"
_CHARACTERS = "CHARACTERS"
"""In the module of a data source: the characters that prompts and answers of its functions consist of, by name."""


def shape_problems(models: Mapping[str, ModelConfig], where: Where) -> list[Problem]:
    """Sizes that do not divide, in `init` or in a model folder's config.json."""
    problems = []
    for name, model in models.items():
        section = "init" if model.init is not None else "path"
        for field, message, cure in _shape_complaints(configuration(model)):
            key = f"models.{name}.init.{field}" if model.init is not None else f"models.{name}.path"
            problems.append(Problem(where(key), key, f"{message}{'' if section == 'init' else ' there'}", cure))
    return problems


def family_problems(models: Mapping[str, ModelConfig], where: Where) -> list[Problem]:
    """A `model_type` of which the transformers that is installed here has no causal language model."""
    known = causal_model_types()
    problems = []
    for name, model in models.items():
        config = configuration(model)
        family = config.get("model_type")
        if not known or not isinstance(family, str) or family in known or "auto_map" in config:
            continue
        key = f"models.{name}.init.model_type" if model.init is not None else f"models.{name}.path"
        close = nearest(family, known)
        guess = f"did you mean {close!r}? " if close is not None else ""
        message = f"the transformers installed here has no causal language model of model_type {family!r}"
        problems.append(Problem(where(key), key, message, f"{guess}for example qwen2, qwen3, llama, mistral, gemma3"))
    return problems


def character_problems(plan: Plan, where: Where) -> list[Problem]:
    """A tokenizer of single characters that lacks some of those that the data source says it needs."""
    model = plan.recipe.models[plan.primary]
    if model.tokenizer is None or not model.tokenizer.startswith(_CHARS):
        return []
    needed = _characters_of(plan.recipe.data)
    lacking = "".join(dict.fromkeys(char for char in needed if char not in model.tokenizer[len(_CHARS) :]))
    if not lacking:
        return []
    key = f"models.{plan.primary}.tokenizer"
    message = f"{model.tokenizer!r} lacks {lacking!r}, which the prompts of {plan.recipe.data.source} need"
    return [Problem(where(key), key, message, f"for example '{model.tokenizer}{lacking}'")]


@functools.cache
def causal_model_types() -> frozenset[str]:
    """Families that transformers can build, read from its source; empty where it cannot be read."""
    found = importlib.util.find_spec("transformers")
    if found is None or found.origin is None:
        return frozenset()
    try:
        text = (Path(found.origin).parent / _AUTO).read_text(encoding="utf-8")
    except OSError:
        return frozenset()
    _, _, rest = text.partition(_MAPPING)
    return frozenset(re.findall(r'^\s*\("([\w.-]+)",', rest.partition("\n)")[0], re.MULTILINE))


def _shape_complaints(config: Mapping[str, Any]) -> Iterator[tuple[str, str, str]]:
    """Key, what is wrong, cure."""
    width, heads, shared = (
        _size(config, name) for name in ("hidden_size", "num_attention_heads", "num_key_value_heads")
    )
    if not (width and heads):
        return
    if width % heads and config.get("head_dim") is None:
        near = " or ".join(str(size) for size in (width // heads * heads, (width // heads + 1) * heads) if size)
        yield "hidden_size", f"{width} cannot be divided by the {heads} num_attention_heads", f"{near}, or other heads"
    if shared and heads % shared:
        cure = "a number that divides num_attention_heads"
        yield "num_key_value_heads", f"{shared} does not divide the {heads} num_attention_heads", cure


def _size(config: Mapping[str, Any], name: str) -> int:
    """0 where there is none: whatever else it is, transformers will say so."""
    value = config.get(name)
    return value if type(value) is int and value > 0 else 0


def _characters_of(data: DataConfig) -> str:
    try:
        source = find_source(data.source)
    except PluginError:
        return ""
    for statement in ast.parse(source.text).body:
        match statement:
            case (
                ast.AnnAssign(target=ast.Name(id=name), value=ast.Dict() as value)
                | ast.Assign(targets=[ast.Name(id=name)], value=ast.Dict() as value)
            ) if name == _CHARACTERS:
                return _text_under(value, split_call(data.source)[1])
    return ""


def _text_under(value: ast.Dict, name: str) -> str:
    try:
        return str(ast.literal_eval(value).get(name, ""))
    except ValueError:
        return ""  # computed: it cannot be known here
