"""An environment of several turns. `distflow test-plugin recipe.yaml` tests it."""

from distflow import Episode, Generate, SamplingParams, StepContext, step


@step(
    role="generate",
    reads=[],
    writes=["reward", "score", "rewards/tries"],
    # The same turns of the model lead to the same hints, so a sample can go on at another worker, and be made twice.
    environment=["replay", "repeatable"],
)
async def guess(
    episode: Episode,
    generate: Generate,
    ctx: StepContext,
    *,
    temperature: float = 1.0,
    tries: int = 4,
    max_new_tokens: int = 1,
    max_tokens: int = 8,
) -> dict[str, float]:
    """One sample: up to `tries` guesses, and a hint of one token after each that is wrong."""
    secret = str(episode.task["answer"])
    params = SamplingParams(temperature, max_new_tokens=max_new_tokens)
    prefix = episode.prompt_ids
    for done in range(1, tries + 1):
        turn = await generate(prefix, params)
        if turn.response == secret:
            return {"reward": 1.0 - 0.5 * (done - 1) / tries, "score": 1.0, "rewards/tries": done}
        hint = ">" if turn.response < secret else "<"
        prefix = (*prefix, *turn.response_ids, *ctx.tokenizer.encode(hint))
    return {"reward": 0.0, "score": 0.0, "rewards/tries": tries}
