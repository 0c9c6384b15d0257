"""Simulations of the lease protocol: scale, a single controller beside it, rules and schedules.

    python -m benchmarks simulated scale [N …]          python -m benchmarks simulated hub [N …]
    python -m benchmarks simulated tails [short|heavy|agentic …]
    python -m benchmarks simulated schedules [short|heavy|agentic …]

All on the latency model of an H100 with a 7B model. Nothing is run but the simulator, so a machine of any size will do.
`scale` is about the lease protocol: real cores exchange its messages, each up to 2 ms late. It leaves out the CPU time
of workers and messages, sockets, heartbeats and host agents; links that several transfers share (each version takes
bytes / rate to each host); sums of gradients beyond a constant in the optimizer step; what the 8 devices of a replica
send each other; rewards, validation and faults.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product

from distflow.config.schema import Schedule
from distflow.exchange.lease_settings import LeaseSettings
from distflow.exchange.messages import Message, Result
from distflow.flow.memory import group_bytes
from distflow.sim.account import DECODE, FIRST, LATER, LEASES, LOADS, OTHERS, STALLED, TRAIN, UPDATE, WEIGHTS
from distflow.sim.fluid_engine import ONE_TURN, FluidEngine, FluidSample, SampleTurns
from distflow.sim.latency import DeviceLatency, load
from distflow.sim.lengths import Lengths, Lognormal
from distflow.sim.predict import Load, Prediction, SimulateOptions, simulate
from distflow.sim.schedule_of import schedule_of
from distflow.sim.theory import LengthMoments, ideal_s, work_s
from distflow.sim.workload import DeviceWorkload, Job

DEVICE = "h100-qwen2.5-7b"
SAMPLES, PROMPT, BUDGET = 8, 200, 16_384
STEPS = 4
SCALE_STALENESS = 4
SCALE_STEPS, SAMPLED = 4 * (1 + SCALE_STALENESS), 64
"""Steps of a line of `scale` or `hub`, and how many rollouts its seeds have together at least."""
LENGTHS: dict[str, tuple[Lengths, int]] = {
    # As measured of instruction models on short questions; of reasoning models; of agents, where a few tasks are long
    # and samples have turns.
    "short": (Lognormal(300, 0.6, 0.4), 2_048),
    "heavy": (Lognormal(900, 1.1, 0.6), 16_384),
    "agentic": (Lognormal(1_500, 1.4, 0.8), 32_768),
}
TURNS = {"agentic": SampleTurns(512, 0.02)}
"""Tokens of a turn, and the seconds for which its worker computes the environment: a file read, a test that is run."""
DRIVER_SAMPLE_S = 0.95 / 4_096
"""verl's driver: 0.6 to 1.3 s for 4,096 samples of 1,024 tokens, which grow with the bytes."""
DRIVER_BYTE_S = DRIVER_SAMPLE_S / group_bytes(1, 0, 1_024)
COORDINATOR_SAMPLE_S = 1e-3
"""siiRL's data coordinator: 0.9 to 1.1 s for the metadata of 1,024 samples."""
HUB_RESEND_S = 1e6
"""What waits in such a process is not lost: sent again, it would only add to what waits there."""


def load_for(
    rollouts: int, replicas: int, prompts: int, staleness: int | None, longest: int, turns: SampleTurns = ONE_TURN
) -> Load:
    """A split layout with pull leases and streaming, and nothing besides."""
    settings = LeaseSettings(
        ledgers=replicas,
        groups_per_ledger=prompts // replicas,
        samples_per_prompt=SAMPLES,
        max_staleness=staleness,
        training_steps=1,
        memory_bytes=1 << 40,
        group_bytes=lambda prompt_tokens: group_bytes(SAMPLES, prompt_tokens, longest),
        max_prompt_tokens=PROMPT,
    )
    job = Job(SAMPLES, PROMPT, longest, BUDGET, turns=turns)
    return Load(settings, rollouts, replicas, 64, job)


