"""`distflow bench step`: the samples of one training step on their way from the workers that made them to the trainers.

Half of the workers have generated the samples, the others train on them (read every byte once). A step begins with
the leases and ends when all training workers have read all that is theirs. The other systems move the same number of
samples, tokens and fields of the same types.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path

from distflow.bench import step_workers
from distflow.bench.other_systems import OtherSystems
from distflow.bench.step_workers import StepSetting
from distflow.bench.team import Team
from distflow.bench.turns import Figures, Measurement, Series, Turn, take_turns

OTHERS = ("verl", "verl_whole_step", "ray_pull", "ray_pull_numpy", "siirl")
WARM_UPS = 2


class StepTeam:
    """The workers of one machine, which do one step whenever it is their turn."""

    def __init__(self, team: Team, folder: Path, sizes: Mapping[str, int], steps: int) -> None:
        half = sizes["workers"] // 2
        self._owners = tuple(f"trainer/{number}" for number in range(half))
        self._holders = tuple(f"rollout/{number}" for number in range(half))
        self._team = team
        names = (*self._owners, *self._holders)
        roster = {name: f"ipc://{folder}/{name.replace('/', '-')}" for name in names}
        setting = StepSetting(self._owners, self._holders, roster, sizes["samples"], sizes["tokens"], steps)
        for name in names:
            team.start(name, step_workers.train if name in self._owners else step_workers.generate, setting)
        addresses = team.answers(names)
        team.tell(names, {name: address for name, address in addresses.items() if address is not None})
        self._used = self._usage()

    def turn(self) -> Figures:
        """One step."""
        began = time.perf_counter()
        self._team.tell(self._owners, "step")
        self._team.answers(self._owners)
        seconds = time.perf_counter() - began
        before, self._used = self._used, self._usage()
        moved = {name: used["bytes"] - before[name]["bytes"] for name, used in self._used.items()}
        cpu_s = sum(used["cpu_s"] - before[name]["cpu_s"] for name, used in self._used.items())
        everything = sum(moved.values())
        return {
            "seconds": seconds,
            "busiest_share": max(moved.values()) / everything,
            "cpu_s_per_gb": cpu_s / (everything / 2 / 1e9),
            "gb_s": everything / 2 / 1e9 / seconds,
        }

    def _usage(self) -> Mapping[str, Mapping[str, float]]:
        names = (*self._owners, *self._holders)
        self._team.tell(names, "usage")
        return self._team.answers(names)


def measure(sizes: Mapping[str, int], repetitions: int, peers: str | None) -> Measurement:
    """Ours beside the other systems that are installed. `sizes`: workers, samples, tokens."""
    outcome = Measurement("step", repetitions)
    with ExitStack() as stack:
        others = stack.enter_context(OtherSystems("ray_step", peers, OTHERS, sizes))
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="df-")))
        team = stack.enter_context(Team(step_workers.__name__))
        ours = StepTeam(team, folder, sizes, WARM_UPS + repetitions)
        turns: dict[str, Turn] = {"distflow": ours.turn, **others.turns}
        found = take_turns(turns, repetitions, WARM_UPS)
        outcome.left_out = others.left_out
    _tell(outcome, found, sizes["workers"])
    return outcome


def _tell(outcome: Measurement, found: Mapping[str, Series], workers: int) -> None:
    ours = found["distflow"]
    for name in ("seconds", "gb_s", "cpu_s_per_gb", "busiest_share"):
        outcome.tell(name, ours)
    outcome.figures["busiest_share_of_even"] = outcome.figures["busiest_share"] * workers
    for system, series in found.items():
        if series is not ours:
            outcome.tell(f"{system}_seconds", series, of="seconds")
            outcome.figures[f"{system}_ratio"] = outcome.figures[f"{system}_seconds"] / outcome.figures["seconds"]
