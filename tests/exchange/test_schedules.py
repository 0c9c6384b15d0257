"""Which position is leased next, and to whom: order and place change, what is trained on does not."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from distflow.exchange.ledger import Ledger
from distflow.exchange.messages import LeasePrompt, Running
from distflow.exchange.owner import OwnerCore
from distflow.exchange.tail_split import DecodeLine, DecodeTimes, best_split, completion_s
from distflow.types import Uid
from tests.budget import within
from tests.exchange.lease_asker import Asker, granted, leases
from tests.exchange.test_lease_properties import scenarios
from tests.search.lease_faults import check
from tests.search.lease_network import FaultyNetwork
from tests.search.lease_scenario import SMALL, FaultScenario

PROMPTS = 16
"""In one pass over the data of these tests; the length of a response follows from the first token of its prompt."""
LONGEST = replace(
    SMALL, schedule="longest_first", ledgers=1, groups_per_ledger=PROMPTS, training_steps=6, memory_bytes=10**6
)


def told(position: int) -> LeasePrompt:
    prompt = position % PROMPTS
    return LeasePrompt(Uid(position // PROMPTS, prompt, position), (100 + prompt, 7), "", "{}")


def length(position: int) -> int:
    return 10 * (1 + 7 * position % PROMPTS)


def owner_of(limits: object = LONGEST, **more: object) -> OwnerCore:
    return OwnerCore("trainer/0", limits, range(limits.ledgers), told, **more)


def train(owner: OwnerCore, asker: Asker) -> list[int]:
    """Generate and train one step, one group at a time; returns the positions in the order of their leases."""
    order = []
    for _ in range(owner.settings.ledgers * owner.settings.groups_per_ledger):
        (lease,) = granted(asker.ask(1))
        order.append(lease.position)
        tokens = owner.settings.samples_per_prompt * length(lease.position)
        owner.handle(asker.result(lease.position, version=owner.version, tokens=tokens), 0.0)
    owner.take(owner.consumable(), 0.0)
    owner.advance(owner.version + 1, 0.0)
    return order


# -- the order
def test_prompts_of_a_second_pass_are_leased_longest_first() -> None:
    owner = owner_of()
    asker = Asker(owner)
    assert sorted(train(owner, asker)) == list(range(PROMPTS))
    second = train(owner, asker)
    assert second == sorted(range(PROMPTS, 2 * PROMPTS), key=length, reverse=True)
    ranked = owner.ledgers.order.take_ranked()
    assert ranked.groups == 2 * PROMPTS


def test_without_a_schedule_they_are_leased_in_the_order_of_the_data() -> None:
    owner = owner_of(replace(LONGEST, schedule="fifo"))
    asker = Asker(owner)
    assert train(owner, asker) + train(owner, asker) == list(range(2 * PROMPTS))
    assert owner.ledgers.order is None


def test_the_next_step_waits_for_the_open_one_however_long_its_groups_are() -> None:
    owner = owner_of(replace(LONGEST, max_staleness=1, groups_per_ledger=PROMPTS // 2))
    asker = Asker(owner)
    for _ in range(2):
        train(owner, asker)
    leased = [lease.position for lease in granted(asker.ask(2 * PROMPTS))]
    first, second = range(PROMPTS, PROMPTS + PROMPTS // 2), range(PROMPTS + PROMPTS // 2, 2 * PROMPTS)
    assert set(leased[: PROMPTS // 2]) <= {*first, *second}
    assert leased == sorted(leased, key=lambda position: (position in second, -length(position)))


def test_leases_carry_what_they_would_in_the_order_of_the_data() -> None:
    """k, seed, attempt and minimum version."""
    for staleness in (0, 1, 2):
        limits = replace(LONGEST, max_staleness=staleness, groups_per_ledger=3)
        found = {}
        for schedule in ("fifo", "longest_first"):
            owner = owner_of(replace(limits, schedule=schedule))
            found[schedule] = {lease.position: lease for lease in granted(Asker(owner).ask(100))}
        assert found["fifo"] == found["longest_first"]


def test_what_was_lost_is_leased_before_all_that_is_new() -> None:
    owner = owner_of()
    asker, other = Asker(owner), Asker(owner, "rollout/1")
    train(owner, asker)
    lost = [lease.position for lease in granted(other.ask(2))]
    out = owner.worker_lost("rollout/1", None, 0.0)
    assert not leases(out)
    again = granted(asker.ask(3))
    assert [lease.position for lease in again[:2]] == sorted(lost)
    assert [lease.attempt for lease in again] == [2, 2, 1]


def test_positions_that_wait_for_a_worker_are_no_open_leases() -> None:
    owner = owner_of()
    Asker(owner).ask(3)
    assert len(owner.open_leases()) == 3


def test_memory_is_reserved_in_the_order_of_the_data() -> None:
    """The open step's groups come first: one further group has room, whichever is longer."""
    limits = replace(LONGEST, max_staleness=1, groups_per_ledger=2, memory_bytes=3 * 400, max_prompt_tokens=4)
    owner = owner_of(replace(limits, group_bytes=lambda tokens: 400))
    assert sorted(lease.position for lease in granted(Asker(owner).ask(100))) == [0, 1, 2]


