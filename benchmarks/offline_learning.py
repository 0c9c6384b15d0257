"""Flows that train on files, measured on rows that they have not seen: to copy three digits.

    python -m benchmarks offline_learning --seeds 0 1 2

Of all thousand numbers 800 are in the file that is trained on, and 200 are held out. Prints for each seed what
`distflow evaluate` measures of the trained models: the share of held-out prompts that a model answers exactly when it
generates (sft; dpo and kto begin with what a few steps of sft have made), and the share of held-out pairs in order
(dpo, kto, reward_model; that also as a judge, text by text). Exit code 1 if one is below `--least`.
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
from typing import NamedTuple

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

    def launch(self, name: str, *overrides: str) -> None:
        """Launch a run. Raises RuntimeError with its output if it fails."""
        chosen = [f"run.seed={self.seed}", "layout=colocated", "run.dump_rollouts=0", *overrides]
        runs = ["--run", name, "--runs-dir", str(self.folder)]
        done = subprocess.run([*DISTFLOW, "launch", "quickstart", *chosen, *runs], capture_output=True, text=True)
        if done.returncode:
            raise RuntimeError(f"{name} ended with {done.returncode}:\n{done.stdout}{done.stderr}")

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

    def held_out(self, name: str, *overrides: str) -> dict[str, float]:
        """What validation measures of the trained model of a run, on the rows that are held out."""
        rows = f"val.data.source={self.folder / 'held_out.jsonl'}"
        settings = [f"run.seed={self.seed}", "layout=colocated", rows, *overrides]
        return dict(json.loads(self.command("evaluate", name, "quickstart", *settings, "--json")))

    @property
    def data(self) -> str:
        """The override that names the rows that are trained on."""
        return f"data.source={self.folder / 'trained.jsonl'}"

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


def exact(place: Workplace, run: str) -> float:
    """The share of held-out prompts that the model of a run answers exactly, when it generates greedily."""
    return place.held_out(run, "flow=grpo", "val.sampling={temperature: 0}")["val/avg@1"]


def ordered(place: Workplace, flow: str, *overrides: str) -> float:
    """The share of held-out pairs that a model orders; of what kto has made, by the implicit rewards of dpo."""
    return place.held_out(flow.replace("_", "-"), f"flow={'dpo' if flow == 'kto' else flow}", *overrides)[
        "val/preference/accuracy"
    ]


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
    found = {}
    place.launch("sft", "flow=sft", place.data, f"run.training_steps={LONG}")
    found["sft: exact"] = exact(place, "sft")
    place.launch("warm", "flow=sft", place.data, f"run.training_steps={WARM}")
    found["warm: exact"] = exact(place, "warm")
    warm = place.export("warm")
    for flow in ("dpo", "kto"):
        rate = f"models.policy.optimizer.lr={RATE[flow]}"
        place.launch(flow, f"flow={flow}", place.data, *model(warm), rate, f"run.training_steps={STEPS[flow]}")
        found[f"{flow}: ordered"] = ordered(place, flow, *model(warm, "reference"))
    steps = f"run.training_steps={STEPS['reward_model']}"
    name, rate = "reward-model", f"models.policy.optimizer.lr={RATE['reward_model']}"
    place.launch(name, "flow=reward_model", place.data, steps, rate)
    found["reward_model: ordered"] = ordered(place, "reward_model")
    found["reward_model: as a judge"] = judged(place, place.export(name))
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
