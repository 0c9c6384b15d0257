"""Samples of several turns: segments, masks, versions, replay, and what a step may not do."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from distflow.data.batch import Batch, Ragged
from distflow.errors import StepError, UserError
from distflow.exchange.messages import Lease
from distflow.flow.plan import StepPlan
from distflow.flow.step import ENVIRONMENT, GENERATED, SEQUENCES
from distflow.runtime.generate_step import SampleLimits
from distflow.runtime.steps import StepContext, StepRunner
from distflow.runtime.trajectories import Trajectories
from distflow.testing.engine_harness import run_until_done
from distflow.testing.fakes import SHAPES, FakeEngine
from distflow.types import (
    FINISH_REASONS,
    VALIDATION,
    BegunSample,
    FinishedSample,
    LeaseKind,
    SampleOutput,
    SampleRequest,
    Span,
    Uid,
    Version,
)
from tests.runtime.kit import TOKENIZER, EndlessTokenizer

SOURCE = """
from distflow import step
from distflow.types import SamplingParams


@step(role="generate", reads=[], writes=["rewards/turns"], environment=["replay", "repeatable"])
async def talk(episode, generate, ctx, *, turns=3, max_new_tokens=4, max_tokens=40):
    prefix, params = episode.prompt_ids, SamplingParams(max_new_tokens=max_new_tokens)
    for turn in range(turns):
        completion = await generate(prefix, params)
        prefix = (*prefix, *completion.response_ids, 10, 11 - turn % 2)
    return {"rewards/turns": turns}


@step(role="generate", reads=[], writes=[])
async def undeclared(episode, generate, ctx):
    completion = await generate(episode.prompt_ids, SamplingParams(max_new_tokens=2))
    await generate((*episode.prompt_ids, *completion.response_ids, 3), SamplingParams(max_new_tokens=2))


@step(role="generate", reads=[], writes=[], environment=[])
async def long(episode, generate, ctx):
    await generate((*episode.prompt_ids, *[3] * 41), SamplingParams(max_new_tokens=15))


@step(role="generate", reads=[], writes=[], environment=[])
async def mixed(episode, generate, ctx):
    prefix, params = episode.prompt_ids, SamplingParams(max_new_tokens=2)
    first = await generate(prefix, params, train=episode.sample > 0)
    await generate((*prefix, *first.response_ids, 9), params, train=episode.sample > 1)


@step(role="generate", reads=[], writes=["rewards/turns"], environment=["replay"])
async def thoughtful(episode, generate, ctx):
    prefix, params = episode.prompt_ids, SamplingParams(max_new_tokens=3)
    drafts = [await generate((*prefix, 7), params, aside=True) for _ in range(2)]
    first = await generate(prefix, params)
    prefix = (*prefix, *first.response_ids)
    drafts.append(await generate((4, 4), params, aside=True))
    await generate((*prefix, *drafts[-1].response_ids), params)
    return {"rewards/turns": drafts[0].response_ids == drafts[1].response_ids}


@step(role="generate", reads=[], writes=[])
async def silent(episode, generate, ctx): ...


@step(role="generate", reads=[], writes=["rewards/turns"])
async def forgetful(episode, generate, ctx):
    await generate(episode.prompt_ids, SamplingParams(max_new_tokens=2))


@step(role="generate", reads=[], writes=["rewards/turns"])
async def wordy(episode, generate, ctx):
    await generate(episode.prompt_ids, SamplingParams(max_new_tokens=2))
    return {"rewards/turns": "two"}


@step(role="generate", reads=[], writes=[])
async def vague(episode, generate, ctx):
    await generate(episode.prompt_ids, 2)


@step(role="generate", reads=[], writes=[])
async def textual(episode, generate, ctx):
    await generate((*episode.prompt_ids, 1.5), SamplingParams(max_new_tokens=2))


@step(role="generate", reads=[], writes=[])
async def untyped(episode, generate, ctx):
    await generate(episode.prompt_ids, SamplingParams(max_new_tokens="2"))


@step(role="generate", reads=[], writes=[])
async def greedy(episode, generate, ctx):
    stops = tuple(range(12)) if episode.sample == 1 else ()
    params = SamplingParams(max_new_tokens=2, stop_token_ids=stops)
    await generate(episode.prompt_ids, params, train=episode.sample != 2)


@step(role="generate", reads=[], writes=[])
async def leaving(episode, generate, ctx):
    await generate(episode.prompt_ids, SamplingParams(max_new_tokens=2))
    raise SystemExit(0)


