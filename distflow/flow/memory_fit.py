"""Compares the estimated memory of the workers with what this host has: a table, and warnings."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from distflow.config.schema import Recipe
from distflow.config.yamlfile import shown
from distflow.errors import UserError
from distflow.flow.estimate import LIBRARY_BYTES, Estimate, divides, estimate
from distflow.flow.gpus import first_gpus, width
from distflow.flow.memory import ASSUMED_GPU, consumer_bytes, gpu_share
from distflow.flow.plan import Plan, WorkerPlan
from distflow.flow.sizes import DTYPE_BYTES, stored_dtype
from distflow.flow.slots_fit import slots_fit
from distflow.types import WorkerName

GIB = 1 << 30
HOST = "host"
COLUMNS = ("weights", "gradients", "optimizer", "engine", "kv", "activations", "logits", "generating", "training")


@dataclass(frozen=True, slots=True)
class Capacity:
    """Memory of the host that plans, in bytes."""

    host: int | None = None
    """Memory of the machine or its container; None if unknown."""
    gpus: tuple[int, ...] = ()
    """Memory of each GPU that the driver shows."""


UNSEEN = Capacity()
RESERVE = 0.06
"""Share of a GPU that estimates leave free: for fragments between tensors, and for what libraries take besides."""


@dataclass(frozen=True, slots=True)
class Placed:
    """An estimate, and the place of the worker's models if it ran on this host."""

    estimate: Estimate
    place: str
    """host, or cuda:N, the first GPU of several."""
    width: int = 1
    """GPUs that its engine shards the model over; the estimate is for each of them."""

    @property
    def gpus(self) -> range:
        """The numbers of its GPUs; none if that cannot be said here."""
        number = self.place.partition(":")[2]
        return range(int(number), int(number) + self.width) if number else range(0)

    @property
    def host_bytes(self) -> int:
        """The most that it takes of the host's memory, while loading or later, without what workers share."""
        later = self.estimate.host + (self.estimate.device if self.place == HOST else 0)
        return max(self.estimate.loading, later)


def with_gpus(plan: Plan, capacity: Capacity, gib: float) -> Capacity:
    """The same host with a GPU of `gib` GiB for each worker with a model, whatever is seen here."""
    count = sum(width(worker) for worker in plan.workers if worker.device != "cpu")
    return dataclasses.replace(capacity, gpus=(int(gib * GIB),) * count)


def gpu_bytes(capacity: Capacity) -> int:
    """Of the smallest GPU here, or of one as they are common if none is seen."""
    return min(capacity.gpus, default=ASSUMED_GPU)


def placed(plan: Plan, capacity: Capacity) -> list[Placed]:
    """The estimates of all workers of the plan."""
    gpus = len(capacity.gpus)
    firsts = first_gpus(plan.workers, gpus) if gpus else {}
    places = [(worker, _place(worker, gpus, firsts)) for worker in plan.workers]
    return [Placed(_estimate(plan, worker, place, capacity), place, max(1, width(worker))) for worker, place in places]


def _estimate(plan: Plan, worker: WorkerPlan, place: str, capacity: Capacity) -> Estimate:
    number = place.partition(":")[2]
    seen = capacity.gpus[int(number)] if number and int(number) < len(capacity.gpus) else ASSUMED_GPU
    return estimate(plan, worker, on_gpu=place != HOST, gpu_bytes=seen)


def memory_lines(plan: Plan, capacity: Capacity) -> list[str]:
    """Lines for the plan's page: a row for each kind of worker, in GiB, and warnings."""
    rows = [["worker", "on", *COLUMNS, "host memory"]]
    notes = []
    for names, one in _alike(placed(plan, capacity)):
        if one.estimate.unknown:
            notes.append(f"{names}: unknown: {one.estimate.unknown}")
            continue
        cells = [_gib(getattr(one.estimate, column)) for column in COLUMNS]
        rows.append([names, one.place, *cells, _gib(one.host_bytes)])
    unsure = dict.fromkeys(w.name.pool for w in plan.workers if w.device == "auto" and width(w))
    if capacity.host is None and not capacity.gpus and unsure:
        notes.append(
            f"no GPU is seen here, so device auto ({', '.join(unsure)}) is counted as memory of the host; what GPUs "
            f"there would need: layout.pools.{next(iter(unsure))}.device=cuda"
        )
    if len(rows) > 1:
        notes += [*_together(plan, capacity), *_narrower(plan)]
    if len(rows) > 1 and plan.owners:
        most = (
            f"{consumer_bytes(plan) / GIB:.2f} GiB of {plan.owners[0]}'s host memory" if len(plan.owners) == 1 else ""
        )
        most = most or f"{consumer_bytes(plan) / GIB:.2f} GiB of host memory of each of {plan.home.name}"
        notes.append(
            f"each consumer that a program outside the run opens takes up to {most} besides (limits.consumer_mb)"
        )
    return [*(table(rows) if len(rows) > 1 else []), *notes, *(f"warning: {text}" for text in warnings(plan, capacity))]


