"""Measurement of how long a recipe's own engine and backend take on this machine, through their protocols alone.

Nothing is fitted here: `distflow.sim.fitting` makes a latency model of what is measured.

Shapes: B samples, T response tokens of the longest one.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import count

import torch
from torch import Tensor

from distflow.config.plugins import VOCABULARY
from distflow.data.batch import Batch, Ragged, part_lengths
from distflow.errors import PluginError, UserError
from distflow.flow.gpus import width
from distflow.flow.plan import Plan, WorkerPlan
from distflow.flow.resolve import resolve
from distflow.parts import Lengths, tokens_of
from distflow.runtime.assembly import device_of, lacks
from distflow.runtime.protocols import Backend, BackendSpec, Engine, EngineSpec, packs
from distflow.types import SampleRequest, SamplingParams, Version

REPEATS = 3
LONG_S = 1.0
"""What has taken so long is not repeated any more."""
STEPS = 16
"""Decode steps of one measurement."""
COPIED_BYTES = 1 << 26
"""Copied to see how fast memory is, if the model is smaller."""
STUCK_S = 300.0
"""A decode step, or reading prompts, takes no longer; an engine that does is stuck."""


@dataclass(frozen=True, slots=True)
class DecodeTime:
    """Of one decode step."""

    samples: int
    context: float
    """Mean tokens of a sample."""
    seconds: float


@dataclass(frozen=True, slots=True)
class TrainTime:
    """Seconds of a forward and backward of rows of these lengths (`distflow.parts`)."""

    lengths: Lengths
    seconds: float
    packed: bool = False
    """A prompt that rows share was computed once."""


@dataclass(frozen=True, slots=True)
class WeightTime:
    """Of one version of the weights."""

    nbytes: int
    publish_s: float
    """Copying it out of the backend."""
    swap_s: float
    """Copying it into the engine."""
    copy_bytes_s: float
    """Bytes per second that this machine copies in memory."""


@dataclass(frozen=True, slots=True)
class Measurements:
    """All that was measured."""

    device: str
    engine_gpus: int
    """Over which the engine shares its model."""
    decode: tuple[DecodeTime, ...]
    prefill: tuple[tuple[int, float], ...]
    """Prompt tokens that were read, and seconds."""
    train: tuple[TrainTime, ...]
    apply_s: float
    weights: WeightTime


def measure(plan: Plan, report: Callable[[str], None]) -> Measurements:
    """Measure the engine and the backend of the primary model; `report` is told what is being done.

    Raises UserError for a plan whose backend cannot be measured alone, PluginError for plug-ins that are none.
    """
    model = plan.primary
    trains = plan.owner_plan
    makes = next((worker for worker in plan.workers if model in worker.generates), None)
    if makes is None:
        raise UserError("profile: this flow generates nothing, and a latency model needs an engine and a backend")
    device = device_of(plan.workers, makes)
    backend = _backend(plan, trains, device_of(plan.workers, trains))
    try:
        engine = _engine(plan, makes, device)
        try:
            report("publishing and loading weights")
            weights = _weights(backend, engine)
            report("decoding")
            torch.set_num_threads(makes.threads)
            prefill, decode = _decoding(plan, makes, engine)
        finally:
            engine.close()
        report("training")
        torch.set_num_threads(trains.threads)
        train, apply_s = _training(plan, backend)
    finally:
        backend.close()
    return Measurements(device, max(1, width(makes)), tuple(decode), tuple(prefill), tuple(train), apply_s, weights)


def _engine(plan: Plan, worker: WorkerPlan, device: str) -> Engine:
    assert worker.engine is not None, f"{worker.name} generates, so the plan names its engine"
    spec = EngineSpec(
        model=plan.recipe.models[plan.primary].model_dump(),
        device=device,
        slots=worker.slots,
        max_tokens=plan.engine_tokens(plan.primary),
        seed=plan.recipe.run.seed,
        options=worker.engine_options,
        # They are measured in one process, whatever the layout.
        shares_device=True,
        deterministic=plan.recipe.run.deterministic,
        pool=worker.name.pool,
        worker=str(worker.name),
    )
    engine = resolve(worker.engine)(spec)
    if not isinstance(engine, Engine):
        raise PluginError(lacks(worker.engine, engine, Engine))
    return engine


def _backend(plan: Plan, worker: WorkerPlan, device: str) -> Backend:
    assert worker.backend is not None, f"{worker.name} trains, so the plan names its backend"
    spec = BackendSpec(
        model=plan.recipe.models[plan.primary].model_dump(),
        device=device,
        trainable=True,
        seed=plan.recipe.run.seed,
        training_steps=plan.recipe.run.training_steps,
        options=worker.backend_options,
        deterministic=plan.recipe.run.deterministic,
    )
    backend = resolve(worker.backend)(spec)
    if not isinstance(backend, Backend):
        raise PluginError(lacks(worker.backend, backend, Backend))
    if backend.lockstep:
        backend.close()
        raise UserError(
            f"profile: {worker.backend} divides the model over training workers, and one alone is measured — choose "
            f"backend=torch for layout.pools.{worker.name.pool}, and name a size that fits one device"
        )
    backend.join()
    return backend


def _median(seconds: Callable[[], float]) -> float:
    """Of some repetitions, fewer of what takes long, after one that warms up (fresh memory, kernels to be chosen)."""
    seconds()
    found = [seconds()]
    while len(found) < REPEATS and sum(found) < LONG_S:
        found.append(seconds())
    return statistics.median(found)


def _now() -> float:
    """The time, once the devices have done what they were asked to."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter()


