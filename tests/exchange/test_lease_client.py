from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest

from distflow.errors import ProtocolError, UserError
from distflow.exchange.lease_client import HolderCore
from distflow.exchange.lease_settings import LeaseSettings
from distflow.exchange.messages import (
    Ack,
    Again,
    Ask,
    Bye,
    Cancel,
    Closed,
    Finished,
    Grant,
    HandBack,
    Lease,
    Outgoing,
    Progress,
    Result,
    Running,
)
from distflow.exchange.owner_links import Home
from distflow.types import FinishReason, SampleOutput, Span, Version
from tests.search.lease_scenario import SMALL, prompt_at

HOME = "trainer/0"


def new_holder(
    owners: int = 1, settings: LeaseSettings = SMALL, home: int = 0, near: frozenset[str] = frozenset()
) -> HolderCore:
    names = [f"trainer/{r}" for r in range(owners)]
    return HolderCore("rollout/0", 2, names, settings, home=Home(home, near), seed=5)


def lease(position: int, attempt: int = 1, term: int = 0) -> Lease:
    p = prompt_at(position)
    return Lease(p.uid, position % 4, position // 4, attempt, 0, p.prompt_ids, p.prompt_text, p.task, 0, term)


def grant(*positions: int, number: int = 1, ask: int = 1, owner: str = HOME, term: int = 0, step: int = 0) -> Grant:
    return Grant(owner, term, 2, number, ask, tuple(lease(p, term=term) for p in positions), step)


def asks(out: Sequence[Outgoing]) -> list[tuple[str, int, int, bool]]:
    return [
        (item.to, item.message.ask, item.message.groups, item.message.park)
        for item in out
        if isinstance(item.message, Ask)
    ]


def holding(*positions: int) -> HolderCore:
    holder = new_holder()
    holder.want(100, 0.0)
    holder.handle(grant(*positions), 0.0)
    assert [item.position for item in holder.take_granted()] == list(positions)
    return holder


@pytest.mark.parametrize("free, groups", [(16, 5), (15, 4), (0, 1), (-3, 0), (-4, 0), (-8, 0)])
def test_an_ask_is_for_the_free_room_and_one_group_ahead(free: int, groups: int) -> None:
    out = new_holder().want(free, 0.0)
    assert asks(out) == ([(HOME, 1, groups, True)] if groups else [])


def test_one_ask_is_in_flight_at_a_time() -> None:
    holder = new_holder()
    assert len(holder.want(16, 0.0)) == 1
    assert holder.want(16, 0.0) == []
    assert holder.asking() is not None
    holder.handle(grant(0, 1), 0.1)
    assert holder.asking() is None
    assert asks(holder.want(16, 0.1)) == [(HOME, 2, 3, True)], "leases not taken yet count as queued"


def test_the_report_says_what_is_held_and_the_last_grant_seen() -> None:
    holder = holding(0, 5)
    holder.finished(5, Version(0, 0), 10, "", 0.0)
    (item,) = holder.want(0, 0.0)
    assert isinstance(item.message, Ask)
    report = item.message.report
    assert (report.worker, report.incarnation, report.held, report.grant_seen) == ("rollout/0", 2, (0, 5), 1)


def test_an_ask_nobody_needs_any_more_is_taken_back() -> None:
    holder = new_holder()
    holder.want(0, 0.0)
    holder.handle(grant(0, 1, 2, ask=77), 0.1)
    holder.want(-8, 0.2)
    assert asks(holder.tick(1.0)) == [(HOME, 1, 0, False)]
    assert holder.asking() is None


def test_a_result_is_sent_until_it_is_acknowledged() -> None:
    holder = holding(0)
    (first,) = holder.finished(0, Version(0, 0), 99, "", 0.0)
    assert isinstance(first.message, Result)
    assert (first.to, first.message.nbytes, first.message.attempt) == (HOME, 99, 1)
    assert [t for t in range(40) if first in holder.tick(float(t))] == [1, 3, 7, 15, 31]
    assert holder.take_acked() == []
    assert holder.held() == [0]
    assert holder.unfinished() == []
    holder.handle(Ack(HOME, 0, 2, (0,)), 40.0)
    assert holder.take_acked() == [0]
    assert holder.take_acked() == []
    assert holder.held() == []
    assert first not in holder.tick(100.0)


def test_results_go_to_the_owner_of_their_ledger() -> None:
    holder = new_holder(owners=3)
    holder.handle(grant(6, owner="trainer/2", ask=0), 0.0)
    holder.take_granted()
    assert [item.to for item in holder.finished(6, Version(0, 0), 1, "", 0.0)] == ["trainer/2"]
    with pytest.raises(ProtocolError, match="trainer/1 granted position 7, which is for trainer/0 to lease"):
        holder.handle(grant(7, owner="trainer/1", ask=0), 0.0)


def test_messages_for_another_incarnation_or_an_older_term_are_disregarded() -> None:
    holder = holding(0)
    holder.finished(0, Version(0, 0), 1, "", 0.0)
    holder.handle(Ack(HOME, 0, 1, (0,)), 0.0)
    assert holder.take_acked() == []
    holder.handle(Finished(HOME, 1), 0.0)
    holder.handle(Closed(HOME, 0, 7), 0.0)
    assert holder.run_finished


def test_a_newer_term_sets_everything_of_the_old_one_free() -> None:
    holder = holding(0, 1)
    holder.finished(1, Version(0, 0), 1, "", 0.0)
    holder.handle(grant(0, term=1), 0.0)
    assert holder.take_cancelled() == [0]
    assert holder.take_acked() == [1]
    assert [item.term for item in holder.take_granted()] == [1]


def test_a_grant_that_came_before_is_reported_at_once_not_done_twice() -> None:
    holder = holding(0)
    out = holder.handle(grant(0), 0.0)
    assert [type(item.message) for item in out] == [Progress]
    assert holder.take_granted() == []
    holder.handle(grant(0, 4, number=2), 0.0)
    assert [item.position for item in holder.take_granted()] == [4], "0 is held already"


def test_a_cancelled_group_is_stopped_or_never_started_or_freed() -> None:
    holder = holding(0, 1)
    holder.handle(grant(4, number=2), 0.0)
    holder.finished(1, Version(0, 0), 1, "", 0.0)
    holder.handle(Cancel(HOME, 0, 2, (0, 1, 4, 8)), 0.0)
    assert holder.take_granted() == []
    assert holder.take_cancelled() == [0]
    assert holder.take_acked() == [1]
    assert holder.held() == []


def test_a_group_that_is_finished_after_its_cancellation_is_freed_and_not_sent() -> None:
    holder = holding(0)
    holder.handle(Cancel(HOME, 0, 2, (0,)), 0.0)
    assert holder.finished(0, Version(0, 0), 1, "", 0.0) == []
    assert holder.take_acked() == [0]


def test_progress_is_reported_every_second_while_something_is_held() -> None:
    holder = holding(0, 4)
    holder.report(0, 17, 3)
    reports = [item.message for t in range(30) for item in holder.tick(t / 10) if isinstance(item.message, Progress)]
    assert [report.running for report in reports] == [(Running(0, 17, 3), Running(4, 0, -1))] * 3
    assert reports[0].report.number < reports[1].report.number
    idle = new_holder()
    assert idle.tick(5.0) == []


def test_closed_needs_every_owner() -> None:
    holder = new_holder(owners=2, settings=replace(SMALL, announce_closed=True))
    assert {item.to for item in holder.tick(0.0)} == {"trainer/0", "trainer/1"}
    holder.handle(Closed("trainer/0", 0, 2), 0.0)
    assert not holder.closed(1)
    holder.handle(Closed("trainer/1", 0, 1), 0.0)
    holder.handle(Closed("trainer/1", 0, 0), 0.0)
    assert holder.closed(1)
    assert not holder.closed(2)
    holder.handle(Finished("trainer/1", 0), 0.0)
    assert holder.closed(2)


def test_the_run_is_over_when_every_owner_says_so() -> None:
    holder = new_holder(owners=2)
    holder.want(0, 0.0)
    assert holder.handle(Finished("trainer/0", 0), 0.0) == [Outgoing("trainer/0", Bye("rollout/0", 2))]
    assert holder.to_ask
    assert asks(holder.want(0, 0.0)) == [("trainer/1", 2, 1, True)], "the ask goes on to those that still have work"
    assert not holder.to_ask
    assert not holder.run_finished
    assert holder.handle(Finished("trainer/1", 0), 0.0) == [Outgoing("trainer/1", Bye("rollout/0", 2))]
    assert holder.run_finished
    assert holder.want(100, 0.0) == []
    assert holder.tick(100.0) == []


def test_an_owner_that_took_leave_wants_nothing_more() -> None:
    """Its Finished may never have come: it tells only those that have asked it for something."""
    holder = new_holder(owners=2)
    holder.want(100, 0.0)
    holder.handle(grant(0, owner="trainer/0"), 0.0)
    holder.owner_left("trainer/0")
    assert not holder.run_finished
    assert holder.held() == []
    holder.owner_left("trainer/1")
    assert holder.run_finished
    assert not holder.to_ask


def test_leaving_says_bye_to_all() -> None:
    assert [item.to for item in new_holder(owners=2).leave()] == ["trainer/0", "trainer/1"]


def test_strangers_and_wrong_kinds_are_refused() -> None:
    holder = new_holder()
    with pytest.raises(ProtocolError, match="holder rollout/0 got Closed from unknown owner 'trainer/9'"):
        holder.handle(Closed("trainer/9", 0, 0), 0.0)
    with pytest.raises(ProtocolError, match="holder rollout/0 got Bye, which only holders send"):
        holder.handle(Bye("rollout/1", 0), 0.0)


def test_more_owners_than_ledgers_are_refused() -> None:
    with pytest.raises(UserError, match=r"5 owners share 4 ledgers: set batch\.ledgers ≥ 5"):
        new_holder(owners=5)


HEDGED = replace(SMALL, hedging=True, partial_rollouts=True)


def sample(position: int, number: int, tokens: int, reason: FinishReason = "abort") -> SampleOutput:
    ids = tuple(range(tokens))
    return SampleOutput(position, number, ids, tuple(map(float, ids)), (Span(0, 3, 0, tokens),), reason)


def pieces(out: Sequence[Outgoing]) -> list[tuple[int, int, int, int, str]]:
    found = [item.message for item in out if isinstance(item.message, Progress | HandBack)]
    return [(p.position, p.sample, p.start, p.end, p.finish_reason) for message in found for p in message.pieces]


def holding_hedged(*positions: int) -> HolderCore:
    holder = new_holder(settings=HEDGED)
    holder.want(100, 0.0)
    holder.handle(grant(*positions), 0.0)
    assert [item.position for item in holder.take_granted()] == list(positions)
    return holder


def test_an_ask_in_flight_says_once_that_the_worker_has_become_idle() -> None:
    holder = new_holder(settings=HEDGED)
    assert [item.message.idle for item in holder.want(4, 0.0)] == [False]
    out = holder.want(8, 0.1, idle=True)
    assert [(item.message.ask, item.message.groups, item.message.idle) for item in out] == [(1, 3, True)]
    assert holder.want(8, 0.2, idle=True) == []
    plain = new_holder()
    assert [item.message.idle for item in plain.want(4, 0.0, idle=True)] == [False]
    assert plain.want(8, 0.1, idle=True) == []


def test_reports_carry_what_is_new_once() -> None:
    holder = holding_hedged(0, 5)
    holder.produced([sample(0, 0, 3), sample(0, 1, 2, "stop"), sample(5, 0, 1), sample(77, 0, 9)])
    assert pieces(holder.tick(1.0)) == [(0, 0, 0, 3, ""), (0, 1, 0, 2, "stop"), (5, 0, 0, 1, "")]
    holder.produced([sample(0, 0, 7), sample(0, 1, 2, "stop"), sample(5, 0, 1)])
    assert pieces(holder.tick(2.0)) == [(0, 0, 3, 7, "")]
    assert pieces(holder.tick(3.0)) == []
    holder.finished(0, Version(0, 3), 10, "", 3.0)
    holder.produced([sample(0, 0, 9)])
    assert pieces(holder.tick(4.0)) == []


def test_what_is_new_is_reported_with_the_next_tick() -> None:
    """Who has lost a worker knows all that it had told of its samples, and not only what was told a report before."""
    holder = holding_hedged(0, 5)
    assert pieces(holder.tick(1.0)) == []
    holder.produced([sample(0, 0, 3)])
    assert pieces(holder.tick(1.25)) == [(0, 0, 0, 3, "")]
    assert holder.tick(1.5) == []
    holder.produced([sample(5, 1, 2, "stop")])
    assert pieces(holder.tick(1.75)) == [(5, 1, 0, 2, "stop")]
    assert holder.tick(2.5) == []
    assert len(holder.tick(2.75)) == 1, "after report_s in any case"


def test_what_tools_have_answered_is_reported_once_and_handed_back() -> None:
    holder = holding_hedged(0, 5)
    told = [SampleOutput(0, n, (), (), (), "stop", call=(2,), digest=7, answer=bytes(100)) for n in range(2)]
    holder.produced([sample(0, 0, 3), told[0]])
    (report,) = [item.message for item in holder.tick(1.0) if isinstance(item.message, Progress)]
    assert [(p.sample, p.call, p.finish_reason, len(p.answer)) for p in report.pieces] == [
        (0, (0,), "", 0),
        (0, (2,), "stop", 100),
    ]
    holder.produced([sample(0, 0, 3), *told])
    (back,) = holder.hand_back(1.5)
    assert pieces([back]) == [(0, 1, 0, 0, "stop")]
    holder.handle(Again(HOME, 0, 2, (0,)), 2.0)
    assert pieces(holder.tick(2.0)) == [(0, 0, 0, 3, ""), (0, 0, 0, 0, "stop"), (0, 1, 0, 0, "stop")]


def test_pieces_are_sent_again_from_the_start_when_the_owner_asks() -> None:
    holder = holding_hedged(0, 5)
    holder.produced([sample(0, 0, 3), sample(5, 0, 1)])
    holder.tick(1.0)
    assert holder.handle(Again(HOME, 0, 2, (0,)), 1.1) == []
    assert pieces(holder.tick(2.0)) == [(0, 0, 0, 3, "")]


def test_a_report_has_a_bounded_number_of_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("distflow.exchange.owner_links.REPORT_TOKENS", 5)
    holder = holding_hedged(0)
    holder.produced([sample(0, 0, 4, "stop"), sample(0, 1, 3, "length")])
    assert pieces(holder.tick(1.0)) == [(0, 0, 0, 4, "stop"), (0, 1, 0, 1, "")]
    assert pieces(holder.tick(2.0)) == [(0, 1, 1, 3, "length")]


def test_nothing_is_kept_or_sent_without_partial_rollouts() -> None:
    holder = holding(0)
    holder.produced([sample(0, 0, 3)])
    assert pieces(holder.tick(1.0)) == []


def test_leases_are_handed_back_until_that_is_acknowledged() -> None:
    holder = holding_hedged(0, 5, 9)
    holder.produced([sample(0, 0, 3)])
    holder.tick(1.0)
    holder.finished(9, Version(0, 3), 10, "", 1.0)
    holder.want(100, 1.0)
    holder.produced([sample(0, 0, 4), sample(5, 1, 2, "stop")])
    ask, back = holder.hand_back(2.0)
    assert (ask.message.groups, back.message.positions) == (0, (0, 5)), "the ask in flight is taken back"
    assert back.message.report.held == (9,)
    assert pieces([back]) == [(0, 0, 3, 4, ""), (5, 1, 0, 2, "stop")]
    assert holder.want(100, 2.0) == []
    assert HandBack not in [type(item.message) for item in holder.tick(2.5)]
    again = [item for item in holder.tick(3.1) if isinstance(item.message, HandBack)]
    assert pieces(again) == pieces([back]), "what is not acknowledged is said again"
    assert not any(isinstance(item.message, Progress) for item in holder.tick(3.2))
    holder.handle(Again(HOME, 0, 2, (0,)), 3.3)
    assert pieces(holder.tick(3.3)) == [(0, 0, 0, 4, ""), (5, 1, 0, 2, "stop")]
    holder.handle(Ack(HOME, 0, 2, (0, 5)), 3.4)
    assert holder.unfinished() == []
    assert holder.held() == [9]
    assert not any(isinstance(item.message, HandBack) for item in holder.tick(9.0))


def test_a_grant_that_comes_too_late_is_handed_back_too() -> None:
    holder = holding_hedged(0)
    holder.hand_back(1.0)
    holder.handle(Ack(HOME, 0, 2, (0,)), 1.1)
    holder.handle(grant(1, number=2), 1.2)
    assert [item.message.positions for item in holder.tick(2.1) if isinstance(item.message, HandBack)] == [(1,)]


def test_a_grant_that_comes_after_the_end_is_not_kept() -> None:
    """It was overtaken by Finished: nobody would ever set it free again."""
    holder = new_holder()
    holder.want(100, 0.0)
    holder.handle(Finished(HOME, 0), 0.0)
    holder.handle(grant(1, 2), 0.1)
    assert holder.take_granted() == []
    assert holder.held() == []


def test_an_ask_that_a_later_term_ended_is_to_be_sent_again() -> None:
    """The worker may be idle: nothing is cancelled, and it perhaps takes no newer weights before it has leases."""
    holder = new_holder()
    holder.want(100, 0.0)
    assert not holder.to_ask
    assert asks(holder.begin_term(1, [HOME], {1: 5}, Version(0, 4), 1.0)) == []
    assert holder.to_ask
    holder.hand_back(1.0)
    assert not holder.to_ask, "it leaves"


def test_leases_that_are_taken_back_before_they_started_are_asked_for_again() -> None:
    holder = new_holder()
    holder.want(100, 0.0)
    holder.handle(grant(0, 1), 0.0)
    assert len(holder.take_granted()) == 2
    assert holder.want(-100, 0.0) == []
    assert not holder.to_ask, "it has no room"
    holder.want(100, 0.0)
    holder.handle(grant(2, number=2, ask=2), 0.0)
    holder.handle(Cancel(HOME, 0, 2, (2,)), 0.0)
    assert (holder.take_granted(), holder.to_ask) == ([], True)
    assert asks(holder.want(100, 0.0)) != []


def test_owners_that_lease_for_an_earlier_step_are_asked_first() -> None:
    """The home owner goes on to step 1: the other one, which nobody else asks, is asked until it does."""
    holder, asked = new_holder(2, replace(SMALL, max_staleness=2)), []
    steps = {0: [0, 0, 1, 1, 2], 1: [0, 0, 1, 1, 2]}
    numbers = {0: 0, 1: 0}
    for position in range(10):
        ((to, ask, _, _),) = asks(holder.want(1000, 0.0))
        owner = int(to.rpartition("/")[2])
        numbers[owner] += 1
        asked.append((owner, steps[owner].pop(0)))
        leased = grant(2 * position + owner, number=numbers[owner], ask=ask, owner=to, step=asked[-1][1])
        holder.handle(leased, 0.0)
        holder.take_granted()
    assert asked == [(0, 0), (0, 0), (0, 1), (1, 0), (1, 0), (1, 1), (1, 1), (0, 1), (0, 2), (1, 2)]


def test_all_owners_lease_for_one_step_without_staleness_so_the_home_is_asked_first() -> None:
    holder = new_holder(3, replace(SMALL, max_staleness=0))
    for step in range(3):
        assert asks(holder.want(1000, 0.0))[0][0] == HOME
        holder.handle(grant(4 * step, number=step + 1, ask=step + 1, step=step), 0.0)
        holder.take_granted()


def test_a_group_that_cannot_be_made_here_is_left_to_others() -> None:
    """The ask is withdrawn, a report lists it no more, and for a while the worker asks for nothing."""
    holder = holding(0, 1)
    holder.want(32, 1.0)
    out = holder.decline([1], 1.0)
    assert asks(out)[0][2] == 0
    assert all(item.message.report.held == (0,) for item in out if isinstance(item.message, Ask | Progress))
    assert any(isinstance(item.message, Progress) for item in out)
    assert holder.held() == [0]
    assert holder.take_cancelled() == [1]
    assert holder.want(32, 1.5) == []
    assert not holder.to_ask
    holder.tick(1.0 + 9 * SMALL.report_s)
    assert asks(holder.want(32, 1.0 + 9 * SMALL.report_s))


def test_what_was_declined_may_come_back() -> None:
    holder = holding(0, 1)
    holder.decline([1], 1.0)
    holder.handle(grant(1, number=2, ask=2), 2.0)
    assert [one.position for one in holder.take_granted()] == [1]
