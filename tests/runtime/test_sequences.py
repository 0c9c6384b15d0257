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
from distflow.runtime.generate_step import SampleLimits
from distflow.runtime.steps import StepContext, StepRunner
from distflow.runtime.trajectories import Trajectories
from distflow.testing.engine_harness import run_until_done
from distflow.types import FINISH_REASONS, FinishedSample, SampleOutput, SampleRequest
from tests.runtime.kit import TOKENIZER, EndlessTokenizer
from tests.runtime.test_trajectories import PROMPT, drive, engine, lease

SOURCE = """
import json

from distflow import step
from distflow.types import SamplingParams


@step(role="generate", reads=[], writes=[], environment=["replay"])
async def wander(episode, generate, ctx, *, moves="[]", max_tokens=60):
    # A move: where to go on (a number of a line so far, or -1 for none of them), with what, and how.
    lines = [episode.prompt_ids]
    for where, tokens, most, train, aside in json.loads(moves):
        begin = lines[where % len(lines)] if where >= 0 else ()
        prefix = (*begin, *tokens)
        params = SamplingParams(max_new_tokens=most)
        completion = await generate(prefix, params, train=train, aside=aside)
        lines.append((*prefix, *completion.response_ids))


@step(role="generate", reads=[], writes=[], environment=["replay"])
async def stripped(episode, generate, ctx):
    params = SamplingParams(max_new_tokens=3)
    first = await generate(episode.prompt_ids, params)
    second = await generate((*episode.prompt_ids, first.response_ids[-1], 9), params, train=episode.sample > 0)
    await generate((*episode.prompt_ids, first.response_ids[-1], 9, *second.response_ids, 11, 11), params)


@step(role="generate", reads=[], writes=[], environment=["replay"])
async def delegating(episode, generate, ctx):
    params = SamplingParams(max_new_tokens=3)
    first = await generate(episode.prompt_ids, params)
    agent = await generate((9, 8), params)
    agent = await generate((9, 8, *agent.response_ids, 7), params)
    await generate((*episode.prompt_ids, *first.response_ids, *agent.response_ids), params)


@step(role="generate", reads=[], writes=[], environment=["replay"])
async def persistent(episode, generate, ctx):
    for attempt in range(3 if episode.sample else 1):
        await generate(episode.prompt_ids, SamplingParams(max_new_tokens=3))


@step(role="generate", reads=[], writes=[], environment=["replay"])
async def elsewhere(episode, generate, ctx):
    await generate((7, 7, 7), SamplingParams(max_new_tokens=3))


@step(role="generate", reads=[], writes=[], environment=[])
async def forgetting(episode, generate, ctx):
    while True:
        await generate((1, 2, 3, 4, 5), SamplingParams(max_new_tokens=8))


@step(role="generate", reads=[], writes=[])
async def once(episode, generate, ctx):
    await generate(episode.prompt_ids, SamplingParams(max_new_tokens=2))
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


def trajectories(file: Path, name: str = "wander", samples: int = 2, most: int = MOST, **settings: Any) -> Trajectories:
    declared = name != "once"
    writes, allowed = (*GENERATED, *(SEQUENCES if declared else ())), ("replay",) if declared else None
    plan = StepPlan("sample", f"{file}:{name}", "generate", "sample", None, settings, (), writes, (), allowed)
    context = StepContext("sample", tokenizer=EndlessTokenizer())
    step = StepRunner("rollout/0", [plan], {"sample": context}).generate_step("sample")
    return Trajectories(step, {"train": SampleLimits(samples, most, most)}, TOKENIZER, torch.float32)


def wandering(file: Path, moves: Sequence[Any]) -> Trajectories:
    return trajectories(file, moves=json.dumps([FIRST, *moves]), on_error="stop")


def whole(file: Path, name: str, samples: int = 2) -> tuple[Batch, list[FinishedSample]]:
    made = trajectories(file, name, samples)
    finished = drive(made, engine(), made.begin([lease()]))
    return made.batch([5]), sorted(finished, key=lambda out: out.sample)


def until_the_end(samples: Trajectories, requests: Sequence[SampleRequest]) -> list[FinishedSample] | None:
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


def test_another_prefix_begins_a_new_sequence_of_the_sample(file: Path) -> None:
    batch, (record, _) = whole(file, "stripped")
    assert batch.dense("sample").tolist() == [0, 0, 1, 1]
    assert batch.dense("sequence").tolist() == [0, 1, 0, 1]
    assert batch.dense("group").tolist() == [5] * 4
    ids, prompts = batch.ragged("response_ids"), batch.ragged("prompt_ids")
    for row in (0, 2):
        first, second = ids.row(row).tolist(), ids.row(row + 1).tolist()
        assert [prompts.row(row).tolist(), prompts.row(row + 1).tolist()] == [[*PROMPT], [*PROMPT, first[-1], 9]]
        assert (len(first), len(second), second[3:5]) == (3, 8, [11, 11])
        assert batch.ragged("policy_versions").row(row + 1)[:, 2:].tolist() == [[0, 3], [5, 8]]
        assert (batch.ragged("rollout_logprobs").row(row + 1) != 0).tolist() == [True] * 3 + [False] * 2 + [True] * 3
    masks = [row.tolist() for row in batch.ragged("response_mask").rows()]
    assert masks == [
        [True] * 3,
        [False] * 5 + [True] * 3,
        [True] * 3,
        [True] * 3 + [False] * 2 + [True] * 3,
    ], "a turn of sample 0 is not trained on"
    (decoded,) = TOKENIZER.decode_batch([prompts.row(1).tolist()], skip_special=False)
    assert batch.texts("sequence_prompt")[:2] == ["", decoded]
    assert batch.texts("prompt_text") == ["01", "", "01", ""], "the data's prompt is there once a sample"
    assert [len(call.token_ids) for call in record.calls] == [3, 3, 3]


def test_a_sequence_goes_on_after_another_had_its_say(file: Path) -> None:
    """The one that the model wrote to last is the last row: it has the sample's final response."""
    batch, _ = whole(file, "delegating", samples=1)
    agent, main = batch.ragged("response_ids").rows()
    assert [row.tolist() for row in batch.ragged("prompt_ids").rows()] == [[9, 8], [*PROMPT]]
    assert (len(agent), agent[3].item(), len(main)) == (7, 7, 9)
    assert main[3:6].tolist() == agent[4:].tolist()
    masks = [row.tolist() for row in batch.ragged("response_mask").rows()]
    assert masks == [[True] * 3 + [False] + [True] * 3, [True] * 3 + [False] * 3 + [True] * 3]


