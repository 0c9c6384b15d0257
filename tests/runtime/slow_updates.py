"""The updates of policy and critic: long in the first training step, in which something happens all the time."""

import time

from distflow import Batch, StepContext, step
from distflow.workers.critic import critic_update as real_critic
from distflow.workers.trainer import update as real_policy

PAUSE_S = 0.8


@step(
    role="train",
    reads=["prompt_ids", "response_ids", "response_mask", "values", "return"],
    writes=[],
    scope="sample",
)
def critic_update(batch: Batch, ctx: StepContext, *, clip: float = 0.5, aggregate: str = "token-mean") -> Batch:
    for row in range(len(batch)):
        time.sleep(0.0 if ctx.training_step else PAUSE_S)
        real_critic(batch.slice(row, row + 1), ctx, clip=clip, aggregate=aggregate)
    return batch


@step(
    role="train",
    reads=["prompt_ids", "response_ids", "response_mask", "rollout_logprobs", "advantage"],
    writes=[],
    scope="sample",
)
def update(batch: Batch, ctx: StepContext, *, loss: str = "ppo", aggregate: str = "token-mean") -> Batch:
    for row in range(len(batch)):
        time.sleep(0.0 if ctx.training_step else PAUSE_S)
        real_policy(batch.slice(row, row + 1), ctx, loss=loss, aggregate=aggregate)
    return batch
