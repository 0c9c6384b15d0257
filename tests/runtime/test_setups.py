"""What episodes share is entered and left by one task, in time, and whatever else goes wrong."""

from __future__ import annotations

import logging
import time
from pathlib import Path

import pytest
import torch

from distflow.errors import StepError
from distflow.flow.plan import StepPlan
from distflow.flow.resolve import resolve
from distflow.flow.step import ENVIRONMENT, GENERATED, SEQUENCES
from distflow.runtime import episode_loop
from distflow.runtime.episode_loop import SETTLE_S, EpisodeLoop, SetupFailed
from distflow.runtime.generate_step import SampleLimits
from distflow.runtime.steps import StepContext, StepRunner
from distflow.runtime.trajectories import Trajectories
from tests.runtime.kit import TOKENIZER, EndlessTokenizer
from tests.runtime.test_awaiting import trajectories, until_done, whole
from tests.runtime.test_trajectories import engine, lease

SOURCE = """
import asyncio
import time
from contextlib import asynccontextmanager

from distflow import step
from distflow.types import SamplingParams

FOUR = SamplingParams(max_new_tokens=4)
NOTES = []


async def serve(queue):
    while True:
        (await queue.get()).set_result("answered")


@asynccontextmanager
async def grouped(ctx):
    # As clients of MCP servers do, whose scopes belong to a task.
    entered, queue = asyncio.current_task(), asyncio.Queue()
    async with asyncio.TaskGroup() as group:
        server = group.create_task(serve(queue))
        yield queue
        NOTES.append(("left", asyncio.current_task() is entered, server.done()))
        server.cancel()


@asynccontextmanager
async def broken(ctx):
    yield
    raise ConnectionError("gone already")


@asynccontextmanager
async def endless(ctx):
    yield
    while True:
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            pass


@asynccontextmanager
async def hanging(ctx):
    await connected()
    yield


async def connected():
    await asyncio.sleep(60)


@asynccontextmanager
async def deaf(ctx):
    until = asyncio.get_running_loop().time() + 3
    while (left := until - asyncio.get_running_loop().time()) > 0:
        try:
            await asyncio.sleep(left)
        except asyncio.CancelledError:
            pass
    yield


@asynccontextmanager
async def slow(ctx):
    await asyncio.sleep(0.6)
    yield 1


@asynccontextmanager
async def losing_one_of_a_group(ctx):
    async with asyncio.TaskGroup() as group:
        group.create_task(served())
        yield


@asynccontextmanager
async def losing_a_task(ctx):
    task = asyncio.create_task(served())
    yield task


@asynccontextmanager
async def cancelled(ctx):
    asyncio.get_running_loop().call_later(0.2, asyncio.current_task().cancel)
    yield


async def served():
    await asyncio.sleep(0.2)
    raise ConnectionError("the server has hung up")


def of(setup):
    return dict(role="generate", reads=[], writes=["rewards/told"], environment=["replay", "repeatable"], setup=setup)


async def asks(queue):
    answer = asyncio.get_running_loop().create_future()
    queue.put_nowait(answer)
    return await answer


@step(**of(grouped))
async def careful(episode, generate, ctx, *, max_new_tokens=4, max_tokens=40):
    try:
        await generate(episode.prompt_ids, FOUR)
        await asyncio.sleep(60)
    finally:
        NOTES.append(("episode", await asks(ctx.shared)))


@step(**of(grouped))
async def stubborn(episode, generate, ctx, *, max_new_tokens=4, max_tokens=40):
    await generate(episode.prompt_ids, FOUR)
    while True:
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            pass
"""
BEHIND = """

@step(**of({setup}))
async def behind_{setup}(episode, generate, ctx, *, max_new_tokens=4, max_tokens=40):
    await generate(episode.prompt_ids, FOUR)
    return {{"rewards/told": 1}}


@step(**of({setup}))
def thread_behind_{setup}(episode, generate, ctx, *, max_new_tokens=4, max_tokens=40):
    generate(episode.prompt_ids, FOUR)
    return {{"rewards/told": 1}}
"""
SOURCE += "".join(BEHIND.format(setup=setup) for setup in ("broken", "endless", "hanging", "deaf", "slow"))
LOSING = ("losing_one_of_a_group", "losing_a_task", "cancelled")
SOURCE += "".join(BEHIND.format(setup=setup) for setup in LOSING)


