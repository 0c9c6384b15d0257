"""What ends a run, for tests: rewards, steps, a loss, an engine and a data source that go wrong. Named in recipes by
this file.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from distflow import Batch, Ragged, StepContext, step
from distflow.algorithms.losses import ppo
from distflow.runtime.generate_step import Generate
from distflow.types import Episode, SampleOutput, SamplingParams
from distflow.workers.engines.torch_engine import TorchEngine

ROWS, BAD_ROW = 4096, 9


def equal(sample: Any) -> float:
    return 0.5


def never(sample: Any) -> float:
    raise ValueError("no judge is there")


def unrewarded(completions: list[str], **kwargs: Any) -> list[float | None]:
    return [None if index % 2 else float("nan") for index, _ in enumerate(completions)]


def for_some_prompts(sample: Any) -> float:
    """Fails for a prompt whose last digit is odd, so for whole groups."""
    if int(sample.prompt.removesuffix("=")) % 2:
        raise ValueError("odd ones cannot be judged")
    return float(len(sample.response))


@step(role="score", reads=["group"], writes=["drop_reason"])
def drops_all(batch: Batch, ctx: StepContext) -> Batch:
    return batch.with_columns(drop_reason=Ragged.from_texts(["too dull"] * batch.rows))


def no_number(terms: Any) -> Any:
    found = ppo(terms)
    return found._replace(loss_BT=found.loss_BT * float("nan"))


@step(role="generate", reads=[], writes=[])
async def trains_nothing(
    episode: Episode, generate: Generate, ctx: StepContext, *, temperature: float = 1.0, max_new_tokens: int = 3
) -> None:
    await generate(episode.prompt_ids, SamplingParams(temperature, max_new_tokens=max_new_tokens), train=False)


class NoLogprobs(TorchEngine):
    """Gives none."""

    def poll(self) -> list[SampleOutput]:
        return [replace(output, logprobs=None) for output in super().poll()]  # type: ignore[arg-type]


def few() -> list[Mapping[str, str]]:
    """Fewer rows than 50 training steps of two prompts take."""
    return [{"prompt": f"{index:03d}=", "answer": f"{index:03d}"} for index in range(96)]


class _Broken:
    """Its rows are there up to `BAD_ROW`; `bad` says what is wrong with that one and all behind it, which another owner
    may read first."""

    def __init__(self, bad: str) -> None:
        self._bad = bad

    def __len__(self) -> int:
        return ROWS

    def __getitem__(self, index: int) -> Mapping[str, str]:
        if index < BAD_ROW:
            return {"prompt": f"{index:03d}=", "answer": f"{index:03d}"}
        if self._bad == "raises":
            raise OSError("the disk with the prompts is gone")
        return {"text": "a row of another data set"}


def broken(*, bad: str) -> _Broken:
    return _Broken(bad)
