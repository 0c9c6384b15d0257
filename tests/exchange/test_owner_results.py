from __future__ import annotations

from dataclasses import replace

import pytest
from msgspec import structs

from distflow.errors import ProtocolError, UserError
from distflow.exchange.ledgers import merge_snapshots
from distflow.exchange.messages import (
    Ack,
    Bye,
    Cancel,
    Closed,
    Finished,
    Outgoing,
    Progress,
    Refuse,
    Running,
    merge_acks,
)
from distflow.exchange.owner import OwnerCore
from tests.exchange.lease_asker import Asker, finish_step, kinds, leases, new_owner
from tests.search.lease_scenario import SMALL, prompt_at


def test_a_late_result_of_a_dead_worker_is_welcome_and_the_copy_is_cancelled() -> None:
    owner = new_owner()
    old, new = Asker(owner, "a"), Asker(owner, "a", incarnation=1)
    old.ask(1)
    new.ask(1)
    assert owner.keeps(old.result(0))
    assert old.finish(0) == [
        Outgoing("a", Ack("trainer/0", 0, 0, (0,))),
        Outgoing("a", Cancel("trainer/0", 0, 1, (0,))),
    ]
    assert owner.consumable() == [0]
    assert not owner.keeps(new.result(0))
    assert new.finish(0) == [Outgoing("a", Ack("trainer/0", 0, 1, (0,)))]


def test_a_result_given_back_but_finished_after_all_is_not_leased_again() -> None:
    owner = new_owner()
    a, b = Asker(owner, "a"), Asker(owner, "b")
    a.ask(8)
    owner.worker_lost("a", 0, 0.0)
    a.finish(0, 3)
    assert leases(b.ask(8)) == {"b": [1, 2, 4, 5, 6, 7]}


def test_working_on_something_settled_is_cancelled() -> None:
    owner = new_owner()
    a = Asker(owner, "a")
    a.ask(8)
    a.finish(0)
    out = a.progress([Running(0, 9, 0), Running(1, 9, 0)], seen=1)
    assert out == [Outgoing("a", Cancel("trainer/0", 0, 0, (0,)))]


def test_results_of_another_term_or_of_positions_never_leased_are_cancelled() -> None:
    owner = new_owner()
    a = Asker(owner, "a")
    a.ask(8)
    foreign = structs.replace(a.result(0), term=3)
    assert not owner.keeps(foreign)
    assert owner.handle(foreign, 0.0) == [Outgoing("a", Cancel("trainer/0", 3, 0, (0,)))]
    assert not owner.keeps(a.result(800))
    assert kinds(a.finish(800)) == [Cancel]


def test_messages_that_no_holder_of_ours_can_send_are_refused() -> None:
    owner = OwnerCore("trainer/1", SMALL, [1, 3], prompt_at)
    with pytest.raises(
        ProtocolError, match=r"owner trainer/1 was sent position 6 of ledger 2, but owns the ledgers \[1, 3\]"
    ):
        Asker(owner).finish(6)
    with pytest.raises(ProtocolError, match="owner trainer/1 got Finished, which only owners send"):
        owner.handle(Finished("trainer/0", 0), 0.0)


def test_groups_are_taken_by_k_and_ledger_and_only_once() -> None:
    owner = new_owner()
    asker = Asker(owner)
    asker.ask(8)
    asker.finish(6, 5, 0)
    assert owner.consumable() == [0, 5, 6]
    owner.take([5], 0.0)
    assert owner.consumable() == [0, 6]
    with pytest.raises(AssertionError, match="position 5 is not ready"):
        owner.take([5], 0.0)
    assert not owner.set_complete()
    asker.finish(1, 2, 3, 4, 7)
    assert owner.set_complete()
    assert not owner.step_complete()
    owner.take(owner.consumable(), 0.0)
    assert owner.step_complete()


def test_a_group_started_too_early_is_named() -> None:
    owner = new_owner()
    asker = Asker(owner)
    finish_step(owner, asker)
    asker.ask(8)
    asker.finish(8, version=0)
    expected = r"rollout/0 started position 8 on version 0 \(its lease says ≥ 1\); training step 2 .* allows ≥ 1"
    with pytest.raises(ProtocolError, match=expected):
        owner.take([8], 0.0)


def test_memory_set_free_by_taking_is_leased_at_once() -> None:
    # One ledger, b = 2: prompts of 1, 2, 3, 4 tokens take 100 … 400 bytes; the window is always granted.
    owner = new_owner(replace(SMALL, ledgers=1, max_staleness=1, memory_bytes=800))
    asker = Asker(owner)
    assert leases(asker.ask(9)) == {"rollout/0": [0, 1, 2]}
    assert kinds(asker.ask(9, held=[0, 1, 2], seen=1)) == [Refuse]
    assert leases(owner.handle(asker.result(0, nbytes=100), 0.0)) == {}
    assert leases(owner.handle(asker.result(1, nbytes=200), 0.0)) == {}
    assert leases(owner.take([0, 1], 0.0)) == {"rollout/0": [3]}


