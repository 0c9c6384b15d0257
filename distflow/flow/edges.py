"""Edges: which fields cross from one pool to another, over which lane, and which of them are dumped."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from distflow.config.schema import Recipe
from distflow.flow.graph import StepNode
from distflow.flow.role_placement import Placement
from distflow.types import REWARD_PARTS, written

DUMPED = (
    "uid",
    "group",
    "sample",
    "prompt_text",
    "response_text",
    "response_ids",
    "response_mask",
    "finish_reason",
    "policy_versions",
    "reward",
    "score",
)
"""Fields that the owner always writes to rollouts/."""
REWARDS = f"{REWARD_PARTS}*"

_OURS = "distflow."
_GENERATED = ("prompt_ids", "task", "rollout_logprobs")
"""Fields that every generate step writes: dumped only when asked for."""
_DROP_REASON = "drop_reason"
"""Never dumped: samples in the dumps were not dropped."""


@dataclass(frozen=True, slots=True)
class Edge:
    """Samples on their way from one pool to another."""

    name: str
    source: str
    target: str
    fields: tuple[str, ...]
    """Only fields that are read on the other side or dumped; may hold the pattern `rewards/*`."""
    fills: Mapping[str, float]
    """Fields that only some workers write, with the value that the others send."""
    lane: Literal["inproc", "zmq"]


def sample_edge(placement: Placement, fills: Mapping[str, float], dumped: Sequence[str] = ()) -> Edge:
    """The edge `samples`, from the generating to the training pool. `dumped`: further fields that the owner writes."""
    there = [*dict.fromkeys(field for node in placement.before for field in node.writes), *fills]
    read = {field for node in placement.after for field in node.reads}
    wanted = {*read, *DUMPED, *(field for field in there if written(field, dumped) or _meant(field, dumped))}
    fields = [field for field in there if field in wanted]
    fields += [field for field in sorted(read) if field not in fields and written(field, there)]
    if any(node.role == "score" for node in placement.before):
        fields.append(REWARDS)
    kept = {field: value for field, value in fills.items() if written(field, fields)}
    lane: Literal["inproc", "zmq"] = "inproc" if placement.generating == placement.training else "zmq"
    return Edge("samples", placement.generating, placement.training, tuple(dict.fromkeys(fields)), kept, lane)


def _meant(pattern: str, names: Sequence[str]) -> bool:
    """Whether a step that writes by a pattern may write one of these."""
    return any(written(name, [pattern]) for name in names)


def dump_fields(recipe: Recipe, steps: Iterable[StepNode]) -> tuple[str, ...]:
    """Names or patterns (`stats/*`) of further fields in the dumps: by default what the user's own steps write."""
    if not recipe.run.dump_rollouts:
        return ()
    wanted = recipe.run.dump_fields
    if wanted is None:
        own = (node for node in steps if not node.declaration.call.startswith(_OURS))
        wanted = [field for node in own for field in node.writes if field not in _GENERATED]
    kept = [name for name in wanted if not _always(name)]
    return tuple(dict.fromkeys(kept))


def _always(name: str) -> bool:
    return name in DUMPED or name.startswith(REWARD_PARTS) or name == _DROP_REASON
