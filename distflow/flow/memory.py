"""Memory that workers reserve in advance: an owner for results, an engine for keys and values.

The plan refuses an owner with too little memory for results, and the lease protocol reserves by the same numbers.
"""

from __future__ import annotations

from distflow.config.plugins import ENGINES
from distflow.config.schema import Recipe
from distflow.errors import Problems
from distflow.flow.gpus import width
from distflow.flow.plan import Plan, WorkerPlan
from distflow.flow.sizes import ModelSize
from distflow.flow.structure import Structure

BYTES_PER_TOKEN = 48
"""Of a result, all fields of a response or prompt token together: ids, log-prob, mask, text; generous."""
BYTES_PER_SAMPLE = 1024
"""Of a result, beside its tokens: identity, rewards, spans, the task's text."""
MIB = 1 << 20
LEAST_FRAME_BYTES = 64 * MIB
FRAME_FACTOR = 4
"""Room for fields that a user's steps write."""
LEAST_MIB, MOST_MIB = 256, 8192
"""Bounds of what is set aside by default; a single training step may need more."""
UNBOUNDED_STEPS = 2
"""Training steps that are provided for where staleness has no bound."""

GIB = 1 << 30
ASSUMED_GPU = 80 * GIB
"""Memory of a GPU that cannot be seen where the plan is made."""
SHARES = {ENGINES["sglang"]: 0.88, ENGINES["vllm"]: 0.9}
"""Of a GPU's memory, what an engine takes for weights and cache where the recipe does not say."""


def group_bytes(samples: int, prompt_tokens: int, new_tokens: int) -> int:
    """Upper bound of the bytes of one group's result, by the length of its prompt."""
    return samples * (BYTES_PER_SAMPLE + BYTES_PER_TOKEN * (prompt_tokens + new_tokens))


def frame_bytes(recipe: Recipe, new_tokens: int) -> int:
    """The largest part of a message that a worker accepts: several times what a group or a micro-batch may take."""
    largest = group_bytes(recipe.batch.samples_per_prompt, recipe.data.max_prompt_tokens, new_tokens)
    return max(
        LEAST_FRAME_BYTES, FRAME_FACTOR * largest, FRAME_FACTOR * BYTES_PER_TOKEN * recipe.batch.tokens_per_microbatch
    )


def step_bytes(recipe: Recipe, training_pool: str, new_tokens: int) -> int:
    """What the results of one training step may take at one owner, all of them of the longest samples."""
    batch = recipe.batch
    largest = group_bytes(batch.samples_per_prompt, recipe.data.max_prompt_tokens, new_tokens)
    # Those that are left after a loss share all ledgers.
    owners = 1 if recipe.layout.on_failure == "shrink" else recipe.layout.pools[training_pool].count
    return largest * (batch.prompts // batch.ledgers) * -(-batch.ledgers // owners)


def sample_memory_mb(recipe: Recipe, training_pool: str, new_tokens: int) -> int:
    """By default: for all that `max_staleness` lets through, as far as that is not too much; in MiB."""
    staleness = recipe.layout.max_staleness
    steps = UNBOUNDED_STEPS if staleness == "unbounded" else min(1 + staleness, recipe.run.training_steps)
    one = -(-step_bytes(recipe, training_pool, new_tokens) // MIB)
    return max(LEAST_MIB, one, min(one * steps, MOST_MIB))


def check_sample_memory(recipe: Recipe, structure: Structure, problems: Problems) -> None:
    """Refuse a training worker that cannot hold the largest groups of one training step."""
    training_pool = structure.placement.training
    new_tokens = [node.settings["max_new_tokens"] for node in structure.steps if node.role == "generate"]
    if not all(isinstance(count, int) for count in new_tokens):
        return  # reported where the setting is checked
    pool, batch = recipe.layout.pools[training_pool], recipe.batch
    needed = -(-step_bytes(recipe, training_pool, max(new_tokens)) // MIB)
    if pool.sample_memory_mb is None or pool.sample_memory_mb >= needed:
        return
    largest = group_bytes(batch.samples_per_prompt, recipe.data.max_prompt_tokens, max(new_tokens))
    message = (
        f"{pool.sample_memory_mb} MiB are too little for one training step: {batch.prompts} groups of up to "
        f"{largest / MIB:.2f} MiB, shared by {pool.count} training worker(s)"
    )
    cure = f"at least {needed}, or lower max_new_tokens, data.max_prompt_tokens or batch.prompts"
    problems.add(f"layout.pools.{training_pool}.sample_memory_mb", message, cure)


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
