"""Closed formulas beside the simulator: the schedule model of a step, and the speed-up of asynchrony in theory.

Schedule model. With n = B·G samples a step, mean length L̄, prompts of P tokens, c trainer seconds a token, b = B/R
groups a replica, N engines of S slots, τ(·) seconds of a decode step, ρ the share of the log-variance of lengths that
the prompt explains, cv their coefficient of variation, F their distribution:

    g      = G·(L̄+P)·c                       with its share of a batch's latency; a replica has a batch a step at least
    κ      = 1 where replicas steal or deal, else 1 + cv_g·L̄/(L̄+P)/√b·Φ⁻¹((R−.375)/(R+.25))     (Blom, 1958)
    cv_g   = cv·√(ρ+(1−ρ)/G)
    T_tr   = κ·b·g + g + update             T_rate = n·L̄·τ(S)/(N·S)
    L_max  = F⁻¹(1−1/(1.78·n))              m = n·P(L ≥ .9·L_max)
    w      = m/(m+1)·max(0, n/N−S)·L̄·τ(S)/S        until the last long sample has a slot
    1/τ*   = f/τ(S) + (1−f)/τ(1), f = min(1, T_rate/T)         a fixed point: how full engines are
    T_crit = w + L_max·τ* + weights + update + 2g
    T      = ‖T_tr, T_rate, T_crit/(1+s)‖₈         whole batches at s = 0: w + L_max·τ* + weights + κ·b·g + update

Environments of several turns take an engine e seconds a token of each sample, so that τ(S) becomes τ(S) + S·e.

The exponent was fitted on one set of simulations and checked on others of its kind: mean error 3%, 97% within 10%. Of
short steps (8 to 30 s), of which weights and single micro-batches are a large part, it says up to 38% too little. Left
out: drops, slow or dying workers, hedging, colocated phases (they are a sum), messages, reading prompts.

Speed-up of asynchrony (LlamaRL, arXiv:2505.24034). A sample costs η_t(b) seconds of training and η_g(b) of generation
in a batch of b per replica, falling in b; a replica of m devices has memory m·M for weights W and b·a of samples. Both
on the same devices, and one after the other, against each on its own share θ of all:

    T_sync  = min (B·m/G)·(η_t(b_t) + η_g(b_g)),    W_t + W_g + max(b_t·a_t, b_g·a_g) ≤ m·M
    T_async = (B/G)·(min m_t·η_t(b_t) + min m_g·η_g(b_g)),  θ* = m_t·η_t/(m_t·η_t + m_g·η_g),   W + b·a ≤ m·M for each

T_async ≤ T_sync, since what is feasible for both at once is so for each. In this model overlap by itself gains nothing:
the gain is that neither needs memory for the other. It leaves out makespans (the bubbles of the long tail, most of what
is gained in practice), the transfer of weights, and that shares are whole devices.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from statistics import NormalDist, fmean, pstdev

from distflow.sim.fluid_engine import ONE_TURN, SampleTurns
from distflow.sim.latency import DeviceLatency, TrainLatency
from distflow.sim.lengths import Lengths

NORMAL = NormalDist()
NORM = 8.0
ROUNDS = 60
PROMPTS, SAMPLES = 400, 40
"""Quantiles at which a distribution of lengths is looked at."""


@dataclass(frozen=True, slots=True)
class LengthMoments:
    """What the schedule model asks of a distribution of lengths."""

    mean: float
    cv: float
    prompt_share: float
    """Of the variance of the logarithm."""
    ordered: Sequence[int]
    """Quantiles."""

    @classmethod
    def of(cls, lengths: Lengths, limit: int) -> LengthMoments:
        """Look at a distribution on a grid."""
        grid = [
            [lengths.length((i + 0.5) / PROMPTS, (j + 0.5) / SAMPLES, limit) for j in range(SAMPLES)]
            for i in range(PROMPTS)
        ]
        every = sorted(length for row in grid for length in row)
        logs = [[math.log(length) for length in row] for row in grid]
        total = pstdev([x for row in logs for x in row])
        between = pstdev([fmean(row) for row in logs])
        share = 0.0 if total == 0.0 else min(1.0, between * between / (total * total))
        return cls(fmean(every), pstdev(every) / fmean(every), share, every)

    @property
    def before(self) -> float:
        """Mean tokens of its response that a token has before it: E[L²] / (2·E[L])."""
        return self.mean * (1.0 + self.cv**2) / 2

    def quantile(self, share: float) -> float:
        """The length that this share of all samples does not exceed."""
        return float(self.ordered[min(len(self.ordered) - 1, int(share * len(self.ordered)))])

    def above(self, length: float) -> float:
        """The share of samples that are at least as long."""
        return sum(one >= length for one in self.ordered) / len(self.ordered)


@dataclass(frozen=True, slots=True)
class Schedule:
    """What a step of the schedule model consists of."""

    engines: int
    replicas: int
    slots: int
    prompts: int
    samples: int
    """G, of a prompt."""
    prompt_tokens: int
    staleness: int
    streamed: bool = True
    balanced: bool = True
    """Replicas steal, or deal."""
    passes: float = 1.0
    """Of forward and backward over each sample."""
    transfer_s: float = 0.0
    """From publishing to when engines have a version."""
    update_s: float = 0.0
    """Optimizer steps, and what publishing keeps the trainer."""
    colocated: bool = False
    budget: int = 0
    """Tokens of a batch, whose latency its rows share; 0: each row is alone."""
    turns: SampleTurns = ONE_TURN

    def row_s(self, train: TrainLatency, row: float) -> float:
        """Seconds of forward and backward of a row of so many tokens in a batch."""
        whole = self.replicas / (self.prompts * self.samples)
        share = min(1.0, max(whole, row / self.budget)) if self.budget else 1.0
        return train.seconds([row]) - (1.0 - share) * train.latency_s

    def environment_s(self, moments: LengthMoments) -> float:
        """Seconds of an engine for the environment of a sample, for each of its tokens."""
        turns = self.turns
        if not turns.tokens:
            return 0.0
        return turns.seconds * fmean(math.ceil(one / turns.tokens) - 1 for one in moments.ordered) / moments.mean


@dataclass(frozen=True, slots=True)
class StepTimes:
    """Seconds of a step, and of what bounds it."""

    step_s: float
    train_s: float
    rate_s: float
    critical_s: float
    """Of the longest sample and all that waits for it, shared among the steps that overlap."""


def schedule(plan: Schedule, device: DeviceLatency, moments: LengthMoments) -> StepTimes:
    """The schedule model of a plan on one kind of device."""
    count = plan.prompts * plan.samples
    share = plan.prompts / plan.replicas
    context, environment_s = plan.prompt_tokens + moments.mean / 2, plan.environment_s(moments)

    def pace(samples: float) -> float:
        return device.decode.seconds(samples, context) + samples * environment_s

    row = moments.mean + plan.prompt_tokens
    group_s = plan.passes * plan.samples * plan.row_s(device.train, row)
    train_s = _imbalance(plan, moments) * share * group_s
    full = min(float(plan.slots), count / plan.engines)
    rate_s = count * moments.mean * pace(full) / (plan.engines * full)
    longest = moments.quantile(1.0 - 1.0 / (1.78 * count))
    long = count * moments.above(0.9 * longest)
    wait_s = long / (long + 1.0) * max(0.0, count / plan.engines - plan.slots) * moments.mean * pace(full) / full
    weights_s = plan.transfer_s + device.weights.swap_s
    barrier = plan.colocated or (plan.staleness == 0 and not plan.streamed)
    fed_s = train_s + group_s + plan.update_s
    step_s = max(fed_s, rate_s)
    critical_s = 0.0
    for _ in range(ROUNDS):
        busy = min(1.0, rate_s / step_s)
        decode_s = wait_s + longest / (busy / pace(full) + (1.0 - busy) / pace(1.0))
        if barrier:
            # Colocated with staleness, long samples go on in the next step.
            critical_s = decode_s / (1.0 + plan.staleness) + weights_s + train_s + plan.update_s
            found = max(critical_s, rate_s + train_s + plan.update_s) if plan.colocated else critical_s
        else:
            critical_s = (decode_s + weights_s + plan.update_s + 2.0 * group_s) / (1.0 + plan.staleness)
            found = sum(part**NORM for part in (fed_s, rate_s, critical_s)) ** (1.0 / NORM)
        step_s = 0.5 * step_s + 0.5 * found
    return StepTimes(step_s, fed_s, rate_s, critical_s)


def ideal_s(plan: Schedule, device: DeviceLatency, moments: LengthMoments) -> float:
    """All work of a step over all devices, as if each could do either, at full slots: no layout is faster."""
    devices = plan.replicas if plan.colocated else plan.engines + plan.replicas
    return sum(work_s(plan, device, moments)) / devices


def work_s(plan: Schedule, device: DeviceLatency, moments: LengthMoments) -> tuple[float, float]:
    """Seconds of one device for the training of a step without its optimizer and the latency of its batches, and for
    the generation at full slots.

    Long samples count more than by their number: a token has E[L²]/(2·E[L]) tokens of response before it, in the mean.
    """
    count = plan.prompts * plan.samples
    pairs_s = device.train.pair_s * moments.mean**2 * moments.cv**2
    row_s = device.train.seconds([moments.mean + plan.prompt_tokens]) - device.train.latency_s
    train_s = plan.passes * count * (row_s + pairs_s)
    pace = device.decode.seconds(plan.slots, plan.prompt_tokens + moments.before) / plan.slots
    return train_s, count * moments.mean * (pace + plan.environment_s(moments))


def _imbalance(plan: Schedule, moments: LengthMoments) -> float:
    if plan.balanced or plan.replicas < 2:
        return 1.0
    of_group = moments.cv * math.sqrt(moments.prompt_share + (1.0 - moments.prompt_share) / plan.samples)
    most = NORMAL.inv_cdf((plan.replicas - 0.375) / (plan.replicas + 0.25))
    share = plan.prompts / plan.replicas
    return 1.0 + of_group * moments.mean / (moments.mean + plan.prompt_tokens) / math.sqrt(share) * most


@dataclass(frozen=True, slots=True)
class Side:
    """Training, or generation, of one model."""

    weights: float
    """Bytes that a replica holds whatever its batch: weights, gradients, optimizer."""
    sample: float
    """Bytes of each sample of its batch."""
    seconds: Callable[[int], float]
    """η: seconds a sample in a batch of b, not rising in b."""


@dataclass(frozen=True, slots=True)
class TheoryFleet:
    """Devices, and the batch of a training step."""

    devices: int
    memory: float
    """Bytes of each device."""
    samples: int
    """Of a training step."""


@dataclass(frozen=True, slots=True)
class SpeedUp:
    """Seconds of a step in the theory of asynchrony."""

    sync_s: float
    async_s: float
    training_share: float
    """θ*: of the devices, that train."""

    @property
    def factor(self) -> float:
        """How much faster."""
        return self.sync_s / self.async_s


def speed_up(fleet: TheoryFleet, train: Side, generate: Side) -> SpeedUp | None:
    """The best step time with both models on all devices, and with each on its share. None: they do not fit together.

    Replicas of m devices, m a power of two up to all of them.
    """
    together = min(
        (
            width * (train.seconds(a) + generate.seconds(b))
            for width in _widths(fleet)
            if (a := _batch(fleet, width, train, train.weights + generate.weights))
            and (b := _batch(fleet, width, generate, train.weights + generate.weights))
        ),
        default=None,
    )
    if together is None:
        return None
    apart = [
        min(
            width * side.seconds(batch)
            for width in _widths(fleet)
            if (batch := _batch(fleet, width, side, side.weights))
        )
        for side in (train, generate)
    ]
    scale = fleet.samples / fleet.devices
    return SpeedUp(scale * together, scale * sum(apart), apart[0] / sum(apart))


def _widths(fleet: TheoryFleet) -> Iterator[int]:
    width = 1
    while width <= fleet.devices:
        yield width
        width *= 2


def _batch(fleet: TheoryFleet, width: int, side: Side, weights: float) -> int:
    """The largest batch for which a replica of `width` devices has memory; 0: none."""
    return max(0, min(fleet.samples, int((width * fleet.memory - weights) // side.sample)))
