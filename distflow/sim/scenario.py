"""What is simulated, and the record of what happened."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from distflow.config.schema import Refresh
from distflow.exchange.intake_core import IntakeCall
from distflow.exchange.lease_settings import LeaseSettings
from distflow.exchange.messages import Message
from distflow.sim.workload import FixedWorkload, Workload


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


def _no_hub(_message: Message) -> float:
    return 0.0


def _nothing_dropped(_position: int) -> str:
    return ""


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
    slots: int = 8
    """Samples that a worker generates in parallel."""
    workload: Workload | None = None
    """What devices take; None: `seconds`, `slowness`, `tokens` and `batch_s`."""
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
    unreadable: float = 0.0
    """Share of the messages with groups between replicas whose rows cannot be read."""
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
    refresh: Refresh = "eager"
    """When a worker takes newer weights that are there, as `layout.refresh`."""
    load_s: float = 0.0
    """Delay between the announcement and the loading of weights."""
    hub_s: Callable[[Message], float] = _no_hub
    """Seconds of a message in one process that all messages go through, one after another."""
    spread_s: float = 1.0
    """Maximum time until a worker hears of new weights."""
    tick_s: float = 0.25
    """Time after which a worker or an owner looks at what is due."""
    audited: bool = True
    """Encode every message and decode it again, check each token that goes from one worker to another, and the memory
    after every message; without it, a simulation is several times as fast."""
    seed: int = 0
    term: int = 0
    snapshot: Mapping[str, object] | None = None
    stop_at: int | None = None
    """End early, at this version."""
    limit_s: float = 8_000.0

    def work(self) -> Workload:
        """What devices take."""
        fixed = FixedWorkload(self.settings, self.seconds, self.slowness, self.tokens, self.batch_s)
        return fixed if self.workload is None else self.workload


@dataclass(slots=True)
class Record:
    """What happened."""

    trained: dict[int, set[int]] = field(default_factory=dict)
    """Positions by training step."""
    dropped: dict[int, str] = field(default_factory=dict)
    lags: Counter[int] = field(default_factory=Counter)
    """Groups trained, by how many versions older than the trained one they are."""
    tokens: dict[int, int] = field(default_factory=dict)
    """Response tokens trained on, by training step."""
    hub_s: float = 0.0
    """Seconds of the process that all messages go through."""
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
    """Of the ledgers of all owners, as in a checkpoint, at the end."""
    seconds: float = 0.0
