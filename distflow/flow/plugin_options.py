"""Checks the options of distflow's own engines and backends before anything starts; other plug-ins check theirs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from distflow.config.plugins import BACKENDS, ENGINES, OPTIONS, PluginUse, full_name
from distflow.config.schema import PoolConfig, Recipe, WorkerSettings
from distflow.errors import KeyedError, Problems, UserError
from distflow.flow.resolve import resolve
from distflow.flow.sizes import attention_heads
from distflow.flow.structure import Structure


@dataclass(frozen=True, slots=True)
class _Used:
    key: str
    """Where the options stand."""
    plugin: str
    options: Mapping[str, Any]
    uses: Sequence[PluginUse]


def check_options(recipe: Recipe, structure: Structure, problems: Problems) -> None:
    """Report what an engine or backend of the recipe would refuse, by the key of the pool or of one of its workers.

    Options that do not go with another key of the recipe are reported by that key.
    """
    for used in (*_engines(recipe, structure), *_backends(recipe, structure)):
        if used.plugin not in OPTIONS:
            continue
        try:
            options = resolve(OPTIONS[used.plugin]).parse(used.options)
            for use in used.uses if hasattr(options, "check") else ():
                options.check(use)
        except KeyedError as error:
            problems.add(error.key, error.message)
        except UserError as error:
            problems.add(used.key, str(error))


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
        yield _Used(
            f"layout.pools.{name}{at if differs else ''}.engine_options",
            full_name(own.engine or pool.engine, ENGINES),
            pool.engine_options_of(own),
            [replace(use, device=own.device or pool.device)],
        )


def _backends(recipe: Recipe, structure: Structure) -> Iterator[_Used]:
    placement = structure.placement
    scoring = any(node.role in ("forward", "train") for node in placement.before)
    for name in dict.fromkeys([placement.training, *([placement.generating] if scoring else [])]):
        pool = recipe.layout.pools[name]
        for at, own in _settings(pool):
            yield _Used(
                f"layout.pools.{name}{at if own.backend_options is not None else ''}.backend_options",
                full_name(pool.backend, BACKENDS),
                pool.backend_options_of(own),
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
            # A copy is defined where its original is.
            model_name=models.primary if name in models.copied else name,
            pool=pool,
            trained=name in models.trained,
        )
        for name in dict.fromkeys(held)
    ]


def _settings(pool: PoolConfig) -> Iterator[tuple[str, WorkerSettings]]:
    """Yield the workers with settings of their own, by their key below the pool, and all others as one."""
    if len(pool.each) < pool.count:
        yield "", WorkerSettings()
    for index, own in pool.each.items():
        yield f".each.{index}", own


def _longest(recipe: Recipe, structure: Structure) -> int:
    new = [node.settings["max_new_tokens"] for node in structure.steps if node.role == "generate"]
    return recipe.data.max_prompt_tokens + max(new) if all(isinstance(count, int) for count in new) else 0
