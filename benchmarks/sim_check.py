"""The simulator against reality: real workers on emulated devices, and the simulation of the same plans.

    python -m benchmarks sim_check                        # all configurations, one after another
    python -m benchmarks sim_check --only kill slow       # some of them

Seconds of a training step, the first ones excluded, and how many versions old the groups that are trained on are. The
real ones have processes, sockets, sums and weights that the simulation has not, on whatever cores are here.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from benchmarks.emulated import BASE, ROOT, options
from distflow.flow.recipe_check import plan_recipe
from distflow.sim.emulation import EmulatedEngineOptions
from distflow.sim.predict import SimulateOptions, load_of, simulate
from distflow.sim.scenario import Crash

DEVICE = "h100-qwen2.5-7b"
SCALE = 0.5
WARMUP, STEPS = 3, 9
LIMIT_S = 600.0
DISTFLOW = [sys.executable, "-m", "distflow.launch"]
NARROW = {"median": 500, "sigma": 0.3}
USUAL = {"median": 400, "sigma": 0.8, "prompt_share": 0.5}
HEAVY = {"median": 200, "sigma": 1.4, "prompt_share": 0.5}
"""Lengths: alike, as usual, and with a heavy tail; all are cut off at 1,024 tokens."""


@dataclass(frozen=True, slots=True)
class Configuration:
    """Of a run."""

    rollouts: int
    trainers: int
    staleness: int
    lengths: Mapping[str, float]
    slow: float = 1.0
    """Of the first rollout."""
    killed_at: int = 0
    """The training step at which the first rollout is killed; 0: none."""

    def overrides(self) -> list[str]:
        """Of the quickstart."""
        device = {"device": DEVICE, "time_scale": SCALE}
        engine = "layout.pools.rollout.{}engine_options"
        slow = options(engine.format("each.0."), **device, **self.lengths, slow=self.slow)
        return [
            *BASE,
            f"layout.max_staleness={self.staleness}",
            f"layout.pools.rollout.count={self.rollouts}",
            f"layout.pools.trainer.count={self.trainers}",
            f"batch={{prompts: {8 * self.trainers}, samples_per_prompt: 8, ledgers: {self.trainers}}}",
            "batch.tokens_per_microbatch=8192",
            "flow.steps.sample.with.max_new_tokens=1024",
            options(engine.format(""), **device, **self.lengths),
            options("layout.pools.trainer.backend_options", **device, size=1024),
            *([slow] if self.slow > 1.0 else []),
            "run.dump_rollouts=1",
            f"run.training_steps={WARMUP + STEPS + 2}",
        ]


CONFIGURATIONS = {
    "2": Configuration(1, 1, 1, USUAL),
    "2-synchronous": Configuration(1, 1, 0, USUAL),
    "4-narrow": Configuration(2, 2, 1, NARROW),
    "4-heavy": Configuration(2, 2, 1, HEAVY),
    "8": Configuration(4, 4, 1, USUAL),
    "8-synchronous": Configuration(4, 4, 0, NARROW),
    "8-stale": Configuration(4, 4, 2, HEAVY),
    "slow": Configuration(4, 2, 1, USUAL, slow=3.0),
    "kill": Configuration(4, 2, 1, USUAL, killed_at=6),
    "16": Configuration(8, 8, 1, USUAL),
    "32": Configuration(16, 16, 1, USUAL),
}


@dataclass(frozen=True, slots=True)
class Figures:
    """Of a run or of its simulation."""

    step_s: float
    """Seconds of a training step on the wall."""
    staleness: Mapping[int, float]
    """Share of the samples by how many versions they are old."""
    killed_s: float = 0.0
    """When a worker was killed, after the begin of the first training step."""


def real(configuration: Configuration) -> Figures:
    """Run it."""
    with tempfile.TemporaryDirectory() as folder:
        command = [*DISTFLOW, "launch", "quickstart", *configuration.overrides(), "--run", "real", "--runs-dir", folder]
        log = Path(folder) / "log"
        with log.open("w") as out:
            process = subprocess.Popen(command, stdout=out, stderr=out, cwd=ROOT)
            killed_s = _kill(folder, configuration.killed_at) if configuration.killed_at else 0.0
            if process.wait(LIMIT_S):
                raise RuntimeError(f"{' '.join(command)} ended with {process.returncode}:\n{log.read_text()}")
        shown = [*DISTFLOW, "metrics", "real", "--json", "--runs-dir", folder]
        read = subprocess.run(shown, capture_output=True, text=True, cwd=ROOT, check=True)
        seconds = [line["timing_s/step"] for line in json.loads(read.stdout)][WARMUP : WARMUP + STEPS]
        return Figures(statistics.mean(seconds), _staleness(Path(folder) / "real" / "rollouts"), killed_s)


def _kill(folder: str, step: int) -> float:
    """Kill the first rollout once a training step is done; returns when that was, from the first step's end on."""
    metrics = Path(folder) / "real" / "metrics" / "trainer-0.jsonl"
    began, deadline = 0.0, time.monotonic() + LIMIT_S
    while (done := metrics.read_text().count("\n") if metrics.exists() else 0) < step:
        assert time.monotonic() < deadline, f"training step {step} was not reached"
        began = began or (time.monotonic() if done else 0.0)
        time.sleep(0.05)
    shown = [*DISTFLOW, "status", "real", "--json", "--runs-dir", folder]
    told = json.loads(subprocess.run(shown, capture_output=True, text=True, cwd=ROOT, check=True).stdout)
    os.kill(next(row["pid"] for row in told["workers"] if row["name"] == "rollout/0"), signal.SIGKILL)
    return time.monotonic() - began


def _staleness(folder: Path) -> dict[int, float]:
    found: Counter[int] = Counter()
    for path in folder.glob("step_*/*.jsonl"):
        for line in map(json.loads, path.read_text().splitlines()):
            if line["step"] > WARMUP:
                found[line["step"] - 1 - min(version for _, version, *_ in line["policy_versions"])] += 1
    return {lag: count / found.total() for lag, count in sorted(found.items())}


def simulated(configuration: Configuration, killed_s: float) -> Figures:
    """Simulate it: in seconds of the devices, which are put on the wall's scale."""
    plan = plan_recipe("quickstart", configuration.overrides())[1]
    chosen = EmulatedEngineOptions.parse({"device": DEVICE, **configuration.lengths})
    at, latency = killed_s / SCALE, chosen.latency()
    found = simulate(
        # All are on one host here, however many they are.
        replace(load_of(plan, prompt_tokens=4), one_host=True),
        latency,
        chosen.distribution(),
        SimulateOptions(
            steps=STEPS,
            slowness={0: configuration.slow},
            crashes=[Crash(0, at, restart_s=5.0 / SCALE)] if configuration.killed_at else [],
        ),
    )
    return Figures(found.step_s * SCALE, found.staleness)


def _shown(shares: Mapping[int, float]) -> str:
    return ", ".join(f"{lag}: {share:.0%}" for lag, share in shares.items())


def main() -> None:
    """A line for each configuration."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=list(CONFIGURATIONS), default=list(CONFIGURATIONS))
    chosen = parser.parse_args()
    for name in chosen.only:
        configuration = CONFIGURATIONS[name]
        measured = real(configuration)
        expected = simulated(configuration, measured.killed_s)
        print(
            f"{name:14s} real {measured.step_s:6.2f} s a step, simulated {expected.step_s:6.2f} "
            f"({expected.step_s / measured.step_s - 1.0:+.0%}); staleness real {_shown(measured.staleness)}; "
            f"simulated {_shown(expected.staleness)}",
            flush=True,
        )
