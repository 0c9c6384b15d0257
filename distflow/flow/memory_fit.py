"""Compares the estimated memory of the workers with what this host has: a table, and warnings."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from distflow.config.yamlfile import shown
from distflow.errors import Problem
from distflow.flow.estimate import GPU_PROCESS, LIBRARY_BYTES, Estimate, estimate
from distflow.flow.gpus import first_gpus, width
from distflow.flow.memory import ASSUMED_GPU, consumer_bytes, gpu_share
from distflow.flow.memory_cures import FITS, SHARES, Cures
from distflow.flow.plan import Plan, WorkerPlan
from distflow.flow.sizes import DTYPE_BYTES, stored_dtype
from distflow.flow.slots_fit import SlotsFit, slots_fit
from distflow.types import WorkerName

GIB = 1 << 30
HOST = "host"
COLUMNS = ("weights", "gradients", "optimizer", "engine", "kv", "activations", "logits", "generating", "training")


@dataclass(frozen=True, slots=True)
class Capacity:
    """Memory of the host that plans, in bytes, or that of the hosts that the plan is for."""

    host: int | None = None
    """Memory of the machine or its container; None if unknown."""
    gpus: tuple[int, ...] = ()
    """Memory of each GPU that the driver shows."""
    hosts: tuple[HostCapacity, ...] = ()
    """Those that the plan is for, which are judged in place of the one that plans; empty: that one."""

    @property
    def shares(self) -> tuple[HostCapacity, ...]:
        """Each host, with the workers that it has."""
        return self.hosts or (HostCapacity("", self.gpus, None),)


@dataclass(frozen=True, slots=True)
class HostCapacity:
    """Memory of one host and of its GPUs, in bytes."""

    name: str
    """Empty: the one that plans."""
    gpus: tuple[int, ...]
    """Of each, by its number there; empty if unknown."""
    firsts: Mapping[str, int] | None
    """The workers that it has, each with the number of its first GPU there; None: all, one after another."""
    told: bool = True
    """Whether the memory of its GPUs is known, rather than assumed."""
    ram: int | None = None
    """Bytes of its own memory; None if unknown."""

    def has(self, worker: str) -> bool:
        """Tell whether a worker runs here."""
        return self.firsts is None or worker in self.firsts


UNSEEN = Capacity()
MOST_SHARE = 95
"""Hundredths of its GPU that an engine is told to take, at most."""
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
    of: str = ""
    """The name of its host; empty: the one that plans."""

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


def gpu_bytes(capacity: Capacity, worker: str | None = None) -> int:
    """Of the smallest GPU, or of one as they are common if none is seen; that of the host of one `worker`."""
    shares = [share for share in capacity.shares if worker is None or share.has(worker)]
    return min((size for share in shares for size in share.gpus), default=ASSUMED_GPU)


def placed(plan: Plan, capacity: Capacity) -> list[Placed]:
    """The estimates of all workers of the plan, in its order."""
    found = {one.estimate.worker: one for share in capacity.shares for one in _placed_on(plan, share)}
    return [found[str(worker.name)] for worker in plan.workers if str(worker.name) in found]


def _placed_on(plan: Plan, share: HostCapacity) -> Iterator[Placed]:
    gpus = len(share.gpus)
    firsts = share.firsts
    if firsts is None:
        firsts = first_gpus(plan.workers, gpus) if gpus else {}
    for worker in plan.workers:
        if share.has(str(worker.name)):
            place = _place(worker, gpus, firsts)
            found = _estimate(plan, worker, place, share.gpus)
            yield Placed(found, place, max(1, width(worker)), share.name)


def _estimate(plan: Plan, worker: WorkerPlan, place: str, gpus: Sequence[int]) -> Estimate:
    number = place.partition(":")[2]
    seen = gpus[int(number)] if number and int(number) < len(gpus) else ASSUMED_GPU
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
        rows.append(
            [
                names,
                f"{one.place} of {one.of}" if one.of and ":" in one.place else one.place,
                *cells,
                _gib(one.host_bytes),
            ]
        )
    unsure = dict.fromkeys(w.name.pool for w in plan.workers if w.device == "auto" and width(w))
    if capacity.host is None and not any(share.gpus for share in capacity.shares) and unsure:
        notes.append(
            f"no GPU is seen here, so device auto ({', '.join(unsure)}) is counted as memory of the host; what GPUs "
            f"there would need: layout.pools.{next(iter(unsure))}.device=cuda"
        )
    if len(rows) > 1:
        starved = {one.worker.name.pool for one in _tight(plan, capacity) if one.starved}
        uses = [use for use in _uses(placed(plan, capacity), capacity) if not starved & use.pools]
        fitting = (use for use in uses if use.needed <= usable(use.there))
        notes += [f"{use.workers}: {_verdict(use.needed, use.there)}" for use in fitting if use.needed]
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
    """Return what all workers take of one host, or of each host that they are placed on."""
    all_placed = placed(plan, capacity)
    takes: dict[tuple[int, int], list[str]] = {}
    for share in capacity.shares:
        if here := [one for one in all_placed if share.has(one.estimate.worker)]:
            takes.setdefault(host_sum(plan, here), []).append(share.name)
    for (needed, shared), names in takes.items():
        where = _several(names)
        yield (
            f"{f'all on {where}' if where else 'all on one host'}: {_gib(needed)} GiB of its memory, of which "
            f"{_gib(shared)} are published weights in shared memory, once for all workers"
        )


def _several(names: Sequence[str]) -> str:
    """Name hosts that are alike."""
    few = ", ".join(names) if len(names) <= 3 else f"{names[0]} … {names[-1]}"
    return few if len(names) == 1 else f"each of {few}"


def host_sum(plan: Plan, all_placed: Sequence[Placed]) -> tuple[int, int]:
    """Bytes of one host's memory that these workers take together, and those in shared memory: these count once."""
    shared = max((one.estimate.shared for one in all_placed), default=0)
    here = {one.estimate.worker for one in all_placed}
    twice = counted_twice(worker for worker in plan.workers if str(worker.name) in here)
    return sum(one.host_bytes for one in all_placed) + shared - twice, shared


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


