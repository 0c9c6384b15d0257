"""Groups of a training step dealt to replicas by cost: the hands, the rounds they make, and how replicas get there."""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from distflow.exchange.deal_core import DealCore
from distflow.exchange.dealing import DealRule, Hand, Offer, deal, in_rounds, ranks
from distflow.exchange.group_transfer import GROUPS, KEPT, REPEAT_S, Send
from distflow.parts import CostRule, tokens_of, unshared, whole_lengths
from tests.budget import within
from tests.search.lease_network import FaultyNetwork
from tests.search.lease_scenario import SMALL, FaultScenario

REPLICAS = 8
LONGEST = 16384
COST = CostRule(2 * LONGEST, 1 / LONGEST)


def offers(seed: int, groups: int, samples: int, replicas: int = REPLICAS, median: float = 2000.0) -> dict[int, Offer]:
    """Lognormal lengths, as sampled responses have them."""
    rng = random.Random(seed)
    lengths = [[median * math.exp(rng.gauss(0, 1)) for _ in range(samples)] for _ in range(groups)]
    drawn = [unshared(max(1, min(LONGEST, round(n))) for n in row) for row in lengths]
    return {p: Offer(p % replicas, row) for p, row in enumerate(drawn)}


def rounds(hands: Sequence[Hand], given_: dict[int, Offer], rule: CostRule) -> list[list[list[int]]]:
    """The lengths of the rows of each micro-batch, by round and replica."""
    parts = 1 + max(number for hand in hands for numbers in hand.values() for number in numbers)
    found: list[list[list[int]]] = [[[] for _ in hands] for _ in range(parts)]
    for replica, hand in enumerate(hands):
        for position, numbers in hand.items():
            for tokens, number in zip(whole_lengths(given_[position].lengths), numbers, strict=True):
                found[number][replica].append(tokens)
    return found


def parts_of(hand: Hand) -> int:
    """How many micro-batches a hand has."""
    return len({number for numbers in hand.values() for number in numbers})


@pytest.mark.parametrize("samples", [8, 16])
def test_rounds_of_a_whole_step_take_hardly_longer_than_the_work_in_them(samples: int) -> None:
    """8 replicas, 128 prompts, lengths to 16k: a round lasts as long as its largest micro-batch."""
    for seed in range(5):
        step = offers(seed, 128, samples)
        hands = in_rounds(deal(step, REPLICAS, COST), step, COST)
        work = sum(COST.cost(offer.lengths) for offer in step.values()) / REPLICAS
        assert (
            sum(max(COST.cost(unshared(part)) for part in parts) for parts in rounds(hands, step, COST)) <= 1.05 * work
        )


def test_replicas_that_go_on_to_another_hand_have_as_many_rounds() -> None:
    """Otherwise one would begin the next hand, with its longest rows, beside the shortest of the others."""
    step = offers(1, 24, 8)
    hands = deal(step, REPLICAS, COST)
    uneven, even = (in_rounds(hands, step, COST, even=even) for even in (False, True))
    assert len(set(map(parts_of, uneven))) > 1
    assert set(map(parts_of, even)) == {max(map(parts_of, uneven))}


def test_most_groups_stay_with_their_owners() -> None:
    step = offers(0, 128, 8)
    hands = deal(step, REPLICAS, COST)
    assert sum(step[p].owner != replica for replica, hand in enumerate(hands) for p in hand) < 32
    pinned = deal(step, REPLICAS, COST, pinned=True)
    assert pinned == [[p for p in step if step[p].owner == replica] for replica in range(REPLICAS)]


