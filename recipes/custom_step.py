"""A reward function and an advantage of one's own, used by custom_step.yaml beside this file."""

from __future__ import annotations

from itertools import pairwise

import torch

from distflow import Batch, Ragged, StepContext, step
from distflow.types import Completion


def my_reward(sample: Completion) -> dict[str, float]:
    """Share of digits in the right place. `reward` is trained on; `score` is what counts; others are shown."""
    expected = sample.prompt.removesuffix("=")
    hits = sum(a == b for a, b in zip(sample.response, expected, strict=False)) / len(expected)
    exact = sample.response == expected and sample.finish_reason == "stop"
    return {"reward": hits + exact, "score": float(exact), "digits": hits}


@step(role="train", reads=["reward", "group", "response_ids"], writes=["advantage"], scope="group")
def my_advantage(batch: Batch, ctx: StepContext, *, scale: float = 1.0) -> Batch:
    """Reward minus the group's mean, times `scale`, the same for every token of a response."""
    reward, response = batch.dense("reward"), batch.ragged("response_ids")
    bounds = batch.group_bounds()
    centred = [reward[a:b] - reward[a:b].mean() for a, b in pairwise(bounds)]
    advantage = scale * torch.cat(centred)
    ctx.metrics.mean("my/advantage_size", float(advantage.abs().mean()), weight=batch.rows)
    return batch.with_columns(advantage=Ragged(advantage.repeat_interleave(response.lengths), response.offsets))
