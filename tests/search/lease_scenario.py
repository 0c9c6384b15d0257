"""Leases of a run on which faults fall, with times and lengths that a test gives."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from distflow.exchange.intake_core import IntakeCall
from distflow.exchange.lease_settings import LeaseSettings
from distflow.exchange.messages import LeasePrompt
from distflow.parts import Lengths, unshared
from distflow.sim.fluid_engine import ONE_TURN, SampleTurns
from distflow.sim.latency import DecodeLatency
from distflow.sim.scenario import Record, Scenario
from distflow.types import Uid


@dataclass(frozen=True, slots=True)
class Pause:
    """Worker number `worker` is suspended for `seconds` from second `at` on: it neither receives nor sends."""

    worker: int
    at: float
    seconds: float


@dataclass(frozen=True, slots=True)
class Leave:
    """Worker number `worker` is drained at second `at`: it hands everything back and leaves."""

    worker: int
    at: float


@dataclass(frozen=True, slots=True)
class Renewal:
    """At second `at` the owners restart from their last checkpoint, in a later term, `owners` of them."""

    at: float
    owners: int


def _one(_number: int) -> float:
    return 1.0


def _none(_number: int) -> float:
    return 0.0


SMALL = LeaseSettings(
    ledgers=4,
    groups_per_ledger=2,
    samples_per_prompt=4,
    max_staleness=0,
    training_steps=3,
    memory_bytes=16_000,
    group_bytes=lambda prompt_tokens: 100 * prompt_tokens,
    max_prompt_tokens=4,
)
"""Settings of a small run to vary with `dataclasses.replace`."""


def prompt_at(position: int) -> LeasePrompt:
    """An endless data order; prompt lengths 1 … 4 tokens."""
    ids = tuple(range(1, 2 + position % 4))
    return LeasePrompt(Uid(position // 100, position % 100, position), ids, f"prompt {position}", "{}")


@dataclass(frozen=True, slots=True)
class FixedWorkload:
    """Times and lengths that a test gives; whatever else runs, a group takes its `seconds`."""

    settings: LeaseSettings
    seconds: Callable[[int], float]
    """Generation time of the group at a position."""
    slowness: Callable[[int], float]
    """Factor on that time, by worker number."""
    tokens: int
    """Tokens of every sample, produced evenly over the group's time."""
    batch_s: Callable[[int], float]
    """Time of a batch, by replica number."""
    swap_s: float = 0.0
    prefill_s: float = 0.0
    end_s: float = 0.5
    turns: SampleTurns = ONE_TURN

    @property
    def quadratic(self) -> float:
        """Enough to be seen in rows of a few tokens."""
        return 0.1

    def prompt(self, position: int) -> LeasePrompt:
        """One of 1 … 4 tokens."""
        return prompt_at(position)

    def lengths(self, position: int) -> Sequence[int]:
        """All alike."""
        return [self.tokens] * self.settings.samples_per_prompt

    def rate(self, position: int, worker: int) -> float:
        """All tokens within the group's seconds."""
        return self.tokens / (self.seconds(position) * self.slowness(worker))

    def decode(self, worker: int) -> tuple[DecodeLatency, float]:
        """A step of the clock is a second."""
        return DecodeLatency(1.0, 0.0), 1.0

    def rows(self, position: int) -> Lengths:
        """No matter what was sampled: longer in some groups than in others."""
        return unshared([1 + position % 7] * self.settings.samples_per_prompt)

    def result_bytes(self, position: int) -> int:
        """As many as were reserved."""
        return self.settings.group_bytes(len(prompt_at(position).prompt_ids))

    def result_tokens(self, position: int) -> int:
        """As many as it takes time, however many are made."""
        return round(100 * self.seconds(position))

    def train_s(self, replica: int, positions: Sequence[int]) -> float:
        """Whatever it holds."""
        return self.batch_s(replica)


@dataclass(frozen=True, slots=True)
class FaultScenario(Scenario):
    """What to simulate. Times are in virtual seconds, probabilities per message."""

    workload: FixedWorkload = field(init=False)
    """Of the fields below."""
    seconds: Callable[[int], float] = _one
    """Generation time of the group at a position."""
    slowness: Callable[[int], float] = _one
    """Factor on that time, by worker number."""
    tokens: int = 1
    """Tokens of every sample, produced evenly over the group's time."""
    batch_s: Callable[[int], float] = _none
    """Time of a batch, by replica number."""
    pauses: Sequence[Pause] = ()
    leaves: Sequence[Leave] = ()
    renewals: Sequence[Renewal] = ()
    save_every: int = 1
    """Training steps between checkpoints, from which the owners restart."""
    loss: float = 0.0
    duplicates: float = 0.0
    unreadable: float = 0.0
    """Share of the messages with groups between replicas whose rows cannot be read."""
    calls: Sequence[IntakeCall] = ()
    """What owners ask for, for every group."""
    answer_s: float = 0.0
    """Maximum time until an answer comes."""
    read_s: float = 0.0
    """Maximum time to read a prompt; 0: prompts are available at once."""
    step_s: float = 0.0
    """Duration of a decode step, and of the reward of a group: messages that arrive meanwhile are read afterwards."""
    term: int = 0
    snapshot: Mapping[str, object] | None = None
    stop_at: int | None = None
    """End early, at this version."""

    def __post_init__(self) -> None:
        workload = FixedWorkload(self.settings, self.seconds, self.slowness, self.tokens, self.batch_s)
        object.__setattr__(self, "workload", workload)


@dataclass(slots=True)
class FaultRecord(Record):
    """What happened."""

    kept: int = 0
    """Groups continued in a later term than the one in which they began."""
    largest_message: int = 0
    """Size in bytes of the largest message with leases or tokens."""
    peak_bytes: int = 0
    """Largest number of bytes that any owner had reserved for results."""
    snapshot: dict[str, object] = field(default_factory=dict)
    """Of the ledgers of all owners, as in a checkpoint, at the end."""
    seconds: float = 0.0