def _weights(backend: Backend, engine: Engine) -> WeightTime:
    kept: dict[str, Tensor] = {}
    numbers = count()

    def publish() -> float:
        begin = _now()
        for name, tensor in backend.named_shards():
            if name in kept:
                kept[name].copy_(tensor)
            else:
                kept[name] = tensor.to("cpu", copy=True)
        return _now() - begin

    def swap() -> float:
        begin = _now()
        engine.begin_update(Version(0, next(numbers)))
        engine.update(kept.items())
        engine.end_update()
        return _now() - begin

    publish_s, swap_s = _median(publish), _median(swap)
    nbytes = sum(tensor.nbytes for tensor in kept.values())
    source = torch.zeros(max(nbytes, COPIED_BYTES), dtype=torch.uint8)
    target = torch.empty_like(source)

    def copy() -> float:
        begin = _now()
        target.copy_(source)
        return _now() - begin

    return WeightTime(nbytes, publish_s, swap_s, source.nbytes / _median(copy))


def _decoding(plan: Plan, worker: WorkerPlan, engine: Engine) -> tuple[list[tuple[int, float]], list[DecodeTime]]:
    """Batches of 1, 2, 4 … all slots, with short prompts and with long ones.

    Raises PluginError for an engine whose samples never all run at once.
    """
    longest = plan.engine_tokens(plan.primary)
    steps = max(1, min(STEPS, longest // 4))
    batches = sorted({*(1 << power for power in range(worker.slots.bit_length())), worker.slots})
    decoder = _Decoder(plan, engine, steps)
    decoder.run(batches[-1], max(1, longest // 8))  # warms up
    prefill, decode = [], []
    for samples in batches:
        # While the last prompts are read, one after another, the first samples may decode.
        most = max(1, longest - steps - 1 - samples)
        for prompt in sorted({min(most, max(1, longest // 8)), max(1, most // 2), most}):
            runs = [run for run in decoder.repeated(samples, prompt) if run is not None]
            if runs:
                step_s = statistics.median(run.step_s for run in runs)
                decode.append(DecodeTime(samples, statistics.median(run.context for run in runs), step_s))
                reading = statistics.median(run.first_s - run.steps_before * step_s for run in runs)
                prefill.append((samples * prompt, max(0.0, reading)))
    if not decode:
        raise PluginError(
            f"profile: in no batch of {batches[0]} to {batches[-1]} samples of {longest} tokens did all run at once "
            f"for {steps} decode steps — raise max_new_tokens, or lower layout.pools.{worker.name.pool}.slots"
        )
    return prefill, decode


@dataclass(frozen=True, slots=True)
class _Run:
    """Readings of the clock for samples that were decoded together."""

    first_s: float
    """Seconds until every sample had its first token."""
    steps_before: int
    """Decode steps within them."""
    step_s: float
    """Of a decode step after that, in which all samples ran."""
    context: float
    """Mean tokens of a sample then."""


class _Decoder:
    """Lets an engine decode samples of random prompts, and looks at the clock while all of them run."""

    def __init__(self, plan: Plan, engine: Engine, steps: int) -> None:
        model = plan.recipe.models[plan.primary]
        self._engine = engine
        self._seed = plan.recipe.run.seed
        self._steps = steps
        self._longest = plan.engine_tokens(plan.primary)
        self._vocabulary = int(resolve(VOCABULARY)(model.model_dump()))
        self._positions = count()
        self._random = torch.Generator().manual_seed(self._seed)

    def repeated(self, samples: int, prompt: int) -> Iterator[_Run | None]:
        """Several runs, fewer of what takes long."""
        began = time.perf_counter()
        for _ in range(REPEATS):
            yield self.run(samples, prompt)
            if time.perf_counter() - began >= LONG_S:
                return

    def run(self, samples: int, prompt: int) -> _Run | None:
        """Samples as long as the engine takes them, dropped after some steps; None if they did not all run so long."""
        positions = [next(self._positions) for _ in range(samples)]
        params = SamplingParams(max_new_tokens=self._longest - prompt)
        ids = torch.randint(self._vocabulary, (samples, prompt), generator=self._random).tolist()
        rows = zip(positions, ids, strict=True)
        self._engine.submit([SampleRequest(at, 0, tuple(row), self._seed, params) for at, row in rows])
        begin = time.perf_counter()
        seen: list[tuple[float, int, int]] = []
        while not seen or seen[-1][1] - seen[0][1] < self._steps * samples:
            ended = self._engine.poll()
            now = time.perf_counter()
            if ended:
                break
            tokens = self._engine.progress()
            if len(tokens) == samples and all(tokens.values()):
                seen.append((now, sum(tokens.values()), max(tokens.values())))
            if now - begin > STUCK_S:
                raise PluginError(f"profile: the engine did not decode {samples} samples within {STUCK_S:.0f} s")
        self._engine.abort(positions)
        if len(seen) < 2:
            return None
        (first, had, before), (last, have, _) = seen[0], seen[-1]
        step_s = (last - first) * samples / (have - had)
        return _Run(first - begin, before, step_s, prompt + (had + have) / 2 / samples)


def _training(plan: Plan, backend: Backend) -> tuple[list[TrainTime], float]:
    """Groups of rows of three lengths, in micro-batches up to the recipe's own; and optimizer steps."""
    longest, budget = plan.engine_tokens(plan.primary), plan.batch.tokens_per_microbatch
    vocabulary = int(resolve(VOCABULARY)(plan.recipe.models[plan.primary].model_dump()))
    packed, samples = packs(backend), plan.batch.samples_per_prompt
    found = []
    for length in sorted({max(2, longest // 4), max(2, longest // 2), max(2, longest)}):
        most = _most_rows(length, samples, budget, packed=packed)
        for rows in sorted({1, max(1, most // 4), most}):
            batch = _rows(rows, length, samples, vocabulary)
            seconds = _median(partial(_train, backend, batch))
            found.append(TrainTime(tuple(part_lengths(batch)), seconds, packed))
    batch = _rows(1, max(2, longest // 4), samples, vocabulary)

    def apply() -> float:
        _train(backend, batch)
        begin = _now()
        backend.apply(1.0)
        return _now() - begin

    return found, _median(apply)


def _lengths(rows: int, length: int, samples: int) -> list[tuple[int, int]]:
    """Half prompt, half response; `samples` of each prompt."""
    half = length // 2
    return [(0 if row % samples else half, length - half) for row in range(rows)]


def _most_rows(length: int, samples: int, budget: int, *, packed: bool) -> int:
    """Count how many of these rows a micro-batch holds."""
    rows = 1
    while tokens_of(_lengths(rows + 1, length, samples), packs=packed) <= budget:
        rows += 1
    return rows


def _rows(rows: int, length: int, samples: int, vocabulary: int) -> Batch:
    half, random = length // 2, torch.Generator().manual_seed(rows)
    ids = torch.randint(vocabulary, (rows, length), generator=random).tolist()
    return Batch(
        {
            "group": torch.arange(rows) // samples,
            "prompt_ids": Ragged.from_rows([ids[row - row % samples][:half] for row in range(rows)], torch.int64),
            "response_ids": Ragged.from_rows([row[half:] for row in ids], torch.int64),
        }
    )


def _train(backend: Backend, batch: Batch) -> float:
    """Seconds of forward and backward, as an update asks for them."""
    begin = _now()
    scores = backend.score(batch, temperature=1.0, grad=True, entropy=True)
    backend.accumulate(-(scores.logprobs_BT * scores.mask_BT).sum())
    return _now() - begin
