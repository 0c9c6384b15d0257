"""The plan as a page to read, and as plain data: also which ports a run opens without its key."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from distflow.config.plugins import LIBRARIES, NIXL
from distflow.errors import UserError
from distflow.flow.estimate import packs
from distflow.flow.graph_text import edge_lines, lane_text, model_lines, pool_lines, waits_of
from distflow.flow.lanes import ONE_HOST, Whereabouts, nixl_pools, parts_readers
from distflow.flow.memory import MIB, STEPS_OF_ROWS, rows_bytes, step_bytes
from distflow.flow.memory_fit import UNSEEN, Capacity, gpu_bytes, memory_data, memory_lines, ranges, table
from distflow.flow.plan import Plan, WorkerPlan
from distflow.flow.plugin_options import repeats_samples
from distflow.flow.sharding import divides_models
from distflow.flow.sizes import model_size
from distflow.flow.slots_fit import SlotsFit, slots_fit
from distflow.flow.validation import val_lines
from distflow.parts import part_of
from distflow.types import WorkerName


def render_page(plan: Plan, capacity: Capacity = UNSEEN, where: Whereabouts = ONE_HOST) -> str:
    """All that a plan says, section by section.

    `capacity`: of a host that would run all workers; `where`: where the workers are.
    """
    sections = [
        [f"run {plan.run_name}: {plan.batch.training_steps} training steps, seed {plan.recipe.run.seed}"],
        ["workers", *_indent(_workers(plan, capacity))],
        ["steps", *_indent(_steps(plan))],
        ["pools", *_indent(pool_lines(plan))],
        ["edges", *_indent(edge_lines(plan, where) or ["none: the training workers read the samples from the data"])],
        ["models", *_indent(model_lines(plan))],
        ["batch", *_indent(_batch(plan))],
        *([] if plan.val is None else [["validation", *_indent(val_lines(plan))]]),
        ["memory of each worker, estimated, in GiB", *_indent(memory_lines(plan, capacity))],
        *_saving(plan),
        ["network", *_indent(network_lines(plan))],
        ["interface digest", *_indent([plan.digest])],
    ]
    if notes := notes_of(plan, where):
        sections.append(["notes", *_indent(notes)])
    return "\n\n".join("\n".join(lines) for lines in sections)


def notes_of(plan: Plan, where: Whereabouts = ONE_HOST) -> tuple[str, ...]:
    """Return the notes of a plan, and where no hosts are given, which pools are pinned to some all the same."""
    if where.hosts:
        return plan.notes
    pinned = [(name, pool.hosts) for name, pool in plan.recipe.layout.pools.items() if pool.hosts]
    return *plan.notes, *(
        f"pool {name!r} is pinned to the hosts {', '.join(map(str, hosts))}, which a run on one host ignores"
        for name, hosts in pinned
    )


def _saving(plan: Plan) -> list[list[str]]:
    run = plan.recipe.run
    if run.save_every or run.save_every_s:
        return []
    text = (
        "only the last state, at the end and at a stop: a run that is killed starts over — run.save_every and "
        "run.save_every_s save more often"
    )
    return [["checkpoints", f"  {text}"]]


def plan_data(plan: Plan, capacity: Capacity = UNSEEN, where: Whereabouts = ONE_HOST) -> dict[str, Any]:
    """The plan as JSON-able data without source texts, with its memory estimate in bytes."""
    data = dataclasses.asdict(dataclasses.replace(plan, code={}, recipe=None))  # type: ignore[arg-type]  # dropped below
    del data["code"], data["recipe"]
    for worker, planned in zip(data["workers"], plan.workers, strict=True):
        worker["name"] = str(planned.name)
    for edge, planned_edge in zip(data["edges"], plan.edges, strict=True):
        edge |= {"lane": lane_text(plan, planned_edge, where), "waits": waits_of(planned_edge)}
    if plan.val is not None:
        data["val"]["data"] = plan.val.data.model_dump(mode="json")
    ports = [dataclasses.asdict(library) for library in library_ports(plan)]
    data |= {"owners": plan.owners, "trained_models": plan.trained_models}
    return {**data, "notes": notes_of(plan, where), "memory": memory_data(plan, capacity), "library_ports": ports}


def _indent(lines: Sequence[str]) -> list[str]:
    return [f"  {line}" for line in lines]


def _workers(plan: Plan, capacity: Capacity) -> list[str]:
    rows: dict[tuple[str, ...], list[str]] = {}
    for worker in plan.workers:
        steps = ", ".join(step.name for step in worker.steps)
        runs_with = _means(worker, slots_fit(plan, worker, gpu_bytes(capacity, str(worker.name))))
        cells = (worker.name.pool, ",".join(worker.roles), worker.device, str(worker.threads), runs_with, steps)
        rows.setdefault(cells, []).append(str(worker.name))
    head = ["worker", "roles", "device", "threads", "runs with", "steps"]
    return table([head, *([ranges(names), *cells[1:]] for cells, names in rows.items())])


def _means(worker: WorkerPlan, fit: SlotsFit | None) -> str:
    parts = []
    if worker.engine is not None:
        room = "" if fit is None else f", {fit.of_longest}"
        parts.append(f"{worker.engine.rpartition(':')[2]} ({worker.slots} slots{room})")
    if worker.backend is not None:
        parts.append(f"{worker.backend.rpartition(':')[2]} ({', '.join(worker.models)})")
    own = [
        f", {key} {path}" for key, path in (("script", worker.script), ("python", worker.python)) if path is not None
    ]
    return " + ".join(parts) + "".join(own)


def _steps(plan: Plan) -> list[str]:
    rows = [["step", "role", "scope", "reads", "writes"]]
    for step in plan.steps:
        source = "(a row of the data)" if step.role == "read" else "(leases)"
        reads, writes = ", ".join(step.reads) or source, ", ".join(step.writes) or "(gradients)"
        writes += f"; sometimes {', '.join(step.may_write)}" if step.may_write else ""
        rows.append([step.name, step.role, step.scope, reads, writes])
    return table(rows)


def _batch(plan: Plan) -> list[str]:
    batch = plan.batch
    owners = len(plan.owners)
    shared = [
        f"{batch.ledgers} ledgers of {batch.groups_per_ledger} groups a step, owned by {owners} training worker(s)",
        f"micro-batches of up to {batch.tokens_per_microbatch} tokens{_counted(plan)}, " + _computed(plan),
    ]
    if plan.reads is not None:
        most = f"up to {batch.samples_per_prompt} samples each"
        each = "one sample each" if batch.samples_per_prompt == 1 else most
        return [
            f"{batch.prompts} rows of the data a training step, {each}: a group",
            *shared,
            f"whole run: {batch.training_steps * batch.prompts} rows of the data, as many passes as that takes",
        ]
    return [
        f"{batch.prompts} prompts × {batch.samples_per_prompt} samples = {batch.samples} samples a training step",
        *shared,
        *_waiting(plan),
        *_rows_waiting(plan),
        *_difficulty(plan),
        *_schedule(plan),
        *_copies(plan),
        f"{_staleness(plan)}; up to {batch.max_refills} refills a ledger and step",
        f"whole run: {batch.training_steps * batch.prompts} prompts, {batch.training_steps * batch.samples} samples",
    ]


def _counted(plan: Plan) -> str:
    """Tell how those of the policy are counted."""
    home = plan.worker(WorkerName(plan.home.name, 0))
    try:
        packed = packs(home, model_size(plan.recipe.models[plan.primary]))
    except UserError:
        return ""
    if not packed:
        return " (padded)"
    prompt, longest = plan.recipe.data.max_prompt_tokens, plan.longest_sample(plan.primary)
    two = part_of([(prompt, longest - prompt), (0, longest - prompt)])
    return " (a shared prompt once)" if two.fits_masks else " (a shared prompt once, but the longest rows are padded)"


def _computed(plan: Plan) -> str:
    if plan.streamed:
        return "computed while samples arrive" if plan.reads is None else "computed one after another"
    early = f"; {', '.join(plan.on_arrival)} while they arrive" if plan.on_arrival else ""
    return f"computed when the whole batch has arrived{early}"


def _difficulty(plan: Plan) -> list[str]:
    """How prompts are drawn by their pass rates."""
    difficulty = plan.recipe.data.difficulty
    if difficulty is None:
        return []
    parts = [f"{name} (up to {pool.up_to:g}) weight {pool.weight:g}" for name, pool in difficulty.ranges]
    retired = {"solved": difficulty.retire_solved, "unsolved": difficulty.retire_unsolved}
    parts += [f"retired after {count} visits {name}" for name, count in retired.items() if count is not None]
    lag = plan.batch.max_staleness
    known = "the step before" if not lag else f"steps up to {1 + lag} before"
    return [f"prompts by pass rate, as known after {known}: {', '.join(parts)}"]


def _staleness(plan: Plan) -> str:
    bound = plan.batch.max_staleness
    if bound is None:
        return "samples of any age, trained as they arrive (max_staleness: unbounded)"
    return f"samples at most {bound} version(s) old"


def _schedule(plan: Plan) -> list[str]:
    """In which order groups are generated, where that is not the order of the data."""
    orders = {
        "fifo": [],
        "longest_first": ["the groups that are predicted to be the longest are generated first"],
        "skew_aware": ["the longest groups, as predicted, first, and on workers of their own where that is faster"],
    }
    return orders[plan.batch.schedule]


def _copies(plan: Plan) -> list[str]:
    """Which groups a second worker may generate, too (`layout.hedging`)."""
    if not (plan.recipe.layout.hedging and plan.origin.allows("repeatable")):
        return []
    if repeats_samples(plan):
        return ["copies of groups that wait or take long on one worker go to half-idle ones (layout.hedging)"]
    return [
        "groups are copied from silent workers only, not from slow ones: the engine would give a copy other tokens "
        "(layout.hedging)"
    ]


def _waiting(plan: Plan) -> list[str]:
    """What bounds the groups that are leased ahead, and with them staleness."""
    owners = [worker for worker in plan.workers if str(worker.name) in plan.owners]
    owner, batch = min(owners, key=lambda worker: worker.sample_memory_mb), plan.batch
    steps = (
        owner.sample_memory_mb * MIB / step_bytes(plan.recipe, owner.name.pool, plan.response_tokens, plan.later_bytes)
    )
    room = f"{owner.sample_memory_mb} MiB a training worker for results that wait (sample_memory_mb): "
    ahead = None if batch.max_staleness is None else min(1 + batch.max_staleness, batch.training_steps)
    if ahead is not None and steps >= ahead:
        return [room + f"all groups that max_staleness {batch.max_staleness} lets through: it alone bounds staleness"]
    bound = "unbounded" if ahead is None else f"{batch.max_staleness}"
    return [
        room + f"{steps:.1f} training steps of the longest samples; this bounds staleness where they are that long, "
        f"not max_staleness ({bound})"
    ]


def _rows_waiting(plan: Plan) -> Iterator[str]:
    """What bounds the rows that are sent ahead to the homes of further models."""
    for edge in plan.edges:
        if edge.kind == "rows":
            worker = next(worker for worker in plan.workers if worker.name.pool == edge.target)
            steps = worker.sample_memory_mb * MIB / rows_bytes(plan.recipe, plan.edges, edge, plan.response_tokens)
            room = f"{worker.sample_memory_mb} MiB a worker of {edge.target} for rows (sample_memory_mb): "
            less = f"{steps:.1f} training steps of the longest samples, and what has no room waits at {edge.source}"
            yield room + (f"all that {edge.source} may send ahead" if steps >= STEPS_OF_ROWS else less)


@dataclass(frozen=True, slots=True)
class Library:
    """Ports that a library opens in some workers or their children, without authentication."""

    name: str
    workers: tuple[str, ...]
    local: bool
    """Always on 127.0.0.1; otherwise on the host's address in the run, which is 127.0.0.1 on one machine."""