def test_a_checkpoint_begins_again_with_what_was_not_trained() -> None:
    owner = owner_of()
    asker = Asker(owner)
    train(owner, asker)
    for lease in granted(asker.ask(5)):
        owner.handle(asker.result(lease.position, version=1, tokens=40), 0.0)
    kept = owner.snapshot()
    assert kept["ledgers"] == [{"ledger": 0, "frontier": PROMPTS, "dropped": [], "trained": []}]
    again = owner_of(term=1, snapshot=kept)
    leased = [lease.position for lease in granted(Asker(again).ask(100))]
    assert sorted(leased) == list(range(PROMPTS, 2 * PROMPTS))


def test_a_group_begun_in_an_earlier_term_stays_with_its_worker() -> None:
    first = owner_of()
    train(first, Asker(first))
    owner = owner_of(term=1, snapshot=first.snapshot(), begins={1: 1})
    asker = Asker(owner)
    asker.progress([Running(PROMPTS + 9, 40, 1)])
    leased = [lease.position for lease in granted(asker.ask(100, held=[PROMPTS + 9]))]
    assert sorted([*leased, PROMPTS + 9]) == list(range(PROMPTS, 2 * PROMPTS))


def test_positions_are_unfolded_as_far_as_their_prompts_are_read() -> None:
    ledger = Ledger(0, LONGEST, 10**6, lambda position: told(position) if position < 5 else None)
    assert [entry.lease.k for entry in ledger.unfold(0, 0.0)] == [0, 1, 2, 3, 4]
    assert list(ledger.unfold(0, 0.0)) == []
    assert ledger.unread
    entry = ledger.lease_known(3, 0.0)
    assert (entry.state, entry.lease.attempt) == ("open", 1)
    assert ledger.leasable() is None


# -- the tail
class KnownTimes(DecodeTimes):
    """As if progress had told them."""

    def line(self, slots: int) -> DecodeLine:
        return DecodeLine(0.1, 1.0, max(slots, 100))


@pytest.fixture
def known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("distflow.exchange.lease_order.DecodeTimes", KnownTimes)


def skewed(position: int) -> int:
    return 1000 if position % PROMPTS in (3, 11) else 100


def learned(limits: object = LONGEST) -> tuple[OwnerCore, list[Asker]]:
    """An owner that knows the lengths of all prompts, and four workers."""
    owner = owner_of(replace(limits, schedule="skew_aware"))
    askers = [Asker(owner, f"rollout/{number}") for number in range(4)]
    for lease in granted(askers[0].ask(PROMPTS)):
        tokens = owner.settings.samples_per_prompt * skewed(lease.position)
        owner.handle(askers[0].result(lease.position, tokens=tokens), 0.0)
    for asker in askers:
        asker.progress()
    owner.take(owner.consumable(), 0.0)
    return owner, askers


@pytest.mark.usefixtures("known")
def test_the_tail_goes_to_workers_of_its_own() -> None:
    owner, askers = learned()
    for asker in askers:
        asker.ask(PROMPTS)
    given = leases(owner.advance(1, 1.0))
    tail = {position for position in range(PROMPTS, 2 * PROMPTS) if skewed(position) > 100}
    assert owner.ledgers.order.tail_workers == 2
    assert {*given["rollout/0"], *given["rollout/1"]} == tail
    assert sorted(p for positions in given.values() for p in positions) == list(range(PROMPTS, 2 * PROMPTS))


@pytest.mark.usefixtures("known")
def test_a_tail_whose_worker_does_not_ask_goes_to_others_after_a_while() -> None:
    owner, askers = learned()
    for asker in askers[2:]:
        asker.ask(PROMPTS)
    first = leases(owner.advance(1, 1.0))
    tail = {position for position in range(PROMPTS, 2 * PROMPTS) if skewed(position) > 100}
    assert owner.ledgers.order.tail_workers == 2
    assert not tail & {p for positions in first.values() for p in positions}
    assert not leases(askers[2].ask(PROMPTS, first["rollout/2"], 1, now=1.5))
    late = leases(owner.tick(1.0 + owner.settings.report_s))
    everything = [p for out in (first, late) for positions in out.values() for p in positions]
    assert sorted(everything) == list(range(PROMPTS, 2 * PROMPTS))


def test_without_knowledge_of_decode_times_it_is_longest_first() -> None:
    owner, askers = learned()
    owner.advance(1, 1.0)
    order = [lease.position for lease in granted(askers[2].ask(PROMPTS))]
    assert {*order[:2]} == {PROMPTS + 3, PROMPTS + 11}
    assert owner.ledgers.order.tail_workers == 0