@dataclass(frozen=True, slots=True)
class _Tight:
    """The engines of a pool that have more slots than memory for as many samples of the greatest length."""

    worker: WorkerPlan
    """The first of those that have least."""
    fit: SlotsFit
    gpu: int
    """Bytes of its GPU."""
    known: bool
    """Whether its GPU is known to have these, rather than assumed."""

    @property
    def starved(self) -> bool:
        """Whether there is no room for one of them."""
        return not self.fit.samples(self.fit.longest)

    @property
    def key(self) -> str:
        """The key that says what share of its GPU the engine takes."""
        option = SHARES.get(str(self.worker.engine))
        return f"layout.pools.{self.worker.name.pool}.engine_options" + (f".{option}" if option else "")


def _tight(plan: Plan, capacity: Capacity) -> Iterator[_Tight]:
    for pool in dict.fromkeys(worker.name.pool for worker in plan.workers):
        sizes = {w.name: gpu_bytes(capacity, str(w.name)) for w in plan.workers if w.name.pool == pool}
        seen = min(sizes.values())
        for worker in [plan.worker(name) for name, size in sizes.items() if size == seen]:
            fit = slots_fit(plan, worker, seen)
            if fit is not None and fit.slots > fit.samples(fit.longest):
                shares = [share for share in capacity.shares if share.has(str(worker.name)) and share.gpus]
                yield _Tight(worker, fit, seen, any(share.told for share in shares))
                break


def room_problems(plan: Plan, capacity: Capacity, where: Callable[[str], str]) -> Iterator[Problem]:
    """Find engines without memory for a single sample of the greatest length, on GPUs of which it is known."""
    for one in _tight(plan, capacity):
        if one.starved and one.known:
            yield Problem(where(one.key), one.key, *_starved(plan, one))


