"""Read `metrics/*.jsonl` and merge the workers' lines into one object per training step.

Values of several workers merge as follows: means by weight (if there is a `<name>.weight`), explained variances from
their sums, `…/max` and `…/min` by max and min, `timing_s/…` by max; rates, counts and anything with `<name>.summed` are
added; else the last worker's value is taken.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from distflow.data.files import whole_lines
from distflow.metrics.rollout_count import ONE_MORE, one_more_rollout
from distflow.metrics.sums import EXPLAINED, SUM_SUFFIX, WEIGHT_SUFFIX, explained_variance
from distflow.types import REWARD_MEAN, REWARD_PARTS, VAL, VAL_LOSS

SUMMED = ("_per_s", "/throughput", "/count", "/timeouts", "/errors", "/dropped")
TRAINED = "timing_s/step"
"""Written by training workers only, at the end of a step."""
Line = Mapping[str, float]


class MetricsReader:
    """Reads a run's metric files incrementally."""

    def __init__(self, run_dir: Path) -> None:
        self._folder = run_dir / "metrics"
        self._offsets: dict[Path, int] = {}
        self._by_step: dict[int, list[Line]] = {}
        self._last: dict[tuple[str, int], int] = {}
        self.malformed = 0
        """Number of lines that are not JSON: a worker was killed while writing them."""

    def read(self) -> bool:
        """Read what is new; returns whether there was anything. An unfinished last line is left for the next call."""
        found = False
        for path in sorted(self._folder.glob("*.jsonl")):
            found = self._read_file(path) or found
        return found

    def _read_file(self, path: Path) -> bool:
        offset = self._offsets.get(path, 0)
        if path.stat().st_size <= offset:
            return False
        lines, self._offsets[path] = whole_lines(path, offset)
        for text in lines:
            try:
                # NaN and infinity are written as null.
                line = {name: math.nan if value is None else value for name, value in json.loads(text).items()}
            except ValueError:
                self.malformed += 1
            else:
                self._by_step.setdefault(int(line["step"]), []).append(line)
                if not is_validation(line):
                    self._last[path.stem, int(line["term"])] = int(line["step"])
        return bool(lines)

    def last_step(self, workers: Iterable[str], term: int) -> int:
        """Newest training step (1-based) that all of these workers (file stems) have written in this term; 0: none."""
        return min((self._last.get((worker, term), 0) for worker in workers), default=0)

    def first_step(self, term: int) -> int:
        """The step at which a term began (1-based); raises ValueError if it has written nothing."""
        return min(step for step, lines in self._by_step.items() if any(line["term"] == term for line in lines))

    def merged(self) -> list[dict[str, float]]:
        """One object per finished training step, in order; without steps that only generating workers have started.

        Validation of version n stands in that of step n; before the first one, it has an object of its own, step 0.
        """
        by_step = surviving(line for lines in self._by_step.values() for line in lines)
        done = {
            step for step, lines in by_step.items() if any(TRAINED in line or is_validation(line) for line in lines)
        }
        return [merge_step(by_step[step]) for step in sorted(done)]

    def window(self, last: int, steps: int, names: Sequence[str]) -> dict[str, float]:
        """Some metrics over several training steps up to `last` (1-based), merged as if they were one step.

        Only steps of the newest term that has the last one count: before, there may have been other workers, and a
        restart in between. A name that ends in / stands for all that begin with it.
        """
        newest = max((line["term"] for line in self._by_step.get(last, [])), default=0)
        found = (line for step in range(last - steps + 1, last + 1) for line in self._by_step.get(step, []))
        lines = [line for line in found if line["term"] == newest]
        wanted = {name + suffix for name in names for suffix in ("", WEIGHT_SUFFIX, SUM_SUFFIX)}
        families = tuple(name for name in names if name.endswith("/"))
        return merge_step([{n: v for n, v in line.items() if n in wanted or n.startswith(families)} for line in lines])

    def step(self, step: int) -> dict[str, float]:
        """The merged object of one training step (1-based), of the newest term that has it; empty if none has."""
        # A full disk may have cost all of its lines.
        lines = self._by_step.get(step, [])
        newest = max((line["term"] for line in lines), default=0)
        return merge_step([line for line in lines if line["term"] == newest])


