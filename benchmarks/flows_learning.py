"""How far each shipped flow learns to copy three digits: the quickstart on one process, flows by seeds.

    python -m benchmarks.flows_learning --flows dr_grpo rloo --seeds 0 1 2

Prints a row for each flow: the mean exact-match score of the last ten training steps, the training step with which the
first ten steps of mean 0.9 end, and seconds from the launch command to the end, for each seed. `--picture` draws their
curves. Exit code 1 if a flow ends below `--least` on any seed.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

FLOWS = [
    path.stem
    for path in sorted((Path(__file__).parents[1] / "recipes" / "flow").glob("*.yaml"))
    if "  read:" not in path.read_text()
]
"""Those that generate; of the others, `offline_learning`."""
GOOD = 0.9
TEN = 10
PICTURED = "critic/score/mean,actor/entropy,actor/grad_norm"
DISTFLOW = (sys.executable, "-m", "distflow.launch")


class Learned(NamedTuple):
    """What one run came to."""

    score: float
    """Mean of the last ten training steps."""
    since: int | None
    """Training step with which the first ten steps of mean `GOOD` end."""
    seconds: float

    def __str__(self) -> str:
        since = "never" if self.since is None else str(self.since)
        return f"{self.score:.3f} / {since} / {self.seconds:.0f} s"


def run_name(flow: str, seed: int) -> str:
    """Of one run."""
    return f"{flow.replace('_', '-')}-{seed}"


def learn(flow: str, seed: int, overrides: list[str], runs_dir: str, limit_s: float) -> Learned:
    """Launch one run and read its metrics; raises RuntimeError with its output if it fails, and TimeoutExpired."""
    name, folder = run_name(flow, seed), ["--runs-dir", runs_dir]
    chosen = [f"flow={flow}", "layout=colocated", f"run.seed={seed}", "run.dump_rollouts=0", *overrides]
    begun = time.monotonic()
    launch = [*DISTFLOW, "launch", "quickstart", *chosen, "--run", name, *folder]
    try:
        done = subprocess.run(launch, capture_output=True, text=True, timeout=limit_s, check=False)
    except subprocess.TimeoutExpired:
        # A run goes on without the command that launched it.
        subprocess.run([*DISTFLOW, "stop", name, *folder], check=False)
        raise
    seconds = time.monotonic() - begun
    if done.returncode:
        raise RuntimeError(f"{' '.join(launch)} ended with {done.returncode}:\n{done.stdout}{done.stderr}")
    told = subprocess.run([*DISTFLOW, "metrics", name, "--json", *folder], capture_output=True, text=True, check=True)
    scores = [line["critic/score/mean"] for line in json.loads(told.stdout)]
    tens = {end: statistics.mean(scores[end - TEN : end]) for end in range(TEN, len(scores) + 1)}
    since = next((end for end, mean in tens.items() if mean >= GOOD), None)
    return Learned(tens[len(scores)], since, seconds)


def main() -> int:
    """1 if a flow ends below `--least` on any seed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--flows", nargs="+", default=FLOWS, choices=FLOWS)
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--least", type=float, default=GOOD)
    parser.add_argument("--limit-s", type=float, default=1800.0, help="of one run")
    parser.add_argument("--picture", metavar="FILE", help="draw the curves of all runs (extra `plot`)")
    parser.add_argument("--runs-dir", default=None, help="keep the runs there")
    parser.add_argument("overrides", nargs="*", default=[], help="KEY=VALUE, after --")
    args = parser.parse_args()
    print(f"| flow | {' | '.join(f'seed {seed}' for seed in args.seeds)} |", flush=True)
    print(f"| --- {'| --- ' * len(args.seeds)}|", flush=True)
    with tempfile.TemporaryDirectory(prefix="distflow-learning-") as folder:
        worst, runs_dir = 1.0, args.runs_dir or folder
        for flow in args.flows:
            found = [learn(flow, seed, args.overrides, runs_dir, args.limit_s) for seed in args.seeds]
            print(f"| {flow} | {' | '.join(map(str, found))} |", flush=True)
            worst = min(worst, *(each.score for each in found))
        if args.picture:
            names = [run_name(flow, seed) for flow in args.flows for seed in args.seeds]
            drawn = ["-o", args.picture, "--keys", PICTURED, "--runs-dir", runs_dir]
            subprocess.run([*DISTFLOW, "plot", *names, *drawn], check=True)
    return int(worst < args.least)


if __name__ == "__main__":
    sys.exit(main())
