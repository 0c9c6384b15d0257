"""Generate steps as asyncio: they await tools and each other's tasks, ask for several things at a time, or block."""

from __future__ import annotations

import logging
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from distflow.data.batch import Batch, Ragged
from distflow.errors import StepError
from distflow.flow.plan import StepPlan
from distflow.flow.step import ENVIRONMENT, GENERATED, SEQUENCES
from distflow.runtime import episode_loop, waits
from distflow.runtime.episode_loop import SETTLE_S, EpisodeLoop
from distflow.runtime.generate_step import SampleLimits
from distflow.runtime.steps import StepContext, StepRunner
from distflow.runtime.trajectories import REPLAY_DIFFERS, Trajectories
from distflow.testing.fakes import FakeEngine
from distflow.types import FINISH_REASONS, BegunSample, SampleOutput, SampleRequest
from tests.runtime.kit import TOKENIZER, EndlessTokenizer
from tests.runtime.test_trajectories import engine, lease

SOURCE = """
import asyncio
import threading
import time
from concurrent.futures import ThreadPoolExecutor

from distflow import step
from distflow.types import SamplingParams

SEEN = []
ENVIRONMENT = dict(role="generate", reads=[], writes=["rewards/told"], environment=["replay", "repeatable"])
TWO, FOUR = SamplingParams(max_new_tokens=2), SamplingParams(max_new_tokens=4)


async def two_turns(prefix, generate, word):
    first = await generate(prefix, TWO)
    second = await generate((*prefix, *first.response_ids, word), TWO)
    return (*prefix, *first.response_ids, word, *second.response_ids)


@step(role="generate", reads=[], writes=["rewards/told"], environment=["replay", "repeatable"])
async def tool(episode, generate, ctx, *, max_new_tokens=4, max_tokens=40, sleep_s=0.3):
    first = await generate(episode.prompt_ids, FOUR)
    await asyncio.sleep(sleep_s)
    await generate((*episode.prompt_ids, *first.response_ids, 10), FOUR)
    return {"rewards/told": 1}


@step(role="generate", reads=[], writes=["rewards/told"], environment=["replay", "repeatable"])
async def in_thread(episode, generate, ctx, *, max_new_tokens=4, max_tokens=40, sleep_s=0.3):
    first = await generate(episode.prompt_ids, FOUR)
    await asyncio.to_thread(time.sleep, sleep_s)
    await generate((*episode.prompt_ids, *first.response_ids, 10), FOUR)
    return {"rewards/told": 1}


@step(role="generate", reads=[], writes=["rewards/told"], environment=["replay", "repeatable"])
def plain(episode, generate, ctx, *, max_new_tokens=4, max_tokens=40, sleep_s=0.3):
    first = generate(episode.prompt_ids, FOUR)
    time.sleep(sleep_s)
    generate((*episode.prompt_ids, *first.response_ids, 10), FOUR)
    return {"rewards/told": threading.current_thread() is not threading.main_thread()}


@step(role="generate", reads=[], writes=["rewards/told"], environment=["replay", "repeatable"])
async def branches(episode, generate, ctx, *, max_new_tokens=4, max_tokens=120, late=()):
    async def branch(number):
        await asyncio.sleep(0.02 if number in late else 0)
        return await two_turns((*episode.prompt_ids, 2, number), generate, number)

    found = await asyncio.gather(*(branch(number) for number in range(4)))
    await generate((5, *found[-1]), TWO)
    return {"rewards/told": len(set(found))}


@step(role="generate", reads=[], writes=["rewards/told"], environment=["replay", "repeatable"])
async def forked(episode, generate, ctx, *, max_new_tokens=4, max_tokens=120, late=()):
    first = await generate(episode.prompt_ids, TWO)
    shared = (*episode.prompt_ids, *first.response_ids)

    async def branch(number):
        await asyncio.sleep(0.05 if number in late else 0)
        return await two_turns((*shared, number), generate, 8)

    left, right = await asyncio.gather(branch(10), branch(11))
    aside = await generate((*shared, 7), TWO, aside=True)
    await generate((*shared, *aside.response_ids), TWO)
    return {"rewards/told": len({left, right})}


@step(role="generate", reads=[], writes=["rewards/told"], environment=["replay", "repeatable"])
async def at_once(episode, generate, ctx, *, max_new_tokens=4, max_tokens=120):
    asked = [generate(episode.prompt_ids, FOUR) for _ in range(2)]
    asked.append(asyncio.create_task(generate(episode.prompt_ids, FOUR)))
    async with asyncio.TaskGroup() as group:
        asked.append(group.create_task(two_turns(episode.prompt_ids, generate, 7)))
    return {"rewards/told": len({found.response_ids for found in await asyncio.gather(*asked[:3])})}


@step(role="generate", reads=[], writes=["rewards/told"], environment=["replay", "repeatable"])
async def impatient(episode, generate, ctx, *, max_new_tokens=4, max_tokens=120):
    try:
        await asyncio.wait_for(generate(episode.prompt_ids, SamplingParams(max_new_tokens=60)), 0.05)
    except TimeoutError:
        await generate(episode.prompt_ids, FOUR)
        return {"rewards/told": 1}


@step(role="generate", reads=[], writes=["rewards/told"], environment=["replay", "repeatable"])
async def hasty(episode, generate, ctx, *, max_new_tokens=4, max_tokens=120):
    sixty = SamplingParams(max_new_tokens=60)
    asked = generate(episode.prompt_ids, sixty)
    generate((5, *episode.prompt_ids), sixty, aside=True)
    later = asyncio.create_task(two_turns_of(sixty, (6, *episode.prompt_ids), generate))
    done, _ = await asyncio.wait([asked, later], timeout=0.05)
    later.cancel()
    await generate((7, *episode.prompt_ids), TWO)
    return {"rewards/told": len(done)}


async def two_turns_of(params, prefix, generate):
    await generate(prefix, params)


@step(role="generate", reads=[], writes=["rewards/told"], environment=["replay", "repeatable"])
async def falling(episode, generate, ctx, *, max_new_tokens=4, max_tokens=120):
    long = generate((5, *episode.prompt_ids), SamplingParams(max_new_tokens=60))
    await generate(episode.prompt_ids, SamplingParams(max_new_tokens=1))
    SEEN.append("fell")
    if len(SEEN) == 1:
        raise ConnectionError("away")
    return {"rewards/told": 1}


@step(role="generate", reads=[], writes=["rewards/told"], environment=["replay", "repeatable"])
async def careful(episode, generate, ctx, *, max_new_tokens=4, max_tokens=40):
    try:
        await generate((*episode.prompt_ids, 999), FOUR)
    except ValueError as error:
        await generate(episode.prompt_ids, FOUR)
        return {"rewards/told": "token ids outside" in str(error)}


@step(role="generate", reads=[], writes=["rewards/told"], environment=["replay", "repeatable"])
async def asking(episode, generate, ctx, *, max_new_tokens=4, max_tokens=60, says=()):
    prefix = episode.prompt_ids
    for turn in range(3):
        completion = await generate(prefix, FOUR)
        prefix = (*prefix, *completion.response_ids, says[turn])
    return {"rewards/told": 1}


@step(role="generate", reads=[], writes=["rewards/told"], environment=["replay", "repeatable"])
async def blocking(episode, generate, ctx, *, max_new_tokens=4, max_tokens=40):
    first = await generate(episode.prompt_ids, FOUR)
    if episode.sample == 0:
        helper()
    return {"rewards/told": 1}


def helper():
    time.sleep(1.2)


@step(role="generate", reads=[], writes=["rewards/told"])
def pooled(episode, generate, ctx, *, max_new_tokens=4):
    with ThreadPoolExecutor(1) as pool:
        pool.submit(generate, episode.prompt_ids, FOUR).result()


@step(role="generate", reads=[], writes=["rewards/told"])
async def awaiting_nothing(episode, generate, ctx, *, max_new_tokens=4):
    return {"rewards/told": len(generate(episode.prompt_ids, FOUR).response)}


@step(role="generate", reads=[], writes=["rewards/told"])
async def using_a_coroutine(episode, generate, ctx, *, max_new_tokens=4):
    return {"rewards/told": ctx.once("one", len, "a") + 1}


@step(role="generate", reads=[], writes=["rewards/told"])
def awaiting_too_much(episode, generate, ctx, *, max_new_tokens=4):
    async def asks(completion):
        return await completion

    return asyncio.run(asks(generate(episode.prompt_ids, FOUR)))


@step(role="generate", reads=[], writes=["rewards/told"])
def raising(episode, generate, ctx, *, max_new_tokens=4):
    generate(episode.prompt_ids, FOUR)
    raise ConnectionError("sandbox away")


@step(role="generate", reads=[], writes=["rewards/told"])
def leaving(episode, generate, ctx, *, max_new_tokens=4):
    generate(episode.prompt_ids, FOUR)
    raise SystemExit(3)
"""


