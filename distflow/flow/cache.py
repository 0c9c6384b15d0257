"""Keys and values of the engines here: how much each will hold, and where."""

from __future__ import annotations

from distflow.config.plugins import ENGINES
from distflow.flow.gpus import width
from distflow.flow.plan import Plan, WorkerPlan
from distflow.flow.sizes import ModelSize

GIB = 1 << 30
ASSUMED_GPU = 80 * GIB
"""Memory of a GPU that cannot be seen where the plan is made."""
SHARES = {ENGINES["sglang"]: 0.88, ENGINES["vllm"]: 0.9}
"""Of a GPU's memory, what an engine takes for weights and cache where the recipe does not say."""


def engine_width(worker: WorkerPlan, *, on_gpu: bool) -> int:
    """GPUs between which the engine shares its model and cache; processes of one host have them together."""
    return width(worker) if on_gpu else 1


def cache_bytes(plan: Plan, worker: WorkerPlan, size: ModelSize, *, gpu: int | None) -> int:
    """On each of its devices: for all slots, each with the longest sample; or what the engine's share leaves for it,
    which vLLM fills on a GPU in any case, and SGLang where it is alone there.

    `gpu`: memory of the GPU it is on; None: in the host's memory.
    """
    longest = plan.recipe.data.max_prompt_tokens + int(plan.generate_step.settings["max_new_tokens"])
    parts = engine_width(worker, on_gpu=gpu is not None)
    wanted = worker.slots * longest * size.kv_bytes // parts
    options = worker.engine_options
    if "kv_cache_memory_bytes" in options and options["kv_cache_memory_bytes"] is not None:
        return int(options["kv_cache_memory_bytes"])
    if gpu is None or worker.engine not in SHARES:
        return wanted
    left = max(0, int(_share(worker) * gpu) - size.weights // parts)
    return min(wanted, left) if worker.engine == ENGINES["sglang"] and worker.models else left


def kept_cache(plan: Plan, worker: WorkerPlan, cache: int) -> int:
    """Of that, what goes to the host's memory while the worker trains: SGLang and vLLM read samples again instead, and
    without staleness none is open then."""
    return cache if worker.engine not in SHARES and plan.batch.max_staleness != 0 else 0


def staged_bytes(worker: WorkerPlan, size: ModelSize) -> int:
    """Of weights, what engines of other projects have in the host's memory on their way in."""
    return size.weights if worker.engine in SHARES else 0


def _share(worker: WorkerPlan) -> float:
    for name in ("memory_fraction", "gpu_memory_utilization"):
        if name in worker.engine_options and worker.engine_options[name] is not None:
            return float(worker.engine_options[name])
    assert worker.engine is not None, "asked of SGLang and vLLM"
    return SHARES[worker.engine]