@settings(max_examples=150, derandomize=True)
@given(
    st.integers(1, 6),
    st.lists(st.lists(st.integers(1, 50), min_size=1, max_size=4), min_size=1, max_size=30),
    st.integers(1, 200),
    st.sampled_from([0.0, 0.1, 5.0]),
)
def test_each_row_is_in_one_micro_batch_that_holds_it(
    replicas: int, lengths: list[list[int]], budget: int, quadratic: float
) -> None:
    rule = CostRule(budget, quadratic)
    step = {p: Offer(p % replicas, unshared(row)) for p, row in enumerate(lengths)}
    hands = deal(step, replicas, rule)
    assert Counter(p for hand in hands for p in hand) == Counter(step.keys())
    assert all(bool(hand) == (replica < len(step)) for replica, hand in enumerate(hands) if len(step) <= replicas)
    assert all(hands[offer.owner] for offer in step.values()), "whoever has a group gets one"
    cut = in_rounds(hands, step, rule, first=3)
    assert [list(hand) for hand in cut] == hands
    for replica, hand in enumerate(cut):
        numbers = {number for found in hand.values() for number in found}
        assert numbers == set(range(3, 3 + len(numbers))), "no round in between without rows"
        for part in rounds([hand], step, rule) if hand else ():
            assert not part[0] or len(part[0]) == 1 or tokens_of(unshared(part[0]), packs=False) <= budget, (
                f"replica {replica}: {part}"
            )


@pytest.mark.parametrize("even", [False, True])
def test_groups_whose_rows_are_compared_stay_whole(even: bool) -> None:
    step, rule = offers(7, groups=50, samples=2), replace(COST, whole_groups=True)
    hands = in_rounds(deal(step, REPLICAS, rule), step, rule, first=2, even=even)
    assert sorted(position for hand in hands for position in hand) == sorted(step)
    assert all(len(numbers) == 2 and len(set(numbers)) == 1 for hand in hands for numbers in hand.values())
    for parts in rounds(hands, step, rule)[2:]:
        for rows in parts:
            assert len(rows) <= 2 or len(rows) * max(rows) <= rule.budget


