"""Settings that a recipe gives and that change nothing in its plan, as one table.

Each row finds keys whose values differ from what happens anyway. Shipped files may hold such keys: a layout serves many
flows. Users get a warning about their own. Rows marked `refuse` are about what the pool or model at hand does not do at
all: an override of that kind, which was written for this very run, is a mistake.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Literal, NamedTuple

from distflow.config.load import Giver
from distflow.config.schema import PoolConfig, Recipe, RunConfig, WorkerSettings
from distflow.config.training_schema import OptimizerConfig
from distflow.errors import Problems, nearest
from distflow.flow.plan import Plan, PoolPlan, StepPlan
from distflow.flow.reading import unread_keys
from distflow.flow.step import ERROR_SETTINGS
from distflow.flow.step_declaration import read_declaration
from distflow.flow.training_fit import idle_settings
from distflow.flow.validation import is_cut_short
from distflow.types import is_validated


class Idle(NamedTuple):
    """A key without effect."""

    key: str
    why: str
    hint: str = "remove it"


Row = Callable[[Recipe, Plan], Iterator[Idle]]

_ENGINE = ("engine", "engine_options", "slots")
_BACKEND = ("backend", "backend_options", "zero")


def tell_idle(recipe: Recipe, plan: Plan, given_by: Callable[[str], Giver], problems: Problems) -> list[str]:
    """Add a problem for each override that is refused; returns warnings about all other keys that the user gave.

    `recipe`: as it was loaded; `given_by`: who wrote the value under a key.
    """
    warnings = []
    for idle, overridden in ((idle, then) for row, then in ROWS for idle in row(recipe, plan)):
        giver = given_by(idle.key)
        if giver == "command line" and overridden == "refuse":
            problems.add(idle.key, f"has no effect: {idle.why}", idle.hint)
        elif giver:
            warnings.append(f"warning: {problems.where(idle.key)}: {idle.key} has no effect: {idle.why} — {idle.hint}")
    return warnings


def _of_pools(recipe: Recipe, plan: Plan) -> Iterator[Idle]:
    """Settings of engines and backends on pools that have none."""
    engines = [pool.name for pool in plan.pools if pool.generates]
    for pool in plan.pools:
        holds = bool(pool.homes or pool.frozen)
        settings = recipe.layout.pools[pool.name]
        if not pool.generates:
            hint = f"remove it, or set it for pool {engines[0]!r}" if engines else "remove it"
            yield from _settings(pool, settings, _ENGINE, f"pool {pool.name!r} generates nothing", hint)
        if not holds:
            held = [one.name for one in plan.pools if one.homes or one.frozen]
            hint = f"remove it, or set it for pool {' or '.join(map(repr, held))}"
            yield from _settings(pool, settings, _BACKEND, f"pool {pool.name!r} trains and holds no model", hint)
        if not (pool.generates or holds):
            why = f"pool {pool.name!r} has neither an engine nor a model"
            yield from _settings(pool, settings, ("device",), why)
        if not pool.homes:
            why = f"pool {pool.name!r} trains nothing, and only samples and rows to train on wait in it"
            hint = f"remove it, or set it for pool {plan.home.name!r}"
            yield from _settings(pool, settings, ("sample_memory_mb",), why, hint)


def _settings(
    pool: PoolPlan, settings: PoolConfig, names: tuple[str, ...], why: str, hint: str = "remove it"
) -> Iterator[Idle]:
    """Those of a pool, and of single workers of it, that differ from the defaults."""
    key = f"layout.pools.{pool.name}"
    places = {key: (settings, PoolConfig())}
    own = {f"{key}.each.{index}": (given, WorkerSettings()) for index, given in settings.each.items()}
    for place, (given, default) in {**places, **own}.items():
        for name in names:
            if name in type(given).model_fields and getattr(given, name) not in (getattr(default, name), {}):
                yield Idle(f"{place}.{name}", why, hint)


def _of_layout(recipe: Recipe, plan: Plan) -> Iterator[Idle]:
    """What the runtime leaves out although the recipe asks for it."""
    layout, step = recipe.layout, plan.origin
    only = f"step {step.name!r} does not declare that its environment allows it"
    if layout.hedging and not step.allows("repeatable"):
        yield Idle("layout.hedging", only, 'remove it, or declare @step(environment=["repeatable"])')
    if layout.partial_rollouts and not step.allows("replay"):
        yield Idle("layout.partial_rollouts", only, 'remove it, or declare @step(environment=["replay"])')
    if layout.schedule != "fifo" and recipe.run.deterministic:
        why = "run.deterministic is true: groups are leased in the order of the data"
        yield Idle("layout.schedule", why, "remove it, or run.deterministic=false")
    if layout.stealing and len(plan.owners) == 1:
        hint = f"remove it, or layout.pools.{plan.home.name}.count=2 or more"
        yield Idle("layout.stealing", f"pool {plan.home.name!r} has one worker, and none to share with", hint)


def _of_reading(recipe: Recipe, plan: Plan) -> Iterator[Idle]:
    """What concerns generation, in flows that read their samples from the data."""
    return (Idle(key, why) for key, why in unread_keys(recipe, plan))


def _of_models(recipe: Recipe, plan: Plan) -> Iterator[Idle]:
    """What only training looks at, of models that are not trained; and what copies have of the policy."""
    used = {model.name for model in plan.models}
    for name, model in recipe.models.items():
        key = f"models.{name}"
        if name not in used:
            close = nearest(name, used)
            hint = f"remove it, or name it as the `model` of a step: {', '.join(step.name for step in plan.steps)}"
            yield Idle(key, f"no step uses model {name!r}", hint if close is None else f"did you mean {close!r}?")
        if name in used and name not in plan.trained_models:
            given, default = model.optimizer, OptimizerConfig()
            for setting in type(given).model_fields:
                if getattr(given, setting) != getattr(default, setting):
                    yield Idle(f"{key}.optimizer.{setting}", f"no step trains model {name!r}")
            if model.lora is not None:
                yield Idle(f"{key}.lora", f"no step trains model {name!r}")
            if model.gradient_checkpointing:
                yield Idle(f"{key}.gradient_checkpointing", f"no step trains model {name!r}")
        if name in plan.trained_models:
            yield from (Idle(f"{key}.optimizer.{setting}", why) for setting, why in idle_settings(model.optimizer))
        if name in used and model.path is None and model.init is None and model.tokenizer is not None:
            why = f"model {name!r} is a copy of {plan.primary!r}, and has its tokenizer"
            yield Idle(f"{key}.tokenizer", why, "remove it, or give `path` or `init`")


def _of_run(recipe: Recipe, plan: Plan) -> Iterator[Idle]:
    """What other keys of the run switch off."""
    run, length = recipe.run, f"run.training_steps is {recipe.run.training_steps}"
    if not run.dump_rollouts:
        for name in ("dump_fields", "dump_limit_mb"):
            yield from _switched_off(run, name, "run.dump_rollouts is 0: nothing is dumped")
        for name, options in run.trackers.items():
            if isinstance(options, dict) and options.get("samples"):
                yield Idle(f"run.trackers.{name}.samples", "run.dump_rollouts is 0: there are no samples to show")
    if not run.trace:
        yield from _switched_off(run, "trace_limit_mb", "run.trace is false: nothing is recorded")
    if run.hf_every > run.training_steps:
        yield Idle("run.hf_every", f"{length}, so no folder is ever due", f"at most {run.training_steps}")
    if run.stop_after is not None and run.stop_after > run.training_steps:
        yield Idle("run.stop_after", length, f"less than {run.training_steps}, or remove it")
    if run.stop_when is not None and run.training_steps == 0:
        yield Idle("run.stop_when", f"{length}: nothing is trained")
    if run.keep_best is not None and not (run.save_every or run.save_every_s or run.hf_every):
        hint = "add run.save_every or run.save_every_s"
        yield Idle("run.keep_best", "only the last state is saved, so there is nothing to choose from", hint)


def _of_goals(recipe: Recipe, plan: Plan) -> Iterator[Idle]:
    """Find what a run that is over before its first validation does without."""
    if is_cut_short(recipe):
        length = f"run.training_steps is {recipe.run.training_steps}"
        why = f"{length}, so validation is only before the first and after the last"
        for key in (key for key, metric in recipe.run.judged.items() if is_validated(metric)):
            yield Idle(key.removesuffix(".metric"), why, "a longer run, or a smaller val.every")


def _switched_off(run: RunConfig, name: str, why: str) -> Iterator[Idle]:
    if getattr(run, name) != RunConfig.model_fields[name].default:
        yield Idle(f"run.{name}", why)


def _of_steps(recipe: Recipe, plan: Plan) -> Iterator[Idle]:
    """Settings of steps that another setting switches off, as the steps declare."""
    for step in plan.steps:
        declaration = read_declaration(step.call)
        for name, other in declaration.spec.only_with.items():
            changed = step.settings.get(name) != declaration.parameters.settings.get(name)
            if changed and not step.settings.get(other):
                why = f"{other} is {step.settings.get(other)!r}"
                yield Idle(f"flow.steps.{step.name}.with.{name}", why, f"remove it, or set {other}")
        if step.role == "generate":
            yield from _of_errors(step)


def _of_errors(step: StepPlan) -> Iterator[Idle]:
    """Settings for samples on which a generate step fails, by what becomes of these."""
    on_error = step.settings["on_error"]
    idle: dict[str, tuple[str, ...]] = {"retry": (), "stop": ("max_attempts", "max_error_rate")}
    for name in idle.get(on_error, ("max_attempts",)):
        if step.settings[name] != ERROR_SETTINGS[name]:
            yield Idle(f"flow.steps.{step.name}.with.{name}", f"on_error is {on_error!r}")
    if step.environment is None and step.settings["max_sample_tokens"] is not None:
        key = f"flow.steps.{step.name}.with.max_sample_tokens"
        yield Idle(key, "the step declares no environment: its samples have one sequence", "set max_new_tokens")


def _of_weights(recipe: Recipe, plan: Plan) -> Iterator[Idle]:
    """How weights cross hosts."""
    given, types = recipe.weights, {plan.recipe.models[name].dtype for name in plan.generating}
    if given.encoding == "bf16" and types <= {"bfloat16", "float16"}:
        why = f"the weights are in {' and '.join(sorted(types))}, which is not rounded to bfloat16"
        yield Idle("weights.encoding", why, "remove it, or fp8")


ROWS: tuple[tuple[Row, Literal["refuse", "warn"]], ...] = (
    (_of_pools, "refuse"),
    (_of_layout, "refuse"),
    (_of_reading, "refuse"),
    (_of_models, "refuse"),
    (_of_weights, "refuse"),
    (_of_run, "warn"),
    (_of_goals, "warn"),
    (_of_steps, "warn"),
)