SHARED = """
from contextlib import asynccontextmanager

from distflow import step
from distflow.types import SamplingParams

FOUR = SamplingParams(max_new_tokens=4)
SEEN = []


@asynccontextmanager
async def clients(ctx):
    SEEN.append("entered")
    if len(SEEN) <= 2:
        raise ConnectionError("not yet")
    yield f"of {ctx.step_name}"
    SEEN.append("left")


@asynccontextmanager
async def nobody(ctx):
    raise ConnectionError("nobody there")
    yield


@step(role="generate", reads=[], writes=["rewards/told"], environment=["replay", "repeatable"], setup=clients)
async def sharing(episode, generate, ctx, *, max_new_tokens=4, max_tokens=40):
    await generate(episode.prompt_ids, FOUR)
    return {"rewards/told": SEEN.count("entered") + (ctx.shared == "of sample")}


@step(role="generate", reads=[], writes=["rewards/told"], environment=["replay", "repeatable"], setup=clients)
def sharing_in_thread(episode, generate, ctx, *, max_new_tokens=4, max_tokens=40):
    generate(episode.prompt_ids, FOUR)
    return {"rewards/told": SEEN.count("entered") + (ctx.shared == "of sample")}


@step(role="generate", reads=[], writes=["rewards/told"], environment=["replay", "repeatable"], setup=nobody)
async def lonely(episode, generate, ctx, *, max_new_tokens=4, max_tokens=40):
    await generate(episode.prompt_ids, FOUR)
"""


def of_loop(folder: Path, loop: EpisodeLoop, name: str, **settings: object) -> Trajectories:
    file = folder / "setups.py"
    file.write_text(SOURCE)
    writes = (*GENERATED, *SEQUENCES, "rewards/told")
    plan = StepPlan(name, f"{file}:{name}", "generate", "sample", None, settings, (), writes, (), ENVIRONMENT)
    context = StepContext(name, tokenizer=EndlessTokenizer())
    step = StepRunner("rollout/0", [plan], {name: context}, loop=loop).generate_step(name)
    return Trajectories(step, {"train": SampleLimits(2, 120, 240)}, TOKENIZER, torch.float32)


def begun(samples: Trajectories) -> None:
    """Have all episodes come to what they wait for behind their first turn."""
    made = engine()
    samples.submit(made, samples.begin([lease(5)]))
    while not samples.asks:
        samples.wait(10.0)
        samples.submit(made, samples.take([])[0])
    while samples.asks:
        samples.submit(made, samples.take(made.poll())[0])


def test_it_is_left_by_the_task_that_entered_it_once_all_episodes_have_ended(tmp_path: Path) -> None:
    loop = EpisodeLoop(SETTLE_S)
    begun(of_loop(tmp_path, loop, "careful"))
    loop.close()
    notes = resolve(f"{tmp_path}/setups.py:NOTES")
    assert notes == [("episode", "answered"), ("episode", "answered"), ("left", True, False)]


