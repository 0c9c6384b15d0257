from __future__ import annotations

from dataclasses import replace

from distflow.exchange.messages import (
    Lease,
    Outgoing,
    Progress,
    Refuse,
    Running,
)
from distflow.testing.lease_asker import Asker, granted, kinds, leases, new_owner
from distflow.testing.lease_network import SMALL, prompt_at


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


def test_a_lost_worker_gives_its_leases_back_and_gets_nothing_more() -> None:
    owner = new_owner()
    a, b = Asker(owner, "a"), Asker(owner, "b")
    first = granted(a.ask(8))
    b.ask(8)
    out = owner.worker_lost("a", 0, 1.0)
    assert granted(out) == [replace(lease, attempt=2) for lease in first]
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