def test_a_result_larger_than_promised_does_not_stop_the_run() -> None:
    owner = new_owner(replace(SMALL, ledgers=1, memory_bytes=800))
    asker = Asker(owner)
    asker.ask(2)
    owner.handle(asker.result(0, nbytes=10_000), 0.0)
    asker.finish(1, dropped="no")
    assert leases(asker.ask(1, seen=1)) == {"rollout/0": [2]}


def test_closed_steps_are_announced_once_and_again_on_request() -> None:
    owner = new_owner(replace(SMALL, announce_closed=True))
    asker = Asker(owner)
    asker.ask(8)
    assert Closed not in kinds(asker.finish(*range(7)))
    closed = Outgoing("rollout/0", Closed("trainer/0", 0, 0))
    assert closed in asker.finish(7)
    assert asker.progress() == [closed]
    assert owner.handle(Progress(asker.report(closed=0), ()), 0.0) == []


def test_the_end_is_told_until_everybody_has_said_bye() -> None:
    owner = new_owner(replace(SMALL, training_steps=1))
    a, b = Asker(owner, "a"), Asker(owner, "b")
    b.ask(0)
    out = finish_step(owner, a)
    assert owner.finished
    assert out == [Outgoing("b", Finished("trainer/0", 0)), Outgoing("a", Finished("trainer/0", 0))]
    assert owner.handle(Bye("a", 0), 0.5) == []
    assert owner.tick(0.5) == []
    assert [item.to for item in owner.tick(1.5)] == ["b"]
    assert kinds(Asker(owner, "c").ask(1)) == [Finished]
    assert not owner.all_left
    for worker in "bc":
        owner.handle(Bye(worker, 0), 2.0)
    assert owner.all_left


def test_an_early_end_takes_nothing_more() -> None:
    owner = new_owner()
    asker = Asker(owner)
    asker.ask(8)
    assert kinds(owner.finish(0.0)) == [Finished]
    assert not owner.keeps(asker.result(0))
    assert kinds(asker.ask(1)) == [Finished]


def test_progress_rises_with_tokens_and_results_only() -> None:
    owner = new_owner()
    asker = Asker(owner)
    asker.ask(8)
    assert owner.progress_count == 0
    asker.progress([Running(0, 5, 0)], seen=1)
    asker.progress([Running(0, 5, 0)], seen=1)
    assert owner.progress_count == 1
    asker.ask(2)
    asker.finish(0, 0)
    assert owner.progress_count == 2


def test_open_leases_name_who_blocks() -> None:
    owner = new_owner()
    asker = Asker(owner)
    asker.ask(2, now=3.0)
    asker.progress([Running(0, 5, 0), Running(1, 0, -1)], seen=1)
    first, second = owner.open_leases()
    assert (first.position, first.workers, first.tokens, first.leased_at) == (0, ("rollout/0",), 5, 3.0)
    assert (second.position, second.tokens) == (1, 0)


def test_exhaustion_stops_leasing() -> None:
    owner = new_owner(replace(SMALL, ledgers=1, max_refills=1))
    asker = Asker(owner)
    asker.ask(2)
    asker.finish(0, 1, dropped="zero variance")
    assert "2 groups were dropped (zero variance: 2)" in str(owner.exhausted)
    assert kinds(asker.ask(1)) == [Refuse]


def test_a_snapshot_of_other_arithmetic_is_refused() -> None:
    kept = new_owner().snapshot()
    with pytest.raises(UserError, match="batch_ledgers was 4, the recipe now gives 8: resume with the batch"):
        OwnerCore("trainer/0", replace(SMALL, ledgers=8, memory_bytes=10**6), range(8), prompt_at, snapshot=kept)
    part = OwnerCore("trainer/0", SMALL, [0, 2], prompt_at).snapshot()
    with pytest.raises(UserError, match=r"ledger 1 is missing, has \[0, 2\]"):
        OwnerCore("trainer/0", SMALL, [0, 1], prompt_at, snapshot=part)


def test_snapshots_of_several_owners_merge_into_one() -> None:
    parts = [OwnerCore(f"trainer/{r}", SMALL, range(r, 4, 2), prompt_at).snapshot() for r in range(2)]
    assert merge_snapshots(parts) == new_owner().snapshot()


def test_acks_to_one_worker_become_one_message() -> None:
    owner = new_owner()
    a, b = Asker(owner, "a"), Asker(owner, "b")
    a.ask(4)
    b.ask(4)
    out = a.finish(0, 1) + b.finish(4) + a.finish(2) + b.ask(1)
    assert merge_acks(out) == [
        Outgoing("a", Ack("trainer/0", 0, 0, (0, 1, 2))),
        Outgoing("b", Ack("trainer/0", 0, 0, (4,))),
        out[-1],
    ]