SINGLE_TURN = ("pooled", "raising", "leaving", "awaiting_nothing", "using_a_coroutine", "awaiting_too_much")


def trajectories(
    folder: Path,
    name: str,
    samples: int = 4,
    *,
    most: int | None = None,
    loop: EpisodeLoop | None = None,
    source: str = SOURCE,
    **settings: Any,
) -> Trajectories:
    (folder / "asking.py").write_text(source)
    environment = None if name in SINGLE_TURN else ENVIRONMENT
    writes = (*GENERATED, *(() if environment is None else SEQUENCES), "rewards/told")
    call = f"{folder}/asking.py:{name}"
    plan = StepPlan("sample", call, "generate", "sample", None, settings, (), writes, (), environment)
    context = StepContext("sample", tokenizer=EndlessTokenizer())
    step = StepRunner("rollout/0", [plan], {"sample": context}, loop=loop).generate_step("sample")
    return Trajectories(step, {"train": SampleLimits(samples, 120, 240)}, TOKENIZER, torch.float32, most=most)


def until_done(
    samples: Trajectories, made: FakeEngine, positions: list[int], begun: tuple[BegunSample, ...] = ()
) -> list[SampleRequest]:
    """Decode until all groups are whole; returns what was asked for, in that order."""
    asked = samples.begin([lease(position, begun) for position in positions])
    samples.submit(made, asked)
    deadline = time.monotonic() + 30
    while samples.left:
        assert time.monotonic() < deadline
        assert samples.asks or samples.wait(10.0)
        more, _ = samples.take(made.poll())
        samples.submit(made, more)
        asked += more
    return asked


