"""Tasks that episodes leave are named when they are cancelled, and so is what episodes wait for that need them."""

from __future__ import annotations

import asyncio
import logging
import time
import warnings
from pathlib import Path

import pytest

from distflow.comm.users_code import UsersLoop
from distflow.log import hear_forgotten
from distflow.runtime.episode_loop import SETTLE_S, EpisodeLoop, Episodes
from distflow.runtime.trajectories import Trajectories
from tests.runtime.episode_children import Steps
from tests.runtime.test_awaiting import trajectories, until_done
from tests.runtime.test_trajectories import engine, lease

SOURCE = """
import asyncio
import time

from distflow import step
from distflow.types import SamplingParams

FOUR = SamplingParams(max_new_tokens=4)
OF = dict(role="generate", reads=[], writes=["rewards/told"], environment=["replay", "repeatable"])
TOLD = {"rewards/told": 1}


class Server:
    def __init__(self):
        self.queue, self.task = asyncio.Queue(), asyncio.create_task(self.serve())

    async def serve(self):
        while True:
            (await self.queue.get()).set_result(None)


SERVERS = []


async def asks(server):
    answer = asyncio.get_running_loop().create_future()
    server.queue.put_nowait(answer)
    await answer  # HERE


@step(**OF)
async def lazy(episode, generate, ctx, *, max_new_tokens=4, max_tokens=40):
    if not SERVERS:
        SERVERS.append(Server())
    await generate(episode.prompt_ids, FOUR)
    await asyncio.sleep(0.1 * episode.sample)
    await asks(SERVERS[0])
    return TOLD


@step(**OF)
async def lazy_and_failing(episode, generate, ctx, *, max_new_tokens=4, max_tokens=40):
    if not SERVERS:
        SERVERS.append(Server())
    await generate(episode.prompt_ids, FOUR)
    if episode.sample == 0:
        raise ConnectionError("away")
    await asyncio.sleep(0.1)
    await asks(SERVERS[0])


@step(**OF)
async def careful(episode, generate, ctx, *, max_new_tokens=4, max_tokens=80):
    asyncio.create_task(generate((5, *episode.prompt_ids), FOUR))
    raced = [asyncio.create_task(asyncio.sleep(seconds)) for seconds in (0.0, 60.0)]
    done, waiting = await asyncio.wait(raced, return_when=asyncio.FIRST_COMPLETED)
    for task in waiting:
        task.cancel()
    async with asyncio.TaskGroup() as group:
        group.create_task(asyncio.sleep(0.01))
    await generate(episode.prompt_ids, FOUR)
    return TOLD


@step(**OF)
def plain(episode, generate, ctx, *, max_new_tokens=4, max_tokens=40):
    generate(episode.prompt_ids, FOUR)
    time.sleep(1.0)  # THERE
    return TOLD
"""
LINES = SOURCE.splitlines()
SERVES = LINES.index("    async def serve(self):") + 1


def of_place(folder: Path, place: str, name: str, **settings: object) -> tuple[Trajectories, Episodes]:
    if place == "process":
        (folder / "asking.py").write_text(SOURCE)
        apart = Steps(folder / "asking.py", {name: settings})
        return apart.samples(name, apart.process), apart.process
    loop = EpisodeLoop(SETTLE_S)
    return trajectories(folder, name, 3, loop=loop, source=SOURCE, **settings), loop


@pytest.mark.parametrize("place", ["thread", "process"])
@pytest.mark.parametrize("name", ["lazy", "lazy_and_failing"])
def test_a_task_that_others_need_is_named_once_when_its_episode_has_ended(
    tmp_path: Path, name: str, place: str, caplog: pytest.LogCaptureFixture
) -> None:
    samples, episodes = of_place(tmp_path, place, name, turn_timeout_s=1.0, on_error="leave_out", max_error_rate=1.0)
    until_done(samples, engine(), [5])
    episodes.close()
    late = "has asked for no tokens for 1 s (turn_timeout_s)"
    first = "" if name == "lazy" else "ConnectionError: away"
    assert samples.batch([5]).texts("left_out") == [first, late, late]
    (told,) = [record.getMessage() for record in caplog.records if "left the task" in record.getMessage()]
    assert (
        f"({tmp_path}/asking.py:{name}) on rollout/0 left the task Server.serve ({tmp_path}/asking.py:{SERVES})" in told
    )
    assert "let the step's `setup` begin what all episodes share" in told


def test_requests_and_what_is_cancelled_already_are_no_such_tasks(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    loop = EpisodeLoop(SETTLE_S)
    samples = trajectories(tmp_path, "careful", 3, loop=loop, source=SOURCE)
    with caplog.at_level(logging.WARNING):
        until_done(samples, engine(slots=8), [5])
        time.sleep(0.3)
        samples.news  # noqa: B018  # as a worker that waits for leases
    loop.close()
    assert set(samples.batch([5]).dense("rewards/told").tolist()) == {1.0}
    assert caplog.records == []


@pytest.mark.parametrize("place", ["thread", "process"])
@pytest.mark.parametrize("name, mark, waiting", [("lazy", "# HERE", 2), ("plain", "# THERE", 3)])
def test_what_episodes_wait_for_has_a_name(tmp_path: Path, place: str, name: str, mark: str, waiting: int) -> None:
    samples, episodes = of_place(tmp_path, place, name)
    made = engine()
    samples.submit(made, samples.begin([lease(5)]))
    line = next(number for number, text in enumerate(LINES, 1) if mark in text)
    # The innermost line of the step's own file.
    expected = f"environments of {waiting} episodes, one of them at {tmp_path}/asking.py:{line}"
    until = time.monotonic() + 20.0
    while samples.asks or samples.environments != expected:
        assert time.monotonic() < until, samples.environments
        samples.submit(made, samples.take(made.poll())[0])
        time.sleep(0.005)
    samples.forget([5])
    episodes.close()


async def fetched() -> str:
    await asyncio.sleep(0)
    return "text"


def forgets_in_thread() -> None:
    for _ in range(3):
        fetched()


async def forgets_later() -> None:
    for _ in range(3):
        found = fetched()
        await asyncio.sleep(0)
        del found


def test_a_workers_log_tells_once_of_a_line_whose_coroutines_nobody_awaits() -> None:
    with warnings.catch_warnings():
        told: list[str] = []
        hear_forgotten(told.append)
        loop = UsersLoop()
        loop.run_until_complete(forgets_later())
        loop.run_until_complete(fetched())
        loop.close()
        forgets_in_thread()
    lines = [forgets_later.__code__.co_firstlineno + 2, forgets_in_thread.__code__.co_firstlineno + 2]
    assert [one.partition(": what")[0] for one in told] == [
        f"coroutine 'fetched' was never awaited ({__file__}:{line})" for line in lines
    ]
