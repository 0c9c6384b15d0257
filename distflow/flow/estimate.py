"""Estimates how much memory each worker will hold, phase by phase, from the sizes of its models.

What is always held follows from the number of parameters. What a backward pass holds besides follows from what autograd
keeps of a Llama-like layer, and from the logits, which are the peak with a large vocabulary. `benchmarks/memory.py`
compares it with real workers. Generation is estimated at its bounds: all slots, each with the longest prompt and
response.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from typing import Any

from distflow.config.plugins import BACKENDS, ENGINES
from distflow.config.schema import ModelConfig
from distflow.errors import UserError
from distflow.flow.adapters import shares_base
from distflow.flow.memory import (
    ASSUMED_GPU,
    MIB,
    STEPS_OF_ROWS,
    cache_bytes,
    engine_width,
    group_bytes,
    kept_cache,
    link_bytes,
    rows_bytes,
    staged_bytes,
)
from distflow.flow.plan import Plan, WorkerPlan
from distflow.flow.sizes import PUBLISHED, WIDE, ModelSize, model_size
from distflow.parts import PartSize
from distflow.types import SHIFTING, departing

PROCESS = 320 * MIB
"""Host memory of the interpreter with PyTorch and transformers, per worker."""
LIBRARY_BYTES = 224 * MIB
"""The part of it that workers forked from one process share; 30 to 60 MiB of the rest are taken before any model."""
GPU_PROCESS = 512 * MIB
"""Memory that the driver takes on a GPU per worker; 400 to 600 MiB on an A100 or H100."""
LOGITS_CHUNK = 1 << 26
"""Logits held at once; more are computed in chunks, and again in the backward pass."""
LOGIT_BYTES = 20
"""Further bytes per logit in the backward pass: scaled, probabilities, gradients, in float32."""
DRAWN_BYTES = 32
"""Further bytes per logit when tokens are sampled, in float64."""
SHIFTED_BYTES = 42
"""The same where some samples have their logits shifted: what is kept of each slot, and copies."""
REORDERED_FROM = 1 << 16
"""Elements of a matrix from which the torch engine keeps a copy on a CPU (`workers/engines/kernels.py`)."""
ZERO_BUCKET = 50_000_000
"""Gradient elements that DeepSpeed gathers before it sums them (`reduce_bucket_size`)."""


@dataclass(frozen=True, slots=True)
class Estimate:
    """The memory of one worker, in bytes; 0 for what it does not hold."""

    worker: str
    weights: int = 0
    """Weights of all models for training, frozen ones too."""
    gradients: int = 0
    optimizer: int = 0
    """Moments and masters."""
    engine: int = 0
    """The engine's copy of the weights."""
    kv: int = 0
    gathered: int = 0
    """A whole model from which an engine in the same process reads each version: if the model is divided or offloaded,
    as its weights then stay until the engine has them."""
    drawing: int = 0
    """Further memory for sampling tokens."""
    activations: int = 0
    logits: int = 0
    held: int = 0
    """What models and engine hold on the device before the first sample."""
    generating: int = 0
    """Everything on the device while it generates."""
    training: int = 0
    """Everything on the device while it trains."""
    host: int = 0
    """Always in the host's memory: the process, samples, and what is kept there or offloaded from a GPU."""
    loading: int = 0
    """The peak of the host's memory while models are loaded, before they are divided or moved to their device."""
    samples: int = 0
    """The part of `host` that is reserved for results, or for rows."""
    shared: int = 0
    """Published weights in shared memory, shared by the workers of one host."""
    unknown: str = ""
    """Why there is no estimate, if there is none."""

    @property
    def device(self) -> int:
        """The larger of the two phases."""
        return max(self.generating, self.training)


@dataclass(frozen=True, slots=True)
class Tokens:
    """The most tokens of one micro-batch."""

    computed: int
    """Tokens through the layers; shared prompts count once if the model packs them."""
    scored: int
    """Response tokens, which have logits."""
    attended: int
    """Keys in attention, where each row has its own copy of a shared prompt."""


