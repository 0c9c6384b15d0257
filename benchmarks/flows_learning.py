"""Each shipped flow learning to copy three digits: the quickstart in one process, flows by seeds.

    python -m benchmarks flows_learning --flows dr_grpo rloo --seeds 0 1 2

Prints a row for each flow: the mean exact-match score of the last ten training steps, the training step with which the
first ten steps of mean 0.9 end, and seconds of the run, for each seed. `--picture` draws
their curves. Exit code 1 if a flow ends below `--least` on any seed.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
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
    """Launch one run, unless it has been done already, and read its metrics.

    Raises RuntimeError with its output if it fails, and TimeoutExpired.
    """
    name, folder = run_name(flow, seed), ["--runs-dir", runs_dir]
    record = Path(runs_dir) / name / "run.json"
    if not record.exists() or json.loads(record.read_text())["state"] != "done":
        chosen = [f"flow={flow}", "layout=colocated", f"run.seed={seed}", "run.dump_rollouts=0", *overrides]
        launch = [*DISTFLOW, "launch", "quickstart", *chosen, "--run", name, *folder]
        try:
            done = subprocess.run(launch, capture_output=True, text=True, timeout=limit_s, check=False)
        except subprocess.TimeoutExpired:
            # A run goes on without the command that launched it.
            subprocess.run([*DISTFLOW, "stop", name, *folder], check=False)
            raise
        if done.returncode:
            raise RuntimeError(f"{' '.join(launch)} ended with {done.returncode}:\n{done.stdout}{done.stderr}")
    found = scores(name, runs_dir)
    tens = {end: statistics.mean(found[end - TEN : end]) for end in range(TEN, len(found) + 1)}
    since = next((end for end, mean in tens.items() if mean >= GOOD), None)
    ended = json.loads(record.read_text())
    return Learned(tens[len(found)], since, ended["ended"] - ended["started"])


def scores(name: str, runs_dir: str) -> list[float]:
    """The mean exact-match score of each training step."""
    told = subprocess.run(
        [*DISTFLOW, "metrics", name, "--json", "--runs-dir", runs_dir], capture_output=True, text=True, check=True
    )
    return [line["critic/score/mean"] for line in json.loads(told.stdout)]


def draw(flows: list[str], seeds: list[int], runs_dir: str, picture: str) -> None:
    """A panel for each flow: the mean score of ten training steps, a line for each seed."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    columns = min(5, len(flows))
    rows = -(-len(flows) // columns)
    figure, axes = pyplot.subplots(rows, columns, figsize=(2.4 * columns, 1.9 * rows), squeeze=False, sharey=True)
    for axis in axes.flat[len(flows) :]:
        axis.remove()
    for axis, flow in zip(axes.flat, flows, strict=False):
        for seed in seeds:
            found = scores(run_name(flow, seed), runs_dir)
            tens = [statistics.mean(found[max(0, end - TEN) : end]) for end in range(1, len(found) + 1)]
            axis.plot(range(1, len(tens) + 1), tens, linewidth=1.0, label=f"seed {seed}")
        axis.axhline(GOOD, color="#6b7280", linewidth=0.6, linestyle=":")
        axis.set_title(flow, fontsize=8)
        axis.tick_params(labelsize=7)
    axes.flat[0].legend(fontsize=6)
    figure.tight_layout()
    figure.savefig(picture, dpi=110)


def main() -> int:
    """1 if a flow ends below `--least` on any seed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--flows", nargs="+", default=FLOWS, choices=FLOWS)
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--least", type=float, default=GOOD)
    parser.add_argument("--limit-s", type=float, default=1800.0, help="of one run")
    parser.add_argument("--picture", metavar="FILE", help="draw the scores of all runs (extra `plot`)")
    parser.add_argument("--runs-dir", default=None, help="keep the runs there; those that are done are not repeated")
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
            draw(args.flows, args.seeds, runs_dir, args.picture)
    return int(worst < args.least)
