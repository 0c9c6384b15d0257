"""What a search for faults takes from a recipe, and that scenarios have it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from distflow.flow.recipe_check import plan_recipe
from distflow.sim.scenario import Crash
from tests.search import agent_faults, agent_mesh
from tests.search.agent_faults import AgentLayout, judge_agents
from tests.search.agent_terms import World
from tests.search.call_faults import CallLayout, calls_of, judge_calls
from tests.search.call_network import CallNetwork
from tests.search.call_scenario import FROZEN, VERSIONED, CallScenario, Cut
from tests.search.fault_layouts import FaultLayouts, layouts_of, shown_layouts
from tests.search.fault_search import search_cores
from tests.search.lease_scenario import Pause
from tests.search.swarm_network import SwarmNetwork
from tests.search.weight_faults import WeightLayout, judge_weights, weights_of
from tests.search.weight_scenario import ClockJump, Damage, WeightScenario

POOLS = "layout.pools"


def layouts(*words: str) -> FaultLayouts:
    _, plan = plan_recipe("quickstart", words, need_files=False)
    return layouts_of(plan)


def test_services_are_asked_by_the_pools_that_ask_them() -> None:
    found = layouts("layout=services", "flow=grpo_kl", f"{POOLS}.reward.count=9", "layout.max_staleness=1")
    callers = CallLayout(2, 5, 0, shared=False, generated=False, ahead=1)
    assert found.calls == (callers, CallLayout(1, 1, 0, shared=False, generated=False, ahead=1))
    assert shown_layouts(found)["calls"] == "2 callers of 5 servers; 1 caller of 1 server"


def test_steps_of_trained_models_are_asked_by_version() -> None:
    critic = layouts("layout=critic", "flow=ppo", "layout.max_staleness=unbounded")
    assert critic.calls == (CallLayout(1, 0, 2, shared=False, generated=False, ahead=2),)
    assert shown_layouts(critic)["calls"] == "1 caller of 2 servers of a trained model"
    played = layouts("layout=self_play", "flow=self_play")
    assert played.calls == (CallLayout(2, 0, 1, shared=False, generated=True, ahead=0),)
    assert shown_layouts(played)["calls"] == "2 callers of 1 generating server of a trained model"
    assert [one.readers for one in played.weights] == [2, 1], "of either model"


def test_who_reads_weights_is_whoever_another_pool_trains_for() -> None:
    assert layouts().weights == (WeightLayout(2, deltas=True, in_step=True),)
    full = ["layout=async", f"{POOLS}.rollout.count=9", "weights.encoding=full"]
    assert layouts(*full).weights == (WeightLayout(6, deltas=False, in_step=False),)
    pinned = layouts(*full, f"{POOLS}.rollout.hosts=[gpu-1, gpu-2]")
    assert pinned.weights == (WeightLayout(2, deltas=False, in_step=False),)
    assert layouts(*full, f"{POOLS}.rollout.hosts=[gpu-*]").weights[0].readers == 6, "any of them"
    assert layouts("layout=colocated").weights == ()


def test_agents_are_on_as_many_hosts_as_there_are_workers() -> None:
    one = AgentLayout(3, 1, 0, 1, shrinks=False, renews=True)
    assert layouts().agents == one
    assert shown_layouts(layouts())["agents"] == "3 hosts, 1 training worker"
    many = layouts("layout=critic", "flow=ppo", f"{POOLS}.trainer.count=8", f"{POOLS}.rollout.count=30")
    assert many.agents == AgentLayout(20, 3, 2, 5, shrinks=False, renews=True)
    assert shown_layouts(many)["agents"] == "20 hosts (5 where terms are decided), 5 training workers on 1 to 5 of them"
    pinned = layouts(f"{POOLS}.trainer={{count: 4, hosts: [gpu-1]}}", "layout.on_failure=shrink")
    assert pinned.agents == AgentLayout(3, 4, 0, 1, shrinks=True, renews=True)
    assert layouts("layout.on_failure=stop").agents.renews is False


def test_scenarios_have_the_layout_of_the_recipe() -> None:
    one, other = CallLayout(2, 3, 0, False, False, 1), CallLayout(1, 0, 2, False, True, 0)
    found = [calls_of(seed, [one, other]) for seed in range(20)]
    kept = {(s.clients, s.servers, s.homes, s.generated, s.ahead) for s in found}
    assert kept == {(2, 3, 0, False, 1), (1, 0, 2, True, 0)}
    weights = [weights_of(seed, [WeightLayout(4, deltas=True, in_step=True)]) for seed in range(20)]
    assert {(len(s.joins), s.in_step, s.delta_bytes > 0) for s in weights} == {(4, True, True)}
    assert not any(weights_of(seed, [WeightLayout(4, False, False)]).delta_bytes for seed in range(20))


@pytest.mark.parametrize("renews", [True, False])
def test_agents_have_the_layout_of_the_recipe(monkeypatch: pytest.MonkeyPatch, renews: bool) -> None:
    worlds, meshes = list[World](), list[int]()

    def keep(*given: object, **further: object) -> World:
        worlds.append(World(*given, **further))  # type: ignore[arg-type]
        return worlds[-1]

    monkeypatch.setattr(agent_faults, "World", keep)
    monkeypatch.setattr(agent_faults, "SETTLES_S", 0)
    monkeypatch.setattr(agent_faults, "EVENTS", ("wait",))
    monkeypatch.setattr(agent_mesh, "check_events", lambda seed, loss, events, hosts, injected: meshes.append(hosts))
    layout = AgentLayout(hosts=7, owners=2, others=1, training_hosts=2, shrinks=False, renews=renews)
    for seed in range(40):
        judge_agents(seed, layout)
    assert set(meshes) == {7}
    assert bool(worlds) == renews, "without a second term none is looked for"
    assert all([*world.trainers][:2] == ["trainer/0", "trainer/1"] for world in worlds)
    assert all([*world.trainers][2:] == ["critic/0"] for world in worlds)
    assert {len({*world.trainers.values()}) for world in worlds} == ({1, 2} if renews else set())
    assert all(len(world.agents) <= 5 and not world.rules.shrinks for world in worlds)


@pytest.mark.parametrize(
    "scenario, called, pools",
    [
        (CallScenario(servers=3), (FROZEN, VERSIONED), {FROZEN: 3, VERSIONED: 3}),
        (CallScenario(servers=3, homes=1), (FROZEN, VERSIONED), {FROZEN: 3, VERSIONED: 1}),
        (CallScenario(servers=3, shared=True), (FROZEN, VERSIONED), {FROZEN: 3}),
        (CallScenario(servers=3, homes=0), (FROZEN,), {FROZEN: 3}),
        (CallScenario(servers=0, homes=2), (VERSIONED,), {VERSIONED: 2}),
    ],
)
def test_only_what_a_recipe_calls_is_called(
    scenario: CallScenario, called: tuple[str, ...], pools: dict[str, int]
) -> None:
    network = CallNetwork(scenario)
    asked = {step for _, step, _, _ in network.run().answers}
    assert (scenario.called, scenario.pools, asked) == (called, pools, set(called))
    assert set(network.servers) == {f"{pool}/{n}" for pool, servers in pools.items() for n in range(servers)}


def test_faults_count_as_they_happen() -> None:
    scenario = CallScenario(
        steps=4,
        groups=6,
        token_s=0.02,
        crashes=[Crash(1, 0.5, None), Crash(1, 0.6, None)],
        pauses=[Pause(1, 1.0, 5.0), Pause(0, 1.0, 0.5)],
        cuts=[Cut(0, 2, 1.0, 3.0)],
        joins=[0.1],
        delay_s=0.3,
        duplicates=0.2,
    )
    network = CallNetwork(scenario)
    network.run()
    counts = network.injected
    assert (counts["crashes"], counts["pauses"], counts["cuts"], counts["joins"]) == (1, 1, 1, 1), "of those alive"
    assert counts["messages_lost"] > 0, "by the cut"
    assert counts["messages_doubled"] > 0
    assert counts["messages_overtaken"] > 0
    kept = CallNetwork(replace(scenario, delay_s=0.0, duplicates=0.0, cuts=()))
    kept.run()
    assert not any(kept.injected[what] for what in ("messages_lost", "messages_doubled", "messages_overtaken"))


def test_wrong_bytes_and_clocks_count_where_weights_are_fetched() -> None:
    scenario = WeightScenario(
        joins=(0.0, 0.0, 3.0),
        chunks=8,
        publishes=(6.0,),
        jumps=[ClockJump(1, 1.0, 100.0)],
        damages=[Damage(1, 5.0)],
        liars=frozenset({2}),
        calm_at=20.0,
    )
    network = SwarmNetwork(scenario)
    record = network.run()
    counts = network.injected
    assert (counts["clock_jumps"], counts["damaged_chunks"], counts["joins"]) == (1, 1, 1)
    assert counts["wrong_chunks"] >= record.wrong > 0


@pytest.mark.parametrize("part", range(4))
def test_no_layout_of_a_recipe_breaks_a_promise(part: int) -> None:
    calls = [
        CallLayout(2, 2, 0, False, False, 0),
        CallLayout(3, 5, 1, False, False, 2),
        CallLayout(1, 0, 3, False, True, 1),
        CallLayout(2, 2, 2, True, False, 1),
    ]
    weights = [WeightLayout(readers, deltas, not deltas) for readers in (1, 3) for deltas in (True, False)]
    agents = [
        AgentLayout(2, 1, 0, 1, shrinks=False, renews=True),
        AgentLayout(8, 3, 2, 5, shrinks=False, renews=True),
        AgentLayout(5, 4, 0, 3, shrinks=True, renews=True),
        AgentLayout(6, 2, 0, 2, shrinks=False, renews=False),
    ]
    for seed in range(part, 24, 4):
        assert judge_calls(seed, [calls[part]]) is None
        assert judge_weights(seed, [weights[part]]) is None
        assert judge_agents(seed, agents[part]) is None


def test_half_of_the_scenarios_have_the_recipes_layout_and_a_seed_always_the_same() -> None:
    found = layouts("layout=services", "flow=grpo_kl")
    one, again = (
        [(each.own, each.injected) for each in search_cores(found, cores, range(20, 30))]
        for cores in (["calls"], ["calls", "calls"])
    )
    assert one == again
    assert 2 <= sum(own for own, _ in one) <= 8
    assert all(each.own for each in search_cores(found, ["leases"], range(3)))
