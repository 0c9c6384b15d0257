"""Copies of a worker that users' code forks end where they come back, and nothing ends the loop that episodes share."""

from __future__ import annotations

import os
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from distflow.algorithms import TokenTerms
from distflow.algorithms.losses import TokenLoss
from distflow.data.batch import Batch
from distflow.flow.plan import StepPlan
from distflow.flow.resolve import resolve
from distflow.runtime.episode_loop import SETTLE_S, EpisodeLoop
from distflow.runtime.steps import StepContext, StepRunner
from distflow.types import Completion
from distflow.workers.reward_judging import judge_together, reward_function
from tests.algorithms.loops import draw
from tests.learning.test_objective import objective
from tests.runtime.episode_children import Steps
from tests.runtime.test_awaiting import trajectories, until_done
from tests.runtime.test_trajectories import engine

SOURCE = """
import asyncio
import os
import pty
import threading
from contextlib import asynccontextmanager

from distflow import step
from distflow.types import SamplingParams

FOUR = SamplingParams(max_new_tokens=4)
COPIES = []
FILE = __file__ + ".came"
OF = dict(role="generate", reads=[], writes=["rewards/told"], environment=["replay", "repeatable"])


def forked():
    pid = os.fork()
    if pid:
        COPIES.append(pid)
    return pid == 0


def came():
    with open(FILE, "a") as file:
        file.write(f"{os.getpid()}\\n")


def execs():
    if forked():
        os.execvp("no-such-sandbox", ["no-such-sandbox"])


def leaves():
    if forked():
        raise SystemExit(7)


def in_terminal():
    pid, _ = pty.fork()
    if pid == 0:
        os.execvp("no-such-sandbox", ["no-such-sandbox"])
    COPIES.append(pid)


async def nested():
    await asyncio.sleep(0)
    execs()


def first(episode):
    return episode.sample == 1 and not COPIES


def told():
    came()
    return {"rewards/told": 1}


@step(**OF)
async def exec_fails(episode, generate, ctx, *, max_new_tokens=4, max_tokens=40):
    await generate(episode.prompt_ids, FOUR)
    if first(episode):
        execs()
    return told()


@step(**OF)
async def terminal_fails(episode, generate, ctx, *, max_new_tokens=4, max_tokens=40):
    await generate(episode.prompt_ids, FOUR)
    if first(episode):
        in_terminal()
    return told()


@step(**OF)
async def task_fails(episode, generate, ctx, *, max_new_tokens=4, max_tokens=40):
    await generate(episode.prompt_ids, FOUR)
    if first(episode):
        await asyncio.gather(nested(), asyncio.sleep(0.05))
    return told()


@step(**OF)
async def thread_fails(episode, generate, ctx, *, max_new_tokens=4, max_tokens=40):
    await generate(episode.prompt_ids, FOUR)
    if first(episode):
        await asyncio.to_thread(execs)
    return told()


@step(**OF)
async def exits(episode, generate, ctx, *, max_new_tokens=4, max_tokens=40):
    await generate(episode.prompt_ids, FOUR)
    if first(episode):
        leaves()
    return told()


@step(**OF)
async def waits(episode, generate, ctx, *, max_new_tokens=4, max_tokens=40):
    await generate(episode.prompt_ids, FOUR)
    loop, later = asyncio.get_running_loop(), asyncio.get_running_loop().create_future()
    loop.call_later(0.02, later.set_result, None)
    if first(episode):
        forked()
    await later
    return told()


@step(**OF)
async def asks_again(episode, generate, ctx, *, max_new_tokens=4, max_tokens=40):
    if first(episode):
        forked()
    await generate(episode.prompt_ids, FOUR)
    return told()


@step(**OF)
async def calls_back(episode, generate, ctx, *, max_new_tokens=4, max_tokens=40):
    await generate(episode.prompt_ids, FOUR)
    if first(episode):
        asyncio.get_running_loop().call_later(0.01, forked)
        await asyncio.sleep(0.05)
    return told()


@step(**OF)
def plain_fails(episode, generate, ctx, *, max_new_tokens=4, max_tokens=40):
    generate(episode.prompt_ids, FOUR)
    if first(episode):
        execs()
    return told()


@step(**OF)
def plain_asks(episode, generate, ctx, *, max_new_tokens=4, max_tokens=40):
    if first(episode):
        forked()
    generate(episode.prompt_ids, FOUR)
    return told()


@step(**OF)
def plain_tool(episode, generate, ctx, *, max_new_tokens=4, max_tokens=40):
    generate(episode.prompt_ids, FOUR)
    if first(episode):
        ctx.once("fork", lambda: bool(forked()))
    return told()


@asynccontextmanager
async def opening(ctx):
    execs()
    yield
    came()


@step(**OF, setup=opening)
async def setup_fails(episode, generate, ctx, *, max_new_tokens=4, max_tokens=40):
    await generate(episode.prompt_ids, FOUR)
    return told()


@step(role="score", reads=[], writes=["reward"])
def scored(batch, ctx):
    execs()
    came()
    return batch.with_columns(reward=batch.dense("reward"))


def reward(sample):
    execs()
    came()
    return 1.0


async def awaited_reward(sample):
    later = asyncio.get_running_loop().create_future()
    asyncio.get_running_loop().call_later(0.01, later.set_result, None)
    forked()
    await later
    came()
    return 1.0


@step(**OF)
async def stops(episode, generate, ctx, *, max_new_tokens=4, max_tokens=40):
    await generate(episode.prompt_ids, FOUR)
    if episode.sample == 1:
        asyncio.get_running_loop().stop()
    return told()


@step(**OF)
async def stops_in_task(episode, generate, ctx, *, max_new_tokens=4, max_tokens=40):
    async def stop():
        asyncio.get_running_loop().stop()

    await generate(episode.prompt_ids, FOUR)
    if episode.sample == 1:
        await asyncio.gather(stop(), asyncio.sleep(0.05))
    return told()


@step(**OF)
async def ends_executor(episode, generate, ctx, *, max_new_tokens=4, max_tokens=40):
    await generate(episode.prompt_ids, FOUR)
    if episode.sample == 1:
        await asyncio.get_running_loop().shutdown_default_executor()
    await asyncio.to_thread(came)
    return {"rewards/told": 1}


@step(**OF)
async def stops_later(episode, generate, ctx, *, max_new_tokens=4, max_tokens=40):
    loop = asyncio.get_running_loop()
    if episode.sample == 1:
        loop.call_soon(loop.stop)
        thread = threading.Thread(target=loop.call_soon_threadsafe, args=[loop.stop])
        thread.start()
    await generate(episode.prompt_ids, FOUR)
    return told()
"""
SAYS = "came back from it into distflow"
LEFT_OUT = {"on_error": "leave_out", "max_error_rate": 1.0}


