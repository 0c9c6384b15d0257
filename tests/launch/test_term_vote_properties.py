"""Whatever is cut, killed, late or asleep: never two terms that can both train, and no term with two successors."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st

from distflow.cluster.host_report import DesiredWorkers, HostReport
from distflow.cluster.term_vote import OUT_OF_REACH, Begin, Standstill, Stop, propose
from tests.budget import within
from tests.search import agent_terms as terms
from tests.search.agent_faults import judge_agents
from tests.search.agent_terms import World

EVENTS = st.lists(
    st.tuples(
        st.sampled_from(terms.EVENTS),
        st.integers(0, 7),
        st.integers(0, 255),
    ),
    max_size=14,
)
LAYOUTS = st.sampled_from(terms.LAYOUTS)


@settings(max_examples=40)
@given(LAYOUTS, st.integers(0, 2), st.booleans(), st.integers(0, 10_000), EVENTS)
@within(4, examples=40)
def test_never_two_terms_that_train(
    layout: list[int], critics: int, shrinks: bool, seed: int, events: list[object]
) -> None:
    world = World(layout, shrinks=shrinks, seed=seed, critics=min(critics, len(layout) - 1))
    for event in events:
        world.happens(*event)
        world.check()


@settings(max_examples=15)
@given(LAYOUTS, st.integers(0, 10_000), EVENTS)
@within(4, examples=15)
def test_a_pool_that_is_whole_again_goes_on(layout: list[int], seed: int, events: list[object]) -> None:
    world = World(layout, shrinks=True, seed=seed)
    for kind, a, b in events:
        if kind not in ("crash", "kill"):
            world.happens(kind, a, b)
    world.happens("heal", 0, 0)
    before = len(world.commits)
    for _ in range(120):
        world.second()
    assert len(world.commits) > before, [agent.pool.term for agent in world.agents]
    world.check()


@settings(max_examples=15)
@given(LAYOUTS, st.integers(0, 1), st.booleans(), st.integers(0, 255), st.integers(0, 10_000), EVENTS)
@within(4, examples=15)
def test_the_last_decision_is_taken_up_once_all_hear_each_other(
    layout: list[int], critics: int, shrinks: bool, last: int, seed: int, events: list[object]
) -> None:
    world = World(layout, shrinks=shrinks, seed=seed, critics=min(critics, len(layout) - 1))
    for kind, a, b in events:
        if kind not in ("crash", "kill"):
            world.happens(kind, a, b)
    world.happens("heal", 0, 0)
    for _ in range(90):
        world.second()
    decided = world.scale(world.agents[0], last)
    for _ in range(30):
        world.second()
    newest = world.where(max(world.begun, default=0))
    pool = next(iter(decided), "/").partition("/")[0]
    assert {name: host for name, host in newest.items() if name.startswith(f"{pool}/")} == decided
    assert world.commits[-1][1] == max(world.begun, default=0), "it trains"
    world.check()


def test_a_host_that_dies_once_its_workers_have_ended_is_left_out() -> None:
    """It has voted for nothing, and never will."""
    for seed in range(8):
        world = World([0, 1, 2], shrinks=True, seed=seed)
        world.happens("wait", 0, 5)
        world.happens("kill", 2, 1)
        world.happens("crash", 2, 0)
        world.happens("heal", 0, 24)
        world.happens("heal", 0, 24)
        world.check()
        assert world.commits[-1][0] == world.now, [agent.pool.term.waits for agent in world.agents]
        assert set(world.commits[-1][2]) == {"trainer/0", "trainer/1"}


def test_a_host_that_hears_nobody_any_more_does_not_end_the_run() -> None:
    """All others have reported the end of their workers before."""
    world = World([0, 1, 2], shrinks=True, seed=0)
    world.happens("wait", 0, 5)
    for agent in world.agents:
        agent.pool.note("killed", alive=False, look=lambda: ((), ()))
        agent.broken, agent.live = "killed", {}
    reports = {
        agent.mesh.host: HostReport(agent.mesh.host, agent.mesh.own.entry, 9, agent.pool.term) for agent in world.agents
    }
    view = world._view(world.agents[0])
    silent = replace(view, terms={host: one.term for host, one in reports.items()}, unheard_s={1: 99.0, 2: 99.0})
    found = propose(silent, world.rules)
    assert isinstance(found, Standstill)
    assert not found.hopeless
    assert "only 1 of 3 training workers are on hosts that can be heard here" in found.why


def partition(layout: list[int], groups: dict[int, int], seconds: int, *, shrinks: bool = True) -> World:
    world = World(layout, shrinks=shrinks, seed=0)
    for _ in range(5):
        world.second()
    world.group = groups
    for _ in range(seconds):
        world.second()
    world.check()
    return world


def test_of_two_and_two_neither_goes_on_and_both_say_why() -> None:
    world = partition([0, 0, 1, 1], {0: 0, 1: 1}, 120)
    assert not any(agent.live for agent in world.agents)
    assert all("only 2 of 4 training workers" in agent.pool.term.waits for agent in world.agents)
    world.happens("heal", 0, 10)
    assert set(world.begun) == {1}
    assert all(set(agent.live.values()) == {1} for agent in world.agents)


def test_of_two_and_one_the_two_go_on_after_the_one_has_ended() -> None:
    world = partition([0, 0, 1], {0: 0, 1: 1}, 11)
    assert not world.agents[1].live, "cut off after limits.host_silence_s"
    assert set(world.agents[0].live.values()) == {0}, "the others wait until it must have ended"
    for _ in range(10):
        world.second()
    assert world.agents[0].live == {"trainer/0": 1, "trainer/1": 1}
    assert world.agents[1].pool.term.waits
    world.happens("heal", 0, 10)
    assert world.agents[1].pool.term.members == ("trainer/0", "trainer/1")
    assert not world.agents[1].live


def test_a_term_whose_members_are_out_of_reach_is_not_begun() -> None:
    """The search found that a host, cut off after the vote, began it when the others went on to the one after.

    Of three members one stayed on its host, and two were new on the other one, which began at once.
    """
    assert judge_agents(9010369) is None
    world = World([0, 0, 1], shrinks=True, seed=4)
    world.second()
    world.agents[1].decided["trainer"] = DesiredWorkers((1, 1), {"trainer/1": 0, "trainer/10": 1, "trainer/11": 1})
    while world.agents[1].pool.term.number == 0:
        world.second()
    world.group, world.flying = {0: 0, 1: 1}, []
    assert world.agents[0].pool.term.number == 0, "it has voted, and has not heard of the other vote"
    for _ in range(60):
        world.second()
        world.check()
    assert world.agents[0].pool.term.waits == OUT_OF_REACH
    assert world.agents[1].live == {"trainer/10": 2, "trainer/11": 2}
    world.happens("heal", 0, 10)
    assert world.agents[0].pool.term.number == 2
    assert not world.agents[0].live


def test_who_waits_for_members_that_have_died_since_they_began_says_so_and_ends() -> None:
    world = World([0, 0, 1], shrinks=True, seed=4)
    world.second()
    waiting, ahead = world.agents
    ahead.decided["trainer"] = DesiredWorkers((1, 1), {"trainer/1": 0, "trainer/10": 1, "trainer/11": 1})
    while ahead.pool.term.number == 0:
        world.second()
    pool, view = waiting.pool, world._view(waiting)
    view = replace(view, terms={**view.terms, 1: ahead.pool.term}, unseen_s={1: 99.0})
    pool._patience_s = 50.0
    assert pool.act(view, alive=False, lacks=lambda term: "", now=100.0) is None
    assert pool.term.waits == OUT_OF_REACH
    assert pool.act(view, alive=False, lacks=lambda term: "", now=149.0) is None
    ended = pool.act(view, alive=False, lacks=lambda term: "", now=150.0)
    assert isinstance(ended, Stop)
    assert OUT_OF_REACH in ended.why
    heard = replace(view, unseen_s={1: 0.0})
    assert pool.act(heard, alive=False, lacks=lambda term: "", now=151.0) == Begin(ahead.pool.term.begun)


def test_critics_without_a_policy_stand_still_and_say_so() -> None:
    """Two of three members are critics on a host of their own: a majority with nothing to go on with."""
    world = World([0, 1, 1], shrinks=True, seed=0, critics=2)
    for _ in range(5):
        world.second()
    world.group = {0: 0, 1: 1}
    for _ in range(60):
        world.second()
    world.check()
    assert not any(agent.live for agent in world.agents)
    policy, critics = (agent.pool.term.waits for agent in world.agents)
    assert "only 1 of 3 training workers" in policy
    assert "with the workers of pool 'trainer', without which its models cannot be trained" in critics
    world.happens("heal", 0, 20)
    assert {number for agent in world.agents for number in agent.live.values()} == {1}


def test_under_restart_the_two_wait_for_the_one_to_come_back() -> None:
    world = partition([0, 0, 1], {0: 0, 1: 1}, 60, shrinks=False)
    assert not any(agent.live for agent in world.agents)
    assert "with layout.on_failure: restart, training cannot continue without them" in world.agents[0].pool.term.waits
    world.happens("heal", 0, 10)
    assert {number for agent in world.agents for number in agent.live.values()} == {1}
