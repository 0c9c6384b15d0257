"""Steps of single workers or pools (`steps: [+./bonus.py:novelty]`), which no other worker needs to know."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from distflow.config.schema import LayoutConfig, StepConfig
from distflow.errors import Problems
from distflow.flow.graph import StepNode, read_step
from distflow.flow.resolve import split_call

EVERY = ""
"""Key of steps of all workers of a pool."""


@dataclass(frozen=True, slots=True)
class PrivateSteps:
    """Steps by pool and worker index (as text; EVERY: the whole pool)."""

    by_worker: Mapping[tuple[str, str], tuple[StepNode, ...]]

    def of(self, pool: str, index: int) -> tuple[StepNode, ...]:
        """The private steps of one worker."""
        keys = [(pool, EVERY), (pool, str(index))]
        return tuple(node for key in keys if key in self.by_worker for node in self.by_worker[key])

    @property
    def all(self) -> list[StepNode]:
        """The private steps of all workers."""
        return [node for nodes in self.by_worker.values() for node in nodes]

    @property
    def fills(self) -> dict[str, float]:
        """The fields that they write, with the value for workers without the step."""
        return {f: v for nodes in self.by_worker.values() for n in nodes for f, v in n.declaration.spec.fills.items()}


def read_private_steps(layout: LayoutConfig, problems: Problems) -> PrivateSteps:
    """Read all private steps of pools and workers."""
    found: dict[tuple[str, str], tuple[StepNode, ...]] = {}
    for pool, config in layout.pools.items():
        key = f"layout.pools.{pool}"
        found[pool, EVERY] = _read([s for s in config.steps if s.startswith("+")], f"{key}.steps", problems)
        for index, worker in config.each.items():
            own = f"{key}.each.{index}"
            if not (index.isdecimal() and int(index) < config.count):
                message = f"pool {pool!r} has no worker {index!r}"
                problems.add(own, message, f"expected 0 to {config.count - 1}")
            wrong = [s for s in worker.steps if not s.startswith("+")]
            for name in wrong:
                hint = "write a step of its own as +./file.py:name; shared steps are placed by the pool"
                problems.add(f"{own}.steps", f"{name!r} does not begin with +", hint)
            found[pool, index] = _read([s for s in worker.steps if s not in wrong], f"{own}.steps", problems)
    return PrivateSteps({key: nodes for key, nodes in found.items() if nodes})


def _read(calls: Sequence[str], key: str, problems: Problems) -> tuple[StepNode, ...]:
    nodes = []
    for call in calls:
        name = split_call(call[1:])[1] if ":" in call else call[1:]
        node = read_step(name, StepConfig(call=call[1:]), key, problems)
        if node is None:
            continue
        spec = node.declaration.spec
        unfilled = [field for field in node.writes if field not in spec.fills]
        if unfilled:
            message = f"step {name!r} writes {', '.join(unfilled)} without a fill value for workers that lack the step"
            hint = f"declare @step(…, fills={{{unfilled[0]!r}: 0.0}})"
            problems.add(key, message, hint)
        if node.role not in ("score", "forward"):
            hint = "a worker's own steps have the role score or forward"
            problems.add(key, f"step {name!r} has the role {node.role!r}", hint)
        nodes.append(node)
    return tuple(nodes)
