"""An engine and backends that only wait as long as a latency model says: everything else of a run is real.

Lengths of samples are functions of run seed, prompt position and sample alone (`distflow.sim.emulation`). Waits are as
long as the model says, times `time_scale`, so that any number of emulated devices fits on one machine. In a recipe:
`engine: distflow.testing.emulated:EmulatedEngine`, with `engine_options` of `EmulatedEngineOptions`.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import torch
from torch import Tensor

from distflow.data.batch import Batch, Ragged, row_lengths
from distflow.data.randomness import length_seed
from distflow.runtime.checkpoint.format import Shard, share_of
from distflow.runtime.protocols import BackendSpec, EngineSpec, TokenScores, TokenValues
from distflow.sim.emulation import DrawnLengths, EmulatedBackendOptions, EmulatedEngineOptions
from distflow.testing.fakes import candidates_of
from distflow.types import CallNumber, RequestKey, SampleOutput, SampleRequest, Span, Version

TOKEN, LOGPROB = 1, -1.0
WEIGHT = "weight"
SHORTEST_S = 1e-3
"""Shorter waits are put together: for the system, waking up takes a tenth of that."""
FORGIVEN_S = 0.1
"""Time by which we were woken too late that later waits make up for; more than that is the machine's doing."""


class DeviceTime:
    """Waits for seconds of a latency model; what a wait was too long or too short is settled by the next ones."""

    def __init__(self, real_s: float) -> None:
        self._real_s = real_s
        self._owed = 0.0

    def wait(self, seconds: float) -> None:
        """Let the device work for so long."""
        self._owed += seconds * self._real_s
        if self._owed < SHORTEST_S:
            return
        begin = time.monotonic()
        time.sleep(self._owed)
        self._owed = max(-FORGIVEN_S, self._owed - (time.monotonic() - begin))


@dataclass(slots=True)
class _Sample:
    position: int
    number: int
    length: int
    longest: int
    prompt: int
    spans: list[Span]
    call: CallNumber
    done: int = 0

    @property
    def key(self) -> RequestKey:
        """Of its request."""
        return self.position, self.number, self.call

    @property
    def context(self) -> int:
        return self.prompt + self.done

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

    def output(self, *, aborted: bool = False) -> SampleOutput:
        return SampleOutput(
            position=self.position,
            sample=self.number,
            token_ids=(TOKEN,) * self.done,
            logprobs=(LOGPROB,) * self.done,
            spans=tuple(self.spans),
            finish_reason="abort" if aborted else "length" if self.length == self.longest else "stop",
            call=self.call,
        )


class EmulatedEngine:
    """Implements `distflow.runtime.protocols.Engine`; all tokens are the same."""

    def __init__(self, spec: EngineSpec) -> None:
        options = EmulatedEngineOptions.parse(spec.options)
        latency = options.latency()
        self.version: Version | None = None
        self._decode = latency.decode
        self._swap_s = latency.weights.swap_s
        self._transfer_s = options.transfer_s()
        self._time = DeviceTime(options.real_s)
        self._poll_s = options.poll_s / options.real_s
        self._lengths = DrawnLengths(options)
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
        limits = [request.params.max_new_tokens for request in requests]
        lengths: list[int] = [0] * len(requests)
        for seed, stream in {(request.seed, request.stream) for request in requests}:
            rows = [row for row, request in enumerate(requests) if (request.seed, request.stream) == (seed, stream)]
            names = [(requests[row].position, requests[row].sample, limits[row], requests[row].offset) for row in rows]
            drawn = self._lengths.draw(length_seed(seed, stream), *zip(*names, strict=True))
            for row, length in zip(rows, drawn, strict=True):
                lengths[row] = length
        for request, length, longest in zip(requests, lengths, limits, strict=True):
            begun = request.begun
            spans, done = ([], 0) if begun is None else (list(begun.spans), len(begun.token_ids))
            prompt = len(request.prompt_ids)
            about = (request.position, request.sample, length, longest, prompt, spans, request.call, done)
            self._queued.append(_Sample(*about))

    def poll(self) -> list[SampleOutput]:
        """Decode until a sample is finished, for at most `poll_s`, with the time that it takes."""
        if self.version is None:
            return []
        prefill = self._admit()
        if not self._running:
            return []
        samples = len(self._running)
        context = sum(sample.context for sample in self._running) / samples
        longest = self._poll_s / self._decode.seconds(samples, context)
        tokens = max(1, min(int(longest), *(sample.length - sample.done for sample in self._running)))
        # The time grows evenly with the context, so that of the step in the middle is the mean.
        self._time.wait(prefill + tokens * self._decode.seconds(samples, context + (tokens - 1) / 2))
        for sample in self._running:
            sample.produce(tokens, self.version)
        finished = [sample for sample in self._running if sample.done >= sample.length]
        self._running = [sample for sample in self._running if sample.done < sample.length]
        return [sample.output() for sample in finished]

    def _admit(self) -> float:
        """Start what fits; returns the seconds of reading prompts, each once for all samples of its group."""
        tokens, read = 0, set[tuple[int, int]]()
        while self._queued and len(self._running) < self._slots:
            sample = self._queued.popleft()
            self._running.append(sample)
            tokens += sample.done
            if (sample.position, sample.prompt) not in read:
                read.add((sample.position, sample.prompt))
                tokens += sample.prompt
        return tokens * self._decode.prefill_s

    def begin_update(self, version: Version) -> None:
        """Stop generating until `end_update`."""
        self.version, self._coming = None, version

    def update(self, tensors: Iterable[tuple[str, Tensor]]) -> None:
        """Read them; nothing depends on the values."""
        for _ in tensors:
            pass

    def end_update(self) -> None:
        """Continue with the new version, once it would be here.

        Samples that are running go on while it comes, so that they stand still for the swap alone.
        """
        self._time.wait(self._swap_s + (0.0 if self._running else self._transfer_s))
        self.version = self._coming

    def abort(self, positions: Iterable[int]) -> list[SampleOutput]:
        """Drop these groups; returns what their running samples had."""
        wanted = set(positions)
        partial = [sample for sample in self._running if sample.position in wanted]
        self._running = [sample for sample in self._running if sample.position not in wanted]
        self._queued = deque(sample for sample in self._queued if sample.position not in wanted)
        return [sample.output(aborted=True) for sample in partial]

    def withdraw(self, requests: Collection[RequestKey]) -> None:
        """Drop these requests."""
        gone = set(requests)
        self._running = [sample for sample in self._running if sample.key not in gone]
        self._queued = deque(sample for sample in self._queued if sample.key not in gone)

    def partials(self) -> list[SampleOutput]:
        """Running samples as they stand."""
        return [sample.output(aborted=True) for sample in self._running if sample.done]

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


