"""What a plan will do on given devices: step time, what each pool does with its time, staleness, traffic.

    simulate(load_of(plan), load("h100-qwen2.5-7b"), Lognormal(900, 1.1, 0.6), SimulateOptions(steps=8)).step_s

The plan's own lease settings are used, and the cores that a run of it has. What is not simulated is in `LEFT_OUT`.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import NamedTuple

from distflow.config.schema import Refresh
from distflow.errors import UserError
from distflow.exchange.lease_settings import LeaseSettings, planned_settings
from distflow.exchange.messages import Message
from distflow.flow.estimate import divides
from distflow.flow.gpus import width
from distflow.flow.plan import Plan
from distflow.sim.account import (
    COLOCATED,
    DECODE,
    FIRST,
    LATER,
    LEASES,
    LOADS,
    OTHERS,
    STALLED,
    TRAIN,
    UPDATE,
    WEIGHTS,
    SimulatedSpan,
    Totals,
)
from distflow.sim.latency import DeviceLatency
from distflow.sim.lengths import Lengths
from distflow.sim.network import LeaseNetwork, never
from distflow.sim.scenario import Crash, Scenario
from distflow.sim.workload import DeviceWorkload, Job

LEFT_OUT = (
    "validation, reward time, tokens of environments, calls of other pools",
    "rounds of a divided model (each replica computes by itself)",
    "links that are shared: every version takes bytes / link_bytes_s to each other host",
    "the cache of keys and values that a preempted sample loses",
)
HOST_GPUS = 8
"""Of one host, where the plan does not say how many hosts there are: as servers for training have."""
LONG_TURN_S = 10.0
"""An environment that takes longer is looked at less often: the intervals of reports grow as it does."""
LONG_STEP_S = 100.0
"""So are the devices whose training step takes longer."""
HEARD_S = 0.01
"""Maximum time until a worker hears of a version."""
DELAY_S = 0.002
"""Maximum delay of a message."""
LEAST_ENDED = 2
"""Training steps that must have ended: one begins when the one before ends."""
STEPS = 8
"""Training steps that count, at least, where nobody says how many."""


@dataclass(frozen=True, slots=True)
class Load:
    """A simulation in plain figures, without a recipe."""

    settings: LeaseSettings
    rollouts: int
    replicas: int
    slots: int
    job: Job
    streamed: bool = True
    stealing: bool = True
    dealing: bool = False
    colocated: bool = False
    refresh: Refresh = "eager"
    generating_pool: str = "rollout"
    training_pool: str = "trainer"
    engine_gpus: int = 1
    """Over which an engine's options share its model."""
    one_host: bool | None = None
    """Whether all run on one host; None: if their GPUs are no more than `HOST_GPUS`."""

    @property
    def prompts(self) -> int:
        """Groups of a training step."""
        return self.settings.ledgers * self.settings.groups_per_ledger


@dataclass(frozen=True, slots=True)
class SimulateOptions:
    """How to simulate it."""

    steps: int = STEPS
    """Training steps that count; some before and after them are simulated, too."""
    slowness: Mapping[int, float] = field(default_factory=dict)
    """Factors on the times of engines, by worker number."""
    crashes: Sequence[Crash] = ()
    timeline: bool = False
    hub_s: Callable[[Message], float] | None = None
    """Seconds of each message in one process that all go through."""
    dropped: Callable[[int], str] | None = None
    """Why the group at a position is dropped; empty: it is not."""
    watch: Callable[[int, int], bool] | None = None
    """Asked now and then with the training steps that have ended, and with all that are to be; true: end it there."""


@dataclass(frozen=True, slots=True)
class PoolUse:
    """What a pool did with its time."""

    name: str
    workers: int
    shares: Mapping[str, float]
    """Of the time of all its workers, by state (`distflow.sim.account`)."""
    slots_used: float | None = None
    """Of a generating pool: mean share of its slots that were in use, over all the time."""
    batch_share: float | None = None
    """Of a generating pool: share of its decoding that the samples of a batch add to that of none (`BatchCost`)."""

    @property
    def utilisation(self) -> float:
        """Share of the time in which it decoded or trained."""
        return self.shares.get(DECODE, 0.0) + self.shares.get(TRAIN, 0.0)


