"""The models of a flow: which is the policy, which are trained or copied, and which cannot be built.

The checks go as far as is possible without torch and transformers.
"""

from __future__ import annotations

import ast
import functools
import importlib.util
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from distflow.config.paths import CHARS_PREFIX, looks_like_path
from distflow.config.schema import ModelConfig
from distflow.config.yamlfile import shown
from distflow.errors import PluginError, Problems, did_you_mean, nearest
from distflow.flow.graph import StepNode
from distflow.flow.plan import Plan
from distflow.flow.resolve import find_source, split_call
from distflow.flow.sizes import configuration

_AUTO = Path("models", "auto", "modeling_auto.py")
_MAPPINGS = {
    "score": "MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES",
    "value": "MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING_NAMES",
}
_CLASSES = {"score": "sequence classifier", "value": "token classifier"}
_CAUSAL = "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES"
_CHARACTERS = "CHARACTERS"
"""Name in the module of a data source: by function, the characters that prompts and answers consist of."""


@dataclass(frozen=True, slots=True)
class Models:
    """All models that the steps name."""

    configs: Mapping[str, ModelConfig]
    primary: str
    """The policy: what the flow generates with and trains, or trains on samples of the data."""
    trained: tuple[str, ...]
    copied: tuple[str, ...]
    """Models that default to copies of the primary one."""
    unused: tuple[str, ...]


def settle_models(steps: Sequence[StepNode], given: Mapping[str, ModelConfig], problems: Problems) -> Models | None:
    """Fill in models that the recipe leaves out; None, with reasons in `problems`, if there is no policy to copy."""
    generate = _primary_step(steps, given, problems)
    if generate is None or generate.model is None:
        return None
    trained = tuple(dict.fromkeys(n.model for n in steps if n.role == "train" and n.model is not None))
    keys = [f"flow.steps.{node.name}.model" for node in steps if node.role == "train"]
    _check_primary(generate, given[generate.model], trained, keys, problems)
    for name in trained:
        if name in given and given[name].head == "score" and not _trains_scores(name, steps):
            step = next(node.name for node in steps if node.role == "train" and node.model == name)
            message = f"step {step!r} trains it, and a model with `head: score` is only run frozen"
            problems.add(f"models.{name}.head", message, "head: value for a critic, head: tokens for a policy")
    copied = tuple(dict.fromkeys(n.model for n in steps if n.model is not None and n.model not in given))
    for node in steps:
        _check_spelling(node, given, problems)
    configs = {name: _with_body_of(given[generate.model], model) for name, model in given.items()}
    whole = given[generate.model].model_copy(update={"lora": None})
    # A frozen copy is the policy before training: its base.
    configs |= {name: given[generate.model] if name in trained else whole for name in copied}
    used = {node.model for node in steps}
    models = Models(configs, generate.model, trained, copied, tuple(name for name in given if name not in used))
    for node in steps:
        if node.generates_further:
            _check_further(node, steps, models, problems)
    return models


def _trains_scores(name: str, steps: Sequence[StepNode]) -> bool:
    """Whether the steps that train a model train what it gives whole texts."""
    training = [node for node in steps if node.role == "train" and node.model == name]
    return all(node.declaration.head == "score" for node in training)


def _primary_step(steps: Sequence[StepNode], given: Mapping[str, ModelConfig], problems: Problems) -> StepNode | None:
    """The step that generates with the policy, from prompts of the data; where samples are read from there, the one
    that trains it. None, with a reason, if its model is none.
    """
    generating = [node for node in steps if node.role == "generate"]
    reads = any(node.role == "read" for node in steps)
    training = [node for node in steps if node.role == "train" and node.model is not None]
    generate = next((node for node in (training if reads else generating) if not node.prefix), None)
    if generate is None:
        for node in generating[:1]:
            message = "the policy's samples come from prompts of the data, and this step's from prompts of other steps"
            problems.add(f"flow.steps.{node.name}.prefix", message, "a generate step without `prefix`")
        return None
    key = f"flow.steps.{generate.name}.model"
    if generate.model is None:
        problems.add(key, "a generate step needs a model", f"add model: {next(iter(given))}")
    elif generate.model not in given:
        problems.add(key, f"models has no {generate.model!r}", did_you_mean(generate.model, given))
    else:
        return generate
    return None


