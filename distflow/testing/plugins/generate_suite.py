"""The contract of generate steps: driven as a worker drives them, by an engine whose tokens are all equally likely."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

import torch

from distflow.data.batch import Batch
from distflow.errors import DistflowError, StepError, UserError
from distflow.exchange.messages import Lease
from distflow.flow.step import sample_tokens
from distflow.runtime.episode_loop import EpisodeLoop
from distflow.runtime.generate_step import SampleLimits
from distflow.runtime.steps import StepContext, StepRunner
from distflow.runtime.trajectories import Trajectories
from distflow.testing.fakes import SHAPES, FakeEngine
from distflow.testing.plugins.batches import TOKENIZER, VOCABULARY, differing
from distflow.testing.plugins.findings import IMPORTING, SuiteReport
from distflow.testing.plugins.trial import NAME, WORKER, Trial, told
from distflow.types import BegunSample, SampleOutput, SampleRequest, Uid, Version

SAMPLES, GROUPS = 4, 5
POLLS = 10_000
SETTLE_S = 1.0
"""So long it is waited for episodes before it is told that some have gone on."""
TOOL_S = 60.0
"""So long a step may await something else than tokens, where it awaits nothing else."""
CUT_AFTER = (1, 2, 3, 5, 8)
"""Decode steps after which the samples of a lost worker go on elsewhere."""


def run_generate_suite(trial: Trial, report: SuiteReport, tasks: Sequence[tuple[str, str]]) -> Batch | None:
    """Run the suite; returns the samples, None if there are none."""
    report.begin(IMPORTING)
    try:
        room = sample_tokens(trial.plan.settings)
        desk = _Desk(trial, report, tasks)
        desk.begin("making samples")
        first = desk.batch(desk.made(range(GROUPS)))
    except DistflowError as error:
        report.add("wrong", told(error))
        return None
    except _Endless:
        report.add("wrong", f"is not done with {GROUPS * SAMPLES} samples after {POLLS} decode steps")
        return None
    report.add("ok", f"makes {GROUPS * SAMPLES} samples of up to {room} tokens, and returns what it declares")
    _test_again(desk, report, first)
    if trial.plan.allows("replay"):
        _test_replay(desk, report, first)
    if not bool(first.ragged("response_mask").values.any()):
        report.add("wrong", "none of its tokens is trained on: nothing would be learnt")
    # What promises nothing may tell how long a tool took: another process has other numbers.
    return first if desk.promises else None


class _Endless(Exception):
    """Samples do not come to their end."""


class _Desk:
    """Makes samples of a step under test, as a worker would."""

    def __init__(self, trial: Trial, report: SuiteReport, tasks: Sequence[tuple[str, str]]) -> None:
        self.trial = trial
        self._report = report
        self._tasks = tasks
        self._does = ""
        self._loop = EpisodeLoop(SETTLE_S)
        self._make(range(1))

    @property
    def promises(self) -> bool:
        """Tell whether the step says that its samples can be made again."""
        return self.trial.plan.environment != ()

    def begin(self, what: str) -> None:
        """Tell what samples are made for now."""
        self._does = what
        self._report.begin(what)

    def _done(self, count: int) -> None:
        # Each of them is a call, and has its time, also where they block the loop one after the other.
        self._report.begin(f"{self._does}, {count} of {GROUPS * SAMPLES} done")

    def _make(self, positions: Iterable[int]) -> Trajectories:
        context = StepContext(NAME, worker=WORKER, seed=3, samples_per_prompt=SAMPLES, tokenizer=TOKENIZER)
        # A step under test may fail on nothing.
        plan = replace(self.trial.plan, settings={**self.trial.plan.settings, "on_error": "stop"})
        step = StepRunner(WORKER, [plan], {NAME: context}, loop=self._loop).generate_step(NAME)
        return Trajectories(step, {"train": SampleLimits.of(SAMPLES, plan.settings)}, TOKENIZER, torch.float32)

    def _lease(self, position: int, begun: Sequence[BegunSample] = ()) -> Lease:
        text, task = self._tasks[position % len(self._tasks)]
        ids = tuple(TOKENIZER.encode(f"{position}="))
        uid = Uid(0, position, position)
        return Lease(uid, 0, position, 1, 11 + position, ids, text, task, 0, 0, begun=tuple(begun))

    def made(self, positions: Iterable[int]) -> Trajectories:
        """All samples of these groups, finished."""
        samples = self._make(positions)
        _drive(samples, _engine(), samples.begin([self._lease(position) for position in positions]), self._done)
        return samples

    def batch(self, samples: Trajectories) -> Batch:
        """The rows of all groups, in their order."""
        return samples.batch(range(GROUPS))

    def continued(self, steps: int) -> Trajectories:
        """The same after another worker has begun them, and was lost after some decode steps."""
        lost, engine = self._make(range(GROUPS)), _engine()
        requests = lost.begin([self._lease(position) for position in range(GROUPS)])
        had = _drive(lost, engine, requests, self._done, steps)
        begun: dict[int, list[BegunSample]] = {position: [] for position in range(GROUPS)}
        for output in had:
            begun[output.position].append(output.begun)
        samples = self._make(range(GROUPS))
        requests = samples.begin([self._lease(position, of) for position, of in begun.items()])
        _drive(samples, _engine(), requests, self._done)
        return samples


def _engine() -> FakeEngine:
    engine = FakeEngine(slots=SAMPLES * GROUPS, max_tokens=1 << 16, vocabulary=VOCABULARY)
    engine.begin_update(Version(0, 0))
    engine.update((name, torch.zeros(shape)) for name, shape in SHAPES.items())
    engine.end_update()
    return engine


def _drive(
    samples: Trajectories,
    engine: FakeEngine,
    requests: Sequence[SampleRequest],
    tell: Callable[[int], None],
    steps: int = POLLS,
) -> list[SampleOutput]:
    """Decode until every sample is finished, or for some steps; returns what all samples have then, by calls. `tell`
    hears how many are finished, whenever one is or has asked for more."""
    samples.submit(engine, requests)
    wanted, finished = samples.take([])
    samples.submit(engine, wanted)
    done, count = [call for sample in finished for call in sample.calls], len(finished)
    for _ in range(steps):
        if not samples.left:
            return done
        if not samples.asks and not samples.wait(TOOL_S):
            raise _Endless
        wanted, finished = samples.take(samples.poll(engine))
        done += [call for sample in finished for call in sample.calls]
        count += len(finished)
        if finished or wanted:
            tell(count)
        samples.submit(engine, wanted)
    if steps == POLLS and samples.left:
        raise _Endless
    return [*done, *samples.partials(engine.partials())]


def _test_again(desk: _Desk, report: SuiteReport, first: Batch) -> None:
    """In the reverse order, after others: a sample is a function of its episode and of what the model writes."""
    desk.begin("making the samples again, in another order")
    try:
        again = desk.batch(desk.made(reversed(range(GROUPS))))
    except (DistflowError, _Endless) as error:
        report.add("wrong", f"fails the second time: {error}")
        return
    apart = "the number of sequences" if again.rows != first.rows else differing(first, again, [*first.columns])
    if apart:
        report.add(
            "wrong" if desk.promises else "note",
            f"makes another sample of the same episode and the same tokens: {apart} — for chance take "
            "ctx.rng(episode.uid, episode.sample), and keep nothing in the module from call to call",
        )
    else:
        report.add("ok", "makes the same samples again, in another order")


def _test_replay(desk: _Desk, report: SuiteReport, first: Batch) -> None:
    declared = "environment lists 'replay'" if desk.trial.plan.environment is not None else "it declares no environment"
    for steps in CUT_AFTER:
        desk.begin(f"going on with samples that were begun elsewhere, after {steps} decode steps")
        try:
            again = desk.batch(desk.continued(steps))
        except (StepError, UserError, _Endless) as error:
            report.add("wrong", f"{declared}, but it fails with samples that another worker began: {error}")
            return
        apart = "other sequences" if again.rows != first.rows else differing(first, again, ["response_ids", "reward"])
        if apart:
            report.add(
                "wrong",
                f"{declared}, but with the recorded turns of the model it does not come to the same state: {apart} "
                f"(begun elsewhere, {steps} decode steps) — leave 'replay' out, or let the model's tokens decide alone",
            )
            return
    report.add("ok", "comes to the same samples where another worker has begun them")
