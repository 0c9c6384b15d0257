"""Checks a recipe as far as possible without running it: all problems at once, and with imports on request."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TypeVar

from pydantic import ValidationError

from distflow.config.data_schema import DataConfig
from distflow.config.load import Examined, LoadedRecipe, examine_recipe, recipe_from_mapping
from distflow.config.paths import HUB_PREFIX, is_data_file
from distflow.config.plugins import MODEL_CONFIG, STOP_COMPLAINT, TOKENIZER, VOCABULARY
from distflow.config.schema import BatchConfig, FlowConfig, LayoutConfig, ModelConfig, RunConfig
from distflow.config.section import Section
from distflow.config.yamlfile import shown, yaml_value
from distflow.errors import Problem, Problems, RecipeError, UserError, did_you_mean
from distflow.flow.chosen_function import chosen_function
from distflow.flow.data_check import check_data, keyed_sources
from distflow.flow.graph import read_steps
from distflow.flow.imported_step import check_step
from distflow.flow.model_fit import check_token_ids, position_problems, sampling_settings
from distflow.flow.model_roles import check_characters, check_families, check_files, check_shapes
from distflow.flow.plan import Plan, StepPlan
from distflow.flow.planner import make_plan
from distflow.flow.rescaling import resized
from distflow.flow.resolve import check_call, resolve
from distflow.flow.reward_form import REWARD, check_reward
from distflow.flow.sizes import configuration
from distflow.flow.step_declaration import read_declaration
from distflow.flow.step_settings import functions_of
from distflow.flow.structure import build_structure
from distflow.flow.structure_checks import check_structure
from distflow.flow.trackers import check_trackers
from distflow.flow.without_effect import tell_idle

STORES = ("s3", "gs", "abfs", "hf", "sftp", "webdav")
"""Kinds of stores that a second place is likely to be of; fsspec knows more."""
_Part = TypeVar("_Part", bound=Section)


def plan_recipe(
    name_or_path: str, overrides: Sequence[str] = (), *, need_files: bool = True, resolved: bool = False
) -> tuple[LoadedRecipe, Plan]:
    """Load and plan a recipe; raises RecipeError with the problems of both, as far as each can be checked alone.

    `resolved`: the file is a whole recipe already, as a run folder keeps it.
    """
    examined = examine_recipe(name_or_path, overrides, resolved=resolved)
    if examined.loaded is None:
        raise RecipeError([*examined.problems, *_further_problems(examined)])
    loaded = examined.loaded
    where, models = loaded.origin, loaded.recipe.models
    # A pool's own Python may have another version of transformers.
    here = need_files and any(pool.python is None for pool in loaded.recipe.layout.pools.values())
    found = Problems(where)
    check_shapes(models, found)
    if here:
        check_families(models, found)
    try:
        plan = make_plan(loaded.recipe, where, need_files=need_files)
    except RecipeError as error:
        raise RecipeError([*error.problems, *found]) from error
    check_characters(plan, found)
    check_token_ids(plan, lambda model: configuration(model).get("vocab_size"), found)
    _check_scripts(loaded.recipe.layout, found)
    check_trackers(loaded.recipe.run, found)
    _check_second_place(loaded.recipe.run, found)
    idle = tell_idle(loaded.recipe, plan, examined.given_by, found)
    if found:
        raise RecipeError(found)
    notes = [note for note in plan.notes if not any(note in warning for warning in idle)]
    # Plans of long samples are of use without such a model: to see what they take, or to simulate them.
    above = [*idle, *(f"warning: {problem}" for problem in position_problems(plan, where))]
    return loaded, replace(plan, notes=(*above, *notes), warnings=(*above, *plan.warnings))


def _check_scripts(layout: LayoutConfig, problems: Problems) -> None:
    """Report scripts of pools and of single workers that do not exist."""
    for name, pool in layout.pools.items():
        given = {f"layout.pools.{name}.each.{index}": own.script for index, own in pool.each.items()}
        for key, script in {f"layout.pools.{name}": pool.script, **given}.items():
            if script is not None and not Path(script).is_file():
                hint = "correct the path; `distflow plan RECIPE --worker NAME` prints a script to start from"
                problems.add(f"{key}.script", f"there is no file {shown(Path(script))}", hint)


def _check_second_place(run: RunConfig, problems: Problems) -> None:
    """Report a store that fsspec does not know."""
    protocol, colon, _ = (run.copy_to or "").partition("://")
    if colon:
        from fsspec import available_protocols  # most recipes have no second place

        if protocol not in available_protocols():
            hint = f"{did_you_mean(protocol, STORES)}, or a folder"
            problems.add("run.copy_to", f"there is no kind of store {protocol!r}", hint)


def _further_problems(examined: Examined) -> list[Problem]:
    """Problems of the sections that are well-formed although others are not."""
    problems = Problems(examined.where)
    flow = _sound(examined, "flow", FlowConfig)
    layout = _sound(examined, "layout", LayoutConfig)
    data = _sound(examined, "data", DataConfig)
    models = _sound_models(examined)
    if models is not None:
        check_files(models, problems)
        check_shapes(models, problems)
        check_families(models, problems)
    if flow is not None and layout is not None and models is not None:
        run, batch = _sound(examined, "run", RunConfig), _sound(examined, "batch", BatchConfig)
        structure = build_structure(flow, layout, models, problems, run, batch)
        if structure is not None:
            check_structure(structure, problems)
    elif flow is not None:
        read_steps(flow, problems)
    if data is not None:
        check_data(data, problems, problems)
    return problems


def _sound(examined: Examined, key: str, schema: type[_Part]) -> _Part | None:
    if _is_blamed(examined, key) or key not in examined.values:
        return None
    try:
        return schema.model_validate(examined.values[key])
    except ValidationError:
        return None  # its problems are among those of the whole recipe


def _sound_models(examined: Examined) -> dict[str, ModelConfig] | None:
    if _is_blamed(examined, "models") or not isinstance(examined.values.get("models"), dict):
        return None
    return {name: ModelConfig.model_validate(model) for name, model in examined.values["models"].items()}


def _is_blamed(examined: Examined, key: str) -> bool:
    return any(problem.key.split(".")[0] == key for problem in examined.problems)


def check_imports(plan: Plan, where: Callable[[str], str]) -> list[Problem]:
    """Import every plug-in of the plan in this process and check its signature, as the workers will."""
    problems = Problems(where)
    imported, read = "it is imported the same way inside the workers", "the workers read it the same way"
    for hint, checks in ((imported, _import_checks(plan)), (read, _model_checks(plan))):
        _run(checks, hint, problems)
    if not problems:
        check_token_ids(plan, lambda model: resolve(VOCABULARY)(model.model_dump()), problems)
        _run(_stop_checks(plan), "a response never ends with another one: correct it", problems)
    return problems


def _run(checks: Iterator[tuple[str, Callable[[], object]]], hint: str, problems: Problems) -> None:
    for key, check in checks:
        try:
            check()
        except UserError as error:
            problems.add(key, str(error), hint)


def _check_texts(stops: str | Sequence[str], model: Mapping[str, object]) -> None:
    tokenizer, complaint = resolve(TOKENIZER)(model), resolve(STOP_COMPLAINT)
    for stop in (stops,) if isinstance(stops, str) else stops:
        if told := complaint(tokenizer, stop):
            raise UserError(told)


def _stop_checks(plan: Plan) -> Iterator[tuple[str, Callable[[], object]]]:
    """Check that the texts that end responses are some that the model can write."""
    for place, settings, _ in sampling_settings(plan):
        if settings.get("stop"):
            tokenizer_of = plan.recipe.models[plan.primary].model_dump()
            yield f"{place}.stop", partial(_check_texts, settings["stop"], tokenizer_of)


def _model_checks(plan: Plan) -> Iterator[tuple[str, Callable[[], object]]]:
    """Checks that transformers accepts each model's section of the recipe."""
    read = resolve(MODEL_CONFIG)
    for name, model in plan.recipe.models.items():
        yield f"models.{name}", partial(read, model.model_dump())