def _check_primary(
    generate: StepNode, model: ModelConfig, trained: Sequence[str], keys: Sequence[str], problems: Problems
) -> None:
    """`keys`: those that say which models are `trained`."""
    if model.path is None and model.init is None:
        problems.add(f"models.{generate.model}", "neither `path` nor `init` is given", "give exactly one of them")
    if model.head != "tokens" and generate.role == "generate":
        message = f"step {generate.name!r} generates with it, and a model with `head: {model.head}` has no next tokens"
        problems.add(f"models.{generate.model}.head", message, "head: tokens")
    if generate.model not in trained:
        message = f"no train step trains {generate.model!r}, which the flow generates with"
        others = [*problems.where.removed("flow.steps"), *keys]
        problems.add("flow.steps", message, f"give a train step model: {generate.model}", others=others)


def _check_further(node: StepNode, steps: Sequence[StepNode], models: Models, problems: Problems) -> None:
    """Refuse what no further model generates with."""
    key, name = f"flow.steps.{node.name}.model", node.model
    if name is None:
        problems.add(key, "a generate step needs a model", f"add model: {node.prefix}")
        return
    other = next((n for n in steps if n.role == "generate" and n is not node and n.model == name), None)
    if other is not None:
        message = f"generates with {name!r}, as step {other.name!r} does: one model in two steps is not built yet"
        problems.add(key, message, "a model of another name, which may be a copy: it is one if `models` lacks it")
    if name not in models.trained:
        message = f"no train step trains {name!r}, which step {node.name!r} generates with: engines get their weights"
        hint = f"a train step with model: {name}, such as update with prefix: {node.prefix}"
        problems.add(key, f"{message} from training, and no others are built yet", hint)
    config = models.configs[name]
    if config.head != "tokens":
        message = f"step {node.name!r} generates with it, and a model with `head: {config.head}` has no next tokens"
        problems.add(f"models.{name}.head", message, "head: tokens")


def _with_body_of(primary: ModelConfig, model: ModelConfig) -> ModelConfig:
    """A section that names no model is a copy of the primary one, but for what it says itself."""
    return model.model_copy(update={name: getattr(primary, name) for name in model.inherited})


def check_files(models: Mapping[str, ModelConfig], problems: Problems) -> None:
    """Report folders of models or tokenizers that do not exist. Hub ids pass."""
    for name, model in models.items():
        for field, value in (("path", model.path), ("tokenizer", model.tokenizer)):
            if value is None or not looks_like_path(value) or Path(value).exists():
                continue
            hint = "correct the path; hub ids work where there is a network; for SmolLM2 run `make smollm2`"
            key = f"models.{name}.{field}"
            problems.add(key, f"there is no folder {shown(Path(value))}", hint)


def _check_spelling(node: StepNode, given: Mapping[str, ModelConfig], problems: Problems) -> None:
    """A further model may default to a copy of the policy, but a misspelt one must not."""
    if node.model is None or node.model in given:
        return
    close = nearest(node.model, given)
    if close is not None:
        problems.add(f"flow.steps.{node.name}.model", f"models has no {node.model!r}", f"did you mean {close!r}?")


def check_shapes(models: Mapping[str, ModelConfig], problems: Problems) -> None:
    """Report sizes that do not divide, in `init` or in a model folder's config.json."""
    for name, model in models.items():
        for field, message, hint in _shape_complaints(configuration(model)):
            if model.init is not None:
                problems.add(f"models.{name}.init.{field}", message, hint)
            else:
                problems.add(f"models.{name}.path", f"{message} in its config.json", hint)


def check_families(models: Mapping[str, ModelConfig], problems: Problems) -> None:
    """Report a `model_type` for which the installed transformers has no causal language model (or classifier)."""
    for name, model in models.items():
        known = model_types(model.head)
        config = configuration(model)
        family = config.get("model_type")
        if not known or not isinstance(family, str) or family in known or "auto_map" in config:
            continue
        key = f"models.{name}.init.model_type" if model.init is not None else f"models.{name}.path"
        close = nearest(family, known)
        guess = f"did you mean {close!r}? " if close is not None else ""
        kind = _CLASSES.get(model.head, "causal language model")
        message = f"the transformers installed here has no {kind} of model_type {family!r}"
        problems.add(key, message, f"{guess}for example qwen2, qwen3, llama, mistral, gemma3")


