"""Whether models suit the steps that use them: what their last layer gives, and what their tokens stand for.

Read from the recipe and from the files of models, as far as they are here.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from distflow.config.paths import CHARS_PREFIX
from distflow.config.plugins import ENGINES
from distflow.config.schema import ModelConfig
from distflow.config.yamlfile import shown
from distflow.errors import Problem, Problems
from distflow.flow.graph import StepNode
from distflow.flow.plan import Plan
from distflow.flow.sizes import configuration
from distflow.flow.structure import Structure

_SCORE = "score"
_GIVES = {
    "tokens": "log-probs of tokens",
    "value": "a value for each token",
    "score": "one number for a whole text",
}
_TEXT_CLASSIFIER = "ForSequenceClassification"
_CLASSIFIERS = (_TEXT_CLASSIFIER, "ForTokenClassification", "ForMultipleChoice", "ForQuestionAnswering")
_LANGUAGE_MODELS = ("ForCausalLM", "LMHeadModel", "ForConditionalGeneration", "ForMaskedLM")
_SAY_TOKENS = ("path", "init", "init.model_type", "init.vocab_size", "tokenizer")
"""Keys of a model that its vocabulary follows from."""


def check_heads(structure: Structure, problems: Problems) -> None:
    """Refuse steps whose model gives something else than they need, and models whose folder has another last layer."""
    models = structure.models
    for node in structure.steps:
        needed = node.declaration.head
        if needed is None or node.role == "generate":
            continue
        if node.model is None:
            message = f"step {node.name!r} needs a model that gives {_GIVES[needed]} (head: {needed}), and names none"
            hint = f"add model: {_of_head(needed, models.configs) or 'NAME'}"
            problems.add(f"flow.steps.{node.name}.model", message, hint, at=f"flow.steps.{node.name}.call")
            continue
        has = models.configs[node.model].head
        # That a reward model is trained is told where the models are settled.
        if has != needed and not (has == _SCORE and node.role == "train"):
            _report_head(node, needed, structure, problems)
    for name in dict.fromkeys(node.model for node in structure.steps if node.model is not None):
        _check_folder(name, models.configs[name], problems, trained=name in models.trained)


def _report_head(node: StepNode, needed: str, structure: Structure, problems: Problems) -> None:
    models, name = structure.models, str(node.model)
    has = models.configs[name].head
    message = f"step {node.name!r} needs a model that gives {_GIVES[needed]}; {name!r} has `head: {has}`"
    other = _of_head(needed, models.configs)
    hint = f"models.{name}.head={needed}" if name != models.primary else "a model of its own"
    if other is not None and other != models.primary:
        hint = f"flow.steps.{node.name}.model={other}, or {hint}"
    keys = [f"flow.steps.{node.name}.model", f"flow.steps.{node.name}.call", f"models.{name}"]
    key = f"flow.steps.{node.name}.model" if name in models.copied else f"models.{name}.head"
    problems.add(key, message, hint, others=keys)


def _of_head(head: str, models: Mapping[str, ModelConfig]) -> str | None:
    return next((name for name, model in models.items() if model.head == head), None)


def _check_folder(name: str, model: ModelConfig, problems: Problems, *, trained: bool) -> None:
    """Compare `head` with the class that a model's folder says that it is of."""
    config = configuration(model) if model.path is not None else {}
    classes = config.get("architectures")
    if not isinstance(classes, list) or not classes or "auto_map" in config:
        return
    said = f"{shown(Path(str(model.path)))} has a {classes[0]}"
    others = (f"models.{name}.head", f"models.{name}")
    if model.head == "tokens" and all(str(one).endswith(_CLASSIFIERS) for one in classes):
        message = f"{said}, a classifier: it has no log-probs of tokens"
        problems.add(
            f"models.{name}.path", message, "a causal language model; for a reward model head: score", others=others
        )
    if model.head == _SCORE and not trained and all(str(one).endswith(_LANGUAGE_MODELS) for one in classes):
        message = f"{said}, a language model: it lacks the layer that `head: score` needs"
        problems.add(
            f"models.{name}.path", message, f"the folder of a {_TEXT_CLASSIFIER[3:]} with one label", others=others
        )
    labels = _labels(config)
    if model.head == _SCORE and str(classes[0]).endswith(_TEXT_CLASSIFIER) and labels != 1:
        message = f"{said} with {labels} labels, and a reward is one number"
        problems.add(f"models.{name}.path", message, "a sequence classifier with one label", others=others)


def _labels(config: Mapping[str, Any]) -> int:
    """How many labels a classifier tells apart; transformers writes their names, and none if there are two."""
    if isinstance(config.get("id2label"), dict):
        return len(config["id2label"])
    return int(config["num_labels"]) if type(config.get("num_labels")) is int else 2


def position_problems(plan: Plan, where: Callable[[str], str]) -> Iterator[Problem]:
    """Find models that are to generate more tokens behind a prompt than they have positions for, as engines count them.

    They have `max_position_embeddings`: what scaled RoPE adds is in it already, as transformers reads it.
    """
    engines = {model: worker.engine for worker in plan.workers for model in worker.generates}
    for name, engine in engines.items():
        config, needed = configuration(plan.recipe.models[name]), plan.engine_tokens(name)
        there, key = config.get("max_position_embeddings"), "data.max_prompt_tokens"
        if engine not in ENGINES.values() or type(there) is not int or needed <= there:
            continue
        prompt = plan.recipe.data.max_prompt_tokens
        what = (
            f"{prompt} tokens of a prompt and {needed - prompt} behind it are {needed}, and model {name!r} has {there} "
            "positions (max_position_embeddings)"
        )
        hint = f"{needed - there} fewer of it, or of the generate step's max_new_tokens or max_tokens"
        yield Problem(where(key), key, what, hint)


