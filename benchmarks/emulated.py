"""Scheduling with real processes on emulated devices, which only wait: asynchrony, stealing, services, validation.

    python -m benchmarks emulated asynchrony     # steps per second at staleness 0, 1, 2, 4
    python -m benchmarks emulated slow           # one of four rollouts 4 times slower: beside static assignment
    python -m benchmarks emulated stealing       # one of four training workers with 3 times the lengths
    python -m benchmarks emulated rounds         # 8 training workers with a divided model, lengths to 16k
    python -m benchmarks emulated reference      # a reference model on services, 5 micro-batches away
    python -m benchmarks emulated reference_in_turn    # the same at staleness 0
    python -m benchmarks emulated schedules      # every 10th prompt 8 times as long, 7 waves a step
    python -m benchmarks emulated validation     # at staleness 1, with a pool of its own and without
    python -m benchmarks emulated streaming      # training on samples as they arrive, and on whole batches
    python -m benchmarks emulated forwards       # log-probs for several updates, while samples arrive or behind them

Variants take turns; each figure is the median over rounds of the mean training step (the first ones excluded).
"""

from __future__ import annotations

import argparse
import atexit
import json
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from benchmarks.parts.static_assignment import static_step_s

ROOT = Path(__file__).resolve().parent.parent
WARMUP = 4
NEW_TOKENS = 400
TOKEN_S = 2e-5
BASE = (
    "layout=split",
    "layout.pools.rollout.engine=distflow.testing.emulated:EmulatedEngine",
    "layout.pools.rollout.slots=64",
    "layout.pools.trainer.backend=distflow.testing.emulated:EmulatedBackend",
    f"flow.steps.sample.with.max_new_tokens={NEW_TOKENS}",
    "run.dump_rollouts=0",
)
Metrics = list[dict[str, Any]]
DEVICES = Path(tempfile.mkdtemp())
atexit.register(shutil.rmtree, DEVICES)


def options(key: str, **values: float | str) -> str:
    """An override that sets a whole section of options."""
    return f"{key}={{{', '.join(f'{name}: {value}' for name, value in values.items())}}}"


def device(*, step_s: float = 0.008, wide: int = 32, **train: float) -> str:
    """A latency model whose decode step takes `step_s` for up to `wide` samples; `train`: seconds in place of these."""
    seconds = {"token_s": 1e-4, "apply_s": 0.02, **train}
    path = DEVICES / f"{len(list(DEVICES.iterdir()))}.yaml"
    model = {
        "device": "none",
        "model": "none",
        "sources": ["made up for a benchmark"],
        "decode": {"floor_s": step_s, "sample_s": step_s / wide},
        "train": seconds,
        "weights": {"bytes": 1.0},
    }
    path.write_text(json.dumps(model))
    return str(path)


def run(steps: int, *overrides: str) -> Metrics:
    """Metrics of one run, a line a training step, start-up excluded."""
    with tempfile.TemporaryDirectory() as runs:
        command = [sys.executable, "-m", "distflow.launch"]
        where = ["--runs-dir", runs]
        launch = [*command, "launch", "quickstart", *BASE, f"run.training_steps={steps}", *overrides]
        done = subprocess.run(
            [*launch, "--run", "bench", *where], capture_output=True, text=True, cwd=ROOT, timeout=900, check=False
        )
        if done.returncode:
            raise RuntimeError(f"{' '.join(launch)} ended with {done.returncode}:\n{done.stdout}{done.stderr}")
        read = subprocess.run(
            [*command, "metrics", "bench", "--json", *where], capture_output=True, text=True, cwd=ROOT, check=True
        )
    lines: Metrics = json.loads(read.stdout)
    # The last ones have nothing left to prefetch for.
    return lines[min(WARMUP, steps - 3) : -2]


def step_s(lines: Metrics) -> float:
    """Mean seconds of a training step."""
    return statistics.mean(line["timing_s/step"] for line in lines)


def idle(lines: Metrics) -> float:
    """Share of its time that the training side waited for samples."""
    return statistics.mean(line["timing_s/wait_samples"] / line["timing_s/step"] for line in lines)


def take_turns(rounds: int, variants: dict[str, Callable[[], tuple[float, str]]]) -> dict[str, float]:
    """Median seconds a step of each variant; prints a line for each."""
    found: dict[str, list[float]] = {name: [] for name in variants}
    notes: dict[str, str] = {}
    for number in range(rounds):
        for name, variant in variants.items():
            seconds, notes[name] = variant()
            found[name].append(seconds)
            print(f"round {number + 1}: {name}: {seconds:.3f} s a step  {notes[name]}", file=sys.stderr, flush=True)
    medians = {name: statistics.median(values) for name, values in found.items()}
    first = next(iter(medians.values()))
    for name, seconds in medians.items():
        print(f"{name:44s} {seconds:7.3f} s a step   {first / seconds:.2f} × the first   {notes[name]}")
    return medians


