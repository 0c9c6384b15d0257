"""A real model (recipe `reasoning`) learning a reasoning-gym task: the same held-out prompts before and after.

    make smollm2
    python -m benchmarks smollm2_learning --steps 40

Trains on sums and differences of two numbers of one or two digits, and validates on others; those that also occur in
training are left out of the figures. Prints the mean score and the share that is exactly right, before and after, and
the 95% interval of the mean difference over prompts. Exit code 1 if it does not exclude no change. Takes half an hour.
A run that was interrupted goes on with `--resume`.
"""

from __future__ import annotations

import argparse
import math
import statistics
import subprocess
import sys
from pathlib import Path

from distflow.data.sources import reasoning_gym
from distflow.launch.commands.rollouts import read_lines

DISTFLOW = (sys.executable, "-m", "distflow.launch")
TASK = {"dataset": "chain_sum", "config": {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 2}}
TRAINED, HELD_OUT = {"size": 500, "seed": 0}, {"size": 340, "seed": 1_000_000}
LEAST = 200
"""Prompts that an answer takes."""
SETTINGS = (
    "layout=colocated",
    "batch={prompts: 8, samples_per_prompt: 8, ledgers: 4}",
    "models.policy.optimizer={lr: 3.0e-5, warmup_steps: 2}",
    "data.with={size: 500, config: {max_digits: 2}}",
    f"val.prompts={HELD_OUT['size']}",
    "run.save_every=10",
)


def unseen() -> list[int]:
    """The held-out prompts that are not among those of training, by index."""
    trained, held_out = (reasoning_gym(**TASK, **which) for which in (TRAINED, HELD_OUT))
    seen = {trained[index].text for index in range(len(trained))}
    return [index for index in range(len(held_out)) if held_out[index].text not in seen]


def scores(run_dir: Path, version: int) -> dict[int, float]:
    """The mean score of each prompt that was validated with these weights."""
    found: dict[int, list[float]] = {}
    for line in read_lines(run_dir / "rollouts" / "val" / f"step_{version:06d}"):
        found.setdefault(line["uid"][1], []).append(line["score"])
    return {prompt: statistics.fmean(values) for prompt, values in found.items()}


def main() -> int:
    """1 if it has not learned."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--run", default="smollm2-learning")
    parser.add_argument("--runs-dir", default="runs")
    parser.add_argument("--resume", action="store_true")
    parser.add_argument("overrides", nargs="*", default=[], help="KEY=VALUE, after --")
    args = parser.parse_args()
    words = ["--run", args.run, "--runs-dir", args.runs_dir]
    if args.resume:
        words += ["--resume"]
    else:
        every = [f"run.training_steps={args.steps}", f"val.every={args.steps}"]
        data = "{source: distflow.data.sources:reasoning_gym, chat: true, max_prompt_tokens: 128, with: %s}"
        shown = str({**TASK, **HELD_OUT}).replace("'", "")
        words += ["reasoning", *SETTINGS, *every, f"val.data={data % shown}", *args.overrides]
    subprocess.run([*DISTFLOW, "launch", *words], check=True)
    before, after = (scores(Path(args.runs_dir) / args.run, version) for version in (0, args.steps))
    prompts = [prompt for prompt in unseen() if prompt in before and prompt in after]
    if len(prompts) < LEAST:
        raise SystemExit(f"{len(prompts)} prompts were validated twice; expected at least {LEAST}")
    change = [after[prompt] - before[prompt] for prompt in prompts]
    mean, half = statistics.fmean(change), 1.96 * statistics.stdev(change) / math.sqrt(len(change))
    for name, found in (("before", before), ("after", after)):
        values = [found[prompt] for prompt in prompts]
        exact = sum(value == 1.0 for value in values) / len(values)
        print(f"{name}: score {statistics.fmean(values):.4f}, exactly right {exact:.3f}")
    print(f"change over {len(prompts)} held-out prompts: {mean:+.4f} ± {half:.4f} (95%)")
    return int(not mean - half > 0)
