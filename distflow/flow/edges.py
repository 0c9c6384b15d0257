"""Edges of the plan, as data; which fields are dumped. `wiring.py` infers the edges from the steps."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from distflow.config.schema import RunConfig
from distflow.flow.graph import StepNode
from distflow.flow.step import FILTERED, ROLLOUT, SEQUENCES
from distflow.types import DROP_REASON, IDENTITY, LEFT_OUT, is_logged, is_reward_part, prefixed

EdgeKind = Literal["lease", "call", "client", "rows", "weights"]
"""lease: prompts there, groups back; call: one step for some rows; client: the same, by programs outside the run; rows:
what a further model is trained on; weights: versions of a model."""
End = Literal["holds", "owns", "asks", "answers", "collects", "sends", "receives", "publishes", "reads"]
"""What a worker is at one end of an edge: of leases, calls, rows and weights, first its source and then its target.
What clients write is collected by the owners, to whom both ends belong."""
ENDS: Mapping[EdgeKind, tuple[End, End]] = {
    "lease": ("holds", "owns"),
    "call": ("asks", "answers"),
    "client": ("collects", "collects"),
    "rows": ("sends", "receives"),
    "weights": ("publishes", "reads"),
}
SAMPLES, VAL_SAMPLES = "samples", "val_samples"
"""The lease edges to the owners; the second one is of a pool that generates for validation only."""
Asked = Literal["", "before custody", "on arrival", "in window"]
"""By the generating pool before it sends the samples; by owners when they arrive, or are in the open step's window."""
DUMPED = (
    "uid",
    "group",
    "sample",
    *SEQUENCES,
    "prompt_text",
    "response_text",
    "response_ids",
    "response_mask",
    "finish_reason",
    "policy_versions",
    LEFT_OUT,
    "reward",
    "score",
)
"""Fields that the owner always writes to rollouts/."""
_NOT_SHOWN = (*IDENTITY, "response_mask", "finish_reason")
"""Of these, what a line of the dumps says once a sample, or in its own way."""
_OURS = "distflow."
_GENERATED = ("prompt_ids", "task", ROLLOUT, FILTERED)
"""Fields that every generate step writes: dumped only when asked for."""


@dataclass(frozen=True, slots=True)
class Edge:
    """What one pool gives another, or two parts of the same pool each other."""

    name: str
    kind: EdgeKind
    source: str
    """A pool. lease: it generates; call: it asks; rows: it owns ledgers; weights: it is the model's home."""
    target: str
    fields: tuple[str, ...] = ()
    """What goes there, only fields that are read or dumped there; may hold patterns such as `rewards/*`."""
    back: tuple[str, ...] = ()
    """call: what comes back."""
    fills: Mapping[str, float] = field(default_factory=dict)
    """Fields that only some workers write, with the value that the others send."""
    model: str | None = None
    """weights: whose; call: the one that the step uses; rows: the one that is trained on them."""
    widths: Mapping[str, int] = field(default_factory=dict)
    """Of all these, fields with several values for each token, and how many."""
    steps: tuple[str, ...] = ()
    """lease: what runs, or is asked for, before the samples go; call: the step; rows: what trains on them."""
    when: Asked = ""
    """call: when it is asked."""
    version: Literal["", "frozen", "exact", "at least"] = ""
    """call: which version of the model answers."""
    reader: Literal["", "engine", "forward"] = ""
    """weights: what takes them."""
    compares: bool = False
    """lease: training compares the samples of a group with each other, and can do nothing with fewer than two."""
    baseline: bool = False
    """lease: one of the two may be a sample that is not trained on."""


def dump_fields(run: RunConfig, steps: Sequence[StepNode]) -> tuple[str, ...]:
    """Names or patterns (`stats/*`) of further fields in the dumps: by default what the user's own steps write.

    Those of further models' samples are always among them.
    """
    if not run.dump_rollouts:
        return ()
    wanted = run.dump_fields
    if wanted is None:
        own = (node for node in steps if node.role == "client" or not node.declaration.call.startswith(_OURS))
        wanted = [
            field
            for node in own
            for field in node.writes
            if field not in _GENERATED and field != prefixed(FILTERED, node.prefix)
        ]
    further = of_further_models((name for name in DUMPED if name not in _NOT_SHOWN), steps)
    kept = [name for name in (*further, *wanted) if not _always(name)]
    return tuple(dict.fromkeys(kept))


def of_further_models(fields: Iterable[str], steps: Iterable[StepNode]) -> list[str]:
    """These fields of the samples of further models that the steps generate with."""
    prefixes = [node.prefix for node in steps if node.generates_further]
    return [prefixed(field, prefix) for field in fields for prefix in prefixes]


def _always(name: str) -> bool:
    return name in DUMPED or is_reward_part(name) or is_logged(name) or name == DROP_REASON
