"""What the workers of a host will take, roughly: enough to refuse what cannot work, not a promise that it will."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from distflow.config.paths import looks_like_path
from distflow.config.schema import ModelConfig
from distflow.flow.plan import Plan, WorkerPlan
from distflow.launch.hosts.placing import Placing
from distflow.launch.hosts.preflight import Need

MIB = 1 << 20
WORKER_BYTES = 300 * MIB
"""Of a worker beside its weights: the interpreter and its libraries, as far as they are not shared."""
TRAINED = 4
"""Copies of the weights that a training worker holds: weights, gradients, two moments."""
RUN_FOLDER_BYTES = 64 * MIB
PUBLISHED = 3
"""Versions of the weights that may stand in shared memory at once."""
WEIGHTS = (".safetensors", ".bin")


def needs_of(plan: Plan, placing: Placing, host: int) -> Need:
    """Of the workers on one host."""
    names = set(placing.on(host))
    workers = [worker for worker in plan.workers if str(worker.name) in names]
    weights = {name: _weights(model) for name, model in plan.recipe.models.items()}
    trains = [worker for worker in workers if "train" in worker.roles]
    trained = sum(weights[name] for name in plan.trained_models)
    run = plan.recipe.run
    # The best one beside the newest, and one that is being written.
    kept = run.keep_checkpoints + (run.keep_best is not None) + 1
    return Need(
        memory=sum(_memory(worker, plan, weights) for worker in workers),
        disk=RUN_FOLDER_BYTES + bool(trains) * trained * (TRAINED - 1) * kept,
        shm=PUBLISHED * weights[plan.primary] if trains else 0,
        gpus=sum(worker.device.startswith("cuda") for worker in workers),
        paths=tuple(dict.fromkeys(path for worker in workers for path in _paths(worker, plan))),
    )


def _memory(worker: WorkerPlan, plan: Plan, weights: dict[str, int]) -> int:
    held = sum(weights[name] * (TRAINED if name in plan.trained_models else 1) for name in worker.models)
    samples = worker.sample_memory_mb * MIB if str(worker.name) in plan.owners else 0
    return WORKER_BYTES + held + samples + (weights[worker.generates] if worker.generates is not None else 0)


def _weights(model: ModelConfig) -> int:
    """Bytes of the weights where they lie in files here; 0 where that is not known."""
    folder = None if model.path is None else Path(model.path)
    if folder is None or not folder.is_dir():
        return 0
    return sum(path.stat().st_size for path in folder.iterdir() if path.suffix in WEIGHTS)


def _paths(worker: WorkerPlan, plan: Plan) -> Iterable[str]:
    for name in (*worker.models, worker.generates):
        if name is None:
            continue
        model = plan.recipe.models[name]
        for path in (model.path, model.tokenizer):
            if path is not None and not path.startswith("chars:") and looks_like_path(path):
                yield path
