"""`StepContext`: what a step function may ask of the worker that runs it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from torch import Tensor

from distflow.data.randomness import generator
from distflow.errors import UserError
from distflow.runtime.metrics import MetricStore
from distflow.runtime.protocols import Backend, Engine, Tokenizer
from distflow.runtime.trace_writer import spanned
from distflow.types import Uid


@dataclass(slots=True)
class StepContext:
    """One per step and worker. A plain object: build one by hand to test a step of your own."""

    step_name: str
    worker: str = "worker/0"
    training_step: int = 0
    """Counted from 0, as everywhere in scripts; files say step = training_step + 1."""
    policy_version: int = 0
    seed: int = 0
    samples_per_prompt: int = 1
    tokens_per_microbatch: int = 0
    """Budget of padded tokens of one forward and backward; 0: no limit."""
    temperature: float = 1.0
    """At which the flow's generate step samples."""
    metrics: MetricStore = field(default_factory=MetricStore)
    state: dict[str, Any] = field(default_factory=dict)
    """Plain values kept here travel with the checkpoint."""
    models: Mapping[str, Backend] = field(default_factory=dict)
    model: str | None = None
    """The step's `model:` key."""
    engine: Engine | None = None
    tokenizer: Tokenizer | None = None
    dtype: str = "float32"
    """Of the model that generates; log-probs are kept in float64 for float64 models."""
    replica: int = 0
    """Number of this training replica, from 0."""
    gather: Callable[[Tensor], list[Tensor]] | None = lambda tensor: [tensor]
    """How steps of batch scope ask the other replicas; None in other steps. Use `all_gather` and `all_reduce`."""
    denominators: dict[str, float] = field(default_factory=dict)
    """What `update` accumulated since the last apply, by model: the runtime divides by the sum over all replicas."""
    fixed_denominators: dict[str, float] = field(default_factory=dict)
    """Instead, for sums that are divided by a constant: the same on every replica."""

    @property
    def backend(self) -> Backend:
        """The backend of this step's model; raises LookupError if this worker holds none."""
        if self.model is None or self.model not in self.models:
            raise LookupError(f"step {self.step_name!r} asked for model {self.model!r}; here are {sorted(self.models)}")
        return self.models[self.model]

    def rng(self, uid: Uid, sample: int = 0) -> np.random.Generator:
        """A generator that depends on the run's seed, this step, and the sample only: never on the worker."""
        return generator(self.seed, f"step:{self.step_name}", uid.position, sample)

    def all_gather(self, tensor: Tensor) -> list[Tensor]:
        """What every training replica gives here, in their order: for small tensors, in steps of batch scope.

        Every replica calls it once a training step for each call of any other. Raises UserError in other steps.
        """
        if self.gather is None:
            raise UserError(
                f"step {self.step_name!r} asks all training replicas for a tensor, but each calls it at other times: "
                'give it to the training pool and declare it with scope="batch"'
            )
        return self.gather(tensor)

    def all_reduce(self, tensor: Tensor) -> Tensor:
        """The sum of `tensor` over all training replicas, the same to the last bit on each; see `all_gather`."""
        first, *others = self.all_gather(tensor)
        return sum(others, start=first)

    @contextmanager
    def timed(self, name: str) -> Iterator[None]:
        """Add the time spent inside to metric `timing_s/<name>` (seconds per training step)."""
        with self.metrics.timed(f"timing_s/{name}"):
            yield

    @contextmanager
    def span(self, name: str) -> Iterator[None]:
        """Show the time spent inside as a span of the trace (`distflow trace`), without a metric of its own."""
        with spanned(self.metrics.trace, name, "user"):
            yield
