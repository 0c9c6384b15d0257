"""The forward before updates, with one more round at one replica, and what a test does before it."""

from collections.abc import Callable

from distflow import Batch, StepContext, step
from distflow.workers.reference import old_logprobs as real

BEFORE: list[Callable[[StepContext], None]] = []
"""Called on every worker before the second forward of its batch."""


@step(role="forward", reads=["prompt_ids", "response_ids"], writes=["old_logprobs"], scope="sample")
def old_logprobs(batch: Batch, ctx: StepContext) -> Batch:
    """The second forward is that of trainer/1 alone; the others go on meanwhile."""
    found = real(batch, ctx)
    if ctx.worker != "trainer/1":
        return found
    for act in BEFORE:
        act(ctx)
    return real(batch, ctx)
