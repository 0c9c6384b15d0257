"""Generate steps that go on with something else than what they have."""

from __future__ import annotations

from distflow import StepContext, step
from distflow.runtime.generate_step import Generate
from distflow.types import Episode, SamplingParams

FIRST = 20
"""Tokens of the first turn of `summarise`."""
KEPT = 2
"""Of these, what the second begins with."""
NAMED = (5, 7, 5)
"""What the environment says."""


@step(role="generate", reads=[], writes=[], environment=["replay", "repeatable"])
async def alternate(
    episode: Episode,
    generate: Generate,
    ctx: StepContext,
    *,
    temperature: float = 1.0,
    max_new_tokens: int = 4,
    max_tokens: int = 30,
) -> None:
    """Samples 0, 2, 4 … are one sequence; the others begin with the prompt again, and each fourth once more."""
    params = SamplingParams(temperature, max_new_tokens=max_new_tokens, stop_token_ids=ctx.end_tokens)
    said = await generate(episode.prompt_ids, params)
    if episode.sample % 2 == 0:
        await generate((*episode.prompt_ids, *said.response_ids, *NAMED), params)
    for _ in range(1 + episode.sample % 4 // 3 if episode.sample % 2 else 0):
        said = await generate((*said.response_ids[-KEPT:], *episode.prompt_ids), params)


@step(role="generate", reads=[], writes=[], environment=["replay", "repeatable"])
async def summarise(
    episode: Episode,
    generate: Generate,
    ctx: StepContext,
    *,
    temperature: float = 1.0,
    max_new_tokens: int = 130,
    max_tokens: int = 155,
) -> None:
    """The second turn of every second sample begins with the end of the first."""
    first = await generate(episode.prompt_ids, SamplingParams(temperature, max_new_tokens=FIRST))
    before = first.response_ids[-KEPT:] if episode.sample % 2 else (*episode.prompt_ids, *first.response_ids)
    await generate((*before, *NAMED), SamplingParams(temperature, max_new_tokens=max_new_tokens))
