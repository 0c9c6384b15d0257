"""The split of a fixed number of devices between generation and training that a training step is shortest with.

The schedule model (`distflow.sim.theory`) puts all splits in order, then the promising ones are simulated: the present
one, and then again and again the one that is best by the formula times what the nearest simulation came to by it. That
ends when none is left that could be best and both neighbours of the best are simulated; or when `MOST` are, or
`BUDGET_S` is used up, as it is estimated. What is done is a function of the recipe, the device and the lengths alone,
and so is what comes of it.

    found = search(Trials(split_rule(plan, device), load_for, inputs, None, print))
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from distflow.errors import RecipeError, UserError
from distflow.flow.estimate import divides
from distflow.flow.gpus import width
from distflow.flow.plan import Plan, PoolPlan
from distflow.metrics.rollout_count import divisible
from distflow.sim.account import DECODE, FIRST, LATER, LEASES, LOADS, OTHERS, STALLED, TRAIN, UPDATE, WEIGHTS
from distflow.sim.latency import DeviceLatency
from distflow.sim.notes import counted
from distflow.sim.plan_simulation import SimulationInput
from distflow.sim.predict import Load, Prediction, SimulateOptions, simulate, steps_of, whole_rounds
from distflow.sim.schedule_of import schedule_of
from distflow.sim.theory import LengthMoments, StepTimes, schedule

MOST, LEAST = 10, 3
"""Splits that are simulated."""
LEAST_STEPS = 3
"""Training steps that count in each simulation, at least."""
BUDGET_S = 60.0
"""Seconds of a core that all simulations together may take, as they are estimated beforehand; but for the least."""
SAMPLE_S, WORKER_S = 5e-4, 4.5e-4
"""Seconds of a core for each simulated sample, and for each simulated second of a worker: fitted to twelve simulations
on two cores, most of which they meet within 40%."""
MARGIN = 1.1
"""A split is simulated if its estimate is within this factor of the best simulation: the formula's error is 3% (mean)
and 10% (97% of all), and up to 38% on short steps, where it is alike for neighbouring splits."""
WORTH = 0.03
"""Step times that differ by less than this share are called equal."""
BUSY = 0.85
"""Training workers that work for this share of their time are what limits a step."""


class PoolSplit(NamedTuple):
    """Workers of the two pools."""

    rollouts: int
    trainers: int

    def __str__(self) -> str:
        return f"{self.rollouts} + {self.trainers}"


@dataclass(frozen=True, slots=True)
class SplitRule:
    """What there is to divide."""

    present: PoolSplit
    devices: int
    """In total, for both pools."""
    engine: int
    """Devices of a generating worker."""
    trainer: int
    """Devices of a training worker."""
    generating_pool: str
    training_pool: str
    most_trainers: int
    """`batch.ledgers`: a training worker without one would have nothing to train on."""
    least_trainers: int = 1
    """Over which a divided model has room."""
    option: str = "--devices"
    """What says how many devices there are."""

    def used(self, split: PoolSplit) -> int:
        """Devices of a split."""
        return split.rollouts * self.engine + split.trainers * self.trainer

    def splits(self) -> list[PoolSplit]:
        """All that no other one has more workers than, by their number of generating workers."""
        found: dict[int, int] = {}
        for trainers in range(self.least_trainers, self.most_trainers + 1):
            rollouts = (self.devices - trainers * self.trainer) // self.engine
            if rollouts >= 1:
                found[rollouts] = trainers
        return [PoolSplit(rollouts, trainers) for rollouts, trainers in sorted(found.items())]

    def words(self, split: PoolSplit) -> tuple[str, ...]:
        """Overrides that make it the layout's."""
        pools = ((self.generating_pool, split.rollouts), (self.training_pool, split.trainers))
        return tuple(f"layout.pools.{pool}.count={count}" for pool, count in pools)


@dataclass(frozen=True, slots=True)
class Candidate:
    """One split, and what is known about it."""

    split: PoolSplit
    model: StepTimes
    prediction: Prediction | None = None
    """None: it was not simulated."""
    refused: str = ""
    """Why the recipe cannot have it."""

    @property
    def step_s(self) -> float:
        """Of the simulation; else by the formula."""
        return self.model.step_s if self.prediction is None else self.prediction.step_s


