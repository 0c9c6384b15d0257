"""An owner that makes its samples of the data: its ledgers advance, end and are saved as those of any other."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from distflow.data.batch import Batch
from distflow.exchange.lease_settings import LeaseSettings
from distflow.exchange.messages import Lease, LeasePrompt
from distflow.exchange.own_samples import OwnSamples, samples_of
from distflow.exchange.owner import OwnerCore
from distflow.types import GivenResponse, Uid

SETTINGS = LeaseSettings(
    ledgers=2,
    groups_per_ledger=2,
    samples_per_prompt=2,
    max_staleness=0,
    training_steps=3,
    memory_bytes=1 << 20,
    group_bytes=lambda tokens: 100,
    max_prompt_tokens=8,
)


def refuse(*message: object) -> None:
    raise AssertionError(f"there is nobody to tell: {message}")


class Owner:
    """Of some ledgers, with the prompts below `read`."""

    def __init__(self, ledgers: Sequence[int] = (0, 1), snapshot: dict[str, object] | None = None) -> None:
        self.read = 1 << 20
        self.made: list[int] = []
        self.core = OwnerCore("trainer/0", SETTINGS, list(ledgers), self._prompt, snapshot=snapshot)
        self.samples = OwnSamples(self.core, refuse, make=self._make)  # type: ignore[arg-type]

    def _prompt(self, position: int) -> LeasePrompt | None:
        return LeasePrompt(Uid(0, position, position), (4, 2), "4=", "{}") if position < self.read else None

    def _make(self, leases: Sequence[Lease]) -> Batch:
        self.made += [lease.position for lease in leases]
        two = (GivenResponse((7, 1), "7", {"label": 1.0}), GivenResponse((8, 8, 1), "88", {"label": 0.0}, trains=False))
        mixed = (replace(two[0], mask=(False, True)), two[1])
        return samples_of(leases, {lease.position: mixed if lease.position == 3 else two for lease in leases})

    def train(self) -> list[int]:
        positions = self.core.consumable()
        self.samples.send(self.core.take(positions, 0.0))
        self.samples.pop(positions)
        assert self.core.step_complete()
        self.samples.send(self.core.advance(self.core.version + 1, 0.0))
        return positions


def test_each_step_has_the_next_groups_of_every_ledger() -> None:
    owner = Owner()
    owner.samples.send(owner.core.prompts_arrived(0.0))
    assert owner.made == [0, 1, 2, 3], "no more than the open step needs"
    assert [owner.train(), owner.train()] == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert owner.train() == [8, 9, 10, 11]
    assert owner.core.finished
    assert owner.core.all_left
    assert owner.made == list(range(12)), "nothing is made behind the end"


def test_what_has_not_been_read_comes_later() -> None:
    owner = Owner()
    owner.read = 3
    owner.samples.send(owner.core.prompts_arrived(0.0))
    assert owner.core.consumable() == [0, 1, 2]
    assert not owner.core.set_complete()
    owner.read = 4
    owner.samples.send(owner.core.prompts_arrived(0.0))
    assert owner.core.consumable() == [0, 1, 2, 3]


def test_one_of_two_owners_goes_on_alone_from_the_snapshots() -> None:
    first, second = Owner([0]), Owner([1])
    for owner in (first, second):
        owner.samples.send(owner.core.prompts_arrived(0.0))
    assert (first.train(), second.train()) == ([0, 2], [1, 3])
    ledgers = [*first.core.snapshot()["ledgers"], *second.core.snapshot()["ledgers"]]  # type: ignore[misc]
    merged = {**first.core.snapshot(), "ledgers": ledgers}
    alone = Owner(snapshot=merged)
    alone.samples.send(alone.core.prompts_arrived(0.0))
    assert alone.train() == [4, 5, 6, 7]


def test_rows_of_a_group() -> None:
    owner = Owner()
    owner.samples.send(owner.core.prompts_arrived(0.0))
    (group,) = owner.samples.pop([2])
    rows = group.rows.batch.slice(group.rows.start, group.rows.stop)
    assert rows.dense("sample").tolist() == [0, 1]
    assert [row.tolist() for row in rows.ragged("response_ids").rows()] == [[7, 1], [8, 8, 1]]
    assert [row.tolist() for row in rows.ragged("response_mask").rows()] == [[True, True], [False] * 3]
    assert rows.dense("label").tolist() == [1.0, 0.0]
    (mixed,) = owner.samples.pop([3])
    rows = mixed.rows.batch.slice(mixed.rows.start, mixed.rows.stop)
    assert [row.tolist() for row in rows.ragged("response_mask").rows()] == [[False, True], [False] * 3]
    assert group.worker == "trainer/0"
