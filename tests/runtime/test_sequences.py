"""Whatever a generate step asks for: its sequences fit together, and are made again by the record."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from distflow.data.batch import Batch, Ragged
from distflow.errors import StepError
from distflow.flow.memory import group_bytes
from distflow.flow.plan import StepPlan
from distflow.flow.step import GENERATED, SEQUENCES
from distflow.runtime.steps import StepContext, StepRunner
from distflow.runtime.trajectories import Trajectories
from distflow.types import BegunSample, SampleOutput, SampleRequest
from tests.runtime.kit import TOKENIZER, EndlessTokenizer
from tests.runtime.test_trajectories import PROMPT, drive, engine, lease

SOURCE = """
import json

from distflow import step
from distflow.types import SamplingParams


@step(role="generate", reads=[], writes=[], environment=["replay"])
async def wander(episode, generate, ctx, *, moves="[]", max_tokens=60):
    '''A move: where to go on (a number of a line so far, or -1 for none of them), with what, and how.'''
    lines = [episode.prompt_ids]
    for where, tokens, most, train, aside in json.loads(moves):
        begin = lines[where % len(lines)] if where >= 0 else ()
        prefix = (*begin, *tokens)
        params = SamplingParams(max_new_tokens=most)
        completion = await generate(prefix, params, train=train, aside=aside)
        lines.append((*prefix, *completion.response_ids))
"""
MOST = 60
TURN = st.tuples(
    st.integers(-1, 5), st.lists(st.integers(0, 9), min_size=1, max_size=3), st.integers(1, 4), st.booleans()
)
FIRST = (0, [], 2, True, False)
"""Or the step could end without a token of the sample."""
MOVES = st.lists(st.tuples(TURN, st.booleans()).map(lambda move: (*move[0], move[1])), max_size=6)


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("steps") / "wander.py"
    path.write_text(SOURCE)
    return path


def trajectories(file: Path, moves: Sequence[Any]) -> Trajectories:
    settings = {"moves": json.dumps([FIRST, *moves])}
    writes = (*GENERATED, *SEQUENCES)
    plan = StepPlan("sample", f"{file}:wander", "generate", "sample", None, settings, (), writes, (), ("replay",))
    context = StepContext("sample", tokenizer=EndlessTokenizer())
    step = StepRunner("rollout/0", [plan], {"sample": context}).generate_step()
    return Trajectories(step, 2, MOST, TOKENIZER, torch.float32)


def until_the_end(samples: Trajectories, requests: Sequence[SampleRequest]) -> list[SampleOutput] | None:
    """None: the step asked for more than a sample may have."""
    try:
        return sorted(drive(samples, engine(slots=4), requests), key=lambda out: out.sample)
    except StepError as error:
        if "longest sample has 60" not in str(error):
            raise
        return None


def tokens_behind_the_prompt(batch: Batch, sample: int) -> int:
    rows = (batch.dense("sample") == sample).nonzero().flatten().tolist()
    prompts, responses = batch.ragged("prompt_ids"), batch.ragged("response_ids")
    return sum(
        len(responses.row(row)) + (0 if tuple(prompts.row(row).tolist()) == PROMPT else len(prompts.row(row)))
        for row in rows
    )


@given(MOVES)
def test_rows_fit_together(file: Path, moves: list[Any]) -> None:
    samples = trajectories(file, moves)
    outputs = until_the_end(samples, samples.begin([lease()]))
    if outputs is None:
        return
    batch = samples.batch([5])
    assert batch.nbytes <= group_bytes(2, len(PROMPT), MOST), "what is reserved for it"
    ids, masks, spans = (batch.ragged(name) for name in ("response_ids", "response_mask", "policy_versions"))
    for sample in (0, 1):
        rows = (batch.dense("sample") == sample).nonzero().flatten().tolist()
        assert batch.dense("sequence")[rows].tolist() == [*range(len(rows))]
        assert rows == [*range(rows[0], rows[-1] + 1)]
        written = sum(int(end - first) for row in rows for _, _, first, end in spans.row(row).tolist())
        kept = [(most, train) for _, _, most, train, aside in [FIRST, *moves] if not aside]
        assert written <= sum(most for most, _ in kept)
        trained = sum(int(masks.row(row).sum()) for row in rows)
        assert trained <= sum(most for most, train in kept if train)
        assert tokens_behind_the_prompt(batch, sample) <= MOST
    for row in range(batch.rows):
        covered = {token for _, _, first, end in spans.row(row).tolist() for token in range(first, end)}
        assert covered >= set(masks.row(row).nonzero().flatten().tolist())
        assert len(ids.row(row)) - 1 in covered, "the model has the last word"


@given(MOVES, st.integers(0, 20))
def test_what_was_left_anywhere_is_made_again(file: Path, moves: list[Any], polls: int) -> None:
    whole = trajectories(file, moves)
    expected = until_the_end(whole, whole.begin([lease()]))
    if expected is None:
        return
    first, made = trajectories(file, moves), engine(slots=4)
    made.submit(first.begin([lease()]))
    done: list[SampleOutput] = []
    for _ in range(polls):
        requests, finished = first.take(made.poll())
        made.submit(requests)
        done += finished
    left = [*first.partials(made.partials()), *done]
    begun = tuple(
        BegunSample(o.sample, o.token_ids, o.logprobs, o.spans, "" if o.finish_reason == "abort" else o.finish_reason)
        for o in left
    )
    second = trajectories(file, moves)
    assert until_the_end(second, second.begin([lease(begun=begun)])) == expected
    one, two = whole.batch([5]), second.batch([5])
    for name in one.columns:
        values = [column.values if isinstance(column, Ragged) else column for column in (one[name], two[name])]
        assert torch.equal(*values), name
