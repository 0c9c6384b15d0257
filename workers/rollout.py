"""The generate step of samples with one turn."""

from __future__ import annotations

from collections.abc import Sequence

from distflow.errors import UserError
from distflow.flow.step import step
from distflow.runtime.generate_step import Generate
from distflow.runtime.steps import StepContext
from distflow.types import Episode, SamplingParams


@step(
    role="generate",
    reads=[],
    writes=[],
    choices={"temperature": ">= 0", "top_p": "> 0, <= 1", "top_k": ">= 0", "max_new_tokens": ">= 1"},
    only_with={"top_p": "temperature", "top_k": "temperature"},
)
async def sample(
    episode: Episode,
    generate: Generate,
    ctx: StepContext,
    *,
    temperature: float = 1.0,
    top_p: float = 1.0,
    top_k: int = 0,
    max_new_tokens: int = 16,
    stop_token_ids: Sequence[int] = (),
) -> None:
    """Sample one response to the prompt.

    It ends with an end token of the tokenizer or of the model's generation configuration, with one of `stop_token_ids`,
    or after `max_new_tokens` tokens. Newer weights are loaded between two decode steps; `policy_versions` [n, 4]
    records each token's version (term, version, first token, end).
    """
    stops = (*ctx.end_tokens, *stop_token_ids)
    await generate(episode.prompt_ids, SamplingParams(temperature, top_p, top_k, max_new_tokens, stops))


@step(role="generate", reads=[], writes=[], choices={"temperature": "> 0", "max_new_tokens": ">= 1"})
async def sample_with_baseline(
    episode: Episode,
    generate: Generate,
    ctx: StepContext,
    *,
    temperature: float = 1.0,
    max_new_tokens: int = 16,
    stop_token_ids: Sequence[int] = (),
) -> None:
    """As `sample`, but the last one of each group takes the likeliest tokens and is not trained on.

    Its reward is the baseline of the others (ReMax, arXiv 2310.10505): see `distflow.workers.trainer:baseline`.
    """
    if ctx.samples_per_prompt == 1:
        raise UserError("batch.samples_per_prompt is 1: that one is the baseline, and none is trained on — 2 or more")
    stops = (*ctx.end_tokens, *stop_token_ids)
    greedy = episode.sample == ctx.samples_per_prompt - 1
    params = SamplingParams(0.0 if greedy else temperature, max_new_tokens=max_new_tokens, stop_token_ids=stops)
    await generate(episode.prompt_ids, params, train=not greedy)
