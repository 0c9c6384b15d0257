"""Random faults through the cores of a run: every promise is kept, and a core that breaks one is found."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import get_args

import pytest
from click.testing import CliRunner

from distflow.config.schema import Refresh, Schedule
from distflow.exchange.rollout_core import RolloutCore, Turn
from distflow.flow.recipe_check import plan_recipe
from distflow.launch.cli import group
from distflow.sim import worker
from distflow.sim.faults import arithmetic_of, judge, scenario_of, search, variants
from distflow.types import Version

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
    broken = (found.what for found in search(plain[0], range(40)) if found is not None)
    assert any(re.search(what, text) for text in broken)


def test_the_instance_is_small_and_of_the_recipes_kind() -> None:
    _, plan = plan_recipe("quickstart", ["layout=colocated", "layout.max_staleness=1"], need_files=False)
    found = arithmetic_of(plan)
    assert (found.colocated, found.staleness, found.ledgers, found.hedging) == (True, 1, 4, plan.recipe.layout.hedging)


def test_the_command_names_the_seed_and_how_to_repeat_it(monkeypatch: pytest.MonkeyPatch) -> None:
    kept = CliRunner().invoke(group, ["simulate", "quickstart", "--faults", "2", "--seed", "4"], standalone_mode=False)
    assert (kept.return_value, kept.output) == (0, "2 scenarios, seeds 4 to 5: all promises were kept\n")
    monkeypatch.setattr(worker, "RolloutCore", Forgetful)
    words = ["simulate", "quickstart", "layout.max_staleness=1", "--faults", "1", "--seed", "7"]
    broken = CliRunner().invoke(group, words, standalone_mode=False)
    assert broken.return_value == 1
    assert "repeat it with: distflow simulate quickstart layout.max_staleness=1 --faults 1 --seed 7" in broken.output
    assert "1 broke a promise" in broken.output