def asynchrony(rounds: int, steps: int) -> None:
    """Heavy-tailed lengths, generation about as expensive as training."""
    shared = (
        "layout.pools.rollout.count=2",
        options("layout.pools.rollout.engine_options", median=40, sigma=1.1, device=device()),
        options("layout.pools.trainer.backend_options", device=device(token_s=8e-5)),
    )

    def variant(staleness: int) -> tuple[float, str]:
        lines = run(steps, *shared, f"layout.max_staleness={staleness}")
        worst = max(line["staleness/max"] for line in lines)
        assert worst <= staleness, f"lag {worst} at max_staleness {staleness}"
        return step_s(lines), f"trainer idle {idle(lines):.0%}, lag at most {worst:.0f}"

    take_turns(rounds, {f"max_staleness {s}": lambda s=s: variant(s) for s in (0, 1, 2, 4)})


def slow(rounds: int, steps: int) -> None:
    """Four rollouts, staleness 1, the trainer hardly any time; one rollout is 4 times slower."""
    engine = {"median": 60.0, "sigma": 0.8, "device": device(step_s=0.006)}
    shared = [
        "layout.pools.rollout.count=4",
        "layout.max_staleness=1",
        "batch.prompts=64",
        options("layout.pools.rollout.engine_options", **engine),
        options("layout.pools.trainer.backend_options", device=device(token_s=1e-6)),
    ]
    limp = "layout.pools.rollout.each.3." + options("engine_options", **engine, slow=4.0)

    def variant(*overrides: str) -> tuple[float, str]:
        lines = run(steps, *shared, *overrides)
        hedged = sum(line["rollout/hedged_groups"] for line in lines if "rollout/hedged_groups" in line)
        return step_s(lines), f"groups copied: {hedged:.0f}"

    def static() -> tuple[float, str]:
        speeds = [1.0, 1.0, 1.0, 4.0]
        return static_step_s(engine, speeds, prompts=64, samples=8, limit=NEW_TOKENS, steps=steps), ""

    take_turns(
        rounds,
        {
            "static assignment, one slow": static,
            "leases, one slow, no hedging": lambda: variant(limp, "layout.hedging=false"),
            "leases, one slow": lambda: variant(limp),
            "leases, all alike": lambda: variant(),
        },
    )


def schedules(rounds: int, steps: int) -> None:
    """Four rollouts of 2 groups at a time, 56 groups a step; every 10th of 100 prompts has 8 times the length."""
    # Lengths go by the position: a pass over the data has to be a multiple of that, or no prompt stays a long one.
    lengths = {"median": 20, "sigma": 0.3, "longer_every": 10, "longer": 8.0}
    shared = (
        "layout.pools.rollout.count=4",
        "layout.pools.rollout.slots=16",
        "batch={prompts: 56, samples_per_prompt: 8, ledgers: 4}",
        "data={shuffle: false, with: {digits: 2}}",
        options("layout.pools.rollout.engine_options", device=device(step_s=0.004, wide=8), **lengths),
        options("layout.pools.trainer.backend_options", device=device(token_s=1e-6)),
    )

    def variant(staleness: int, schedule: str) -> tuple[float, str]:
        lines = run(steps, *shared, f"layout.max_staleness={staleness}", f"layout.schedule={schedule}")
        names = ("rollout/length_rank_recall", "rollout/tail_workers")
        means = {name: [line[name] for line in lines if name in line] for name in names}
        return step_s(lines), ", ".join(f"{name} {statistics.mean(had):.2f}" for name, had in means.items() if had)

    for staleness in (0, 1):
        names = {schedule: f"staleness {staleness}, {schedule}" for schedule in ("fifo", "longest_first", "skew_aware")}
        take_turns(rounds, {name: lambda s=schedule, t=staleness: variant(t, s) for schedule, name in names.items()})


