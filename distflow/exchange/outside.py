"""What a training worker waits for from programs outside of the run, as `status`, `launch` and `watch` tell it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

from distflow.exchange.owner import OwnerCore
from distflow.exchange.store_channel import SampleStore
from distflow.flow.plan import Plan, StepPlan


class Outside(NamedTuple):
    """What an owner may wait for from clients."""

    core: OwnerCore
    store: SampleStore
    plan: Plan
    steps: Sequence[StepPlan]
    """Those that clients write."""
    waits: Callable[[], bool]
    """Whether the main thread waits for something."""

    def status(self) -> list[dict[str, Any]]:
        """Each thing that it waits for now: `on`, by which it is told apart, and `text`: for whom, and what to do."""
        found = (*self._held_up(), *self._prompts(), *self._unwritten()) if self.waits() else ()
        return [{"on": on, "text": text} for on, text in found]

    @property
    def _idle(self) -> bool:
        """Whether nothing is being generated for this owner."""
        return not any(holder.held for holder in self.core.holders())

    def _held_up(self) -> Iterator[tuple[str, str]]:
        name = self.core.held_up()
        if name and self._idle and not self.core.set_complete():
            limit = f"limits.consumer_mb={self.plan.recipe.limits.consumer_mb} bounds what is kept"
            do = f"{limit}; let a program read them, or close the consumer with Client.forget (docs/service.md)"
            yield f"consumer {name}", f"consumer {name!r}, which loses nothing, to read samples: {do}"

    def _prompts(self) -> Iterator[tuple[str, str]]:
        prompts = self.core.lacks()
        if prompts and self._idle and not self.core.set_complete():
            take = f"put some (a training step takes {self.plan.batch.prompts})"
            yield "prompts", f"{prompts}: {take}, or end them with Client.end_prompts (docs/feeding.md)"

    def _unwritten(self) -> Iterator[tuple[str, str]]:
        counts = {one.name: one for one in self.store.consumers.counts()}
        staleness = self.plan.batch.max_staleness
        bound = "" if staleness is None else f"layout.max_staleness={staleness} bounds what is generated until then"
        positions = set(self.core.consumable()) if self.core.set_complete() else set()
        for step in self.steps:
            one = counts[step.name]
            if not positions.isdisjoint(self.store.consumers.unacknowledged(step.name)):
                there = "1 client is there" if one.clients == 1 else f"{one.clients} clients are there"
                do = there if one.clients else "start a program that gets these samples and puts it (docs/service.md)"
                do += f"; {bound}" if bound and self._idle else ""
                do = self._more(step.name, bound) or do
                fields = ", ".join(map(repr, step.writes))
                yield f"step {step.name}", f"a client to write {fields} (consumer {step.name!r}): {do}"

    def _more(self, consumer: str, bound: str) -> str:
        """What to do about a client that waits for more before it is done with what it has."""
        wanted = self.store.consumers.held_for_more(consumer)
        if wanted is None or not bound or not self._idle:
            return ""
        more = f"{wanted.rows} rows" if wanted.rows else f"{wanted.tokens} tokens"
        return f"one has some and waits for {more} more, but {bound}: let it get fewer at once, to be put first"