@step(role="generate", reads=[], writes=[])
async def stubborn(episode, generate, ctx):
    try:
        await generate(episode.prompt_ids, SamplingParams(max_new_tokens=9))
    finally:
        raise ValueError("there is no end")
"""
PROMPT = (2, 3)
MOST = 40


def trajectories(
    folder: Path,
    name: str,
    *,
    environment: Sequence[str] | None = ENVIRONMENT,
    samples: int = 2,
    leaves_out_truncated: bool = False,
    **settings: Any,
) -> Trajectories:
    (folder / "mine.py").write_text(SOURCE)
    returned = ["rewards/turns"] if name in ("talk", "forgetful", "thoughtful", "wordy") else []
    writes = (*GENERATED, *([] if environment is None else SEQUENCES), *returned)
    allowed = None if environment is None else tuple(environment)
    plan = StepPlan("sample", f"{folder}/mine.py:{name}", "generate", "sample", None, settings, (), writes, (), allowed)
    context = StepContext("sample", tokenizer=EndlessTokenizer())
    step = StepRunner("rollout/0", [plan], {"sample": context}).generate_step("sample")
    limits: Mapping[LeaseKind, SampleLimits] = dict.fromkeys(("train", "val"), SampleLimits(samples, MOST, MOST))
    made = (step, limits, TOKENIZER, torch.float32)
    return Trajectories(*made, leaves_out_truncated=leaves_out_truncated)


def lease(position: int = 5, begun: tuple[BegunSample, ...] = ()) -> Lease:
    return Lease(Uid(0, 1, position), 0, position, 1, 7, PROMPT, "01", '{"answer": 3}', 0, 0, begun=begun)


def engine(number: int = 0, **options: Any) -> FakeEngine:
    made = FakeEngine(**options)
    load(made, number)
    return made


def load(made: FakeEngine, number: int) -> None:
    made.begin_update(Version(0, number))
    made.update((name, torch.zeros(shape)) for name, shape in SHAPES.items())
    made.end_update()


def drive(samples: Trajectories, made: FakeEngine, requests: Sequence[SampleRequest]) -> list[FinishedSample]:
    """Until every sample is finished."""
    finished: list[FinishedSample] = []
    outputs: list[SampleOutput] = []
    for _ in range(200):
        made.submit(requests)
        requests, done = samples.take(outputs)
        finished += done
        made.submit(requests)
        requests = ()
        if not made.progress():
            return finished
        outputs = made.poll()
    pytest.fail("not done after 200 polls")


def whole(folder: Path, name: str = "talk", **settings: Any) -> tuple[Batch, list[FinishedSample]]:
    samples = trajectories(folder, name, **settings)
    finished = drive(samples, engine(), samples.begin([lease()]))
    return samples.batch([5]), sorted(finished, key=lambda out: out.sample)


@pytest.mark.parametrize("position, out", [(5, "cut off"), (VALIDATION, "")])
def test_samples_that_are_cut_off_are_left_out_of_training(tmp_path: Path, position: int, out: str) -> None:
    """Those that train nothing are baselines: they stay, cut off or not; and so do all of validation."""
    samples = trajectories(tmp_path, "greedy", environment=None, samples=3, leaves_out_truncated=True)
    drive(samples, engine(), samples.begin([lease(position)]))
    batch = samples.batch([position])
    assert [FINISH_REASONS[reason] for reason in batch.dense("finish_reason")] == ["length", "stop", "length"]
    assert batch.texts("left_out") == [out, "", ""]
    masks = [sorted(set(row.tolist())) for row in batch.ragged("response_mask").rows()]
    assert masks == [[not out], [True], [False]]


def test_an_environments_tokens_are_a_part_of_the_response_that_is_not_trained_on(tmp_path: Path) -> None:
    batch, _ = whole(tmp_path)
    assert batch.rows == 2
    ids, mask = batch.ragged("response_ids"), batch.ragged("response_mask")
    for row in range(2):
        tokens, trained = ids.row(row).tolist(), mask.row(row).tolist()
        assert trained == [True] * 4 + [False] * 2 + [True] * 4 + [False] * 2 + [True] * 4
        assert tokens[4:6] == [10, 11]
        assert tokens[10:12] == [10, 10]
        logprobs = batch.ragged("rollout_logprobs").row(row)
        assert (logprobs != 0).tolist() == trained
        assert batch.ragged("policy_versions").row(row).tolist() == [[0, 0, 0, 4], [0, 0, 6, 10], [0, 0, 12, 16]]
        assert batch.texts("response_text")[row] == TOKENIZER.decode_batch([tokens], skip_special=True)[0]
    assert batch.dense("rewards/turns").tolist() == [3.0, 3.0]
    assert batch.dense("sample").tolist() == [0, 1]


def test_random_numbers_of_a_sequence_are_counted_over_all_tokens_behind_the_prompt(tmp_path: Path) -> None:
    samples = trajectories(tmp_path, "talk", samples=1)
    (first,) = samples.begin([lease()])
    assert (first.prompt_ids, first.call, first.stream, first.offset) == (PROMPT, (0,), (), 0)
    made = engine()
    made.submit([first])
    (second,), _ = samples.take(run_until_done(made))
    assert (second.call, second.stream, second.offset, len(second.prompt_ids)) == ((1,), (), 6, len(PROMPT) + 6)
    assert (second.position, second.sample, second.seed) == (5, 0, 7)


def test_new_weights_between_turns_show_in_the_spans_and_the_oldest_counts(tmp_path: Path) -> None:
    samples, made = trajectories(tmp_path, "talk", samples=1, turns=2), engine(3)
    made.submit(samples.begin([lease()]))
    outputs = run_until_done(made)
    load(made, 4)
    requests, _ = samples.take(outputs)
    made.submit(requests)
    made.poll()
    load(made, 6)
    _, (finished,) = samples.take(run_until_done(made))
    assert [call.spans for call in finished.calls] == [(Span(0, 3, 0, 4),), (Span(0, 4, 0, 1), Span(0, 6, 1, 4))]
    spans = samples.batch([5]).ragged("policy_versions").row(0).tolist()
    assert spans == [[0, 3, 0, 4], [0, 4, 6, 7], [0, 6, 7, 10]]


def test_a_step_says_which_tokens_of_the_model_are_trained_on(tmp_path: Path) -> None:
    batch, _ = whole(tmp_path, "mixed", environment=(), samples=3)
    masks = [row.tolist() for row in batch.ragged("response_mask").rows()]
    assert masks == [[False] * 5, [True, True, False, False, False], [True, True, False, True, True]]
    assert [row[:, 2:].tolist() for row in batch.ragged("policy_versions").rows()] == [[[0, 2], [3, 5]]] * 3


def test_what_is_asked_aside_is_no_part_of_the_sample(tmp_path: Path) -> None:
    batch, (record, _) = whole(tmp_path, "thoughtful")
    masks = [row.tolist() for row in batch.ragged("response_mask").rows()]
    assert masks == [[True] * 3 + [False] * 3 + [True] * 3] * 2
    assert batch.dense("rewards/turns").tolist() == [0.0, 0.0], "asked again, the model answered something else"
    assert record.calls[3].token_ids == tuple(batch.ragged("response_ids").row(0)[3:6].tolist())
    assert [(call.call, len(call.token_ids)) for call in record.calls] == [((number,), 3) for number in range(5)]


@pytest.mark.parametrize("name, turn", [("talk", 4), ("thoughtful", 3)])
@pytest.mark.parametrize("polls", range(13))
def test_a_sample_is_replayed_wherever_it_was_left(tmp_path: Path, polls: int, name: str, turn: int) -> None:
    """Another worker has the recorded tokens of the model alone: the step, played again, puts in the others."""
    expected, outputs = whole(tmp_path, name)
    first, made = trajectories(tmp_path, name), engine()
    made.submit(first.begin([lease()]))
    done: list[SampleOutput] = []
    for _ in range(polls):
        requests, finished = first.take(made.poll())
        made.submit(requests)
        done += [call for sample in finished for call in sample.calls]
    left = [*first.partials(made.partials()), *done]
    assert sum(len(out.token_ids) for out in left) == 2 * polls
    begun = tuple(output.begun for output in left)
    second, other = trajectories(tmp_path, name), engine()
    requests = second.begin([lease(begun=begun)])
    asked = sum(len(request.begun.token_ids) for request in requests if request.begun is not None)
    assert asked == 2 * (polls % turn)
    assert sorted(drive(second, other, requests), key=lambda out: out.sample) == outputs
    again = second.batch([5])
    for name in expected.columns:
        one, two = (column.values if isinstance(column, Ragged) else column for column in (expected[name], again[name]))
        assert torch.equal(one, two), name


def test_progress_counts_earlier_turns_until_the_group_is_forgotten(tmp_path: Path) -> None:
    samples, made = trajectories(tmp_path, "talk"), engine()
    made.submit(samples.begin([lease()]))
    for _ in range(5):
        requests, _ = samples.take(made.poll())
        made.submit(requests)
    assert made.progress() == {5: 2}
    assert samples.progress(made.progress()) == {5: 10}
    assert [len(out.token_ids) for out in samples.partials(made.partials())] == [4, 1, 4, 1]
    assert [len(out.token_ids) for out in samples.partials(made.abort([5]), [5])] == [4, 1, 4, 1]
    samples.forget([5])
    assert samples.progress({}) == {}
    assert samples.partials([]) == []


def test_a_turn_that_waits_for_a_slot_loses_nothing_when_it_is_handed_back(tmp_path: Path) -> None:
    samples, made = trajectories(tmp_path, "talk", samples=1), engine()
    made.submit(samples.begin([lease()]))
    outputs = run_until_done(made)
    requests, _ = samples.take(outputs)
    made.submit(requests)
    (left,) = samples.partials(made.abort([5]))
    assert (left.token_ids, left.finish_reason) == (outputs[0].token_ids, "length")


def test_a_turn_has_no_more_tokens_than_the_sample_has_left(tmp_path: Path) -> None:
    batch, _ = whole(tmp_path, turns=7)
    assert batch.ragged("response_ids").lengths.tolist() == [MOST, MOST]
    assert batch.dense("finish_reason").tolist() == [1, 1]


@pytest.mark.parametrize(
    "name, environment, message",
    [
        ("undeclared", None, r"mine\.py:undeclared\) on rollout/0 asks for more after its first turn.* no environment"),
        (
            "long",
            (),
            r"asks for more after 41 tokens behind the prompt, .* longest sequence has 40: .*raise max_tokens",
        ),
        ("silent", None, r"returned before it awaited tokens of the sample; expected completion = await generate"),
        ("forgetful", None, r"returned None; expected a mapping with a number for each of \['rewards/turns'\]"),
        ("wordy", None, r"returned {'rewards/turns': 'two'}; expected a number for each of \['rewards/turns'\]"),
        ("vague", None, r"(?s)in vague\n.*params is a int; expected SamplingParams\n.* raised TypeError on rollout/0"),
        ("textual", None, r"(?s)in textual\n.*'float' .*; expected token ids, which are integers\n.* raised TypeError"),
        ("untyped", None, r"(?s)in untyped\n.*SamplingParams\(max_new_tokens='2'\): expected an integer\n"),
        (
            "leaving",
            None,
            r"(?s)in leaving\n.*raised SystemExit on rollout/0, training step 1, with uids .*\(0, 1, 5\)",
        ),
    ],
)
def test_what_a_step_may_not_do_is_told(
    tmp_path: Path, name: str, environment: Sequence[str] | None, message: str
) -> None:
    samples = trajectories(tmp_path, name, environment=environment, on_error="stop")
    with pytest.raises(StepError, match=message):
        drive(samples, engine(slots=4), samples.begin([lease()]))


def test_a_step_that_cannot_be_ended_is_told(tmp_path: Path) -> None:
    """Its group is not wanted any more."""
    samples, made = trajectories(tmp_path, "stubborn", environment=None, samples=1, on_error="stop"), engine()
    made.submit(samples.begin([lease()]))
    made.poll()
    with pytest.raises(StepError, match="there is no end\nstep 'sample' .* raised ValueError on rollout/0"):
        samples.forget([5])


def test_a_baseline_needs_others_to_be_the_baseline_of(tmp_path: Path) -> None:
    call = "distflow.workers.rollout:sample_with_baseline"
    plan = StepPlan("sample", call, "generate", "sample", None, {}, (), GENERATED)
    context = StepContext("sample", tokenizer=EndlessTokenizer(), samples_per_prompt=1)
    step = StepRunner("rollout/0", [plan], {"sample": context}).generate_step("sample")
    samples = Trajectories(step, {"train": SampleLimits(1, MOST, MOST)}, TOKENIZER, torch.float32)
    with pytest.raises(UserError, match=r"rollout/0: batch.samples_per_prompt is 1: .* none is trained on — 2 or more"):
        samples.begin([lease()])
