from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
from msgspec import structs

from distflow.exchange.lease_settings import LeaseSettings
from distflow.exchange.messages import (
    Ack,
    Again,
    Cancel,
    HandBack,
    Lease,
    Outgoing,
    Progress,
    Refuse,
    Running,
)
from distflow.exchange.owner import OwnerCore
from distflow.exchange.partials import cut
from distflow.types import BegunSample, SampleOutput, Span
from tests.exchange.lease_asker import Asker, finish_step, granted, kinds, leases, new_owner
from tests.search.lease_scenario import SMALL, prompt_at


def test_leases_come_in_k_order_with_all_that_an_engine_needs() -> None:
    owner = new_owner(replace(SMALL, seed=11))
    asker = Asker(owner)
    first, *rest = granted(asker.ask(3))
    prompt = prompt_at(0)
    assert first == Lease(prompt.uid, 0, 0, 1, 11, prompt.prompt_ids, prompt.prompt_text, prompt.task, 0, 0)
    assert [lease.position for lease in rest] == [1, 2]
    assert leases(asker.ask(100, held=[0, 1, 2], seen=1)) == {"rollout/0": [3, 4, 5, 6, 7]}


def test_a_refused_ask_is_told_so_and_a_parked_one_kept() -> None:
    owner = new_owner()
    a, b = Asker(owner, "a"), Asker(owner, "b")
    a.ask(8)
    assert b.ask(1, park=False) == [Outgoing("b", Refuse("trainer/0", 0, 0, 1, False))]
    assert b.ask(1) == [Outgoing("b", Refuse("trainer/0", 0, 0, 2, True))]
    assert leases(a.finish(3, dropped="no")) == {"b": [8 + 3]}


def test_parked_asks_get_fair_shares_in_one_grant_each() -> None:
    owner = new_owner()
    workers = [Asker(owner, name) for name in "abc"]
    positions = [lease.position for lease in granted(workers[0].ask(8))]
    workers[0].finish(*positions)
    owner.take(owner.consumable(), 0.0)
    for worker, wanted in zip(workers, (1, 9, 9), strict=True):
        assert kinds(worker.ask(wanted, seen=1)) == [Refuse]
    shares = leases(owner.advance(1, 0.0))
    assert {name: len(share) for name, share in shares.items()} == {"a": 1, "b": 4, "c": 3}
    assert sorted(position for share in shares.values() for position in share) == list(range(8, 16))


def test_a_parked_ask_grows_with_the_room_that_results_report() -> None:
    owner = new_owner()
    asker = Asker(owner)
    positions = [lease.position for lease in granted(asker.ask(8))]
    asker.ask(1, held=positions, seen=1)
    for room, position in enumerate(positions, start=2):
        asker.finish(position, wanted=room)
    owner.take(owner.consumable(), 0.0)
    assert len(granted(owner.advance(1, 0.0))) == 8


def test_an_ask_can_be_taken_back() -> None:
    owner = new_owner()
    a, b = Asker(owner, "a"), Asker(owner, "b")
    a.ask(8)
    b.ask(1)
    assert b.ask(0) == []
    assert leases(a.finish(0, dropped="no")) == {}


def test_a_repeated_ask_gets_the_same_grant_again_never_more() -> None:
    owner = new_owner()
    asker = Asker(owner)
    first = asker.ask(3)
    assert asker.ask_again(3) == first
    assert asker.ask_again(5) == first
    assert leases(asker.ask(3, held=[0, 1, 2], seen=1)) == {"rollout/0": [3, 4, 5]}


def test_a_grant_that_nobody_confirms_is_sent_again_until_a_report_names_it() -> None:
    owner = new_owner()
    asker = Asker(owner)
    first = asker.ask(2)
    assert owner.tick(1.0) == []
    assert owner.tick(2.5) == first
    assert owner.tick(3.0) == []
    asker.progress([Running(0, 1, 0), Running(1, 0, -1)], seen=1, now=3.0)
    assert owner.tick(60.0) == []


def test_a_result_confirms_a_grant_too() -> None:
    owner = new_owner()
    asker = Asker(owner)
    first = granted(asker.ask(2))
    asker.finish(0)
    assert granted(owner.tick(10.0)) == first[1:]
    asker.finish(1)
    assert owner.tick(20.0) == []