def check_characters(plan: Plan, problems: Problems) -> None:
    """Report a tokenizer of single characters without some that the data source declares that it needs."""
    model = plan.recipe.models[plan.primary]
    if model.tokenizer is None or not model.tokenizer.startswith(CHARS_PREFIX):
        return
    sources = plan.recipe.data.sources.values()
    needed = "".join(_characters_of(source.source) for source in sources)
    lacking = "".join(dict.fromkeys(char for char in needed if char not in model.tokenizer[len(CHARS_PREFIX) :]))
    if lacking:
        message = f"{model.tokenizer!r} lacks {lacking!r}, which the prompts of {plan.recipe.data.shown} need"
        problems.add(f"models.{plan.primary}.tokenizer", message, f"for example '{model.tokenizer}{lacking}'")


@functools.cache
def model_types(head: str) -> frozenset[str]:
    """Model families that transformers can build with a head, read from its source; empty if that cannot be read."""
    root = _transformers()
    try:
        text = "" if root is None else (root / _AUTO).read_text(encoding="utf-8")
    except OSError:
        return frozenset()
    _, _, rest = text.partition(f"\n{_MAPPINGS.get(head, _CAUSAL)} = ")
    return frozenset(re.findall(r'^\s*\("([\w.-]+)",', rest.partition("\n)")[0], re.MULTILINE))


def _transformers() -> Path | None:
    found = importlib.util.find_spec("transformers")
    return None if found is None or found.origin is None else Path(found.origin).parent


def _shape_complaints(config: Mapping[str, Any]) -> Iterator[tuple[str, str, str]]:
    """Yield key, message and hint."""
    for name in _SIZES:
        value = config.get(name)
        if type(value) is int and value <= 0:
            yield name, f"{value} is not a size", "1 or more"
    width, heads, shared = (
        _size(config, name) for name in ("hidden_size", "num_attention_heads", "num_key_value_heads")
    )
    if not (width and heads):
        return
    if width % heads and config.get("head_dim") is None:
        near = " or ".join(str(size) for size in (width // heads * heads, (width // heads + 1) * heads) if size)
        yield "hidden_size", f"{width} cannot be divided by the {heads} num_attention_heads", f"{near}, or other heads"
    if shared and heads % shared:
        hint = "a number that divides num_attention_heads"
        yield "num_key_value_heads", f"{shared} does not divide the {heads} num_attention_heads", hint
    family = config.get("model_type")
    if "num_key_value_heads" not in config and isinstance(family, str):
        usual = _usual_key_value_heads(family)
        if usual and heads % usual:
            message = f"left out, it is {usual} in {family}, which does not divide the {heads} num_attention_heads"
            yield "num_key_value_heads", message, f"{heads}, or a number that divides it"


@functools.cache
def _usual_key_value_heads(family: str) -> int:
    """The default of a family in transformers, read from its source; 0 if it is the number of heads, or unknown."""
    root = _transformers()
    name = family.replace("-", "_")
    file = None if root is None else root / "models" / name / f"configuration_{name}.py"
    if file is None or not file.is_file():
        return 0
    found = re.search(r"^\s+num_key_value_heads\b[^=\n]*=\s*(\d+)", file.read_text(encoding="utf-8"), re.MULTILINE)
    return int(found[1]) if found else 0


_SIZES = (
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "vocab_size",
    "max_position_embeddings",
)
"""Keys of a configuration that are positive whole numbers in every family that has them."""


def _size(config: Mapping[str, Any], name: str) -> int:
    """A positive size, or 0 for anything else, which is reported elsewhere."""
    value = config.get(name)
    return value if type(value) is int and value > 0 else 0


def _characters_of(call: str) -> str:
    try:
        source = find_source(call)
    except PluginError:
        return ""
    for statement in ast.parse(source.text).body:
        match statement:
            case (
                ast.AnnAssign(target=ast.Name(id=name), value=ast.Dict() as value)
                | ast.Assign(targets=[ast.Name(id=name)], value=ast.Dict() as value)
            ) if name == _CHARACTERS:
                return _text_under(value, split_call(call)[1])
    return ""


def _text_under(value: ast.Dict, name: str) -> str:
    try:
        return str(ast.literal_eval(value).get(name, ""))
    except ValueError:
        return ""  # computed, so it is not known here
