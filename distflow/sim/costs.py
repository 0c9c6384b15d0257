"""Which split of the devices of a site costs least for each token that is trained on.

A site has devices at prices; a split takes the cheapest of them, and leaves the others. By the schedule model

    cost of a token = Σ prices · T / (3600 · n · L̄)        T seconds a step of n samples of mean length L̄

and `MOST` splits of each site that are cheapest by it, corrected by what the simulations nearby came to, are simulated.
Every device is taken to be of the kind that the latency model is of, and a site to be used alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from distflow.sim.splits import Candidate, PoolSplit, SplitRule, Trials

MOST = 3
"""Splits of each site that are simulated."""
SIZES = 64
"""Numbers of devices of a site that are looked at."""
MILLION = 1e6
HOUR_S = 3600.0


@dataclass(frozen=True, slots=True)
class SiteOffer:
    """The devices of a site."""

    name: str
    hosts: tuple[str, ...]
    prices: tuple[float, ...]
    """Of each for an hour, the lowest first."""


@dataclass(frozen=True, slots=True)
class CostedSplit:
    """A split on a site, simulated."""

    site: SiteOffer
    candidate: Candidate
    devices: int
    hourly: float
    """Price of its devices for an hour."""
    per_million: float
    """Price of a million response tokens that are trained on."""


def cheapest(trials: Trials, offers: Sequence[SiteOffer]) -> list[CostedSplit]:
    """The cheapest split of each site that has devices for one, the cheapest site first."""
    found = [best for offer in offers if (best := _Site(trials, offer).cheapest()) is not None]
    return sorted(found, key=lambda one: (one.per_million, one.site.name))


class _Site:
    def __init__(self, trials: Trials, offer: SiteOffer) -> None:
        self._trials, self._offer = trials, offer
        self._splits = _all_splits(trials.rule, len(offer.prices))
        for split in self._splits:
            if split not in trials.known:
                trials.known[split] = trials.modelled(split, trials.here)

    def cheapest(self) -> CostedSplit | None:
        known = self._trials.known
        for _ in range(MOST):
            best = min(
                (known[split] for split in self._splits if not known[split].refused), key=self._cost, default=None
            )
            if best is None or best.prediction is not None:
                break
            self._trials.simulate(best.split)
        done = [known[split] for split in self._splits if known[split].prediction is not None]
        best = min(done, key=self._cost, default=None)
        if best is None or best.prediction is None:
            return None
        hourly = self._hourly(best.split)
        return CostedSplit(
            self._offer,
            best,
            self._trials.rule.used(best.split),
            hourly,
            MILLION * hourly / (HOUR_S * best.prediction.tokens_s),
        )

    def _hourly(self, split: PoolSplit) -> float:
        return sum(self._offer.prices[: self._trials.rule.used(split)])

    def _cost(self, one: Candidate) -> tuple[float, PoolSplit]:
        """Up to a factor that all splits share."""
        return self._hourly(one.split) * self._trials.estimate(one), one.split


def _all_splits(rule: SplitRule, devices: int) -> list[PoolSplit]:
    """All that so many devices have room for; of large sites, those of some totals."""
    totals = range(devices, 0, -max(1, devices // SIZES))
    return sorted({split for total in totals for split in replace(rule, devices=total).splits()})
