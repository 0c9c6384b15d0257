"""Threads of episodes that go on when these are over: nothing can end them, so they are named, and counted."""

from __future__ import annotations

import logging
import threading
import time
from pathlib import Path

import pytest

from distflow.runtime import episode_loop
from distflow.runtime.attempt import Attempt, Event, LocalAttempt, Raised, Returned
from distflow.runtime.episode_loop import SETTLE_S, THREADS, DaemonThreads, EpisodeLoop
from distflow.types import Episode, Uid
from tests.runtime.test_awaiting import SOURCE, engine, lease, trajectories, until_done

BUSY = {
    "plain": SOURCE.splitlines().index("    time.sleep(sleep_s)") + 1,
    "in_thread": SOURCE.splitlines().index("    await asyncio.to_thread(time.sleep, sleep_s)") + 1,
}


@pytest.fixture(autouse=True)
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(episode_loop, "CLEANUP_S", 0.3)


def lingering(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if "is still busy" in record.getMessage()]


def look_for(samples: object, seconds: float) -> None:
    """As a worker does that waits for leases."""
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        samples.news  # type: ignore[attr-defined]  # noqa: B018
        time.sleep(0.02)


@pytest.mark.parametrize("ended", ["late", "cancelled"])
def test_a_thread_that_outlives_its_episode_is_named_once(
    tmp_path: Path, ended: str, caplog: pytest.LogCaptureFixture
) -> None:
    loop, settings = EpisodeLoop(SETTLE_S), {"on_error": "leave_out", "turn_timeout_s": 0.1}
    samples, made = trajectories(tmp_path, "plain", 3, loop=loop, sleep_s=2.0, **settings), engine()
    with caplog.at_level(logging.WARNING):
        if ended == "late":
            until_done(samples, made, [5])
        else:
            samples.submit(made, samples.begin([lease()]))
            while samples.asks:
                samples.submit(made, samples.take(made.poll())[0])
            samples.forget([5])
        look_for(samples, 1.0)
    loop.close()
    (told,) = lingering(caplog)
    assert f"step 'sample' ({tmp_path}/asking.py:plain) on rollout/0 is still busy at" in told
    assert f"asking.py:{BUSY['plain']} in a thread" in told
    assert "timeout= of requests, subprocess.run, a socket" in told


def test_one_that_a_coroutine_has_left_is_named_where_its_own_code_is(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    text = SOURCE.replace("to_thread(time.sleep, sleep_s)", "to_thread(nap, sleep_s)")
    line = len(text.splitlines()) + 4
    text += "\n\ndef nap(seconds):\n    time.sleep(seconds)\n"
    loop, settings = EpisodeLoop(SETTLE_S), {"on_error": "leave_out", "turn_timeout_s": 0.1}
    samples = trajectories(tmp_path, "in_thread", 2, loop=loop, source=text, sleep_s=1.5, **settings)
    with caplog.at_level(logging.WARNING):
        until_done(samples, engine(), [5])
        look_for(samples, 0.8)
    loop.close()
    (told,) = lingering(caplog)
    assert f"asking.py:{line} in a thread" in told


def test_one_that_ends_soon_is_not_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    loop, settings = EpisodeLoop(SETTLE_S), {"on_error": "leave_out", "turn_timeout_s": 0.1}
    samples = trajectories(tmp_path, "plain", 3, loop=loop, sleep_s=0.3, **settings)
    with caplog.at_level(logging.WARNING):
        until_done(samples, engine(), [5])
        look_for(samples, 0.8)
    loop.close()
    assert lingering(caplog) == []


@pytest.mark.parametrize("busy, told", [(THREADS // 4, 0), (THREADS // 4 + 1, 1)])
def test_more_than_a_quarter_of_them_are_too_many(tmp_path: Path, busy: int, told: int) -> None:
    why = list[str]()
    loop, settings = EpisodeLoop(SETTLE_S, why.append), {"on_error": "leave_out", "turn_timeout_s": 0.1}
    samples = trajectories(tmp_path, "plain", busy, loop=loop, sleep_s=2.0, **settings)
    until_done(samples, engine(slots=64), [5])
    look_for(samples, 1.0)
    loop.close()
    assert len(why) == told
    assert all(f"{busy} of {THREADS} threads of episodes are still busy at {tmp_path}/asking.py:" in one for one in why)


def test_what_waits_for_a_thread_gets_one_as_soon_as_there_may_be_more() -> None:
    most, free = [1], threading.Event()
    threads = DaemonThreads(lambda: most[0])
    threads.submit(free.wait, 10.0)
    waiting = [threads.submit(threading.get_ident) for _ in range(2)]
    most[0] = 4
    last = threads.submit(threading.get_ident)
    assert all(isinstance(future.result(5.0), int) for future in (*waiting, last))
    free.set()
    threads.shutdown()


@pytest.mark.parametrize("closed", [True, False])
def test_an_episode_that_is_over_before_it_has_a_thread_calls_nothing(
    closed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(episode_loop, "THREADS", 1)
    loop, free, ended = EpisodeLoop(SETTLE_S), threading.Event(), threading.Event()
    called, heard = list[object](), list[Event]()

    def hear(attempt: Attempt, event: Event) -> None:
        heard.append(event)
        ended.set()

    loop.threads.submit(free.wait, 10.0)
    attempt = LocalAttempt(Episode(Uid(0, 0, 0), 0, (1,), "", {}), called.append, blocking=True, loop=loop, hear=hear)
    loop.post([attempt.begin, *([attempt.close] if closed else [])], [attempt])
    loop.settle()
    free.set()
    assert ended.wait(10.0)
    loop.close()
    assert len(called) == (not closed)
    assert [type(event) for event in heard] == [Raised if closed else Returned]


def test_a_wait_for_episodes_that_was_woken_for_nothing_does_not_spin(tmp_path: Path) -> None:
    loop = EpisodeLoop(SETTLE_S)
    samples, made = trajectories(tmp_path, "tool", 1, loop=loop, sleep_s=30.0), engine()
    samples.submit(made, samples.begin([lease()]))
    while samples.asks:
        samples.submit(made, samples.take(made.poll())[0])
    samples.on_news()
    worked = time.thread_time()
    assert not samples.wait(0.6)
    assert time.thread_time() - worked < 0.3
    samples.forget([5])
    loop.close()
