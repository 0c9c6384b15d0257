"""Which split of the devices of a site costs least for each token that is trained on.

A site has slots at prices; a split takes the cheapest that its pools may run on, and leaves the others. Other pools
take theirs as well. By the schedule model

    cost of a token = Σ prices · T / (3600 · n · L̄)        T seconds a step of n samples of mean length L̄

and `MOST` splits of each site that are cheapest by it, corrected by what the simulations nearby came to, are simulated.
Every device is taken to be of the kind that the latency model is of, and a site to be used alone. A split counts only
if `fits` says that a launch on just these slots would place it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import NamedTuple

from distflow.flow.gpus import width
from distflow.flow.plan import Plan
from distflow.sim.splits import Candidate, PoolSplit, SplitRule, Trials

MOST = 3
"""Splits of each site that are simulated."""
CHECKED = 12
"""Splits of each site of which it is asked whether they fit."""
SIZES = 64
"""Numbers of devices of a site that are looked at."""
MILLION = 1e6
HOUR_S = 3600.0


class PaidSlot(NamedTuple):
    """A worker slot of a host."""

    host: str
    number: int
    price: float
    """For an hour."""


@dataclass(frozen=True, slots=True)
class SiteOffer:
    """The slots of a site, as the hosts file has them."""

    name: str
    slots: tuple[PaidSlot, ...]


@dataclass(frozen=True, slots=True)
class PoolNeed:
    """What a pool takes of a site."""

    workers: int
    each: int
    """Slots of a worker."""
    together: int
    """As many of them have to be side by side on one host."""
    patterns: tuple[str, ...] = ()
    """Names of the hosts that it may run on; empty: all."""

    def may_use(self, host: str) -> bool:
        """Whether it may run there."""
        return not self.patterns or any(fnmatchcase(host, pattern) for pattern in self.patterns)


@dataclass(frozen=True, slots=True)
class CostedSplit:
    """A split on a site, simulated."""

    site: SiteOffer
    candidate: Candidate
    slots: tuple[PaidSlot, ...]
    """Those that the run takes."""
    words: tuple[str, ...]
    """Overrides that make it the layout's."""
    per_million: float
    """Price of a million response tokens that are trained on."""

    @property
    def hourly(self) -> float:
        """Price of its slots for an hour."""
        return sum(slot.price for slot in self.slots)

    @property
    def include(self) -> str:
        """What to give `--include`, so that the run takes these slots and no others."""
        parts = []
        for host in dict.fromkeys(slot.host for slot in self.site.slots):
            taken = sorted(slot.number for slot in self.slots if slot.host == host)
            if len(taken) == sum(slot.host == host for slot in self.site.slots):
                parts.append(host)
            elif taken:
                parts.append(f"{host}:{','.join(map(str, taken))}")
        return "@".join(parts)


Fits = Callable[[Sequence[str], str], bool]
"""Whether a run with these overrides would be placed with this `--include`."""


@dataclass(frozen=True, slots=True)
class CostSearch:
    """What was found."""

    sites: Sequence[CostedSplit]
    """The cheapest split of each site that has room for one, the cheapest site first."""
    left_out: Mapping[str, str]
    """Why others have none, by site."""


def pool_needs(plan: Plan, rule: SplitRule, hosts: Sequence[str]) -> dict[str, PoolNeed]:
    """What each pool takes of the hosts of these names; pins by number become names."""
    each = {rule.generating_pool: rule.engine, rule.training_pool: rule.trainer}
    found = {}
    for pool in plan.pools:
        wide = max(1, *(width(worker) for worker in plan.workers if worker.name.pool == pool.name))
        pins = plan.recipe.layout.pools[pool.name].hosts
        patterns = tuple(hosts[pin] if isinstance(pin, int) and pin < len(hosts) else str(pin) for pin in pins)
        found[pool.name] = PoolNeed(pool.count, each.get(pool.name, wide), wide, patterns)
    return found


def slots_of_others(needs: Mapping[str, PoolNeed], rule: SplitRule) -> int:
    """What the pools that are not divided take of the hosts."""
    kept = needs.keys() - {rule.generating_pool, rule.training_pool}
    return sum(needs[name].workers * needs[name].each for name in kept)


def cheapest(trials: Trials, offers: Sequence[SiteOffer], pools: Mapping[str, PoolNeed], fits: Fits) -> CostSearch:
    """The cheapest split of each site. `pools`: all of the run, of which the split has two."""
    sites = [_Site(trials, offer, pools, fits) for offer in offers]
    found = {site.offer.name: site.cheapest() for site in sites}
    costed = sorted((one for one in found.values() if one), key=lambda one: (one.per_million, one.site.name))
    return CostSearch(costed, {site.offer.name: site.lacks() for site in sites if found[site.offer.name] is None})