def _slot_warnings(plan: Plan, capacity: Capacity) -> Iterator[str]:
    for one in _tight(plan, capacity):
        pool, fit = one.worker.name.pool, one.fit
        if one.starved:
            yield " — ".join(_starved(plan, one))
        else:
            yield (
                f"the {fit.slots} slots of an engine of {pool} are more than its {fit.of_longest}, on a "
                f"GPU of {_gib(one.gpu)} GiB: where samples get that long, some wait or are computed again — "
                f"layout.pools.{pool}.slots={fit.samples(fit.longest)}, or leave it if most are shorter"
            )


def _starved(plan: Plan, one: _Tight) -> tuple[str, str]:
    """Say what an engine lacks that has no room for a single sample, and what cures it: the least share that does."""
    pool, fit, share = one.worker.name.pool, one.fit, gpu_share(one.worker)
    what = (
        f"an engine of {pool} has no room for a single sample of {fit.longest:,} tokens on a GPU of {_gib(one.gpu)} "
        f"GiB: beside its weights there is room for {fit.tokens:,} tokens"
    )
    if (least := _least_share(plan, one)) is not None:
        return f"{what} in its share of {share:g}", f"{one.key}={least:g} or more"
    wider = "a pool of its own for generation (layout=split) with " if plan.pool(pool).homes else ""
    return what, f"shorter samples, a larger GPU, or {wider}engines over several GPUs (engine_options)"


def _least_share(plan: Plan, one: _Tight) -> float | None:
    """The least share of its GPU, in hundredths, with which the engine has room for a sample; None: none that leaves
    room for others."""
    option = SHARES.get(str(one.worker.engine))
    for share in (hundredth / 100 for hundredth in range(1, MOST_SHARE + 1) if option is not None):
        options = {**one.worker.engine_options, str(option): share}
        fit = slots_fit(plan, dataclasses.replace(one.worker, engine_options=options), one.gpu)
        if fit is not None and fit.samples(fit.longest):
            return share
    return None


