"""The models of a flow: which is the policy, which are trained, and which are copies of the policy."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from distflow.config.check import Where
from distflow.config.paths import looks_like_path
from distflow.config.schema import ModelConfig
from distflow.config.suggest import did_you_mean, nearest
from distflow.config.yamlfile import shown
from distflow.errors import Problem
from distflow.flow.graph import StepNode


@dataclass(frozen=True, slots=True)
class Models:
    """All models that the steps name."""

    configs: Mapping[str, ModelConfig]
    primary: str
    """What the flow generates with and trains."""
    trained: tuple[str, ...]
    copied: tuple[str, ...]
    """Those that default to copies of the primary one."""
    unused: tuple[str, ...]


def settle_models(
    steps: Sequence[StepNode], given: Mapping[str, ModelConfig], where: Where, problems: list[Problem]
) -> Models | None:
    """Fill in further models; None, with the reasons in `problems`, if there is no policy to copy."""
    generate = next((node for node in steps if node.role == "generate"), None)
    if generate is None:
        return None
    key = f"flow.steps.{generate.name}.model"
    if generate.model is None:
        problems.append(Problem(where(key), key, "a generate step needs a model", f"add model: {next(iter(given))}"))
        return None
    if generate.model not in given:
        cure = did_you_mean(generate.model, given)
        problems.append(Problem(where(key), key, f"models has no {generate.model!r}", cure))
        return None
    trained = tuple(dict.fromkeys(n.model for n in steps if n.role == "train" and n.model is not None))
    if generate.model not in trained:
        message = f"no train step trains {generate.model!r}, which the flow generates with"
        problems.append(
            Problem(where("flow.steps"), "flow.steps", message, f"give a train step model: {generate.model}")
        )
    copied = tuple(dict.fromkeys(n.model for n in steps if n.model is not None and n.model not in given))
    for node in steps:
        _check_spelling(node, given, where, problems)
    configs = {**given, **{name: given[generate.model] for name in copied}}
    used = {node.model for node in steps}
    return Models(configs, generate.model, trained, copied, tuple(name for name in given if name not in used))


def missing_files(models: Mapping[str, ModelConfig], where: Where) -> list[Problem]:
    """Folders that models or tokenizers name and that are not there. Hub ids pass."""
    problems = []
    for name, model in models.items():
        for field, value in (("path", model.path), ("tokenizer", model.tokenizer)):
            if value is None or value.startswith("chars:") or not looks_like_path(value) or Path(value).exists():
                continue
            cure = "correct the path; hub ids work where there is a network; for SmolLM2 run `make smollm2`"
            key = f"models.{name}.{field}"
            problems.append(Problem(where(key), key, f"there is no folder {shown(Path(value))}", cure))
    return problems


def _check_spelling(node: StepNode, given: Mapping[str, ModelConfig], where: Where, problems: list[Problem]) -> None:
    """A further model may default to a copy of the policy, but a misspelt one must not."""
    if node.model is None or node.model in given:
        return
    close = nearest(node.model, given)
    if close is not None:
        key = f"flow.steps.{node.name}.model"
        problems.append(Problem(where(key), key, f"models has no {node.model!r}", f"did you mean {close!r}?"))
