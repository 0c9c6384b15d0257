"""Validation: what a recipe's `val` section means for a plan, and whether it can be done."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from distflow.config.data_schema import ValConfig
from distflow.config.schema import Recipe
from distflow.errors import Problems
from distflow.flow.graph import StepNode
from distflow.flow.plan import Plan, ValPlan
from distflow.flow.step_settings import complaints
from distflow.flow.structure import Structure
from distflow.types import REWARD, VAL, VAL_LOSS, is_validated


def check_validation(recipe: Recipe, structure: Structure, problems: Problems) -> None:
    """Refuse settings that the flow's generate step lacks, and flows in which further models generate.

    Where samples are read from the data, refuse what is said about samples, and to hold nothing out.
    """
    if recipe.val is None:
        if recipe.run.training_steps == 0:
            problems.add(
                "run.training_steps",
                "0 is for validation alone, and there is no section `val`",
                "add `val`, or 1 or more",
            )
        return
    if structure.reads is not None:
        _check_held_out(recipe.val, structure.reads, problems)
        return
    node, spec = _generate_step(structure), _generate_step(structure).declaration.spec
    parameters = node.declaration.parameters
    found = complaints(_settings(recipe, node), parameters, spec.plugins, spec.choices, spec.ranges)
    for setting, message, hint in found:
        if setting in recipe.val.sampling:
            problems.add(f"val.sampling.{setting}", f"{message} (a setting of flow.steps.{node.name})", hint)
    alone = next((pool for pool in structure.pools if pool.validates), None)
    if alone is not None and structure.rollout.homes:
        message = (
            f"pool {structure.rollout.name!r} trains {structure.models.primary!r} and generates with it in turn, and "
            "gives its weights to no other pool: not built yet"
        )
        problems.add(f"layout.pools.{alone.name}", message, "leave this pool out, or train and generate on two pools")
    for other in structure.steps:
        if other.role == "client" and REWARD in other.writes:
            message = f"step {other.name!r} has clients write the reward, and nobody judges samples of validation"
            problems.add("val", message, "leave val out, or a reward by a step of the role score")
    if any(other.generates_further for other in structure.steps):
        message = "this flow generates with a further model, on prompts that other steps write: not built yet"
        problems.add("val", message, "leave val out, or another flow")


def _check_held_out(val: ValConfig, reads: StepNode, problems: Problems) -> None:
    why = f"step {reads.name!r} reads the samples from the data, and nothing is generated"
    if val.data is None:
        problems.add("val.data", f"{why}: validation needs rows that are held out", "val.data.source=held_out.jsonl")
    if val.samples_per_prompt != 1:
        problems.add("val.samples_per_prompt", why, "leave it out: the rows say which responses are measured")
    if val.sampling:
        problems.add("val.sampling", why, "leave it out")


def check_goals(recipe: Recipe, structure: Structure, problems: Problems) -> None:
    """Refuse to keep checkpoints, or to end the run, by a metric that validation never measures when it is needed."""
    run, val = recipe.run, recipe.val
    for key, metric in run.judged.items():
        if not is_validated(metric):
            continue
        if val is None:
            problems.add(key, f"{metric} is measured by validation, and there is none", "add `val`")
            return
        of_all = [f"{VAL}{name}@{val.samples_per_prompt}" for name in ("avg", "pass", "maj")]
        # Those of a source are known when its prompts are, and those of steps once these have run.
        known = structure.reads is None and "/" not in metric.removeprefix(VAL)
        if known and metric not in of_all:
            problems.add(key, f"validation does not measure {metric}", f"one of {', '.join(of_all)}")
    if is_validated(run.keep_best):
        _check_kept(recipe, problems)
    ends = run.stop_when is not None and is_validated(run.stop_when.metric)
    if ends and val is not None and val.every is None and run.training_steps > 0:
        message = "there is validation only before the first training step and after the last one"
        problems.add("run.stop_when", message, f"val.every, less than {run.training_steps}")


def is_cut_short(recipe: Recipe) -> bool:
    """Tell whether a run ends before its first validation in between is due, as a trial of a longer one does.

    There is one after its last training step all the same.
    """
    every = None if recipe.val is None else recipe.val.every
    return every is not None and 0 < recipe.run.training_steps <= every


def _check_kept(recipe: Recipe, problems: Problems) -> None:
    run = recipe.run
    if run.keep_best == VAL_LOSS and run.keep_best_mode == "max":
        problems.add("run.keep_best_mode", f"max would keep the checkpoint with the highest {VAL_LOSS}", "min")
    if is_cut_short(recipe):
        return
    saves = [every for every in (run.save_every, run.hf_every) if every]
    # The last one is saved in any case, and is the newest.
    if not any(version and version % every == 0 for version in _versions(recipe)[:-1] for every in saves):
        message = "no checkpoint is due after a training step after which there is validation"
        problems.add("run.keep_best", message, "make run.save_every a multiple of val.every, or the other way round")


def val_plan(recipe: Recipe, structure: Structure) -> ValPlan | None:
    """What is validated, and when."""
    val = recipe.val
    if val is None:
        return None
    return ValPlan(
        _versions(recipe),
        val.data or recipe.data,
        val.prompts,
        val.samples_per_prompt if structure.reads is None else structure.reads.declaration.spec.samples,
        _settings(recipe, _generate_step(structure) if structure.reads is None else structure.reads),
    )


def val_lines(plan: Plan) -> list[str]:
    """The plan's page about it."""
    recipe, val = plan.recipe, plan.val
    assert recipe.val is not None, "only recipes with it have such a page"
    assert val is not None, "what is in the recipe has a plan"
    source = "the training data" if recipe.val.data is None else val.data.shown
    if plan.reads is None:
        several = "one sample" if val.samples_per_prompt == 1 else f"{val.samples_per_prompt} samples"
        prompts = "all prompts" if val.prompts is None else f"the first {val.prompts} prompts"
        sampling = "".join(f", {name} {value}" for name, value in recipe.val.sampling.items())
        measured = f"{several} each of {prompts} of {source}{sampling}"
    else:
        rows = "all rows" if val.prompts is None else f"the first {val.prompts} rows"
        measured = f"loss and metrics of {rows} of {source}, by the training workers, between training steps"
    before = "before training, " if recipe.val.at_start else ""
    every = "" if recipe.val.every is None else f"after every {recipe.val.every} training steps and "
    times = "once" if len(val.versions) == 1 else f"{len(val.versions)} times"
    return [measured, f"{before}{every}after the last: {times}"]