@dataclass(frozen=True, slots=True)
class StalenessChoice:
    """What a larger bound of staleness would bring, with the split that is best for it by the formula."""

    staleness: int
    candidate: Candidate


@dataclass(frozen=True, slots=True)
class SplitSearch:
    """What was found."""

    rule: SplitRule
    candidates: Sequence[Candidate]
    """All, by their number of generating workers."""
    present: Candidate
    best: Candidate
    staleness: int | None
    steps: int
    """Training steps that count in each simulation."""
    others: Sequence[StalenessChoice] = ()
    """Of larger bounds of staleness, up to 2."""

    @property
    def gain(self) -> float:
        """By which share of the present step time the best one's is shorter."""
        return 1.0 - self.best.step_s / self.present.step_s

    @property
    def worth_it(self) -> bool:
        """Whether that is more than nothing."""
        return self.best.split != self.present.split and self.gain >= WORTH

    @property
    def proposed(self) -> Candidate:
        """The best split if that is worth a change, else the present one."""
        return self.best if self.worth_it else self.present


LoadFor = Callable[[PoolSplit, int | None], Load]
"""What a split asks of the devices, by the plan with it; with another bound of staleness, if one is given."""


def split_rule(
    plan: Plan, device: DeviceLatency, devices: int | None = None, *, option: str = "--devices"
) -> SplitRule:
    """What a plan has to divide; `devices`: in total, if not those of its layout, as `option` says.

    Raises UserError if nothing, or if its engines have another number of devices than the times of `device` are of:
    how much faster they are for it depends on their links and kernels, and which split is best on that.
    """
    maker, home = _two_pools(plan)
    wide = width(next(worker for worker in plan.workers if worker.name.pool == maker.name))
    engine, trainer = device.gpus.engine, device.gpus.trainer
    if wide not in (0, 1, engine):
        raise UserError(
            f"plan --optimize: an engine of {maker.name} shares its model among {wide} GPUs, and the times of "
            f"{device.device} are of {engine}: how much faster {wide} are is not known, and the best split depends on "
            f"it — `distflow profile RECIPE -o mine.yaml` measures such engines, for --device mine.yaml"
        )
    present = PoolSplit(maker.count, home.count)
    rule = SplitRule(present, 0, engine, trainer, maker.name, home.name, plan.batch.ledgers, _least(plan, device))
    rule = replace(rule, devices=rule.used(present) if devices is None else devices, option=option)
    if not rule.splits():
        raise UserError(
            f"plan --optimize: {counted(rule.devices, 'device')} {'is' if rule.devices == 1 else 'are'} too few: a "
            f"worker of {maker.name} takes {engine}, and {rule.least_trainers} of {home.name} "
            f"{rule.least_trainers * trainer} — give more with {option}"
        )
    return rule


def _two_pools(plan: Plan) -> tuple[PoolPlan, PoolPlan]:
    """The generating and the training pool."""
    if plan.reads is not None:
        raise UserError("plan --optimize: this flow trains on files and generates nothing, so nothing is to be split")
    makers = plan.generating_pools
    if len(makers) > 1:
        raise UserError(
            f"plan --optimize: {', '.join(pool.name for pool in makers)} all generate with {plan.primary}, and which "
            "of them to enlarge cannot be simulated yet — give the recipe one such pool"
        )
    if makers[0].name == plan.home.name:
        raise UserError(
            f"plan --optimize: the workers of pool {plan.home.name} generate and train in turn, so there is no split "
            "to choose — layout=async has a pool for each"
        )
    return makers[0], plan.home