class _Site:
    def __init__(self, trials: Trials, offer: SiteOffer, pools: Mapping[str, PoolNeed], fits: Fits) -> None:
        self._trials, self.offer, self._pools, self._fits = trials, offer, pools, fits
        self._slots: dict[PoolSplit, tuple[PaidSlot, ...]] = {}
        """What each split that has room takes."""
        self._checked: dict[PoolSplit, bool] = {}
        for split in _all_splits(trials.rule, len(offer.slots)):
            if (slots := self._take(split)) is not None:
                self._slots[split] = slots
                if split not in trials.known:
                    trials.known[split] = trials.modelled(split, trials.here)

    def cheapest(self) -> CostedSplit | None:
        known, simulated = self._trials.known, 0
        while (best := self._best(list(self._slots))) is not None:
            if best.prediction is not None or simulated == MOST:
                break
            self._trials.simulate(best.split)
            simulated += 1
        best = self._best([split for split in self._slots if known[split].prediction is not None])
        if best is None or best.prediction is None:
            return None
        slots = self._slots[best.split]
        paid = MILLION * sum(slot.price for slot in slots) / (HOUR_S * best.prediction.tokens_s)
        return CostedSplit(self.offer, best, slots, self._words(best.split), paid)

    def lacks(self) -> str:
        """Why there is no split."""
        hosts = {slot.host for slot in self.offer.slots}
        for name, pool in self._pools.items():
            if not any(map(pool.may_use, hosts)):
                return f"{name} may run on {', '.join(pool.patterns)} only"
        return "has no room for the workers of a split"

    def _best(self, splits: Sequence[PoolSplit]) -> Candidate | None:
        """The cheapest of these that fits."""
        known = self._trials.known
        for one in sorted((known[split] for split in splits if not known[split].refused), key=self._cost):
            if one.split not in self._checked:
                if len(self._checked) == CHECKED:
                    return None
                costed = CostedSplit(self.offer, one, self._slots[one.split], self._words(one.split), 0.0)
                self._checked[one.split] = self._fits(costed.words, costed.include)
            if self._checked[one.split]:
                return one
        return None

    def _cost(self, one: Candidate) -> tuple[float, PoolSplit]:
        """Up to a factor that all splits share."""
        return sum(slot.price for slot in self._slots[one.split]) * self._trials.estimate(one), one.split

    def _words(self, split: PoolSplit) -> tuple[str, ...]:
        """With the pins of pools whose hosts are not all taken, which a launch would miss otherwise."""
        hosts, words = {slot.host for slot in self._slots[split]}, [*self._trials.rule.words(split)]
        for name, pool in self._pools.items():
            there = [pattern for pattern in pool.patterns if any(fnmatchcase(host, pattern) for host in hosts)]
            if len(there) < len(pool.patterns):
                words.append(f"layout.pools.{name}.hosts=[{', '.join(there)}]")
        return tuple(words)

    def _take(self, split: PoolSplit) -> tuple[PaidSlot, ...] | None:
        """The cheapest slots for all pools, those first that have least choice; None: there are too few."""
        rule = self._trials.rule
        counts = {rule.generating_pool: split.rollouts, rule.training_pool: split.trainers}
        pools = [replace(pool, workers=counts.get(name, pool.workers)) for name, pool in self._pools.items()]
        free, taken = sorted(self.offer.slots, key=lambda slot: slot.price), list[PaidSlot]()
        room = {pool: sum(pool.may_use(slot.host) for slot in free) for pool in pools}
        for pool in sorted(pools, key=lambda pool: (room[pool], -pool.together)):
            own = _cheapest_slots(pool, free)
            if own is None:
                return None
            taken += own
            kept = set(own)
            free = [slot for slot in free if slot not in kept]
        return tuple(taken)


def _cheapest_slots(pool: PoolNeed, free: Sequence[PaidSlot]) -> list[PaidSlot] | None:
    """Those that the workers of a pool take of the free ones, which are in order of their prices."""
    there = [slot for slot in free if pool.may_use(slot.host)]
    wanted = pool.workers * pool.each
    if pool.together > 1:
        by_host: dict[str, list[PaidSlot]] = {}
        for slot in there:
            by_host.setdefault(slot.host, []).append(slot)
        there = [slot for slots in by_host.values() for slot in _side_by_side(slots, pool.together)]
    return there[:wanted] if len(there) >= wanted else None


def _side_by_side(slots: Sequence[PaidSlot], count: int) -> list[PaidSlot]:
    """The slots of a host, as far as they can be had in rows of `count`."""
    row, found = list[PaidSlot](), list[PaidSlot]()
    for slot in sorted(slots, key=lambda slot: slot.number):
        row = [*row, slot] if row and slot.number == row[-1].number + 1 else [slot]
        if len(row) == count:
            found += row
            row = []
    return found


def _all_splits(rule: SplitRule, devices: int) -> list[PoolSplit]:
    """All that so many devices have room for; of large sites, those of some totals."""
    totals = range(devices, 0, -max(1, devices // SIZES))
    return sorted({split for total in totals for split in replace(rule, devices=total).splits()})