def came(folder: Path) -> list[int]:
    return [int(line) for line in (folder / "asking.py.came").read_text().split()]


def code_of(pid: int) -> int:
    """The exit code of a copy, which ends soon."""
    until = time.monotonic() + 10.0
    while True:
        found, status = os.waitpid(pid, os.WNOHANG)
        if found:
            return os.waitstatus_to_exitcode(status)
        assert time.monotonic() < until, "the copy goes on"
        time.sleep(0.005)


def copies(folder: Path) -> list[int]:
    pids: list[int] = resolve(f"{folder}/asking.py:COPIES")
    return [code_of(pid) for pid in pids]


@pytest.mark.parametrize(
    "name, code, says",
    [
        ("exec_fails", 1, "no-such-sandbox"),
        ("terminal_fails", 1, ""),
        ("task_fails", 1, "in nested"),
        ("thread_fails", 1, "no-such-sandbox"),
        ("exits", 7, ""),
        ("waits", 0, SAYS),
        ("asks_again", 0, SAYS),
        ("calls_back", 0, SAYS),
        ("plain_fails", 1, "no-such-sandbox"),
        ("plain_asks", 0, SAYS),
        ("plain_tool", 0, SAYS),
        ("setup_fails", 1, "in opening"),
    ],
)
def test_a_copy_ends_where_it_comes_back_and_the_worker_goes_on(
    tmp_path: Path, name: str, code: int, says: str, capfd: pytest.CaptureFixture[str]
) -> None:
    loop = EpisodeLoop(SETTLE_S)
    samples = trajectories(tmp_path, name, 3, loop=loop, source=SOURCE, turn_timeout_s=10.0)
    until_done(samples, engine(), [5])
    assert copies(tmp_path) == [code]
    loop.close()
    assert samples.batch([5]).dense("rewards/told").tolist() == [1.0] * 3
    assert set(came(tmp_path)) == {os.getpid()}
    assert says in capfd.readouterr().err


