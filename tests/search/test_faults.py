"""Random faults through the cores of a run: every promise is kept, and a core that breaks one is found."""

from __future__ import annotations

import re
import shlex
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import redirect_stdout
from dataclasses import replace
from io import StringIO
from typing import Any, NamedTuple, get_args

import pytest

from distflow.cluster import term_vote
from distflow.comm.pulses import Pulses
from distflow.comm.roll_call import RollCall
from distflow.config.schema import Refresh, Schedule
from distflow.exchange.call_client import CallClient
from distflow.exchange.group_transfer import KEPT, Send, Transfer
from distflow.exchange.rollout_core import RolloutCore, Turn
from distflow.exchange.steal_core import StealCore
from distflow.flow.recipe_check import plan_recipe
from distflow.sim import worker
from distflow.types import Version
from distflow.weights.swarm.fetch_actions import Landing
from tests.search import __main__ as command
from tests.search import agent_mesh, fault_search
from tests.search.__main__ import main
from tests.search.agent_faults import AgentLayout
from tests.search.agent_terms import World
from tests.search.fault_layouts import FaultLayouts, layouts_of, shown_layouts
from tests.search.fault_queue import Fault
from tests.search.fault_search import CORES, SearchedSeed, search_cores
from tests.search.lease_faults import BrokenPromise, judge, scenario_of, variants

SCENARIOS = 300
FOUND = (16, 20, 76)
"""Seeds that broke a promise once: workers that leave while a term begins; a call that only a drop makes due."""


@pytest.mark.parametrize("part", range(6))
def test_no_scenario_breaks_a_promise(part: int) -> None:
    kinds = variants()
    for seed in range(part, SCENARIOS, 6):
        assert judge(seed, scenario_of(kinds[seed % len(kinds)], seed)) is None


@pytest.mark.parametrize("schedule", [name for name in get_args(Schedule) if name != "fifo"])
def test_no_schedule_of_leases_breaks_a_promise(schedule: Schedule) -> None:
    kinds = [replace(kind, schedule=schedule) for kind in variants() if kind.staleness is not None]
    for seed in range(2 * len(kinds)):
        assert judge(seed, scenario_of(kinds[seed % len(kinds)], seed)) is None


@pytest.mark.parametrize("refresh", [name for name in get_args(Refresh) if name != "eager"])
def test_no_way_to_take_weights_breaks_a_promise(refresh: Refresh) -> None:
    kinds = [replace(kind, refresh=refresh) for kind in variants() if kind.staleness is not None]
    for seed in range(2 * len(kinds)):
        assert judge(seed, scenario_of(kinds[seed % len(kinds)], seed)) is None


@pytest.mark.parametrize("seed", FOUND)
def test_what_broke_a_promise_once_is_mended(seed: int) -> None:
    kinds = variants()
    assert judge(seed, scenario_of(kinds[seed % len(kinds)], seed)) is None


def test_an_announcement_that_overtakes_the_next_one_begins_no_step_again() -> None:
    """A worker went back to the step before, of which it knew the end, and generated nothing more."""
    colocated = [kind for kind in variants() if kind.colocated and kind.staleness == 2 and not kind.dealing]
    for kind in colocated:
        assert judge(3000877, scenario_of(replace(kind, schedule="longest_first"), 3000877)) is None


@pytest.mark.parametrize("seed, schedule, staleness", [(4009587, "skew_aware", 1), (4014109, "longest_first", 0)])
def test_nothing_of_a_worker_that_is_gone_reaches_owners_that_began_later(
    seed: int, schedule: Schedule, staleness: int
) -> None:
    """They leased to it, and nobody told them that it was gone."""
    kinds = (kind for kind in variants() if not kind.hedging and kind.stealing and not kind.partial_rollouts)
    kind = next(kind for kind in kinds if kind.staleness == staleness and kind.streamed and not kind.colocated)
    assert judge(seed, scenario_of(replace(kind, schedule=schedule), seed)) is None