def estimate(plan: Plan, worker: WorkerPlan, *, on_gpu: bool, gpu_bytes: int = ASSUMED_GPU) -> Estimate:
    """Estimate one worker of the plan, with its models on a GPU of `gpu_bytes`, or in the host's memory."""
    try:
        sizes = {name: model_size(plan.recipe.models[name]) for name in _named(plan, worker)}
    except UserError as error:
        return Estimate(str(worker.name), unknown=str(error))
    held = _models(plan, worker, sizes)
    engine = _engine(plan, worker, sizes, gpu=gpu_bytes if on_gpu else None)
    work = _training_work(plan, worker, sizes)
    away = _kept_away(worker)
    here = {what: 0 if what in away else size for what, size in held.items()}
    models, engines = sum(here.values()), engine["engine"] + engine["kv"]
    elsewhere = sum(held.values()) - models
    handed_over = [name for name in worker.generates if name in worker.models]
    gathered = sum(_published(worker, sizes[name], on_gpu=on_gpu) for name in handed_over)
    generating, training = _phases(
        worker, models, here["gradients"], engines, engine["drawing"], sum(work.values()), gathered, on_gpu=on_gpu
    )
    samples = _samples(plan, worker)
    processes = PROCESS * (2 if worker.generates and worker.environments == "process" else 1)
    moved = models + kept_cache(plan, worker, engine["kv"]) if worker.offload and on_gpu else 0
    staged = sum(staged_bytes(worker, sizes[name]) for name in worker.generates)
    beside = link_bytes(plan, worker, sizes) + _copied(plan, worker, sizes)
    return Estimate(
        worker=str(worker.name),
        weights=held["weights"],
        gradients=held["gradients"],
        optimizer=held["optimizer"],
        engine=engine["engine"],
        kv=engine["kv"],
        gathered=gathered,
        drawing=engine["drawing"],
        activations=work["activations"],
        logits=work["logits"],
        held=models + engine["engine"],
        generating=generating + (GPU_PROCESS if on_gpu and generating else 0),
        training=training + (GPU_PROCESS if on_gpu and training else 0),
        host=processes + samples + elsewhere + moved + staged + beside,
        samples=samples,
        loading=processes + staged + _loading(plan, worker, sizes, on_gpu=on_gpu),
        shared=_shared(plan, sizes),
    )


def _named(plan: Plan, worker: WorkerPlan) -> set[str]:
    """The models that a worker's memory depends on."""
    published = (edge.model for edge in plan.edges if edge.kind == "weights")
    return {*worker.models, *worker.generates, plan.primary, *(name for name in published if name is not None)}


def _models(plan: Plan, worker: WorkerPlan, sizes: Mapping[str, ModelSize]) -> dict[str, int]:
    """What the backend holds between micro-batches."""
    held = {"weights": 0, "gradients": 0, "optimizer": 0}
    replicas = _replicas(plan, worker)
    for name in worker.models:
        if shares_base(plan.recipe.models, worker.models, plan.trained_models, name) is not None:
            continue
        for what, size in _model(worker, sizes[name], replicas, trained=name in plan.trained_models).items():
            held[what] += size
    return held


def _replicas(plan: Plan, worker: WorkerPlan) -> int:
    """Over how many workers a backend of this one may divide its models."""
    pool = plan.pool(worker.name.pool)
    return pool.count if pool.homes else 1