def test_a_copy_tells_the_worker_nothing_where_episodes_have_a_process(tmp_path: Path) -> None:
    names = ["exec_fails", "plain_tool"]
    (tmp_path / "asking.py").write_text(SOURCE)
    apart = Steps(tmp_path / "asking.py", {key: {} for key in names})
    for name in names:
        samples = apart.samples(name, apart.process)
        until_done(samples, engine(), [5])
        assert samples.batch([5]).dense("rewards/told").tolist() == [1.0] * 3
    apart.process.close()
    assert len(apart.started) == 1
    assert len(set(came(tmp_path))) == 1
    assert "no-such-sandbox" in apart.output.read_text()


@pytest.mark.parametrize("kind, code", [("reward", 1), ("awaited_reward", 0)])
def test_a_reward_function_that_forks(tmp_path: Path, kind: str, code: int, capfd: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "asking.py").write_text(SOURCE)
    sample = Completion("", "", {}, "stop", ())
    verdicts = judge_together(reward_function(f"{tmp_path}/asking.py:{kind}"), [sample] * 2)
    assert [verdict.values["reward"] for verdict in verdicts] == [1.0] * 2
    assert copies(tmp_path) == [code] * 2
    assert set(came(tmp_path)) == {os.getpid()}
    assert SAYS in capfd.readouterr().err


def test_another_step_that_forks(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "asking.py").write_text(SOURCE)
    plan = StepPlan("scored", f"{tmp_path}/asking.py:scored", "score", "sample", None, {}, (), ("reward",), ())
    runner = StepRunner("trainer/0", [plan], {"scored": StepContext("scored")})
    runner.call("scored", Batch({"reward": torch.zeros(2)}))
    assert copies(tmp_path) == [1]
    assert set(came(tmp_path)) == {os.getpid()}
    assert "in scored" in capfd.readouterr().err


def test_a_loss_that_forks(capfd: pytest.CaptureFixture[str]) -> None:
    made, pids = objective("ppo", "none"), list[int]()

    def loss(terms: TokenTerms, **settings: float) -> TokenLoss:
        pids.append(os.fork())
        if pids[-1] == 0:
            raise OSError("no such program")
        return made.loss(terms, **settings)

    replace(made, loss=loss).evaluate(TokenTerms(**draw(1, 0.5).terms))
    assert [code_of(pid) for pid in pids] == [1]
    assert "no such program" in capfd.readouterr().err


@pytest.mark.parametrize(
    "name, says", [("stops", "stop()"), ("stops_in_task", "stop()"), ("ends_executor", "shutdown_default")]
)
def test_what_would_end_the_loop_of_all_is_an_error_of_one(
    tmp_path: Path, name: str, says: str, caplog: pytest.LogCaptureFixture
) -> None:
    loop = EpisodeLoop(SETTLE_S)
    samples = trajectories(tmp_path, name, 3, loop=loop, source=SOURCE, **LEFT_OUT)
    until_done(samples, engine(), [5])
    loop.close()
    first, failed, third = samples.batch([5]).texts("left_out")
    assert (first, third) == ("", "")
    assert failed.startswith(f"RuntimeError: loop.{says}")
    (told,) = [record.getMessage() for record in caplog.records if "raised RuntimeError" in record.getMessage()]
    assert f"step 'sample' ({tmp_path}/asking.py:{name}) raised RuntimeError on rollout/0" in told
    line = told.split(", line ")[-1].split(",")[0]
    assert f"loop().{says}" in SOURCE.splitlines()[int(line) - 1]
    assert f"at {tmp_path}/asking.py:{line}, attempt 1 of 1" in told


def test_what_would_end_it_from_elsewhere_ends_nothing(tmp_path: Path) -> None:
    loop = EpisodeLoop(SETTLE_S)
    samples = trajectories(tmp_path, "stops_later", 3, loop=loop, source=SOURCE, turn_timeout_s=10.0)
    until_done(samples, engine(), [5])
    assert samples.batch([5]).dense("rewards/told").tolist() == [1.0] * 3
    loop.close()
