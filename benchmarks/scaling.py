"""Weak scaling: a constant share for each worker, the times of a 7B model on H100s, and more and more real workers.

    python -m benchmarks scaling                        # 4, 8, 16, 32 and 64 workers on this machine
    python -m benchmarks scaling --workers 4 64 --steps 20

Half of the workers generate, half train: 8 prompts × 8 samples a training step for each pair, staleness 1, lognormal
lengths that are cut off at 1,024 tokens, so that the longest of a step are equally long however many there are. Devices
only wait, as long as they would compute; processes, sockets, leases, sums and weights are real. Efficiency is the time
of a training step of the smallest size by that of a larger one. CPU seconds are those of the system's accounting.
"""

from __future__ import annotations

import argparse
import statistics
import time

import psutil

from benchmarks.emulated import BASE, options
from benchmarks.hot_spot import Moment, between

DEVICE = "h100-qwen2.5-7b"
WARMUP = 4
SHARED = (
    *BASE,
    "layout.max_staleness=1",
    "flow.steps.sample.with.max_new_tokens=1024",
    "batch.tokens_per_microbatch=8192",
)


def overrides(workers: int, scale: float) -> list[str]:
    """Of a run with so many workers, half of them training."""
    pairs = workers // 2
    device = {"device": DEVICE, "time_scale": scale}
    return [
        *SHARED,
        f"batch={{prompts: {8 * pairs}, samples_per_prompt: 8, ledgers: {pairs}}}",
        f"layout.pools.rollout.count={pairs}",
        f"layout.pools.trainer.count={pairs}",
        options("layout.pools.rollout.engine_options", **device, median=400, sigma=0.8, poll_s=0.05),
        options("layout.pools.trainer.backend_options", **device, size=1024),
    ]


def _cpu_s(first: Moment, last: Moment, pool: str) -> float:
    """Mean CPU seconds of a worker of the pool in a training step."""
    spent = [last.workers[name].cpu_s - first.workers[name].cpu_s for name in first.workers if name.startswith(pool)]
    return statistics.mean(spent) / (last.step - first.step)


def main() -> None:
    """A line for each size."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, nargs="+", default=[4, 8, 16, 32, 64])
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--scale", type=float, default=1.0, help="seconds on the wall for each second of a device")
    chosen = parser.parse_args()
    base: tuple[float, float, float] | None = None
    for workers in chosen.workers:
        begin, busy = time.monotonic(), psutil.cpu_times()
        first, last = between(overrides(workers, chosen.scale), WARMUP, WARMUP + chosen.steps)
        busy_s = sum(psutil.cpu_times()[:3]) - sum(busy[:3])
        steps, seconds = last.step - first.step, last.at_s - first.at_s
        found = (seconds / steps, _cpu_s(first, last, "rollout"), _cpu_s(first, last, "trainer"))
        base = base or found
        mine = (found[1] + found[2]) * workers / 2 / found[0]
        private = max(sample.private for sample in last.workers.values()) / 2**20
        print(
            f"{workers:3d} workers: {found[0]:6.2f} s a step ({base[0] / found[0]:.1%}), CPU a step: rollout "
            f"{found[1] * 1e3:.0f} ms ({found[1] / base[1]:.2f}), trainer {found[2] * 1e3:.0f} ms "
            f"({found[2] / base[2]:.2f}); cores busy with it: {mine:.2f}, with everything: "
            f"{busy_s / (time.monotonic() - begin):.2f} of {psutil.cpu_count()}; private memory ≤ {private:.0f} MiB",
            flush=True,
        )