def stealing(rounds: int, steps: int) -> None:
    """Four training workers; the prompts of one have samples 3 times as long."""
    shared = (
        "layout.pools.rollout.count=4",
        "layout.pools.trainer.count=4",
        "layout.max_staleness=1",
        "batch.tokens_per_microbatch=2048",
        options(
            "layout.pools.rollout.engine_options",
            median=40,
            sigma=0.8,
            device=device(step_s=0.004),
            longer_every=4,
            longer=3.0,
        ),
        options("layout.pools.trainer.backend_options", device=device(token_s=4e-4)),
    )

    def variant(on: str) -> tuple[float, str]:
        lines = run(steps, *shared, f"layout.stealing={on}")
        stolen = statistics.mean(line.get("stealing/groups/count", 0) for line in lines)
        return step_s(lines), f"groups stolen a step: {stolen:.1f} of 32"

    take_turns(rounds, {"no stealing": lambda: variant("false"), "stealing": lambda: variant("true")})


def rounds(repeats: int, steps: int) -> None:
    """Time of the rounds of 8 training workers beside their work: 128 prompts × 8 samples, lognormal lengths to 16k."""
    shared = (
        "layout.pools.rollout.count=1",
        "layout.pools.rollout.slots=1024",
        "layout.pools.trainer.count=8",
        "layout.pools.trainer.backend=distflow.testing.emulated:EmulatedDividedBackend",
        "models.policy.init.max_position_embeddings=32768",
        "flow.steps.sample.with.max_new_tokens=16384",
        "batch={prompts: 128, samples_per_prompt: 8, ledgers: 8, tokens_per_microbatch: 32768}",
        options("layout.pools.rollout.engine_options", median=2000, sigma=1.0, device=device(step_s=2e-5, wide=1024)),
    )

    def variant(*overrides: str) -> tuple[float, str]:
        with tempfile.TemporaryDirectory() as folder:
            divided = device(token_s=TOKEN_S, pair_s=TOKEN_S / 16384)
            backend = {"device": divided, "rounds_file": f"{folder}/rounds"}
            lines = run(steps, *shared, options("layout.pools.trainer.backend_options", **backend), *overrides)
            found = [_beside_work(folder, step) for step in range(1, steps)]
        counts = ", ".join(f"{ratio:.2f}" for ratio, _ in found)
        return step_s(lines), f"rounds {counts} × their work, {found[-1][1]} rounds in the last"

    variants = {f"max_staleness {s}": lambda s=s: variant(f"layout.max_staleness={s}") for s in (1, 0)}
    take_turns(repeats, {**variants, "no dealing": lambda: variant("layout.max_staleness=1", "layout.stealing=false")})


def _beside_work(folder: str, step: int) -> tuple[float, int]:
    """Seconds of all rounds of a training step, each as long as its longest part, by the mean work in them."""
    lines = [path.read_text().splitlines()[step] for path in sorted(Path(folder).glob("rounds-*"))]
    parts = [list(map(float, line.split())) for line in lines]
    longest = [max(part) for part in zip(*parts, strict=True)]
    return sum(longest) * len(parts) / sum(map(sum, parts)), len(longest)


def reference(rounds: int, steps: int, staleness: int = 1) -> None:
    """A frozen model on services whose answers take 5 micro-batches, enough of them to keep up; staleness 1."""
    token_s = 8e-5
    # A group has about 370 tokens, and three are a micro-batch.
    late_s = 5 * 1100 * token_s
    shared = (
        f"layout.max_staleness={staleness}",
        "batch.tokens_per_microbatch=2048",
        "layout.pools.rollout.count=4",
        options("layout.pools.rollout.engine_options", median=40, sigma=0.4, device=device(step_s=0.004)),
        options("layout.pools.trainer.backend_options", device=device(token_s=token_s)),
    )
    backend = "distflow.testing.emulated:EmulatedBackend"
    # An answer is a forward alone, a third of what is named.
    away = device(token_s=0.0, latency_s=3 * late_s)
    pool = f"{{count: 8, roles: [forward], backend: '{backend}', backend_options: {{device: '{away}'}}}}"
    kl = ("flow=grpo_kl", "flow.steps.update.with.kl_coef=0.1")
    asked = (*kl, "layout.pools.trainer.roles=[train]", f"layout.pools.reference={pool}")

    def variant(*overrides: str) -> tuple[float, str]:
        lines = run(steps, *shared, *overrides)
        return step_s(lines), f"trainer idle {idle(lines):.0%}"

    take_turns(
        rounds,
        {
            "no reference": lambda: variant(),
            f"on services, {late_s:.1f} s away": lambda: variant(*asked),
            "beside the policy": lambda: variant(*kl),
        },
    )


def reference_in_turn(rounds: int, steps: int) -> None:
    """The same at staleness 0: the answers for the last groups of a step are waited for."""
    reference(rounds, steps, staleness=0)


