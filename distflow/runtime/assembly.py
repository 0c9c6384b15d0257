"""Builds the parts of one worker from its document: models, engine, step contexts, checkpoints. Nothing runs yet."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import cast

import torch

from distflow.comm.addresses import socket_dir
from distflow.comm.kept_process import KeptProcess
from distflow.comm.tracker_processes import TrackerProcesses, TrackerStart
from distflow.config.plugins import COPIES, EPISODES, FOLLOW, MODEL_WRITER, TOKENIZER
from distflow.config.schema import ModelConfig, Recipe
from distflow.errors import PluginError, UserError
from distflow.flow.adapters import shares_base
from distflow.flow.document import WorkerDocument
from distflow.flow.gpus import check_width, device_of_slot, first_gpu, width
from distflow.flow.lineage import ARITHMETIC, arithmetic, departures, lineage
from distflow.flow.plan import Plan, StepPlan, WorkerPlan, leaders_of
from distflow.flow.planner import make_plan
from distflow.flow.resolve import resolve
from distflow.flow.step import FILTERED
from distflow.flow.trackers import FOLDER, TrackerPlan, trackers_of
from distflow.log import logger
from distflow.runtime.checkpoint.commit import Keeping
from distflow.runtime.checkpoint.parts import CheckpointReader, CheckpointWriter, ModelFolders
from distflow.runtime.disk import Disk, replace_file
from distflow.runtime.episode_process import EpisodeProcess
from distflow.runtime.generate_step import GenerateStep, SampleLimits
from distflow.runtime.metrics import MetricStore, PrefixedMetrics
from distflow.runtime.process_record import note_trouble
from distflow.runtime.protocols import Adapted, Alone, Backend, BackendSpec, Engine, EngineSpec, Reducer, Tokenizer
from distflow.runtime.sample_errors import EngineNumbers
from distflow.runtime.steps import ServedContext, StepContext
from distflow.runtime.trace_writer import UNTRACED, Tracer, TraceSink
from distflow.runtime.trajectories import Trajectories
from distflow.runtime.waits import WaitBoard
from distflow.types import LeaseKind, Version, WorkerName, is_validated, prefixed

log = logger(__name__)


@dataclass(frozen=True, slots=True)
class Standing:
    """What one worker is to the training of its run: separate things, of which a worker may be some."""

    ledgers: tuple[int, ...]
    """Those it owns; none off the home of the primary model."""
    gradients: Mapping[str, tuple[str, ...]]
    """The replicas that train each model of its home, in order: gradients are summed over them."""
    publishes: tuple[str, ...]
    """Models whose versions it makes available to others, for its host and for hosts without such a worker."""
    commits: bool
    """It writes COMMIT for its host: the first training worker there, of whichever home."""
    members: tuple[str, ...]
    """All that restart, save and stop together with it; empty for workers that do not train."""


@dataclass(frozen=True, slots=True)
class Setting:
    """What a worker is built from."""

    document: WorkerDocument
    recipe: Recipe
    plan: Plan
    me: WorkerPlan
    run_dir: Path
    resumed: CheckpointReader | None
    path: Path | None = None
    """The file that holds the document."""

    @property
    def members(self) -> tuple[str, ...]:
        """The training workers of this term, of all homes: those of the plan, or those of them that remain."""
        left = self.document.members
        return tuple(name for name in self.plan.members if left is None or name in left)

    @property
    def owners(self) -> tuple[str, ...]:
        """Those that own ledgers, in order."""
        return tuple(name for name in self.members if name in self.plan.owners)

    @property
    def standing(self) -> Standing:
        """What this worker is to training."""
        name, pool = str(self.me.name), self.plan.pool(self.me.name.pool)
        members, owners, host_of = self.members, self.owners, self.document.placement
        home = tuple(other for other in members if WorkerName.parse(other).pool == pool.name)
        first = name in leaders_of(home, host_of).values()
        read = {model.name for model in self.plan.models if model.generated_by}
        return Standing(
            ledgers=tuple(range(owners.index(name), self.plan.batch.ledgers, len(owners))) if name in owners else (),
            gradients=dict.fromkeys(pool.homes, home) if name in members else {},
            publishes=tuple(m for m in pool.homes if m in read and (first or m in self.me.generates)),
            commits=name in leaders_of(members, host_of).values(),
            members=members if name in members else (),
        )

    @property
    def only_validates(self) -> bool:
        """Whether this worker generates for validation only."""
        return self.plan.pool(self.me.name.pool).validates

    @property
    def start(self) -> Version:
        """The version that training begins with."""
        return Version(self.document.term, 0 if self.resumed is None else self.resumed.version.number)

    @property
    def begins(self) -> dict[int, int]:
        """Training steps at which terms began since the run was launched, by number of the term."""
        return {number: step for number, step in self.document.begins}

    def home_of(self, model: str) -> tuple[str, ...]:
        """The workers of this term that train a model."""
        pool = self.plan.home_of(model).name
        return tuple(name for name in self.members if WorkerName.parse(name).pool == pool)

    @property
    def peers(self) -> list[str]:
        """The workers of the plan that this one exchanges messages with; no training workers that left for good."""
        left = set(self.plan.members) - set(self.members)
        names = (str(worker.name) for worker in self.plan.workers)
        return [name for name in names if name not in left and self.is_peer(name)]

    def is_peer(self, name: str) -> bool:
        """Whether a worker is a peer: at the other end of a port, a training worker for another, or, for a service, an
        owner, by whose end it learns that there will be no more requests. To workers that do not train, also a training
        worker of a later term than theirs.
        """
        plan, me, pool = self.plan, str(self.me.name), WorkerName.parse(name).pool
        trains = any(one.name == pool and one.homes for one in plan.pools)
        if name == me or (trains and me in self.members and name not in self.members):
            return False
        train = {name, me} <= set(self.members)
        linked = pool != self.me.name.pool and any(port.peer == pool for port in self.me.ports)
        owns = plan.home.name in (pool, self.me.name.pool)
        serves = any(plan.serves(one) for one in (pool, self.me.name.pool))
        return train or linked or (serves and owns)

    @property
    def device(self) -> str:
        """The device of this worker. Raises UserError for a GPU that does not exist."""
        document = self.document
        here = [one for one in self.plan.workers if document.placement.get(str(one.name), 0) == document.host]
        return device_of(here, self.me, document.slot)

    def is_close(self, name: str) -> bool:
        """Whether a peer is to hear of this worker with every heartbeat: one of the two answers calls of the other."""
        calls = [*self.me.port("asks"), *self.me.port("answers")]
        return any(port.peer == WorkerName.parse(name).pool for port in calls)


def device_of(workers: Sequence[WorkerPlan], worker: WorkerPlan, slot: int | None = None) -> str:
    """Return the device of one of the workers of this host: for `auto` and `cuda` the GPU of its slot, or, without one,
    the next after those of the workers before it.

    Without a GPU, `auto` is the CPU. Raises UserError for a GPU that does not exist.
    """
    wanted = worker.device
    count = torch.cuda.device_count()
    if wanted == "cpu" or not width(worker):
        return "cpu"
    if wanted.startswith("cuda:") or not count:
        if wanted.startswith("cuda") and int(wanted.partition(":")[2] or 0) >= count:
            raise UserError(
                f"layout.pools.{worker.name.pool}.device is {wanted}, but {worker.name} sees {count} GPUs here "
                "(with the installed PyTorch) — use auto or cpu, or a machine with that GPU"
            )
        return "cpu" if wanted == "auto" else wanted
    if slot is None:
        return f"cuda:{first_gpu(workers, worker, count)}"
    check_width(worker, count)
    return device_of_slot(worker, slot, count)


def read_setting(document: WorkerDocument, path: Path) -> Setting:
    """Plan what the worker of this document is built from; `path`: the file that it was read from."""
    plan = make_plan(document.recipe, spanning=document.members is not None)
    me = plan.worker(WorkerName.parse(document.worker))
    resumed = None
    # Only training workers are part of a checkpoint; the others start afresh.
    if document.resume is not None and document.worker in (document.members or plan.members):
        # Every byte of it is read later, when the others can see that this takes time.
        resumed = CheckpointReader(Path(document.resume), me.name.file_stem, unread=True)
    return Setting(document, plan.recipe, plan, me, Path(document.run_dir), resumed, path)


def build_tokenizer(setting: Setting) -> Tokenizer:
    """The primary model's tokenizer, which all models that generate have in common."""
    builder = resolve(TOKENIZER)
    tokenizer = builder(_model(setting.recipe, setting.plan.primary))
    if not isinstance(tokenizer, Tokenizer):
        raise PluginError(f"{TOKENIZER} returned {type(tokenizer).__name__}, which does not implement Tokenizer")
    return tokenizer


