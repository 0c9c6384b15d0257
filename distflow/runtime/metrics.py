"""Metrics of one worker: what it measures in a training step, and the line of its metrics file that comes of it.

Sections of this file:

- *Store*: weighted means, sums and extremes of one step. What is timed here is a span of the trace too.
- *Utilization*: which shares of its time a worker generates, scores, trains and waits.
- *Peak memory* of the process and its GPU.
- *Recovery*: what it took a training pool to come back, in the first training step of its new term.
- *File*: one flat JSON object a training step. A mean is written with its weight beside it (`<name>.weight`), a sum is
  marked as one (`<name>.summed`), and an explained variance has its sums (`EXPLAINED`), so that merging is exact.
"""

from __future__ import annotations

import errno
import json
import os
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from distflow.metrics.sums import EXPLAINED, SUM_SUFFIX, WEIGHT_SUFFIX, explained_variance
from distflow.runtime.disk import DISK, Disk, finite
from distflow.runtime.trace_writer import UNTRACED, TraceSink

TIMING = "timing_s/"
GIB = 1 << 30

# -- store

COUNTERS = ("staleness/mean", "perf/samples_per_s", "perf/tokens_per_s", "critic/score/mean")
"""Metrics that the trace shows as curves, where a worker has them."""


class MetricStore:
    """Collects until `drain`. Safe to call from several threads."""

    def __init__(self, trace: TraceSink = UNTRACED, service: str | None = None) -> None:
        """`service`: the pool of a worker that answers calls or trains on rows, and does nothing else."""
        self.trace = trace
        self._service = service
        self._lock = threading.Lock()
        self._means: dict[str, tuple[float, float]] = {}
        self._explained: dict[str, tuple[float, ...]] = {}
        self._plain: dict[str, float] = {}
        self._summed: set[str] = set()
        self._by_category: defaultdict[str, float] = defaultdict(float)
        self._since: float | None = None
        self._counts: dict[str, float] = {}
        self.recorded = 0
        """Rises with every value; `drain` does not reset it."""

    def mean(self, name: str, value: float, weight: float = 1.0) -> None:
        """Add `value` with `weight` to a mean."""
        with self._lock:
            self.recorded += 1
            total, count = self._means.get(name, (0.0, 0.0))
            self._means[name] = (total + value * weight, count + weight)

    def explained(self, name: str, sums: tuple[float, float, float, float, float]) -> None:
        """Add to an explained variance: number of values, their sum, that of their squares, and the same of errors."""
        with self._lock:
            self.recorded += 1
            self._explained[name] = tuple(
                map(sum, zip(self._explained.get(name, (0.0,) * len(sums)), sums, strict=True))
            )

    def mean_so_far(self, name: str) -> tuple[float, float]:
        """Sum and weight of the mean `name`, or `name/mean`, since the last `drain`; zeros if there is none."""
        with self._lock:
            return self._means.get(name, self._means.get(f"{name}/mean", (0.0, 0.0)))

    def means(self) -> list[str]:
        """Names of all means since the last `drain`."""
        with self._lock:
            return sorted(self._means)

    def counts(self) -> dict[str, float]:
        """Every sum that is not in seconds, since the store was created: `drain` does not reset them."""
        with self._lock:
            return dict(self._counts)

    def max(self, name: str, value: float) -> None:
        """Keep the largest; name it `…/max`, so that merging over workers takes the largest too."""
        with self._lock:
            self.recorded += 1
            self._plain[name] = max(self._plain.get(name, value), value)

    def min(self, name: str, value: float) -> None:
        """Keep the smallest; name it `…/min`."""
        with self._lock:
            self.recorded += 1
            self._plain[name] = min(self._plain.get(name, value), value)

    def add(self, name: str, value: float) -> None:
        """Add to a sum (seconds, counts); merging workers adds too, or takes the longest of `timing_s/…`."""
        with self._lock:
            self.recorded += 1
            if not name.startswith(TIMING):
                self._summed.add(name)
                self._counts[name] = self._counts.get(name, 0.0) + value
            self._plain[name] = self._plain.get(name, 0.0) + value

    def set(self, name: str, value: float) -> None:
        """Set a value, replacing an earlier one."""
        with self._lock:
            self.recorded += 1
            self._plain[name] = value

    @contextmanager
    def timed(self, name: str, category: str = "runtime") -> Iterator[None]:
        """Add the seconds spent inside. `category`, such as a step's role, groups them here and in the trace."""
        begin = time.perf_counter()
        with self._lock:
            if self._since is None:
                self._since = begin
        try:
            yield
        finally:
            end = time.perf_counter()
            self.add(name, end - begin)
            with self._lock:
                self._by_category[category] += end - begin
            self.trace.span(name, "wait" if name.startswith("timing_s/wait_") else category, begin, end)

    def drain(self) -> dict[str, float]:
        """Return everything collected, and the resulting shares of time, as a flat object; empty the store."""
        now = time.perf_counter()
        with self._lock:
            out = dict(self._plain)
            timings = {name: value for name, value in self._plain.items() if name.startswith(TIMING)}
            interval = now - (now if self._since is None else self._since)
            means = {name: (total / weight if weight else 0.0, weight) for name, (total, weight) in self._means.items()}
            if self._service is None:
                shares = time_shares(timings, self._by_category, interval)
            else:
                idle_s = timings.get(REQUESTS, 0.0) + timings.get(ROWS, 0.0)
                shares = _share(f"{SERVICE_IDLE}{self._service}", idle_s, interval)
            for name, (value, weight) in (means | shares).items():
                out[name] = value
                out[name + WEIGHT_SUFFIX] = weight
            for name, sums in self._explained.items():
                out |= {name + suffix: value for suffix, value in zip(EXPLAINED, sums, strict=True)}
                out[name] = explained_variance(*sums)
            out |= {name + SUM_SUFFIX: 1.0 for name in self._summed}
            self._means.clear()
            self._explained.clear()
            self._plain.clear()
            self._summed.clear()
            self._by_category.clear()
            self._since = now if timings else None
        for name in COUNTERS:
            if name in out:
                self.trace.count(name, out[name])
        return out