def whole(folder: Path, name: str, samples: int = 4, **settings: Any) -> tuple[Batch, list[SampleRequest], float]:
    made = trajectories(folder, name, samples, **settings)
    began = time.monotonic()
    asked = until_done(made, engine(slots=64, max_tokens=160), [5])
    return made.batch([5]), asked, time.monotonic() - began


@pytest.mark.parametrize("name", ["tool", "in_thread", "plain"])
def test_what_sixteen_samples_wait_for_they_wait_for_side_by_side(tmp_path: Path, name: str) -> None:
    batch, _, seconds = whole(tmp_path, name, 16)
    assert batch.dense("rewards/told").tolist() == [1.0] * 16
    assert 0.3 <= seconds < 16 * 0.3 / 2
    assert batch.ragged("response_ids").lengths.tolist() == [9] * 16


def test_all_three_make_the_same_samples(tmp_path: Path) -> None:
    found = [whole(tmp_path, name)[0] for name in ("tool", "in_thread", "plain")]
    tokens = [batch.ragged("response_ids").values for batch in found]
    assert torch.equal(tokens[0], tokens[1])
    assert torch.equal(tokens[0], tokens[2])


def test_a_waiting_sample_does_not_stop_the_engine(tmp_path: Path) -> None:
    """Another group is made while the first one waits for its tools."""
    samples, made = trajectories(tmp_path, "tool", 2, sleep_s=30.0), engine()
    samples.submit(made, samples.begin([lease(5)]))
    while made.progress():
        samples.submit(made, samples.take(made.poll())[0])
    assert (samples.asks, samples.left) == (False, 2)
    assert samples.progress({}) == {5: 8}
    assert [len(output.token_ids) for output in samples.partials([])] == [4, 4]
    samples.submit(made, samples.begin([lease(6)]))
    assert made.progress() == {6: 0}
    samples.forget([5, 6])
    assert samples.left == 0


def test_branches_are_sequences_in_the_order_of_their_calls(tmp_path: Path) -> None:
    """Whichever of them comes first."""
    found = [whole(tmp_path, "branches", 2, late=late)[0] for late in ((), (0, 2), (1, 3))]
    turns = [True, True, False, True, True]
    for batch in found:
        assert batch.dense("sample").tolist() == [0] * 5 + [1] * 5
        prompts = [row.tolist() for row in batch.ragged("prompt_ids").rows()]
        assert prompts[:4] == [[2, 3], *([2, 3, 2, number] for number in (1, 2, 3))]
        assert prompts[4][:6] == [5, 2, 3, 2, 3, *batch.ragged("response_ids").row(3)[:1].tolist()]
        assert batch.dense("rewards/told").tolist() == [4.0] * 10
        masks = [row.tolist() for row in batch.ragged("response_mask").rows()]
        assert masks[:4] == [[False, False, *turns], turns, turns, turns]


