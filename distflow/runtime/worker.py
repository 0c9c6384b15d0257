"""What a worker's script calls: `w` (`Worker`).

def script(w):                                       # a trainer
    for t in w.training_steps():
        for batch in w.receive("samples", t):
            batch = w.call("advantage", batch)
            w.call("update", batch)
        w.apply("policy")
        w.publish("policy", t + 1)
        w.save(t + 1)
"""

from __future__ import annotations

from collections.abc import Collection, Iterator

from distflow.data.batch import Batch
from distflow.errors import UserError
from distflow.flow.edges import SAMPLES, VAL_SAMPLES
from distflow.runtime.further_training import FurtherTraining
from distflow.runtime.generating import Generating
from distflow.runtime.rollout_loop import RolloutLoop
from distflow.runtime.serving import Answering, Requests
from distflow.runtime.steps import StepRunner
from distflow.runtime.training import Training
from distflow.types import WorkerName


class Stream:
    """Batches as they come. What one worker does for another with them goes on while they are waited for."""

    def __init__(self, source: Iterator[Batch | None]) -> None:
        self.source = source
        """None where nothing has come, but another source of the same wait may have."""

    def __iter__(self) -> Iterator[Batch]:
        return (batch for batch in self.source if batch is not None)


class Worker:
    """One worker as its script sees it. Its ports decide which of `generating`, `training` and `serving` it has.

    `asked`: the steps that other pools, or further engines here, run for it.
    """

    def __init__(
        self,
        name: WorkerName,
        steps: StepRunner,
        asked: Collection[str],
        generating: Generating | None,
        training: Training | FurtherTraining | None,
        serving: Answering | None,
    ) -> None:
        self.name = name
        self._steps = steps
        self._asked = asked
        self._generating = generating
        self._training = training
        self._serving = serving
        self._receives = False  # the batches of now were received, not generated: their groups count as trained on

    def call(self, step: str, batch: Batch) -> Batch:
        """Run a step of the flow over a batch; raises StepError if it would drop groups that were received."""
        result = self._steps.call(step, batch)
        if self._receives:
            self._steps.check_keeps(step, batch, result)
        if self._training is not None:
            self._training.note(batch, result)
        return result

    def leases(self, t: int | None = None) -> RolloutLoop:
        """Leases to generate for: until the run is over, or until every owner has its set for training step t."""
        return self._generates().loop.until_closed(t)

    def validation(self, t: int) -> RolloutLoop:
        """Leases of the validation that is due once t training steps are done, and no others."""
        if isinstance(self._training, Training):
            # The run may have ended before, by `run.stop_when`.
            t = min(t, self._training.steps_done)
        return self._generates().loop.until_closed(t, only_validation=True)

    def generate(self, step: str, source: RolloutLoop | Requests) -> Stream:
        """The finished groups, as they come: of leases, or of what others ask this worker for."""
        self._receives = False
        if isinstance(source, Requests):
            return Stream(source.generated(step))
        return Stream(self._generates().generate(step, source))

    def ask(self, step: str, groups: Stream) -> Stream:
        """The same groups with what a step writes, once another pool, or a further engine here, has run it on them.

        Samples that were received have it already: it was asked for when they arrived.
        """
        if step not in self._asked:
            asked = ", ".join(self._asked) or "none"
            raise UserError(f"script of {self.name}: nobody else runs {step!r} for it; steps to ask for: {asked}")
        return groups if self._receives else Stream(self._generates().ask(step, groups.source))

    def each(self, step: str, groups: Stream) -> Stream:
        """The same groups with what a step of this worker writes: `w.call` between two asks.

        Samples that were received may have it already: it was computed as they arrived, while others were awaited.
        """
        if self._receives and isinstance(self._training, Training) and step in self._training.complete_with:
            return groups
        return Stream(None if batch is None else self.call(step, batch) for batch in groups.source)

    def requests(self, step: str) -> Requests:
        """Batches that other workers ask a step for; each is to be answered before the next one."""
        return Requests(self._serves(), step)

    def requests_of(self, *steps: str) -> Iterator[tuple[str, Batch]]:
        """The same for several steps: yield which one, and the batch."""
        return self._serves().requests(steps)

    def answer(self, batch: Batch) -> None:
        """Send back what the step has written for the batch in hand."""
        self._serves().answer(batch)

    def send(self, edge: str, groups: Batch) -> None:
        """Send groups to the owners of their leases, or from there to the home of a further model."""
        if edge in (SAMPLES, VAL_SAMPLES):
            self._generates().send(groups)
        else:
            self._owns().send(edge, groups)

    def training_steps(self) -> Iterator[int]:
        """Yield the remaining training steps, counted from 0."""
        return self._trains().steps()

    def receive(self, edge: str, t: int) -> Stream:
        """The samples of training step t, or the rows that owners have sent for it."""
        training = self._trains()
        if edge != training.receives:
            raise UserError(f"script of {self.name}: w.receive({edge!r}), but this worker gets {training.receives!r}")
        self._receives = True
        return Stream(training.receive(t))

    def read(self, step: str, t: int) -> Stream:
        """The samples of training step t that a read step makes of the data, this worker's share of them."""
        return self.receive(step, t)

    def minibatches(self, batch: Batch) -> Iterator[Batch]:
        """Yield the parts of a training step's whole batch, batch.minibatches of them in each of batch.epochs."""
        return self._trains().minibatches(batch)

    def apply(self, model: str) -> None:
        """Take an optimizer step over what the train steps have accumulated."""
        self._trains().apply(model)

    def publish(self, model: str, version: int) -> None:
        """Make the new weights available to all engines."""
        self._trains().publish(model, version)

    def save(self, step: int) -> None:
        """Write a checkpoint if one is due after this many training steps."""
        self._trains().save(step)

    def _generates(self) -> Generating:
        if self._generating is None:
            raise UserError(f"script of {self.name}: this worker does not generate — give its pool the role generate")
        return self._generating

    def _serves(self) -> Answering:
        if self._serving is None:
            raise UserError(f"script of {self.name}: nobody asks this worker for a step")
        return self._serving

    def _owns(self) -> Training:
        training = self._trains()
        if isinstance(training, FurtherTraining):
            raise UserError(f"script of {self.name}: this worker owns no samples")
        return training

    def _trains(self) -> Training | FurtherTraining:
        if self._training is None:
            raise UserError(f"script of {self.name}: this worker does not train — give its pool the role train")
        return self._training