WHOLE = """
def script(w):
    for t in w.training_steps():
        for batch in w.receive("samples", t):
            batch = w.call("old_logprobs", w.call("advantage", batch))
            for part in w.minibatches(batch):
                w.call("update", part)
                w.apply("policy")
        w.publish("policy", t + 1)
        w.save(t + 1)
"""


def forwards(rounds: int, steps: int) -> None:
    """Two mini-batches a step at staleness 0: the policy's own log-probs are needed before the first update."""
    shared = (
        "layout.pools.rollout.count=2",
        options("layout.pools.rollout.engine_options", median=40, sigma=1.1, device=device()),
        options("layout.pools.trainer.backend_options", device=device(token_s=8e-5)),
        "batch.tokens_per_microbatch=2048",
        "batch.minibatches=2",
    )

    def variant(*overrides: str) -> tuple[float, str]:
        lines = run(steps, *shared, *overrides)
        return step_s(lines), f"trainer idle {idle(lines):.0%}"

    with tempfile.TemporaryDirectory() as folder:
        script = Path(folder) / "whole.py"
        script.write_text(WHOLE)
        behind = f"layout.pools.trainer.script={script}"
        take_turns(rounds, {"behind them": lambda: variant(behind), "while samples arrive": lambda: variant()})


def validation(rounds: int, steps: int) -> None:
    """Staleness 1, generation about as expensive as training; every 5 steps as many samples to validate as to train."""
    generates = options("", median=40, sigma=1.1, device=device())[1:]
    shared = (
        "layout.max_staleness=1",
        "layout.pools.rollout.count=2",
        f"layout.pools.rollout.engine_options={generates}",
        options("layout.pools.trainer.backend_options", device=device(token_s=8e-5)),
    )
    engine = "distflow.testing.emulated:EmulatedEngine"
    pool = f"layout.pools.checks={{roles: [validate], engine: '{engine}', slots: 64, engine_options: {generates}}}"
    val = ("val.every=5", "val.prompts=64", "val.samples_per_prompt=4")

    def variant(*overrides: str) -> tuple[float, str]:
        # The first object is of version 0.
        lines = run(steps, *shared, *overrides)
        trained = [line for line in lines if "timing_s/step" in line]
        newer = [line["val/newer_version_share"] for line in lines if "val/newer_version_share" in line]
        note = f", {len(newer)} rounds, of newer weights {statistics.mean(newer):.0%}" if newer else ""
        return step_s(trained), f"trainer idle {idle(trained):.0%}{note}"

    variants = {"no validation": (), "by the workers that generate": val, "by a pool of its own": (*val, pool)}
    take_turns(rounds, {name: lambda more=more: variant(*more) for name, more in variants.items()})


def streaming(rounds: int, steps: int) -> None:
    """Generation about as expensive as training; samples trained on as they arrive, beside whole batches."""
    shared = (
        "layout.pools.rollout.count=2",
        options("layout.pools.trainer.backend_options", device=device(token_s=8e-5)),
        "batch.tokens_per_microbatch=2048",
    )
    whole = "flow.steps.advantage.call=distflow.workers.trainer:batch_advantage"

    def variant(sigma: float, staleness: int, *overrides: str) -> tuple[float, str]:
        engine = options("layout.pools.rollout.engine_options", median=40, sigma=sigma, device=device())
        lines = run(steps, *shared, engine, f"layout.max_staleness={staleness}", *overrides)
        before = statistics.mean(line["perf/overlap_share"] for line in lines)
        return step_s(lines), f"{before:.0%} trained on before the last group, trainer idle {idle(lines):.0%}"

    for lengths, sigma in (("alike", 0.4), ("heavy-tailed", 1.1)):
        for staleness in (0, 1):
            name = f"lengths {lengths}, staleness {staleness}"
            take_turns(
                rounds,
                {
                    f"{name}, whole batches": lambda s=sigma, t=staleness: variant(s, t, whole),
                    f"{name}, streamed": lambda s=sigma, t=staleness: variant(s, t),
                },
            )


SCENARIOS: dict[str, Callable[[int, int], None]] = {
    "asynchrony": asynchrony,
    "slow": slow,
    "schedules": schedules,
    "stealing": stealing,
    "rounds": rounds,
    "reference": reference,
    "reference_in_turn": reference_in_turn,
    "streaming": streaming,
    "forwards": forwards,
    "validation": validation,
}


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the named scenarios."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("scenarios", nargs="*", choices=[*SCENARIOS, []], default=list(SCENARIOS))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=20)
    chosen = parser.parse_args(arguments)
    for name in chosen.scenarios:
        print(f"{name}: {SCENARIOS[name].__doc__}")
        SCENARIOS[name](chosen.rounds, chosen.steps)
