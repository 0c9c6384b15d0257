"""Models that are trained by low-rank adapters: what these do not go with, and which frozen models they spare."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping

from distflow.config.plugins import BACKENDS, ENGINES, full_name
from distflow.config.schema import ModelConfig, PoolConfig, Recipe
from distflow.errors import Problems, UserError, did_you_mean
from distflow.flow.sizes import GATED, adapts, configuration, gated_matrices, model_size
from distflow.flow.structure import Structure

_APART = ("optimizer", "lora", "gradient_checkpointing")
"""What two models may differ in that compute the same before they are trained."""


def shares_base(
    models: Mapping[str, ModelConfig], here: Collection[str], trained: Collection[str], name: str
) -> str | None:
    """The model of the same worker that is, with its adapters off, the frozen model `name`; None if there is none.

    `here`: the models of the worker.
    """
    if name in trained:
        return None
    wanted = models[name].model_dump(exclude=set(_APART))
    return next(
        (
            other
            for other in here
            if other in trained
            and models[other].lora is not None
            and models[other].model_dump(exclude=set(_APART)) == wanted
        ),
        None,
    )


def check_adapters(recipe: Recipe, structure: Structure, problems: Problems) -> None:
    """Refuse adapters of models, and on engines and backends, that have none."""
    models = structure.models
    for name in models.trained:
        config = models.configs[name]
        if config.lora is None:
            continue
        # A copy is defined where its original is.
        key = f"models.{models.primary if name in models.copied else name}.lora"
        if config.head != "tokens":
            message = f"a model with `head: {config.head}` has a new last layer, which adapters would leave untrained"
            problems.add(key, message, "remove lora: it is trained whole", others=(f"models.{name}.head",))
        for message, hint in _wrong_targets(config):
            problems.add(f"{key}.targets", message, hint)
        for planned in structure.pools:
            pool = recipe.layout.pools[planned.name]
            at = f"layout.pools.{planned.name}"
            if name in planned.homes and full_name(pool.backend, BACKENDS) not in BACKENDS.values():
                message = f"backend {pool.backend!r} is not known to train adapters, and models.{name} has lora"
                problems.add(f"{at}.backend", message, f"{', '.join(BACKENDS)}, or remove lora", others=(key,))
            for where, engine in _engines(at, pool) if name in planned.generates else ():
                if full_name(engine, ENGINES) not in ENGINES.values():
                    message = f"engine {engine!r} is not known to take adapters, and models.{name} has lora"
                    problems.add(where, message, f"{', '.join(ENGINES)}, or remove lora", others=(key,))


def check_quantized(recipe: Recipe, structure: Structure, problems: Problems) -> None:
    """Refuse weights of 4 bits that would be trained, or of models that are no language models."""
    models = structure.models
    for name, config in models.configs.items():
        if config.quantize is None:
            continue
        # A copy is defined where its original is.
        owner = f"models.{models.primary if name in models.copied else name}"
        if name in models.trained and config.lora is None:
            message = f"model {name!r} is trained, and weights of 4 bits are frozen"
            hint = f"{owner}.lora={{rank: 16, alpha: 32}}, which trains adapters beside them, or quantize: null"
            problems.add(f"{owner}.quantize", message, hint, others=(f"{owner}.lora",))
        elif config.head != "tokens":
            message = f"a model with `head: {config.head}` keeps its dtype: 4 bits are for language models"
            problems.add(f"{owner}.quantize", message, "quantize: null", others=(f"{owner}.head",))


def _wrong_targets(config: ModelConfig) -> Iterator[tuple[str, str]]:
    """Targets that are no layers; those of families whose layers are not known here are left to the workers."""
    assert config.lora is not None, "only models with adapters are asked about"
    targets = config.lora.targets
    if isinstance(targets, str):
        return
    if not targets:
        yield "no layers are named, so nothing would be trained", "all-linear, or names such as [q_proj, v_proj]"
    if configuration(config).get("model_type") not in GATED:
        return
    try:
        known = list(dict.fromkeys(name for name, _, _ in gated_matrices(model_size(config))))
    except UserError:
        return
    for target in targets:
        if not any(adapts(target, name) for name in known):
            yield f"{target!r} is not the end of a linear layer's name", did_you_mean(target, known)


def _engines(at: str, pool: PoolConfig) -> Iterator[tuple[str, str]]:
    yield f"{at}.engine", pool.engine
    for index, own in pool.each.items():
        if own.engine is not None:
            yield f"{at}.each.{index}.engine", own.engine


def adapter_lines(models: Mapping[str, ModelConfig], trained: Collection[str]) -> Iterator[str]:
    """What a plan says of each model that is trained by adapters."""
    for name in trained:
        config = models[name]
        if config.lora is None:
            continue
        targets = config.lora.targets if isinstance(config.lora.targets, str) else ", ".join(config.lora.targets)
        try:
            size = model_size(config)
            share = f"{size.published / 1e6:.2f} MB a version, {size.adapters / size.parameters:.2%} of the model"
        except UserError as error:
            share = f"of unknown size: {error}"
        base = "the base" if config.quantize is None else f"the base, its weights rounded to {config.quantize},"
        yield (
            f"{name}: adapters of rank {config.lora.rank} on {targets} ({share}) are trained, published and saved; "
            f"engines load {base} by themselves and merge each version into it"
        )
        if config.init is not None:
            yield (
                f"{name}: its base is new (init), and norms, embeddings and the output layer stay random, which bounds "
                "how sure it can be of a token"
            )