@dataclass(frozen=True, slots=True)
class Prediction:
    """What came out, of the steps that count unless it says otherwise."""

    step_s: float
    steps: tuple[float, ...]
    """Seconds of each."""
    samples_s: float
    tokens_s: float
    """Response tokens trained on per second."""
    pools: tuple[PoolUse, ...]
    staleness: Mapping[int, float]
    """Share of the groups by how many versions they are old."""
    produced: int
    trained: int
    """Response tokens, of the whole simulation."""
    messages_group: float
    bytes_step: Mapping[str, float]
    """Bytes a training step, by pool of sender and receiver; weights included."""
    busiest: str
    busiest_messages_s: float
    busiest_bytes_s: float
    arrives_s: float
    """Seconds from publishing a version of the weights until engines can load it; 0: they are handed over in place."""
    one_host: bool
    """Whether it crosses no link between hosts."""
    hub_s: float
    """Seconds of the hub, by those of the simulation."""
    took_s: float
    """Seconds of a core of this computer."""
    spans: Mapping[str, Sequence[SimulatedSpan]]
    """What each worker did, if that was asked for."""
    began: float = 0.0
    ended: float = 0.0
    """When the steps that count did."""
    wanted: int = 0
    """Steps that were to count: more than do if the simulation was ended early."""

    @property
    def never_trained(self) -> int:
        """Response tokens that were generated and not trained on."""
        return self.produced - self.trained


def on_one_host(load: Load, device: DeviceLatency) -> bool:
    """Whether weights cross no link between hosts."""
    if load.one_host is not None:
        return load.one_host
    engine = max(load.engine_gpus, device.gpus.engine)
    return load.rollouts * engine + load.replicas * device.gpus.trainer <= HOST_GPUS


