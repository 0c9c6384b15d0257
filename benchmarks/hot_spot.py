"""Does any process get busier when there are more of them? CPU time and bytes of each, a training step.

    python -m benchmarks hot_spot --pairs 1 2 4 8 --steps 100            # with emulated devices
    python -m benchmarks hot_spot --pairs 1 2 4 8 --steps 100 --model    # with the quickstart's model

P rollouts and P training workers, 8 prompts a training step for each pair: a constant share. With emulated devices only
what is left of a worker without its model is measured, which one step of the model is many times of. CPU seconds are
those of the system's accounting, bytes those that the workers count at their sockets, both between two training steps
in mid-run. Gradients (Gloo) and weights (shared memory) are not among the bytes.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

from benchmarks.emulated import BASE, ROOT, device, options

WARMUP = 15
LIMIT_S = 600.0
ENDLESS = 100_000
STOPPED = 130
REAL = ("layout=split", "layout.max_staleness=1", "run.dump_rollouts=0")
EMULATED = (
    *BASE,
    "layout.max_staleness=1",
    options("layout.pools.rollout.engine_options", median=40, sigma=0.5, device=device(step_s=0.004)),
    options("layout.pools.trainer.backend_options", device=device(token_s=1e-5), size=1024),
)
DISTFLOW = [sys.executable, "-m", "distflow.launch"]


@dataclass(frozen=True, slots=True)
class Sample:
    """Of one worker at one moment."""

    cpu_s: float
    bytes_sent: int
    bytes_received: int
    private: int
    """Bytes of memory that it shares with no other process."""


@dataclass(frozen=True, slots=True)
class Moment:
    """Of a run, in mid-run."""

    step: int
    at_s: float
    workers: Mapping[str, Sample]


def run(pairs: int, steps: int, *, model: bool) -> dict[str, tuple[float, float]]:
    """CPU milliseconds and kilobytes (both ways) a training step, by worker; with a real `model` or none."""
    more = [f"batch.prompts={8 * pairs}", *(REAL if model else EMULATED)]
    more += [f"layout.pools.rollout.count={pairs}", f"layout.pools.trainer.count={pairs}"]
    first, last = between(more, WARMUP, WARMUP + steps)
    return {name: _per_step(first.workers[name], last.workers[name], last.step - first.step) for name in first.workers}


def between(overrides: Sequence[str], first: int, last: int) -> tuple[Moment, Moment]:
    """Run the quickstart with these overrides until training step `last` is done; the moment of it and of `first`."""
    with tempfile.TemporaryDirectory() as folder:
        command = [*DISTFLOW, "launch", "quickstart", f"run.training_steps={ENDLESS}", *overrides]
        log = Path(folder) / "log"
        with log.open("w") as out:
            process = subprocess.Popen(
                [*command, "--run", "hot", "--runs-dir", folder], stdout=out, stderr=out, cwd=ROOT
            )
        moments = _moment_at(folder, first, process), _moment_at(folder, last, process)
        subprocess.run([*DISTFLOW, "stop", "hot", "--runs-dir", folder], capture_output=True, check=True)
        if process.wait(LIMIT_S) != STOPPED:
            raise RuntimeError(f"{' '.join(command)} ended with {process.returncode}:\n{log.read_text()}")
    return moments


def _moment_at(folder: str, step: int, process: subprocess.Popen[bytes]) -> Moment:
    """Once a training step has been reached."""
    metrics = Path(folder) / "hot" / "metrics" / "trainer-0.jsonl"
    deadline = time.monotonic() + LIMIT_S
    while not metrics.exists() or metrics.read_text().count("\n") < step:
        assert process.poll() is None, f"the run ended early:\n{(Path(folder) / 'log').read_text()}"
        assert time.monotonic() < deadline, f"training step {step} was not reached"
        time.sleep(0.05)
    reached, now = metrics.read_text().count("\n"), time.monotonic()
    told = subprocess.run(
        [*DISTFLOW, "status", "hot", "--json", "--runs-dir", folder], capture_output=True, text=True, check=True
    )
    return Moment(reached, now, {row["name"]: _sample(row) for row in json.loads(told.stdout)["workers"]})


def _sample(row: Mapping[str, object]) -> Sample:
    process = psutil.Process(int(str(row["pid"])))
    times = process.cpu_times()
    traffic = row["traffic"]
    assert isinstance(traffic, dict), f"{row['name']} told no traffic"
    return Sample(
        times.user + times.system,
        int(traffic["bytes_sent"]),
        int(traffic["bytes_received"]),
        process.memory_full_info().uss,
    )


def _per_step(first: Sample, last: Sample, steps: int) -> tuple[float, float]:
    moved = last.bytes_sent - first.bytes_sent + last.bytes_received - first.bytes_received
    return 1e3 * (last.cpu_s - first.cpu_s) / steps, moved / 1e3 / steps


def main() -> None:
    """A line for each pool and size; ratios are to the smallest size."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, nargs="+", default=[1, 2, 4, 8])
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--model", action="store_true", help="train the quickstart's model")
    chosen = parser.parse_args()
    base: dict[str, tuple[float, float]] = {}
    for pairs in chosen.pairs:
        found = run(pairs, chosen.steps, model=chosen.model)
        for pool in ("rollout", "trainer"):
            cpu, kilobytes = zip(*(value for name, value in found.items() if name.startswith(pool)), strict=True)
            middle = (statistics.median(cpu), statistics.median(kilobytes))
            first = base.setdefault(pool, middle)
            busiest = max(kilobytes) / statistics.mean(kilobytes)
            print(
                f"{2 * pairs:3d} workers, {pool}: {middle[0]:6.1f} ms CPU a step ({middle[0] / first[0]:.2f}), "
                f"{middle[1]:7.1f} kB a step ({middle[1] / first[1]:.2f}), busiest {busiest:.2f} × the mean",
                flush=True,
            )