def test_a_lost_grant_shows_in_the_next_report_and_is_leased_again() -> None:
    owner = new_owner()
    a, b = Asker(owner, "a"), Asker(owner, "b")
    a.ask(2)
    a.ask(2)
    b.ask(4)
    b.ask(1)
    out = a.progress([Running(2, 0, -1), Running(3, 0, -1)], seen=2)
    assert leases(out) == {"b": [0]}
    assert granted(out)[0].attempt == 2
    assert leases(b.ask(1, held=[0, 4, 5, 6, 7], seen=2)) == {"b": [1]}


def test_a_stale_report_neither_gives_nor_takes() -> None:
    owner = new_owner()
    a, b = Asker(owner, "a"), Asker(owner, "b")
    a.ask(8)
    stale_holding = Progress(a.report(range(8), 1), tuple(Running(p, 5, 0) for p in range(8)))
    a.progress([Running(p, 5, 0) for p in range(1, 8)], seen=1)
    assert owner.handle(stale_holding, 0.0) == []
    assert leases(b.ask(1)) == {"b": [0]}


def test_a_lease_given_up_for_lost_is_adopted_when_it_turns_up() -> None:
    owner = new_owner()
    a, b = Asker(owner, "a"), Asker(owner, "b")
    a.ask(7)
    a.ask(1)
    a.progress([Running(7, 0, -1)], seen=2)
    a.progress([Running(p, 0, -1) for p in range(8)], seen=2)
    assert leases(b.ask(8)) == {}
    assert [lease.workers for lease in owner.open_leases()] == [("a",)] * 8


def test_an_adopted_lease_is_not_leased_again() -> None:
    """It had been looked at for leasing when another one was leased in its place."""
    owner = new_owner()
    a, b = Asker(owner, "a"), Asker(owner, "b")
    a.ask(8)
    a.progress([Running(p, 0, -1) for p in range(6)], seen=1)
    assert leases(b.ask(1)) == {"b": [6]}
    a.progress([Running(p, 0, -1) for p in (*range(6), 7)], seen=1)
    assert leases(b.ask(1, [6], 1)) == {}
    assert [lease.workers for lease in owner.open_leases()] == [("a",)] * 6 + [("b",), ("a",)]


def test_a_lost_worker_gives_its_leases_back_and_gets_nothing_more() -> None:
    owner = new_owner()
    a, b = Asker(owner, "a"), Asker(owner, "b")
    first = granted(a.ask(8))
    b.ask(8)
    out = owner.worker_lost("a", 0, 1.0)
    assert granted(out) == [structs.replace(lease, attempt=2) for lease in first]
    assert a.ask(1) == []
    assert owner.worker_lost("a", None, 1.0) == []
    assert [holder.name for holder in owner.holders()] == ["b"]
    owner.worker_lost("b", None, 1.0)
    assert leases(Asker(owner, "a", incarnation=1).ask(1)) == {"a": [0]}


def test_a_new_incarnation_says_that_the_old_one_is_lost() -> None:
    owner = new_owner()
    Asker(owner, "a").ask(8)
    assert [lease.attempt for lease in granted(Asker(owner, "a", incarnation=1).ask(8))] == [2] * 8
    assert owner.worker_lost("a", 0, 1.0) == []
    assert Asker(owner, "a", incarnation=0).ask(8) == []


HEDGED = replace(SMALL, hedging=True, hedge_s=1.0, silence_s=5.0, partial_rollouts=True)


def running(asker: Asker, positions: Sequence[int], now: float, seen: int = 1) -> list[Outgoing]:
    return asker.progress([Running(p, 5, 0) for p in positions], seen=seen, now=now)


def after_one_result(settings: LeaseSettings = HEDGED) -> tuple[OwnerCore, Asker, Asker]:
    """a holds all 8 positions, one of which took a second; b has an ask parked that says that it is idle."""
    owner = new_owner(settings)
    a, b = Asker(owner, "a"), Asker(owner, "b")
    a.ask(8)
    owner.handle(a.result(7), 1.0)
    running(a, range(7), 1.0)
    assert kinds(b.ask(1, idle=True)) == [Refuse]
    return owner, a, b


