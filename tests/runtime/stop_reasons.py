"""What ends a run, for tests: rewards, a step and a data source that go wrong. Named in recipes by this file."""

from collections.abc import Mapping
from typing import Any

from distflow import Batch, Ragged, StepContext, step

ROWS, BAD_ROW = 4096, 9


def equal(sample: Any) -> float:
    return 0.5


def never(sample: Any) -> float:
    raise ValueError("no judge is there")


def for_some_prompts(sample: Any) -> float:
    """Fails for a prompt whose last digit is odd, so for whole groups."""
    if int(sample.prompt.removesuffix("=")) % 2:
        raise ValueError("odd ones cannot be judged")
    return float(len(sample.response))


@step(role="score", reads=["group"], writes=["drop_reason"])
def drops_all(batch: Batch, ctx: StepContext) -> Batch:
    return batch.with_columns(drop_reason=Ragged.from_texts(["too dull"] * batch.rows))


class _Broken:
    """Its rows are there up to `BAD_ROW`, whose place `bad` says what is wrong with."""

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
