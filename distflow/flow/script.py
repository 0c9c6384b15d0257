"""Renders a worker's script, which is written to the run folder and then executed as it stands there."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from distflow.errors import UserError
from distflow.flow.edges import Edge
from distflow.flow.plan import Plan, PoolPlan, StepPlan, WorkerPlan
from distflow.types import WorkerName

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
        if lease is not None:
            lines += _indented(_generating(plan, worker, lease, "t"), 2)
        lines += _indented(_training(plan, pool), 2)
    else:
        assert lease is not None, f"{pool.name} neither trains nor generates, which the plan refuses"
        lines += _indented(_generating(plan, worker, lease, ""), 1)
    return "\n".join(lines) + "\n"


def _title(plan: Plan, worker: WorkerPlan) -> str:
    return f"{worker.name} of run {plan.run_name}. Written from its recipe; this text is what runs."


def _indented(lines: Sequence[str], depth: int) -> list[str]:
    return [_INDENT * depth + line for line in lines]


def _generating(plan: Plan, worker: WorkerPlan, lease: Edge, leases_of: str) -> list[str]:
    shared = {step.name for step in plan.steps}
    first, *others = [step for step in worker.steps if step.name in lease.steps or step.name not in shared]
    why = "  # until every owner has its samples for t" if leases_of else ""
    return [
        f'for groups in w.generate("{first.name}", w.leases({leases_of})):{why}',
        *_indented([_call(step, "groups") for step in others], 1),
        f'{_INDENT}w.send("{lease.name}", groups)  # to the owners of the leases',
    ]


def _training(plan: Plan, pool: PoolPlan) -> list[str]:
    lease = next(edge for edge in plan.edges if edge.kind == "lease" and edge.target == pool.name)
    steps = [step for step in plan.steps if step.name in pool.steps and step.name not in lease.steps]
    receive = f'for batch in w.receive("{lease.name}", t):'
    apply = [f'w.apply("{model}")  # optimizer step, exact global denominator' for model in pool.homes]
    if plan.batch.updates == 1:
        lines = [receive, *_indented([_call(step, "batch") for step in steps], 1), *apply]
    else:
        updates = [_call(step, "part") for step in steps if _accumulates(step)]
        before = [_call(step, "batch") for step in steps if not _accumulates(step)]
        cut = f"for part in w.minibatches(batch):  # {plan.batch.epochs} epochs of {plan.batch.minibatches} parts"
        lines = [f"{receive}  # the whole batch", *_indented([*before, cut, *_indented([*updates, *apply], 1)], 1)]
    return [*lines, f'w.publish("{plan.primary}", t + 1)', "w.save(t + 1)"]


def _accumulates(step: StepPlan) -> bool:
    return step.role == "train" and not step.writes


def _call(step: StepPlan, batch: str) -> str:
    if _accumulates(step):
        return f'w.call("{step.name}", {batch})  # accumulates'
    return f'{batch} = w.call("{step.name}", {batch})'
