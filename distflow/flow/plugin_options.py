"""Checks the options of distflow's own engines and backends before anything starts; other plug-ins check theirs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from distflow.config.plugins import BACKENDS, ENGINES, OPTIONS, PluginUse, full_name, refuse_float16
from distflow.config.schema import PoolConfig, Recipe, WorkerSettings
from distflow.errors import KeyedError, Problems, UserError
from distflow.flow.families import refuse_attention, refuse_family
from distflow.flow.plan import Plan, PoolPlan
from distflow.flow.resolve import resolve
from distflow.flow.sizes import attention_heads, configuration
from distflow.flow.step import SAMPLING_SETTINGS, response_tokens
from distflow.flow.structure import Structure
from distflow.types import SamplingParams, departing


def repeats_samples(plan: Plan) -> bool:
    """Whether a sample for training that is generated twice has the same tokens, as far as options of engines tell.

    Where it has not, the first of two copies to be complete would be the shorter one, so that what is trained on
    would depend on how long it is.
    """
    recipe = plan.recipe
    for planned in (pool for pool in plan.pools if pool.generates and not pool.validates):
        pool = recipe.layout.pools[planned.name]
        for _, own in _settings(pool):
            engine = full_name(own.engine or pool.engine, ENGINES)
            options = resolve(OPTIONS[engine]).parse(pool.engine_options_of(own)) if engine in OPTIONS else None
            tells = getattr(options, "repeats_samples", None)
            if tells is not None and not tells(recipe.run.deterministic):
                return False
    return True


@dataclass(frozen=True, slots=True)
class _Used:
    key: str
    """Where the options stand."""
    chosen: str
    """Where the engine or the backend is named."""
    plugin: str
    options: Mapping[str, Any]
    uses: Sequence[PluginUse]


def check_options(recipe: Recipe, structure: Structure, problems: Problems) -> None:
    """Report what an engine or backend of the recipe would refuse, by the key of the pool or of one of its workers;
    and what none of them can do.

    Options that do not go with another key of the recipe are reported by that key.
    """
    backends = list(_backends(recipe, structure))
    for used in (*_engines(recipe, structure), *backends):
        try:
            for use in used.uses:
                refuse_float16(use)
                refuse_family(use, used.plugin)
            for use in used.uses if used in backends else ():
                refuse_attention(use)
            if used.plugin not in OPTIONS:
                continue
            options = resolve(OPTIONS[used.plugin]).parse(used.options)
            for use in used.uses if hasattr(options, "check") else ():
                options.check(use)
        except KeyedError as error:
            key = problems.where.newest((error.key, used.chosen, used.key))
            problems.add(key, error.message if key == error.key else f"with {error.key}: {error.message}")
        except UserError as error:
            problems.add(used.key, str(error))


def check_sampling(recipe: Recipe, structure: Structure, problems: Problems) -> None:
    """Refuse settings of sampling that an engine does not take, or of which it tells log-probs that no weight can be
    made of: where training weights tokens, both sides need those of the same distribution.

    Otherwise each weight would be too small by the mass that is cut off, which differs from place to place.
    """
    for node in (node for node in structure.steps if node.role == "generate"):
        own, key = recipe.val.sampling if recipe.val and not node.prefix else {}, f"flow.steps.{node.name}.with"
        for place, settings in ((key, node.settings), ("val.sampling", own)):
            _check_forms(place, {**node.settings, **settings}, settings, problems)
        given = {**dict.fromkeys(_sampling(node.settings), key), **dict.fromkeys(_sampling(own), "val.sampling")}
        weighing = next((other.name for other in structure.steps if other.weights_samples_of(node)), "")
        for planned in (pool for pool in structure.pools if node.model in pool.generates):
            trained = {} if planned.validates else dict.fromkeys(_sampling(node.settings), key)
            for used in _engines_of(recipe, structure, planned, str(node.model)) if given else ():
                _check_engine(used, given, "", recipe.run.deterministic, problems)
                if weighing:
                    _check_engine(used, trained, weighing, recipe.run.deterministic, problems)


def _sampling(settings: Mapping[str, Any]) -> list[str]:
    """Name the settings of sampling that change something, and that an engine may refuse."""
    return [*departing(settings), *(["stop"] if settings.get("stop") else [])]


def _check_forms(place: str, settings: Mapping[str, Any], given: Mapping[str, Any], problems: Problems) -> None:
    """Report what no request can have: values of the wrong kind, and more tokens at least than at most."""
    for name in SAMPLING_SETTINGS:
        try:
            SamplingParams(**({name: given[name]} if given.get(name) is not None else {}))
        except TypeError as error:
            problems.add(f"{place}.{name}", str(error).partition("): ")[2], "write a value of that kind")
    least, most = settings.get("min_new_tokens"), settings.get("max_new_tokens")
    if "min_new_tokens" in given and isinstance(least, int) and isinstance(most, int) and least > most:
        problems.add(f"{place}.min_new_tokens", f"{least} is more than max_new_tokens, {most}", f"at most {most}")


def _check_engine(
    used: _Used, given: Mapping[str, str], weighing: str, deterministic: bool, problems: Problems
) -> None:
    """Report what one engine refuses of the settings given, by where they stand. `weighing`: the step that weights
    tokens; "": what it refuses in any case."""
    options: Any = resolve(OPTIONS[used.plugin]).parse(used.options) if used.plugin in OPTIONS else None
    if not hasattr(options, "refuses_sampling"):
        return
    found: dict[tuple[str, str], list[str]] = {}
    for name, place in given.items():
        always = options.refuses_sampling(name, weighed=False, deterministic=deterministic)
        now = options.refuses_sampling(name, weighed=bool(weighing), deterministic=deterministic)
        if now is not None and (always is None) == bool(weighing):
            found.setdefault(now, []).append(f"{place}.{name}")
    for (why, hint), (key, *others) in found.items():
        said = f"step {weighing!r} weights tokens by their log-probs, and {why}" if weighing else why
        problems.add(key, said, hint, others=(*others, used.chosen))


def _engines(recipe: Recipe, structure: Structure) -> Iterator[_Used]:
    for planned in structure.pools:
        for model in planned.generates:
            yield from _engines_of(recipe, structure, planned, model)


def _engines_of(recipe: Recipe, structure: Structure, planned: PoolPlan, model: str) -> Iterator[_Used]:
    pool, config = recipe.layout.pools[planned.name], structure.models.configs[model]
    use = PluginUse(
        model=config.model_dump(),
        device=pool.device,
        model_name=model,
        pool=planned.name,
        offload=pool.offload and planned.takes_turns,
        deterministic=recipe.run.deterministic,
        longest=_longest(recipe, structure, model),
        heads=attention_heads(config),
        config=configuration(config),
    )
    for at, own in _settings(pool):
        differs = own.engine is not None or own.engine_options is not None
        yield _Used(
            f"layout.pools.{planned.name}{at if differs else ''}.engine_options",
            f"layout.pools.{planned.name}{at if own.engine is not None else ''}.engine",
            full_name(own.engine or pool.engine, ENGINES),
            pool.engine_options_of(own),
            [replace(use, device=own.device or pool.device)],
        )


def _backends(recipe: Recipe, structure: Structure) -> Iterator[_Used]:
    for planned in structure.pools:
        if not (planned.homes or planned.frozen):
            continue
        pool = recipe.layout.pools[planned.name]
        for at, own in _settings(pool):
            yield _Used(
                f"layout.pools.{planned.name}{at if own.backend_options is not None else ''}.backend_options",
                f"layout.pools.{planned.name}.backend",
                full_name(pool.backend, BACKENDS),
                pool.backend_options_of(own),
                _models(structure, planned, own.device or pool.device),
            )


def _models(structure: Structure, planned: PoolPlan, device: str) -> list[PluginUse]:
    """What a backend of this pool does, model by model."""
    models = structure.models
    return [
        PluginUse(
            model=models.configs[name].model_dump(),
            device=device,
            # A copy is defined where its original is.
            model_name=models.primary if name in models.copied else name,
            pool=planned.name,
            trained=name in models.trained,
            config=configuration(models.configs[name]),
        )
        for name in (*planned.homes, *planned.frozen)
    ]


def _settings(pool: PoolConfig) -> Iterator[tuple[str, WorkerSettings]]:
    """Yield the workers with settings of their own, by their key below the pool, and all others as one."""
    if len(pool.each) < pool.count:
        yield "", WorkerSettings()
    for index, own in pool.each.items():
        yield f".each.{index}", own


def _longest(recipe: Recipe, structure: Structure, model: str) -> int:
    """Tokens of the longest sample that a model generates; 0: not known."""
    nodes = (node for node in structure.steps if node.role == "generate" and node.model == model)
    new = [response_tokens(node.settings) for node in nodes]
    return recipe.data.max_prompt_tokens + max(new) if all(isinstance(count, int) for count in new) else 0
