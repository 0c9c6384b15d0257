"""A generate step of two turns, none of which ends before its time."""

from __future__ import annotations

from distflow import StepContext, step
from distflow.runtime.generate_step import Generate
from distflow.types import Episode, SamplingParams

FIRST = 20
"""Tokens of the first turn."""
NAMED = (5, 7, 5)
"""What the environment says."""


@step(role="generate", reads=[], writes=[], environment=["replay", "repeatable"])
async def talk(
    episode: Episode,
    generate: Generate,
    ctx: StepContext,
    *,
    temperature: float = 1.0,
    max_new_tokens: int = 130,
    max_tokens: int = 153,
) -> None:
    first = await generate(episode.prompt_ids, SamplingParams(temperature, max_new_tokens=FIRST))
    prefix = (*episode.prompt_ids, *first.response_ids, *NAMED)
    await generate(prefix, SamplingParams(temperature, max_new_tokens=max_new_tokens))
