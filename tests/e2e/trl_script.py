"""What a script for TRL's GRPOTrainer has besides its configuration: a data set and reward functions, as they are."""

import asyncio
from functools import partial

from datasets import Dataset

dataset = Dataset.from_list(
    [
        {"prompt": [{"role": "user", "content": f"What is {n} plus 1?"}], "solution": str(n + 1), "odd": n % 2 == 1}
        for n in range(12)
    ]
)


def digits_reward(completions, log_extra=None, log_metric=None, **kwargs):
    """Reward completions by the share of digits in them."""
    contents = [completion[0]["content"] for completion in completions]
    shares = [sum(map(str.isdigit, content)) / max(1, len(content)) for content in contents]
    if log_extra:
        log_extra("digits", [sum(map(str.isdigit, content)) for content in contents])
    if log_metric:
        log_metric("digit_share", sum(shares) / len(shares))
    return shares


async def solution_reward(prompts, completions, solution, odd, **kwargs):
    """Reward right answers to odd questions; the others are not its business."""
    await asyncio.sleep(0)
    assert all(prompt[-1]["role"] == "user" for prompt in prompts)
    replies = zip(completions, solution, odd, strict=True)
    return [float(gold in reply[0]["content"]) if one else None for reply, gold, one in replies]


class Warmup:
    """Pay for length in the first steps."""

    def __call__(self, completion_ids, trainer_state, **kwargs):
        left = 1 - trainer_state.global_step / trainer_state.max_steps
        return [left * len(ids) for ids in completion_ids]


def bounded(completions, bound, **kwargs):
    return [min(bound, len(set(completion[0]["content"]))) for completion in completions]


warmup = Warmup()
variety = partial(bounded, bound=5)
