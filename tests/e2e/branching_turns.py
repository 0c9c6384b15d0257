"""A generate step that asks in four branches at a time, which come in another order than they were made in."""

from __future__ import annotations

import asyncio

from distflow import StepContext, step
from distflow.runtime.generate_step import Generate
from distflow.types import Episode, SamplingParams

BRANCHES = 4


@step(role="generate", reads=[], writes=[], environment=["replay", "repeatable"])
async def branches(
    episode: Episode,
    generate: Generate,
    ctx: StepContext,
    *,
    temperature: float = 1.0,
    max_new_tokens: int = 3,
    max_tokens: int = 48,
) -> None:
    assert ctx.tokenizer is not None
    params, equals = SamplingParams(temperature, max_new_tokens=max_new_tokens), ctx.tokenizer.encode("=")

    async def branch(number: int) -> None:
        await asyncio.sleep(0.01 * (BRANCHES - number))
        first = await generate(episode.prompt_ids, params)
        await generate((*episode.prompt_ids, *first.response_ids, *equals), params)

    await asyncio.gather(*(branch(number) for number in range(BRANCHES)))