class PrefixedMetrics(MetricStore):
    """The metrics of steps with a prefix: `actor/loss` and `critic/score/mean` are `solver/loss`, `solver/score/mean`.

    Times keep their names. What is told goes to `inner`, which alone is drained.
    """

    def __init__(self, inner: MetricStore, prefix: str) -> None:
        super().__init__(inner.trace)
        self._inner = inner
        self._prefix = prefix

    def named(self, name: str) -> str:
        """The name in the metrics of the worker."""
        if name.startswith(TIMING):
            return name
        return f"{self._prefix}/{name.removeprefix('actor/').removeprefix('critic/')}"

    def mean(self, name: str, value: float, weight: float = 1.0) -> None:
        """Add `value` with `weight` to a mean."""
        self._inner.mean(self.named(name), value, weight)

    def explained(self, name: str, sums: tuple[float, float, float, float, float]) -> None:
        """Add to an explained variance."""
        self._inner.explained(self.named(name), sums)

    def mean_so_far(self, name: str) -> tuple[float, float]:
        """Sum and weight of a mean."""
        return self._inner.mean_so_far(self.named(name))

    def counts(self) -> dict[str, float]:
        """The sums of these steps."""
        lead = f"{self._prefix}/"
        found = self._inner.counts().items()
        return {name.removeprefix(lead): value for name, value in found if name.startswith(lead)}

    def max(self, name: str, value: float) -> None:
        """Keep the largest."""
        self._inner.max(self.named(name), value)

    def min(self, name: str, value: float) -> None:
        """Keep the smallest."""
        self._inner.min(self.named(name), value)

    def add(self, name: str, value: float) -> None:
        """Add to a sum."""
        self._inner.add(self.named(name), value)

    def set(self, name: str, value: float) -> None:
        """Set a value."""
        self._inner.set(self.named(name), value)

    @contextmanager
    def timed(self, name: str, category: str = "runtime") -> Iterator[None]:
        """Add the seconds spent inside."""
        with self._inner.timed(self.named(name), category):
            yield