class Hasty(RolloutCore):
    """Starts groups on any weights of their term."""

    def turn(self, free_slots: int, running_on: Version | None, *state: object) -> Turn:
        assert running_on is not None
        return super().turn(free_slots, running_on._replace(number=10**6), *state)  # type: ignore[arg-type]


class Forgetful(RolloutCore):
    """Never starts the last group that it is granted."""

    def turn(self, free_slots: int, *state: object) -> Turn:
        turn = super().turn(free_slots, *state)  # type: ignore[arg-type]
        return turn._replace(start=[lease for lease in turn.start if lease.position != 5])


@pytest.mark.parametrize(
    ("core", "what"), [(Hasty, r"started position \d+ on version \d"), (Forgetful, "no end by 10000")]
)
def test_a_core_that_breaks_a_promise_is_found(
    monkeypatch: pytest.MonkeyPatch, core: type[RolloutCore], what: str
) -> None:
    monkeypatch.setattr(worker, "RolloutCore", core)
    plain = [a for a in variants() if a.staleness == 1 and not a.hedging]
    layouts = FaultLayouts(plain[0], (), (), AgentLayout(2, 1, 0, 1, shrinks=False, renews=True), {})
    judged = (one.broken for one in search_cores(layouts, ["leases"], range(40)))
    assert any(re.search(what, broken.what) for broken in judged if broken is not None)


def _keep_all(core: StealCore, holder: str, transfer: Transfer) -> list[Send]:
    """Say that groups were kept that were not."""
    core._search = None
    return [Send(holder, KEPT, {"number": transfer.number})]


@pytest.mark.parametrize(("method", "instead"), [("take_returned", lambda core: []), ("_on_groups", _keep_all)])
def test_a_replica_that_loses_what_comes_back_of_a_theft_is_found(
    monkeypatch: pytest.MonkeyPatch, method: str, instead: object
) -> None:
    monkeypatch.setattr(StealCore, method, instead)
    plain = next(kind for kind in variants() if kind.staleness == 1 and kind.stealing)
    assert any(judge(seed, scenario_of(plain, seed)) is not None for seed in range(100))


def _either(roll: RollCall, agreed: int, common: int, checksum: int) -> None:
    """Whoever one of those that agree has heard counts as heard by all of them."""
    if agreed:
        roll._agreed, roll._common = roll._agreed | agreed, roll._common | common


def test_an_agent_that_takes_for_proven_what_is_not_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    events = [("publish", 0, 20), ("cut", 0, 0), ("cut", 1, 0), ("cut", 2, 6)]
    agent_mesh.check_events(0, 0.0, events)
    monkeypatch.setattr(RollCall, "_merge", _either)
    with pytest.raises(AssertionError, match=r"host \d+ takes it for proven that \d+ has heard it at"):
        agent_mesh.check_events(0, 0.0, events)


def _on_other_hosts() -> None:
    """Two workers of four have gone to other hosts; then hosts 2 and 3 are not heard by the others, which they hear."""
    world = World([0, 1, 2, 3], shrinks=True, seed=8425)
    for event in (("scale", 7, 173), ("wait", 6, 115), ("scale", 2, 63), ("unheard", 5, 188)):
        world.happens(*event)
        world.check()


def test_an_agent_that_takes_any_beat_for_a_confirmation_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    _on_other_hosts()
    monkeypatch.setattr(Pulses, "confirm", lambda pulses, by, pulse: pulses._heard_us.__setitem__(by, pulses.clock))
    with pytest.raises(AssertionError, match=r"term 3 begins while \['trainer/21'\] of former terms live"):
        _on_other_hosts()


def test_the_instance_is_small_and_of_the_recipes_kind() -> None:
    _, plan = plan_recipe("quickstart", ["layout=colocated", "layout.max_staleness=1"], need_files=False)
    found = layouts_of(plan).leases
    assert found is not None
    assert (found.colocated, found.staleness, found.ledgers, found.hedging) == (True, 1, 4, plan.recipe.layout.hedging)