def _step(step: StepPlan) -> None:
    check_step(resolve(step.call), step)


def _call(call: str, positional: Sequence[str], keywords: Sequence[str]) -> None:
    check_call(call, resolve(call), positional, keywords)


def _reward(call: str, own: Sequence[str]) -> None:
    check_reward(call, resolve(call), own)


def _source(call: str, keywords: Sequence[str]) -> None:
    found = resolve(call)
    if callable(found) or keywords:
        check_call(call, found, (), keywords)


def _import_checks(plan: Plan) -> Iterator[tuple[str, Callable[[], None]]]:
    shared = {step.name for step in plan.steps}
    for step in plan.steps:
        key = f"flow.steps.{step.name}"
        yield f"{key}.call", partial(_step, step)
        declaration = read_declaration(step.call)
        plugins = {name: names for name, names in declaration.spec.plugins.items() if name in step.settings}
        for setting, positional in plugins.items():
            for below, (call, own) in functions_of(step.settings[setting]).items():
                check = partial(_reward, call, own) if positional == REWARD else partial(_call, call, positional, own)
                yield f"{key}.with.{setting}{below}", check
        function = chosen_function(declaration.spec, declaration.parameters, step.settings)
        if function is not None:
            own = tuple(setting for setting in step.settings if setting in function.own.settings)
            yield f"{key}.with.{function.setting}", partial(_call, function.call, function.arguments, own)
    for worker in plan.workers:
        pool = f"layout.pools.{worker.name.pool}"
        for step in worker.steps:
            if step.name not in shared:
                yield f"{pool}.each.{worker.name.index}.steps", partial(_step, step)
    yield from _class_checks(plan)
    yield from _source_checks(plan)


def _source_checks(plan: Plan) -> Iterator[tuple[str, Callable[[], None]]]:
    for key, source in keyed_sources(plan.recipe.data):
        if not (is_data_file(source.source) or source.source.startswith(HUB_PREFIX)):
            yield f"{key}.source", partial(_source, source.source, tuple(source.with_))


def _class_checks(plan: Plan) -> Iterator[tuple[str, Callable[[], None]]]:
    seen: set[str] = set()
    for worker in plan.workers:
        pool = f"layout.pools.{worker.name.pool}"
        for key, call in ((f"{pool}.engine", worker.engine), (f"{pool}.backend", worker.backend)):
            if call is not None and call not in seen:
                seen.add(call)
                yield key, partial(_call, call, ("spec",), ())


def plan_resized(run_dir: Path, counts: Mapping[str, int], *, spanning: bool = False) -> Plan:
    """The plan of a run's recipe with these numbers of workers; raises RecipeError if it cannot be planned.

    `spanning`: they are those of `rescaling.span`.
    """
    source = run_dir / "recipe.yaml"

    def where(key: str) -> str:
        return str(source)

    recipe = recipe_from_mapping(resized(yaml_value(source.read_text()), counts), where)
    return make_plan(recipe, where, spanning=spanning)
