"""A reward that waits until the trainer has computed the log-probs of samples which it got before."""

import time
from pathlib import Path

from distflow import Batch, StepContext, step
from distflow.workers.reference import old_logprobs as real
from distflow.workers.reward import verify

PROMPTS, PATIENCE_S = 8, 20.0


@step(role="forward", reads=["prompt_ids", "response_ids", "group"], writes=["old_logprobs"], scope="sample")
def old_logprobs(batch: Batch, ctx: StepContext, *, folder: str = "") -> Batch:
    """The shipped step, which notes the groups that it is called for."""
    found = real(batch, ctx)
    with (Path(folder) / f"step-{ctx.training_step}").open("a") as file:
        file.write(" ".join(map(str, dict.fromkeys(batch.dense("group").tolist()))) + "\n")
    return found


@step(
    role="score",
    reads=["prompt_text", "response_text", "response_ids", "task", "finish_reason", "group"],
    writes=["reward", "score"],
    scope="sample",
)
def reward(batch: Batch, ctx: StepContext, *, folder: str = "", function: str = "digits_copied") -> Batch:
    """The shipped step, which holds the last group of a training step back."""
    last = max(batch.dense("group").tolist())
    until = time.monotonic() + PATIENCE_S
    while last % PROMPTS == PROMPTS - 1 and not (Path(folder) / f"step-{last // PROMPTS}").exists():
        if time.monotonic() > until:
            raise TimeoutError(f"no log-probs while group {last} was awaited")
        time.sleep(0.01)
    return verify(batch, ctx, function=function)
