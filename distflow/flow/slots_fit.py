"""How many samples an engine has memory for, beside the slots that it is given: their keys and values take most of it.

Only of engines that keep to a share of their GPUs: the cache of others is as large as their slots need. They go on with
more samples than fit at their longest, since most are shorter; where all room is taken, a sample waits, or loses what
it has and computes it again.
"""

from __future__ import annotations

from dataclasses import dataclass

from distflow.errors import UserError
from distflow.flow.gpus import width
from distflow.flow.memory import ASSUMED_GPU, cache_room
from distflow.flow.plan import Plan, WorkerPlan
from distflow.flow.sizes import model_size


@dataclass(frozen=True, slots=True)
class SlotsFit:
    """Slots of an engine, and its memory for keys and values."""

    slots: int
    tokens: int
    """That the memory is for."""
    longest: int
    """Tokens of the longest sample, prompt included."""

    def samples(self, tokens: float) -> int:
        """How many samples of so many tokens it is for."""
        return int(self.tokens // max(1.0, tokens))

    @property
    def of_longest(self) -> str:
        """How many of the longest samples it is for, in words."""
        return f"KV memory for {self.samples(self.longest)} samples of {self.longest:,} tokens"


def slots_fit(plan: Plan, worker: WorkerPlan, gpu_bytes: int = ASSUMED_GPU) -> SlotsFit | None:
    """Of a worker's engine on GPUs of this size; None: there is none of this kind, or its model's size is unknown."""
    if not worker.generates or worker.device == "cpu":
        return None
    model = plan.primary if plan.primary in worker.generates else worker.generates[0]
    try:
        size = model_size(plan.recipe.models[model])
    except UserError:
        return None
    room, longest = cache_room(worker, size, gpu_bytes), plan.engine_tokens(model)
    if room is None:
        return None
    return SlotsFit(worker.slots, room * width(worker) // size.kv_bytes, longest)
