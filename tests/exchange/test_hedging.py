"""What is copied is what a look at all open groups would choose, in runs on bad networks."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import pytest

from distflow.exchange.entry import Entry
from distflow.exchange.hedging import CopyCandidates
from distflow.exchange.holder_table import Peer, Peers, PendingGrant
from distflow.exchange.owner import OwnerCore
from distflow.sim.scenario import Crash
from tests.exchange.test_lease_properties import doom, long_tail
from tests.search import lease_network
from tests.search.lease_faults import check
from tests.search.lease_network import FaultyNetwork
from tests.search.lease_scenario import SMALL, FaultScenario, Pause

BUDGET_S = 3.0
SEEDS_AT_LEAST = 10


class Checked(CopyCandidates):
    """Compares every choice with that of a full look, which is simple and slow."""

    def __init__(self, owner: OwnerCore) -> None:
        super().__init__(owner.settings)
        self.owner, self.choices = owner, 0
        self.looked_at, self.slow_s = -1.0, 0.0
        self.unheard: set[str] = set()

    def heard(self, peer: Peer, entry_of: Callable[[int], Entry | None]) -> None:
        super().heard(peer, entry_of)
        self.unheard.discard(peer.name)

    def look(self, peers: Peers, entry_of: Callable[[int], Entry | None], now: float) -> None:
        limits = self._settings
        self.looked_at = now
        self.unheard = {peer.name for peer in peers if peer.silent(now - limits.silence_s)}
        self.slow_s = float("inf") if self.usual_s is None else max(limits.hedge_s, 2 * self.usual_s)
        super().look(peers, entry_of, now)

    def stranded(self, peers: Peers) -> list[PendingGrant]:
        found = [entry for entry in self.by_age() if self.live(entry) == 0]
        return self.compared(found, peers.parked, lambda: super(Checked, self).stranded(peers))

    def slow(self, peers: Peers) -> list[PendingGrant]:
        found = [entry for entry in self.by_age() if self.live(entry) == 1 and self.takes_long(entry)]
        return self.compared(found, peers.idle, lambda: super(Checked, self).slow(peers))

    def by_age(self) -> list[Entry]:
        if self.looked_at < 0 or not self._settings.hedging:
            return []
        ledgers = self.owner.ledgers
        entries = (entry for ledger in ledgers for entry in ledger.entries.values() if entry.state == "open")
        return sorted(entries, key=lambda entry: (entry.leased_at, entry.lease.position))

    def live(self, entry: Entry) -> int:
        return len(entry.holders.keys() - self.unheard)

    def takes_long(self, entry: Entry) -> bool:
        limits, (holder,) = self._settings, entry.holders.keys() - self.unheard
        age = self.looked_at - entry.leased_at
        if entry.started:
            return holder not in self._keeps_up and age >= self.slow_s
        runs = self._runs.get(holder, -1) >= entry.lease.min_version
        return age >= (limits.hedge_s + limits.report_s if runs else self.slow_s)

    def compared(
        self, entries: Iterable[Entry], peers: Iterable[Peer], choose: Callable[[], list[PendingGrant]]
    ) -> list[PendingGrant]:
        shares = [PendingGrant(peer, peer.room(self._settings.message_bytes)) for peer in peers]
        for entry in entries:
            takers = [share for share in shares if not share.full and share.peer.name not in entry.holders]
            if takers:
                min(takers, key=lambda share: len(share.entries)).add(entry)
        expected = [share for share in shares if share.entries]
        chosen = choose()
        assert [plain(share) for share in chosen] == [plain(share) for share in expected]
        self.choices += len(chosen)
        return chosen


def plain(share: PendingGrant) -> tuple[str, list[int]]:
    return share.peer.name, [entry.lease.position for entry in share.entries]


@pytest.fixture
def checked(monkeypatch: pytest.MonkeyPatch) -> list[Checked]:
    made: list[Checked] = []

    class Owner(OwnerCore):
        def __init__(self, *arguments: Any, **named: Any) -> None:
            super().__init__(*arguments, **named)
            self._copies = Checked(self)
            made.append(self._copies)

    monkeypatch.setattr(lease_network, "OwnerCore", Owner)
    return made


def scenario(seed: int) -> FaultScenario:
    """Slow workers, silent ones, and ones that die without a word."""
    rng = random.Random(seed)
    workers, b, ledgers = rng.randint(2, 6), rng.randint(1, 3), rng.choice([4, 8])
    limits = replace(
        SMALL,
        ledgers=ledgers,
        groups_per_ledger=b,
        max_staleness=rng.choice([0, 1, 2, None]),
        training_steps=rng.randint(2, 5),
        max_refills=10**6,
        hedging=True,
        silence_s=rng.choice([1.5, 5.0]),
        partial_rollouts=rng.random() < 0.5,
        memory_bytes=rng.choice([1, 100]) * 400 * b * ledgers,
        message_bytes=rng.choice([1, 400, 1 << 20]),
    )
    return FaultScenario(
        limits,
        owners=rng.randint(1, 2),
        workers=workers,
        slots=4 * rng.randint(1, 6),
        seconds=long_tail(seed, head_of_line=rng.random() < 0.3),
        slowness=lambda number: 20.0 if number == workers - 1 and seed % 3 == 0 else 1.0,
        dropped=doom(rng.choice([0.0, 0.3]), seed),
        crashes=[Crash(rng.randrange(workers), rng.uniform(0.0, 20.0), 5.0, noticed=rng.random() < 0.5)],
        pauses=[Pause(rng.randrange(workers), rng.uniform(0.0, 20.0), rng.uniform(2.0, 30.0)) for _ in range(2)],
        loss=rng.choice([0.0, 0.2]),
        duplicates=rng.choice([0.0, 0.3]),
        delay_s=rng.choice([0.01, 2.0]),
        seed=seed,
    )


def test_copies_are_what_a_look_at_all_open_groups_would_choose(checked: list[Checked]) -> None:
    began, seed = time.perf_counter(), 0
    while seed < SEEDS_AT_LEAST or time.perf_counter() - began < BUDGET_S:
        one = scenario(seed)
        check(one, FaultyNetwork(one).run())
        seed += 1
    assert sum(copies.choices for copies in checked) > seed


@pytest.mark.long
def test_copies_are_what_a_look_at_all_open_groups_would_choose_for_many_seeds(checked: list[Checked]) -> None:
    for seed in range(500):
        one = scenario(seed)
        check(one, FaultyNetwork(one).run())
