"""What a recipe gives and this flow has no work for: left out, with a note for the plan's page, or refused.

So a layout may name pools and steps of other flows, and a flow a forward step whose result a setting makes unnecessary.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace

from distflow.config.paths import shipped_steps
from distflow.config.schema import LayoutConfig
from distflow.errors import Problems
from distflow.flow.edges import DUMPED
from distflow.flow.graph import StepNode
from distflow.flow.sites import VALIDATE
from distflow.flow.step import FILTERED
from distflow.types import prefixed, written


def without_unread(
    steps: Sequence[StepNode], private: Sequence[StepNode], dumped: Sequence[str]
) -> tuple[list[StepNode], list[StepNode]]:
    """The steps to run, and the forward steps left out: nothing reads their fields, and they cost a model.

    `private`: steps of single workers, which read too. `dumped`: fields or patterns that owners write to disk.
    """
    kept, unread = list(steps), list[StepNode]()
    kept = [_without_filtered(node, (*kept, *private), dumped) for node in kept]
    while True:
        found = [node for node in kept if node.role == "forward" and not _is_read(node, (*kept, *private), dumped)]
        if not found:
            return kept, unread
        kept = [node for node in kept if node not in found]
        unread += found


def _without_filtered(node: StepNode, steps: Sequence[StepNode], dumped: Sequence[str]) -> StepNode:
    """The step; a generate step without the log-probs under its filters, unless something reads them."""
    field = prefixed(FILTERED, node.prefix)
    leaves = node.role == "generate" and field in _unread(node, steps, dumped)
    return replace(node, unread=(field,)) if leaves else node


def refuse_unread(
    steps: Sequence[StepNode], private: Sequence[StepNode], dumped: Sequence[str], problems: Problems
) -> None:
    """Refuse fields that clients write and nothing reads: training would wait for them, and for nothing."""
    for node in (node for node in steps if node.role == "client"):
        for field in _unread(node, (*steps, *private), dumped):
            message = f"has clients write {field!r}, which no step reads and no dump has, and training waits for it"
            hint = f"remove it, or dump it: run.dump_rollouts=1, and {field} in run.dump_fields if that is given"
            problems.add(f"flow.steps.{node.name}.with.writes", message, hint)


def _is_read(node: StepNode, steps: Sequence[StepNode], dumped: Sequence[str]) -> bool:
    """Whether anything reads a field of a step; also if it writes none, since then it is there for something else."""
    return not node.writes or len(_unread(node, steps, dumped)) < len(node.writes)


def _unread(node: StepNode, steps: Sequence[StepNode], dumped: Sequence[str]) -> list[str]:
    """The fields of a step that nothing reads."""
    read = [*DUMPED, *dumped, *(field for other in steps if other is not node for field in other.reads)]
    return [
        field for field in node.writes if not written(field, read) and not any(written(name, [field]) for name in read)
    ]


def left_out_notes(
    unread: Sequence[StepNode], steps: Collection[str], pools: Collection[str], layout: LayoutConfig
) -> Iterator[str]:
    """Notes on forward steps, on names of steps that are not among those of the flow (`steps`), and on pools."""
    for node in unread:
        yield f"step {node.name!r} is left out: nothing reads {', '.join(node.writes)}"
    for name, pool in layout.pools.items():
        for step in pool.steps:
            if step not in steps and step in shipped_steps():
                yield f"layout.pools.{name}.steps names {step!r}, which this flow lacks"
        if name not in pools:
            why = "no validation generates" if VALIDATE in pool.roles else "no step of the flow runs on it"
            yield f"pool {name!r} is left out: {why}"