def table(rows: Sequence[Sequence[str]]) -> list[str]:
    """Lines of a table with aligned columns."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]


def ranges(names: Sequence[str]) -> str:
    """Name workers, those with consecutive numbers as one range. Example: rollout/0 … rollout/7, trainer/0."""
    runs: list[list[str]] = []
    for name in names:
        pool, _, number = name.rpartition("/")
        if runs and runs[-1][-1] == f"{pool}/{int(number) - 1}":
            runs[-1].append(name)
        else:
            runs.append([name])
    return ", ".join(map(_range, runs))


def memory_data(plan: Plan, capacity: Capacity) -> dict[str, Any]:
    """The same in bytes, for JSON."""
    workers = [
        {**dataclasses.asdict(one.estimate), "on": one.place, "of": one.of, "host": one.host_bytes}
        for one in placed(plan, capacity)
    ]
    seen = {"host": capacity.host, "gpus": list(capacity.gpus)}
    hosts = [{"name": share.name, "gpus": list(share.gpus), "host": share.ram} for share in capacity.hosts]
    told = {"each_consumer": consumer_bytes(plan), "warnings": list(warnings(plan, capacity))}
    return {"workers": workers, "this_host": seen, "hosts": hosts, **told}


def warnings(plan: Plan, capacity: Capacity) -> Iterator[str]:
    """Yield what would not fit if all workers ran on this host, or on the hosts that they are placed on, and slots for
    which engines have no memory."""
    all_placed = placed(plan, capacity)
    for use in _uses(all_placed, capacity):
        if use.needed > usable(use.there):
            names = f"{use.gpus} {_gib(use.there)} GiB, and {use.workers} may need {_gib(use.needed)}"
            few = _too_few(plan, len(capacity.gpus)) if len(use.here) > 1 and not capacity.hosts else ""
            yield f"{names}{few}: {_verdict(use.needed, use.there)}{_cures(plan, use.here, use.there)}"
    unseen = {share.name for share in capacity.shares if not share.gpus}
    for names, one in _alike(one for one in all_placed if one.of in unseen):
        if one.place != HOST and one.estimate.device > usable(ASSUMED_GPU):
            yield (
                f"{names} may need {_gib(one.estimate.device)} GiB of a GPU; none is seen here, and common ones have "
                f"up to {_gib(ASSUMED_GPU)} GiB (--gpu-gib says otherwise): "
                f"{_verdict(one.estimate.device, ASSUMED_GPU)}{_cures(plan, [one], ASSUMED_GPU)}"
            )
    yield from _ram_warnings(plan, all_placed, capacity)
    yield from _slot_warnings(plan, capacity)


def _ram_warnings(plan: Plan, all_placed: Sequence[Placed], capacity: Capacity) -> Iterator[str]:
    """Of hosts that have less memory of their own than their workers take together; alike ones are told once."""
    lacking: dict[tuple[int, int, int], list[str]] = {}
    for share in capacity.shares:
        here = [one for one in all_placed if share.has(one.estimate.worker)]
        there = share.ram if capacity.hosts else capacity.host
        needed = host_sum(plan, here)[0]
        if there is not None and needed > there:
            lacking.setdefault((needed, there, len(here)), []).append(share.name)
    for (needed, there, count), names in lacking.items():
        where = f"{_several(names)} has" if capacity.hosts else "this host has"
        here = [one for one in all_placed if one.of == names[0]]
        yield (
            f"{where} {_gib(there)} GiB of memory, and {count} worker(s) {'there' if capacity.hosts else 'here'} may "
            f"need {_gib(needed)}{_host_cures(plan, here, there, capacity)}"
        )


@dataclass(frozen=True, slots=True)
class _Use:
    """GPUs of one size that workers take in the same way."""

    gpus: str
    workers: str
    here: Sequence[Placed]
    """The workers on the first of them."""
    there: int
    """Bytes that each has."""

    @property
    def pools(self) -> set[str]:
        return {WorkerName.parse(one.estimate.worker).pool for one in self.here}

    @property
    def needed(self) -> int:
        return sum(one.estimate.device for one in self.here)


def _uses(all_placed: Sequence[Placed], capacity: Capacity) -> Iterator[_Use]:
    groups: dict[object, list[tuple[HostCapacity, int, list[Placed]]]] = {}
    for share in capacity.shares:
        for number, there in enumerate(share.gpus):
            here = [one for one in all_placed if one.of == share.name and number in one.gpus]
            kinds = tuple((one.estimate.worker.rpartition("/")[0], one.estimate.device, one.width) for one in here)
            groups.setdefault((there, kinds), []).append((share, number, here))
    for alike in (group for group in groups.values() if group[0][2]):
        share, number, first = alike[0]
        has = "has" if len(alike) == 1 else "have"
        using = {one.estimate.worker for _, _, here in alike for one in here}
        names = ranges([one.estimate.worker for one in all_placed if one.estimate.worker in using])
        yield _Use(f"{_numbers(alike)} {has}", names, first, share.gpus[number])


def _numbers(alike: Sequence[tuple[HostCapacity, int, list[Placed]]]) -> str:
    """Name GPUs by their numbers on their hosts; those that several hosts number alike once."""
    numbers: dict[str, list[int]] = {}
    for share, number, _ in alike:
        numbers.setdefault(share.name, []).append(number)
    hosts: dict[tuple[int, ...], list[str]] = {}
    for name, found in numbers.items():
        hosts.setdefault(tuple(found), []).append(name)
    return ", ".join(
        _range([f"cuda:{number}" for number in found]) + (f" of {_several(names)}" if names[0] else "")
        for found, names in hosts.items()
    )


def _range(names: Sequence[str]) -> str:
    return names[0] if names[0] == names[-1] else f"{names[0]} … {names[-1]}"


def usable(gpu: int) -> int:
    """Bytes of a GPU that workers may take."""
    return int(gpu * (1.0 - RESERVE))


def _verdict(needed: int, there: int) -> str:
    """Say by how much a GPU is too small, or larger than needed."""
    spare = (usable(there) - needed) / GIB
    found = f"fits {there / GIB:.0f} GB with" if spare >= 0 else f"does not fit {there / GIB:.0f} GB by"
    return f"{found} {abs(spare):.1f} GiB{' to spare' if spare >= 0 else ''} ({RESERVE:.0%} of it are left free)"


def counted_twice(workers: Iterable[WorkerPlan]) -> int:
    """Bytes of the libraries that workers of one host share, beyond once: those of one Python are forked from it."""
    forked = sum(worker.python is None for worker in workers)
    return LIBRARY_BYTES * max(0, forked - 1)


def _too_few(plan: Plan, gpus: int) -> str:
    """Why workers that name no GPU lie on one together, if there are too few."""
    asked = sum(width(worker) for worker in plan.workers if worker.device in ("auto", "cuda"))
    return f"; each on GPUs of its own, the workers would take {asked}, and there are {gpus}" if asked > gpus else ""


def _cures(plan: Plan, here: Sequence[Placed], there: int) -> str:
    """What lets the workers on a GPU of `there` bytes fit it."""
    workers = [(WorkerName.parse(one.estimate.worker), one.place != HOST) for one in here]

    def needed(other: Plan) -> int:
        return sum(
            estimate(other, other.worker(name), on_gpu=on_gpu, gpu_bytes=there).device for name, on_gpu in workers
        )

    cures = Cures(plan, [plan.worker(name) for name, _ in workers], needed, usable(there), there)
    words = cures.words()
    apart = "" if words.startswith(FITS) else _apart(here, there)
    return "".join(f" — {text}" for text in (words, apart) if text)


def _apart(here: Sequence[Placed], there: int) -> str:
    """What pools of their own would take, for training and for generation, if either would fit."""
    one = here[0].estimate
    models = one.weights + one.gradients + one.optimizer + one.activations + one.logits + GPU_PROCESS
    engine = one.engine + one.kv + one.drawing + GPU_PROCESS
    if len(here) > 1 or not (one.engine and one.weights) or max(models, engine) > usable(there):
        return ""
    return f"on GPUs of their own (layout=split), training would take {_gib(models)} GiB and generation {_gib(engine)}"


def _host_cures(plan: Plan, here: Sequence[Placed], there: int, capacity: Capacity) -> str:
    """What saves the host's memory: beside models on GPUs that is little, so fewer workers, on more hosts."""
    spread = f"fewer workers{' there' if capacity.hosts else ''}, or {'more' if capacity.hosts else 'several'} hosts"
    spread += "" if capacity.hosts else " (--hosts)"
    names = {one.estimate.worker for one in here}
    workers = [plan.worker(WorkerName.parse(one.estimate.worker)) for one in here if one.place == HOST]

    def needed(other: Plan) -> int:
        return host_sum(other, [one for one in placed(other, capacity) if one.estimate.worker in names])[0]

    cures = Cures(plan, workers, needed, there, gpu_bytes(capacity))
    return "".join(f" — {words}" for words in (cures.words(), spread) if words)


def _place(worker: WorkerPlan, gpus: int, firsts: Mapping[str, int]) -> str:
    """The place that the worker itself will choose."""
    if worker.device == "cpu" or (worker.device == "auto" and not gpus):
        return HOST
    if worker.device.startswith("cuda:"):
        return worker.device
    return f"cuda:{firsts[str(worker.name)]}" if gpus >= width(worker) else "cuda"


def _alike(all_placed: Iterable[Placed]) -> Iterator[tuple[str, Placed]]:
    """Yield workers of one pool with the same numbers as one row."""
    groups: dict[tuple[str, object, str], list[Placed]] = {}
    for one in all_placed:
        pool = one.estimate.worker.rpartition("/")[0]
        place = one.place.partition(":")[0]
        groups.setdefault((pool, dataclasses.replace(one.estimate, worker=""), place), []).append(one)
    for same in groups.values():
        first, names = same[0], ranges([one.estimate.worker for one in same])
        yield names, dataclasses.replace(first, place=first.place.partition(":")[0]) if len(same) > 1 else first


def _gib(size: int) -> str:
    if not size:
        return "-"
    return f"{size / GIB:.2f}" if size >= GIB / 200 else "<0.01"