@settings(max_examples=60, derandomize=True)
@given(scenarios())
@within(3, examples=60)
def test_a_split_changes_nothing_but_place_whatever_happens(scenario: FaultScenario) -> None:
    if scenario.settings.max_staleness is None:
        return
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("distflow.exchange.lease_order.DecodeTimes", KnownTimes)
        limits = replace(scenario.settings, schedule="skew_aware")
        check(scenario, FaultyNetwork(replace(scenario, settings=limits)).run())


# -- the completion formula
def decoded(lengths: list[int], line: DecodeLine) -> float:
    """Token by token, of each group that has a slot; those with most left come first."""
    seconds, left = 0.0, list(lengths)
    while left := sorted((tokens for tokens in left if tokens > 0), reverse=True):
        seconds += line(min(len(left), line.slots))
        left = [tokens - (place < line.slots) for place, tokens in enumerate(left)]
    return seconds


LENGTHS = st.lists(st.integers(1, 40), min_size=1, max_size=9)
LINES = st.builds(DecodeLine, st.sampled_from([0.01, 0.1, 1.0]), st.sampled_from([0.001, 0.1, 2.0]), st.integers(1, 12))


@given(LENGTHS, LINES)
def test_the_formula_gives_the_time_of_decoding_token_by_token(lengths: list[int], line: DecodeLine) -> None:
    found, exact = completion_s(lengths, line), decoded(lengths, line)
    if len(lengths) <= line.slots:
        assert found == pytest.approx(exact)
    else:  # Whole tokens do not always come out even among the slots.
        assert found - 1e-9 <= exact <= found + 2.0 * line(line.slots)


@given(LENGTHS, LINES, st.integers(2, 5))
def test_no_other_cut_is_done_earlier_than_the_best(lengths: list[int], line: DecodeLine, workers: int) -> None:
    ordered = sorted(lengths, reverse=True)

    def dealt(some: list[int], among: int) -> float:
        return max((completion_s(some[first::among], line) for first in range(among)), default=0.0)

    together = dealt(ordered, workers)
    others = [
        max(dealt(ordered[:cut], tail), dealt(ordered[cut:], workers - tail))
        for tail in range(1, workers)
        for cut in range(1, len(ordered))
    ]
    found = best_split(lengths, workers, line)
    if found is None:
        assert min(others, default=together) >= 0.95 * together - 1e-9
    else:
        assert found.seconds == pytest.approx(min(others))
        assert found.seconds < 0.95 * found.together_s == pytest.approx(0.95 * together)


def test_the_rest_of_several_waves_is_not_given_to_fewer_workers() -> None:
    """Decoding together costs hardly anything, and the long group begins first: alone, its worker would stand idle."""
    lengths = [900.0, *[300.0] * 143]
    assert best_split(lengths, 4, DecodeLine(0.0065, 0.0001, 8)) is None


def test_a_split_pays_where_contexts_are_long() -> None:
    lengths = [16_000.0, 12_000.0, *[1_500.0] * 62]
    found = best_split(lengths, 4, DecodeLine(0.0065, 0.0006, 8))
    assert found is not None
    assert found.groups <= 4
    assert found.seconds < 0.9 * found.together_s


def test_equal_lengths_are_not_split() -> None:
    assert best_split([100.0] * 32, 4, DecodeLine(1.0, 0.1, 64)) is None
    assert best_split([100.0], 4, DecodeLine(1.0, 0.1, 64)) is None


def test_decode_times_are_read_from_progress() -> None:
    """A worker that decodes a token of each of b groups in 0.02 + 0.005 b seconds; its groups end one by one."""
    times, samples = DecodeTimes(samples=4), 4
    rng = random.Random(0)
    now, tokens = 0.0, dict.fromkeys(range(12), 0)
    assert times.line(12) is None
    while tokens:
        times.report("rollout/0", tokens.items(), now)
        steps = rng.randrange(20, 40)
        now += steps * (0.02 + 0.005 * len(tokens))
        tokens = {position: had + samples * steps for position, had in tokens.items()}
        if rng.random() < 0.4:
            times.report("rollout/0", tokens.items(), now)
            tokens.pop(next(iter(tokens)))
    line = times.line(12)
    assert line is not None
    assert line.base_s == pytest.approx(0.02, rel=0.05)
    assert line.group_s == pytest.approx(0.005, rel=0.05)
    times.forget("rollout/0")
    times.report("rollout/0", [(50, 4)], now + 1000.0)
    assert times.line(12) == line


def test_decode_times_that_were_seen_for_one_batch_alone_are_unknown() -> None:
    times = DecodeTimes(samples=1)
    for second in range(100):
        times.report("rollout/0", [(0, 10 * second), (1, 10 * second)], float(second))
    assert times.line(4) is None