def test_an_idle_worker_gets_a_copy_of_the_longest_started_slow_group_once() -> None:
    owner, a, b = after_one_result()
    assert leases(owner.tick(1.9)) == {}
    out = owner.tick(2.0)
    assert leases(out) == {"b": [0]}
    (lease,) = granted(out)
    assert (lease.copy, lease.attempt, lease.k) == (True, 2, 0)
    assert owner.open_leases()[0].workers == ("a", "b")
    out = b.ask(9, held=[0], seen=1, now=2.1, idle=True)
    assert leases(out) == {"b": [1, 2, 3, 4, 5, 6]}, "0 has its copy"
    assert kinds(a.ask(1, held=range(7), seen=1, now=2.3, idle=True)) == [Refuse]
    assert leases(owner.tick(2.4)) == {}, "nothing is left that a does not hold itself"


def test_the_copy_that_comes_second_is_cancelled() -> None:
    owner, _a, b = after_one_result()
    owner.tick(2.0)
    assert b.finish(0) == [Outgoing("b", Ack("trainer/0", 0, 0, (0,))), Outgoing("a", Cancel("trainer/0", 0, 0, (0,)))]


def test_only_idle_workers_get_copies_of_slow_groups_and_only_with_hedging() -> None:
    others = (replace(HEDGED, hedging=False), True), (replace(HEDGED, copies_slow=False), True)
    for settings, idle in ((HEDGED, False), *others):
        owner = new_owner(settings)
        a, b = Asker(owner, "a"), Asker(owner, "b")
        a.ask(8)
        owner.handle(a.result(7), 1.0)
        running(a, range(7), 1.0)
        b.ask(1, idle=idle)
        assert leases(owner.tick(3.0)) == {}


def test_the_copy_stays_when_the_first_holder_dies_and_the_other_way_round() -> None:
    for lost, left in (("a", "b"), ("b", "a")):
        owner, _a, _b = after_one_result()
        owner.tick(2.0)
        out = owner.worker_lost(lost, 0, 2.5)
        assert owner.open_leases()[0].workers == (left,)
        assert 0 not in [lease.position for lease in granted(out)]


def test_a_copy_that_was_lost_on_the_way_is_sent_again_or_given_up() -> None:
    owner, a, b = after_one_result()
    first = owner.tick(2.0)
    running(a, range(7), 4.5)
    assert granted(owner.tick(4.6)) == granted(first)
    b.progress([], seen=1, now=5.0)
    assert owner.open_leases()[0].workers == ("a",)


def test_groups_of_a_silent_worker_are_copied_to_any_asker() -> None:
    owner = new_owner(HEDGED)
    a, b, c = Asker(owner, "a"), Asker(owner, "b"), Asker(owner, "c")
    a.ask(8)
    running(a, range(8), 1.0)
    assert leases(a.ask(4, held=range(8), seen=1, now=1.0)) == {}
    assert kinds(b.ask(3, now=2.0)) == [Refuse]
    assert leases(owner.tick(5.9)) == {}
    assert leases(owner.tick(6.0)) == {"b": [0, 1, 2]}
    assert leases(c.ask(9, now=6.1)) == {"c": [3, 4, 5, 6, 7]}, "what was silent at the last look"
    # It comes back: its results are as good as any, and its ask is only served when it asks again.
    assert a.finish(0)[0] == Outgoing("a", Ack("trainer/0", 0, 0, (0,)))
    assert [holder.parked for holder in owner.holders()] == [False, False, False]


def test_what_was_produced_goes_with_the_next_lease() -> None:
    owner = new_owner(replace(HEDGED, group_bytes=lambda tokens: 4000, memory_bytes=32_000))
    a, b = Asker(owner, "a"), Asker(owner, "b")
    a.ask(8)
    sample = SampleOutput(0, 1, (7, 8, 9), (-1.0, -2.0, -3.0), (Span(0, 0, 0, 3),), "abort")
    done = SampleOutput(0, 2, (7,), (-1.0,), (Span(0, 0, 0, 1),), "stop")
    a.progress([Running(p, 5, 0) for p in range(8)], seen=1, pieces=[cut(sample, 0, 2), cut(done, 0, 9)])
    a.progress([Running(p, 5, 0) for p in range(8)], seen=1, pieces=[cut(sample, 2, 1)])
    b.ask(1)
    (lease,) = granted(owner.worker_lost("a", 0, 2.0))
    assert lease.begun == (
        BegunSample(1, (7, 8, 9), (-1.0, -2.0, -3.0), (Span(0, 0, 0, 3),)),
        BegunSample(2, (7,), (-1.0,), (Span(0, 0, 0, 1),), "stop"),
    )
    assert owner.open_leases()[0].tokens == 4


