"""An engine and a backend that only wait as long as a latency model says: for benchmarks of everything else.

Sample lengths are lognormal, a function of run seed, prompt position and sample alone. A decode step for b running
samples waits for `step_s` · max(1, b / `wide`) seconds, so that any number of emulated devices fits on one machine. In
a recipe: `engine: distflow.testing.emulated:EmulatedEngine`, with `engine_options` as below.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import NormalDist
from typing import Any, ClassVar, Self

import torch
from torch import Tensor

from distflow.data.batch import Batch, Ragged, row_lengths
from distflow.data.randomness import stream_key, uniform_rows
from distflow.errors import UserError
from distflow.runtime.checkpoint.format import Shard, share_of
from distflow.runtime.protocols import BackendSpec, EngineSpec, TokenScores, TokenValues
from distflow.testing.fakes import candidates_of
from distflow.types import SampleOutput, SampleRequest, Span, Version

TOKEN, LOGPROB = 1, -1.0
WEIGHT = "weight"


@dataclass(frozen=True, slots=True)
class _Options:
    """Read from a recipe's section; unknown keys are errors."""

    @classmethod
    def parse(cls, options: Mapping[str, Any], what: str) -> Self:
        """Raises UserError for unknown keys."""
        unknown = sorted(set(options) - set(cls.__slots__))
        if unknown:
            raise UserError(f"{what}: unknown {', '.join(unknown)}; allowed: {', '.join(cls.__slots__)}")
        return cls(**options)


@dataclass(frozen=True, slots=True)
class DecodeModel(_Options):
    """`engine_options` of EmulatedEngine."""

    step_s: float = 0.008
    """Seconds of a decode step, for up to `wide` samples in parallel."""
    wide: int = 32
    slow: float = 1.0
    """Factor on the time, for a slower device."""
    pace: int = 4
    """Tokens decoded per poll."""
    median: float = 40.0
    """Median length in tokens; none is longer than the step's max_new_tokens."""
    sigma: float = 1.0
    """Standard deviation of the logarithm of the length: 1.1 is a heavy tail, 0 none."""
    longer_every: int = 0
    """Every n-th prompt position has `longer` times the length; 0: none."""
    longer: float = 1.0

    def seconds(self, running: int) -> float:
        """Duration of `pace` decode steps."""
        return self.step_s * self.slow * self.pace * max(1.0, running / self.wide)

    def length(self, uniform: float, position: int, limit: int) -> int:
        """Length of a sample in tokens."""
        length = self.median * math.exp(self.sigma * NormalDist().inv_cdf(min(max(uniform, 1e-9), 1 - 1e-9)))
        if self.longer_every and position % self.longer_every == 0:
            length *= self.longer
        return max(1, min(limit, round(length)))


@dataclass(slots=True)
class _Sample:
    position: int
    number: int
    length: int
    spans: list[Span]
    done: int = 0

    def produce(self, tokens: int, version: Version) -> None:
        end = max(self.done, min(self.length, self.done + tokens))
        if end == self.done:
            return
        last = self.spans[-1] if self.spans else None
        if last is not None and (last.term, last.version) == version:
            self.spans[-1] = last._replace(end=end)
        else:
            self.spans.append(Span(*version, self.done, end))
        self.done = end

    def output(self, reason: str) -> SampleOutput:
        return SampleOutput(
            position=self.position,
            sample=self.number,
            token_ids=(TOKEN,) * self.done,
            logprobs=(LOGPROB,) * self.done,
            spans=tuple(self.spans),
            finish_reason="abort" if reason == "abort" else "stop",
        )


class EmulatedEngine:
    """Implements `distflow.runtime.protocols.Engine`; all tokens are the same."""

    def __init__(self, spec: EngineSpec) -> None:
        self.version: Version | None = None
        self._model = DecodeModel.parse(spec.options, "engine_options of the emulated engine")
        self._slots = spec.slots
        self._coming: Version | None = None
        self._queued: deque[_Sample] = deque()
        self._running: list[_Sample] = []

    @property
    def free_slots(self) -> int:
        """Slots that are neither in use nor claimed by waiting samples."""
        return max(0, self._slots - len(self._queued) - len(self._running))

    def submit(self, requests: Sequence[SampleRequest]) -> None:
        """Queue samples."""
        streams = {name: stream_key(name[0], "length", name[1]) for name in {(r.seed, r.position) for r in requests}}
        keys, numbers = [streams[r.seed, r.position] for r in requests], [r.sample for r in requests]
        draws = uniform_rows(keys, numbers, 1, [request.offset for request in requests])[:, 0].tolist()
        for request, uniform in zip(requests, draws, strict=True):
            length = self._model.length(uniform, request.position, request.params.max_new_tokens)
            begun = request.begun
            spans, done = ([], 0) if begun is None else (list(begun.spans), len(begun.token_ids))
            self._queued.append(_Sample(request.position, request.sample, length, spans, done))

    def poll(self) -> list[SampleOutput]:
        """`pace` decode steps, with their waiting time."""
        if self.version is None:
            return []
        while self._queued and len(self._running) < self._slots:
            self._running.append(self._queued.popleft())
        if not self._running:
            return []
        time.sleep(self._model.seconds(len(self._running)))
        for sample in self._running:
            sample.produce(self._model.pace, self.version)
        finished = [sample for sample in self._running if sample.done >= sample.length]
        self._running = [sample for sample in self._running if sample.done < sample.length]
        return [sample.output("stop") for sample in finished]

    def begin_update(self, version: Version) -> None:
        """Stop generating until `end_update`."""
        self.version, self._coming = None, version

    def update(self, tensors: Iterable[tuple[str, Tensor]]) -> None:
        """Read them; nothing depends on the values."""
        for _ in tensors:
            pass

    def end_update(self) -> None:
        """Continue with the new version."""
        self.version = self._coming

    def abort(self, positions: Iterable[int]) -> list[SampleOutput]:
        """Drop these groups; returns what their running samples had."""
        wanted = set(positions)
        partial = [sample for sample in self._running if sample.position in wanted]
        self._running = [sample for sample in self._running if sample.position not in wanted]
        self._queued = deque(sample for sample in self._queued if sample.position not in wanted)
        return [sample.output("abort") for sample in partial]

    def partials(self) -> list[SampleOutput]:
        """Running samples as they stand."""
        return [sample.output("abort") for sample in self._running if sample.done]

    def progress(self) -> Mapping[int, int]:
        """Tokens of the samples that are here."""
        tokens: dict[int, int] = {}
        for sample in (*self._running, *self._queued):
            tokens[sample.position] = tokens.get(sample.position, 0) + sample.done
        return tokens

    def offload(self) -> None:
        """There is no device."""

    def onload(self) -> None:
        """There is no device."""

    def close(self) -> None:
        """Nothing is held."""


