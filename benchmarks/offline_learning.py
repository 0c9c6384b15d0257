"""What the flows that train on files learn, measured on rows that they have not seen: to copy three digits.

    python -m benchmarks.offline_learning --seeds 0 1 2

Of all thousand numbers 800 are in the file that is trained on, and 200 are held out. Prints for each seed, of exported
models: the share of held-out prompts that a model answers exactly when it generates (sft; dpo and kto begin with what
a few steps of sft have made), and the share of held-out pairs that it orders (dpo, kto, reward_model; that also as a
judge, text by text). Exit code 1 if one is below `--least`.
"""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple

from distflow.data.arithmetic import copy_digits

DISTFLOW = (sys.executable, "-m", "distflow.launch")
HELD_OUT = 200
GOOD = 0.95
WARM, LONG = 60, 600
"""Training steps of sft: before preferences are trained, and where it is itself what is measured."""
STEPS = {"dpo": 200, "kto": 300, "reward_model": 600}
RATE = {"dpo": 3.0e-4, "kto": 3.0e-4, "reward_model": 1.0e-3}


class Workplace(NamedTuple):
    """Where the runs of one seed are."""

    folder: Path
    seed: int

    def launch(self, name: str, *overrides: str) -> list[dict[str, Any]]:
        """Launch a run; returns its metrics. Raises RuntimeError with its output if it fails."""
        chosen = [f"run.seed={self.seed}", "layout=colocated", "run.dump_rollouts=0", *overrides]
        runs = ["--run", name, "--runs-dir", str(self.folder)]
        done = subprocess.run([*DISTFLOW, "launch", "quickstart", *chosen, *runs], capture_output=True, text=True)
        if done.returncode:
            raise RuntimeError(f"{name} ended with {done.returncode}:\n{done.stdout}{done.stderr}")
        lines = self.command("metrics", name, "--json")
        return list(json.loads(lines))

    def export(self, name: str) -> Path:
        """The trained model of a run."""
        folder = self.folder / f"{name}-hf"
        self.command("export", name, "--to", str(folder))
        return folder

    def command(self, *arguments: str) -> str:
        """What another command writes."""
        return subprocess.run(
            [*DISTFLOW, *arguments, "--runs-dir", str(self.folder)], capture_output=True, text=True, check=True
        ).stdout

    def data(self, held_out: bool) -> str:
        """The override that names a file."""
        return f"data.source={self.folder / ('held_out' if held_out else 'trained')}.jsonl"

    def write(self) -> None:
        """Both files."""
        source = copy_digits(digits=3)
        rows = [{"prompt": row.text, **row.task} for row in map(source.__getitem__, range(len(source)))]
        random.Random(self.seed).shuffle(rows)
        for name, part in (("held_out", rows[:HELD_OUT]), ("trained", rows[HELD_OUT:])):
            text = "".join(f"{json.dumps(row)}\n" for row in part)
            (self.folder / f"{name}.jsonl").write_text(text, encoding="utf-8")


def model(folder: Path, name: str = "policy") -> list[str]:
    """The overrides by which a run begins with an exported model."""
    return [f"++models.{name}.path={folder}", f"++models.{name}.tokenizer='chars:0123456789='"]


def once(*overrides: str) -> list[str]:
    """A single training step over all held-out prompts, whose metrics are those before its update."""
    return [f"batch.prompts={HELD_OUT}", "run.training_steps=1", "models.policy.optimizer.lr=0", *overrides]


def exact(place: Workplace, name: str, folder: Path) -> float:
    """The share of held-out prompts that a model answers exactly, when it generates almost greedily."""
    greedy = ["flow.steps.sample.with.temperature=0.01", "batch.samples_per_prompt=1", "flow=grpo"]
    (line,) = place.launch(f"{name}-exact", place.data(held_out=True), *model(folder), *once(*greedy))
    return float(line["critic/score/mean"])


def ordered(place: Workplace, flow: str, folder: Path, *overrides: str) -> float:
    """The share of held-out pairs that a model orders; of what kto has made, by the implicit rewards of dpo."""
    name, compares = f"{flow.replace('_', '-')}-ordered", "dpo" if flow == "kto" else flow
    (line,) = place.launch(name, f"flow={compares}", place.data(held_out=True), *model(folder), *once(*overrides))
    return float(line["preference/accuracy"])


def judged(place: Workplace, judge: Path) -> float:
    """The share of held-out pairs that a reward model orders when it is asked, text by text, as by a run."""
    from transformers.utils.logging import disable_progress_bar

    from distflow.runtime.protocols import BackendSpec
    from distflow.workers.backends.torch_backend import TorchBackend

    disable_progress_bar()
    section = {"path": str(judge), "head": "score", "dtype": "float32", "gradient_checkpointing": False}
    backend = TorchBackend(BackendSpec(section, "cpu", False, 0, 1, {}))
    lines = (place.folder / "held_out.jsonl").read_text().splitlines()
    texts = [(row["prompt"], row[name]) for row in map(json.loads, lines) for name in ("answer", "rejected")]
    scores = backend.score_texts([backend.encode(*text) for text in texts], tokens=8192).view(-1, 2)
    return float((scores[:, 0] > scores[:, 1]).float().mean())


def learn(place: Workplace) -> dict[str, float]:
    """The figures of one seed."""
    place.write()
    trained, found = place.data(held_out=False), {}
    place.launch("sft", "flow=sft", trained, f"run.training_steps={LONG}")
    found["sft: exact"] = exact(place, "sft", place.export("sft"))
    place.launch("warm", "flow=sft", trained, f"run.training_steps={WARM}")
    warm = place.export("warm")
    found["warm: exact"] = exact(place, "warm", warm)
    for flow in ("dpo", "kto"):
        rate = f"models.policy.optimizer.lr={RATE[flow]}"
        place.launch(flow, f"flow={flow}", trained, *model(warm), rate, f"run.training_steps={STEPS[flow]}")
        found[f"{flow}: ordered"] = ordered(place, flow, place.export(flow), *model(warm, "reference"))
    steps = f"run.training_steps={STEPS['reward_model']}"
    place.launch("reward", "flow=reward_model", trained, steps, f"models.policy.optimizer.lr={RATE['reward_model']}")
    judge = place.export("reward")
    found["reward_model: ordered"] = ordered(place, "reward_model", judge)
    found["reward_model: as a judge"] = judged(place, judge)
    return found


def main() -> int:
    """1 if a figure is below `--least` on any seed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", nargs="+", type=int, default=[0])
    parser.add_argument("--least", type=float, default=GOOD)
    args = parser.parse_args()
    bad = False
    for seed in args.seeds:
        begun = time.monotonic()
        with tempfile.TemporaryDirectory() as folder:
            found = learn(Workplace(Path(folder), seed))
        shown = ", ".join(f"{name} {value:.3f}" for name, value in found.items())
        print(f"seed {seed}: {shown} ({time.monotonic() - begun:.0f} s)", flush=True)
        bad |= any(value < args.least for name, value in found.items() if not name.startswith("warm"))
    return int(bad)


if __name__ == "__main__":
    sys.exit(main())
