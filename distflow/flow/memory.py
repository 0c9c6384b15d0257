"""Memory that workers reserve in advance: an owner for results, the home of a further model for rows, an engine for
keys and values.

The plan refuses too little memory for one training step, and the protocols reserve by the same numbers.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from distflow.config.plugins import ENGINES, LIBRARIES
from distflow.config.schema import PoolConfig, Recipe
from distflow.errors import Problems
from distflow.flow.edges import SAMPLES, Edge
from distflow.flow.gpus import width
from distflow.flow.graph import generate_settings
from distflow.flow.lanes import nixl_pools, parts_readers
from distflow.flow.plan import Plan, WorkerPlan
from distflow.flow.sizes import PARTS_KEPT, ModelSize
from distflow.flow.step import ROOM, SEQUENCES_A_SAMPLE, reserved_tokens, response_tokens, sample_tokens
from distflow.flow.structure import Structure
from distflow.flow.wiring import wire

BYTES_PER_TOKEN = 48
"""Upper bound for all fields of a prompt or response token in a result: ids, log-prob, mask, text, and a share of what
a row has besides, where samples have several."""
BYTES_PER_SAMPLE = 1024
"""Upper bound for the rest of a sample: identity, rewards, spans, the task's text."""
MIB = 1 << 20
LEAST_FRAME_BYTES = 64 * MIB
FRAME_FACTOR = 4
"""Leaves room for fields that a user's steps write."""
LEAST_MIB, MOST_MIB = 256, 8192
"""Bounds of the default reservation; a single training step may need more."""
UNBOUNDED_STEPS = 2
"""Training steps to provide for if staleness has no bound."""
STEPS_OF_ROWS = 3
"""Training steps whose rows a home may hold: the one that it trains on, and two that owners may be ahead."""

GIB = 1 << 30
NIXL_PROCESS = 128 * MIB
"""The process with NIXL, and the one that keeps it: 90 MB without RDMA cards."""
ASSUMED_GPU = 80 * GIB
"""Assumed memory of a GPU that is not visible where the plan is made."""


def group_bytes(samples: int, prompt_tokens: int, new_tokens: int, later: int = 0) -> int:
    """Upper bound of the bytes of one group's result, by the length of its prompt; `later`: see `later_bytes`."""
    return samples * (BYTES_PER_SAMPLE + BYTES_PER_TOKEN * (prompt_tokens + new_tokens) + later * new_tokens)


def later_bytes(recipe: Recipe, structure: Structure) -> int:
    """Bytes of a response token in the fields that a group gets at its owner while its memory is reserved.

    These are the answers of calls and, where the whole batch is kept until it is trained on, what the steps there
    write: taken for one value a token each, unless steps declare more (`widths`). What arrives with so many is counted
    here as well.
    """
    home = structure.home.name
    calls = [edge for edge in wire(structure) if edge.kind in ("call", "client") and edge.source == home]
    fields = {name for edge in calls if edge.when in ("on arrival", "in window") for name in edge.back}
    if not structure.streams(recipe):
        fields |= {name for node in structure.after_custody for name in node.writes}
    fields |= {name for node in structure.before_custody for name in node.widths}
    wide = structure.models.configs[structure.models.primary].dtype == "float64"
    return _values(fields, structure.widths) * (8 if wide else 4)


def _values(fields: Iterable[str], widths: Mapping[str, int]) -> int:
    """How many values these fields have for each token."""
    return sum(widths.get(field, 1) for field in fields)


def frame_bytes(plan: Plan) -> int:
    """The largest frame of a message that a worker accepts: several times the size of a group or a micro-batch."""
    recipe, val = plan.recipe, plan.val
    later = plan.later_bytes
    largest = group_bytes(recipe.batch.samples_per_prompt, recipe.data.max_prompt_tokens, plan.response_tokens, later)
    if val is not None:
        largest = max(largest, group_bytes(val.samples_per_prompt, val.data.max_prompt_tokens, val.sample_tokens))
    micro_batch = (BYTES_PER_TOKEN + later) * recipe.batch.tokens_per_microbatch
    return max(LEAST_FRAME_BYTES, FRAME_FACTOR * largest, FRAME_FACTOR * micro_batch)


