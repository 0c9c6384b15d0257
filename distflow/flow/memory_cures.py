"""What makes workers fit the memory that there is: settings with which the plan is made, and estimated, once more.

ladders of settings, the cheapest first ─▶ each alone: its mildest step that fits
                                        ─▶ else together: added until it fits, then without what is not needed
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from pydantic import BaseModel

from distflow.config.plugins import ENGINES
from distflow.errors import UserError
from distflow.flow.estimate import divides
from distflow.flow.gpus import width
from distflow.flow.memory import gpu_share
from distflow.flow.plan import Plan, WorkerPlan
from distflow.flow.slots_fit import slots_fit

Changes = Mapping[str, Any]
"""Values by their keys in the recipe."""
GIB = 1 << 30
FITS = "it fits with"
MOST_NAMED = 2
"""Settings that are named, each of which is enough."""
_STEPS = 6
"""Of a ladder, each with half of the one before."""
SHARES = {ENGINES["sglang"]: "memory_fraction", ENGINES["vllm"]: "gpu_memory_utilization"}
_WIDTHS = {ENGINES["sglang"]: "tensor_parallel", ENGINES["vllm"]: "tensor_parallel_size"}


class Cures:
    """Settings that reduce what `workers` need. `needed`: bytes under another plan, of which there are `bound`; `gpu`:
    memory of their GPUs."""

    def __init__(
        self, plan: Plan, workers: Sequence[WorkerPlan], needed: Callable[[Plan], int], bound: int, gpu: int
    ) -> None:
        self._plan, self._needed, self._bound, self._gpu = plan, needed, bound, gpu
        self._plans: dict[frozenset[tuple[str, Any]], Plan | None] = {}
        self._pools = {worker.name.pool for worker in workers}
        self._ladders = [ladder for ladder in (*_of_training(plan, workers), *_of_engines(workers)) if ladder]
        self._ladders += [ladder for ladder in _of_gpus(plan, workers) if ladder]

    def words(self) -> str:
        """What to set, behind `FITS`, with the GiB needed then; else the best that can be had; "" if nothing helps."""
        enough = [found for ladder in self._ladders if (found := self._first({}, ladder, self._bound))]
        here = [one for one in enough if self._gpus(one) == self._gpus({})]
        if here:
            return f"{FITS} {', or with '.join(map(self._told, here[:MOST_NAMED]))}"
        together = self._together()
        enough += [together] if self._fits(together) else []
        if enough:
            # More GPUs cost the most.
            return f"{FITS} {self._told(min(enough, key=self._gpus))}"
        return f"not even with {self._told(together)}" if together else ""

    def _first(self, others: Changes, ladder: Sequence[Changes], bound: float) -> Changes | None:
        return next((found for rung in ladder if self._bytes(found := {**others, **rung}) <= bound), None)

    def _together(self) -> Changes:
        """Changes that are enough together, each needed and as mild as can be; if none are, all that save anything."""
        chosen: list[Sequence[Changes]] = []
        changes: Changes = {}
        for ladder in self._ladders:
            # A change may help only beside a later one; a run must be possible with each.
            furthest = ({**changes, **rung} for rung in reversed(ladder))
            found = next((one for one in furthest if self._bytes(one) <= self._bytes(changes)), None)
            if found is not None:
                chosen, changes = [*chosen, ladder], found
            if self._fits(changes):
                break
        bound = max(self._bound, self._bytes(changes))
        for rungs in reversed(chosen):
            without = {key: value for key, value in changes.items() if key not in rungs[-1]}
            changes = self._first(without, [{}, *rungs], bound) or {}
        return changes

    def _fits(self, changes: Changes) -> bool:
        return self._bytes(changes) <= self._bound

    def _gpus(self, changes: Changes) -> int:
        plan = self._changed(changes)
        assert plan is not None, "what was refused is not told"
        return sum(map(width, plan.workers))

    def _bytes(self, changes: Changes) -> float:
        """What is needed then; infinite if that is refused, or an engine has no room for a single sample."""
        plan = self._changed(changes)
        if plan is None:
            return float("inf")
        fits = [slots_fit(plan, worker, self._gpu) for worker in plan.workers if worker.name.pool in self._pools]
        starved = any(fit is not None and not fit.samples(fit.longest) for fit in fits)
        return float("inf") if starved else self._needed(plan)

    def _changed(self, changes: Changes) -> Plan | None:
        """The plan with changes; None if it is refused."""
        key = frozenset(changes.items())
        if key not in self._plans:
            self._plans[key] = self._made(changes)
        return self._plans[key]

    def _made(self, changes: Changes) -> Plan | None:
        # Imported late: the planner is not needed to show a plan that fits.
        from distflow.flow.planner import make_plan

        recipe = self._plan.recipe
        for key, value in changes.items():
            recipe = _with(recipe, key.split("."), value)
        try:
            return make_plan(recipe, lambda key: "recipe") if changes else self._plan
        except UserError:
            return None

    def _told(self, changes: Changes) -> str:
        settings = [f"{key}: {str(value).lower() if value is True else value}" for key, value in changes.items()]
        gpus = self._gpus(changes)
        on = f" on each of {gpus} GPUs" if gpus != self._gpus({}) else ""
        return f"{' and '.join(settings)} ({self._bytes(changes) / GIB:.2f} GiB{on})"


def _with(value: Any, path: Sequence[str], new: Any) -> Any:
    """A section with another value at a path below it."""
    if not path:
        return new
    name, *below = path
    if isinstance(value, BaseModel):
        return value.model_copy(update={name: _with(getattr(value, name), below, new)})
    return {**value, name: _with(value.get(name, {}), below, new)}


def _of_training(plan: Plan, workers: Sequence[WorkerPlan]) -> Iterator[list[Changes]]:
    """Ladders of what costs time alone, each with ever less memory."""
    for name in _trained(plan, workers):
        recomputed = plan.recipe.models[name].gradient_checkpointing
        yield [] if recomputed else [{f"models.{name}.gradient_checkpointing": True}]
    for name in dict.fromkeys(worker.name.pool for worker in workers if worker.models and not worker.offload):
        yield [{f"layout.pools.{name}.offload": True}]
    if any(worker.models for worker in workers):
        budget, longest = plan.batch.tokens_per_microbatch, plan.longest_sample(plan.primary)
        least = dict.fromkeys(max(longest, value) for value in _halves(budget))
        yield [{"batch.tokens_per_microbatch": value} for value in least if value < budget]


def _of_engines(workers: Sequence[WorkerPlan]) -> Iterator[list[Changes]]:
    """The same of fewer samples at once."""
    for name, worker in {worker.name.pool: worker for worker in workers if worker.generates}.items():
        share, option = gpu_share(worker), SHARES.get(str(worker.engine))
        if share is None or option is None:
            yield [{f"layout.pools.{name}.slots": value} for value in _halves(worker.slots)]
        else:
            less = [tenth / 10 for tenth in range(9, 0, -1) if tenth / 10 < share]
            yield [{f"layout.pools.{name}.engine_options.{option}": value} for value in less]


def _of_gpus(plan: Plan, workers: Sequence[WorkerPlan]) -> Iterator[list[Changes]]:
    """The same of models that are divided over more GPUs."""
    trained = set(_trained(plan, workers))
    for name, worker in {worker.name.pool: worker for worker in workers}.items():
        pool, ledgers = f"layout.pools.{name}", plan.recipe.batch.ledgers
        if trained & set(worker.models):
            backend = {} if divides(worker) else {f"{pool}.backend": "fsdp"}
            counts = [plan.pool(name).count << n for n in range(0 if backend else 1, _STEPS)]
            # Each training worker owns a ledger at least.
            yield [
                {**backend, f"{pool}.count": count, **({"batch.ledgers": count} if count > ledgers else {})}
                for count in counts
            ]
        if worker.generates and str(worker.engine) in _WIDTHS:
            option = f"{pool}.engine_options.{_WIDTHS[str(worker.engine)]}"
            yield [{option: width(worker) << n} for n in range(1, _STEPS)]


def _trained(plan: Plan, workers: Sequence[WorkerPlan]) -> list[str]:
    return list(dict.fromkeys(name for one in workers for name in one.models if name in plan.trained_models))


def _halves(value: int) -> list[int]:
    return [value >> n for n in range(1, _STEPS) if value >> n]