# -- scale
def scale(counts: Sequence[int]) -> None:
    """A constant share of work for each worker: 9 groups of 8 a step; 8 rollouts a replica, which has 8 devices.

    Efficiency is by tokens trained on in a second by each worker: lengths are random, so the work of a step is, and
    few workers take several seeds to tell the mean. Where rollouts wait for weights, steps come in rounds of 1 +
    staleness, of which the last one is long: only whole rounds tell the mean. The longest sample is cut off at the
    same length everywhere.
    """
    print(
        "| workers | seeds | step s | efficiency | rollouts: decode | load weights | wait for leases or weights | "
        "replicas: wait for others | updates | messages a group | busiest, messages/s | seconds of a core |\n"
        f"|{' --- |' * 12}"
    )
    first = 0.0
    for count in counts:
        seeds = max(1, SAMPLED // count)
        runs = [_scaled(count, None, seed) for seed in range(seeds)]
        generates = [run.pools[0].shares for run in runs]
        trains = [run.pools[1].shares for run in runs]
        rate = statistics.mean(run.tokens_s for run in runs) / count
        first = first or rate
        shares = [
            statistics.mean(one[DECODE] for one in generates),
            statistics.mean(one[LOADS] for one in generates),
            statistics.mean(one[LEASES] + one[WEIGHTS] for one in generates),
            statistics.mean(one[OTHERS] for one in trains),
            statistics.mean(one[UPDATE] for one in trains),
        ]
        print(
            f"| {count} + {count // 8} | {seeds} | {statistics.mean(run.step_s for run in runs):.2f} | "
            f"{rate / first:.1%} | {' | '.join(f'{share:.1%}' for share in shares)} | "
            f"{statistics.mean(run.messages_group for run in runs):.1f} | "
            f"{max(run.busiest_messages_s for run in runs):.1f} | {sum(run.took_s for run in runs):.0f} |",
            flush=True,
        )


def hub(counts: Sequence[int]) -> None:
    """The same with all samples, or their metadata, going through one process."""
    print("| workers | peer to peer, step s | one driver, step s (busy) | one coordinator of metadata, step s (busy) |")
    print("| --- | --- | --- | --- |")
    for count in counts:
        found = [_scaled(count, way) for way in (None, driver_s, coordinator_s)]
        cells = [f"{one.step_s:.2f} ({one.hub_s:.0%})" for one in found[1:]]
        print(f"| {count} + {count // 8} | {found[0].step_s:.2f} | {' | '.join(cells)} |", flush=True)


def driver_s(message: Message) -> float:
    """Seconds of a driver that all samples go through, bytes and all."""
    return message.nbytes * DRIVER_BYTE_S if isinstance(message, Result) else 0.0


def coordinator_s(message: Message) -> float:
    """Seconds of a coordinator that has the metadata of all samples."""
    return SAMPLES * COORDINATOR_SAMPLE_S if isinstance(message, Result) else 0.0


def _scaled(count: int, way: Callable[[Message], float] | None, seed: int = 0) -> Prediction:
    lengths, longest = LENGTHS["short"]
    work = load_for(count, max(1, count // 8), 9 * count, SCALE_STALENESS, longest)
    work = replace(work, job=replace(work.job, seed=seed))
    if way is not None:
        work = replace(work, settings=replace(work.settings, resend_s=HUB_RESEND_S))
    device = load(DEVICE)
    train = replace(device.train, token_s=device.train.token_s / 8, pair_s=device.train.pair_s / 8)
    return simulate(work, replace(device, train=train), lengths, SimulateOptions(steps=SCALE_STEPS, hub_s=way))


# -- tails
@dataclass(frozen=True, slots=True)
class Rules:
    """One line of the table."""

    name: str
    staleness: int = 0
    streamed: bool = True
    schedule: Schedule = "fifo"
    partial: bool = False
    hedging: bool = False
    rollouts: int = 16
    """Of 32 devices; the others train."""


LINES = (
    Rules("pull leases", streamed=False),
    Rules("and streaming"),
    Rules("and staleness 1", 1),
    Rules("staleness 1, longest_first", 1, schedule="longest_first"),
    Rules("staleness 1, skew_aware", 1, schedule="skew_aware"),
    Rules("staleness 1, partial rollouts", 1, partial=True),
    Rules("staleness 1, partial rollouts, hedging", 1, partial=True, hedging=True),
    Rules("staleness 2", 2),
    Rules("staleness 4", 4),
    Rules("staleness 8", 8),
    Rules("staleness 8, 14 rollouts + 18 trainers", 8, rollouts=14),
    Rules("staleness 8, 12 rollouts + 20 trainers", 8, rollouts=12),
)
DEVICES, PROMPTS = 32, 288
SEEDS = range(3)
SCHEDULES: tuple[Schedule, ...] = ("fifo", "longest_first", "skew_aware")


def tails(names: Sequence[str]) -> None:
    """One rule more, or another one, in each line; 32 devices. What each pool does with its time stands beside it."""
    device = load(DEVICE)
    for name in names:
        lengths, longest = LENGTHS[name]
        work = load_for(DEVICES // 2, DEVICES // 2, PROMPTS, 0, longest, TURNS.get(name, ONE_TURN))
        moments = LengthMoments.of(lengths, longest)
        ideal = ideal_s(schedule_of(work, device), device, moments)
        static = static_s(work, device, lengths)
        print(f"\n{name}: ideal {ideal:.1f} s, static assignment, synchronous {static:.1f} s\n")
        columns = ("rules", "step s", "speed-up", "ideal / step", "bound of this layout, s", "bound / step")
        rollouts = ("slots used", "rollouts: stand still", "wait for leases", "for weights")
        trainers = ("trainers: train", "wait for samples", "for others", "update", "never trained on")
        print(f"| {' | '.join(columns + rollouts + trainers)} |\n|{' --- |' * 15}", flush=True)
        for rules in LINES:
            one = ruled(work, rules)
            # What rollouts were ahead at the start is used up slowly where they are the bound.
            found = simulate(one, device, lengths, SimulateOptions(steps=STEPS * (1 + rules.staleness)))
            bound, what = bound_of(one, device, moments)
            make, train = found.pools
            stands = make.shares[STALLED] + make.shares[LOADS]
            cells = [rules.name, f"{found.step_s:.1f}", f"{static / found.step_s:.2f}", f"{ideal / found.step_s:.0%}"]
            cells += [f"{bound:.1f} ({what})", f"{bound / found.step_s:.0%}", f"{make.slots_used or 0.0:.0%}"]
            cells += [f"{share:.0%}" for share in (stands, make.shares[LEASES], make.shares[WEIGHTS])]
            cells += [f"{train.shares[TRAIN]:.0%}", f"{train.shares[FIRST] + train.shares[LATER]:.0%}"]
            cells += [f"{train.shares[state]:.0%}" for state in (OTHERS, UPDATE)]
            print(f"| {' | '.join([*cells, f'{found.never_trained / found.produced:.1%}'])} |", flush=True)
        for line in filter_late(work, device, lengths):
            print(line, flush=True)


def ruled(work: Load, rules: Rules) -> Load:
    """The same work by these rules."""
    replicas = DEVICES - rules.rollouts
    ledgers = replicas if PROMPTS % replicas == 0 else PROMPTS
    settings = replace(
        work.settings,
        ledgers=ledgers,
        groups_per_ledger=PROMPTS // ledgers,
        max_staleness=rules.staleness,
        schedule=rules.schedule,
        partial_rollouts=rules.partial,
        hedging=rules.hedging,
    )
    work = replace(work, rollouts=rules.rollouts, replicas=replicas)
    return replace(
        work, settings=settings, streamed=rules.streamed, stealing=rules.streamed, dealing=not rules.streamed
    )


def bound_of(work: Load, device: DeviceLatency, moments: LengthMoments) -> tuple[float, str]:
    """What no policy can beat with these devices in this layout, and what it is: the work of either pool at its best,
    or the longest sample, which at most 1 + staleness steps can share.
    """
    plan = schedule_of(work, device)
    count = plan.prompts * plan.samples
    trains, makes = work_s(plan, device, moments)
    longest = moments.quantile(1.0 - 1.0 / (1.78 * count))
    decode_s = longest * device.decode.seconds(1, plan.prompt_tokens + longest / 2)
    lasts = decode_s + plan.transfer_s + device.weights.swap_s
    parts = {
        "training": trains / plan.replicas + plan.update_s,
        "generation": makes / plan.engines,
        "longest": lasts / (1 + plan.staleness),
    }
    what = max(parts, key=lambda part: parts[part])
    return parts[what], what


def schedules(names: Sequence[str]) -> None:
    """In which order groups are leased: 4 rollouts of 8 groups at a time, 4.5 waves a step, streamed; several seeds.

    4 trainers, whose time for a token is that of the device, or a hundredth of it: then generation is all there is.
    """
    device = load(DEVICE)
    hardly = replace(device, train=replace(device.train, token_s=device.train.token_s / 100))
    print("| lengths, staleness, training | fifo, step s | longest_first | skew_aware |\n| --- | --- | --- | --- |")
    for name, staleness, trains in product(names, (0, 1), ("hardly any", "real")):
        lengths, longest = LENGTHS[name]
        work = load_for(4, 4, PROMPTS // 2, staleness, longest)
        found: dict[Schedule, list[float]] = {schedule: [] for schedule in SCHEDULES}
        for seed, schedule in product(SEEDS, SCHEDULES):
            settings = replace(work.settings, schedule=schedule)
            one = replace(work, settings=settings, job=replace(work.job, seed=seed))
            on = hardly if trains == "hardly any" else device
            found[schedule].append(simulate(one, on, lengths, SimulateOptions(steps=STEPS)).step_s)
        fifo = found["fifo"]
        cells = [f"{name}, {staleness}, {trains}", f"{statistics.median(fifo):.1f}"]
        for schedule in SCHEDULES[1:]:
            gains = sorted(a / b for a, b in zip(fifo, found[schedule], strict=True))
            cells.append(f"{statistics.median(gains):.2f} × the speed ({gains[0]:.2f} to {gains[-1]:.2f})")
        print(f"| {' | '.join(cells)} |", flush=True)


def static_s(work: Load, device: DeviceLatency, lengths: Lengths) -> float:
    """Each engine has an equal share of each step from its beginning, and training begins when all are done."""
    workload = DeviceWorkload(device, lengths, work.job)
    seconds = 0.0
    for step in range(STEPS):
        first = step * work.prompts
        shares: list[list[int]] = [[] for _ in range(work.rollouts)]
        for position in range(first, first + work.prompts):
            shares[position % work.rollouts].append(position)
        generated = max(_alone_s(workload, share, work.slots) for share in shares)
        groups = [list(range(first + r, first + work.prompts, work.replicas)) for r in range(work.replicas)]
        trained = max(workload.train_s(r, share) for r, share in enumerate(groups))
        seconds += generated + trained + workload.end_s + workload.transfer_s + workload.swap_s
    return seconds / STEPS


def _alone_s(workload: DeviceWorkload, positions: Sequence[int], slots: int) -> float:
    engine = FluidEngine(slots, workload.device.decode, turns=workload.turns)
    engine.add(
        FluidSample(position, number, length, PROMPT)
        for position in positions
        for number, length in enumerate(workload.lengths(position))
    )
    now = 0.0
    while (at := engine.next_end()) is not None:
        now = at
        engine.take_ended(now)
    return now


def filter_late(work: Load, device: DeviceLatency, lengths: Lengths) -> Iterator[str]:
    """Without a gate: groups are trained on as they arrive, and what is older than the bound would be thrown away."""
    settings = replace(
        work.settings, max_staleness=None, memory_bytes=3 * PROMPTS // work.replicas * work.settings.group_bytes(PROMPT)
    )
    found = simulate(replace(work, settings=settings), device, lengths, SimulateOptions(steps=STEPS))
    yield f"\nNo gate: {found.step_s:.1f} s a step; of the groups, a filter behind it would throw away"
    for bound in (0, 1, 2, 4, 8):
        late = sum(share for lag, share in found.staleness.items() if lag > bound)
        yield f"    {late:.1%} at staleness {bound}"


def main() -> None:
    """Print one table, or several."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["scale", "hub", "tails", "schedules"])
    parser.add_argument("of", nargs="*", help="numbers of rollouts for scale and hub, kinds of lengths for the others")
    chosen = parser.parse_args()
    if chosen.what in ("scale", "hub"):
        table = scale if chosen.what == "scale" else hub
        table([int(word) for word in chosen.of] or [8, 64, 512, 4096])
    else:
        rows = tails if chosen.what == "tails" else schedules
        rows(chosen.of or list(LENGTHS))
