"""`w`, the worker as its script sees it. Each method is one word of the script's vocabulary.

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

from collections.abc import Iterator

from distflow.data.batch import Batch
from distflow.errors import UserError
from distflow.runtime.generating import Generating
from distflow.runtime.lease_feed import LeaseFeed
from distflow.runtime.steps import StepRunner
from distflow.runtime.training import Training
from distflow.types import WorkerName

SAMPLES = "samples"


class Worker:
    """One worker. `generating` and `training` are the sides that its roles give it; one may be missing."""

    def __init__(
        self, name: WorkerName, steps: StepRunner, generating: Generating | None, training: Training | None
    ) -> None:
        self.name = name
        self._steps = steps
        self._generating = generating
        self._training = training

    def call(self, step: str, batch: Batch) -> Batch:
        """Run a step of the flow over a batch."""
        result = self._steps.call(step, batch)
        if self._training is not None:
            self._training.note(batch, result)
        return result

    def leases(self, t: int | None = None) -> LeaseFeed:
        """Prompts to generate for: until the run is over, or until every owner has its set for training step t."""
        return self._generates().feed.until_closed(t)

    def generate(self, step: str, leases: LeaseFeed) -> Iterator[Batch]:
        """Finished groups, as they come."""
        return self._generates().generate(step, leases)

    def send(self, edge: str, groups: Batch) -> None:
        """Give groups to the owners of their leases."""
        self._check(edge)
        self._generates().send(groups)

    def training_steps(self) -> Iterator[int]:
        """The training steps still to be done, counted from 0."""
        return self._trains().steps()

    def receive(self, edge: str, t: int) -> Iterator[Batch]:
        """The samples of training step t."""
        self._check(edge)
        return self._trains().receive(t)

    def apply(self, model: str) -> None:
        """Optimizer step over what the train steps accumulated."""
        self._trains().apply(model)

    def publish(self, model: str, version: int) -> None:
        """Make the new weights available to all engines."""
        self._trains().publish(model, version)

    def save(self, step: int) -> None:
        """Write a checkpoint if one is due after this many training steps."""
        self._trains().save(step)

    def _check(self, edge: str) -> None:
        if edge != SAMPLES:
            raise UserError(f"script of {self.name}: edge {edge!r} is unknown; this flow has {SAMPLES!r}")

    def _generates(self) -> Generating:
        if self._generating is None:
            raise UserError(f"script of {self.name}: this worker does not generate — give its pool the role generate")
        return self._generating

    def _trains(self) -> Training:
        if self._training is None:
            raise UserError(f"script of {self.name}: this worker does not train — give its pool the role train")
        return self._training
