"""What there is to compute: prompts, how long their responses are, and how long devices take.

Both follow from a latency model and a distribution of lengths (`DeviceWorkload`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Protocol

from distflow.data.randomness import length_draws
from distflow.exchange.messages import LeasePrompt
from distflow.flow.memory import group_bytes
from distflow.parts import Lengths
from distflow.sim.fluid_engine import ONE_TURN, SampleTurns
from distflow.sim.latency import DecodeLatency, DeviceLatency, terms_of
from distflow.sim.lengths import Lengths as Distribution
from distflow.types import Uid

KINDS = 16
"""Kinds of prompts, by what the prompt explains of the lengths: as tasks differ, some longer than others."""
_AT_ONCE = 128
"""Positions whose lengths are drawn together."""


class Workload(Protocol):
    """What a simulation asks for. Positions are prompt positions, times seconds."""

    @property
    def swap_s(self) -> float:
        """For which an engine stands still to take new weights."""

    @property
    def prefill_s(self) -> float:
        """Of an engine, for each prompt token."""

    @property
    def end_s(self) -> float:
        """From the moment when all replicas are done to the next training step: optimizer, and publishing."""

    @property
    def turns(self) -> SampleTurns:
        """Of each sample."""

    @property
    def quadratic(self) -> float:
        """What the pairs of a row add to its cost when groups are dealt, a token and token."""

    def prompt(self, position: int) -> LeasePrompt:
        """The prompt."""

    def lengths(self, position: int) -> Sequence[int]:
        """Response tokens of its samples."""

    def rate(self, position: int, worker: int) -> float:
        """Tokens of each of its samples in a step of the engine's clock."""

    def decode(self, worker: int) -> tuple[DecodeLatency, float]:
        """Seconds of a step of an engine's clock, and a factor on them."""

    def rows(self, position: int) -> Lengths:
        """Tokens of the rows that are trained on (`distflow.parts`)."""

    def result_bytes(self, position: int) -> int:
        """Bytes of the result of its group."""

    def result_tokens(self, position: int) -> int:
        """Response tokens that the result says it has: owners learn from them which prompts have long ones."""

    def train_s(self, replica: int, positions: Sequence[int]) -> float:
        """Seconds that a replica computes for a batch of groups."""


@dataclass(frozen=True, slots=True)
class Job:
    """What a recipe asks of each device."""

    samples: int
    """G, samples of a group."""
    prompt_tokens: int
    response_tokens: int
    """Longest response."""
    budget: int
    """Tokens of a micro-batch."""
    seed: int = 0
    epochs: int = 1
    """Passes over the samples of a training step."""
    updates: int = 1
    """Optimizer steps of a training step."""
    forwards: int = 0
    """Forward passes besides, as for old or reference log-probs, on the devices that train."""
    recomputes: bool = False
    """Activations are recomputed in the backward pass (`gradient_checkpointing`)."""
    one_host: bool = False
    """Weights reach engines through the memory of one host, over no link."""
    colocated: bool = False
    """Weights are handed over in place."""
    turns: SampleTurns = ONE_TURN
    """Of a sample with an environment."""


@dataclass(slots=True)
class DeviceWorkload:
    """By the latency model of a device; every engine and every replica is one. Lengths: see `distflow.sim.lengths`."""

    device: DeviceLatency
    distribution: Distribution
    job: Job
    slowness: dict[int, float] = field(default_factory=dict)
    """Factor on the times of an engine, by worker number."""
    swap_s: float = field(init=False)
    prefill_s: float = field(init=False)
    end_s: float = field(init=False)
    transfer_s: float = field(init=False)
    """From publishing to when an engine can take a version."""
    turns: SampleTurns = field(init=False)
    _kinds: dict[int, int] = field(default_factory=dict)
    _lengths: dict[int, tuple[int, ...]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        weights, job = self.device.weights, self.job
        self.swap_s, self.turns = weights.swap_s, job.turns
        self.prefill_s = self.device.decode.prefill_s
        self.end_s = self.device.train.apply_s * job.updates + (0.0 if job.colocated else weights.publish_s)
        self.transfer_s = 0.0 if job.colocated else weights.arrives_s(one_host=job.one_host)

    @property
    def quadratic(self) -> float:
        """As a backend of these times says it."""
        train = self.device.train
        return train.pair_s / train.token_s if train.token_s else 0.0

    def prompt(self, position: int) -> LeasePrompt:
        """Its first token tells its kind, which is what owners can learn to predict lengths by; the others are alike.

        No prompt comes twice.
        """
        self.lengths(position)
        ids = (1 + self._kinds[position], *(0,) * (self.job.prompt_tokens - 1))
        return LeasePrompt(Uid(0, position, position), ids, "", "{}")

    def lengths(self, position: int) -> Sequence[int]:
        """Drawn as an emulated engine draws them, from the seed, the position and the sample."""
        found = self._lengths.get(position)
        if found is None:
            self._draw(position - position % _AT_ONCE)
            found = self._lengths[position]
        return found

    def forget(self, positions: Sequence[int]) -> None:
        """They are trained."""
        for position in positions:
            self._lengths.pop(position, None)
            self._kinds.pop(position, None)

    def rate(self, position: int, worker: int) -> float:
        """A token a decode step."""
        return 1.0

    def decode(self, worker: int) -> tuple[DecodeLatency, float]:
        """Of the device."""
        return self.device.decode, self.slowness.get(worker, 1.0)

    def rows(self, position: int) -> Lengths:
        """Prompt and response."""
        prompts = [self.job.prompt_tokens, *[0] * self.job.samples]
        return list(zip(prompts, self.lengths(position), strict=False))

    def result_bytes(self, position: int) -> int:
        """Of its samples as long as they are."""
        job = self.job
        return sum(group_bytes(1, job.prompt_tokens, length) for length in self.lengths(position))

    def result_tokens(self, position: int) -> int:
        """Of all its samples."""
        return sum(self.lengths(position))

    def train_s(self, replica: int, positions: Sequence[int]) -> float:
        """Micro-batch by micro-batch."""
        job, train = self.job, self.device.train
        rows = [row for position in positions for row in self.rows(position)]
        batches = max(1, round(terms_of(rows, packed=train.packed)[0] / job.budget))
        passes = train.passes(job.epochs, job.forwards, recomputes=job.recomputes)
        return passes * (train.seconds_of(rows) + (batches - 1) * train.latency_s)

    def _draw(self, first: int) -> None:
        job = self.job
        positions, samples = range(first, first + _AT_ONCE), range(job.samples)
        rows = [(position, sample) for position in positions for sample in samples]
        draws = length_draws(job.seed, [position for position, _ in rows], [sample for _, sample in rows]).tolist()
        drawn = iter([self.distribution.length(of_prompt, own, job.response_tokens) for of_prompt, own in draws])
        for position in positions:
            self._lengths[position] = tuple(islice(drawn, job.samples))
        kinds = [int(of_prompt * KINDS) for of_prompt, _ in draws[:: job.samples]]
        self._kinds.update(zip(positions, kinds, strict=True))
