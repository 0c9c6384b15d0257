"""Which owners a holder asks, in what order, and when it asks again."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

import pytest

from distflow.exchange.lease_client import HolderCore
from distflow.exchange.messages import Outgoing, Refuse
from tests.exchange.test_lease_client import HOME, asks, grant, new_holder
from tests.search.lease_scenario import SMALL


def test_an_unanswered_ask_is_repeated_with_its_number() -> None:
    holder = new_holder()
    holder.want(0, 0.0)
    assert asks(holder.tick(0.9)) == []
    for now in (1.0, 2.0, 3.0, 4.0):
        assert asks(holder.tick(now)) == [(HOME, 1, 1, True)]


def test_a_parked_ask_is_refreshed_ever_more_slowly() -> None:
    holder = new_holder()
    holder.want(0, 0.0)
    holder.handle(Refuse(HOME, 0, 2, 1, True), 0.0)
    times = [t / 10 for t in range(1000) if asks(holder.tick(t / 10))]
    pauses = [b - a for a, b in pairwise(times)]
    assert 0.5 <= times[0] <= 1.6
    assert all(pause <= 24.2 for pause in pauses)
    assert 5 <= len(times) <= 14
    assert pauses[0] < pauses[-1]


def walked(holder: HolderCore, out: Sequence[Outgoing]) -> list[str]:
    """Refuse the ask in `out` everywhere until it is parked; returns the owners it was put to, in order."""
    owners = []
    for _ in range(100):
        owner, number, _, park = asks(out)[-1]
        owners.append(owner)
        out = holder.handle(Refuse(owner, 0, 2, number, park), 0.0)
        if park:
            assert out == []
            return owners
    raise AssertionError("it is never parked")


def test_a_refused_ask_is_put_to_every_owner_once_before_it_is_parked() -> None:
    holder = new_holder(owners=4, home=3)
    assert asks(holder.want(0, 0.0)) == [("trainer/3", 1, 1, False)]
    onward = holder.handle(Refuse("trainer/3", 0, 2, 1, False), 0.0)
    ((second, number, _, park),) = asks(onward)
    assert (second != "trainer/3", number, park) == (True, 2, False)
    assert holder.handle(Refuse("trainer/3", 0, 2, 1, False), 0.0) == [], "an old refusal"
    assert sorted(["trainer/3", *walked(holder, onward)]) == [f"trainer/{r}" for r in range(4)]


@pytest.mark.parametrize(
    ("near", "turn", "first"),
    [({1, 2}, 0, 1), ({1, 2}, 1, 2), ({1, 2}, 4, 1), ({3}, 2, 3), (set(), 6, 2), ({7}, 5, 1)],
)
def test_an_owner_of_its_own_site_is_asked_first(near: set[int], turn: int, first: int) -> None:
    holder = new_holder(owners=4, home=turn, near=frozenset(f"trainer/{number}" for number in near))
    assert asks(holder.want(0, 0.0))[0][0] == f"trainer/{first}"
    two = [f"trainer/{number}" for number in (first, 9)]
    holder.begin_term(1, two[::-1], {}, None, 1.0)
    assert asks(holder.want(0, 2.0))[0][0] == (f"trainer/{first}" if first in near else two[::-1][turn % 2])


def test_a_parked_ask_takes_itself_back_and_goes_round_the_others_again() -> None:
    holder = new_holder(owners=4, home=3)
    *_, last = walked(holder, holder.want(0, 0.0))
    again = holder.tick(25.0)
    back, onward = asks(again)
    assert back == (last, 5, 0, False)
    assert onward[1:] == (5, 1, False)
    assert sorted([last, *walked(holder, again)]) == [f"trainer/{r}" for r in range(4)]


def test_of_a_thousand_owners_a_round_asks_eight() -> None:
    holder = new_holder(owners=1000, settings=replace(SMALL, ledgers=1000), home=7)
    first = walked(holder, holder.want(0, 0.0))
    again = walked(holder, holder.tick(25.0))
    assert first[0] == "trainer/7"
    assert len(set(first)) == len(first) == len(set(again)) == len(again) == 8
    assert set(first) != set(again)


def test_the_more_owners_have_refused_the_longer_an_ask_is_parked() -> None:
    """A round of many asks comes less often."""
    for owners, earliest, latest in ((1, 0.5, 1.5), (2, 1.0, 3.0), (4, 4.0, 12.0), (8, 8.0, 24.0)):
        holder = new_holder(owners=owners, settings=replace(SMALL, ledgers=8))
        walked(holder, holder.want(0, 0.0))
        assert earliest <= next(t / 10 for t in range(1000) if asks(holder.tick(t / 10))) <= latest + 0.1


def test_the_owner_of_a_dropped_group_is_asked_next() -> None:
    """It leases another group in its place, and nobody else knows."""
    holder = new_holder(owners=4)
    holder.handle(grant(2, ask=0, owner="trainer/2"), 0.0)
    holder.take_granted()
    *_, last = walked(holder, holder.want(0, 0.0))
    assert last != "trainer/2"
    holder.finished(2, None, 0, "zero variance", 0.1)
    back, onward = asks(holder.tick(0.2))
    assert back == (last, 5, 0, False)
    assert onward == ("trainer/2", 5, 1, True)


def test_an_owner_that_never_answers_is_left_after_three_times() -> None:
    holder = new_holder(owners=2)
    holder.want(0, 0.0)
    silent = [asks(holder.tick(float(now)))[-1][0] for now in (1, 2, 3)]
    assert silent == ["trainer/0", "trainer/0", "trainer/1"]


def test_walks_spread_over_the_owners() -> None:
    seen: Counter[str] = Counter()
    for seed in range(60):
        holder = HolderCore("rollout/0", 2, [f"trainer/{r}" for r in range(4)], SMALL, seed=seed)
        holder.want(0, 0.0)
        seen[asks(holder.handle(Refuse(HOME, 0, 2, 1, False), 0.0))[0][0]] += 1
    assert min(seen.values()) > 8
    assert len(seen) == 3