def before_training(plan: Plan) -> str:
    """Say what is validated before the first training step, and how to leave it out; empty if nothing is."""
    val = plan.val
    if val is None or 0 not in val.versions or not plan.batch.training_steps:
        return ""
    what, each = ("rows", "") if plan.reads is not None else ("prompts", f" × {val.samples_per_prompt}")
    if val.prompts is None:
        much = f"all {what} of {val.data.shown}{each and f'{each} samples'}"
        fewer = f"val.prompts=N takes the first N {what}, "
    else:
        samples = val.prompts * (val.samples_per_prompt if plan.reads is None else 1)
        much, fewer = f"{samples:,} {'samples' if plan.reads is None else what}", ""
        much += f" ({val.prompts:,} prompts{each})" if each and val.samples_per_prompt > 1 else ""
    return f"before training step 1 {much} are validated ({fewer}val.at_start=false leaves that out)"


def _versions(recipe: Recipe) -> tuple[int, ...]:
    assert recipe.val is not None, "nothing is asked of a recipe without it"
    last = recipe.run.training_steps
    every = recipe.val.every or max(1, last)
    return (*range(0 if recipe.val.at_start else every, last, every), last)


def _generate_step(structure: Structure) -> StepNode:
    return next(node for node in structure.steps if node.role == "generate" and not node.prefix)


def _settings(recipe: Recipe, node: StepNode) -> Mapping[str, Any]:
    assert recipe.val is not None, "nothing is asked of a recipe without it"
    return {**node.settings, **recipe.val.sampling}