@pytest.mark.parametrize("before", ["stubborn", "behind_broken", "thread_behind_endless"])
def test_each_is_left_whatever_the_others_do(
    tmp_path: Path, before: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(episode_loop, "CLEANUP_S", 0.3)
    loop = EpisodeLoop(SETTLE_S)
    for name in (before, "careful"):
        begun(of_loop(tmp_path, loop, name))
    began = time.monotonic()
    with caplog.at_level(logging.WARNING):
        loop.close()
    assert time.monotonic() - began < 5.0
    assert resolve(f"{tmp_path}/setups.py:NOTES")[-1][:2] == ("left", True)
    expected = {
        "stubborn": "2 tasks of episodes go on",
        "behind_broken": f"the setup of step 'behind_broken' ({tmp_path}/setups.py:behind_broken) on rollout/0 raised "
        "ConnectionError when it was left",
        "thread_behind_endless": "on rollout/0 was not left within 0.3 s",
    }
    assert expected[before] in caplog.text


@pytest.mark.parametrize("name", ["behind_hanging", "thread_behind_hanging", "behind_deaf", "thread_behind_deaf"])
def test_one_that_hangs_ends_the_run_by_its_own_name(
    tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not by a time-out of the step, which has not begun."""
    monkeypatch.setattr(episode_loop, "CLEANUP_S", 0.3)
    monkeypatch.setattr(episode_loop, "SETUP_S", 0.6)
    loop = EpisodeLoop(SETTLE_S)
    where = r"in connected\n.*" if name.endswith("hanging") else ""
    with pytest.raises(SetupFailed, match=rf"(?s){where}the setup of step '{name}' .* had given nothing after 0\.6 s"):
        until_done(of_loop(tmp_path, loop, name, turn_timeout_s=0.2, timeout_s=0.3), engine(), [5])
    loop.close()


@pytest.mark.parametrize("setup", LOSING)
def test_one_that_loses_what_it_has_given_says_so_at_once_and_once(
    tmp_path: Path, setup: str, caplog: pytest.LogCaptureFixture
) -> None:
    loop = EpisodeLoop(SETTLE_S)
    begun(of_loop(tmp_path, loop, f"behind_{setup}"))
    until = time.monotonic() + 10.0
    with caplog.at_level(logging.WARNING):
        while not caplog.records:
            assert time.monotonic() < until
            time.sleep(0.01)
        loop.close()
    (told,) = [record.getMessage() for record in caplog.records]
    assert f"the setup of step 'behind_{setup}' ({tmp_path}/setups.py:behind_{setup}) on rollout/0 " in told
    assert "while episodes go on with what it has given (ctx.shared)" in told
    if setup != "cancelled":
        assert "has lost its task served, which raised ConnectionError" in told
        assert 'raise ConnectionError("the server has hung up")' in told


@pytest.mark.parametrize("name", ["behind_slow", "thread_behind_slow"])
def test_its_time_is_none_of_the_episodes(tmp_path: Path, name: str) -> None:
    loop = EpisodeLoop(SETTLE_S)
    samples = of_loop(tmp_path, loop, name, turn_timeout_s=0.3, timeout_s=0.4, max_attempts=1)
    until_done(samples, engine(), [5])
    loop.close()
    assert samples.batch([5]).texts("left_out") == ["", ""]


@pytest.mark.parametrize("name", ["sharing", "sharing_in_thread"])
def test_a_setup_is_entered_once_for_all_episodes_and_left_in_the_end(
    tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(episode_loop, "BACK_OFF_S", (0.01, 0.01, 0.01))
    loop = EpisodeLoop(SETTLE_S)
    samples, made = trajectories(tmp_path, name, 3, loop=loop, source=SHARED), engine(slots=8)
    until_done(samples, made, [5])
    until_done(samples, made, [6])
    assert samples.batch([5, 6]).dense("rewards/told").tolist() == [3.0 + 1.0] * 6, "it was tried three times"
    loop.close()
    assert resolve(f"{tmp_path}/asking.py:SEEN") == ["entered"] * 3 + ["left"]


def test_a_setup_that_fails_again_and_again_ends_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(episode_loop, "BACK_OFF_S", (0.01,))
    message = r"(?s)in nobody\n.*ConnectionError: nobody there\nthe setup of step 'sample' .* raised ConnectionError"
    with pytest.raises(StepError, match=message):
        whole(tmp_path, "lonely", 2, source=SHARED)