# -- utilization

STEP = "timing_s/step"
GENERATE = "timing_s/gen"
PHASE = "timing_s/generation"
"""Seconds of a training step in which a colocated worker generates, before it turns to training."""
TRAINER_WAITS = "timing_s/wait_samples"
WAITS = "timing_s/wait_"
WHILE_TRAINING = (TRAINER_WAITS, f"{WAITS}replicas", f"{WAITS}homes")
REQUESTS, ROWS = "timing_s/wait_requests", "timing_s/wait_rows"
ENVIRONMENT = "timing_s/environment"
"""Seconds in which an engine had nothing to decode, since all episodes waited for something else than tokens."""
SERVICE_IDLE = "perf/idle_share/"
"""And the name of a pool: the share of time in which its workers, which work for others, have nothing to do."""
Share = tuple[float, float]
"""Value between 0 and 1, and its weight in seconds."""


def time_shares(timings: Mapping[str, float], roles: Mapping[str, float], interval_s: float) -> dict[str, Share]:
    """Shares for one line of metrics. `timings`: metrics `timing_s/…`; `roles`: seconds in steps by role.

    A training worker: `perf/trainer_idle_share`, of the time in which it could train. A generating worker:
    `perf/rollout_idle_share`, `perf/generate_share` and `perf/score_share`, of the time in which it could generate,
    which is `interval_s` (since the previous line) unless the worker is colocated, and `perf/environment_share` if its
    engine had nothing to decode for a while, since all episodes waited for something else. A colocated one also gives
    `perf/generation_share`, the part of a training step that its generating phase takes.
    """
    shares: dict[str, Share] = {}
    generating_s = interval_s
    if STEP in timings:
        step_s = timings[STEP]
        generating_s = timings.get(PHASE, 0.0)
        shares |= _share("perf/trainer_idle_share", timings.get(TRAINER_WAITS, 0.0), step_s - generating_s)
        if PHASE in timings:
            shares |= _share("perf/generation_share", generating_s, step_s)
    waits = [name for name in timings if name.startswith(WAITS) and name not in WHILE_TRAINING]
    if GENERATE in timings or (waits and STEP not in timings):
        shares |= _share("perf/rollout_idle_share", sum(timings[name] for name in waits), generating_s)
        shares |= _share("perf/generate_share", timings.get(GENERATE, 0.0), generating_s)
        shares |= _share("perf/score_share", roles.get("score", 0.0), generating_s)
        if ENVIRONMENT in timings:
            shares |= _share("perf/environment_share", timings[ENVIRONMENT], generating_s)
    return shares


def _share(name: str, part_s: float, whole_s: float) -> dict[str, Share]:
    # Parts are measured separately and may exceed the whole slightly.
    return {name: (min(1.0, part_s / whole_s), whole_s)} if whole_s > 0 else {}


# -- peak memory

HOST = "memory/host_peak_gb/max"
"""Peak of the process's resident memory, shared pages included, in GiB, without engines in processes of their own.
Counted since the previous line; where the kernel cannot reset a peak, since the process began."""
DEVICE = "memory/device_peak_gb/max"
"""Peak of what PyTorch had allocated on the worker's GPU since the previous line, in GiB; only with a GPU."""
RESERVED = "memory/device_reserved_gb/max"
"""Peak of what PyTorch had reserved on the GPU for that."""
_FORGET_PEAK = "5"
"""Written to /proc/<pid>/clear_refs (proc_pid_clear_refs(5))."""