def surviving(lines: Iterable[Line]) -> dict[int, list[Line]]:
    """Lines by step, without those of an older term from the step on at which a newer term began again."""
    known = list(lines)
    begins: dict[float, float] = {}
    for line in known:
        if is_validation(line):
            continue  # that of the version with which a term begins may be done again
        begins[line["term"]] = min(line["step"], begins[line["term"]] if line["term"] in begins else line["step"])
    by_step: dict[int, list[Line]] = {}
    for line in known:
        if all(line["step"] < step for term, step in begins.items() if term > line["term"]):
            by_step.setdefault(int(line["step"]), []).append(line)
    return {step: _validated_once(found) for step, found in by_step.items()}


def is_validation(line: Line) -> bool:
    """Whether a line is of validation, rather than of what a worker did in a training step."""
    return any(name.startswith(VAL) for name in line)


def _validated_once(lines: list[Line]) -> list[Line]:
    newest = max((line["term"] for line in lines if is_validation(line)), default=0)
    return [line for line in lines if not is_validation(line) or line["term"] == newest]


def merge_step(lines: list[Line]) -> dict[str, float]:
    """Merge the lines of one step; weights are used and left out. Adds what only all workers together tell."""
    beside = (WEIGHT_SUFFIX, SUM_SUFFIX, *EXPLAINED)
    names = dict.fromkeys(name for line in lines for name in line if not _is_beside(name, line, beside))
    merged = {name: _merge(name, [line for line in lines if name in line]) for name in names}
    # Of one step: a window over several has no times.
    one_more = one_more_rollout(merged, lines) if TRAINED in merged else None
    return merged if one_more is None else merged | {ONE_MORE: one_more}


def _is_beside(name: str, line: Line, suffixes: Sequence[str]) -> bool:
    return any(name.endswith(suffix) and name.removesuffix(suffix) in line for suffix in suffixes)


def _merge(name: str, lines: list[Line]) -> float:
    values = [line[name] for line in lines]
    if all(name + suffix in lines[0] for suffix in EXPLAINED):
        return explained_variance(*(math.fsum(line[name + suffix] for line in lines) for suffix in EXPLAINED))
    weighted = [line for line in lines if name + WEIGHT_SUFFIX in line]
    if weighted:
        return _weighted_mean(name, weighted)
    if name.endswith("/max") or name.startswith("timing_s/"):
        return max(values)
    if name.endswith("/min"):
        return min(values)
    if name.endswith(SUMMED) or any(name + SUM_SUFFIX in line for line in lines):
        return math.fsum(values)
    return values[-1]


def _weighted_mean(name: str, lines: list[Line]) -> float:
    total = math.fsum(line[name + WEIGHT_SUFFIX] for line in lines)
    if total == 0:
        return lines[-1][name]
    # Rounded once, so the order in which lines were read does not matter.
    weighted = (line[name] * line[name + WEIGHT_SUFFIX] for line in lines if line[name + WEIGHT_SUFFIX])
    return math.fsum(weighted) / total


def validated(steps: Iterable[Mapping[str, float]]) -> list[str]:
    """The metrics of validation that tell how good a policy is, over all sources: `val/avg@4`, or `val/loss`.

    Where the reward has parts, the score may be that of one alone: then the mean reward, too.
    """
    good, parts, mean = (f"{VAL}avg@", VAL_LOSS), f"{VAL}{REWARD_PARTS}", f"{VAL}{REWARD_MEAN}"
    names = list(dict.fromkeys(name for step in steps for name in step if name.startswith(VAL)))
    found = [name for name in names if name.startswith(good) and "/" not in name.removeprefix(VAL)]
    return [*found, mean] if mean in names and any(name.startswith(parts) for name in names) else found