def test_branches_draw_other_tokens_than_each_other_and_the_same_ones_again(tmp_path: Path) -> None:
    """Before, those of equal length drew the same numbers. The fake engine draws by these alone."""
    found = []
    for late in ((), (0, 2)):
        batch, _, _ = whole(tmp_path, "branches", 3, late=late)
        masks = batch.ragged("response_mask").rows()
        found.append([row[mask].tolist() for row, mask in zip(batch.ragged("response_ids").rows(), masks, strict=True)])
    assert found[0] == found[1]
    assert len(set(map(tuple, found[0]))) == 3 * 5
    batch, _, _ = whole(tmp_path, "at_once", 2)
    assert set(batch.dense("rewards/told").tolist()) == {3.0}, "asked three times for the same"


@pytest.mark.parametrize("late", [(), (10,), (11,)])
def test_calls_of_one_task_that_go_on_with_each_other_share_a_stream(tmp_path: Path, late: tuple[int, ...]) -> None:
    """Which of two branches comes first to the tokens that both go on with changes neither numbers nor sequences."""
    batch, asked, _ = whole(tmp_path, "forked", 1, late=late)
    assert {request.call: (request.stream, request.offset) for request in asked} == {
        (0,): ((), 0),
        (1, 0): ((1, 0), 0),
        (1, 1): ((1, 0), 3),
        (2, 0): ((2, 0), 0),
        (2, 1): ((2, 0), 3),
        (3,): ((3,), 0),
        (4,): ((), 4),
    }
    prompts = [row.tolist() for row in batch.ragged("prompt_ids").rows()]
    lengths = batch.ragged("response_ids").lengths.tolist()
    assert (list(map(len, prompts)), lengths) == ([2, 5, 6], [8, 5, 2])
    assert batch.ragged("response_ids").row(0)[2] == 10
    assert prompts[1][-1] == 11


def test_calls_are_numbered_by_the_code(tmp_path: Path) -> None:
    _, asked, _ = whole(tmp_path, "branches", 1, late=(1,))
    calls = {request.call: request.prompt_ids for request in asked}
    assert sorted(calls) == [(0, 0), (0, 1), (1, 0), (1, 1), (2, 0), (2, 1), (3, 0), (3, 1), (4,)]
    assert all(calls[number, 0][-1] == number for number in range(4))
    _, asked, _ = whole(tmp_path, "at_once", 1)
    assert [request.call for request in asked] == [(0,), (1,), (2,), (4, 0), (4, 1)]


def test_requests_of_several_samples_enter_in_the_order_of_samples_and_calls(tmp_path: Path) -> None:
    samples, made = trajectories(tmp_path, "branches", 3), engine(slots=64)
    first = samples.begin([lease(6), lease(5)])
    assert [request.key for request in first] == sorted(request.key for request in first)
    samples.submit(made, first)
    asked = list[SampleRequest]()
    for _ in range(2):
        asked, _ = samples.take(made.poll())
    assert len(asked) == 2 * 3 * 4
    assert [request.key for request in asked] == sorted(request.key for request in asked)


@pytest.mark.parametrize("name, told", [("impatient", 1.0), ("careful", 1.0)])
def test_a_request_that_is_given_up_or_refused_leaves_nothing(tmp_path: Path, name: str, told: float) -> None:
    samples, made = trajectories(tmp_path, name, 1), engine(slots=1 if name == "careful" else 4)
    samples.submit(made, samples.begin([lease()]))
    while samples.left:
        time.sleep(0.01)
        samples.submit(made, samples.take(made.poll() if samples.asks else [])[0])
    batch = samples.batch([5])
    assert batch.dense("rewards/told").tolist() == [told]
    assert batch.ragged("response_ids").lengths.tolist() == [4]
    assert bool(batch.ragged("response_mask").values.all())


@pytest.mark.parametrize(
    "name, asked", [("impatient", {(0,): 60, (1,): 4}), ("hasty", {(0,): 60, (1,): 60, (2, 0): 60, (3,): 2})]
)
def test_what_nobody_waits_for_is_not_decoded_to_its_end(
    tmp_path: Path, name: str, asked: dict[tuple[int, ...], int]
) -> None:
    samples, made = trajectories(tmp_path, name, 1), engine(slots=8, max_tokens=80)
    requests = samples.begin([lease()])
    most, known = 0, {request.call: request.params.max_new_tokens for request in requests}
    samples.submit(made, requests)
    while samples.left:
        time.sleep(0.01)
        requests, _ = samples.take(made.poll() if samples.asks else [])
        samples.submit(made, requests)
        known |= {request.call: request.params.max_new_tokens for request in requests}
        most = max(most, *made.progress().values(), 0)
    assert known == asked
    assert made.progress() == {}
    assert most < 60