SERVED = ("layout=services", "flow=grpo_kl")
"""A recipe with calls."""


class Searched(NamedTuple):
    """What the command returned and printed."""

    code: int
    output: str


def searched(*words: str, served: Sequence[str] = SERVED) -> Searched:
    printed = StringIO()
    with redirect_stdout(printed):
        code = main([*words, "--recipe", "quickstart", *served])
    return Searched(code, printed.getvalue())


def test_the_command_searches_all_cores_in_turn() -> None:
    found = searched("--count", "6", "--seed", "4")
    each = "2 of leases, 2 of calls, 1 of weights, 1 of agents"
    *kinds, last = found.output.splitlines(keepends=True)
    assert (found.code, last) == (
        0,
        f"6 scenarios ({each}), seeds 4 to 9: all promises were kept\n",
    )
    heads = [line for line in kinds if not line.startswith("  ")]
    assert [line.split(",")[0].split(" with")[0] for line in heads] == [
        "leases: 2 scenarios",
        "calls: 2 scenarios",
        "weights: 1 scenario",
        "agents: 1 scenario",
    ]
    assert all(line.endswith("; all promises were kept\n") for line in heads)


def test_what_was_injected_is_told_for_each_kind(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = list[SearchedSeed]()

    def watched(*given: Any) -> Iterator[SearchedSeed]:
        for one in search_cores(*given):
            seen.append(one)
            yield one

    monkeypatch.setattr(command, "search_cores", watched)
    found = searched("calls", "agents", "--count", "12").output
    _, plan = plan_recipe("quickstart", SERVED, need_files=False)
    small = shown_layouts(layouts_of(plan))
    for name in ("calls", "agents"):
        own = sum(one.own for one in seen if one.cores == name)
        injected = sum((one.injected for one in seen if one.cores == name), Counter[Fault]())
        faults = ", ".join(f"{what.replace('_', ' ')} {injected[what]:,}" for what in get_args(Fault) if injected[what])
        assert f"{name}: 6 scenarios, {own} with the recipe's layout and {6 - own} with random ones; all" in found
        assert f"  injected: {faults}\n" in found
        assert f"  the recipe's layout: {small[name]}\n" in found
    assert 0 < sum(one.own for one in seen if one.cores == "calls") < 6
    calls, agents = (re.search(rf"{name}: .*\n.*\n  injected: (.*)", found) for name in ("calls", "agents"))
    assert calls is not None
    assert agents is not None
    assert all(f"{what} " in calls.group(1) for what in ("crashes", "messages lost", "messages overtaken"))
    assert all(f"{what} " in agents.group(1) for what in ("cuts", "pauses", "messages late"))


def test_what_a_recipe_has_nothing_of_is_said_and_not_searched() -> None:
    found = searched("--count", "3", served=["layout=colocated"])
    none = {
        "calls": "no pool of this recipe asks another one",
        "weights": "no pool of this recipe takes weights from another one",
    }
    assert all(f"{name}: not searched, for {why}\n" in found.output for name, why in none.items())
    assert "3 scenarios (2 of leases, 1 of agents), seeds 0 to 2: all promises were kept" in found.output
    told = searched("--count", "1", served=["flow=sft"]).output
    none["leases"] = "this flow trains on files and generates nothing"
    assert all(f"{name}: not searched, for {why}\n" in told for name, why in none.items())
    assert "1 scenario (1 of agents), seeds 0 to 0: all promises were kept" in told


def test_without_a_recipe_all_kinds_of_layouts_are_searched(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--count", "4", "--seed", "8"]) == 0
    told = capsys.readouterr().out
    assert [line for line in told.splitlines() if not line.startswith("  injected: ")] == [
        *(f"{name}: 1 scenario; all promises were kept" for name in CORES),
        "4 scenarios (1 of leases, 1 of calls, 1 of weights, 1 of agents), seeds 8 to 11: all promises were kept",
    ]
    kinds = {(kind.schedule, kind.staleness, kind.colocated, kind.dealing) for kind in fault_search.KINDS}
    assert {schedule for schedule, *_ in kinds} == {*get_args(Schedule)}
    assert {staleness for _, staleness, *_ in kinds} == {0, 1, 2, None}


@pytest.mark.parametrize(
    ("cores", "scenarios", "where", "what", "instead"),
    [
        ("leases", 2, worker, "RolloutCore", Forgetful),
        ("calls", 2, CallClient, "tick", lambda client, now: []),
        ("weights", 40, Landing, "right", property(lambda landing: True)),
        ("agents", 40, term_vote, "elected", lambda view, rules: None),
    ],
)
def test_the_command_names_the_seed_and_how_to_repeat_it(
    monkeypatch: pytest.MonkeyPatch, cores: str, scenarios: int, where: object, what: str, instead: object
) -> None:
    """Of whichever cores have a fault; those that then wait for ever take long."""
    monkeypatch.setattr(where, what, instead)
    recipe = [*SERVED, "layout.max_staleness=1"]
    found = searched("--count", str(scenarios), served=recipe)
    broken = re.findall(r"^(\w+), seed (\d+): (.*)\n  repeat it with: (.*)$", found.output, re.MULTILINE)
    assert broken
    assert found.code == 1
    assert {name for name, *_ in broken} == {cores}
    again = f"python -m tests.search {cores} --seed {{}} --count 1 --recipe quickstart {' '.join(recipe)}"
    assert {one for *_, one in broken} == {again.format(seed) for _, seed, *_ in broken}
    _, seed, why, repeats = broken[0]
    alone = searched(*shlex.split(repeats)[3 : -1 - len(recipe) - 1], served=recipe)
    assert alone.code == 1
    assert f"{cores}, seed {seed}: {why}\n  repeat it with: {again.format(seed)}" in alone.output
    assert f"; 1 broke a promise, seeds {seed}\n" in alone.output
    assert alone.output.endswith(": 1 broke a promise\n")


def test_the_command_that_repeats_a_seed_can_be_pasted_into_a_shell(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fault_search, "JUDGES", {"calls": lambda seed, *about: BrokenPromise(seed, "lost")})
    override = "models.policy.path=my models/policy"
    found = searched("calls", "--count", "1", "--seed", "5", served=[*SERVED, override])
    again = re.search("repeat it with: (.*)", found.output)
    assert again is not None
    words = ["calls", "--seed", "5", "--count", "1", "--recipe", "quickstart", *SERVED, override]
    assert shlex.split(again.group(1)) == ["python", "-m", "tests.search", *words]


def test_a_search_that_is_interrupted_says_how_far_it_came(monkeypatch: pytest.MonkeyPatch) -> None:
    def judged(seed: int, *_about: object) -> None:
        if seed == 2:
            raise KeyboardInterrupt

    monkeypatch.setattr(fault_search, "JUDGES", {"calls": judged})
    found = searched("calls", "--count", "9")
    assert found.code == 130
    assert found.output.endswith("2 scenarios (2 of calls), seeds 0 to 1: all promises were kept\n")


@pytest.mark.parametrize(
    ("words", "served", "message"),
    [
        (["calls", "lanes"], SERVED, "lanes: expected some of leases, calls, weights, agents"),
        (
            ["agents", "calls"],
            ["layout=split"],
            "calls: no pool of this recipe asks another one — leave it out, or name another layout",
        ),
    ],
)
def test_what_cannot_be_searched_is_refused(
    capsys: pytest.CaptureFixture[str], words: list[str], served: Sequence[str], message: str
) -> None:
    with pytest.raises(SystemExit, match="2"):
        searched(*words, "--count", "1", served=served)
    assert message in capsys.readouterr().err
