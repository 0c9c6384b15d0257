"""Whom a worker of many sends its heartbeats: so many a second, each peer in turn, and some before theirs."""

from __future__ import annotations

from math import ceil

import pytest
from hypothesis import given
from hypothesis import strategies as st

from distflow.comm.beat_order import FEW, MOST_ANSWERED, BeatOrder


def names(count: int) -> list[str]:
    return [f"rollout/{number}" for number in range(count)]


@pytest.mark.parametrize("count", [0, 1, FEW])
def test_few_peers_get_every_beat(count: int) -> None:
    order = BeatOrder("me")
    assert all(order.next(names(count), number) == names(count) for number in range(5))


@given(st.integers(FEW + 1, 300), st.integers(0, 5), st.lists(st.booleans(), min_size=60, max_size=60))
def test_of_many_peers_so_many_get_a_beat_and_each_in_turn(count: int, close: int, news: list[bool]) -> None:
    peers = names(count)
    near = set(peers[:close])
    order = BeatOrder("me", near.__contains__)
    last, revision = dict.fromkeys(peers, 0), 0
    for beat, new in enumerate(news, 1):
        revision += new
        chosen = order.next(peers, revision)
        assert len(chosen) == len(set(chosen)) <= FEW + close
        assert near <= set(chosen)
        last |= dict.fromkeys(chosen, beat)
        assert beat - min(last.values()) <= 2 * ceil(count / FEW)


@given(st.integers(FEW + 1, 300), st.data())
def test_news_is_told_at_once_to_those_that_have_sent_something(count: int, data: st.DataObject) -> None:
    peers = names(count)
    order = BeatOrder("me")
    order.next(peers, "old")
    heard = data.draw(st.sets(st.sampled_from(peers), max_size=MOST_ANSWERED))
    for name in heard:
        order.heard(name)
    chosen = order.next(peers, "new")
    assert heard <= set(chosen)
    assert len(chosen) <= FEW + len(heard)


def test_who_has_been_told_the_news_waits_for_its_turn() -> None:
    peers, order = names(40), BeatOrder("me")
    told = order.next(peers, "news")
    for name in told:
        order.heard(name)
    assert not set(order.next(peers, "news")) & set(told)


def test_the_news_comes_to_all_before_anybody_hears_it_again() -> None:
    peers, order = names(48), BeatOrder("me")
    beats = [set(order.next(peers, "news")) for _ in range(3)]
    assert set.union(*beats) == set(peers)


def test_a_peer_that_comes_late_is_next() -> None:
    order = BeatOrder("me")
    for _ in range(9):
        order.next(names(30), "news")
    assert "trainer/0" in order.next([*names(30), "trainer/0"], "news")


def test_workers_do_not_all_send_to_the_same_ones_in_one_beat() -> None:
    count = 64
    everybody = {name: BeatOrder(name) for name in names(count)}
    for _ in range(8):
        got = [to for name, order in everybody.items() for to in order.next([n for n in everybody if n != name], 0)]
        assert max(got.count(name) for name in everybody) <= 3 * FEW
