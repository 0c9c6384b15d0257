"""One plan, simulated and by the closed formulas, side by side: what `distflow simulate` reports on."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from distflow.flow.gpus import width
from distflow.flow.plan import Plan
from distflow.flow.slots_fit import SlotsFit, slots_fit
from distflow.sim.fluid_engine import ONE_TURN, SampleTurns
from distflow.sim.latency import DeviceLatency
from distflow.sim.lengths import Lengths
from distflow.sim.notes import divided_notes, early_notes, emulation_notes, gpu_notes, slot_notes, truncation_notes
from distflow.sim.predict import Prediction, SimulateOptions, load_of, simulate, whole_rounds
from distflow.sim.schedule_of import schedule_of, speed_up_of
from distflow.sim.theory import LengthMoments, SpeedUp, StepTimes, ideal_s, schedule


@dataclass(frozen=True, slots=True)
class SimulationInput:
    """What a user gives to simulate plans on."""

    device: DeviceLatency
    lengths: Lengths
    shown: str
    """The lengths, as reports name them."""
    prompt_tokens: int | None
    steps: int | None
    """Training steps that count; None: at least 8, in whole rounds."""
    timeline: bool
    turns: SampleTurns = ONE_TURN
    watch: Callable[[int, int], bool] | None = None
    """As of SimulateOptions."""


@dataclass(frozen=True, slots=True)
class Simulated:
    """One plan, and what came out."""

    words: tuple[str, ...]
    """The values in which it differs from the others."""
    prediction: Prediction
    model: StepTimes
    ideal_s: float
    theory: SpeedUp | None
    """Of asynchrony."""
    notes: tuple[str, ...] = ()
    fit: SlotsFit | None = None
    context: float = 0.0
    """Mean tokens of a sample that is generated, over its tokens, prompt included."""

    @property
    def fitting(self) -> int | None:
        """Samples of that length that an engine has memory for; None: that is not known."""
        return None if self.fit is None else self.fit.samples(self.context)


def simulate_plan(plan: Plan, inputs: SimulationInput, words: tuple[str, ...]) -> Simulated:
    """Simulate a plan; `words`: the values in which it differs from others. Raises UserError, as `load_of` does."""
    load = load_of(plan, prompt_tokens=inputs.prompt_tokens)
    load = replace(load, job=replace(load.job, turns=inputs.turns))
    steps = whole_rounds(load.settings.max_staleness) if inputs.steps is None else inputs.steps
    options = SimulateOptions(steps, timeline=inputs.timeline, watch=inputs.watch)
    prediction = simulate(load, inputs.device, inputs.lengths, options)
    moments = LengthMoments.of(inputs.lengths, load.job.response_tokens)
    step = schedule_of(load, inputs.device)
    model, ideal = schedule(step, inputs.device, moments), ideal_s(step, inputs.device, moments)
    maker = next(worker for worker in plan.workers if worker.name.pool == load.generating_pool)
    fit, context = slots_fit(plan, maker), load.job.prompt_tokens + moments.before
    notes = (
        *early_notes(len(prediction.steps), prediction.wanted),
        *divided_notes(plan),
        *emulation_notes(plan),
        *gpu_notes(inputs.device, width(maker), load.generating_pool),
        *truncation_notes(load.job, inputs.prompt_tokens, moments),
        *slot_notes(fit, context, load.generating_pool),
    )
    theory = speed_up_of(load, inputs.device, moments)
    return Simulated(words, prediction, model, ideal, theory, notes, fit, context)