def step_bytes(recipe: Recipe, training_pool: str, new_tokens: int, later: int) -> int:
    """Bytes of the results of one training step at one owner, if all samples are of the greatest length."""
    batch = recipe.batch
    largest = group_bytes(batch.samples_per_prompt, recipe.data.max_prompt_tokens, new_tokens, later)
    # With `shrink`, the workers that remain after a loss share all ledgers.
    owners = 1 if recipe.layout.on_failure == "shrink" else recipe.layout.pools[training_pool].count
    return largest * (batch.prompts // batch.ledgers) * -(-batch.ledgers // owners)


def rows_bytes(recipe: Recipe, edges: Sequence[Edge], edge: Edge, new_tokens: int) -> int:
    """Bytes of one training step's rows at one replica of a further model's home, if all samples are of the greatest
    length. `edge`: the one of kind rows by which they come.
    """
    batch, pools = recipe.batch, recipe.layout.pools
    # With `shrink`, one worker may remain.
    replicas = 1 if recipe.layout.on_failure == "shrink" else pools[edge.target].count
    samples = next(one for one in edges if one.name == SAMPLES)
    added = _values((field for field in edge.fields if field not in samples.fields), edge.widths)
    largest = group_bytes(batch.samples_per_prompt, recipe.data.max_prompt_tokens, new_tokens, 8 * added)
    # Each owner deals what streams in by itself, or all deal each mini-batch: what is left may go to the same replica.
    deals = max(pools[edge.source].count, batch.minibatches)
    return largest * ((batch.prompts + deals * (replicas - 1)) // replicas)


def consumer_bytes(plan: Plan) -> int:
    """Most bytes of samples that an owner keeps for one consumer of clients; steps that these write are none."""
    return plan.recipe.limits.consumer_mb * MIB


def rows_memory_mb(needed: int) -> int:
    """The default reservation for rows in MiB, if a training step takes `needed` bytes: one is trained on, and the
    next one arrives meanwhile, within bounds."""
    one = -(-needed // MIB)
    return max(LEAST_MIB, one, min(2 * one, MOST_MIB))


def sample_memory_mb(recipe: Recipe, training_pool: str, new_tokens: int, later: int) -> int:
    """The default reservation in MiB: for all that `max_staleness` permits, within bounds."""
    staleness = recipe.layout.max_staleness
    steps = UNBOUNDED_STEPS if staleness == "unbounded" else min(1 + staleness, max(1, recipe.run.training_steps))
    one = -(-step_bytes(recipe, training_pool, new_tokens, later) // MIB)
    return max(LEAST_MIB, one, min(one * steps, MOST_MIB))


def check_sample_memory(recipe: Recipe, structure: Structure, problems: Problems) -> None:
    """Refuse a training worker that cannot hold the largest groups, or rows, of one training step."""
    training_pool = structure.home.name
    generating = generate_settings(structure.steps)
    counts = [response_tokens(settings) for settings in generating if any(name in settings for name in ROOM)]
    if not all(isinstance(count, int) for count in counts) or len(counts) < len(generating):
        return  # reported where the setting is checked
    new_tokens = reserved_tokens(generating, recipe.data.max_prompt_tokens)
    _check_rows_memory(recipe, structure, new_tokens, problems)
    pool, batch = recipe.layout.pools[training_pool], recipe.batch
    later = later_bytes(recipe, structure)
    needed = -(-step_bytes(recipe, training_pool, new_tokens, later) // MIB)
    largest = group_bytes(batch.samples_per_prompt, recipe.data.max_prompt_tokens, new_tokens, later)
    room = _room(generating[0])
    for key, given in _memory_given(training_pool, pool):
        if given < needed:
            message = (
                f"sample_memory_mb {given} is too little for one training step: {batch.prompts} groups of up to "
                f"{largest / MIB:.2f} MiB, shared by {pool.count} training worker(s)"
            )
            hint = f"sample_memory_mb: at least {needed}, or lower {room}, data.max_prompt_tokens or batch.prompts"
            others = (f"layout.pools.{training_pool}.count", *_sizes(structure))
            problems.add(key, message, hint, others=others)


def _room(settings: Mapping[str, Any]) -> str:
    """Name the setting that bounds samples, as hints do."""
    if "max_tokens" not in settings:
        return next(name for name in ROOM if name in settings)
    most = f"{sample_tokens(settings)} now"
    own = settings["max_sample_tokens"] is not None
    return f"max_sample_tokens ({most if own else f'{most}, {SEQUENCES_A_SAMPLE} × max_tokens'})"


def _sizes(structure: Structure) -> list[str]:
    """Keys that say how much a training step is."""
    settings = [f"flow.steps.{node.name}.with" for node in structure.steps if node.role in ("generate", "read")]
    return [
        *(f"batch.{name}" for name in ("prompts", "samples_per_prompt", "ledgers", "minibatches")),
        "data.max_prompt_tokens",
        *(f"{key}.{name}" for key in settings for name in (*ROOM, "max_sample_tokens")),
    ]


def _check_rows_memory(recipe: Recipe, structure: Structure, new_tokens: int, problems: Problems) -> None:
    edges = wire(structure)
    for edge in edges:
        if edge.kind != "rows":
            continue
        pool = recipe.layout.pools[edge.target]
        needed = -(-rows_bytes(recipe, edges, edge, new_tokens) // MIB)
        for key, given in _memory_given(edge.target, pool):
            if given < needed:
                message = (
                    f"sample_memory_mb {given} is too little for the rows of one training step, on which "
                    f"{edge.model!r} is trained: up to {needed} MiB at each of {pool.count} worker(s)"
                )
                hint = f"sample_memory_mb: at least {needed}, or fewer or shorter samples"
                others = (f"layout.pools.{edge.target}.count", *_sizes(structure))
                problems.add(key, message, hint, others=others)


def _memory_given(name: str, pool: PoolConfig) -> Iterator[tuple[str, int]]:
    """What a recipe gives a pool, and single workers of it, by key, in MiB."""
    given = {f"layout.pools.{name}": pool.sample_memory_mb}
    given |= {f"layout.pools.{name}.each.{index}": own.sample_memory_mb for index, own in pool.each.items()}
    yield from ((f"{key}.sample_memory_mb", size) for key, size in given.items() if size is not None)


def engine_width(worker: WorkerPlan, *, on_gpu: bool) -> int:
    """GPUs over which the engine shards its model and cache; on a CPU the processes of a host hold them together."""
    return width(worker) if on_gpu else 1


def cache_bytes(plan: Plan, worker: WorkerPlan, model: str, size: ModelSize, *, gpu: int | None) -> int:
    """Bytes of the KV cache of one model on each device: for all slots with samples of the greatest length, or what the
    engine's share of the GPU leaves for it. vLLM always fills that share, SGLang if it is alone on the GPU.

    `gpu`: memory of the GPU; None: the cache is in the host's memory.
    """
    parts = engine_width(worker, on_gpu=gpu is not None)
    of_token = size.expanded_kv_bytes if worker.engine == ENGINES["torch"] else size.kv_bytes
    wanted = worker.slots * plan.engine_tokens(model) * of_token // parts
    given = _given_cache(worker)
    if given is not None:
        return given
    room = None if gpu is None else cache_room(worker, size, gpu)
    if room is None:
        return wanted
    return min(wanted, room) if worker.engine == ENGINES["sglang"] and worker.models else room


def cache_room(worker: WorkerPlan, size: ModelSize, gpu: int) -> int | None:
    """Bytes that the engine has for the cache on each of its GPUs of `gpu` bytes; None: as many as its slots need."""
    given, share = _given_cache(worker), gpu_share(worker)
    if given is not None or share is None:
        return given
    return max(0, int(share * gpu) - size.weights // engine_width(worker, on_gpu=True))


def _given_cache(worker: WorkerPlan) -> int | None:
    """What the engine's options say of its size in bytes, if anything."""
    name, options = "kv_cache_memory_bytes", worker.engine_options
    return int(options[name]) if name in options and options[name] is not None else None


def kept_cache(plan: Plan, worker: WorkerPlan, cache: int) -> int:
    """Bytes of the cache that move to the host's memory while the worker trains.

    SGLang and vLLM prefill open samples again instead, and at staleness 0 no sample is open then.
    """
    return cache if gpu_share(worker) is None and plan.batch.max_staleness != 0 else 0


def staged_bytes(worker: WorkerPlan, size: ModelSize) -> int:
    """Bytes of weights that SGLang and vLLM stage in the host's memory while they load them, and of the base of what
    adapters change."""
    return 0 if gpu_share(worker) is None else size.weights + size.adapted * size.dtype_bytes


def link_bytes(plan: Plan, worker: WorkerPlan, sizes: Mapping[str, ModelSize]) -> int:
    """What `weights.link` takes: with collective of a trainer's own part of a model, and of all of it at a reader; with
    nixl of its processes."""
    found = 0
    for model in plan.generating:
        readers, home = parts_readers(plan, model), plan.home_of(model)
        if readers and worker.name.pool == home.name:
            found += PARTS_KEPT * sizes[model].published // home.count
        elif worker.name.pool in readers:
            found += sizes[model].published
        found += NIXL_PROCESS * (worker.name.pool in nixl_pools(plan, model))
    return found


def gpu_share(worker: WorkerPlan) -> float | None:
    """Share of a GPU's memory that the engine takes for weights and cache; None: only what its slots need."""
    if worker.engine is None or worker.engine not in LIBRARIES:
        return None
    share = LIBRARIES[worker.engine].gpu_share
    for name in ("memory_fraction", "gpu_memory_utilization"):
        if name in worker.engine_options and worker.engine_options[name] is not None:
            return float(worker.engine_options[name])
    return share