def library_ports(plan: Plan) -> list[Library]:
    """All such ports; distflow's own need the run's key, or are Unix sockets in a folder of the user."""
    found = [
        Library("Gloo (on GPUs NCCL)", pool.members, local=False)
        for pool in plan.pools
        if pool.homes and (pool.count > 1 or divides_models(plan.recipe.layout.pools[pool.name]))
    ]
    reading = dict.fromkeys(pool for model in plan.generating for pool in parts_readers(plan, model))
    found += [Library("Gloo", plan.pool(pool).members, local=False) for pool in reading]
    nixl = dict.fromkeys(pool for model in plan.generating for pool in nixl_pools(plan, model))
    found += [Library(LIBRARIES[NIXL].opens_ports, plan.pool(pool).members, local=False) for pool in nixl]
    for engine, library in LIBRARIES.items():
        having = tuple(str(worker.name) for worker in plan.workers if worker.engine == engine)
        if library.opens_ports and having:
            found.append(Library(f"{library.opens_ports} (torch's store, Gloo or NCCL)", having, local=True))
    return found


def _encoding(plan: Plan) -> str:
    """How weights cross hosts (`weights.encoding`)."""
    given = plan.recipe.weights
    rounded = f"rounded to {given.encoding}, " if given.encoding in ("bf16", "fp8") else ""
    if given.encoding == "full":
        return "each version in full"
    return f"{rounded}only what has changed since the version that a host has"


