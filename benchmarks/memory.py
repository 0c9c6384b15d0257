"""Peak memory of real workers, beside the estimate of `distflow plan`.

    python -m benchmarks memory [--only NAME …] [--smollm2 models/smollm2-135m]

Each case is a run of its own, by `distflow launch`, of a few training steps on this machine's CPUs. Measured is
`memory/host_peak_gb/max` of the worker's metrics, estimated is the column "host memory" of the plan.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path

from distflow.flow.memory_fit import UNSEEN, placed
from distflow.flow.recipe_check import plan_recipe

GIB = 1 << 30
LIMIT_S = 1200
METRIC = "memory/host_peak_gb/max"
FIVE = "{model_type: qwen2, hidden_size: 256, intermediate_size: 1024, num_hidden_layers: 5, num_attention_heads: 4, "
FIVE += "num_key_value_heads: 2, max_position_embeddings: 128, tie_word_embeddings: true}"
FIVE_M = ["quickstart", "run.training_steps=3", f"models.policy.init={FIVE}"]
SPLIT = ["reasoning", "run.training_steps=3"]
SMOLLM2 = [*SPLIT, "layout=colocated"]
WORKER = "layout.pools.worker"
DIVIDED = ["layout.pools.worker.count=2", "batch.tokens_per_microbatch=1024"]
LONGER = ["batch.samples_per_prompt=2", "flow.steps.sample.with.max_new_tokens=64", "data.max_prompt_tokens=136"]
CASES = {
    "5m split": FIVE_M,
    "5m colocated": [*FIVE_M, "layout=colocated"],
    "smollm2": SMOLLM2,
    "smollm2, offload": [*SMOLLM2, f"{WORKER}.offload=true"],
    "smollm2, recomputed activations": [*SMOLLM2, "models.policy.gradient_checkpointing=true"],
    "smollm2, bfloat16": [*SMOLLM2, "models.policy.dtype=bfloat16"],
    "smollm2, KL, longer samples": [*SMOLLM2, "flow=grpo_kl", "batch.tokens_per_microbatch=800", *LONGER],
    "smollm2 split": [*SPLIT, "layout.pools.rollout.count=1"],
    "smollm2, fsdp on 2": [*SMOLLM2, *DIVIDED, f"{WORKER}.backend=fsdp"],
    "smollm2, ZeRO 2 on 2": [*SMOLLM2, *DIVIDED, f"{WORKER}.backend=deepspeed"],
}


def main() -> int:
    """A line for each worker: estimated, measured, ratio."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--smollm2", type=Path, default=Path("models/smollm2-135m"))
    options = parser.parse_args()
    print("| case | worker | estimated, GiB | measured, GiB | ratio |\n| --- | --- | --- | --- | --- |")
    for case in options.only:
        recipe, *overrides = CASES[case]
        if recipe == "reasoning":
            overrides.append(f"models.policy.path={options.smollm2.resolve()}")
        for worker, (expected, found) in measure(recipe, overrides).items():
            print(f"| {case} | {worker} | {expected:.2f} | {found:.2f} | {expected / found:.2f} |", flush=True)
    return 0


def measure(recipe: str, overrides: list[str]) -> dict[str, tuple[float, float]]:
    """Estimated and measured peak in GiB, by worker. Raises CalledProcessError if the run fails."""
    _, plan = plan_recipe(recipe, overrides)
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "distflow.launch", "launch", recipe, *overrides]
        subprocess.run(
            [*command, "--run", "measured", "--runs-dir", folder], check=True, capture_output=True, timeout=LIMIT_S
        )
        peaks = {path.stem: _peak(path) for path in Path(folder, "measured", "metrics").glob("*.jsonl")}
    found = {}
    for one, worker in zip(placed(plan, UNSEEN), plan.workers, strict=True):
        expected = (one.host_bytes + one.estimate.shared) / GIB
        found[str(worker.name)] = (expected, peaks[worker.name.file_stem])
    return found


def _peak(path: Path) -> float:
    return max(json.loads(line)[METRIC] for line in path.read_text().splitlines())
