"""Episodes in a process of their own make the same samples, and what they do there ends nobody else."""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from distflow.data.batch import Batch, Column, Ragged
from distflow.errors import StepError, UserError
from distflow.runtime import episode_loop, episode_process
from distflow.runtime.episode_loop import SETTLE_S, THREADS, EpisodeLoop, Episodes, SetupFailed
from distflow.types import RequestKey, SampleRequest
from tests.runtime.episode_children import Steps
from tests.runtime.test_awaiting import SOURCE, until_done
from tests.runtime.test_trajectories import engine, lease

MORE = """
import os
import signal
import subprocess
import sys
from contextlib import asynccontextmanager

import numpy as np


@step(**ENVIRONMENT)
async def measuring(episode, generate, ctx, *, max_new_tokens=4, max_tokens=40):
    found = await generate(episode.prompt_ids, FOUR)
    ctx.metrics.mean("mine/length", len(found.response_ids))
    ctx.metrics.add(np.str_("mine/samples"), 1)
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
async def replacing(episode, generate, ctx, *, max_new_tokens=4, max_tokens=40):
    await generate(episode.prompt_ids, FOUR)
    ctx.state = {"had": 1}


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


def mistakes(ids, generate):
    return {
        "train=1": lambda: generate(ids, FOUR, train=1),
        "train=None": lambda: generate(ids, FOUR, train=None),
        "aside='no'": lambda: generate(ids, FOUR, aside="no"),
        "aside=0.0": lambda: generate(ids, FOUR, aside=0.0),
        "token ids": lambda: generate((*ids, 1 << 70), FOUR),
        "max_new_tokens=True": lambda: SamplingParams(max_new_tokens=True),
        "temperature=": lambda: SamplingParams(temperature=np.True_),
        "min_new_tokens=False": lambda: SamplingParams(min_new_tokens=False),
        "include_stop_str_in_output=1": lambda: SamplingParams(include_stop_str_in_output=1),
        "stop_token_ids=(True,)": lambda: SamplingParams(stop_token_ids=(True,)),
        "stop_token_ids='12'": lambda: SamplingParams(stop_token_ids="12"),
    }


def told_of(ids, generate):
    told = 0
    for name, call in mistakes(ids, generate).items():
        try:
            call()
        except TypeError as error:
            told += name in str(error)
    return told


@step(**ENVIRONMENT)
async def mistaken(episode, generate, ctx, *, max_new_tokens=4, max_tokens=40):
    told = told_of(episode.prompt_ids, generate)
    await generate(episode.prompt_ids, FOUR)
    return {"rewards/told": told}


@step(**ENVIRONMENT)
def mistaken_in_thread(episode, generate, ctx, *, max_new_tokens=4, max_tokens=40):
    told = told_of(episode.prompt_ids, generate)
    generate(episode.prompt_ids, FOUR)
    return {"rewards/told": told}


@step(**ENVIRONMENT)
async def of_numpy(episode, generate, ctx, *, max_new_tokens=4, max_tokens=40):
    params = SamplingParams(
        temperature=1, top_p=np.float64(0.5), top_k=np.int32(3), max_new_tokens=np.int64(4), min_p=0,
        stop_token_ids=[np.int64(1)], repetition_penalty=np.float32(1.0), stop=[np.str_("@@")],
        include_stop_str_in_output=np.False_,
    )
    ids = np.asarray(episode.prompt_ids)
    first = await generate(ids, params, train=np.False_, aside=np.False_)
    await generate(ids, params, aside=np.True_)
    return {"rewards/told": len(first.response_ids)}


@step(**ENVIRONMENT)
async def cancelling(episode, generate, ctx, *, max_new_tokens=4, max_tokens=40, on_error="leave_out"):
    await generate(episode.prompt_ids, FOUR)
    if episode.sample == 1:
        raise asyncio.CancelledError("by itself")
    return {"rewards/told": 1}


@asynccontextmanager
async def opened(ctx):
    await asyncio.sleep(2.0)
    yield os.getpid()
    open(__file__ + ".left", "w").close()


@step(**ENVIRONMENT, setup=opened)
async def sharing_there(episode, generate, ctx, *, max_new_tokens=4, max_tokens=40):
    await generate(episode.prompt_ids, FOUR)
    return {"rewards/told": ctx.shared == os.getpid()}


DONE = []


@step(**ENVIRONMENT)
async def one_computes(episode, generate, ctx, *, max_new_tokens=4, max_tokens=100):
    while episode.sample == 0 and len(DONE) % 3 < 2:
        await asyncio.sleep(0)
    prefix = episode.prompt_ids
    for _ in range(60 if episode.sample else 1):
        prefix = (*prefix, *(await generate(prefix, SamplingParams(max_new_tokens=1))).response_ids)
    DONE.append(episode.sample)
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
        "replacing",
        "waiting",
        "one_computes",
        "mistaken",
        "mistaken_in_thread",
        "of_numpy",
        "cancelling",
        "blocking",
        "sharing_there",
    ],
    {},
) | {"asking": {"says": [10, 11, 12]}, "computing": {}}
ALIKE = ["tool", "plain", "branches", "forked", "at_once", "careful", "asking", "measuring", "failing", "wordy"]
ALIKE += ["mistaken", "mistaken_in_thread", "of_numpy"]
Found = tuple[Batch, list[SampleRequest], dict[str, float]]


@pytest.fixture(scope="module")
def apart(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Steps]:
    file = tmp_path_factory.mktemp("apart") / "asking.py"
    file.write_text(SOURCE + MORE)
    left_out = {"on_error": "leave_out", "max_error_rate": 1.0}
    patient = {"sharing_there": {"turn_timeout_s": 1.2, "max_attempts": 1}}
    made = Steps(file, {**STEPS, "failing": left_out, "cancelling": left_out, **patient})
    yield made
    # An episode waits, and would for ten minutes.
    samples, asked = made.samples("waiting", made.process), engine()
    samples.submit(asked, samples.begin([lease(5)]))
    began = time.monotonic()
    made.process.close()
    assert time.monotonic() - began < 8.0
    assert made.started[0].ended
    assert len(made.started) == 1
    assert file.with_name("asking.py.left").exists(), "what episodes share was left"


def made_by(apart: Steps, name: str, loop: Episodes) -> Found:
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


@pytest.mark.parametrize("name", ["mistaken", "mistaken_in_thread"])
def test_mistakes_are_named_before_they_leave_the_step(apart: Steps, name: str) -> None:
    batch, _, _ = made_by(apart, name, apart.process)
    assert batch.dense("rewards/told").tolist() == [11.0] * 3


def test_what_episodes_share_is_entered_there_and_takes_none_of_their_time(apart: Steps) -> None:
    batch, _, _ = made_by(apart, "sharing_there", apart.process)
    assert batch.texts("left_out") == [""] * 3
    assert batch.dense("rewards/told").tolist() == [1.0] * 3


def test_a_coroutine_that_blocks_there_is_named(apart: Steps, caplog: pytest.LogCaptureFixture) -> None:
    made_by(apart, "blocking", apart.process)
    line = SOURCE.splitlines().index("    time.sleep(1.2)") + 1
    (told,) = [record.getMessage() for record in caplog.records if "blocks the event loop" in record.getMessage()]
    assert f"asking.py:{line}: all other samples of this worker wait" in told


@pytest.mark.parametrize(
    "name, error, says",
    [("failing", "ConnectionError", "sandbox away"), ("cancelling", "asyncio.CancelledError", "by itself")],
)
def test_one_that_fails_says_where(
    apart: Steps, name: str, error: str, says: str, caplog: pytest.LogCaptureFixture
) -> None:
    batch, _, _ = made_by(apart, name, apart.process)
    assert batch.texts("left_out") == ["", f"{error.removeprefix('asyncio.')}: {says}", ""]
    (told,) = [record.getMessage() for record in caplog.records if says in record.getMessage()]
    assert f'raise {error}("{says}")' in told
    assert f"step '{name}'" in told


@pytest.mark.parametrize("name", ["keeping", "replacing"])
def test_what_the_worker_has_is_not_there(apart: Steps, name: str) -> None:
    with pytest.raises(UserError, match=f"ctx.state: the episodes of step '{name}' run in a process of their own"):
        made_by(apart, name, apart.process)


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


@pytest.mark.parametrize("where", ["thread", "process"])
def test_what_never_comes_to_rest_is_not_waited_for_each_time(apart: Steps, where: str) -> None:
    """A coroutine computes in turns with those that ask for tokens, as long as they do."""
    loop = EpisodeLoop(SETTLE_S) if where == "thread" else apart.process
    samples, made = apart.samples("one_computes", loop), engine()
    samples.submit(made, samples.begin([lease(5)]))
    took = list[float]()
    while samples.left:
        assert samples.asks or samples.wait(10.0)
        outputs, before = made.poll(), time.monotonic()
        further, _ = samples.take(outputs)
        took.append(time.monotonic() - before)
        samples.submit(made, further)
    if where == "thread":
        loop.close()
    assert len(took) >= 60
    assert statistics.median(took) < SETTLE_S / 3


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


def test_steps_that_cannot_be_imported_there_end_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A variable of the environment may be another one there."""
    (tmp_path / "asking.py").write_text(SOURCE + MORE + "\nassert os.getpid() == int(os.environ['ASKING'])\n")
    monkeypatch.setenv("ASKING", str(os.getpid()))
    apart = Steps(tmp_path / "asking.py", {"tool": {}})
    with pytest.raises(SetupFailed, match="could not begin"):
        made_by(apart, "tool", apart.process)
    apart.process.close()


