"""Prediction of which prompts get the longest responses: recall beside oracles, and its cost.

    python -m benchmarks ranker             # seconds: lengths of a real model, recorded in smollm2_lengths.npz
    make smollm2 && python -m benchmarks ranker --record    # record more: SmolLM2-135M-Instruct, 9 minutes

The prompts are a mix of reasoning-gym tasks. Prompts come in steps of `STEP`, in a shuffled order; each is predicted
before the lengths of its step are learned, as an owner does. The figure is the recall of the longest 20% of each step:
beside an oracle that knows the mean length of all samples of a prompt, of those that are to be predicted, too, so that
no prediction need reach it; beside the same without these; and beside the length of the prompt alone. A second pass
predicts the same prompts again, with other samples.
"""

from __future__ import annotations

import argparse
import itertools
import math
import random
import statistics
import time
from pathlib import Path
from typing import NamedTuple

import numpy as np

from distflow.exchange.length_ranker import LengthRanker, recall
from distflow.runtime.protocols import Engine, EngineSpec
from distflow.types import SampleRequest, SamplingParams, Version

FILE = Path(__file__).with_name("smollm2_lengths.npz")
MODEL = Path("models/smollm2-135m")
TASKS = (
    "base_conversion",
    "basic_arithmetic",
    "calendar_arithmetic",
    "chain_sum",
    "coin_flip",
    "family_relationships",
    "gcd",
    "gsm_symbolic",
    "leg_counting",
    "letter_counting",
    "prime_factorization",
    "sentence_reordering",
    "simple_equations",
    "spell_backward",
    "syllogism",
    "word_sorting",
)
EACH, SAMPLES, NEW_TOKENS, MOST_PROMPT = 24, 16, 256, 192
STEP = 16
"""Prompts of a training step."""


class Recorded(NamedTuple):
    """Prompts, and how long the responses of a model were."""

    tasks: list[str]
    prompt_ids: list[tuple[int, ...]]
    lengths: np.ndarray
    """[prompt, sample], in tokens."""
    means: np.ndarray | None = None
    """[prompt], of the distribution that they were drawn from, up to their order; None: unknown."""


def smollm2() -> tuple[list[str], list[tuple[int, ...]], Engine, SamplingParams]:
    """Tasks and prompts, the project's engine with the model's weights, and how it draws responses."""
    import torch

    from distflow.config.plugins import TOKENIZER
    from distflow.config.schema import ModelConfig
    from distflow.data.order import PromptOrder, PromptSettings, SourceUse
    from distflow.data.sources import reasoning_gym
    from distflow.flow.resolve import resolve
    from distflow.workers.engines.torch_engine import TorchEngine
    from distflow.workers.models import build_model

    torch.set_num_threads(1)
    section = ModelConfig(path=str(MODEL), dtype="float32").model_dump()
    tokenizer = resolve(TOKENIZER)(section)
    tasks, prompts = [], []
    for task in TASKS:
        source = SourceUse(reasoning_gym(dataset=task, size=EACH, seed=0))
        order = PromptOrder([source], tokenizer, PromptSettings(0, False, True, MOST_PROMPT, "drop", {}))
        found = {order.prompt(position).token_ids for position in range(EACH)}
        tasks += [task] * len(found)
        prompts += sorted(found)
    engine = TorchEngine(EngineSpec(section, "cpu", 64, MOST_PROMPT + NEW_TOKENS, 0, {}))
    engine.begin_update(Version(0, 0))
    engine.update(
        (n, p.detach()) for n, p in build_model(section, device="cpu", seed=0, load_weights=True).named_parameters()
    )
    engine.end_update()
    return tasks, prompts, engine, SamplingParams(max_new_tokens=NEW_TOKENS, stop_token_ids=tuple(tokenizer.end_tokens))


def record(minutes: float) -> None:
    """Generate responses, and write their lengths; no prompt is begun after `minutes`.

    Prompts come in a random order and all that are begun are finished, so that long ones are not fewer for that. Those
    of an earlier recording stay, and are not generated again.
    """
    tasks, prompts, engine, params = smollm2()
    lengths = np.zeros((len(prompts), SAMPLES), dtype=np.uint16)
    earlier = earlier_lengths()
    begun = [position for position, ids in enumerate(prompts) if ids in earlier]
    for position in begun:
        lengths[position] = earlier[prompts[position]]
    waiting = [(position, ids) for position, ids in enumerate(prompts) if ids not in earlier]
    random.Random(0).shuffle(waiting)
    running, began = 0, time.perf_counter()
    told = began
    while waiting or running:
        if time.perf_counter() - began > 60.0 * minutes:
            waiting.clear()
        while waiting and engine.free_slots >= SAMPLES:
            position, ids = waiting.pop()
            begun.append(position)
            engine.submit([SampleRequest(position, sample, ids, 0, params) for sample in range(SAMPLES)])
            running += SAMPLES
        for output in engine.poll():
            lengths[output.position, output.sample] = len(output.token_ids)
            running -= 1
        if time.perf_counter() - told > 30.0:
            told = time.perf_counter()
            print(f"{len(begun)} of {len(prompts)} prompts, {told - began:.0f} s", flush=True)
    begun.sort()
    kept = [prompts[position] for position in begun]
    np.savez_compressed(
        FILE,
        tasks=np.array([tasks[position] for position in begun]),
        ids=np.array([token for ids in kept for token in ids], dtype=np.uint16),
        bounds=np.cumsum([0, *map(len, kept)], dtype=np.uint32),
        lengths=lengths[begun],
    )