def test_samples_may_have_different_numbers_of_sequences(file: Path) -> None:
    batch, _ = whole(file, "persistent")
    assert batch.dense("sample").tolist() == [0, 1, 1, 1]
    assert batch.dense("sequence").tolist() == [0, 0, 1, 2]
    attempts = [tuple(row.tolist()) for row in batch.ragged("response_ids").rows()]
    assert len(set(attempts[1:])) == 3, "asked again, the model answers something else"
    (prompt,) = TOKENIZER.decode_batch([PROMPT], skip_special=False)
    assert batch.texts("sequence_prompt") == ["", "", prompt, prompt]


def test_the_first_sequence_may_have_another_prompt_than_the_data_gives(file: Path) -> None:
    batch, _ = whole(file, "elsewhere", samples=1)
    assert batch.dense("sequence").tolist() == [0]
    assert [row.tolist() for row in batch.ragged("prompt_ids").rows()] == [[7, 7, 7]]


def test_the_room_counts_the_tokens_of_all_sequences_and_each_request_is_a_call(file: Path) -> None:
    samples = trajectories(file, "stripped", samples=1)
    made, requests, calls, rooms = engine(), samples.begin([lease()]), [], []
    while requests:
        calls += [request.call for request in requests]
        rooms += [request.params.max_new_tokens for request in requests]
        made.submit(requests)
        requests, _ = samples.take(run_until_done(made))
    assert calls == [(0,), (1,), (2,)]
    assert rooms == [3, 3, 3]
    small, made = trajectories(file, "stripped", samples=1, most=3 + 4 + 2), engine()
    made.submit(small.begin([lease()]))
    (second,), _ = small.take(run_until_done(made))
    assert second.params.max_new_tokens == 2


def test_one_turn_without_an_environment_has_no_further_fields(file: Path) -> None:
    assert tuple(whole(file, "once")[0].columns) == GENERATED


def test_no_sequence_begins_for_which_there_is_no_room(file: Path) -> None:
    samples = trajectories(file, "forgetting", samples=1, most=40, on_error="stop")
    drive(samples, engine(slots=4), samples.begin([lease()]))
    batch = samples.batch([5])
    assert batch.ragged("prompt_ids").lengths.tolist() == [5] * 3
    assert batch.ragged("response_ids").lengths.tolist() == [8] * 3
    assert batch.dense("finish_reason").tolist() == [FINISH_REASONS.index("length")] * 3


@pytest.mark.parametrize("polls", range(13))
@pytest.mark.parametrize("name", ["stripped", "delegating"])
def test_they_are_made_again_by_the_record(file: Path, name: str, polls: int) -> None:
    check_replay(trajectories(file, name), trajectories(file, name), trajectories(file, name), polls)


@given(MOVES)
def test_rows_fit_together(file: Path, moves: list[Any]) -> None:
    samples = wandering(file, moves)
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
    check_replay(wandering(file, moves), wandering(file, moves), wandering(file, moves), polls)


def check_replay(undisturbed: Trajectories, first: Trajectories, second: Trajectories, polls: int) -> None:
    """The second goes on with what the first had after so many polls."""
    expected = until_the_end(undisturbed, undisturbed.begin([lease()]))
    if expected is None:
        return
    made = engine(slots=4)
    made.submit(first.begin([lease()]))
    done: list[SampleOutput] = []
    for _ in range(polls):
        requests, finished = first.take(made.poll())
        made.submit(requests)
        done += [call for sample in finished for call in sample.calls]
    left = [*first.partials(made.partials()), *done]
    begun = tuple(output.begun for output in left)
    assert until_the_end(second, second.begin([lease(begun=begun)])) == expected
    one, two = undisturbed.batch([5]), second.batch([5])
    for name in one.columns:
        values = [column.values if isinstance(column, Ragged) else column for column in (one[name], two[name])]
        assert torch.equal(*values), name
