"""What a training worker waits for from programs outside of the run: told to `status`, and to every waiting worker.

Nothing ends by it: an owner says what holds it up in its facts, with every heartbeat, so that each worker that waits
meanwhile, for leases, rows or the other replicas, names what it really waits for.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

from distflow.exchange.facts import HELD_UP_CHARACTERS, MOST_HELD_UP
from distflow.exchange.owner import OwnerCore
from distflow.exchange.store_channel import SampleStore
from distflow.flow.plan import Plan, StepPlan

TELL_AFTER_S = 1.0
"""Peers hear of what has lasted for so long: a labeller takes a moment in every training step."""


class Hold(NamedTuple):
    """One thing that an owner waits for."""

    on: str
    """By which it is told apart."""
    whom: str
    """For whom, and to do what."""
    cure: str


class Outside:
    """Causes for which an owner may wait for clients. `waits()`: whether its main thread waits for something."""

    def __init__(
        self, core: OwnerCore, store: SampleStore, plan: Plan, steps: Sequence[StepPlan], waits: Callable[[], bool]
    ) -> None:
        self._core = core
        self._store = store
        self._plan = plan
        self._steps = steps
        """Those that clients write."""
        self._waits = waits
        self._since: dict[str, float] = {}
        """Since when each thing has been waited for."""

    def status(self) -> list[dict[str, Any]]:
        """Each thing that it waits for now: `on`, by which it is told apart, and `text`: for whom, and what to do."""
        return [{"on": hold.on, "text": f"{hold.whom}: {hold.cure}"} for hold in self._holds()]

    def lasting(self, now: float) -> list[str]:
        """Tell in words for whom it has waited a while. Call it a few times a second."""
        holds = self._holds()
        self._since = {hold.on: self._since.get(hold.on, now) for hold in holds}
        told = [hold.whom for hold in holds if now - self._since[hold.on] >= TELL_AFTER_S]
        return [whom[:HELD_UP_CHARACTERS] for whom in told[:MOST_HELD_UP]]

    def _holds(self) -> list[Hold]:
        return [*self._held_up(), *self._prompts(), *self._unwritten()] if self._waits() else []

    @property
    def _idle(self) -> bool:
        """Whether nothing is being generated for this owner."""
        return not any(holder.held for holder in self._core.holders())

    def _held_up(self) -> Iterator[Hold]:
        name = self._core.held_up()
        if name and self._idle and not self._core.set_complete():
            limit = f"limits.consumer_mb={self._plan.recipe.limits.consumer_mb} bounds what is kept"
            do = f"{limit}; let a program read them, or close the consumer with Client.forget (docs/service.md)"
            yield Hold(f"consumer {name}", f"consumer {name!r}, which loses nothing, to read samples", do)

    def _prompts(self) -> Iterator[Hold]:
        prompts = self._core.lacks()
        if prompts and self._idle and not self._core.set_complete():
            take = f"put some (a training step takes {self._plan.batch.prompts})"
            yield Hold("prompts", prompts, f"{take}, or end them with Client.end_prompts (docs/feeding.md)")

    def _unwritten(self) -> Iterator[Hold]:
        counts = {one.name: one for one in self._store.consumers.counts()}
        staleness = self._plan.batch.max_staleness
        bound = "" if staleness is None else f"layout.max_staleness={staleness} bounds what is generated until then"
        positions = set(self._core.consumable()) if self._core.set_complete() else set()
        for step in self._steps:
            one = counts[step.name]
            if not positions.isdisjoint(self._store.consumers.unacknowledged(step.name)):
                there = "1 client is there" if one.clients == 1 else f"{one.clients} clients are there"
                do = there if one.clients else "start a program that gets these samples and puts it (docs/service.md)"
                do += f"; {bound}" if bound and self._idle else ""
                do = self._more(step.name, bound) or do
                fields = ", ".join(map(repr, step.writes))
                yield Hold(f"step {step.name}", f"a client to write {fields} (consumer {step.name!r})", do)

    def _more(self, consumer: str, bound: str) -> str:
        """What to do about a client that waits for more before it is done with what it has."""
        wanted = self._store.consumers.held_for_more(consumer)
        if wanted is None or not bound or not self._idle:
            return ""
        more = f"{wanted.rows} rows" if wanted.rows else f"{wanted.tokens} tokens"
        return f"one has some and waits for {more} more, but {bound}: let it get fewer at once, to be put first"
