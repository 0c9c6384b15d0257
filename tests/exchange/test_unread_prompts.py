"""An owner whose prompts are not all read yet leases what is there, and goes on when it is told of more."""

from __future__ import annotations

from dataclasses import replace

from msgspec import structs

from distflow.exchange.lease_settings import LeaseSettings
from distflow.exchange.ledger import Ledger
from distflow.exchange.messages import Ack, Cancel, Grant, LeasePrompt, Refuse, Running
from distflow.exchange.owner import OwnerCore
from distflow.types import Version
from tests.exchange.lease_asker import Asker, finish_step, granted, kinds, leases
from tests.search.lease_scenario import SMALL, prompt_at

TWO = replace(SMALL, ledgers=2, groups_per_ledger=2, training_steps=4)


class Shelf:
    """Prompts that have been read."""

    def __init__(self, *positions: int) -> None:
        self.read = set(positions)
        self.asked: list[int] = []

    def __call__(self, position: int) -> LeasePrompt | None:
        self.asked.append(position)
        return prompt_at(position) if position in self.read else None


def new_owner(shelf: Shelf, settings: LeaseSettings = TWO, **more: object) -> OwnerCore:
    return OwnerCore("trainer/0", settings, range(settings.ledgers), shelf, **more)


def test_what_has_been_read_is_leased_and_the_rest_when_it_has_come() -> None:
    shelf = Shelf(0, 2)
    owner = new_owner(shelf)
    first, second = Asker(owner), Asker(owner, "rollout/1")
    assert leases(first.ask(10)) == {"rollout/0": [0, 2]}
    (refuse,) = second.ask(10)
    assert isinstance(refuse.message, Refuse)
    assert refuse.message.parked, "it is answered as soon as there is something"
    assert owner.prompts_arrived(1.0) == []
    shelf.read.add(1)
    assert leases(owner.prompts_arrived(2.0)) == {"rollout/1": [1]}
    shelf.read.add(3)
    assert leases(first.ask(10, [0, 2], 1)) == {}, "nobody has said that another one has come"
    assert leases(owner.prompts_arrived(3.0)) == {"rollout/0": [3]}


def test_everything_else_goes_on_meanwhile() -> None:
    shelf = Shelf(0, 1)
    owner = new_owner(shelf)
    worker = Asker(owner)
    assert leases(worker.ask(10)) == {"rollout/0": [0, 1]}
    assert kinds(worker.finish(0)) == [Ack]
    worker.progress([Running(1, 5, 0)], seen=1)
    assert owner.consumable() == [0]
    assert not owner.set_complete()
    assert owner.tick(1.0) == []


def test_the_first_prompts_are_asked_for_before_the_first_ask() -> None:
    shelf = Shelf()
    owner = new_owner(shelf)
    assert owner.prompts_arrived(0.0) == []
    assert set(shelf.asked) == {0, 1}


def test_prompts_beyond_the_gate_are_not_asked_for() -> None:
    shelf = Shelf(*range(100))
    owner = new_owner(shelf)
    Asker(owner).ask(100)
    owner.prompts_arrived(1.0)
    assert max(shelf.asked) == 3
    assert len(shelf.asked) == 4, "each once"


def test_positions_that_a_checkpoint_passes_over_are_not_asked_for() -> None:
    shelf = Shelf()
    ledger = Ledger(0, replace(TWO, ledgers=1), 10_000, shelf)
    ledger.restore(1, 2, [(2, "no"), (3, "no")])
    assert ledger.unread
    assert set(shelf.asked) == {4}
    shelf.read.add(4)
    assert not ledger.unread
    assert ledger.lease(0, 0.0).lease.k == 4


def test_steps_go_on_with_prompts_that_come_late() -> None:
    shelf = Shelf(*range(4))
    owner = new_owner(shelf)
    worker = Asker(owner)
    finish_step(owner, worker)
    assert leases(worker.ask(10)) == {}
    shelf.read.update(range(4, 8))
    assert leases(owner.prompts_arrived(1.0)) == {"rollout/0": [4, 5, 6, 7]}


# -- groups begun before this term

BEGINS = {1: 0}


def test_a_report_of_groups_whose_prompts_are_not_read_is_left_for_its_next() -> None:
    shelf = Shelf(0)
    owner = new_owner(shelf, term=1, begins=BEGINS)
    worker = Asker(owner)
    assert worker.progress([Running(0, 5, 0), Running(2, 5, 0)]) == [], "not cancelled"
    assert owner.holders() == []
    shelf.read.update(range(4))
    owner.prompts_arrived(1.0)
    assert Cancel not in kinds(worker.progress([Running(0, 6, 0), Running(2, 6, 0)], now=2.0))
    assert [lease.workers for lease in owner.open_leases()] == [("rollout/0",), ("rollout/0",)]
    assert [lease.position for lease in granted(Asker(owner, "rollout/1").ask(10))] == [1, 3], "the others are free"


def test_a_finished_group_whose_prompt_is_not_read_is_waited_for() -> None:
    shelf = Shelf(1)
    owner = new_owner(shelf, term=1, begins=BEGINS)
    worker = Asker(owner)
    result = structs.replace(worker.result(0), oldest=Version(0, 0))
    assert worker.progress([Running(0, 5, 0)]) == []
    assert not owner.keeps(result)
    assert owner.handle(result, 0.0) == [], "neither taken nor cancelled: it comes again"
    shelf.read.add(0)
    owner.prompts_arrived(1.0)
    assert owner.keeps(result)
    assert kinds(owner.handle(result, 2.0)) == [Ack]
    assert owner.consumable() == [0]


def test_a_finished_group_beyond_the_gate_is_cancelled_all_the_same() -> None:
    shelf = Shelf(*range(100))
    owner = new_owner(shelf, term=1, begins=BEGINS)
    worker = Asker(owner)
    assert worker.progress([Running(90, 5, 0)], seen=0) != []
    assert kinds(owner.handle(structs.replace(worker.result(90), oldest=Version(0, 0)), 0.0)) == [Cancel]
    assert Grant not in kinds(owner.tick(1.0))
