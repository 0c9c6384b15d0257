"""Threads of episodes that go on when these are over: nothing can end them, so they are named, and counted."""

from __future__ import annotations

import logging
import time
from pathlib import Path

import pytest

from distflow.runtime import episode_loop
from distflow.runtime.episode_loop import SETTLE_S, THREADS, EpisodeLoop
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
