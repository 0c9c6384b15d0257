"""The structure of a flow on a layout, independent of batch and run: steps, models, pools."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from distflow.config.plugins import BACKENDS, ENGINES, full_name
from distflow.config.schema import BatchConfig, FlowConfig, LayoutConfig, ModelConfig, Recipe, RunConfig
from distflow.errors import PluginError, Problems
from distflow.flow.edges import dump_fields
from distflow.flow.graph import StepNode, order_steps, read_steps
from distflow.flow.left_out import refuse_unread, without_unread
from distflow.flow.model_roles import Models, settle_models
from distflow.flow.per_worker_steps import PrivateSteps, read_private_steps
from distflow.flow.plan import PoolPlan
from distflow.flow.resolve import find_source
from distflow.flow.sharding import check_zero
from distflow.flow.sites import (
    find_home,
    find_sites,
    find_validating,
    generating_pools,
    plan_pools,
    steps_before_custody,
    validating_pool,
)
from distflow.flow.statements import Definition
from distflow.flow.step import StepSpec
from distflow.types import REWARD_PARTS

_NEEDED: Mapping[str, Mapping[str, str]] = {
    "generate": {"temperature": "float = 1.0", "max_new_tokens": "int = 16"},
    "read": {"max_response_tokens": "int = 1024"},
}
"""Settings that the runtime needs of the steps that make samples, and how they are declared."""


@dataclass(frozen=True, slots=True)
class Structure:
    """A flow on a layout."""

    steps: tuple[StepNode, ...]
    """In order."""
    models: Models
    sites: Mapping[str, str]
    """The pool of each step, by name."""
    pools: tuple[PoolPlan, ...]
    """Those that have work."""
    rollout: PoolPlan
    """Generates with the primary model, or reads what that is trained on."""
    home: PoolPlan
    """Trains the primary model."""
    before_custody: tuple[StepNode, ...]
    """The steps before the owners get the samples, in order."""
    private: PrivateSteps
    unread: tuple[StepNode, ...]
    """Forward steps that are left out, since nothing reads their fields."""

    @property
    def after_custody(self) -> tuple[StepNode, ...]:
        """The steps behind that, in order."""
        return tuple(node for node in self.steps if node.name in self.sites and node not in self.before_custody)

    @property
    def widths(self) -> dict[str, int]:
        """Fields with several values for each token: how many."""
        return {field: size for node in self.steps for field, size in node.widths.items()}

    @property
    def reads(self) -> StepNode | None:
        """The step that reads samples from the data, in flows without generation."""
        return next((node for node in self.steps if node.role == "read"), None)

    def streams(self, recipe: Recipe) -> bool:
        """Whether samples can be trained on as they arrive; otherwise training waits for the whole batch."""
        whole = any(node.declaration.spec.scope == "batch" for node in self.after_custody)
        updates = recipe.batch.minibatches * recipe.batch.epochs
        return updates == 1 and not whole and not recipe.run.deterministic

    def on(self, pool: str) -> list[StepNode]:
        """The shared steps of a pool, in the order in which they run there."""
        return [*self.before(pool), *(node for node in self.after_custody if self.sites[node.name] == pool)]

    def before(self, pool: str) -> list[StepNode]:
        """Those among them that run before the owners get the samples."""
        validates = any(planned.name == pool and planned.validates for planned in self.pools)
        site = self.rollout.name if validates else pool
        return [node for node in self.before_custody if self.sites[node.name] == site]


def build_structure(
    flow: FlowConfig,
    layout: LayoutConfig,
    models: Mapping[str, ModelConfig],
    problems: Problems,
    run: RunConfig | None,
    batch: BatchConfig | None = None,
    *,
    validated: bool = False,
) -> Structure | None:
    """Read, order and place the steps; None if problems (added to `problems`) leave nothing to build.

    `run` says what is written to disk, and is therefore read, and `batch` how often samples are trained on; None: that
    is not known. `validated`: there is validation; without it, the pool that is for this alone is left out.
    """
    several_updates = batch is not None and batch.minibatches * batch.epochs > 1
    out_of_loss = batch is not None and batch.mask_truncated == "loss"
    steps = read_steps(flow, problems, several_updates=several_updates, out_of_loss=out_of_loss)
    private = read_private_steps(layout, problems)
    _check_plugins(layout, problems)
    check_zero(layout, problems)
    if len(steps) < len(flow.steps):
        return None  # a step that cannot be read would only cause further, misleading problems
    ordered = order_steps(steps, private.fills, problems)
    _check_roles(ordered, problems)
    _check_generate(ordered, problems)
    settled = settle_models(ordered, models, problems)
    dumped = () if run is None else dump_fields(run, (*ordered, *private.all))
    kept, unread = without_unread(ordered, private.all, dumped)
    kept = [replace(node, weighed=_is_weighed(node, (*kept, *private.all))) for node in kept]
    if run is not None:
        refuse_unread(kept, private.all, dumped, problems)
    sites = find_sites(kept, [node.name for node in ordered], layout, problems)
    validating = find_validating(layout, problems) if validated else None
    return None if settled is None else _on_pools(kept, unread, sites, settled, layout, private, validating)


def _is_weighed(node: StepNode, steps: Sequence[StepNode]) -> bool:
    return node.role == "generate" and any(other.weights_samples_of(node) for other in steps)


def _on_pools(
    steps: Sequence[StepNode],
    unread: Sequence[StepNode],
    sites: Mapping[str, str],
    models: Models,
    layout: LayoutConfig,
    private: PrivateSteps,
    validating: str | None,
) -> Structure | None:
    home = find_home(steps, sites, models.primary)
    if home is None:
        return None
    reads = any(node.role == "read" for node in steps)
    rollouts = [home] if reads else generating_pools(steps, sites, models.primary)
    if not rollouts:
        return None
    pools = plan_pools(steps, sites, models, layout)
    by_name = {pool.name: pool for pool in pools}
    before = steps_before_custody(steps, sites, models.primary, home)
    if validating is not None and not reads:
        like = [node for node in before if sites[node.name] == rollouts[0]]
        pools = (*pools, validating_pool(validating, like, layout))
    return Structure(
        steps=tuple(steps),
        models=models,
        sites=sites,
        pools=pools,
        rollout=by_name[rollouts[0]],
        home=by_name[home],
        before_custody=before,
        private=private,
        unread=tuple(unread),
    )


def _check_roles(steps: list[StepNode], problems: Problems) -> None:
    for role, others in (("generate", ("generate", "read")), ("train", ("train",))):
        if not any(node.role in others for node in steps):
            problems.add("flow.steps", f"no step has the role {role!r}", "see recipes/flow/grpo.yaml")


def _check_generate(steps: list[StepNode], problems: Problems) -> None:
    by_prefix: dict[str, StepNode] = {}
    for node in steps:
        key = f"flow.steps.{node.name}"
        if f"{node.prefix}/" == REWARD_PARTS:
            message = f"fields {REWARD_PARTS}… are parts of the reward"
            problems.add(f"{key}.prefix", message, "another name, such as that of the step's model")
        first = by_prefix.setdefault(node.prefix, node) if node.role == "generate" else node
        if first is not node:
            message = f"generates, as step {first.name!r} does, and both write the same fields"
            hint = "remove one of them, or give one a `prefix` of its own, if it generates with a further model"
            problems.add(f"{key}.prefix", message, hint)
        for message, hint in lacking_settings(node.declaration.spec, node.settings):
            problems.add(key, message, hint, at=f"{key}.call")


def lacking_settings(spec: StepSpec, settings: Mapping[str, object]) -> Iterator[tuple[str, str]]:
    """Find the settings that the runtime needs of a step that makes samples, and that it lacks: message and hint."""
    needed = _NEEDED.get(spec.role, {})
    lacking = [name for name in needed if name not in settings]
    if lacking:
        message = f"a {spec.role} step needs the settings {', '.join(lacking)} with literal defaults"
        declared = ", ".join(f"{name}: {needed[name]}" for name in lacking)
        yield message, f"declare them as keyword-only parameters, for example {declared}"
    if spec.role == "generate" and spec.environment is not None and "max_tokens" not in settings:
        message = "its environment's tokens need room too, and nothing says how much"
        hint = "declare max_tokens, a keyword-only parameter with a literal default: all tokens behind the prompt"
        yield message, hint


def _check_plugins(layout: LayoutConfig, problems: Problems) -> None:
    for name, pool in layout.pools.items():
        key = f"layout.pools.{name}"
        named = [(f"{key}.engine", pool.engine, ENGINES), (f"{key}.backend", pool.backend, BACKENDS)]
        named += [(f"{key}.each.{i}.engine", own.engine, ENGINES) for i, own in pool.each.items() if own.engine]
        for at, value, table in named:
            try:
                call = full_name(value, table)
            except LookupError as error:
                kind = at.rpartition(".")[2]
                problems.add(at, f"there is no {kind} {value!r}", str(error))
            else:
                _definition(call, at, problems)


def _definition(call: str, key: str, problems: Problems) -> Definition | None:
    try:
        return find_source(call).node
    except PluginError as error:
        problems.add(key, str(error))
        return None
