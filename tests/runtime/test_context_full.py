"""Samples that come to the end of their room: of a sequence, by max_tokens, or of all, by max_sample_tokens."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from distflow import ContextFull
from distflow.data.batch import Batch
from distflow.flow.plan import StepPlan
from distflow.flow.step import ENVIRONMENT, GENERATED, SEQUENCES, sample_tokens
from distflow.runtime.generate_step import SampleLimits
from distflow.runtime.steps import StepContext, StepRunner
from distflow.runtime.trajectories import Trajectories
from distflow.types import FINISH_REASONS
from tests.runtime.kit import TOKENIZER, EndlessTokenizer
from tests.runtime.test_awaiting import until_done
from tests.runtime.test_trajectories import engine

SOURCE = """
import asyncio
from itertools import count

from distflow import ContextFull, step
from distflow.types import SamplingParams

ONE = SamplingParams(max_new_tokens=4, stop_token_ids=tuple(range(12)))


@step(role="generate", reads=[], writes=["reward", "rewards/turns"], environment=["replay", "repeatable"])
async def filling(episode, generate, ctx, *, kind, max_new_tokens=4, max_tokens=20):
    async def endless(prefix):
        for turns in count(1):
            said = await generate(prefix, ONE)
            prefix = (*prefix, *said.response_ids, 10, 11)

    turns = 0
    if kind == "branches":
        async with asyncio.TaskGroup() as group:
            for number in range(2):
                group.create_task(endless((*episode.prompt_ids, number)))
    if kind == "sequences":
        for number in count():
            await generate((5, number % 12, *episode.prompt_ids), ONE)
    try:
        await endless(episode.prompt_ids)
    except ContextFull as full:
        if kind == "uncaught":
            raise
        turns = str(full).count("raise max_tokens (flow.steps.sample.with)")
    said = await generate(episode.prompt_ids, SamplingParams(max_new_tokens=2, stop_token_ids=tuple(range(12))))
    return {"reward": 1.0, "rewards/turns": turns}
"""


def whole(folder: Path, kind: str) -> tuple[Batch, Any]:
    (folder / "filling.py").write_text(SOURCE)
    writes = (*GENERATED, *SEQUENCES, "reward", "rewards/turns")
    call, settings = f"{folder}/filling.py:filling", {"kind": kind, "max_tokens": 20, "max_sample_tokens": 50}
    plan = StepPlan("sample", call, "generate", "sample", None, settings, (), writes, (), ENVIRONMENT)
    context = StepContext("sample", tokenizer=EndlessTokenizer())
    step = StepRunner("rollout/0", [plan], {"sample": context}).generate_step("sample")
    samples = Trajectories(step, {"train": SampleLimits.of(1, settings)}, TOKENIZER, torch.float32)
    until_done(samples, engine(slots=8, max_tokens=22), [5])
    return samples.batch([5]), context.metrics.counts()


@pytest.mark.parametrize("kind, lengths", [("uncaught", [19]), ("branches", [20, 19]), ("sequences", [1] * 10)])
def test_a_sample_ends_where_there_is_no_more_room(tmp_path: Path, kind: str, lengths: list[int]) -> None:
    batch, counts = whole(tmp_path, kind)
    assert batch.ragged("response_ids").lengths.tolist() == lengths
    assert {FINISH_REASONS[reason] for reason in batch.dense("finish_reason").tolist()} == {"length"}
    assert bool(batch.ragged("response_mask").row(len(lengths) - 1)[-1]), "what the model wrote last is trained on"
    assert batch.dense("reward").tolist() == [0.0] * len(lengths)
    assert bool(batch.dense("rewards/turns").isnan().all())
    assert batch.texts("left_out") == [""] * len(lengths)
    assert "rollout/errors" not in counts


def test_a_step_may_go_on_otherwise(tmp_path: Path) -> None:
    batch, counts = whole(tmp_path, "caught")
    assert batch.ragged("response_ids").lengths.tolist() == [19, 1]
    assert FINISH_REASONS[int(batch.dense("finish_reason")[0])] == "stop"
    assert batch.dense("rewards/turns").tolist() == [1.0, 1.0]
    assert "rollout/errors" not in counts
    assert issubclass(ContextFull, ValueError)


@pytest.mark.parametrize(
    "settings, tokens",
    [
        ({"max_tokens": 20, "max_sample_tokens": None}, 80),
        ({"max_tokens": 20, "max_sample_tokens": 30}, 30),
        ({"max_new_tokens": 20, "max_sample_tokens": None}, 20),
        ({"max_response_tokens": 20}, 20),
    ],
)
def test_four_of_the_longest_sequences_have_room(settings: dict[str, Any], tokens: int) -> None:
    assert sample_tokens(settings) == tokens