def _together(plan: Plan, capacity: Capacity) -> Iterator[str]:
    """Return what all workers take of one host."""
    needed, shared = host_sum(plan, placed(plan, capacity))
    yield (
        f"all on one host: {_gib(needed)} GiB of its memory, of which {_gib(shared)} are published weights in shared "
        "memory, once for all workers"
    )


def host_sum(plan: Plan, all_placed: Sequence[Placed]) -> tuple[int, int]:
    """Bytes of one host's memory that all workers take together, and those in shared memory: these count once."""
    shared = max((one.estimate.shared for one in all_placed), default=0)
    return sum(one.host_bytes for one in all_placed) + shared - counted_twice(plan.workers), shared


def _narrower(plan: Plan) -> Iterator[str]:
    """Tell of models whose folder has narrower weights than the recipe asks for."""
    for name in dict.fromkeys(name for worker in plan.workers for name in (*worker.models, *worker.generates)):
        model = plan.recipe.models[name]
        stored = stored_dtype(model)
        if stored is not None and DTYPE_BYTES[stored] < DTYPE_BYTES[model.dtype]:
            times = DTYPE_BYTES[model.dtype] // DTYPE_BYTES[stored]
            said = f"{shown(Path(str(model.path)))} says {stored} and the recipe {model.dtype}"
            yield (
                f"models.{name}: {said}, which takes {times} times the memory of weights and activations — "
                f"models.{name}.dtype={stored}, unless it is meant so"
            )


def _slot_warnings(plan: Plan, capacity: Capacity) -> Iterator[str]:
    """Of engines that have more slots than their memory has room for samples of the greatest length."""
    seen = gpu_bytes(capacity)
    for pool in dict.fromkeys(worker.name.pool for worker in plan.workers):
        fits = [slots_fit(plan, worker, seen) for worker in plan.workers if worker.name.pool == pool]
        few = [fit for fit in fits if fit is not None and fit.slots > fit.samples(fit.longest)]
        if few:
            yield (
                f"the {few[0].slots} slots of an engine of {pool} are more than its {few[0].of_longest}, on a "
                f"GPU of {_gib(seen)} GiB: where samples get that long, some wait or are computed again — "
                f"layout.pools.{pool}.slots={max(1, few[0].samples(few[0].longest))}, or leave it if most are shorter"
            )


def table(rows: Sequence[Sequence[str]]) -> list[str]:
    """Lines of a table with aligned columns."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]


def memory_data(plan: Plan, capacity: Capacity) -> dict[str, Any]:
    """The same in bytes, for JSON."""
    workers = [
        {**dataclasses.asdict(one.estimate), "on": one.place, "host": one.host_bytes} for one in placed(plan, capacity)
    ]
    seen = {"host": capacity.host, "gpus": list(capacity.gpus)}
    told = {"each_consumer": consumer_bytes(plan), "warnings": list(warnings(plan, capacity))}
    return {"workers": workers, "this_host": seen, **told}


def warnings(plan: Plan, capacity: Capacity) -> Iterator[str]:
    """Yield what would not fit if all workers ran on this host, and slots for which engines have no memory."""
    all_placed = placed(plan, capacity)
    for number, there in enumerate(capacity.gpus):
        here = [one for one in all_placed if number in one.gpus]
        needed = sum(one.estimate.device for one in here)
        if needed > usable(there):
            names = ", ".join(one.estimate.worker for one in here)
            few = _shared(plan, len(capacity.gpus)) if len(here) > 1 else ""
            found = f"cuda:{number} has {_gib(there)} GiB, and {names} may need {_gib(needed)}{few}"
            yield f"{found}: {_verdict(needed, there)} — {_hint(plan, here)}"
    for names, one in _alike(all_placed) if not capacity.gpus else ():
        if one.place != HOST and one.estimate.device > usable(ASSUMED_GPU):
            yield (
                f"{names} may need {_gib(one.estimate.device)} GiB of a GPU; none is seen here, and common ones have "
                f"up to {_gib(ASSUMED_GPU)} GiB (--gpu-gib says otherwise): "
                f"{_verdict(one.estimate.device, ASSUMED_GPU)} — {_hint(plan, [one])}"
            )
    needed, _ = host_sum(plan, all_placed)
    if capacity.host is not None and needed > capacity.host:
        yield (
            f"this host has {_gib(capacity.host)} GiB of memory, and {len(all_placed)} worker(s) here may need "
            f"{_gib(needed)} — {_host_hint(plan, all_placed)}"
        )
    yield from _slot_warnings(plan, capacity)


def usable(gpu: int) -> int:
    """Bytes of a GPU that workers may take."""
    return int(gpu * (1.0 - RESERVE))


def _verdict(needed: int, there: int) -> str:
    kept = f"{RESERVE:.0%} of it are left free"
    return f"does not fit {there / GIB:.0f} GB by {(needed - usable(there)) / GIB:.1f} GiB ({kept})"


def counted_twice(workers: Iterable[WorkerPlan]) -> int:
    """Bytes of the libraries that workers of one host share, beyond once: those of one Python are forked from it."""
    forked = sum(worker.python is None for worker in workers)
    return LIBRARY_BYTES * max(0, forked - 1)


def _shared(plan: Plan, gpus: int) -> str:
    """Why workers that name no GPU lie on one together, if there are too few."""
    asked = sum(width(worker) for worker in plan.workers if worker.device in ("auto", "cuda"))
    return f"; each on GPUs of its own, the workers would take {asked}, and there are {gpus}" if asked > gpus else ""


def _hint(plan: Plan, here: Sequence[Placed]) -> str:
    """The settings that would save most, the largest saving first."""
    workers = [plan.worker(WorkerName.parse(one.estimate.worker)) for one in here]
    caches = [one.estimate.kv + one.estimate.drawing for one in here]
    parts = {
        "lower batch.tokens_per_microbatch": sum(one.estimate.activations + one.estimate.logits for one in here),
        "fewer slots": sum(cache for cache, worker in zip(caches, workers, strict=True) if gpu_share(worker) is None),
        "a smaller share of the GPU for the engine (engine_options)": sum(
            cache for cache, worker in zip(caches, workers, strict=True) if gpu_share(worker) is not None
        ),
        "a backend that divides the model": sum(
            one.estimate.optimizer + one.estimate.gradients
            for one, worker in zip(here, workers, strict=True)
            if not divides(worker)
        ),
    }
    saved = {hint: _saved(plan, here, recipe) for hint, recipe in _changes(plan, workers)}
    words = {hint: f"{hint} (of {_gib(size)} GiB)" for hint, size in parts.items()}
    words |= {hint: f"{hint} gives {size / GIB:.1f} GiB" for hint, size in saved.items()}
    parts |= saved
    return ", or ".join(words[hint] for hint in sorted(parts, key=lambda hint: -parts[hint])[:2] if parts[hint])


def _host_hint(plan: Plan, here: Sequence[Placed]) -> str:
    """What saves the host's memory: beside models on GPUs that is little, so fewer workers, on more hosts."""
    spread = "fewer workers, or several hosts (--hosts)"
    hints = _hint(plan, [one for one in here if one.place == HOST])
    return f"{hints}, or {spread}" if hints else spread


