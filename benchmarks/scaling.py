"""Weak scaling of real workers on this machine: seconds, CPU, bytes and memory of a worker, by how many there are.

    python -m benchmarks scaling                        # 4, 8, 16, 32 and 64 workers
    python -m benchmarks scaling --workers 4 64 --steps 20
    python -m benchmarks scaling --devices instant --workers 2 4 8 16 --steps 100

Half of the workers generate, half train: 8 prompts × 8 samples a training step for each pair, staleness 1. Devices are
emulated; processes, sockets, leases, sums and weights are real. `--devices h100`: they wait as long as H100s compute a
7B model, with lognormal lengths that are cut off at 1,024 tokens, so that the longest of a step are equally long
however many workers there are. `instant`: they hardly wait, so that only what is left of a worker without its model is
measured. Efficiency is the time of a training step of the smallest size by that of a larger one. CPU seconds are those
of the system's accounting, bytes those that the workers count at their sockets (no gradients, which go by Gloo, and no
weights, by shared memory), both between two training steps in mid-run.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

from benchmarks.emulated import BASE, ROOT, device, options

DEVICE = "h100-qwen2.5-7b"
WARMUP = {"h100": 4, "instant": 15}
LIMIT_S = 600.0
ENDLESS = 100_000
STOPPED = 130
DISTFLOW = [sys.executable, "-m", "distflow.launch"]


@dataclass(frozen=True, slots=True)
class Sample:
    """A worker at one moment."""

    cpu_s: float
    moved: int
    """Bytes sent and received."""
    private: int
    """Bytes of memory that it shares with no other process."""


@dataclass(frozen=True, slots=True)
class Moment:
    """A run in its middle."""

    step: int
    at_s: float
    workers: Mapping[str, Sample]


def overrides(pairs: int, devices: str, scale: float) -> list[str]:
    """Settings of a run with so many workers that generate, and as many that train."""
    if devices == "instant":
        engine = options("layout.pools.rollout.engine_options", median=40, sigma=0.5, device=device(step_s=0.004))
        chosen = [engine, options("layout.pools.trainer.backend_options", device=device(token_s=1e-5), size=1024)]
        chosen += [f"batch.prompts={8 * pairs}"]
    else:
        times = {"device": DEVICE, "time_scale": scale}
        engine = options("layout.pools.rollout.engine_options", **times, median=400, sigma=0.8, poll_s=0.05)
        chosen = [engine, options("layout.pools.trainer.backend_options", **times, size=1024)]
        chosen += ["flow.steps.sample.with.max_new_tokens=1024", "batch.tokens_per_microbatch=8192"]
        chosen += [f"batch={{prompts: {8 * pairs}, samples_per_prompt: 8, ledgers: {pairs}}}"]
    counts = [f"layout.pools.{pool}.count={pairs}" for pool in ("rollout", "trainer")]
    return [*BASE, "layout.max_staleness=1", *chosen, *counts]


def between(settings: Sequence[str], first: int, last: int) -> tuple[Moment, Moment]:
    """Run the quickstart with these overrides until training step `last` is done; the moment of it and of `first`."""
    with tempfile.TemporaryDirectory() as folder:
        command = [*DISTFLOW, "launch", "quickstart", f"run.training_steps={ENDLESS}", *settings]
        log = Path(folder) / "log"
        with log.open("w") as out:
            process = subprocess.Popen(
                [*command, "--run", "scaled", "--runs-dir", folder], stdout=out, stderr=out, cwd=ROOT
            )
        moments = _moment_at(folder, first, process), _moment_at(folder, last, process)
        subprocess.run([*DISTFLOW, "stop", "scaled", "--runs-dir", folder], capture_output=True, check=True)
        if process.wait(LIMIT_S) != STOPPED:
            raise RuntimeError(f"{' '.join(command)} ended with {process.returncode}:\n{log.read_text()}")
    return moments


def _moment_at(folder: str, step: int, process: subprocess.Popen[bytes]) -> Moment:
    """Once a training step has been reached."""
    metrics = Path(folder) / "scaled" / "metrics" / "trainer-0.jsonl"
    deadline = time.monotonic() + LIMIT_S
    while not metrics.exists() or metrics.read_text().count("\n") < step:
        assert process.poll() is None, f"the run ended early:\n{(Path(folder) / 'log').read_text()}"
        assert time.monotonic() < deadline, f"training step {step} was not reached"
        time.sleep(0.05)
    reached, now = metrics.read_text().count("\n"), time.monotonic()
    told = subprocess.run(
        [*DISTFLOW, "status", "scaled", "--json", "--runs-dir", folder], capture_output=True, text=True, check=True
    )
    return Moment(reached, now, {row["name"]: _sample(row) for row in json.loads(told.stdout)["workers"]})


def _sample(row: Mapping[str, object]) -> Sample:
    process = psutil.Process(int(str(row["pid"])))
    times, traffic = process.cpu_times(), row["traffic"]
    assert isinstance(traffic, dict), f"{row['name']} told no traffic"
    moved = int(traffic["bytes_sent"]) + int(traffic["bytes_received"])
    return Sample(times.user + times.system, moved, process.memory_full_info().uss)


def _a_step(first: Moment, last: Moment, pool: str, what: Callable[[Sample], float]) -> list[float]:
    """Say of each worker of a pool how much of something a training step takes."""
    names = [name for name in first.workers if name.startswith(pool)]
    return [(what(last.workers[name]) - what(first.workers[name])) / (last.step - first.step) for name in names]


def main() -> None:
    """A line for each size, and one for each of its pools; ratios are to the smallest size."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, nargs="+", default=[4, 8, 16, 32, 64])
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--devices", choices=list(WARMUP), default="h100")
    parser.add_argument("--scale", type=float, default=1.0, help="seconds on the wall for each second of an h100")
    chosen = parser.parse_args()
    base: dict[str, float] = {}
    for workers in chosen.workers:
        begin, busy, warm = time.monotonic(), psutil.cpu_times(), WARMUP[chosen.devices]
        first, last = between(overrides(workers // 2, chosen.devices, chosen.scale), warm, warm + chosen.steps)
        busy_s = sum(psutil.cpu_times()[:3]) - sum(busy[:3])
        step_s = (last.at_s - first.at_s) / (last.step - first.step)
        private = max(sample.private for sample in last.workers.values()) / 2**20
        mine = sum(sum(_a_step(first, last, pool, lambda one: one.cpu_s)) for pool in ("rollout", "trainer")) / step_s
        print(
            f"{workers:3d} workers: {step_s:6.2f} s a step ({base.setdefault('step_s', step_s) / step_s:.1%}); cores "
            f"busy with it: {mine:.2f}, with everything: {busy_s / (time.monotonic() - begin):.2f} of "
            f"{psutil.cpu_count()}; private memory ≤ {private:.0f} MiB"
        )
        for pool in ("rollout", "trainer"):
            cpu_ms = 1e3 * statistics.mean(_a_step(first, last, pool, lambda one: one.cpu_s))
            moved = _a_step(first, last, pool, lambda one: one.moved / 1e3)
            kilobytes = statistics.mean(moved)
            print(
                f"    {pool}: {cpu_ms:6.1f} ms CPU a step ({cpu_ms / base.setdefault(f'{pool} cpu', cpu_ms):.2f}), "
                f"{kilobytes:7.1f} kB a step ({kilobytes / base.setdefault(f'{pool} kB', kilobytes):.2f}), "
                f"busiest {max(moved) / kilobytes:.2f} × the mean",
                flush=True,
            )