def build_trace(setting: Setting, incarnation: int, disk: Disk) -> TraceSink:
    """Where this incarnation of the worker records its trace."""
    if not setting.recipe.run.trace:
        return UNTRACED
    name, document = setting.me.name, setting.document
    about = {"worker": str(name), "host": document.host, "pid": os.getpid(), "incarnation": incarnation}
    path = setting.run_dir / "trace" / f"{name.file_stem}.jsonl"
    limit = setting.recipe.run.trace_limit_mb << 20
    return Tracer(path, {**about, "term": document.term}, disk, file_bytes=limit // 2)


def start_trackers(setting: Setting, count: Callable[[str, float], None]) -> TrackerProcesses:
    """The trackers of the run, if this is the worker that has them: the first that trains the primary model."""
    has_them = setting.home_of(setting.plan.primary)[:1] == (str(setting.me.name),)
    plans = trackers_of(setting.recipe.run) if has_them else ()
    tell = partial(note_trouble, setting.run_dir, setting.me.name.file_stem)
    return TrackerProcesses([_tracker_start(setting, plan) for plan in plans], count, tell)


def _tracker_start(setting: Setting, plan: TrackerPlan) -> TrackerStart:
    folder = setting.run_dir / FOLDER / plan.name
    recipe = setting.recipe.model_dump(mode="json", by_alias=True)
    # Options may hold what is nobody else's business, such as a password in an address.
    recipe["run"]["trackers"] = [one.name for one in trackers_of(setting.recipe.run)]
    start = {
        "run_dir": str(setting.run_dir),
        "name": plan.name,
        "call": plan.call,
        "options": plan.options,
        "samples": plan.samples,
        "recipe": recipe,
        "term": setting.start.term,
        "begins": setting.start.number,
    }
    file = folder / "start.json"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        replace_file(file, json.dumps(start))
    except OSError as error:
        # A full disk. The tracker says that it has no such file, and is tried again.
        log.error("could not write %s: %s", file, error)
    title = f"distflow {setting.run_dir.name} {setting.me.name} tracker {plan.name}"
    return TrackerStart(plan.name, FOLLOW, file, folder / "output.log", title, plan.timeout_s)


def build_engine(setting: Setting, model: str, device: str, life: int, go_on: Callable[[], None]) -> Engine:
    """An engine of a generating worker, without weights. `go_on` raises when the run is over."""
    me, recipe = setting.me, setting.recipe
    assert me.engine is not None, f"{me.name} generates, so the plan names its engine"
    step = setting.plan.generate_step_of(model)
    spec = EngineSpec(
        model=_model(recipe, model),
        device=device,
        slots=me.slots,
        max_tokens=setting.plan.engine_tokens(model),
        seed=recipe.run.seed,
        options=me.engine_options,
        offload=me.offload,
        shares_device=bool(me.models),
        deterministic=recipe.run.deterministic,
        filtered_logprobs=prefixed(FILTERED, step.prefix) in step.writes,
        weighed=step.weighed,
        pool=me.name.pool,
        worker=str(me.name),
        life=life,
        folder=socket_dir(setting.run_dir, setting.document.host),
        go_on=go_on,
    )
    engine = resolve(me.engine)(spec)
    if not isinstance(engine, Engine):
        raise PluginError(lacks(me.engine, engine, Engine))
    return engine


def lacks(call: str, found: object, protocol: type) -> str:
    """What a plug-in must have besides to be of this protocol."""
    names = [name for name in dir(protocol) if not name.startswith("_") and not hasattr(found, name)]
    names += [name for name in vars(protocol).get("__annotations__", {}) if not hasattr(found, name)]
    return (
        f"{call}: {type(found).__name__} is no {protocol.__name__} — add {', '.join(sorted(set(names)))}, as "
        f"distflow.runtime.protocols.{protocol.__name__} describes them"
    )


def build_models(setting: Setting, device: str, replicas: Reducer) -> dict[str, Backend]:
    """The backends of a worker that trains or runs frozen models, in their initial state."""
    me, recipe = setting.me, setting.recipe
    if me.generates and me.models and recipe.run.deterministic and device != "cpu" and not setting.standing.members:
        raise UserError(
            f"run.deterministic: {me.name} scores groups in batches as they finish, and on {device} scores depend on "
            f"the batch — set layout.pools.{me.name.pool}.device=cpu, or give the role forward to the training pool"
        )
    models: dict[str, Backend] = {}
    updates, homes = setting.plan.batch.updates, setting.plan.pool(me.name.pool).homes
    # Those that are trained come first: frozen ones may be theirs without adapters.
    for name in sorted(me.models, key=lambda name: name not in homes):
        assert me.backend is not None, f"{me.name} holds model {name}, so the plan names its backend"
        sharing = shares_base(recipe.models, me.models, homes, name)
        if sharing is not None:
            models[name] = cast(Adapted, models[sharing]).without_adapters()
            continue
        spec = BackendSpec(
            model=_in_updates(recipe.models[name], updates),
            device=device,
            trainable=name in homes,
            seed=recipe.run.seed,
            training_steps=updates * recipe.run.training_steps,
            options=me.backend_options,
            replicas=replicas,
            deterministic=recipe.run.deterministic,
        )
        backend = resolve(me.backend)(spec)
        if not isinstance(backend, Backend):
            raise PluginError(lacks(me.backend, backend, Backend))
        if backend.lockstep and isinstance(replicas, Alone):
            raise PluginError(f"{me.backend} divides models over training workers, and {me.name} is not one")
        models[name] = backend
    return models


def join_models(setting: Setting, models: Mapping[str, Backend]) -> None:
    """Divide the models over the replicas, which have connected; then load the checkpoint's state into them, if any."""
    for model in models.values():
        model.join()
    if setting.resumed is not None:
        for name in setting.plan.pool(setting.me.name.pool).homes:
            models[name].load_state(setting.resumed.model(name))
        if setting.recipe.run.deterministic:
            for line in departures(
                setting.resumed.worker(setting.me.name.pool).get(ARITHMETIC, {}), arithmetic(setting.plan)
            ):
                log.warning("%s", line)


def build_contexts(
    setting: Setting,
    metrics: MetricStore,
    models: Mapping[str, Backend],
    engines: Mapping[str, Engine],
    tokenizer: Tokenizer,
    kind: type[StepContext] | None = None,
) -> dict[str, StepContext]:
    """One context for each of the worker's steps, with `ctx.state` as saved in the checkpoint. `engines`: by model;
    `kind`: of context, None: as the step is used."""
    recipe = setting.recipe
    states = setting.resumed.worker(setting.me.name.pool)["steps"] if setting.resumed is not None else {}
    answered = {port.edge for port in setting.me.port("answers")}
    sampled = {step.prefix: step for step in setting.plan.generate_steps}
    of_policy = setting.plan.origin
    return {
        step.name: (kind or (ServedContext if step.name in answered else StepContext))(
            step_name=step.name,
            worker=str(setting.me.name),
            seed=recipe.run.seed,
            training_steps=recipe.run.training_steps,
            samples_per_prompt=recipe.batch.samples_per_prompt,
            ledgers=recipe.batch.ledgers,
            tokens_per_microbatch=recipe.batch.tokens_per_microbatch,
            masks_truncated=recipe.batch.mask_truncated == "loss",
            has_baseline=setting.plan.has_baseline(step.prefix),
            temperature=_temperature(sampled.get(step.prefix, of_policy)),
            metrics=PrefixedMetrics(metrics, step.prefix) if step.prefix else metrics,
            state=states.get(step.name, {}),
            models=models,
            model=step.model,
            prefix=step.prefix,
            reads=step.own(step.reads),
            engine=engines.get(str(step.model if step.role == "generate" else setting.plan.primary)),
            tokenizer=tokenizer,
            gather=None,
            dtype=recipe.models[sampled.get(step.prefix, of_policy).model or setting.plan.primary].dtype,
        )
        for step in setting.me.steps
    }


def _temperature(step: StepPlan) -> float:
    """At which a step samples; 1 for one that reads what nobody has sampled."""
    return 1.0 if step.role == "read" else float(step.settings["temperature"])


def start_episodes(
    setting: Setting, metrics: MetricStore, now: Callable[[str], tuple[int, int]], board: WaitBoard
) -> EpisodeProcess:
    """Start the process of this worker's episodes. `now`: the training step and version of a step."""
    me = setting.me
    assert setting.path is not None, "a worker whose episodes have a process has been read from a file"
    first = next(step.name for step in me.steps if step.role == "generate")
    title = f"distflow {setting.run_dir.name} {me.name} episodes"
    output = setting.run_dir / "logs" / f"{me.name.file_stem}.episodes.log"
    start = partial(KeptProcess, EPISODES, [str(setting.path)], title, output)
    return EpisodeProcess(start, partial(now, first), metrics, partial(board.shown, peers=()))


def build_trajectories(
    setting: Setting, step: GenerateStep, tokenizer: Tokenizer, metrics: MetricStore
) -> Trajectories:
    """The samples under way at this worker: none yet."""
    plan, recipe = setting.plan, setting.recipe
    model = str(step.plan.model)
    dtype = torch.float64 if recipe.models[model].dtype == "float64" else torch.float32
    train = SampleLimits.of(recipe.batch.samples_per_prompt, step.plan.settings)
    limits: dict[LeaseKind, SampleLimits] = {"train": train}
    if plan.val is not None and model == plan.primary:
        limits["val"] = SampleLimits.of(plan.val.samples_per_prompt, plan.val.settings)
    numbers = EngineNumbers(f"engine {setting.me.engine} on {setting.me.name}", metrics)
    out = recipe.batch.mask_truncated == "all"
    most = setting.me.episodes
    return Trajectories(step, limits, tokenizer, dtype, numbers, leaves_out_truncated=out, most=most)


def _model(recipe: Recipe, name: str) -> Mapping[str, object]:
    return recipe.models[name].model_dump()


def _in_updates(model: ModelConfig, updates: int) -> Mapping[str, object]:
    """A model's section with its schedule in optimizer steps, of which a training step may have several."""
    given = model.optimizer
    steps = {"warmup_steps": updates * given.warmup_steps}
    if given.decay_steps is not None:
        steps["decay_steps"] = updates * given.decay_steps
    optimizer = given.model_copy(update=steps)
    return model.model_copy(update={"optimizer": optimizer}).model_dump()


def checkpoint_writer(setting: Setting, count: Callable[[str, float], None]) -> CheckpointWriter:
    """The writer of this worker's parts, which keeps as many checkpoints as the recipe says, at a second place too."""
    run = setting.recipe.run
    val = setting.plan.val
    due = () if val is None or not is_validated(run.keep_best) else val.versions
    keeping = Keeping(run.keep_checkpoints, run.keep_best, run.keep_best_mode, due)
    stem = setting.me.name.file_stem
    plan = setting.plan
    writer = CheckpointWriter(setting.run_dir, stem, plan.digest, keeping, lineage(plan), arithmetic(plan))
    if run.copy_to is not None and setting.standing.commits:
        placement, held = setting.document.placement, writer.copied
        hosts = {WorkerName.parse(name).file_stem: placement.get(name, 0) for name in setting.members}
        told = (writer.note, count, held.add, held.discard, partial(note_trouble, setting.run_dir, stem))
        writer.copies = resolve(COPIES)(run.copy_to, setting.run_dir, keeping, hosts, setting.document.host, told)
    return writer


def model_folders(setting: Setting) -> ModelFolders | None:
    """The Hugging Face folders of the primary model; None where the recipe asks for none."""
    plan, recipe = setting.plan, setting.recipe
    if not recipe.run.hf_every:
        return None
    section = recipe.models[plan.primary].model_dump()
    write = partial(resolve(MODEL_WRITER), seed=recipe.run.seed)
    return ModelFolders(setting.run_dir, plan.primary, section, write)
