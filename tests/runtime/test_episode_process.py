"""Episodes in a process of their own make the same samples, and what they do there ends nobody else."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from distflow.data.batch import Batch, Column, Ragged
from distflow.errors import StepError, UserError
from distflow.runtime.episode_loop import SETTLE_S, EpisodeLoop, SetupFailed
from distflow.runtime.episode_process import EpisodeProcess
from distflow.types import RequestKey, SampleRequest
from tests.runtime.episode_children import Steps
from tests.runtime.test_awaiting import SOURCE, until_done
from tests.runtime.test_trajectories import engine, lease

MORE = """
import os
import signal
import subprocess
import sys


@step(**ENVIRONMENT)
async def measuring(episode, generate, ctx, *, max_new_tokens=4, max_tokens=40):
    found = await generate(episode.prompt_ids, FOUR)
    ctx.metrics.mean("mine/length", len(found.response_ids))
    ctx.metrics.add("mine/samples", 1)
    answer = await ctx.once("one", lambda sample: {"sample": sample}, episode.sample)
    return {"rewards/told": answer["sample"]}


@step(**ENVIRONMENT)
async def failing(episode, generate, ctx, *, max_new_tokens=4, max_tokens=40, on_error="leave_out", max_error_rate=1.0):
    await generate(episode.prompt_ids, FOUR)
    if episode.sample == 1:
        raise ConnectionError("sandbox away")
    return {"rewards/told": 1}


@step(**ENVIRONMENT)
async def wordy(episode, generate, ctx, *, max_new_tokens=4, max_tokens=40):
    prefix = episode.prompt_ids
    while True:
        prefix = (*prefix, *(await generate(prefix, FOUR)).response_ids)


@step(**ENVIRONMENT)
async def keeping(episode, generate, ctx, *, max_new_tokens=4, max_tokens=40):
    await generate(episode.prompt_ids, FOUR)
    ctx.state["had"] = 1


@step(**ENVIRONMENT)
async def dying(episode, generate, ctx, *, max_new_tokens=4, max_tokens=40, folder=""):
    found = await generate(episode.prompt_ids, FOUR)
    died = sorted(os.listdir(folder))
    if episode.sample == 1 and len(died) < 2:
        open(f"{folder}/{len(died)}", "w").close()
        print("x" * 10_000_000, flush=True)
        subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)", folder], start_new_session=True)
        os._exit(3) if died else os.kill(os.getpid(), signal.SIGSEGV)
    second = await generate((*episode.prompt_ids, *found.response_ids, 7), FOUR)
    return {"rewards/told": len(died)}


@step(**ENVIRONMENT)
def doomed(episode, generate, ctx, *, max_new_tokens=4, max_tokens=40, folder="", on_error="stop"):
    os._exit(4)


@step(**ENVIRONMENT)
async def waiting(episode, generate, ctx, *, max_new_tokens=4, max_tokens=40):
    await asyncio.sleep(600)


@step(**ENVIRONMENT)
async def computing(episode, generate, ctx, *, max_new_tokens=4, max_tokens=40):
    found = await generate(episode.prompt_ids, FOUR)
    until = time.monotonic() + 2.0
    while time.monotonic() < until:
        sum(range(1000))
    return {"rewards/told": 1}