def earlier_lengths() -> dict[tuple[int, ...], np.ndarray]:
    """By prompt, what an earlier recording of as many samples has; nothing if there is none."""
    if not FILE.exists():
        return {}
    found = recorded()
    return dict(zip(found.prompt_ids, found.lengths, strict=True)) if found.lengths.shape[1] == SAMPLES else {}


def recorded() -> Recorded:
    """What `record` wrote."""
    found = np.load(FILE)
    bounds = found["bounds"].tolist()
    ids = found["ids"].tolist()
    prompts = [tuple(ids[a:b]) for a, b in itertools.pairwise(bounds)]
    return Recorded(found["tasks"].tolist(), prompts, found["lengths"])


def synthetic(prompts: int = 960, samples: int = 8, share: float = 0.6, sigma: float = 1.0) -> Recorded:
    """Lognormal lengths; the prompt explains `share` of the variance: its task most of it, its own length the rest."""
    rng = np.random.default_rng(0)
    tasks = rng.integers(0, 24, prompts)
    of_task = rng.normal(size=24)
    sizes = rng.integers(10, 120, prompts)
    of_size = (sizes - sizes.mean()) / sizes.std()
    of_prompt = math.sqrt(0.8) * of_task[tasks] + math.sqrt(0.2) * of_size
    noise = rng.normal(size=(prompts, samples))
    logs = 5.0 + sigma * (math.sqrt(share) * of_prompt[:, None] + math.sqrt(1.0 - share) * noise)
    ids = [
        tuple(int(token) for token in (*range(20_000 + 8 * task, 20_008 + 8 * task), *rng.integers(0, 20_000, size)))
        for task, size in zip(tasks.tolist(), sizes.tolist(), strict=True)
    ]
    return Recorded([str(task) for task in tasks], ids, np.maximum(1, np.exp(logs)).astype(int), of_prompt)


def judge(what: str, data: Recorded, seeds: int) -> None:
    """Print recalls and costs."""
    half = data.lengths.shape[1] // 2
    blind = "mean of the others" if data.means is None else "mean of the distribution"
    names = ("first pass, held out", "second pass", "oracle", blind, "length of the prompt")
    found: dict[str, list[float]] = {name: [] for name in names}
    costs: dict[str, list[float]] = {"predict": [], "learn": []}
    for seed in range(seeds):
        order = list(range(len(data.prompt_ids)))
        ranker = LengthRanker()
        for name, samples, others in (
            ("first pass, held out", slice(half), slice(half, None)),
            ("second pass", slice(half, None), slice(half)),
        ):
            known = data.lengths[:, others].mean(axis=1) if data.means is None else data.means
            random.Random(f"{seed}/{name}").shuffle(order)
            groups = data.lengths[:, samples].mean(axis=1)
            steps = [order[at : at + STEP] for at in range(0, len(order) - STEP + 1, STEP)]
            for number, step in enumerate(steps):
                began = time.process_time()
                predicted = [ranker.predict(prompt, data.prompt_ids[prompt]) for prompt in step]
                then = time.process_time()
                true = [float(groups[prompt]) for prompt in step]
                # The first half teaches, and the others are predicted before they are seen.
                if name == "second pass" or 2 * number >= len(steps):
                    found[name].append(recall(predicted, true))
                    found["oracle"].append(recall([float(data.lengths[prompt].mean()) for prompt in step], true))
                    found[blind].append(recall([float(known[prompt]) for prompt in step], true))
                    found["length of the prompt"].append(recall([len(data.prompt_ids[p]) for p in step], true))
                costs["predict"].append((then - began) / len(step))
                began = time.process_time()
                for prompt, tokens in zip(step, true, strict=True):
                    ranker.learn(prompt, data.prompt_ids[prompt], tokens)
                costs["learn"].append((time.process_time() - began) / len(step))
    print(f"{what}: {len(data.prompt_ids)} prompts, groups of {half}, steps of {STEP}, {seeds} orders")
    oracle = statistics.fmean(found["oracle"])
    for name, values in found.items():
        mean = statistics.fmean(values)
        print(f"  {name:24s} recall of the longest 20% {mean:.3f}   {mean / oracle:.0%} of the oracle")
    print("  " + ", ".join(f"{name} {1e6 * statistics.median(c):.0f} µs of CPU a prompt" for name, c in costs.items()))


def main() -> None:
    """Judge, or record."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--record", action="store_true")
    parser.add_argument("--minutes", type=float, default=9.0, help="of recording")
    parser.add_argument("--orders", type=int, default=10)
    args = parser.parse_args()
    if args.record:
        record(args.minutes)
    judge("synthetic lengths", synthetic(), args.orders)
    if FILE.exists():
        judge("SmolLM2-135M-Instruct on reasoning-gym tasks", recorded(), args.orders)
    else:
        print(f"{FILE.name} is missing: make smollm2 && python -m benchmarks ranker --record")