class PeakMemory:
    """The peaks of this process and its `device`, between one `take` and the next."""

    def __init__(self, device: str, proc: Path = Path("/proc/self")) -> None:
        self._cuda = torch.device(device) if device.startswith("cuda") else None
        self._proc = proc

    def take(self) -> dict[str, float]:
        """Return the metrics and reset the peaks."""
        out = {HOST: self._resident() / GIB}
        # An engine in a process of its own has the GPU, and this process may never touch it.
        cuda: Any = torch.cuda
        if self._cuda is not None and cuda.is_initialized():
            out[DEVICE] = torch.cuda.max_memory_allocated(self._cuda) / GIB
            out[RESERVED] = torch.cuda.max_memory_reserved(self._cuda) / GIB
            torch.cuda.reset_peak_memory_stats(self._cuda)
        return {name: round(value, 4) for name, value in out.items()}

    def _resident(self) -> int:
        """The peak in bytes."""
        peak = _peak_bytes((self._proc / "status").read_text(encoding="utf-8"))
        try:
            (self._proc / "clear_refs").write_text(_FORGET_PEAK)
        except OSError:
            return peak  # the next peak includes this one
        return peak


def _peak_bytes(status: str) -> int:
    """VmHWM of /proc/<pid>/status, which is in KiB."""
    (line,) = (line for line in status.splitlines() if line.startswith("VmHWM:"))
    return int(line.split()[1]) * 1024


# -- recovery

SECONDS, REPEATED = "recovery/seconds/max", "recovery/repeated_steps/max"
"""From the moment at which the host's agent found the previous term over to the end of the first training step after
it; and training steps that this worker had finished and that are trained again."""
TAIL_BYTES = 1 << 16


class Recovery:
    """Recovery of a training worker. `broken_at`: by the machine's monotonic clock; `step`: begin of the new term."""

    def __init__(self, run_dir: Path, stem: str, broken_at: float, step: int) -> None:
        self._broken_at = broken_at
        self._repeated = max(0, last_step(run_dir / "metrics" / f"{stem}.jsonl") - step)

    def note(self, metrics: MetricStore) -> None:
        """Record the metrics: the first training step is over."""
        metrics.max(SECONDS, time.monotonic() - self._broken_at)
        metrics.max(REPEATED, float(self._repeated))


def last_step(path: Path) -> int:
    """Training step (from 1) of the last whole line of a worker's metrics; 0 if there is none."""
    if not path.is_file():
        return 0
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - TAIL_BYTES))
        lines = file.read().split(b"\n")[:-1]
    for line in reversed(lines):
        try:
            return int(json.loads(line)["step"])
        except (ValueError, KeyError, TypeError):
            # Cut short by a kill, or because we began to read in the middle of a line.
            continue
    return 0


# -- file

WHAT = "metrics"


class MetricWriter:
    """Appends lines to `metrics/<pool>-<i>.jsonl`. Writing goes to the page cache, so it never blocks training.

    A line that the disk has no room for is lost and counted. `measure` gives further values for every line.
    """

    def __init__(
        self, run_dir: Path, worker_stem: str, disk: Disk, measure: Callable[[], Mapping[str, float]] = dict
    ) -> None:
        self._disk = disk
        self._untold: Mapping[str, float] = {}
        """What lost lines said about the disk."""
        self._measure = measure
        folder = run_dir / "metrics"
        folder.mkdir(parents=True, exist_ok=True)
        self._path = folder / f"{worker_stem}.jsonl"
        self._handle = os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)

    def write(self, step: int, term: int, values: Mapping[str, float], *, measured: bool = True) -> None:
        """Write one line; `step` counts training steps from 1. NaN and infinity, which JSON lacks, become null.

        `measured`: with what the worker measures for each line, since the last one with it.
        """
        values = {**values, **(self._measure() if measured else {})}
        for name, value in self._untold.items():
            values[name] = value if name.endswith(SUM_SUFFIX) else value + values.get(name, 0.0)
        line_values = {name: finite(value) for name, value in sorted(values.items())}
        before = os.fstat(self._handle).st_size
        line = (json.dumps({"step": step, "term": term, **line_values}) + "\n").encode()
        try:
            if os.write(self._handle, line) < len(line):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        except OSError as error:
            # Half a line would make the file unreadable.
            os.ftruncate(self._handle, before)
            self._untold = {name: value for name, value in values.items() if name.startswith(DISK)}
            self._disk.refused(WHAT, error)
            self._disk.dropped(WHAT, 1)
        else:
            self._untold = {}
            self._disk.taken(WHAT)

    def close(self) -> None:
        """Close the file."""
        os.close(self._handle)
