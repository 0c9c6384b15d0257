"""What the workers of a host will take, roughly: enough to refuse what cannot work, not a promise that it will."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from distflow.config.paths import looks_like_path
from distflow.config.schema import ModelConfig
from distflow.errors import UserError
from distflow.flow.estimate import PROCESS, estimate, state_bytes
from distflow.flow.memory import group_bytes
from distflow.flow.plan import Plan, WorkerPlan
from distflow.flow.sizes import PINNED, PUBLISHED, ModelSize, model_size
from distflow.launch.deploy.host_checks import Need
from distflow.launch.deploy.placement import Placing

MIB = 1 << 20
RUN_FOLDER_BYTES = 64 * MIB


def needs_of(plan: Plan, placing: Placing, host: int) -> Need:
    """Of the workers on one host."""
    names = set(placing.on(host))
    workers = [worker for worker in plan.workers if str(worker.name) in names]
    trains = any("train" in worker.roles for worker in workers)
    sizes = {name: _size(model) for name, model in plan.recipe.models.items()}
    published = sizes[plan.primary]
    # Without a publisher beside them, each has the weights that it fetches in memory of its own.
    fetched = 0 if trains or published is None else published.weights
    fetching = fetched * sum(worker.generates == plan.primary for worker in workers)
    owners = sum(str(worker.name) in plan.owners for worker in workers)
    return Need(
        memory=fetching + sum(_memory(worker, plan, on_gpu=False) for worker in workers),
        memory_beside_gpus=fetching + sum(_memory(worker, plan, on_gpu=worker.device != "cpu") for worker in workers),
        disk=RUN_FOLDER_BYTES + (_saved(plan, sizes) if trains else 0) + _dumped(plan, owners),
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


def _saved(plan: Plan, sizes: Mapping[str, ModelSize | None]) -> int:
    """Bytes of checkpoints, and of the Hugging Face folders of the policy, which all stay; of what is known here."""
    run, policy = plan.recipe.run, sizes[plan.primary]
    # The best one beside the newest, and one that is being written.
    kept = run.keep_checkpoints + (run.keep_best is not None) + 1
    state = sum(state_bytes(size) for name in plan.trained_models if (size := sizes[name]) is not None)
    folders = run.training_steps // run.hf_every if run.hf_every and policy is not None else 0
    return kept * state + (folders * policy.weights if policy is not None else 0)


def _dumped(plan: Plan, owners: int) -> int:
    """Bytes of the samples that so many owners write, at most what the recipe lets them."""
    run, batch = plan.recipe.run, plan.batch
    if not run.dump_rollouts:
        return 0
    tokens = plan.recipe.data.max_prompt_tokens, int(plan.generate_step.settings["max_new_tokens"])
    steps = -(-run.training_steps // run.dump_rollouts)
    everything = steps * batch.prompts * group_bytes(batch.samples_per_prompt, *tokens)
    return owners * min(run.dump_limit_mb * MIB, everything // len(plan.owners))


def _paths(worker: WorkerPlan, plan: Plan) -> Iterable[str]:
    for name in (*worker.models, worker.generates):
        if name is None:
            continue
        model = plan.recipe.models[name]
        for path in (model.path, model.tokenizer):
            if path is not None and not path.startswith("chars:") and looks_like_path(path):
                yield path