def _least(plan: Plan, device: DeviceLatency) -> int:
    """Training workers over which a divided model has room; 1 if that is not known, or they are fewer now."""
    if device.memory is None or not divides(plan.owner_plan):
        return 1
    needed = -(-device.weights.bytes * device.memory.train_factor // (device.memory.bytes * device.gpus.trainer))
    return int(needed) if needed <= plan.home.count else 1


def cost_s(load: Load, step_s: float, steps: int) -> float:
    """Estimate how many seconds of a core a simulation takes, whose training steps take about `step_s` seconds."""
    made = steps_of(load.settings.max_staleness, steps).made
    workers = load.rollouts + load.replicas
    return made * (load.prompts * load.job.samples * SAMPLE_S + step_s * workers * WORKER_S)


class Trials:
    """Models and simulates splits, and keeps what came of it."""

    def __init__(
        self,
        rule: SplitRule,
        load_for: LoadFor,
        inputs: SimulationInput,
        steps: int | None,
        tell: Callable[[str], None],
    ) -> None:
        """`steps`: training steps that count in each simulation; None: as `whole_rounds` has them, or fewer where they
        would take long.

        `load_for` raises RecipeError for a split that the recipe cannot have; `tell` gets a line before each
        simulation, and one with what came of it.
        """
        self.rule, self._load_for, self._inputs, self._tell = rule, load_for, inputs, tell
        self.here = load_for(rule.present, None)
        """The present split."""
        self.moments = LengthMoments.of(inputs.lengths, self.here.job.response_tokens)
        self.known = {split: self.modelled(split, self.here) for split in sorted({*rule.splits(), rule.present})}
        self.steps = self._steps() if steps is None else steps
        self._given = steps is not None
        self.spent_s = 0.0
        """Seconds of a core for simulations, as estimated."""

    def _steps(self) -> int:
        """As many as let the least number of splits, and two larger bounds of staleness, be simulated in time."""
        step_s = self.known[self.rule.present].model.step_s
        each_s = BUDGET_S / (LEAST + 2)
        stale = self.here.settings.max_staleness
        most, one = whole_rounds(stale), whole_rounds(stale, 1)
        # Where a single round takes too long, a part of it is simulated.
        tried = (*range(most, LEAST_STEPS - 1, -one), *range(one - 1, LEAST_STEPS, -1))
        return next((n for n in tried if cost_s(self.here, step_s, n) <= each_s), LEAST_STEPS)

    def estimate(self, one: Candidate) -> float:
        """The step time by the formula, corrected by the simulation that is nearest to it."""
        done = [other for other in self.known.values() if other.prediction]
        near = min(done, key=lambda other: (abs(other.split.rollouts - one.split.rollouts), other.split))
        return one.step_s if one.prediction else one.model.step_s * near.step_s / near.model.step_s

    def simulate(self, split: PoolSplit) -> None:
        """Simulate one that is known."""
        self.known[split] = self.simulated(self.known[split], None)

    def sized(self, split: PoolSplit, load: Load) -> Load:
        """As large as a split."""
        return replace(load, rollouts=split.rollouts, replicas=split.trainers)

    def modelled(self, split: PoolSplit, load: Load) -> Candidate:
        """By the formula."""
        plan = schedule_of(self.sized(split, load), self._inputs.device)
        return Candidate(split, schedule(plan, self._inputs.device, self.moments))

    def simulated(self, candidate: Candidate, stale: int | None) -> Candidate:
        """With its simulation, or why the recipe refuses it; `stale`: with another bound of staleness."""
        try:
            load = self._load_for(candidate.split, stale)
        except RecipeError as error:
            first = error.problems[0]
            # Its counts are not from the user's command line.
            return replace(candidate, refused=str(first).removeprefix("command line: "))
        steps = self.steps if self._given else whole_rounds(load.settings.max_staleness, self.steps)
        estimated_s = cost_s(load, candidate.model.step_s, steps)
        name = f"{candidate.split}" + ("" if stale is None else f" at max_staleness {stale}")
        self._tell(f"simulating {name}, estimated to take {estimated_s:.0f} s")
        self.spent_s += estimated_s
        options = SimulateOptions(steps)
        done = replace(candidate, prediction=simulate(load, self._inputs.device, self._inputs.lengths, options))
        self._tell(f"{name}: {done.step_s:.1f} s a training step, limited by {limit_of(done).name}")
        return done


class _Search:
    def __init__(self, trials: Trials) -> None:
        self._trials = trials

    def run(self) -> SplitSearch:
        trials, rule = self._trials, self._trials.rule
        known, bound = trials.known, trials.here.settings.max_staleness
        trials.simulate(rule.present)
        while (chosen := self._next()) is not None:
            trials.simulate(chosen.split)
        others = [one for split, one in known.items() if split != rule.present]
        if others and all(one.refused for one in others) and rule.used(rule.present) != rule.devices:
            first = others[0]
            raise UserError(
                f"plan --optimize: {counted(rule.devices, 'device')} cannot be split: {rule.generating_pool} and "
                f"{rule.training_pool} would have {first.split} workers, or another such split, and each is refused; "
                f"the first: {first.refused} — give another number with {rule.option}"
            )
        fitting = [one for one in known.values() if one.prediction and rule.used(one.split) <= rule.devices]
        best = min(fitting, key=_quickness, default=known[rule.present])
        stales = [] if bound is None else [self._at(stale) for stale in range(bound + 1, 3)]
        return SplitSearch(rule, list(known.values()), known[rule.present], best, bound, trials.steps, stales)

    def _next(self) -> Candidate | None:
        """The split to simulate next: the best by the corrected formula.

        Those next to the best so far are among them whatever the formula says.
        """
        trials, known = self._trials, self._trials.known
        done = [one for one in known.values() if one.prediction]
        best, order = min(done, key=_quickness), list(known)
        place = order.index(best.split)
        beside = order[max(0, place - 1) : place + 2]
        left = [one for one in known.values() if not (one.prediction or one.refused)]
        promising = [one for one in left if one.split in beside or trials.estimate(one) <= MARGIN * best.step_s]
        found = min(promising, key=lambda one: (trials.estimate(one), one.split), default=None)
        if found is None or len(done) >= MOST:
            return None
        next_s = cost_s(trials.sized(found.split, trials.here), trials.estimate(found), trials.steps)
        return found if len(done) < LEAST or trials.spent_s + next_s <= BUDGET_S else None

    def _at(self, stale: int) -> StalenessChoice:
        """A larger bound of staleness, with what the formula says is its best split."""
        trials, here = self._trials, self._trials.here
        load = replace(here, settings=replace(here.settings, max_staleness=stale))
        allowed = [trials.modelled(split, load) for split, one in trials.known.items() if not one.refused]
        return StalenessChoice(stale, trials.simulated(min(allowed, key=_quickness), stale))


def _quickness(one: Candidate) -> tuple[float, PoolSplit]:
    return one.step_s, one.split


def search(trials: Trials) -> SplitSearch:
    """Order all splits by the formula, simulate the promising ones, and then what more staleness would bring."""
    return _Search(trials).run()


class Limit(NamedTuple):
    """What a step waits for."""

    name: str
    """In a few words."""
    why: str
    """With figures."""


def limit_of(one: Candidate) -> Limit:
    """What limits the step time of a simulated split, by what both pools do with their time."""
    assert one.prediction is not None, "only what was simulated is told of"
    generating, training = one.prediction.pools
    made, trained = generating.shares, training.shares
    works = trained[TRAIN] + trained[UPDATE]
    decodes, weights = made[DECODE] + made[STALLED], made[WEIGHTS] + made[LOADS]
    waits = f"{training.name} waits {trained[FIRST] + trained[LATER]:.0%} of the time for samples"
    if works >= BUSY:
        mostly = trained[UPDATE] > trained[TRAIN]
        name = "optimizer steps and publishing" if mostly else "training alone"
        why = f"{training.name} trains {trained[TRAIN]:.0%} of the time, and its optimizer steps and publishing take "
        return Limit(name, f"{why}{trained[UPDATE]:.0%}; {generating.name} decodes {made[DECODE]:.0%}")
    if trained[OTHERS] > trained[FIRST] + trained[LATER]:
        why = f"workers of {training.name} wait {trained[OTHERS]:.0%} of the time for the one with most to train on"
        return Limit("uneven training workers", why)
    if weights > max(decodes, made[LEASES]):
        why = f"{generating.name} waits {made[WEIGHTS]:.0%} of the time for them, and loads them for {made[LOADS]:.0%}"
        return Limit("new weights", why)
    if made[LEASES] > decodes:
        why = f"{waits}, {generating.name} {made[LEASES]:.0%} of it for leases"
        return Limit("taking turns", why)
    assert generating.slots_used is not None, "a generating pool has slots"
    slots = generating.slots_used / max(decodes, 1e-9)
    why = f"{generating.name} decodes {made[DECODE]:.0%} of the time, with {slots:.0%} of its slots in use then"
    return Limit("decoding" if divisible(slots) >= 0.5 else "the longest samples", f"{why}; {waits}")
