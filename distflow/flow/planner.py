"""Makes the plan. Each worker computes it on its own from the same recipe, with the same result."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from distflow.config.check import Where
from distflow.config.plugins import BACKENDS, ENGINES, full_name
from distflow.config.schema import LayoutConfig, PoolConfig, Recipe
from distflow.errors import Problems, RecipeError
from distflow.flow.data_check import check_data
from distflow.flow.digest import interface_digest
from distflow.flow.edges import dump_fields
from distflow.flow.families import untried
from distflow.flow.graph import StepNode, generate_settings
from distflow.flow.left_out import left_out_notes
from distflow.flow.memory import later_bytes, rows_bytes, rows_memory_mb, sample_memory_mb
from distflow.flow.model_roles import check_files
from distflow.flow.plan import BatchPlan, ModelPlan, Plan, StepPlan, WorkerPlan
from distflow.flow.plan_checks import check_ledgers, check_plan
from distflow.flow.plan_code import code_of, import_warnings
from distflow.flow.reading import as_read
from distflow.flow.sharding import divided_notes, divides_models
from distflow.flow.sizes import configuration
from distflow.flow.step import SEVERAL_UPDATES, reserved_tokens
from distflow.flow.structure import Structure, build_structure
from distflow.flow.structure_checks import check_structure
from distflow.flow.validation import val_plan
from distflow.flow.wiring import ports_of, wire
from distflow.types import WorkerName, prefixed, written

REFILLS_PER_GROUP = 10


def make_plan(recipe: Recipe, where: Where | None = None, *, need_files: bool = True, spanning: bool = False) -> Plan:
    """Plan a recipe; raises RecipeError with all problems.

    `where` gives the `file:line` of a key. With `need_files=False` missing model folders and data files are only notes.
    `spanning`: counts are of names, of which not all may have a worker (`flow/rescaling.py`).
    """
    where = where or (lambda key: "recipe")
    problems, missing = Problems(where), Problems(where)
    parts = (recipe.flow, recipe.layout, recipe.models, problems, recipe.run, recipe.batch)
    structure = build_structure(*parts, validated=recipe.val is not None)
    check_data(recipe.data, problems, missing)
    if recipe.val is not None and recipe.val.data is not None:
        check_data(recipe.val.data, problems, missing, "val.data")
    check_files(recipe.models, missing)
    problems += missing if need_files else []
    if structure is not None:
        recipe = as_read(recipe, structure)
        check_structure(structure, problems)
        if not spanning:
            check_ledgers(recipe, structure, problems)
        check_plan(recipe, structure, problems)
    if structure is None or problems:
        raise RecipeError(problems)
    warnings = tuple(_warnings(recipe, structure))
    absent = tuple(map(str, missing))
    notes = (*warnings, *_notes(structure, recipe.layout), *absent)
    plan = replace(_assemble(recipe, structure, notes), warnings=warnings, missing=absent)
    return interface_digest(plan)


def batch_plan(recipe: Recipe) -> BatchPlan:
    """The arithmetic of one training step."""
    batch = recipe.batch
    groups = batch.prompts // batch.ledgers
    return BatchPlan(
        prompts=batch.prompts,
        samples_per_prompt=batch.samples_per_prompt,
        samples=batch.prompts * batch.samples_per_prompt,
        ledgers=batch.ledgers,
        groups_per_ledger=groups,
        max_staleness=None if recipe.layout.max_staleness == "unbounded" else recipe.layout.max_staleness,
        training_steps=recipe.run.training_steps,
        max_refills=REFILLS_PER_GROUP * groups if batch.max_refills is None else batch.max_refills,
        tokens_per_microbatch=batch.tokens_per_microbatch,
        minibatches=batch.minibatches,
        epochs=batch.epochs,
        target_kl=batch.target_kl,
        critic_warmup=batch.critic_warmup,
        mask_truncated=batch.mask_truncated,
        schedule="fifo" if recipe.run.deterministic else recipe.layout.schedule,
    )


def _assemble(recipe: Recipe, structure: Structure, notes: tuple[str, ...]) -> Plan:
    ordered = (*structure.before_custody, *structure.after_custody)
    batch = batch_plan(recipe)
    dumped = dump_fields(recipe.run, (*ordered, *structure.private.all))
    steps_ahead = batch.training_steps if batch.max_staleness is None else 1 + batch.max_staleness
    # No more samples are ever leased at once, apart from those for validation, which are not waited with.
    most_slots = {pool.name: sys.maxsize if pool.validates else batch.samples * steps_ahead for pool in structure.pools}
    new_tokens = reserved_tokens(generate_settings(ordered), recipe.data.max_prompt_tokens)
    later = later_bytes(recipe, structure)
    sample_memory = sample_memory_mb(recipe, structure.home.name, new_tokens, later)
    edges = wire(structure, dumped)
    memory = {pool.name: sample_memory for pool in structure.pools}
    memory |= {e.target: rows_memory_mb(rows_bytes(recipe, edges, e, new_tokens)) for e in edges if e.kind == "rows"}
    pools = recipe.layout.pools
    workers = (
        _worker(pools[pool.name], WorkerName(pool.name, i), structure, most_slots[pool.name], memory[pool.name])
        for pool in structure.pools
        for i in range(pool.count)
    )
    return Plan(
        recipe=recipe.model_copy(update={"models": dict(structure.models.configs)}),
        run_name=recipe.run.name or "run",
        batch=batch,
        workers=tuple(replace(worker, ports=ports_of(worker.name.pool, edges)) for worker in workers),
        edges=edges,
        pools=structure.pools,
        models=_models(structure),
        dump_fields=dumped,
        primary=structure.models.primary,
        steps=tuple(map(step_plan, ordered)),
        streamed=structure.streams(recipe),
        on_arrival=_on_arrival(recipe, structure),
        later_bytes=later,
        code=code_of(recipe, ordered),
        digest="",
        notes=notes,
        val=val_plan(recipe, structure),
    )


def _on_arrival(recipe: Recipe, structure: Structure) -> tuple[str, ...]:
    """Where training waits for the whole batch: forward steps that need not, since they read only what arrives.

    Where a model is divided all replicas compute together, so they wait too; `run.deterministic` fixes which rows are
    computed together; and a script of the user's own says itself when a step runs.
    """
    home = recipe.layout.pools[structure.home.name]
    scripted = home.script is not None or any(own.script is not None for own in home.each.values())
    if structure.streams(recipe) or recipe.run.deterministic or scripted or divides_models(home):
        return ()
    there = [*structure.private.fills, *(field for node in structure.before_custody for field in node.writes)]
    return tuple(
        node.name
        for node in structure.after_custody
        if node.role == "forward"
        and structure.sites[node.name] == structure.home.name
        and node.declaration.spec.scope != "batch"
        and not node.declaration.keeps_state
        and all(written(field, there) for field in node.reads)
    )


def _models(structure: Structure) -> tuple[ModelPlan, ...]:
    used = (node.model for node in structure.steps if node.model is not None)
    pools = structure.pools
    return tuple(
        ModelPlan(
            name=name,
            home=next((pool.name for pool in pools if name in pool.homes), None),
            generated_by=tuple(pool.name for pool in pools if name in pool.generates),
            held_by=tuple(pool.name for pool in pools if name in pool.frozen),
        )
        for name in dict.fromkeys((*structure.models.trained, *used))
    )


def step_plan(node: StepNode) -> StepPlan:
    """A step of the graph as workers run it."""
    spec, call = node.declaration.spec, node.declaration.call
    about = (node.name, call, spec.role, spec.scope, node.model, node.settings)
    return StepPlan(*about, node.reads, node.writes, node.may_write, spec.environment, node.prefix, node.weighed)


EPISODES_A_SLOT = 4
"""So many samples a worker has under way where the recipe does not say: three of four may wait for their tools."""


def _worker(
    pool: PoolConfig, name: WorkerName, structure: Structure, most_slots: int, sample_memory: int
) -> WorkerPlan:
    own = pool.settings_of(name.index)
    private = structure.private.of(name.pool, name.index)
    before = structure.before(name.pool)
    after = [node for node in structure.after_custody if structure.sites[node.name] == name.pool]
    nodes = [*before, *private, *after]
    models = tuple(dict.fromkeys(n.model for n in nodes if n.role != "generate" and n.model is not None))
    generates = tuple(n.model for n in nodes if n.role == "generate" and n.model is not None)
    slots = min(own.slots or pool.slots, most_slots)
    return WorkerPlan(
        name=name,
        roles=tuple(dict.fromkeys(n.declaration.spec.role for n in nodes)),
        steps=tuple(map(step_plan, nodes)),
        engine=full_name(own.engine or pool.engine, ENGINES) if generates else None,
        engine_options=pool.engine_options_of(own),
        backend=full_name(pool.backend, BACKENDS) if models else None,
        backend_options=pool.backend_options_of(own),
        device=own.device or pool.device,
        threads=own.threads or pool.threads,
        slots=slots,
        episodes=own.episodes or pool.episodes or EPISODES_A_SLOT * slots,
        environments=pool.environments,
        sample_memory_mb=own.sample_memory_mb or pool.sample_memory_mb or sample_memory,
        offload=pool.offload,
        script=own.script or pool.script,
        python=own.python or pool.python,
        models=models,
        generates=generates,
    )


def _warnings(recipe: Recipe, structure: Structure) -> Iterator[str]:
    """Settings that work, but that hardly anybody wants."""
    for node in structure.after_custody:
        if node.drops == "named":
            yield (
                f"warning: step {node.name!r} names drop_reason or left_out and runs on pool "
                f"{structure.sites[node.name]!r}: a reason that it writes there ends the run — add it to the `steps` "
                f"of {structure.rollout.name!r} or of a service if it drops samples, or leaves them out"
            )
    for node in structure.steps:
        if node.declaration.blocks and node.role == "generate":
            yield (
                f"warning: step {node.name!r} calls {', '.join(node.declaration.blocks)}, which holds up all other "
                "samples of its worker, though not the engine — let the step be a plain def, which has a thread of its "
                "own, or await asyncio.to_thread(…)"
            )
    yield from import_warnings(recipe, structure.steps)
    used = {node.model for node in structure.steps if node.model is not None} - {*structure.models.copied}
    yield from untried({name: configuration(structure.models.configs[name]) for name in sorted(used)})
    yield from _untrained_samples(structure)
    yield from _two_divergences(structure)
    relative = [
        node.name
        for node in structure.steps
        if "advantage" in node.writes
        and (node.declaration.spec.scope == "group" or node.settings.get("function") == "grpo")
    ]
    if recipe.batch.critic_warmup >= recipe.run.training_steps > 0:
        yield (
            f"warning: batch.critic_warmup is {recipe.batch.critic_warmup}, and run.training_steps "
            f"{recipe.run.training_steps}: the policy is never trained"
        )
    if recipe.batch.samples_per_prompt == 1 and relative:
        yield (
            f"warning: batch.samples_per_prompt is 1, and step {relative[0]!r} compares the samples of a prompt with "
            "each other, but there is only one — use 2 or more, or another advantage"
        )
    greedy = [node.name for node in structure.steps if node.role == "generate" and _is_greedy(node.settings)]
    if recipe.batch.samples_per_prompt > 1 and relative and greedy:
        yield (
            f"warning: step {greedy[0]!r} takes the likeliest token each time, and step {relative[0]!r} compares the "
            "samples of a prompt with each other: they are all alike, so there is nothing to learn — "
            "a temperature above 0, such as 1"
        )


def _is_greedy(settings: Mapping[str, Any]) -> bool:
    return settings.get("temperature") == 0 or settings.get("top_k") == 1


def _two_divergences(structure: Structure) -> Iterator[str]:
    """A policy that is kept near its reference twice: in the reward of each token, and in the loss."""
    penalties = [node for node in structure.steps if node.settings.get("kl_coef")]
    in_reward = {node.prefix: node for node in penalties if prefixed("token_rewards", node.prefix) in node.writes}
    for node in penalties:
        other = in_reward.get(node.prefix)
        if other is not None and other is not node:
            yield (
                f"warning: kl_coef is {other.settings['kl_coef']} in step {other.name!r}, in the reward, and "
                f"{node.settings['kl_coef']} in step {node.name!r}, in the loss: the KL to the reference counts twice "
                "— set one of them to 0"
            )


def _untrained_samples(structure: Structure) -> Iterator[str]:
    """Further models that are trained, but on none of the samples that they generate."""
    for node in structure.steps:
        trained = [other for other in structure.steps if other.role == "train" and other.model == node.model]
        tokens = prefixed("response_ids", node.prefix)
        if node.generates_further and not any(tokens in other.reads for other in trained):
            names = " and ".join(repr(other.name) for other in trained)
            yield (
                f"warning: step {node.name!r} generates with {node.model!r}, and {names}, which trains it, reads other "
                f"samples — prefix: {node.prefix} for {names}"
            )


def _notes(structure: Structure, layout: LayoutConfig) -> list[str]:
    notes = [
        f"model {name!r} is a copy of {structure.models.primary!r}: the recipe does not define it"
        for name in structure.models.copied
        if any(node.model == name for node in structure.steps)
    ]
    names = [node.name for node in (*structure.steps, *structure.unread)]
    # What is read with several updates a step only is in every shipped flow: no news.
    awaited = {
        prefixed(f, n.prefix) for n in structure.steps for f in n.declaration.spec.reads_when.get(SEVERAL_UPDATES, ())
    }
    unread = [node for node in structure.unread if not set(node.writes) <= awaited]
    notes += left_out_notes(unread, names, [pool.name for pool in structure.pools], layout)
    notes += [f"no step uses model {name!r}" for name in structure.models.unused]
    notes += divided_notes(layout, structure.pools)
    for node in structure.after_custody:
        if node.declaration.spec.scope == "batch":
            notes.append(f"step {node.name!r} has batch scope: training waits for the whole batch, nothing is streamed")
    return notes
