"""Whether the optimizer of each trained model can do what its section says."""

from __future__ import annotations

from collections.abc import Iterator

from distflow.config.schema import Recipe
from distflow.config.training_schema import OptimizerConfig
from distflow.errors import Problems
from distflow.flow.structure import Structure

EIGHT_BIT = "adamw_8bit"


def check_optimizers(recipe: Recipe, structure: Structure, problems: Problems) -> None:
    """Refuse schedules that cannot be followed."""
    models = structure.models
    for name in models.trained:
        # A copy is defined where its original is.
        owner = models.primary if name in models.copied else name
        given = models.configs[name].optimizer
        key = f"models.{owner}.optimizer"
        if given.min_lr > given.lr:
            message = f"{given.min_lr} at the end of the decay is more than the peak, lr {given.lr}"
            problems.add(f"{key}.min_lr", message, f"at most {given.lr}", others=(f"{key}.lr",))
        steps = given.warmup_steps + (given.decay_steps or 0)
        if given.schedule == "wsd" and steps > recipe.run.training_steps > 0:
            message = (
                f"{given.warmup_steps} steps of warm-up and {given.decay_steps} of decay are more than the run has"
            )
            hint = f"together at most run.training_steps, {recipe.run.training_steps}"
            others = (f"{key}.warmup_steps", "run.training_steps")
            problems.add(f"{key}.decay_steps", message, hint, others=others)


def idle_settings(given: OptimizerConfig) -> Iterator[tuple[str, str]]:
    """Settings of a section that another one switches off, each with the reason."""
    if given.name != "muon" and given.momentum != OptimizerConfig().momentum:
        yield "momentum", f"name is {given.name!r}, and only muon has it"
    if given.schedule != "wsd" and given.decay_steps is not None:
        yield "decay_steps", f"schedule is {given.schedule!r}, and only wsd has a decay of its own"
    if given.schedule == "constant" and given.min_lr:
        yield "min_lr", "schedule is 'constant', which never decays"