class EmulatedBackend:
    """Implements `distflow.runtime.protocols.Backend`; learns nothing."""

    lockstep: ClassVar[bool] = False
    learning_rate = 0.0

    def __init__(self, spec: BackendSpec) -> None:
        options = EmulatedBackendOptions.parse(spec.options)
        latency = options.latency()
        self._train = latency.train
        self._publish_s = latency.weights.publish_s
        self._time = DeviceTime(options.real_s)
        self._rounds_file = options.rounds_file
        self._weight = torch.zeros(options.size)
        self._gradient = torch.zeros(options.size)
        self._replicas = spec.replicas

    def score(
        self, batch: Batch, *, temperature: float, grad: bool, entropy: bool, candidates: int | Ragged = 0
    ) -> TokenScores:
        """Constant log-probs, after the time of a forward, with `grad` that of the backward too."""
        responses = self._forward(batch, grad=grad)
        logprobs_BT = torch.full(responses.padded().shape, LOGPROB, requires_grad=grad)
        entropy_BT = torch.zeros_like(logprobs_BT) if entropy else None
        return TokenScores(logprobs_BT, entropy_BT, responses.mask(), *candidates_of(logprobs_BT, candidates))

    def values(self, batch: Batch, *, grad: bool) -> TokenValues:
        """Zero values, after the same time."""
        responses = self._forward(batch, grad=grad)
        return TokenValues(torch.zeros(responses.padded().shape, requires_grad=grad), responses.mask())

    def _forward(self, batch: Batch, *, grad: bool) -> Ragged:
        seconds = self._train.seconds(row_lengths(batch).tolist())
        self._compute(seconds if grad else self._train.passes(0, 1) * seconds)
        return batch.ragged("response_ids")

    def _compute(self, seconds: float) -> None:
        self._time.wait(seconds)

    def accumulate(self, loss_sum: Tensor) -> None:
        """Every element of the gradient is the number of losses."""
        self._gradient += 1.0

    def apply(self, denominator: float) -> float:
        """Sum over the replicas; returns the norm."""
        self._time.wait(self._train.apply_s)
        self._replicas.sum_([self._gradient])
        norm = float(self._gradient.norm()) / denominator
        self._gradient.zero_()
        return norm

    def schedule_at(self, done: int) -> None:
        """There is no schedule."""

    def named_shards(self) -> Iterator[tuple[str, Tensor]]:
        """One parameter, once publishing would be done."""
        self._time.wait(self._publish_s)
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
        return self._train.pair_s / self._train.token_s

    def idle(self, *, grad: bool) -> None:
        """A round without samples."""
        self._compute(0.0)

    def apply(self, denominator: float) -> float:
        """The same, and note the rounds since the last step."""
        if self._rounds_file:
            with Path(f"{self._rounds_file}-{self._replicas.rank}").open("a") as file:
                file.write(" ".join(map(str, self._rounds)) + "\n")
        self._rounds.clear()
        return super().apply(denominator)

    def _compute(self, seconds: float) -> None:
        self._rounds.append(seconds)
        super()._compute(seconds)
