"""Responses that end at stop strings: tokens, texts and records, on engines that draw one token a poll or more."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from distflow.data.batch import Batch, Ragged
from distflow.errors import UserError
from distflow.exchange.messages import Lease
from distflow.flow.plan import StepPlan
from distflow.flow.step import GENERATED, SEQUENCES
from distflow.runtime.generate_step import SampleLimits
from distflow.runtime.steps import StepContext, StepRunner
from distflow.runtime.trajectories import Trajectories
from distflow.testing.fakes import SHAPES, FakeEngine
from distflow.types import FINISH_REASONS, VALIDATION, BegunSample, SampleOutput, Uid, Version, lease_kind
from tests.runtime.kit import TOKENIZER, EndlessTokenizer

SOURCE = """
from distflow import step
from distflow.types import SamplingParams


@step(role="generate", reads=[], writes=[], environment=["replay", "repeatable"])
async def talk(episode, generate, ctx, *, turns=1, own={}, max_new_tokens=24, max_tokens=80):
    prefix, told = episode.prompt_ids, []
    for turn in range(turns):
        completion = await generate(prefix, SamplingParams(max_new_tokens=max_new_tokens, **own))
        told.append(completion.response)
        prefix = (*prefix, *completion.response_ids, 10)
    ctx.state.setdefault("told", {})[episode.sample] = told


@step(role="generate", reads=[], writes=[], environment=["replay"])
async def handles(episode, generate, ctx, *, stop=(), max_new_tokens=24, max_tokens=80):
    first = await generate(episode.prompt_ids, SamplingParams(max_new_tokens=max_new_tokens, stop=stop))
    await generate((*episode.prompt_ids, *first.response_ids), SamplingParams(max_new_tokens=8))
