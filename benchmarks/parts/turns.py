"""Contestants of one measurement take turns on the same machine, and medians and their ratios are told.

A machine's speed changes from one minute to the next, so nothing is measured alone: every repetition gives each
contestant one turn, and the first turns are not counted (they touch memory and open connections).
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from distflow.log import logger

Figures = Mapping[str, float]
"""What one turn measured, by name; the unit is in the name."""
Turn = Callable[[], Figures]

log = logger(__name__)
REPETITIONS = 5


@dataclass(frozen=True, slots=True)
class Series:
    """All turns of one contestant that count."""

    turns: list[Figures]

    def median(self, name: str) -> float:
        """The median of one figure."""
        return statistics.median(turn[name] for turn in self.turns)

    def spread(self, name: str) -> tuple[float, float]:
        """The lowest and the highest."""
        found = [turn[name] for turn in self.turns]
        return min(found), max(found)


def take_turns(contestants: Mapping[str, Turn], repetitions: int, warm_ups: int = 1) -> dict[str, Series]:
    """Give each contestant `warm_ups` turns that do not count, and `repetitions` that do, interleaved."""
    found: dict[str, Series] = {name: Series([]) for name in contestants}
    for number in range(warm_ups + repetitions):
        for name, turn in contestants.items():
            figures = turn()
            if number >= warm_ups:
                found[name].turns.append(figures)
    return found


@dataclass(slots=True)
class Measurement:
    """What a benchmark has to tell: figures by name, each with the lowest and the highest where it was repeated."""

    name: str
    repetitions: int
    figures: dict[str, float] = field(default_factory=dict)
    spread: dict[str, tuple[float, float]] = field(default_factory=dict)
    left_out: dict[str, str] = field(default_factory=dict)
    """Other systems that did not take part, and why."""
    load_before: float = field(default_factory=lambda: os.getloadavg()[0])

    def tell(self, name: str, series: Series, of: str | None = None) -> None:
        """Add the median and the spread of figure `of` (default: the same name) of a contestant."""
        self.figures[name] = series.median(of or name)
        self.spread[name] = series.spread(of or name)

    def as_json(self) -> dict[str, Any]:
        """Plain values: the figures at the top, and what they were measured on beside them."""
        return {
            "bench": self.name,
            **{name: _rounded(value) for name, value in self.figures.items()},
            "spread": {name: [_rounded(low), _rounded(high)] for name, (low, high) in self.spread.items()},
            "left_out": self.left_out,
            "machine": {
                "cores": len(os.sched_getaffinity(0)),
                "repetitions": self.repetitions,
                "load": [round(self.load_before, 2), round(os.getloadavg()[0], 2)],
            },
        }

    def as_text(self) -> str:
        """A line a figure."""
        lines = [f"{self.name}: medians of {self.repetitions} interleaved repetitions"]
        for name, value in self.figures.items():
            low, high = self.spread.get(name, (value, value))
            spread = f"  [{_rounded(low):g}–{_rounded(high):g}]" if name in self.spread else ""
            lines.append(f"  {name:34s} {_rounded(value):>10g}{spread}")
        lines += [f"  without {system}: {reason}" for system, reason in self.left_out.items()]
        machine = self.as_json()["machine"]
        return "\n".join([*lines, f"  on {machine['cores']} cores, load {machine['load'][0]} to {machine['load'][1]}"])

    def show(self, as_json: bool) -> str:
        """As JSON on one line, or as text."""
        return json.dumps(self.as_json()) if as_json else self.as_text()


def _rounded(value: float) -> float:
    """Four digits are more than a repetition agrees on."""
    return float(f"{value:.4g}")


def turn_options(about: str | None) -> argparse.ArgumentParser:
    """Make the parser of a benchmark whose contestants take turns, with the options that all of these have."""
    parser = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repetitions", type=int, default=REPETITIONS)
    parser.add_argument("--json", action="store_true", help="one line of JSON a measurement")
    # What a benchmark has started ends with it, however it is ended.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    return parser
