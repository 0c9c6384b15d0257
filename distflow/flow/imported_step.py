"""Whether a step that has been imported is the one that the planner read in its source."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence

from distflow.errors import PluginError
from distflow.flow.plan import StepPlan
from distflow.flow.resolve import check_call, not_a_generate_step, split_call
from distflow.flow.step import ATTRIBUTE, FILTERED, StepSpec, named_fields, of_runtime, reads_of, writes_of
from distflow.types import prefixed

_POSITIONAL: Mapping[str, Sequence[str]] = {
    "generate": ("episode", "generate", "ctx"),
    "read": ("row",),
    "client": ("batch",),
}
"""Arguments of steps that are not given a batch."""


def check_step(function: object, plan: StepPlan) -> None:
    """Check that an imported function is the step that the planner read; raises PluginError if it differs."""
    if not callable(function):
        raise PluginError(f"step {plan.name!r}: {plan.call} is a {type(function).__name__}, not a function")
    if not hasattr(function, ATTRIBUTE):
        raise PluginError(f"step {plan.name!r}: {plan.call} lacks @step (is it wrapped by another decorator?)")
    spec: StepSpec = getattr(function, ATTRIBUTE)
    reads = reads_of(spec, plan.prefix)
    trained = ["finish_reason"] if spec.role == "train" and plan.model is not None else []  # batch.mask_truncated
    at_times = [*trained, *spec.reads_if_there, *(field for fields in spec.reads_when.values() for field in fields)]
    conditional = {prefixed(field, plan.prefix) for field in at_times}
    named = named_fields(spec, plan.settings)
    filtered = prefixed(FILTERED, plan.prefix)
    # The planner leaves it out where nothing reads it.
    writes = tuple(f for f in (*writes_of(spec, plan.prefix), *named.writes) if f != filtered or f in plan.writes)
    same = (spec.role, spec.scope, writes) == (plan.role, plan.scope, plan.writes)
    further = set(plan.reads) - set(reads) - conditional - set(named.reads)
    # A function that the settings choose may read any further field.
    if not same or set(reads) - set(plan.reads) or (further and not spec.arguments):
        raise PluginError(
            f"step {plan.name!r}: {plan.call} was imported with a declaration that differs from its source"
        )
    yields = inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function)
    if plan.role == "generate" and yields:
        raise PluginError(f"step {plan.name!r}: {plan.call} {not_a_generate_step(split_call(plan.call)[1])}")
    positional = _POSITIONAL.get(plan.role, ("batch", "ctx"))
    given = of_runtime(inspect.signature(function).parameters) if plan.role == "generate" else ()
    check_call(plan.call, function, positional, tuple(name for name in plan.settings if name not in given))
