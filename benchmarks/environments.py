"""Tools of generate steps, beside the engine alone.

    python -m benchmarks environments [--rounds 5] [--params 5m]

First, 64 episodes of 3 turns on 16 slots, between which each waits 0.5 s for a tool: the wall time, by the longer one
of two times that no order of work beats (`of the bound`): the engine alone decodes as many tokens after prompts as
long, its slots full; one episode waits 3 times and has its tokens decoded alone. Target: at most 1.15. Whichever
episode has its first turn last, it still has two more and its waits before it: that is a closer bound, and the second
ratio.

Then samples are decoded on 16 slots while 48 more wait for tools, and without these: the ratio of tokens a second. The
tools wait, in short naps: as coroutines (`async def`), or in threads (`def`). Or they compute, all of the time that
their loop has, in a process of their own. Target: at least 0.95 of each. For comparison, the same in the engine's
process.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from benchmarks.generation import SHAPES, model_section, prompt, seconds
from distflow import StepContext, step
from distflow.config.plugins import ENGINES
from distflow.exchange.messages import Lease
from distflow.flow.resolve import resolve
from distflow.runtime.episode_loop import SETTLE_S, EpisodeLoop, Episodes
from distflow.runtime.generate_step import Generate, GenerateInThread, SampleLimits
from distflow.runtime.main import SWITCH_S
from distflow.runtime.protocols import Engine, EngineSpec
from distflow.runtime.trajectories import Trajectories
from distflow.testing.engine_harness import WholeGroup, submit
from distflow.types import Episode, SamplingParams, Uid, Version
from distflow.workers.models import build_model
from tests.runtime.episode_children import Steps
from tests.runtime.kit import EndlessTokenizer

SLOTS, EPISODES, TURNS, TOOL_S = 16, 64, 3, 0.5
PROMPT, BETWEEN = 8, 1
"""Tokens of the data, and of what a tool says."""
LONG = 192
"""Tokens of the samples beside which others wait."""
WAVES = 8
"""So many times the slots of these are decoded: what happens once, as a worker learns that a loop does not come to
rest, is no part of a rate."""
NAP_S = 0.02
AWAY_S = 10.0
"""So long those in threads wait: nothing can end them."""
FILE = Path(__file__)
TOLD = {"rewards/told": 0.0}
LONGEST = PROMPT + LONG + TURNS * 64
OTHER = 10_000
"""Positions from here on wait for tools."""


@step(role="generate", reads=[], writes=["rewards/told"], environment=["replay", "repeatable"])
async def turns(
    episode: Episode, generate: Generate, ctx: StepContext, *, max_new_tokens: int = 16, max_tokens: int = LONGEST
) -> dict[str, float]:
    """So many tokens, a tool, and so on."""
    prefix = episode.prompt_ids
    for _ in range(TURNS):
        said = await generate(prefix, SamplingParams(max_new_tokens=max_new_tokens))
        await asyncio.sleep(TOOL_S)
        prefix = (*prefix, *said.response_ids, *(3,) * BETWEEN)
    return TOLD


def _params(episode: Episode) -> SamplingParams | None:
    """Of a sample that is measured; None: it is one of the others."""
    return SamplingParams(max_new_tokens=LONG) if episode.uid.position < OTHER else None


@step(role="generate", reads=[], writes=["rewards/told"], environment=["replay", "repeatable"])
async def naps(
    episode: Episode, generate: Generate, ctx: StepContext, *, max_new_tokens: int = LONG, max_tokens: int = LONGEST
) -> dict[str, float]:
    """The others wait, until they are ended."""
    params = _params(episode)
    while params is None:
        await asyncio.sleep(NAP_S)
    await generate(episode.prompt_ids, params)
    return TOLD


@step(role="generate", reads=[], writes=["rewards/told"], environment=["replay", "repeatable"])
def threads(
    episode: Episode,
    generate: GenerateInThread,
    ctx: StepContext,
    *,
    max_new_tokens: int = LONG,
    max_tokens: int = LONGEST,
) -> dict[str, float]:
    """The same in threads of their own."""
    params, until = _params(episode), time.monotonic() + AWAY_S
    while params is None and time.monotonic() < until:
        time.sleep(NAP_S)
    generate(episode.prompt_ids, params or SamplingParams(max_new_tokens=1))
    return TOLD


@step(role="generate", reads=[], writes=["rewards/told"], environment=["replay", "repeatable"])
async def computes(
    episode: Episode, generate: Generate, ctx: StepContext, *, max_new_tokens: int = LONG, max_tokens: int = LONGEST
) -> dict[str, float]:
    """The others compute for 2 ms each, in turns."""
    params = _params(episode)
    while params is None:
        until = time.perf_counter() + 0.002
        while time.perf_counter() < until:
            pass
        await asyncio.sleep(0)
    await generate(episode.prompt_ids, params)
    return TOLD


class NoText(EndlessTokenizer):
    """Of a model with more tokens than characters."""

    def decode_batch(self, rows: Sequence[Sequence[int]], *, skip_special: bool = False) -> list[str]:
        """Nothing: nobody reads it."""
        return [""] * len(rows)


class Worker:
    """An engine, and what drives it in a worker."""

    def __init__(self, name: str) -> None:
        section, self.vocabulary = model_section(name, "float32"), SHAPES[name][-1]
        self.engine: Engine = resolve(ENGINES["torch"])(EngineSpec(section, "cpu", SLOTS, LONGEST, 0, {}))
        model = build_model(section, device="cpu", seed=0, load_weights=True)
        self.engine.begin_update(Version(0, 0))
        self.engine.update((n, p.detach()) for n, p in model.named_parameters())
        self.engine.end_update()
        self.position = 0

    def full(self, samples: int, tokens: int, turns: int = TURNS) -> None:
        """Have the engine decode so many turns of all at once, each as a sample of its own."""
        for turn in range(turns):
            self._submit(turn, samples, tokens)
        self._decode()

    def in_turn(self, tokens: int) -> None:
        """Have it decode those of one episode, one after the other."""
        for turn in range(TURNS):
            self._submit(turn, 1, tokens)
            self._decode()

    def _submit(self, turn: int, samples: int, tokens: int) -> None:
        ids = prompt(0, PROMPT + turn * (tokens + BETWEEN), self.vocabulary)
        self.position += 1
        submit(self.engine, [WholeGroup(self.position, ids, samples, 0, SamplingParams(max_new_tokens=tokens))])

    def _decode(self) -> None:
        while self.engine.progress():
            self.engine.poll()

    def samples(self, steps: Steps, name: str, loop: Episodes) -> Trajectories:
        """What is under way with one of the steps above."""
        return Trajectories(
            steps.step(name, loop), {"train": SampleLimits(1, LONGEST, LONGEST)}, NoText(), torch.float32
        )

    def leases(self, count: int, first: int = 0) -> list[Lease]:
        """Prompts of one sample each."""
        positions = range(first + self.position + 1, first + self.position + count + 1)
        self.position += count
        ids = prompt(0, PROMPT, self.vocabulary)
        return [Lease(Uid(0, 1, p), 0, p, 1, 7, ids, "", "{}", 0, 0) for p in positions]

    def drive(self, samples: Trajectories, leases: list[Lease], left: int = 0) -> None:
        """As a worker does, until so many samples are left."""
        samples.submit(self.engine, samples.begin(leases))
        while samples.left > left:
            if not samples.asks:
                samples.wait(10.0)
            samples.submit(self.engine, samples.take(self.engine.poll() if samples.asks else [])[0])


def episodes(worker: Worker, tokens: int, rounds: int) -> None:
    """Compare episodes that wait for tools with the engine, and with one of them."""

    steps = Steps(FILE, {"turns": {"max_new_tokens": tokens}})

    def side_by_side() -> None:
        loop = EpisodeLoop(SETTLE_S)
        worker.drive(worker.samples(steps, "turns", loop), worker.leases(EPISODES))
        loop.close()

    calls: dict[str, Callable[[], None]] = {
        "wall": side_by_side,
        "engine": lambda: worker.full(EPISODES, tokens),
        "first": lambda: worker.full(EPISODES, tokens, 1),
        "one": lambda: worker.in_turn(tokens),
    }
    took = medians(calls, rounds)
    bound = max(took["engine"], TURNS * TOOL_S + took["one"])
    closer = max(bound, took["first"] + TURNS * TOOL_S + took["one"] * (TURNS - 1) / TURNS)
    print(
        f"{tokens:4d} tokens a turn: {took['wall']:.2f} s; the engine alone {took['engine']:.2f} s, one episode "
        f"{TURNS * TOOL_S + took['one']:.2f} s: {took['wall'] / bound:.2f} of the bound, "
        f"{took['wall'] / closer:.2f} of the closer one",
        flush=True,
    )


def beside(worker: Worker, name: str, rounds: int, *, apart: bool) -> None:
    """Compare decoding beside samples that wait for tools, or compute, with decoding alone."""
    steps = Steps(FILE, {name: {}})

    def decode(others: int) -> float:
        loop = steps.process if apart else EpisodeLoop(SETTLE_S)
        samples = worker.samples(steps, name, loop)
        waiting = worker.leases(others, OTHER)
        samples.begin(waiting)
        took = seconds(lambda: worker.drive(samples, worker.leases(WAVES * SLOTS), others))
        samples.forget([lease.position for lease in waiting])
        if not apart:
            loop.close()
        time.sleep(AWAY_S if others and name == "threads" else 0.0)
        return took

    decode(0)
    pairs = [(decode(0), decode(EPISODES - SLOTS)) for _ in range(rounds)]
    if apart:
        steps.process.close()
    alone, with_others = (statistics.median(times) for times in zip(*pairs, strict=True))
    rate, where = WAVES * SLOTS * LONG / alone, "process" if apart else "thread"
    print(f"{name:9s} ({where}): {rate:6.0f} tok/s alone, {alone / with_others:.2f} of that beside 48", flush=True)


def medians(calls: dict[str, Callable[[], None]], rounds: int) -> dict[str, float]:
    """Seconds of each, which take turns."""
    for call in calls.values():
        call()
    took = [{name: seconds(call) for name, call in calls.items()} for _ in range(rounds)]
    return {name: statistics.median(one[name] for one in took) for name in calls}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--params", choices=sorted(SHAPES), default="tiny")
    parser.add_argument("--tokens", type=int, nargs="+", default=[8, 16, 32, 64], help="of a turn")
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    torch.set_num_threads(1)
    sys.setswitchinterval(SWITCH_S)
    worker = Worker(args.params)
    for tokens in args.tokens:
        episodes(worker, tokens, args.rounds)
    for name, apart in (("naps", False), ("threads", False), ("naps", True), ("computes", True), ("computes", False)):
        beside(worker, name, args.rounds, apart=apart)
    worker.engine.close()