def _changes(plan: Plan, workers: Sequence[WorkerPlan]) -> Iterator[tuple[str, Recipe]]:
    """Recipes that may need less of a GPU, and what is changed in them."""
    recipe = plan.recipe
    for name in dict.fromkeys(name for worker in workers for name in worker.models if name in plan.trained_models):
        model = recipe.models[name].model_copy(update={"gradient_checkpointing": True})
        hint = f"models.{name}.gradient_checkpointing: true"
        yield hint, recipe.model_copy(update={"models": {**recipe.models, name: model}})
    for name in dict.fromkeys(worker.name.pool for worker in workers if not worker.offload):
        pool = recipe.layout.pools[name].model_copy(update={"offload": True})
        layout = recipe.layout.model_copy(update={"pools": {**recipe.layout.pools, name: pool}})
        yield f"layout.pools.{name}.offload: true", recipe.model_copy(update={"layout": layout})


def _saved(plan: Plan, here: Sequence[Placed], recipe: Recipe) -> int:
    """What the workers here need less with another recipe; 0 if that is refused."""
    # Imported late: the planner is not needed to show a plan that fits.
    from distflow.flow.planner import make_plan

    try:
        other = make_plan(recipe, lambda key: "recipe")
    except UserError:
        return 0
    placed_workers = [(WorkerName.parse(one.estimate.worker), one.place != HOST) for one in here]
    before, after = (
        sum(estimate(which, which.worker(name), on_gpu=on_gpu).device for name, on_gpu in placed_workers)
        for which in (plan, other)
    )
    return max(0, before - after)


def _place(worker: WorkerPlan, gpus: int, firsts: Mapping[str, int]) -> str:
    """The place that the worker itself will choose."""
    if worker.device == "cpu" or (worker.device == "auto" and not gpus):
        return HOST
    if worker.device.startswith("cuda:"):
        return worker.device
    return f"cuda:{firsts[str(worker.name)]}" if gpus >= width(worker) else "cuda"


def _alike(all_placed: Sequence[Placed]) -> Iterator[tuple[str, Placed]]:
    """Yield workers of one pool with the same numbers as one row."""
    groups: dict[tuple[str, object, str], list[Placed]] = {}
    for one in all_placed:
        pool = one.estimate.worker.rpartition("/")[0]
        place = one.place.partition(":")[0]
        groups.setdefault((pool, dataclasses.replace(one.estimate, worker=""), place), []).append(one)
    for same in groups.values():
        first, last = same[0], same[-1]
        many = len(same) > 1
        names = f"{first.estimate.worker} … {last.estimate.worker}" if many else first.estimate.worker
        yield names, dataclasses.replace(first, place=first.place.partition(":")[0]) if many else first


def _gib(size: int) -> str:
    if not size:
        return "-"
    return f"{size / GIB:.2f}" if size >= GIB / 200 else "<0.01"