def _by_other_links(plan: Plan) -> Iterator[str]:
    """Weights of which each training worker sends its part, or that others read (`weights.link`)."""
    for model in plan.generating:
        if read := nixl_pools(plan, model)[1:]:
            yield (
                f"weights of {model}: other hosts of {' and '.join(read)} read them in the publisher's memory "
                "in the clear, unauthenticated, by NIXL; what does not come so takes the other lanes"
            )
        pools = parts_readers(plan, model)
        if pools:
            home = ranges(plan.home_of(model).members)
            yield (
                f"weights of {model}: each of {home} sends its part to {' and '.join(pools)} "
                "in the clear, unauthenticated, over Gloo; what does not come so takes the other lanes"
            )


def network_lines(plan: Plan) -> list[str]:
    """Lines for the page of a plan."""
    lines = []
    for library in library_ports(plan):
        where = "127.0.0.1" if library.local else "the host's address in the run (127.0.0.1 on one machine)"
        lines.append(f"ports without the run's key: {library.name} of {ranges(library.workers)}, at {where}")
    everything = plan.recipe.security.encrypt == "all"
    weights = "encrypted" if everything else "in the clear, checked by digests (security.encrypt: all encrypts them)"
    lines.append(f"between hosts: control messages and samples encrypted; weights {weights}; {_encoding(plan)}")
    lines += _by_other_links(plan)
    if any(pool.homes and pool.count > 1 for pool in plan.pools):
        lines.append("between hosts: gradients in the clear, unauthenticated; keep training hosts in a private network")
    return lines