def test_an_attempt_that_fails_gives_up_what_it_has_asked_for(tmp_path: Path) -> None:
    samples, made = trajectories(tmp_path, "falling", 1), engine(slots=8, max_tokens=80)
    samples.submit(made, samples.begin([lease()]))
    samples.submit(made, samples.take(made.poll())[0])
    # Of the first attempt, which has failed, nothing is left.
    assert {partial.call for partial in made.partials()} <= {(2,), (3,)}
    while samples.left:
        samples.submit(made, samples.take(made.poll())[0])
    assert made.progress() == {}
    assert samples.batch([5]).ragged("response_ids").lengths.tolist() == [1]


def left_after(folder: Path, name: str, polls: int, **settings: Any) -> tuple[BegunSample, ...]:
    """What another worker has had of a group after so many decode steps."""
    samples, made = trajectories(folder, name, 2, **settings), engine(slots=64)
    samples.submit(made, samples.begin([lease()]))
    done: list[SampleOutput] = []
    for _ in range(polls):
        if not samples.asks:
            assert samples.wait(10.0) or not samples.left
        more, finished = samples.take(made.poll())
        samples.submit(made, more)
        done += [call for sample in finished for call in sample.calls]
    return tuple(output.begun for output in (*samples.partials(made.partials()), *done))


def same(one: Batch, two: Batch) -> bool:
    return all(
        torch.equal(*(part.values if isinstance(part, Ragged) else part for part in (one[name], two[name])))
        for name in one.columns
    )


