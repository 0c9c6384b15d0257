"""A version enters a site behind a slow link once, whoever waits for whom there; in virtual time."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from distflow.weights.manifest import CHUNK_BYTES
from distflow.weights.swarm.patience import MISSING_S, MOST_PATIENCE_S, RETRY_S, TELL_S, Patience
from tests.weights.slow_site import SlowSite

MBIT = 1e6 / 8
RATES = st.sampled_from([2 * MBIT, 10 * MBIT, 50 * MBIT, 400 * MBIT])
DELAYS = st.sampled_from([0.0, 0.05, 0.2])
STARTS = st.lists(st.floats(0.0, 1.0), min_size=1, max_size=6)


def ideal_s(site: SlowSite) -> float:
    return site.size / site.rate


@given(st.integers(1, 20), RATES, DELAYS, STARTS)
def test_a_version_crosses_a_slow_link_once(chunks: int, rate: float, delay_s: float, starts: list[float]) -> None:
    site = SlowSite(chunks, rate, delay_s, [0.0, *starts])
    site.run(1.5 * ideal_s(site) + 10.0)
    assert not site.waiting
    assert site.size <= site.crossed <= 1.05 * site.size


@given(st.integers(8, 24), DELAYS, st.integers(2, 6), st.floats(0.2, 0.9), st.data())
def test_what_a_killed_reader_was_given_crosses_once_more(
    chunks: int, delay_s: float, readers: int, share: float, data: st.DataObject
) -> None:
    site = SlowSite(chunks, 5 * MBIT, delay_s, [0.0] * readers)
    site.run(share * ideal_s(site))
    lost = data.draw(st.sampled_from(site.readers))
    given = sum(reader == lost.name for reader in site.dealer._sites["far"].given.values())
    site.kill(lost)
    site.run(3 * ideal_s(site) + 10.0)
    assert not site.waiting
    assert site.crossed <= 1.05 * site.size + given * CHUNK_BYTES


@given(st.integers(8, 24), DELAYS, st.integers(2, 4), st.floats(0.2, 0.9), st.data())
def test_nobody_waits_for_ever_for_a_reader_that_stands_still(
    chunks: int, delay_s: float, readers: int, share: float, data: st.DataObject
) -> None:
    site = SlowSite(chunks, 5 * MBIT, delay_s, [0.0] * readers)
    site.run(share * ideal_s(site))
    still = data.draw(st.sampled_from(site.readers))
    still.running = False
    given = sum(reader == still.name for reader in site.dealer._sites["far"].given.values())
    at = site.now
    site.run(at + 2 * ideal_s(site) + 30.0)
    assert not site.waiting
    # What was left crosses, and what that one was given once more: not for each of those that waited for it.
    assert site.crossed <= 1.05 * site.size + given * CHUNK_BYTES
    assert site.now - at <= 2 * ideal_s(site) + 4 * RETRY_S + 2.0


def test_a_pause_makes_a_reader_patient_within_limits() -> None:
    patience = Patience("a", 0, 0.0)
    patience.received(1, 1.5)
    assert patience.wait_s == 6.0
    patience.received(2, 1.6)
    assert patience.wait_s == RETRY_S
    patience.received(3, 100.0)
    assert patience.wait_s == MOST_PATIENCE_S
    assert not patience.stalled(101.0)
    assert patience.stalled(100.0 + RETRY_S + 0.1)


def test_what_is_missing_is_asked_for_soon_and_what_others_were_given_when_nothing_comes() -> None:
    patience = Patience("a", 0, 0.0)
    assert patience.urges(MISSING_S - 0.1) is None
    assert patience.urges(MISSING_S) == "want"
    assert patience.urges(RETRY_S + 0.1) == "again"
    assert patience.urges(RETRY_S + 0.2) is None
    assert patience.urges(2 * RETRY_S + 0.2) == "again", "twice as long from here on"
    assert patience.urges(4 * RETRY_S) is None


def test_who_waits_for_another_reader_waits_as_long_as_that_one_receives_something() -> None:
    waits, receives = Patience("a", 0, 0.0), Patience("b", 7, 0.0)
    for turn in range(1, 51):
        now = turn * 1.5 * TELL_S
        receives.received(7 + turn, now)
        told = receives.tells(now)
        assert told == {"b": 7 + turn}
        waits.heard(told, now)
        assert waits.urges(now) is None
    assert waits.urges(now + RETRY_S + 0.1) == "again"


@pytest.mark.parametrize("count", [2, 5])
def test_readers_that_tell_each_other_of_one_that_is_gone_keep_nobody_waiting(count: int) -> None:
    readers = [Patience(str(number), 0, 0.0) for number in range(count)]
    readers[0].heard({"gone": 5}, 0.1)
    now = 0.1
    for turn in range(100):
        now += TELL_S
        told = [(number, reader.tells(now)) for number, reader in enumerate(readers)]
        news = [(number, counts) for number, counts in told if counts is not None]
        for number, counts in news:
            readers[(number + 1) % count].heard(counts, now)
        assert turn <= 2 * count or not news
    assert all(reader.stalled(now) for reader in readers)