"""
STEPS = dict[str, dict[str, object]].fromkeys(
    [
        "tool",
        "plain",
        "branches",
        "forked",
        "at_once",
        "careful",
        "measuring",
        "failing",
        "wordy",
        "keeping",
        "waiting",
    ],
    {},
) | {"asking": {"says": [10, 11, 12]}, "computing": {}}
ALIKE = ["tool", "plain", "branches", "forked", "at_once", "careful", "asking", "measuring", "failing", "wordy"]
Found = tuple[Batch, list[SampleRequest], dict[str, float]]


@pytest.fixture(scope="module")
def apart(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Steps]:
    file = tmp_path_factory.mktemp("apart") / "asking.py"
    file.write_text(SOURCE + MORE)
    made = Steps(file, {**STEPS, "failing": {"on_error": "leave_out", "max_error_rate": 1.0}})
    yield made
    # An episode waits, and would for ten minutes.
    samples, asked = made.samples("waiting", made.process), engine()
    samples.submit(asked, samples.begin([lease(5)]))
    began = time.monotonic()
    made.process.close()
    assert time.monotonic() - began < 8.0
    assert made.started[0].ended
    assert len(made.started) == 1


def made_by(apart: Steps, name: str, loop: EpisodeLoop | EpisodeProcess) -> Found:
    samples, made = apart.samples(name, loop), engine(slots=64, max_tokens=160)
    asked = until_done(samples, made, [5])
    measured = {key: value for key, value in apart.metrics.drain().items() if not key.startswith("timing_s")}
    return samples.batch([5]), asked, measured


@pytest.mark.parametrize("name", ALIKE)
def test_samples_are_the_same_wherever_their_episodes_run(apart: Steps, name: str) -> None:
    """Tokens, log-probs, masks, what was asked for, and what steps have measured."""
    here = EpisodeLoop(SETTLE_S)
    batch, asked, measured = made_by(apart, name, here)
    here.close()
    other, asked_there, measured_there = made_by(apart, name, apart.process)
    # In which order they come back is up to the clock, on a busy machine.
    assert sorted(asked_there, key=by_key) == sorted(asked, key=by_key)
    assert measured_there == measured
    assert {name: plain(column) for name, column in batch.columns.items()} == {
        name: plain(column) for name, column in other.columns.items()
    }


def by_key(request: SampleRequest) -> RequestKey:
    return request.key


def plain(column: Column) -> list[str]:
    rows = column.rows() if isinstance(column, Ragged) else column
    return [repr(row.tolist()) for row in rows]


def test_what_is_measured_is_the_worker_s(apart: Steps) -> None:
    _, _, measured = made_by(apart, "measuring", apart.process)
    assert (measured["mine/length"], measured["mine/length.weight"], measured["mine/samples"]) == (4.0, 3.0, 3.0)


def test_one_that_fails_says_where(apart: Steps, caplog: pytest.LogCaptureFixture) -> None:
    batch, _, _ = made_by(apart, "failing", apart.process)
    assert batch.texts("left_out") == ["", "ConnectionError: sandbox away", ""]
    (told,) = [record.getMessage() for record in caplog.records if "sandbox away" in record.getMessage()]
    assert 'raise ConnectionError("sandbox away")' in told
    assert "step 'failing'" in told


def test_what_the_worker_has_is_not_there(apart: Steps) -> None:
    with pytest.raises(UserError, match="ctx.state: the episodes of step 'keeping' run in a process of their own"):
        made_by(apart, "keeping", apart.process)


def test_the_engine_goes_on_while_one_computes(apart: Steps) -> None:
    """In steps of some milliseconds, though a coroutine holds up the loop of the episodes for two seconds."""
    samples, made = apart.samples("computing", apart.process, 1), engine()
    samples.submit(made, samples.begin([lease(5)]))
    while samples.asks:
        samples.submit(made, samples.take(made.poll())[0])
    began, longest, turns = time.monotonic(), 0.0, 0
    while samples.left:
        before = time.monotonic()
        samples.submit(made, samples.take(made.poll())[0])
        longest, turns = max(longest, time.monotonic() - before), turns + 1
        time.sleep(0.001)
    assert time.monotonic() - began >= 1.0
    assert turns > 50
    assert longest < 0.5


def test_its_end_is_a_failure_of_its_episodes_and_another_one_goes_on(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """It has printed 10 MB and left a program behind in another session: nothing of it is left."""
    (tmp_path / "died").mkdir()
    (tmp_path / "asking.py").write_text(SOURCE + MORE)
    about = {"folder": str(tmp_path / "died")}
    apart = Steps(tmp_path / "asking.py", {"dying": about, "doomed": {**about, "on_error": "stop"}})
    batch, _, _ = made_by(apart, "dying", apart.process)
    assert batch.dense("rewards/told").tolist() == [2.0] * 3
    assert batch.texts("left_out") == [""] * 3
    assert len(apart.started) == 3
    assert "lost the process of its episodes, which ended by signal 11" in caplog.text
    assert apart.output.stat().st_size < 2 << 20
    programs = [one.info["cmdline"] or () for one in psutil.process_iter(["cmdline"])]
    assert not any(str(tmp_path / "died") in command for command in programs)
    with pytest.raises(StepError, match="lost the process of its episodes, which ended with exit code 4"):
        made_by(apart, "doomed", apart.process)
    apart.process.close()
    assert all(process.ended for process in apart.started)


def test_steps_that_cannot_be_imported_there_end_the_run(tmp_path: Path) -> None:
    """A variable of the environment may be another one there."""
    (tmp_path / "asking.py").write_text(SOURCE + MORE + "\nassert os.getpid() == int(os.environ['ASKING'])\n")
    os.environ["ASKING"] = str(os.getpid())
    apart = Steps(tmp_path / "asking.py", {"tool": {}})
    with pytest.raises(SetupFailed, match="could not begin"):
        made_by(apart, "tool", apart.process)
    apart.process.close()