@pytest.mark.parametrize(
    "name, settings, reason",
    [
        ("tool", {"turn_timeout_s": 0.2}, "has asked for no tokens for 0.2 s (turn_timeout_s)"),
        ("tool", {"timeout_s": 0.2}, "has taken 0.2 s (timeout_s)"),
        ("plain", {"turn_timeout_s": 0.2}, "has asked for no tokens for 0.2 s (turn_timeout_s)"),
        ("in_thread", {"timeout_s": 0.2}, "has taken 0.2 s (timeout_s)"),
    ],
)
def test_an_episode_ends_by_its_time_out(
    tmp_path: Path, name: str, settings: dict[str, float], reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Whatever its tool still does: nobody waits for it."""
    with caplog.at_level(logging.WARNING):
        loop = EpisodeLoop(SETTLE_S)
        batch, _, seconds = whole(tmp_path, name, 2, loop=loop, sleep_s=20.0, on_error="leave_out", **settings)
        loop.close()
    assert 0.2 <= seconds < 10
    assert batch.texts("left_out") == [reason] * 2
    assert [FINISH_REASONS[int(number)] for number in batch.dense("finish_reason")] == ["error", "error"]
    (told,) = [record.getMessage() for record in caplog.records if reason in record.getMessage()]
    if name == "tool":
        line = SOURCE.splitlines().index("    await asyncio.sleep(sleep_s)") + 1
        assert f"asking.py:{line}, attempt 1 of 1" in told


def test_a_coroutine_that_blocks_is_named_and_the_engine_goes_on(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(episode_loop, "BLOCKED_S", 0.2)
    loop = EpisodeLoop(SETTLE_S)
    samples, made = trajectories(tmp_path, "blocking", 2, loop=loop), engine()
    samples.submit(made, samples.begin([lease()]))
    while made.progress():
        made_at = time.monotonic()
        samples.submit(made, samples.take(made.poll())[0])
        assert time.monotonic() - made_at < 1.0
    with caplog.at_level(logging.WARNING):
        while samples.left:
            samples.wait(10.0)
            samples.take([])
    loop.close()
    line = SOURCE.splitlines().index("    time.sleep(1.2)") + 1
    (told,) = [record.getMessage() for record in caplog.records if "blocks the event loop" in record.getMessage()]
    assert f"asking.py:{line}: all other samples of this worker wait" in told
    assert "asyncio.to_thread" in told


def test_time_in_which_nobody_looks_counts_for_little(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As while a worker trains, or its engine loads weights."""
    monkeypatch.setattr(waits, "LONGEST_S", 0.1)
    samples, made = trajectories(tmp_path, "tool", 1, timeout_s=1.0, sleep_s=0.1), engine()
    samples.submit(made, samples.begin([lease()]))
    time.sleep(1.1)
    while samples.left:
        assert samples.asks or samples.wait(10.0)
        samples.submit(made, samples.take(made.poll())[0])
    assert samples.batch([5]).texts("left_out") == [""]


def test_the_room_is_that_of_slots_and_of_episodes(tmp_path: Path) -> None:
    samples, made = trajectories(tmp_path, "tool", 2, most=5, sleep_s=30.0), engine(slots=4)
    assert samples.room(4) == (4, 5)
    samples.submit(made, samples.begin([lease(5), lease(6)]))
    assert samples.room(made.free_slots) == (0, None)
    while made.progress():
        samples.submit(made, samples.take(made.poll())[0])
    assert samples.room(made.free_slots) == (1, 1)
    samples.forget([5])
    assert samples.room(made.free_slots) == (3, 3)


@pytest.mark.parametrize("polls", range(8))
@pytest.mark.parametrize("name", ["branches", "at_once", "tool"])
def test_branches_are_replayed_wherever_they_were_left(tmp_path: Path, name: str, polls: int) -> None:
    settings = {"sleep_s": 0.01} if name == "tool" else {}
    expected, _, _ = whole(tmp_path, name, 2, **settings)
    samples = trajectories(tmp_path, name, 2, **settings)
    begun = left_after(tmp_path, name, polls, **settings)
    asked = until_done(samples, engine(slots=64, max_tokens=160), [5], begun)
    assert same(samples.batch([5]), expected)
    answered = {(sample.sample, sample.call) for sample in begun if sample.finish_reason}
    assert not answered & {(request.sample, request.call) for request in asked}
    assert REPLAY_DIFFERS not in samples.step.metrics.counts()


@pytest.mark.parametrize("turn", [0, 1])
def test_what_follows_another_answer_of_a_tool_is_sampled_anew(tmp_path: Path, turn: int) -> None:
    """The record is of what the model wrote behind the first answer, which it has not seen here."""
    begun = left_after(tmp_path, "asking", 10, says=(10, 10, 10))
    assert sorted({sample.call for sample in begun}) == [(0,), (1,), (2,)]
    says = tuple(11 if number == turn else 10 for number in range(3))
    samples = trajectories(tmp_path, "asking", 2, says=says)
    asked = until_done(samples, engine(slots=64), [5], begun)
    assert {request.call for request in asked} == {(number,) for number in range(turn + 1, 3)}
    assert all(request.begun is None for request in asked)
    expected, _, _ = whole(tmp_path, "asking", 2, says=says)
    assert same(samples.batch([5]), expected)
    assert samples.step.metrics.counts()[REPLAY_DIFFERS] == 2


@pytest.mark.parametrize(
    "name, message",
    [
        (
            "pooled",
            r"RuntimeError: generate\(…\) was called in another thread than the step's own.*asyncio\.gather",
        ),
        ("raising", r"(?s)in raising\n.*ConnectionError: sandbox away\nstep 'sample' .* raised ConnectionError"),
        ("awaiting_nothing", r"AttributeError: '_asyncio\.Future' object .*\n`await` is missing: "),
        ("using_a_coroutine", r"TypeError: .*'coroutine' and 'int'\n`await` is missing: "),
        ("awaiting_too_much", r"TypeError: object Completion .*\nleave `await` out: "),
        ("leaving", r"(?s)in leaving\n.*SystemExit: 3\nstep 'sample' .* raised SystemExit on rollout/0"),
    ],
)
@pytest.mark.filterwarnings("ignore:coroutine")
def test_what_steps_raise_is_told_with_its_cure(tmp_path: Path, name: str, message: str) -> None:
    with pytest.raises(StepError, match=message):
        whole(tmp_path, name, 2, on_error="stop")


def test_a_closed_loop_leaves_no_thread_but_those_that_are_busy(tmp_path: Path) -> None:
    before = threading.active_count()
    loop = EpisodeLoop()
    samples, made = trajectories(tmp_path, "plain", 3, loop=loop, sleep_s=0.0), engine()
    until_done(samples, made, [5])
    assert threading.active_count() > before
    loop.close()
    deadline = time.monotonic() + 10
    while threading.active_count() > before:
        assert time.monotonic() < deadline
        time.sleep(0.01)
