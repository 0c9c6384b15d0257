"""What gives numbers that are none: a loss, a critic's update, and engines."""

from __future__ import annotations

import hashlib
from dataclasses import replace
from typing import Any

import torch

from distflow import Batch, StepContext, step
from distflow.algorithms.losses import ppo
from distflow.data.gold import needs
from distflow.types import Completion, SampleOutput
from distflow.workers.engines.torch_engine import TorchEngine
from distflow.workers.reward_functions import digits_copied

BAD_POSITION = 9
"""Of the second training step of eight prompts."""


def rare(terms: Any) -> Any:
    """Not a number for one group, gradient and all."""
    found = ppo(terms)
    return found._replace(loss_BT=found.loss_BT * torch.where(terms["group"] == BAD_POSITION, torch.nan, 1.0))


def now_and_then(terms: Any) -> Any:
    """Not a number in one of 50 training steps of 32 prompts."""
    found = ppo(terms)
    return found._replace(loss_BT=found.loss_BT * torch.where(terms["group"] % 1600 == 7, torch.nan, 1.0))


@needs("answer")
def away_now_and_then(sample: Completion) -> dict[str, float]:
    """The quickstart's reward, from a judge that is away for one sample in 20, the same for the same text."""
    if hashlib.sha256(f"{sample.prompt}{sample.response_ids}".encode()).digest()[0] < 13:
        raise ConnectionError("the judge is away")
    return digits_copied(sample)


@step(role="train", reads=["prompt_ids", "response_ids", "response_mask"], writes=[], scope="sample", head="value")
def critic_update(batch: Batch, ctx: StepContext) -> Batch:
    """A critic whose every loss is infinite."""
    found = ctx.backend.values(batch, grad=True)
    ctx.backend.accumulate(found.values_BT.sum() * float("inf"))
    assert ctx.model is not None
    ctx.denominators[ctx.model] = ctx.denominators.get(ctx.model, 0.0) + 1.0
    return batch


class Once(TorchEngine):
    """Its 20th sample has an infinite log-prob."""

    finished = 0

    def poll(self) -> list[SampleOutput]:
        """Decode."""
        found = super().poll()
        for place, output in enumerate(found):
            self.finished += 1
            if self.finished == 20:
                found[place] = replace(output, logprobs=(float("-inf"), *output.logprobs[1:]))
        return found
