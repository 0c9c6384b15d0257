"""What to simulate with `lease_network`, and what happened."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from distflow.exchange.lease_settings import LeaseSettings
from distflow.exchange.messages import LeasePrompt
from distflow.types import Uid


class StuckError(AssertionError):
    """The run made no progress to its end."""


@dataclass(frozen=True, slots=True)
class Crash:
    """Worker number `worker` dies at second `at` and comes back `restart_s` later (None: never)."""

    worker: int
    at: float
    restart_s: float | None = 2.0
    noticed: bool = True
    """The owners are told of the death; else they learn it from the next incarnation."""


@dataclass(frozen=True, slots=True)
class Pause:
    """Worker number `worker` stands still for `seconds` from second `at` on: it hears and says nothing."""

    worker: int
    at: float
    seconds: float


@dataclass(frozen=True, slots=True)
class Leave:
    """Worker number `worker` is drained at second `at`: it hands everything back and goes."""

    worker: int
    at: float


@dataclass(frozen=True, slots=True)
class Renewal:
    """At second `at` the owners restart from their last checkpoint, in a later term, `owners` of them."""

    at: float
    owners: int


def _one(_number: int) -> float:
    return 1.0


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
    """What to simulate. Times in virtual seconds, probabilities 0 … 1 a message."""

    settings: LeaseSettings
    owners: int = 1
    workers: int = 2
    groups_at_once: int = 2
    """Groups a worker generates side by side."""
    seconds: Callable[[int], float] = _one
    """How long the group of a position takes."""
    slowness: Callable[[int], float] = _one
    """Factor on that, by worker number."""
    dropped: Callable[[int], str] = _nothing_dropped
    """Why the group of a position is dropped; empty: it is trained on."""
    crashes: Sequence[Crash] = ()
    pauses: Sequence[Pause] = ()
    leaves: Sequence[Leave] = ()
    renewals: Sequence[Renewal] = ()
    save_every: int = 1
    """Training steps between the checkpoints that the owners restart from."""
    tokens: int = 1
    """Tokens of every sample; a group produces them evenly over its time."""
    loss: float = 0.0
    duplicates: float = 0.0
    delay_s: float = 0.01
    """Longest delay of a message."""
    colocated: bool = False
    """Workers train too: training step t begins when every worker knows that t is closed, and pauses generation."""
    lazy_take: bool = False
    """Take a step's groups only when its whole set has arrived."""
    obeys_min_version: bool = True
    """False: engines start whatever they are given (to see that the owner notices)."""
    read_s: float = 0.0
    """Longest time that the prompt of a position takes to be read; 0: it is there at once."""
    step_s: float = 0.0
    """How long a decode step takes, and the reward of a group: what comes meanwhile is read when it is over."""
    load_s: float = 0.0
    """How long announced weights wait before they are loaded."""
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
    """Groups that a second worker was given while somebody else held them."""
    continued: int = 0
    """Tokens that a worker was given with a lease."""
    kept: int = 0
    """Groups that went on in a later term than they were begun in."""
    produced: int = 0
    """Tokens that engines produced."""
    largest_message: int = 0
    """Bytes of the largest message with leases or tokens."""
    peak_bytes: int = 0
    """Most bytes of results any owner held."""
    snapshot: dict[str, object] = field(default_factory=dict)
    """Of the first owner, at the end."""
    seconds: float = 0.0