def sampling_settings(plan: Plan) -> Iterator[tuple[str, Mapping[str, Any], str]]:
    """Yield what the recipe says of sampling: at which key, the settings there, and the model that samples so."""
    for step in plan.steps:
        if step.role == "generate":
            yield f"flow.steps.{step.name}.with", step.settings, step.model or plan.primary
    if plan.recipe.val is not None:
        yield "val.sampling", plan.recipe.val.sampling, plan.primary


def check_token_ids(plan: Plan, vocabulary: Callable[[ModelConfig], object], problems: Problems) -> None:
    """Refuse token ids that a model does not have. `vocabulary`: how many it has, no whole number where that is not
    known."""
    for place, settings, name in sampling_settings(plan):
        found = {key: settings.get(key) for key in ("stop_token_ids", "logit_bias")}
        given = {key: tokens for key, tokens in found.items() if isinstance(tokens, list | tuple | dict)}
        size = vocabulary(plan.recipe.models[name]) if any(given.values()) else None
        if type(size) is not int:
            continue
        for key, tokens in given.items():
            unknown = [token for token in tokens if not (re.fullmatch(r"\d+", str(token)) and int(token) < size)]
            if unknown:
                message = f"{unknown[0]} is no token id of model {name!r}, which has 0 to {size - 1}"
                problems.add(f"{place}.{key}", message, "a response never ends with another one: correct it")


def check_own_models(structure: Structure, problems: Problems) -> None:
    """Refuse a copy of the policy where a step needs another model, such as a teacher."""
    models = structure.models
    for node in structure.steps:
        if node.declaration.spec.own_model and node.model is not None:
            name, at = node.model, f"flow.steps.{node.name}.model"
            if name == models.primary:
                problems.add(at, f"step {node.name!r} needs another model than the policy", "for example teacher")
            elif _same_files(models.configs[models.primary], models.configs[name]):
                message = (
                    f"step {node.name!r} needs a model of its own, and {name!r} is a copy of {models.primary!r}, which "
                    "learns nothing from itself"
                )
                hint = (
                    f"models.{name}.path=FOLDER, a model with the same tokens, such as `distflow export` writes from "
                    "another run"
                )
                keys = [f"models.{one}.path" for one in (name, models.primary)]
                problems.add(f"models.{name}", message, hint, others=keys)


def check_tokens(structure: Structure, problems: Problems) -> None:
    """Refuse models for which the policy's tokens stand for something else.

    They get its tokens, not its text; only a model that scores whole texts reads these by its own tokenizer.
    """
    models = structure.models
    policy = models.configs[models.primary]
    for name in dict.fromkeys(node.model for node in structure.steps if node.model is not None):
        model = models.configs[name]
        if model.head == _SCORE or _same_files(policy, model):
            continue
        difference = _difference(policy, model)
        if difference:
            users = [node for node in structure.steps if node.model == name]
            message = (
                f"step {users[0].name!r} gives {name!r} the tokens of {models.primary!r}, and their vocabularies "
                f"differ: {difference}"
            )
            hint = f"a model with the tokenizer of {models.primary!r}; only reward models (head: score) have their own"
            keys = [f"models.{one}.{key}" for one in (name, models.primary) for key in _SAY_TOKENS]
            keys += [*(f"flow.steps.{node.name}.model" for node in users), f"models.{name}"]
            problems.add(keys[0], message, hint, others=keys[1:])


def _same_files(policy: ModelConfig, other: ModelConfig) -> bool:
    return (policy.path, policy.init, policy.tokenizer) == (other.path, other.init, other.tokenizer)


def _difference(policy: ModelConfig, other: ModelConfig) -> str:
    """How the vocabularies of two models differ; empty if they do not, or it cannot be known here."""
    ours, theirs = policy.tokenizer or policy.path, other.tokenizer or other.path
    tokens, others = _tokens(ours), _tokens(theirs)
    if ours != theirs and tokens is not None and others is not None:
        strange = next((number for number in sorted(tokens) if tokens[number] != others.get(number)), None)
        if strange is not None:
            there = f"is {others[strange]!r}" if strange in others else "is none"
            return f"token {strange} is {tokens[strange]!r}, and there it {there}"
    size = configuration(other).get("vocab_size")
    if tokens is not None and type(size) is int and size <= max(tokens, default=0):
        return f"it knows {size} tokens, and the tokenizer has {max(tokens) + 1}"
    return ""


def _tokens(tokenizer: str | None) -> Mapping[int, str] | None:
    """Token by id; None if that cannot be read here."""
    if tokenizer is None:
        return None
    if tokenizer.startswith(CHARS_PREFIX):
        return dict(enumerate(("<pad>", "<eos>", *tokenizer.removeprefix(CHARS_PREFIX))))
    return _in_folder(Path(tokenizer))


@functools.cache
def _in_folder(folder: Path) -> Mapping[int, str] | None:
    path = folder / "tokenizer.json"
    try:
        read = json.loads(path.read_text(encoding="utf-8"))
        return dict(_listed(read["model"]["vocab"], read.get("added_tokens") or []))
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None  # of another kind, or not here: the worker that loads it says so


def _listed(vocabulary: Any, added: Sequence[Mapping[str, Any]]) -> Iterator[tuple[int, str]]:
    """Ids and tokens of a `tokenizer.json`: a mapping, or, for Unigram, a list of tokens with their scores."""
    if isinstance(vocabulary, list):
        yield from ((number, str(token)) for number, (token, _) in enumerate(vocabulary))
    else:
        yield from ((int(number), str(token)) for token, number in vocabulary.items())
    yield from ((int(one["id"]), str(one["content"])) for one in added)