@dataclass(frozen=True, slots=True)
class TrainModel(_Options):
    """`backend_options` of EmulatedBackend."""

    token_s: float = 1e-4
    """Seconds of forward and backward per token."""
    pair_s: float = 0.0
    """Seconds besides for each pair of tokens in a row, as attention takes them."""
    latency_s: float = 0.0
    """And of each forward, whatever it holds."""
    apply_s: float = 0.02
    """Seconds of an optimizer step."""
    size: int = 1 << 16
    """Number of float32 parameters, which are summed over the replicas and published."""
    rounds_file: str = ""
    """Of EmulatedDividedBackend: a file, by replica, for the seconds of its rounds; a line for each training step."""


class EmulatedBackend:
    """Implements `distflow.runtime.protocols.Backend`; learns nothing."""

    lockstep: ClassVar[bool] = False
    learning_rate = 0.0

    def __init__(self, spec: BackendSpec) -> None:
        self._model = TrainModel.parse(spec.options, "backend_options of the emulated backend")
        self._weight = torch.zeros(self._model.size)
        self._gradient = torch.zeros(self._model.size)
        self._replicas = spec.replicas

    def score(
        self, batch: Batch, *, temperature: float, grad: bool, entropy: bool, candidates: int | Ragged = 0
    ) -> TokenScores:
        """Constant log-probs, after the time that forward and backward take."""
        responses = self._forward(batch)
        logprobs_BT = torch.full(responses.padded().shape, LOGPROB, requires_grad=grad)
        entropy_BT = torch.zeros_like(logprobs_BT) if entropy else None
        return TokenScores(logprobs_BT, entropy_BT, responses.mask(), *candidates_of(logprobs_BT, candidates))

    def values(self, batch: Batch, *, grad: bool) -> TokenValues:
        """Zero values, after the same time."""
        responses = self._forward(batch)
        return TokenValues(torch.zeros(responses.padded().shape, requires_grad=grad), responses.mask())

    def _forward(self, batch: Batch) -> Ragged:
        responses = batch.ragged("response_ids")
        lengths = row_lengths(batch).double()
        work_s = float((lengths * self._model.token_s + lengths.square() * self._model.pair_s).sum())
        self._compute(self._model.latency_s + work_s)
        return responses

    def _compute(self, seconds: float) -> None:
        time.sleep(seconds)

    def accumulate(self, loss_sum: Tensor) -> None:
        """Every element of the gradient is the number of losses."""
        self._gradient += 1.0

    def apply(self, denominator: float) -> float:
        """Sum over the replicas; returns the norm."""
        time.sleep(self._model.apply_s)
        self._replicas.sum_([self._gradient])
        norm = float(self._gradient.norm()) / denominator
        self._gradient.zero_()
        return norm

    def schedule_at(self, done: int) -> None:
        """There is no schedule."""

    def named_shards(self) -> Iterator[tuple[str, Tensor]]:
        """One parameter."""
        yield WEIGHT, self._weight

    def join(self) -> None:
        """Nothing to divide."""

    def idle(self, *, grad: bool) -> None:
        """Nothing is collective."""

    def state_shards(self) -> Iterator[Shard]:
        """The parameter."""
        return share_of({WEIGHT: self._weight}, self._replicas.rank, self._replicas.size)

    def load_state(self, tensors: Mapping[str, Tensor]) -> None:
        """The inverse of `state_shards`."""
        self._weight.copy_(tensors[WEIGHT])

    def offload(self) -> None:
        """There is no device."""

    def onload(self) -> None:
        """There is no device."""

    def close(self) -> None:
        """Nothing is held."""


class EmulatedDividedBackend(EmulatedBackend):
    """The same in lockstep: its replicas agree on each round, which lasts as long as the one with most to compute."""

    lockstep: ClassVar[bool] = True

    def __init__(self, spec: BackendSpec) -> None:
        super().__init__(spec)
        self._rounds: list[float] = []

    @property
    def quadratic(self) -> float:
        """What the pairs of a row add to its cost."""
        return self._model.pair_s / self._model.token_s

    def idle(self, *, grad: bool) -> None:
        """A round without samples."""
        self._compute(0.0)

    def apply(self, denominator: float) -> float:
        """The same, and note the rounds since the last step."""
        if self._model.rounds_file:
            with Path(f"{self._model.rounds_file}-{self._replicas.rank}").open("a") as file:
                file.write(" ".join(map(str, self._rounds)) + "\n")
        self._rounds.clear()
        return super().apply(denominator)

    def _compute(self, seconds: float) -> None:
        self._rounds.append(seconds)
        super()._compute(seconds)