def load_of(plan: Plan, *, prompt_tokens: int | None = None) -> Load:
    """A plan in figures. Raises UserError for one that cannot be simulated.

    `prompt_tokens`: of every prompt; half of `data.max_prompt_tokens` if it is not known.
    """
    if plan.reads is not None:
        raise UserError("simulate: this flow trains on files and generates nothing — distflow plan shows what it does")
    makers = plan.generating_pools
    if len(makers) != 1:
        names = ", ".join(pool.name for pool in makers)
        raise UserError(f"simulate: {names} generate with {plan.primary}: several such pools are not built yet")
    maker, home, owner = makers[0], plan.home, plan.owner_plan
    colocated = maker.name == home.name
    worker = next(worker for worker in plan.workers if worker.name.pool == maker.name)
    batch = plan.batch
    most = plan.recipe.data.max_prompt_tokens
    job = Job(
        samples=batch.samples_per_prompt,
        prompt_tokens=max(1, min(most, prompt_tokens or most // 2)),
        response_tokens=plan.response_tokens,
        budget=batch.tokens_per_microbatch,
        seed=plan.recipe.run.seed,
        epochs=batch.epochs,
        updates=batch.updates,
        forwards=sum(step.role == "forward" for step in owner.steps),
        recomputes=plan.recipe.models[plan.primary].gradient_checkpointing,
        colocated=colocated,
    )
    deals = home.count > 1 and (divides(owner) or not plan.streamed)
    return Load(
        planned_settings(plan, owner),
        maker.count,
        home.count,
        worker.slots,
        job,
        streamed=plan.streamed,
        stealing=plan.recipe.layout.stealing and not deals,
        dealing=deals,
        colocated=colocated,
        refresh=plan.recipe.layout.refresh,
        generating_pool=maker.name,
        training_pool=home.name,
        engine_gpus=width(worker),
        one_host=False if any(pool.hosts for pool in plan.recipe.layout.pools.values()) else None,
    )


class Steps(NamedTuple):
    """Training steps of a simulation: `first` ≤ step < `end` are measured, of all that are `made`."""

    first: int
    end: int
    made: int


def steps_of(stale: int | None, measured: int) -> Steps:
    """What it takes to measure so many steps at this `max_staleness`: the pipeline fills before, and goes on after."""
    first = 2 + (2 if stale is None else stale)
    # Without a bound, memory is what limits how far ahead groups are leased, not the end of the run.
    after = 8 if stale is None else max(1, stale)
    return Steps(first, first + measured, first + measured + after)


def whole_rounds(stale: int | None, least: int = STEPS) -> int:
    """So many steps or a few more: a multiple of `1 + max_staleness`, in which steps come that wait for weights."""
    steps = 1 if stale is None else 1 + stale
    return -(-least // steps) * steps


def simulate(load: Load, device: DeviceLatency, lengths: Lengths, options: SimulateOptions) -> Prediction:
    """Simulate `options.steps` training steps, after those in which the pipeline fills."""
    steps = steps_of(load.settings.max_staleness, options.steps)
    slower = max(1.0, load.job.turns.seconds / LONG_TURN_S, _guess_s(load, device, lengths) / LONG_STEP_S)
    settings = replace(_slower(load.settings, slower), training_steps=steps.made, max_refills=10**9)
    job = replace(load.job, one_host=on_one_host(load, device))
    workload = DeviceWorkload(device, lengths, job, dict(options.slowness))
    scenario = Scenario(
        settings,
        owners=load.replicas,
        workers=load.rollouts,
        slots=load.slots,
        workload=workload,
        crashes=options.crashes,
        colocated=load.colocated,
        refresh=load.refresh,
        lazy_take=not load.streamed,
        stealing=load.stealing,
        dealing=load.dealing,
        budget=load.job.budget,
        delay_s=DELAY_S,
        spread_s=HEARD_S,
        load_s=workload.transfer_s,
        tick_s=settings.report_s,
        seed=load.job.seed,
        limit_s=1e9 * slower,
    )
    if options.hub_s is not None:
        scenario = replace(scenario, hub_s=options.hub_s)
    if options.dropped is not None:
        scenario = replace(scenario, dropped=options.dropped)
    began = time.process_time()
    with _without_collector():
        network = LeaseNetwork(scenario, timeline=options.timeline)
        network.run(never if options.watch is None else partial(_enough, options.watch, steps.made))
    # Of one that was ended early, at least the last step counts, even if the pipeline was still filling.
    last = min(steps.end, len(network.totals))
    if last < LEAST_ENDED:
        raise EndedEarly(last)
    found = _read(load, network, min(steps.first, last - 1), last, time.process_time() - began)
    return replace(found, wanted=options.steps)


class EndedEarly(Exception):
    """A simulation was ended before any training step could be measured; its argument: how many had ended."""


def _enough(watch: Callable[[int, int], bool], made: int, ended: int) -> bool:
    return watch(ended, made)


def _guess_s(load: Load, device: DeviceLatency, lengths: Lengths) -> float:
    """Seconds of a training step in its order of magnitude, without environments: one thing after the other."""
    job, weights = load.job, device.weights
    length = lengths.length(0.5, 0.5, job.response_tokens)
    row, samples = job.prompt_tokens + length, load.prompts * job.samples
    share = max(1.0, samples / load.rollouts)
    running = min(float(load.slots), share)
    generate_s = share * (length * device.decode.seconds(running, row) / running)
    prefill_s = share * job.prompt_tokens * device.decode.prefill_s
    train_s = samples / load.replicas * device.train.seconds([row]) + job.updates * device.train.apply_s
    return generate_s + prefill_s + train_s + weights.publish_s + weights.swap_s + weights.bytes / weights.link_bytes_s


def _slower(settings: LeaseSettings, factor: float) -> LeaseSettings:
    """What is done from time to time, and what is told by silence, at intervals `factor` times as long.

    While an environment or a slow device computes, all workers stand still for long: looking every second what they do
    would take this computer longer with every virtual second, and show nothing.
    """
    host_silence_s = settings.host_silence_s
    return replace(
        settings,
        report_s=settings.report_s * factor,
        resend_s=settings.resend_s * factor,
        silence_s=settings.silence_s * factor,
        host_silence_s=None if host_silence_s is None else host_silence_s * factor,
    )


@contextmanager
def _without_collector() -> Iterator[None]:
    """All garbage of a simulation is freed by reference counts; looking for cycles costs a third of its time."""
    was = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was:
            gc.enable()


def _read(load: Load, network: LeaseNetwork, warm: int, last: int, took_s: float) -> Prediction:
    totals, record = network.totals, network.record
    begin, end = totals[warm - 1], totals[last - 1]
    seconds, count = end.at - begin.at, last - warm
    tokens = sum(record.tokens[step] for step in range(warm, last))
    traffic, lags = network.traffic, end.lags - begin.lags
    busiest = max(traffic.messages, key=lambda name: traffic.messages[name])
    steps = len(totals)
    links = {f"{a} → {b}": nbytes / steps for (a, b), nbytes in sorted(traffic.sent.items())}
    workload = network.workload
    if not load.colocated and isinstance(workload, DeviceWorkload):
        where = "weights, through shared memory" if workload.job.one_host else "weights, to each other host"
        links[where] = workload.device.weights.bytes
    every = {name: worker.time.spans for name, worker in network.workers.items()}
    every |= {name: trainer.time.spans for name, trainer in network.trainers.items()}
    return Prediction(
        step_s=seconds / count,
        steps=tuple(totals[step].at - totals[step - 1].at for step in range(warm, last)),
        samples_s=load.prompts * load.job.samples * count / seconds,
        tokens_s=tokens / seconds,
        pools=_pools(load, begin, end),
        staleness={lag: n / lags.total() for lag, n in sorted(lags.items())},
        produced=record.produced,
        trained=sum(record.tokens.values()),
        messages_group=(end.messages - begin.messages) / (load.prompts * count),
        bytes_step=links,
        busiest=_named(load, busiest),
        busiest_messages_s=traffic.messages[busiest] / network.now,
        busiest_bytes_s=traffic.by_worker[busiest] / network.now,
        arrives_s=network.scenario.load_s,
        one_host=isinstance(workload, DeviceWorkload) and workload.job.one_host,
        hub_s=record.hub_s / network.now,
        took_s=took_s,
        spans={_named(load, name): spans for name, spans in every.items() if spans is not None},
        began=begin.at,
        ended=end.at,
    )


def _named(load: Load, name: str) -> str:
    """The name that the plan has for a simulated worker."""
    pool, _, number = name.partition("/")
    return f"{load.generating_pool if pool == 'rollout' else load.training_pool}/{number}"


def _pools(load: Load, begin: Totals, end: Totals) -> tuple[PoolUse, ...]:
    seconds = end.at - begin.at
    generating = _shares(
        begin.generating, end.generating, load.rollouts * seconds, (DECODE, LEASES, WEIGHTS, COLOCATED)
    )
    generating[STALLED] = (end.stalled_s - begin.stalled_s) / (load.rollouts * seconds)
    generating[LOADS] = (end.loading_s - begin.loading_s) / (load.rollouts * seconds)
    # It may take new weights while it has nothing to decode.
    generating[DECODE] = max(0.0, generating[DECODE] - generating[STALLED] - generating[LOADS])
    slots = (end.slot_s - begin.slot_s) / (load.rollouts * load.slots * seconds)
    training = _shares(begin.training, end.training, load.replicas * seconds, (TRAIN, FIRST, LATER, OTHERS, UPDATE))
    return (
        PoolUse(load.generating_pool, load.rollouts, generating, slots, end.batch.since(begin.batch).share),
        PoolUse(load.training_pool, load.replicas, training),
    )


def _shares(
    begin: Mapping[str, float], end: Mapping[str, float], seconds: float, states: Sequence[str]
) -> dict[str, float]:
    return {state: (end[state] - begin[state]) / seconds for state in states}
