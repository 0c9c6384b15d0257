"""Options of the engines and backends here, checked before anything starts; those of other plug-ins only they know."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from distflow.config.check import Where
from distflow.config.plugins import BACKENDS, ENGINES, OPTIONS, PluginUse, full_name
from distflow.config.schema import PoolConfig, Recipe, WorkerSettings
from distflow.errors import KeyedError, Problem, UserError
from distflow.flow.resolve import resolve
from distflow.flow.sharding import with_zero
from distflow.flow.sizes import attention_heads
from distflow.flow.structure import Structure


@dataclass(frozen=True, slots=True)
class _Used:
    key: str
    """Where the options stand."""
    plugin: str
    options: Mapping[str, Any]
    uses: Sequence[PluginUse]


def option_problems(recipe: Recipe, structure: Structure, where: Where) -> list[Problem]:
    """What an engine or backend that is used would refuse, by the key of the pool, or of one of its workers.

    What goes wrong with another key of the recipe is told by that one.
    """
    used = [*_engines(recipe, structure), *_backends(recipe, structure)]
    problems = [problem for one in used if (problem := _problem(one, where)) is not None]
    return list(dict.fromkeys(problems))


def _problem(used: _Used, where: Where) -> Problem | None:
    if used.plugin not in OPTIONS:
        return None
    try:
        options = resolve(OPTIONS[used.plugin]).parse(used.options)
        for use in used.uses if hasattr(options, "check") else ():
            options.check(use)
    except KeyedError as error:
        return Problem(where(error.key), error.key, error.message)
    except UserError as error:
        return Problem(where(used.key), used.key, str(error))
    return None


def _engines(recipe: Recipe, structure: Structure) -> Iterator[_Used]:
    name, model = structure.placement.generating, structure.models.primary
    pool, config = recipe.layout.pools[name], structure.models.configs[model]
    use = PluginUse(
        model=config.model_dump(),
        device=pool.device,
        model_name=model,
        pool=name,
        offload=pool.offload and name == structure.placement.training,
        deterministic=recipe.run.deterministic,
        longest=_longest(recipe, structure),
        heads=attention_heads(config),
    )
    for at, own in _settings(pool):
        differs = own.engine is not None or own.engine_options is not None
        options = own.engine_options
        if options is None:
            options = {} if own.engine is not None else pool.engine_options
        yield _Used(
            f"layout.pools.{name}{at if differs else ''}.engine_options",
            full_name(own.engine or pool.engine, ENGINES),
            options,
            [replace(use, device=own.device or pool.device)],
        )


def _backends(recipe: Recipe, structure: Structure) -> Iterator[_Used]:
    placement = structure.placement
    scoring = any(node.role in ("forward", "train") for node in placement.before)
    for name in dict.fromkeys([placement.training, *([placement.generating] if scoring else [])]):
        pool = recipe.layout.pools[name]
        for at, own in _settings(pool):
            options = pool.backend_options if own.backend_options is None else own.backend_options
            yield _Used(
                f"layout.pools.{name}{at if own.backend_options is not None else ''}.backend_options",
                full_name(pool.backend, BACKENDS),
                with_zero(options, pool),
                _models(structure, name, own.device or pool.device),
            )


def _models(structure: Structure, pool: str, device: str) -> list[PluginUse]:
    """What a backend of this pool does, model by model."""
    placement, models = structure.placement, structure.models
    nodes = [*(placement.after if pool == placement.training else ())]
    nodes += placement.before if pool == placement.generating else ()
    held = [node.model for node in nodes if node.role in ("forward", "train") and node.model is not None]
    return [
        PluginUse(
            model=models.configs[name].model_dump(),
            device=device,
            # A copy is spelled where its original is.
            model_name=models.primary if name in models.copied else name,
            pool=pool,
            trained=name in models.trained,
        )
        for name in dict.fromkeys(held)
    ]


def _settings(pool: PoolConfig) -> Iterator[tuple[str, WorkerSettings]]:
    """Of the workers that have their own, by their place below the pool, and of all others at once."""
    if len(pool.each) < pool.count:
        yield "", WorkerSettings()
    for index, own in pool.each.items():
        yield f".each.{index}", own


def _longest(recipe: Recipe, structure: Structure) -> int:
    new = [node.settings["max_new_tokens"] for node in structure.steps if node.role == "generate"]
    return recipe.data.max_prompt_tokens + max(new) if all(isinstance(count, int) for count in new) else 0
