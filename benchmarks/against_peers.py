"""Samples a second of the quickstart, beside TRL's GRPOTrainer and a bare loop: same model, task, batch and cores.

    make peers-venv                              # TRL in a virtual environment of its own
    python -m benchmarks against_peers --rounds 5

The contestants take turns; each figure is the median over rounds of the median training step (start-up excluded).
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

from benchmarks.peers import task

ROOT = Path(__file__).resolve().parent.parent
WARMUP = 20


def distflow(steps: int, *overrides: str) -> float:
    """Samples/s of one run of the quickstart, with everything a user gets: dumps, metrics, checkpoint."""
    with tempfile.TemporaryDirectory() as runs:
        command = [sys.executable, "-m", "distflow.launch", "launch", "quickstart", f"run.training_steps={steps}"]
        _run([*command, *overrides, "--run", "bench", "--runs-dir", runs], 0)
        files = [*Path(runs).glob("bench/metrics/trainer-0.jsonl"), *Path(runs).glob("bench/metrics/worker-0.jsonl")]
        lines = [json.loads(line) for line in files[0].read_text().splitlines()]
    seconds = statistics.median(line["timing_s/step"] for line in lines[WARMUP:])
    return task.PROMPTS * task.SAMPLES / seconds


def peer(python: str, module: str, steps: int, threads: int) -> float:
    """Samples/s of a script that prints one JSON line."""
    out = _run(
        [python, "-m", module, "--steps", str(steps), "--warmup", str(WARMUP), "--threads", str(threads)], threads
    )
    return float(json.loads(out.splitlines()[-1])["samples_per_s"])


def _run(command: list[str], threads: int) -> str:
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    if threads:
        environment["OMP_NUM_THREADS"] = str(threads)
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=environment, timeout=600, check=False)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)} ended with {done.returncode}:\n{done.stdout}{done.stderr}")
    return done.stdout


def contestants(steps: int, peers_python: str) -> dict[str, Callable[[], float]]:
    """By name; each returns samples/s of one round."""
    colocated = "layout=colocated"
    found: dict[str, Callable[[], float]] = {
        "distflow split (2 rollouts + 1 trainer)": lambda: distflow(steps),
        "distflow colocated, 1 thread": lambda: distflow(steps, colocated),
        "distflow colocated, 2 threads": lambda: distflow(steps, colocated, "layout.pools.worker.threads=2"),
        "distflow async, staleness 1": lambda: distflow(steps, "layout=async"),
        "distflow async, 1 rollout": lambda: distflow(steps, "layout=async", "layout.pools.rollout.count=1"),
        "bare loop, 1 thread": lambda: peer(sys.executable, "benchmarks.peers.bare_loop", steps, 1),
        "bare loop, 2 threads": lambda: peer(sys.executable, "benchmarks.peers.bare_loop", steps, 2),
    }
    if Path(peers_python).exists():
        found["TRL, 1 thread"] = lambda: peer(peers_python, "benchmarks.peers.trl_grpo", steps, 1)
        found["TRL, 2 threads"] = lambda: peer(peers_python, "benchmarks.peers.trl_grpo", steps, 2)
    else:
        print(f"{peers_python} is missing: TRL is left out (make peers-venv)")
    return found


def _best(rates: dict[str, list[float]], prefix: str) -> float:
    return max((statistics.median(found) for name, found in rates.items() if name.startswith(prefix)), default=0.0)


def main() -> None:
    """Print one line a contestant, with its ratio to the best TRL and the best bare loop of this very run."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=120)
    parser.add_argument("--peers-python", default=str(ROOT / ".venv-peers" / "bin" / "python"))
    options = parser.parse_args()
    runs = contestants(options.steps, options.peers_python)
    rates: dict[str, list[float]] = {name: [] for name in runs}
    for number in range(options.rounds):
        for name, run in runs.items():
            rates[name].append(run())
            print(f"round {number + 1}: {name}: {rates[name][-1]:,.0f} samples/s", file=sys.stderr, flush=True)
    best = {peer: _best(rates, peer) for peer in ("TRL", "bare loop")}
    for name, found in rates.items():
        middle = statistics.median(found)
        ratios = "  ".join(f"{middle / value:.2f} of {peer}" for peer, value in best.items() if value)
        print(f"{name:42s} {middle:8,.0f} samples/s  [{min(found):,.0f}–{max(found):,.0f}]  {ratios}")