def test_mini_batches_are_dealt_by_themselves() -> None:
    rule = DealRule(16, 4, CostRule(8), minibatches=2, streamed=False)
    cores = [DealCore(name, ["trainer/0", "trainer/1"], rule) for name in ("trainer/0", "trainer/1")]
    news = [[(p, unshared((1 + p, 1))) for p in range(16) if p % 2 == owner] for owner in range(2)]
    hands = []
    for core in cores:
        core.begin(0)
        assert core.heard(news, 0.0) is not None
        core.handle(GROUPS, "trainer/1", {"step": 0, "number": 1}, range(16))
        hands.append(core.next_hand())
        assert core.ranks == ranks(range(16), 4)
    for part in range(2):
        mine = [[p for p in hand or () if p // 4 % 2 == part] for hand in hands]
        assert sorted([*mine[0], *mine[1]]) == [p for p in range(16) if p // 4 % 2 == part]
        assert abs(sum(2 + p for p in mine[0]) - sum(2 + p for p in mine[1])) <= 4
    first, second = (
        {number for hand in hands for p, found in (hand or {}).items() if p // 4 % 2 == part for number in found}
        for part in range(2)
    )
    assert max(first) < min(second), "no micro-batch has rows of both"


class Two:
    """Two replicas; the second owns a long group, and the first gets the two short ones for it."""

    def __init__(self, **rule: bool) -> None:
        names = ["trainer/0", "trainer/1"]
        self.rule = DealRule(4, 2, CostRule(10), **rule)
        self.cores = [DealCore(name, names, self.rule) for name in names]
        for core in self.cores:
            core.begin(7)

    def hear(self, *news: list[tuple[int, tuple[tuple[int, int], ...]]]) -> list[list[Send]]:
        dealt = [core.heard(news, 0.0) for core in self.cores]
        return [[] if one is None else one.given for one in dealt]


def test_nothing_is_dealt_before_it_is_enough_for_all_or_all_there_is() -> None:
    two = Two()
    assert two.cores[0].has_news({0: ((9, 0),)}, closed=False) is False
    assert two.cores[0].has_news({0: ((10, 0),)}, closed=False)
    assert two.cores[0].news({0: ((10, 0),)}) == [(0, ((10, 0),))]
    assert two.cores[0].news({0: ((10, 0),)}) == []
    assert two.hear([(0, ((10, 0),))], []) == [[], []]
    assert two.cores[0].next_hand() is None
    two.hear([], [(1, ((10, 0),))])
    assert [core.next_hand() for core in two.cores] == [{0: (0,)}, {1: (0,)}]
    two.hear([(2, ((1, 0),))], [])
    assert not two.cores[0].over
    two.hear([], [(3, ((1, 0),))])
    assert [core.next_hand() for core in two.cores] == [{2: (0,)}, {3: (0,)}]
    assert [core.over for core in two.cores] == [True, True]


def test_a_hand_waits_for_the_groups_of_others_which_are_sent_until_they_are_acknowledged() -> None:
    two = Two()
    first, second = two.cores
    (sent,), none = two.hear([(0, ((9, 0),)), (2, ((3, 0),))], [(1, ((1, 0),)), (3, ((1, 0),))])
    assert (sent.to, sent.kind, sent.positions, none) == ("trainer/1", GROUPS, (2,), [])
    assert first.next_hand() == {0: (0,)}
    assert (second.next_hand(), second.waits_for, second.over) == (None, ("trainer/0",), False)
    assert first.tick(REPEAT_S / 2) == []
    assert first.tick(REPEAT_S) == [sent]
    assert second.expects("trainer/0", sent.body)
    (kept,) = second.handle(GROUPS, "trainer/0", sent.body, sent.positions)
    assert not second.expects("trainer/0", sent.body), "its rows would be kept twice"
    assert second.handle(GROUPS, "trainer/0", sent.body, ()) == [kept]
    assert second.next_hand() == {1: (0,), 2: (0,), 3: (0,)}
    assert (kept.kind, kept.to) == (KEPT, "trainer/0")
    first.handle(KEPT, "trainer/1", kept.body, ())
    assert first.tick(9.0) == []


def test_groups_may_come_before_the_news_by_which_they_were_dealt() -> None:
    two = Two()
    news = ([(0, ((9, 0),)), (2, ((3, 0),))], [(1, ((1, 0),)), (3, ((1, 0),))])
    dealt = two.cores[0].heard(news, 0.0)
    assert dealt is not None
    two.cores[1].handle(GROUPS, "trainer/0", dealt.given[0].body, dealt.given[0].positions)
    two.cores[1].heard(news, 0.0)
    assert two.cores[1].next_hand() == {1: (0,), 2: (0,), 3: (0,)}


def test_groups_of_a_step_that_is_over_are_acknowledged_and_not_kept() -> None:
    two = Two()
    (sent,), _ = two.hear([(0, ((9, 0),)), (2, ((3, 0),))], [(1, ((1, 0),)), (3, ((1, 0),))])
    second = two.cores[1]
    second.handle(GROUPS, "trainer/0", sent.body, sent.positions)
    second.next_hand()
    second.begin(8)
    assert not second.expects("trainer/0", sent.body)
    assert [item.kind for item in second.handle(GROUPS, "trainer/0", sent.body, ())] == [KEPT]


@settings(max_examples=60, derandomize=True)
@given(st.integers(0, 2**20), st.sampled_from([0.0, 0.2]), st.integers(2, 4), st.booleans())
@within(3, examples=60)
def test_replicas_that_deal_train_on_everything_once(seed: int, loss: float, owners: int, lazy: bool) -> None:
    limits = replace(SMALL, groups_per_ledger=6, memory_bytes=10**6, max_staleness=1)
    scenario = FaultScenario(
        limits,
        owners=owners,
        workers=2,
        slots=96,
        seconds=lambda position: 3.0 * random.Random(seed + position).random(),
        dealing=True,
        budget=30,
        batch_s=lambda number: 1.0,
        loss=loss,
        duplicates=loss,
        lazy_take=lazy,
        seed=seed,
    )
    record = FaultyNetwork(scenario).run()
    assert [len(record.trained[step]) for step in range(3)] == [24] * 3
    assert record.moved > 0
