"""What is simulated, and the record of what happened."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from distflow.config.schema import Refresh
from distflow.exchange.lease_settings import LeaseSettings
from distflow.exchange.messages import Message
from distflow.sim.workload import Workload


@dataclass(frozen=True, slots=True)
class Crash:
    """Worker number `worker` dies at second `at` and comes back `restart_s` later (None: never)."""

    worker: int
    at: float
    restart_s: float | None = 2.0
    noticed: bool = True
    """Whether the owners are told of the death; otherwise they learn of it from the next incarnation."""


def _no_hub(_message: Message) -> float:
    return 0.0


def _nothing_dropped(_position: int) -> str:
    return ""


@dataclass(frozen=True, slots=True)
class Scenario:
    """What to simulate. Times are in virtual seconds."""

    settings: LeaseSettings
    workload: Workload
    owners: int = 1
    workers: int = 2
    slots: int = 8
    """Samples that a worker generates in parallel."""
    dropped: Callable[[int], str] = _nothing_dropped
    """Why the group at a position is dropped; empty: it is trained on."""
    crashes: Sequence[Crash] = ()
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
    seed: int = 0
    limit_s: float = 8_000.0


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
    produced: int = 0
    """Tokens that engines produced."""
    moved: int = 0
    """Groups that another replica than their owner trained on."""