"""
SAMPLES = 4


def trajectories(folder: Path, name: str = "talk", of_validation: Mapping[str, Any] | None = None, **given: Any) -> Any:
    (folder / "mine.py").write_text(SOURCE)
    about = ("generate", "sample", None, given, (), (*GENERATED, *SEQUENCES), (), ("replay", "repeatable"))
    plan = StepPlan("sample", f"{folder}/mine.py:{name}", *about)
    context = StepContext("sample", tokenizer=EndlessTokenizer())
    step = StepRunner("rollout/0", [plan], {"sample": context}).generate_step("sample", of_validation)
    limits = dict.fromkeys(("train", "val"), SampleLimits(SAMPLES, 80, 80))
    return Trajectories(step, limits, TOKENIZER, torch.float32), context


def engine(pace: int = 1) -> FakeEngine:
    made = FakeEngine(pace=pace, slots=8, max_tokens=120)
    made.begin_update(Version(0, 0))
    made.update((name, torch.zeros(shape)) for name, shape in SHAPES.items())
    made.end_update()
    return made


def lease(position: int = 5, begun: tuple[BegunSample, ...] = ()) -> Lease:
    return Lease(Uid(0, 1, position), 0, position, 1, 7, (2, 3), "01", "{}", 0, 0, begun=begun)


def drive(samples: Trajectories, made: FakeEngine, begin: Lease, polls: int = 200) -> list[SampleOutput]:
    """Poll so often; returns what was finished, call by call."""
    samples.submit(made, samples.begin([begin]))
    finished: list[SampleOutput] = []
    for _ in range(polls):
        requests, done = samples.take(samples.poll(made))
        finished += [call for sample in done for call in sample.calls]
        samples.submit(made, requests)
        if not made.progress():
            break
    return finished


def rows(folder: Path, pace: int = 1, name: str = "talk", position: int = 5, **given: Any) -> Batch:
    samples, _ = trajectories(folder, name, **given)
    drive(samples, engine(pace), lease(position))
    return samples.batch([position])


def shown(tokens: list[int]) -> str:
    (text,) = TOKENIZER.decode_batch([tokens], skip_special=True)
    return text


@pytest.fixture
def stop(tmp_path: Path) -> str:
    """Two characters that the first sample has somewhere."""
    return rows(tmp_path).texts("response_text")[0][4:6]


@pytest.mark.parametrize("pace", [1, 3, 50])
@pytest.mark.parametrize("included", [False, True])
def test_a_response_ends_with_the_token_that_completes_it(tmp_path: Path, stop: str, pace: int, included: bool) -> None:
    """However many tokens come with a poll: the rest is thrown away."""
    whole = rows(tmp_path, pace)
    batch = rows(tmp_path, pace, stop=[stop, "9999="], include_stop_str_in_output=included)
    ended = 0
    for row in range(SAMPLES):
        tokens, all_tokens = (each.ragged("response_ids").row(row).tolist() for each in (batch, whole))
        assert tokens == all_tokens[: len(tokens)]
        text = batch.texts("response_text")[row]
        if stop in shown(all_tokens):
            ended += 1
            assert shown(tokens).endswith(stop)
            assert stop not in shown(tokens[:-1])
            assert text == shown(tokens) if included else text + stop == shown(tokens)
        else:
            assert tokens == all_tokens
            assert text == shown(tokens)
        assert FINISH_REASONS[int(batch.dense("finish_reason")[row])] == ("stop" if stop in shown(tokens) else "length")
        assert bool(batch.ragged("response_mask").row(row).all())
        assert batch.ragged("policy_versions").row(row).tolist() == [[0, 0, 0, len(tokens)]]
    assert ended


@pytest.mark.parametrize("turns", [1, 3])
@pytest.mark.parametrize("polls", range(0, 20, 2))
def test_a_sample_that_moves_ends_at_the_same_token(tmp_path: Path, stop: str, polls: int, turns: int) -> None:
    """Also where it moves between the two characters, or is recorded as a whole."""
    given = {"stop": stop, "turns": turns, "max_new_tokens": 20}
    expected, context = trajectories(tmp_path, **given)
    drive(expected, engine(), lease())
    first, _ = trajectories(tmp_path, **given)
    made = engine()
    done = drive(first, made, lease(), polls)
    begun = tuple(output.begun for output in [*first.partials(made.partials()), *done])
    second, again = trajectories(tmp_path, **given)
    drive(second, engine(4), lease(begun=begun))
    assert again.state["told"] == context.state["told"]
    one, two = expected.batch([5]), second.batch([5])
    for name in one.columns:
        left, right = (each.values if isinstance(each, Ragged) else each for each in (one[name], two[name]))
        assert torch.equal(left, right), name


def test_turns_are_cut_and_the_whole_text_has_what_stands_between_them(tmp_path: Path, stop: str) -> None:
    samples, context = trajectories(tmp_path, stop=stop, turns=2, max_new_tokens=20)
    drive(samples, engine(), lease())
    batch, told = samples.batch([5]), context.state["told"]
    assert any(len(turns[0]) < 18 for turns in told.values()), "some turn was cut"
    for row, (text, ids) in enumerate(
        zip(batch.texts("response_text"), batch.ragged("response_ids").rows(), strict=True)
    ):
        behind = shown(ids.tolist()).removeprefix(text)
        assert behind in ("", stop)
        assert text.endswith(told[row][1])
        assert not any(stop in turn for turn in told[row])


def test_what_a_step_says_itself_comes_first(tmp_path: Path, stop: str) -> None:
    """A step whose function has a setting of that name passes it on itself, to the calls that it likes."""
    recipe, own = rows(tmp_path, stop=stop), rows(tmp_path, stop="9999=", own={"stop": [stop]})
    assert own.texts("response_text") == recipe.texts("response_text")
    assert own.texts("response_text") != rows(tmp_path).texts("response_text")
    handled = rows(tmp_path, name="handles", stop=(stop,))
    lengths = [len(row) for row in recipe.ragged("response_ids").rows()]
    assert [len(row) for row in handled.ragged("response_ids").rows()] == [length + 8 for length in lengths]


def test_validation_has_its_own(tmp_path: Path, stop: str) -> None:
    samples, _ = trajectories(tmp_path, of_validation={"stop": stop, "min_new_tokens": 0})
    for position in (5, VALIDATION + 5):
        drive(samples, engine(), lease(position))
        texts = samples.batch([position]).texts("response_text")
        assert any(len(text) < 15 for text in texts) == (lease_kind(position) == "val")


def test_a_stop_string_that_no_text_has_is_refused(tmp_path: Path) -> None:
    samples, _ = trajectories(tmp_path, stop="<eos>", max_attempts=1, on_error="leave_out")
    drive(samples, engine(), lease())
    (reason,) = set(samples.batch([5]).texts("left_out"))
    assert "never ends a response" in reason
    with pytest.raises(UserError, match=r"stop=\('',\)"):
        trajectories(tmp_path, stop=[""])