def _model(worker: WorkerPlan, size: ModelSize, replicas: int, *, trained: bool) -> dict[str, int]:
    count, wide = size.trained, max(WIDE, size.dtype_bytes)
    base = size.held if trained and size.adapters else 0
    masters = count * wide if size.dtype_bytes < WIDE else 0
    stage = _zero(worker)
    if worker.backend == BACKENDS["fsdp"]:
        rows = (base + count * wide if trained else size.held) // replicas
        # The float32 rows serve as masters.
        share = count * wide // replicas
        return {"weights": rows} | ({"gradients": share, "optimizer": 2 * share} if trained else {})
    weights = (size.held + (size.published if base else 0)) // (replicas if stage == 3 else 1)
    if not trained:
        return {"weights": weights}
    if stage is None or stage == 0:
        return {"weights": weights, "gradients": count * wide, "optimizer": size.moments + masters}
    bucket = min(count, ZERO_BUCKET) * WIDE
    gradients = count * WIDE if stage == 1 else count * WIDE // replicas + bucket
    # Masters even for float32: they are one vector, separate from the parameters.
    return {"weights": weights, "gradients": gradients, "optimizer": 3 * count * WIDE // replicas}


def _kept_away(worker: WorkerPlan) -> tuple[str, ...]:
    """What the backend always keeps in the host's memory, wherever it computes."""
    options = _options(worker)
    if worker.backend == BACKENDS["fsdp"] and options["cpu_offload"]:
        return ("weights", "gradients", "optimizer")
    return ("optimizer",) if worker.backend == BACKENDS["deepspeed"] and options["offload_optimizer"] else ()


def _options(worker: WorkerPlan) -> Mapping[str, Any]:
    defaults = {"zero": 2, "offload_optimizer": False, "cpu_offload": False, "packed": True}
    return {**defaults, **worker.backend_options}


def _zero(worker: WorkerPlan) -> int | None:
    """The ZeRO stage of backend deepspeed; None for other backends."""
    stage = _options(worker)["zero"]
    # The options themselves are checked elsewhere.
    return (stage if isinstance(stage, int) else 2) if worker.backend == BACKENDS["deepspeed"] else None


def _longest(plan: Plan, model: str) -> tuple[int, int]:
    """Tokens of the longest prompt and the longest response on which a model is trained: its own, if it generates."""
    longest = plan.recipe.data.max_prompt_tokens
    generates = any(step.model == model for step in plan.further_generation)
    return longest, plan.longest_sample(model if generates else plan.primary) - longest


def _engine(plan: Plan, worker: WorkerPlan, sizes: Mapping[str, ModelSize], *, gpu: int | None) -> dict[str, int]:
    """The weights of all engines, their caches at the bounds, and memory to sample a token for all slots."""
    found = {"engine": 0, "kv": 0, "drawing": 0}
    for model in worker.generates:
        for what, size in _engine_of(plan, worker, model, sizes[model], gpu=gpu).items():
            found[what] += size
    return found


def _engine_of(plan: Plan, worker: WorkerPlan, model: str, size: ModelSize, *, gpu: int | None) -> dict[str, int]:
    """The same of one engine, on each device. On a CPU the torch engine keeps a copy of the weights in the layout of
    the kernels.
    """
    own = worker.engine == ENGINES["torch"]
    reorders = own and size.gated and gpu is None and size.dtype_bytes <= WIDE
    large = size.width * size.feed_forward >= REORDERED_FROM
    given = [step.settings for step in plan.steps if step.role == "generate" and step.model == model]
    given += [plan.val.settings] if plan.val is not None and model == plan.primary else []
    shifted = SHIFTED_BYTES if any({*SHIFTING} & {*departing(settings)} for settings in given) else 0
    return {
        # Versions are made from the base of what adapters change; other engines have it in the host's memory.
        "engine": size.weights * (2 if reorders and large else 1) // engine_width(worker, on_gpu=gpu is not None)
        + (size.adapted * size.dtype_bytes if own else 0),
        "kv": cache_bytes(plan, worker, model, size, gpu=gpu),
        "drawing": worker.slots * size.vocabulary * (size.dtype_bytes + (DRAWN_BYTES + shifted if own else WIDE)),
    }


def _phases(
    worker: WorkerPlan,
    models: int,
    gradients: int,
    engines: int,
    drawing: int,
    working: int,
    gathered: int,
    *,
    on_gpu: bool,
) -> tuple[int, int]:
    """What is on the device while the worker generates, and while it trains."""
    if not worker.generates or not worker.models:
        return engines + drawing if worker.generates else 0, models + working if worker.models else 0
    if worker.offload and on_gpu:
        # What the engine reads from is assembled after the backward pass, and freed before a token is sampled.
        whole = gathered if divides(worker) else 0
        return engines + max(drawing, gathered), models + max(working, whole)
    # Gradients live from the first micro-batch to the optimizer step. On a CPU only the engine is offloaded.
    beside = 0 if worker.offload else engines
    return engines + drawing + models - gradients + gathered, models + working + gathered + beside


def _copied(plan: Plan, worker: WorkerPlan, sizes: Mapping[str, ModelSize]) -> int:
    """The copy of this replica's state that checkpoints are written from; none if only the last one is written."""
    run = plan.recipe.run
    if not (run.save_every or run.hf_every or run.save_every_s is not None):
        return 0
    trained = (name for name in worker.models if name in plan.trained_models)
    return sum(state_bytes(sizes[name]) for name in trained) // _replicas(plan, worker)


def state_bytes(size: ModelSize) -> int:
    """Bytes of a trained model in a checkpoint: weights, moments, and masters of narrower weights."""
    wide = max(WIDE, size.dtype_bytes)
    masters = wide if size.dtype_bytes < wide else 0
    return size.trained * (size.dtype_bytes + masters) + size.moments


def _published(worker: WorkerPlan, size: ModelSize, *, on_gpu: bool) -> int:
    """What an engine in the same process reads a version from, if that is not the model itself."""
    return size.published if divides(worker) or (worker.offload and on_gpu) else 0


def _loading(plan: Plan, worker: WorkerPlan, sizes: Mapping[str, ModelSize], *, on_gpu: bool) -> int:
    """Models that are whole in the host's memory at once: those that will be divided, and the largest other one.

    A new model is initialised in float32; rows that will be masters are float32 before they are divided.
    """
    divided = other = 0
    for name in worker.models:
        size, new = sizes[name], plan.recipe.models[name].init is not None
        masters = worker.backend == BACKENDS["fsdp"] and name in plan.trained_models and not size.adapters
        whole = size.parameters * max(size.dtype_bytes, WIDE if new or masters else 0)
        if divides(worker):
            divided += whole
        elif on_gpu:
            other = max(other, whole)
        else:
            other = max(other, whole + size.weights if whole > size.weights else whole)
    if worker.engine == ENGINES["torch"]:
        other = max([other, *(sizes[name].weights for name in worker.generates)])
    return divided + other


def micro_batch(plan: Plan, worker: WorkerPlan, model: str, size: ModelSize) -> Tokens:
    """The tokens of a model's micro-batch under `batch.tokens_per_microbatch`, as the model computes them."""
    prompt, new = _longest(plan, model)
    batch = plan.batch
    if packs(worker, size):
        all_rows = _whole(_most_rows(plan), batch.samples_per_prompt, prompt, new)
        budget = min(batch.tokens_per_microbatch, all_rows.tokens(packs=True))
        rows = max(1, min(all_rows.rows, budget // new))
        part = _whole(rows, batch.samples_per_prompt, prompt, new)
        # Prompts of a single token leave the most to responses.
        scored = max(new, min(all_rows.rows * new, budget - part.prompts))
        return Tokens(max(prompt + new, budget), scored, rows * part.longest if part.fits_masks else budget)
    rows, length = _fullest(plan, prompt + new)
    answers, answer = _fullest(plan, 1 + new)
    return Tokens(rows * length, answers * (answer - 1), rows * length)


def packs(worker: WorkerPlan, size: ModelSize) -> bool:
    """Tell whether the worker's backend packs the rows of a model."""
    return size.packs and worker.backend in BACKENDS.values() and bool(_options(worker)["packed"])


def _most_rows(plan: Plan) -> int:
    return -(-plan.batch.samples // len(plan.owners))


def _whole(rows: int, samples: int, prompt: int, new: int) -> PartSize:
    """So many rows of the greatest length."""
    groups = -(-rows // samples)
    return PartSize(rows, groups, groups * prompt + rows * new, prompt, new, prompt + new)


def _fullest(plan: Plan, longest: int) -> tuple[int, int]:
    """Rows, and the length of each, of a micro-batch that is as full as rows of at most `longest` tokens can make it.

    The budget divided by the longest row is how many there are: one more, each a little shorter, leaves less of it.
    """
    most, budget = _most_rows(plan), plan.batch.tokens_per_microbatch
    rows = min(most, max(1, budget // longest))
    more = min(most, rows + 1)
    return max((rows, longest), (more, min(longest, budget // more)), key=prod)


def _training_work(plan: Plan, worker: WorkerPlan, sizes: Mapping[str, ModelSize]) -> dict[str, int]:
    """What the backward pass of the largest micro-batch takes besides what is held."""
    work = {"activations": 0, "logits": 0}
    for name in worker.models:
        size = sizes[name]
        tokens = micro_batch(plan, worker, name, size)
        trained = name in plan.trained_models
        layers = _activations(size, tokens, plan.recipe.models[name], trained=trained)
        work["activations"] = max(work["activations"], layers + _gathered(worker, size))
        at_once = min(tokens.scored * size.outputs, LOGITS_CHUNK)
        # Gradients of the embeddings and of the output layer, before they are accumulated.
        head = (size.vocabulary + size.outputs) * size.width * size.dtype_bytes if trained and not size.adapters else 0
        work["logits"] = max(work["logits"], at_once * (size.dtype_bytes + LOGIT_BYTES) + head)
    return work


def _activations(size: ModelSize, tokens: Tokens, model: ModelConfig, *, trained: bool) -> int:
    """What autograd keeps of each layer: inputs of norms, projections, attention and gated feed-forward."""
    kept = 6 * size.width + 4 * size.query + 4 * size.key_value + 4 * size.active
    # Norms compute in float32.
    layer = tokens.computed * (kept * size.dtype_bytes + (2 * WIDE * size.width if size.dtype_bytes < WIDE else 0))
    # On a GPU, keys and values of shared prompts are laid out for each query head.
    layer += max(0, tokens.attended - tokens.computed) * 2 * size.query * size.dtype_bytes
    if not trained:
        return layer
    # The backward pass of a layer briefly needs as much again.
    if model.gradient_checkpointing:
        return 2 * layer + size.layers * tokens.computed * size.width * size.dtype_bytes
    return layer * (size.layers + 1)


def _gathered(worker: WorkerPlan, size: ModelSize) -> int:
    """Parts of a divided model that are whole while they are computed: embeddings, two layers, and their gradients."""
    if not divides(worker):
        return 0
    embeddings = size.vocabulary * size.width
    return 2 * size.dtype_bytes * (embeddings + 2 * (size.parameters - embeddings) // size.layers)


def divides(worker: WorkerPlan) -> bool:
    """Whether the weights themselves are divided over the training workers."""
    return worker.backend == BACKENDS["fsdp"] or _zero(worker) == 3


def divides_gradients(worker: WorkerPlan) -> bool:
    """Whether each micro-batch exchanges weights or gradients that the training workers have divided among them."""
    return divides(worker) or _zero(worker) == 2


def _samples(plan: Plan, worker: WorkerPlan) -> int:
    """What is reserved for results and rows, up to what can be leased, or be ahead, at once."""
    prompt, new = plan.recipe.data.max_prompt_tokens, plan.response_tokens
    if str(worker.name) not in plan.owners:
        sizes = (rows_bytes(plan.recipe, plan.edges, plan.edge(port.edge), new) for port in worker.port("receives"))
        return sum(min(worker.sample_memory_mb * MIB, STEPS_OF_ROWS * size) for size in sizes)
    ahead = 1 + (plan.batch.max_staleness or 0)
    groups = -(-plan.batch.prompts * ahead // len(plan.owners))
    largest = group_bytes(plan.batch.samples_per_prompt, prompt, new, plan.later_bytes)
    return min(worker.sample_memory_mb * MIB, groups * largest)


def _shared(plan: Plan, sizes: Mapping[str, ModelSize]) -> int:
    """Published weights, of the models that other workers read."""
    read = {e.model for e in plan.edges if e.kind == "weights" and e.source != e.target}
    return sum(PUBLISHED * sizes[name].published for name in read if name is not None)
