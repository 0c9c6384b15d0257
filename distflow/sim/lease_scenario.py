"""The input and the record of a simulation with `lease_network`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from distflow.exchange.intake_core import IntakeCall
from distflow.exchange.lease_settings import LeaseSettings
from distflow.exchange.messages import LeasePrompt
from distflow.types import Uid


class StuckError(AssertionError):
    """The run stopped making progress before its end."""


@dataclass(frozen=True, slots=True)
class Crash:
    """Worker number `worker` dies at second `at` and comes back `restart_s` later (None: never)."""

    worker: int
    at: float
    restart_s: float | None = 2.0
    noticed: bool = True
    """Whether the owners are told of the death; otherwise they learn of it from the next incarnation."""


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


def _nothing_dropped(_position: int) -> str:
    return ""


def prompt_at(position: int) -> LeasePrompt:
    """An endless data order; prompt lengths 1 … 4 tokens."""
    ids = tuple(range(1, 2 + position % 4))
    return LeasePrompt(Uid(position // 100, position % 100, position), ids, f"prompt {position}", "{}")


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


@dataclass(frozen=True, slots=True)
class Scenario:
    """What to simulate. Times are in virtual seconds, probabilities per message."""

    settings: LeaseSettings
    owners: int = 1
    workers: int = 2
    groups_at_once: int = 2
    """Groups that a worker generates in parallel."""
    seconds: Callable[[int], float] = _one
    """Generation time of the group at a position."""
    slowness: Callable[[int], float] = _one
    """Factor on that time, by worker number."""
    dropped: Callable[[int], str] = _nothing_dropped
    """Why the group at a position is dropped; empty: it is trained on."""
    crashes: Sequence[Crash] = ()
    pauses: Sequence[Pause] = ()
    leaves: Sequence[Leave] = ()
    renewals: Sequence[Renewal] = ()
    save_every: int = 1
    """Training steps between checkpoints, from which the owners restart."""
    tokens: int = 1
    """Tokens of every sample, produced evenly over the group's time."""
    loss: float = 0.0
    duplicates: float = 0.0
    delay_s: float = 0.01
    """Maximum delay of a message."""
    colocated: bool = False
    """Whether workers train, too: step t begins when every worker knows that t is closed; generation pauses."""
    lazy_take: bool = False
    """Whether to take a step's groups only when all of them have arrived."""
    stealing: bool = False
    """Whether idle replicas take groups from busy ones."""
    dealing: bool = False
    """Whether replicas meet to deal all groups by cost, instead."""
    budget: int = 1
    """Padded tokens of a batch."""
    batch_s: Callable[[int], float] = _none
    """Time of a batch, by replica number."""
    calls: Sequence[IntakeCall] = ()
    """What owners ask for, for every group."""
    answer_s: float = 0.0
    """Maximum time until an answer comes."""
    read_s: float = 0.0
    """Maximum time to read a prompt; 0: prompts are available at once."""
    step_s: float = 0.0
    """Duration of a decode step, and of the reward of a group: messages that arrive meanwhile are read afterwards."""
    load_s: float = 0.0
    """Delay between the announcement and the loading of weights."""
    seed: int = 0
    term: int = 0
    snapshot: Mapping[str, object] | None = None
    stop_at: int | None = None
    """End early, at this version."""
    limit_s: float = 8_000.0


@dataclass(slots=True)
class Record:
    """What happened."""

    trained: dict[int, set[int]] = field(default_factory=dict)
    """Positions by training step."""
    dropped: dict[int, str] = field(default_factory=dict)
    lags: Counter[int] = field(default_factory=Counter)
    messages: Counter[str] = field(default_factory=Counter)
    started: int = 0
    """Groups started by engines, repetitions included."""
    copies: int = 0
    """Groups given to a second worker while the first held them."""
    continued: int = 0
    """Tokens that workers received with leases."""
    kept: int = 0
    """Groups continued in a later term than the one in which they began."""
    produced: int = 0
    """Tokens that engines produced."""
    largest_message: int = 0
    """Size in bytes of the largest message with leases or tokens."""
    peak_bytes: int = 0
    """Largest number of bytes that any owner had reserved for results."""
    moved: int = 0
    """Groups that another replica than their owner trained on."""
    snapshot: dict[str, object] = field(default_factory=dict)
    """Counters of the first owner at the end."""
    seconds: float = 0.0
