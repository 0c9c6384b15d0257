"""Renders a worker's script, which is written to the run folder and then executed as it stands there."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from distflow.errors import UserError
from distflow.flow.edges import Edge
from distflow.flow.plan import Plan, PoolPlan, StepPlan, WorkerPlan
from distflow.types import WorkerName, written

_INDENT = "    "


def render_script(plan: Plan, name: WorkerName) -> str:
    """The script of one worker, as Python source; the text of the user's own file where the layout names one.

    Raises LookupError for an unknown worker and UserError for a file that cannot be read.
    """
    worker = plan.worker(name)
    if worker.script is not None:
        try:
            return Path(worker.script).read_text(encoding="utf-8")
        except OSError as error:
            raise UserError(f"script of {name}: {error}") from error
    lines = [f'"""{_title(plan, worker)}"""', "", "", "def script(w):"]
    pool = plan.pool(worker.name.pool)
    lease = next((edge for edge in plan.edges if edge.kind == "lease" and edge.source == pool.name), None)
    if pool.homes:
        lines.append(f"{_INDENT}for t in w.training_steps():")
    if pool.homes and pool != plan.home:
        lines += _indented(_further(plan, pool), 2)
    elif pool.homes:
        if lease is not None:
            lines += _indented(_generating(plan, worker, lease, "w.leases(t)"), 2)
        lines += _indented(_training(plan, pool), 2)
        if lease is not None and plan.val is not None:
            run = plan.recipe.run
            last = min(run.training_steps, run.stop_after or run.training_steps)
            lines += _indented(_generating(plan, worker, lease, f"w.validation({last})"), 1)
    elif lease is not None:
        lines += _indented(_generating(plan, worker, lease, "w.leases()"), 1)
    else:
        lines += _indented(_serving(worker), 1)
    return "\n".join(lines) + "\n"


def _title(plan: Plan, worker: WorkerPlan) -> str:
    return f"{worker.name} of run {plan.run_name}. Written from its recipe; this text is what runs."


def _indented(lines: Sequence[str], depth: int) -> list[str]:
    return [_INDENT * depth + line for line in lines]


_WHY = {
    "w.leases()": "",
    "w.leases(t)": "  # until every owner has its samples for t",
}


def _generating(plan: Plan, worker: WorkerPlan, lease: Edge, leases: str) -> list[str]:
    shared = {step.name for step in plan.steps}
    own = [step.name for step in worker.steps if step.name in lease.steps or step.name not in shared]
    further = [step.name for step in worker.steps if step.generates_further]
    asked = [*further, *(port.edge for port in worker.port("asks") if port.edge in lease.steps)]
    first, *others = [name for name in lease.steps if name in (*own, *asked)]
    others += [name for name in own if name not in lease.steps]
    # Steps of this worker that an asked one follows run on the stream; those behind the last one in the loop.
    last = max((number for number, name in enumerate(others) if name in asked), default=-1)
    groups = f'w.generate("{first}", {leases})'
    for name in others[: last + 1]:
        groups = f'w.{"ask" if name in asked else "each"}("{name}", {groups})'
    return [
        f"for groups in {groups}:{_WHY.get(leases, '  # what is left to validate')}",
        *_indented([f'groups = w.call("{name}", groups)' for name in others[last + 1 :]], 1),
        f'{_INDENT}w.send("{lease.name}", groups)  # to the owners of the leases',
    ]


def _serving(worker: WorkerPlan) -> list[str]:
    # Several pools may ask for a step.
    steps = list(dict.fromkeys(port.edge for port in worker.port("answers")))
    if worker.generates:
        return [f'for groups in w.generate("{steps[0]}", w.requests("{steps[0]}")):', f"{_INDENT}w.answer(groups)"]
    if len(steps) == 1:
        return [f'for batch in w.requests("{steps[0]}"):', f'{_INDENT}w.answer(w.call("{steps[0]}", batch))']
    names = ", ".join(f'"{name}"' for name in steps)
    return [f"for step, batch in w.requests_of({names}):", f"{_INDENT}w.answer(w.call(step, batch))"]


def _training(plan: Plan, pool: PoolPlan) -> list[str]:
    lease = next((edge for edge in plan.edges if edge.kind == "lease" and edge.target == pool.name), None)
    before = (plan.origin.name,) if lease is None else lease.steps
    steps = [step for step in plan.steps if step.name in pool.steps and step.name not in before]
    batches = f'w.read("{plan.origin.name}", t)' if lease is None else f'w.receive("{lease.name}", t)'
    for edge in plan.edges:
        if edge.kind in ("call", "client") and edge.source == pool.name and edge.when != "before custody":
            batches = f'w.ask("{edge.name}", {batches})'
    for name in plan.on_arrival:
        batches = f'w.each("{name}", {batches})'
    steps = [step for step in steps if step.name not in plan.on_arrival and step.role != "client"]
    own = "" if lease is not None else "its own share of the data"
    why = [*([own] if own else []), *([] if plan.streamed else ["the whole batch"])]
    receive = f"for batch in {batches}:" + (f"  # {', '.join(why)}" if why else "")
    if plan.batch.updates == 1:
        calls = [*_dealing(plan, steps), *(step for step in steps if _accumulates(step))]
        lines = [receive, *_indented(_lines(calls, "batch"), 1), *_applies(pool)]
    else:
        updates = [step for step in steps if _accumulates(step)]
        lines = [receive, *_indented(_lines(_dealing(plan, steps), "batch"), 1)]
        lines += _indented(_parts(plan, pool, updates), 1)
    # That of the primary model comes last: it opens the next training step for leasing.
    published = [model for model in (*plan.generating[1:], *plan.generating[:1]) if model in pool.homes]
    return [*lines, *(f'w.publish("{model}", t + 1)' for model in published), "w.save(t + 1)"]


def _further(plan: Plan, pool: PoolPlan) -> list[str]:
    """The home of further models."""
    rows = next(edge for edge in plan.edges if edge.kind == "rows" and edge.target == pool.name)
    calls = [edge.name for edge in plan.edges if edge.kind == "call" and edge.target == pool.name]
    updates = [step for step in plan.steps if step.name in rows.steps]
    why = f"  # answers {', '.join(calls)} meanwhile" if calls else ""
    receive = f'for batch in w.receive("{rows.name}", t):{why}'
    if plan.batch.updates == 1:
        lines = [receive, *_indented(_lines(updates, "batch"), 1), *_applies(pool)]
    else:
        lines = [receive, *_indented(_parts(plan, pool, updates), 1)]
    published = [model for model in pool.homes if model in plan.generating]
    return [*lines, *(f'w.publish("{model}", t + 1)' for model in published), "w.save(t + 1)"]


def _parts(plan: Plan, pool: PoolPlan, updates: Sequence[StepPlan]) -> list[str]:
    epochs, parts = plan.batch.epochs, plan.batch.minibatches
    times = f"{epochs} epoch{'s' if epochs > 1 else ''} of {parts} part{'s' if parts > 1 else ''}"
    cut = f"for part in w.minibatches(batch):  # {times}"
    return [cut, *_indented([*_lines(updates, "part"), *_applies(pool)], 1)]


def _applies(pool: PoolPlan) -> list[str]:
    return [f'w.apply("{model}")  # optimizer step, exact global denominator' for model in pool.homes]


def _dealing(plan: Plan, steps: Sequence[StepPlan]) -> list[StepPlan | Edge]:
    """The steps before the updates, and the edges on which rows go to other homes as soon as they are complete."""
    found: list[StepPlan | Edge] = [step for step in steps if not _accumulates(step)]
    for edge in plan.edges:
        if edge.kind == "rows":
            writing = [n for n, item in enumerate(found) if isinstance(item, StepPlan) and _writes(item, edge)]
            found.insert(max(writing, default=-1) + 1, edge)
    return found


def _writes(step: StepPlan, edge: Edge) -> bool:
    return any(written(field, (*step.writes, *step.may_write)) for field in edge.fields)


def _lines(items: Sequence[StepPlan | Edge], batch: str) -> list[str]:
    return [
        _call(item, batch) if isinstance(item, StepPlan) else f'w.send("{item.name}", {batch})  # to {item.target}'
        for item in items
    ]


def _accumulates(step: StepPlan) -> bool:
    return step.role == "train" and not step.writes


def _call(step: StepPlan, batch: str) -> str:
    if _accumulates(step):
        return f'w.call("{step.name}", {batch})  # accumulates'
    return f'{batch} = w.call("{step.name}", {batch})'
