"""The critic's update in a run whose first critic dies once, between two optimizer steps of one training step."""

import os
import signal
from pathlib import Path
from typing import Any

from distflow import Batch, StepContext, step
from distflow.workers.critic import critic_update as real

STEP = 6


@step(
    role="train",
    reads=["prompt_ids", "response_ids", "response_mask", "values", "return"],
    writes=[],
    scope="sample",
)
def critic_update(
    batch: Batch, ctx: StepContext, *, once: str = "", clip: float = 0.5, aggregate: str = "token-mean"
) -> Batch:
    """Kill this worker before the second update of training step STEP, if no file `once` says that this happened."""
    calls: Any = ctx.state.setdefault("calls", {})
    number = calls.get(str(ctx.training_step), 0)
    calls[str(ctx.training_step)] = number + 1
    if ctx.worker == "critic/0" and ctx.training_step == STEP and number == 1 and not Path(once).exists():
        Path(once).write_text("killed")
        os.kill(os.getpid(), signal.SIGKILL)
    return real(batch, ctx, clip=clip, aggregate=aggregate)
