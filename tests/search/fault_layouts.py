"""What each search for faults takes from a recipe, scaled down to what a scenario can hold.

Recipes know nothing of the machines that they will run on. So each worker that is meant has a host of its own, or one
of those that its pool is pinned to (for training any number up to that), and sites are random.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import product

from distflow.errors import UserError
from distflow.flow.edges import Edge
from distflow.flow.plan import Plan, PoolPlan
from distflow.sim.notes import counted
from distflow.sim.predict import load_of
from tests.search.agent_faults import MOST_TERM_HOSTS, MOST_TRAINERS, AgentLayout
from tests.search.agent_mesh import HOSTS
from tests.search.call_faults import MOST_AHEAD, MOST_CALLERS, MOST_SERVERS, CallLayout
from tests.search.lease_faults import Arithmetic
from tests.search.weight_faults import MOST_READERS, WeightLayout


@dataclass(frozen=True, slots=True)
class FaultLayouts:
    """Of one recipe."""

    leases: Arithmetic | None
    calls: tuple[CallLayout, ...]
    weights: tuple[WeightLayout, ...]
    agents: AgentLayout
    lacking: Mapping[str, str]
    """What the recipe has nothing to search of, and why."""


def layouts_of(plan: Plan) -> FaultLayouts:
    """What the searches need of a plan."""
    calls, weights = tuple(dict.fromkeys(_calls(plan))), tuple(dict.fromkeys(_weights(plan)))
    leases, lacking = None, dict[str, str]()
    try:
        leases = _arithmetic(plan)
    except UserError as error:
        lacking["leases"] = str(error).removeprefix("simulate: ").partition(" — ")[0]
    if not calls:
        lacking["calls"] = "no pool of this recipe asks another one"
    if not weights:
        lacking["weights"] = "no pool of this recipe takes weights from another one"
    return FaultLayouts(leases, calls, weights, _agents(plan), lacking)


def shown_layouts(layouts: FaultLayouts) -> dict[str, str]:
    """What a scenario holds of the recipe, for each kind of cores that it has."""
    found = {
        "leases": "" if layouts.leases is None else _shown_leases(layouts.leases),
        "calls": "; ".join(map(_shown_calls, layouts.calls)),
        "weights": "; ".join(map(_shown_weights, layouts.weights)),
        "agents": _shown_agents(layouts.agents),
    }
    return {name: text for name, text in found.items() if text}


def _shown_leases(small: Arithmetic) -> str:
    bound = "unbounded" if small.staleness is None else small.staleness
    workers, owners = max(2, small.workers), min(small.ledgers, max(2, small.owners))
    return f"1 to {workers} generating workers, 1 to {owners} that train, max_staleness {bound}"


def _shown_calls(layout: CallLayout) -> str:
    servers = [counted(layout.servers, "server")] if layout.servers else []
    if layout.shared:
        servers.append("the same for a trained model")
    elif layout.homes:
        kind = "generating server" if layout.generated else "server"
        servers.append(f"{counted(layout.homes, kind)} of a trained model")
    return f"{counted(layout.clients, 'caller')} of {' and '.join(servers)}"


def _shown_weights(layout: WeightLayout) -> str:
    waits = ", which training waits for" if layout.in_step else ""
    return f"{counted(layout.readers, 'reading host')}, {'with' if layout.deltas else 'without'} deltas{waits}"


def _shown_agents(layout: AgentLayout) -> str:
    if not layout.renews:
        return f"{layout.hosts} hosts, and no second term (layout.on_failure: stop)"
    where = f" on 1 to {layout.training_hosts} of them" if layout.training_hosts > 1 else ""
    hosts = f"{layout.hosts} hosts"
    if layout.hosts > MOST_TERM_HOSTS:
        hosts += f" ({MOST_TERM_HOSTS} where terms are decided)"
    return f"{hosts}, {counted(layout.owners + layout.others, 'training worker')}{where}"


def _arithmetic(plan: Plan) -> Arithmetic:
    """Raises UserError for a plan whose leases cannot be simulated."""
    load = load_of(plan)
    limits = load.settings
    return Arithmetic(
        ledgers=min(limits.ledgers, 4),
        groups_per_ledger=min(limits.groups_per_ledger, 3),
        samples=min(limits.samples_per_prompt, 4),
        owners=min(load.replicas, 4),
        workers=min(load.rollouts, 5),
        staleness=None if limits.max_staleness is None else min(limits.max_staleness, 3),
        hedging=limits.hedging,
        partial_rollouts=limits.partial_rollouts,
        streamed=load.streamed,
        stealing=load.stealing,
        dealing=load.dealing,
        colocated=load.colocated,
        schedule=limits.schedule,
        refresh=load.refresh,
    )


def _calls(plan: Plan) -> Iterator[CallLayout]:
    """Of each pool that asks: with each step that needs a version of a trained model, and each that does not."""
    calls = [edge for edge in plan.edges if edge.kind == "call"]
    stale = plan.batch.max_staleness
    for source in dict.fromkeys(edge.source for edge in calls):
        own = [edge for edge in calls if edge.source == source]
        frozen: list[Edge | None] = [edge for edge in own if edge.version in ("", "frozen")]
        versioned: list[Edge | None] = [edge for edge in own if edge not in frozen]
        for one, other in product(frozen or [None], versioned or [None]):
            yield CallLayout(
                clients=min(plan.pool(source).count, MOST_CALLERS),
                servers=0 if one is None else min(plan.pool(one.target).count, MOST_SERVERS),
                homes=0 if other is None else min(plan.pool(other.target).count, MOST_SERVERS),
                shared=one is not None and other is not None and one.target == other.target,
                generated=other is not None and other.version == "at least",
                ahead=MOST_AHEAD if stale is None else min(stale, MOST_AHEAD),
            )


def _weights(plan: Plan) -> Iterator[WeightLayout]:
    """Of each model that workers of other pools than its home take: with any link, there are some that get chunks."""
    for model in plan.trained_models:
        edges = [edge for edge in plan.edges if edge.kind == "weights" and edge.model == model]
        pools = {edge.target for edge in edges if edge.source != edge.target}
        if readers := sum(_hosts(plan, plan.pool(name)) for name in pools):
            deltas, in_step = plan.recipe.weights.encoding != "full", plan.batch.max_staleness == 0
            yield WeightLayout(min(readers, MOST_READERS), deltas, in_step)


def _agents(plan: Plan) -> AgentLayout:
    home, further = plan.home, [pool for pool in plan.pools if pool.homes and pool != plan.home]
    others = min(sum(pool.count for pool in further), MOST_TRAINERS // 2)
    return AgentLayout(
        hosts=min(HOSTS, max(2, sum(_hosts(plan, pool) for pool in plan.pools))),
        owners=min(home.count, MOST_TRAINERS - others),
        others=others,
        training_hosts=min(MOST_TRAINERS, sum(_hosts(plan, pool) for pool in (home, *further))),
        shrinks=plan.recipe.layout.on_failure == "shrink",
        renews=plan.recipe.layout.on_failure != "stop",
    )


def _hosts(plan: Plan, pool: PoolPlan) -> int:
    """On how many hosts the workers of a pool are at most."""
    pinned = plan.recipe.layout.pools[pool.name].hosts
    named = pinned and not any(letter in name for name in map(str, pinned) for letter in "*?[")
    return min(pool.count, len(pinned)) if named else pool.count