def test_a_gap_is_asked_for_again_and_changes_nothing() -> None:
    owner = new_owner(replace(HEDGED, group_bytes=lambda tokens: 4000, memory_bytes=32_000))
    a = Asker(owner, "a")
    a.ask(8)
    sample = SampleOutput(0, 1, (7, 8, 9), (-1.0, -2.0, -3.0), (Span(0, 0, 0, 3),), "abort")
    held = [Running(p, 5, 0) for p in range(8)]
    assert a.progress(held, seen=1, pieces=[cut(sample, 0, 1)]) == []
    assert a.progress(held, seen=1, pieces=[cut(sample, 2, 1)]) == [Outgoing("a", Again("trainer/0", 0, 0, (0,)))]
    assert a.progress(held, seen=1, pieces=[cut(sample, 0, 3)]) == []


@pytest.mark.parametrize("term, version", [(1, 5), (0, 0)])
def test_tokens_that_may_not_be_trained_on_are_not_kept(term: int, version: int) -> None:
    """Of another term, or older than the lease's minimum version."""
    owner = new_owner(replace(HEDGED, group_bytes=lambda tokens: 4000, memory_bytes=32_000))
    a, b = Asker(owner, "a"), Asker(owner, "b")
    finish_step(owner, a)
    a.ask(8, now=1.0)
    sample = SampleOutput(8, 1, (7,), (-1.0,), (Span(term, version, 0, 1),), "abort")
    a.progress([Running(p, 5, 1) for p in range(8, 16)], seen=2, pieces=[cut(sample, 0, 1)])
    b.ask(1)
    assert granted(owner.worker_lost("a", 0, 2.0))[0].begun == ()


def test_no_more_tokens_are_kept_than_the_lease_reserved() -> None:
    owner = new_owner(HEDGED)
    a, b = Asker(owner, "a"), Asker(owner, "b")
    a.ask(8)
    long = SampleOutput(0, 0, (7,) * 20, (-1.0,) * 20, (Span(0, 0, 0, 20),), "abort")
    short = replace(long, sample=1, token_ids=(7,) * 4, logprobs=(-1.0,) * 4, spans=(Span(0, 0, 0, 4),))
    a.progress([Running(p, 5, 0) for p in range(8)], seen=1, pieces=[cut(long, 0, 20), cut(short, 0, 4)])
    b.ask(1)
    assert [sample.sample for sample in granted(owner.worker_lost("a", 0, 2.0))[0].begun] == [1]


def test_what_is_handed_back_is_leased_again_with_its_tokens() -> None:
    owner = new_owner(replace(HEDGED, group_bytes=lambda tokens: 4000, memory_bytes=32_000))
    a, b = Asker(owner, "a"), Asker(owner, "b")
    a.ask(7)
    a.ask(1)
    b.ask(9, now=1.0)
    sample = SampleOutput(0, 1, (7,), (-1.0,), (Span(0, 0, 0, 1),), "abort")
    message = HandBack(a.report([], seen=1), (0, 1), (cut(sample, 0, 1),))
    out = owner.handle(message, 1.0)
    assert out[0] == Outgoing("a", Ack("trainer/0", 0, 0, (0, 1)))
    assert leases(out) == {"b": list(range(7))}, "also what the report does not list"
    assert [lease.begun for lease in granted(out)][:2] == [
        (BegunSample(1, (7,), (-1.0,), (Span(0, 0, 0, 1),)),),
        (),
    ]
    assert owner.handle(message, 2.0) == [Outgoing("a", Ack("trainer/0", 0, 0, (0, 1)))], "it may come twice"
