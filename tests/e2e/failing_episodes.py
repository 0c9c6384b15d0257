"""Generate steps that fail on some samples."""

from __future__ import annotations

import time
from pathlib import Path

from distflow import StepContext, step
from distflow.runtime import episode_loop
from distflow.runtime.generate_step import Generate, GenerateInThread
from distflow.types import Episode, SamplingParams

STUCK = 12
"""Episodes that wait for ever."""
episode_loop.CLEANUP_S = 0.5


@step(role="generate", reads=[], writes=["rewards/turns"], environment=["replay"])
async def tools(
    episode: Episode,
    generate: Generate,
    ctx: StepContext,
    *,
    temperature: float = 1.0,
    max_new_tokens: int = 4,
    max_tokens: int = 24,
    every: int = 4,
) -> dict[str, float]:
    """Two turns. Samples 1 to 4 of every fourth prompt, or such, fail in four ways, on every attempt."""
    params = SamplingParams(temperature, max_new_tokens=max_new_tokens, stop_token_ids=ctx.end_tokens)
    how = episode.sample if episode.uid.position % every == 0 else 0
    if how == 1:
        raise OSError("no sandbox")
    prefix = episode.prompt_ids
    for turn in range(2):
        if how == 2 and turn:
            prefix = (*prefix, 1 << 20)
        said = await generate(prefix, params)
        if how == 3:
            raise TimeoutError("the tool is away")
        prefix = (*prefix, *said.response_ids, *ctx.tokenizer.encode("="))
    return {} if how == 4 else {"rewards/turns": 2.0}


@step(role="generate", reads=[], writes=[])
async def half(
    episode: Episode, generate: Generate, ctx: StepContext, *, temperature: float = 1.0, max_new_tokens: int = 4
) -> None:
    """Every second sample fails."""
    await generate(episode.prompt_ids, SamplingParams(temperature, max_new_tokens=max_new_tokens))
    if episode.sample % 2:
        raise ConnectionError("the sandbox is away")


@step(role="generate", reads=[], writes=[])
def stuck(
    episode: Episode,
    generate: GenerateInThread,
    ctx: StepContext,
    *,
    temperature: float = 1.0,
    max_new_tokens: int = 4,
    folder: str = "",
) -> None:
    """The first few at rollout/1 wait for something that never comes."""
    taken = [Path(folder) / f"stuck-{number}" for number in range(STUCK)]
    if ctx.worker == "rollout/1" and any(_takes(place) for place in taken):
        time.sleep(600)
    generate(episode.prompt_ids, SamplingParams(temperature, max_new_tokens=max_new_tokens))


def _takes(place: Path) -> bool:
    try:
        place.touch(exist_ok=False)
    except FileExistsError:
        return False
    return True
