"""A generate step of two turns, between which a tool does what may happen only once."""

from __future__ import annotations

import asyncio
import json
import random
from pathlib import Path

from distflow import StepContext, step
from distflow.runtime.generate_step import Generate
from distflow.types import Episode, SamplingParams
from tests.e2e.slow_engine import VOCABULARY

FIRST = 20
"""Tokens of the first turn."""
ANSWERED = 3
"""Tokens of the tool's answer, which is another one whenever it is asked."""
LATE = (2, 3)
"""Samples whose tool waits until the shop is open."""


async def order(shop: Path, position: int, sample: int) -> list[int]:
    """Write an order down, in a shop that some find closed."""
    while sample in LATE and not (shop / "open").exists():
        await asyncio.sleep(0.02)
    answer = random.SystemRandom().choices(range(1, VOCABULARY), k=ANSWERED)
    with (shop / "orders").open("a") as file:
        file.write(json.dumps([position, sample, answer]) + "\n")
    return answer


@step(role="generate", reads=[], writes=[], environment=["replay", "repeatable"])
async def buy(
    episode: Episode,
    generate: Generate,
    ctx: StepContext,
    *,
    temperature: float = 1.0,
    max_new_tokens: int = 130,
    max_tokens: int = 153,
    shop: str = "",
) -> None:
    first = await generate(episode.prompt_ids, SamplingParams(temperature, max_new_tokens=FIRST))
    await asyncio.sleep(0.1)
    said = await ctx.once("order", order, Path(shop), episode.uid.position, episode.sample)
    prefix = (*episode.prompt_ids, *first.response_ids, *said)
    await generate(prefix, SamplingParams(temperature, max_new_tokens=max_new_tokens))
