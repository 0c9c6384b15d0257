"""What the workers of a host will take, roughly: enough to refuse what cannot work, not a promise that it will."""

from __future__ import annotations

from collections.abc import Iterable

from distflow.config.paths import looks_like_path
from distflow.config.schema import ModelConfig
from distflow.errors import UserError
from distflow.flow.estimate import PROCESS, WIDE, estimate
from distflow.flow.plan import Plan, WorkerPlan
from distflow.flow.sizes import PINNED, PUBLISHED, ModelSize, model_size
from distflow.launch.hosts.placing import Placing
from distflow.launch.hosts.preflight import Need

MIB = 1 << 20
RUN_FOLDER_BYTES = 64 * MIB
SAVED = 3
"""A checkpoint has two moments of each parameter, and itself."""


def needs_of(plan: Plan, placing: Placing, host: int) -> Need:
    """Of the workers on one host."""
    names = set(placing.on(host))
    workers = [worker for worker in plan.workers if str(worker.name) in names]
    trains = any("train" in worker.roles for worker in workers)
    sizes = {name: _size(model) for name, model in plan.recipe.models.items()}
    saved = sum(_saved(sizes[name]) for name in plan.trained_models)
    published = sizes[plan.primary]
    run = plan.recipe.run
    # The best one beside the newest, and one that is being written.
    kept = run.keep_checkpoints + (run.keep_best is not None) + 1
    return Need(
        memory=sum(_memory(worker, plan, on_gpu=False) for worker in workers),
        memory_beside_gpus=sum(_memory(worker, plan, on_gpu=worker.device != "cpu") for worker in workers),
        disk=RUN_FOLDER_BYTES + (saved * kept if trains else 0),
        shm=(PUBLISHED + PINNED) * published.weights if trains and published is not None else 0,
        gpus=sum(worker.device.startswith("cuda") for worker in workers),
        paths=tuple(dict.fromkeys(path for worker in workers for path in _paths(worker, plan))),
    )


def _memory(worker: WorkerPlan, plan: Plan, *, on_gpu: bool) -> int:
    """Of the host, for what is held from the start; what phases take besides may turn out less than the plan says."""
    found = estimate(plan, worker, on_gpu=on_gpu)
    return max(found.host + (0 if on_gpu else found.held), found.loading, PROCESS)


def _size(model: ModelConfig) -> ModelSize | None:
    """None where the model is not known here."""
    try:
        return model_size(model)
    except UserError:
        return None


def _saved(size: ModelSize | None) -> int:
    """Bytes of a model's part of a checkpoint, in float32 at least; 0 if it is not known."""
    return 0 if size is None else SAVED * size.parameters * max(WIDE, size.dtype_bytes)


def _paths(worker: WorkerPlan, plan: Plan) -> Iterable[str]:
    for name in (*worker.models, worker.generates):
        if name is None:
            continue
        model = plan.recipe.models[name]
        for path in (model.path, model.tokenizer):
            if path is not None and not path.startswith("chars:") and looks_like_path(path):
                yield path