@pytest.mark.parametrize(
    "line, how",
    [("os.kill(os.getpid(), signal.SIGSEGV)", "by signal 11"), ("os._exit(5)", "with exit code 5")],
)
def test_a_process_that_dies_while_it_imports_the_steps_ends_the_run(tmp_path: Path, line: str, how: str) -> None:
    """The second time, and not by the attempts at each sample."""
    (tmp_path / "asking.py").write_text(f"{SOURCE}{MORE}\nif os.getpid() != {os.getpid()}:\n    {line}\n")
    apart = Steps(tmp_path / "asking.py", {"tool": {"max_attempts": 9}})
    with pytest.raises(
        SetupFailed, match=rf"ended {how} before it had imported the steps, 2 times in a row .*episodes"
    ):
        made_by(apart, "tool", apart.process)
    apart.process.close()
    assert len(apart.started) == 2


@pytest.mark.parametrize("met", [True, False])
def test_steps_that_are_not_imported_in_time_end_the_run(
    tmp_path: Path, met: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At once, and not with each post again; until then the wait has a name."""
    monkeypatch.setattr(episode_process, "BOOT_S", 1.0)
    (tmp_path / "asking.py").write_text(SOURCE + MORE)
    apart, waits = Steps(tmp_path / "asking.py", {"tool": {}}), list[str]()

    def watch() -> None:
        until = time.monotonic() + 20.0
        while not waits and time.monotonic() < until:
            waits.extend(wait["name"] for wait in apart.board.waits())
            time.sleep(0.01)

    watching = threading.Thread(target=watch)
    watching.start()
    # A process that imports torch takes longer.
    with pytest.raises(SetupFailed, match=r"had not imported the steps after 1 s .*episodes\.log"):
        apart.process.await_start() if met else made_by(apart, "tool", apart.process)
    watching.join()
    apart.process.close()
    assert waits == ["the process of its episodes"]
    assert len(apart.started) == 1


@pytest.mark.parametrize("busy", [3, THREADS // 4 + 1])
def test_threads_that_are_left_behind_there_end_the_process_at_most(
    tmp_path: Path, busy: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A few are named; too many end the process, and another one goes on."""
    monkeypatch.setattr(episode_loop, "CLEANUP_S", 0.3)
    shorter = "\nfrom distflow.runtime import episode_loop\nepisode_loop.CLEANUP_S = 0.3\n"
    (tmp_path / "asking.py").write_text(SOURCE + MORE + shorter)
    late = {"sleep_s": 600.0, "on_error": "leave_out", "turn_timeout_s": 0.3, "max_error_rate": 1.0}
    apart = Steps(tmp_path / "asking.py", {"plain": late, "tool": {"sleep_s": 0.0}})
    samples = apart.samples("plain", apart.process, busy)
    until_done(samples, engine(slots=64), [5])
    assert samples.batch([5]).texts("left_out") == ["has asked for no tokens for 0.3 s (turn_timeout_s)"] * busy
    expected = "is still busy at" if busy == 3 else f"{busy} of {THREADS} threads of episodes are still busy at"
    until = time.monotonic() + 30.0
    while expected not in caplog.text or (busy > 3 and not apart.started[0].ended):
        assert time.monotonic() < until
        samples.news  # noqa: B018  # as a worker that waits for leases
        time.sleep(0.02)
    batch, _, _ = made_by(apart, "tool", apart.process)
    apart.process.close()
    assert batch.dense("rewards/told").tolist() == [1.0] * 3
    assert len(apart.started) == (1 if busy == 3 else 2)


def test_a_process_whose_worker_reads_nothing_ends(tmp_path: Path) -> None:
    """Instead of holding up its episodes, and the end of the worker, for good."""
    program = (
        "import os, sys\nfrom distflow.runtime import episode_server\nepisode_server.STUCK_S = 0.3\n"
        "_, into = os.pipe()\npipe = episode_server.WorkerPipe(0, into)\n"
        "pipe.tell(episode_server.ProcessUnfit('x' * 1_000_000))\n"
    )
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False)
    assert ended.returncode == 1
    assert "the worker has read nothing for 0.3 s" in ended.stderr
