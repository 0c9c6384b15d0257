"""An engine and a backend without a model: the engine decodes at a set pace, the backend records what it was told."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from distflow.data.batch import Batch
from distflow.data.randomness import uniforms
from distflow.runtime.checkpoint.format import Shard, share_of
from distflow.runtime.protocols import TokenScores
from distflow.types import BegunSample, GroupRequest, SampleOutput, Span, Version
from distflow.workers.engines.samples import RequestLimits

SHAPES: Mapping[str, tuple[int, ...]] = {"weight": (2, 3), "bias": (2,)}
"""Parameters of the fake model."""


@dataclass(slots=True)
class _Running:
    request: GroupRequest
    sample: int
    script: tuple[int, ...]
    tokens: list[int] = field(default_factory=list)
    versions: list[Version] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)

    def go_on_from(self, begun: BegunSample) -> None:
        """Take over what there is."""
        self.tokens, self.logprobs = list(begun.token_ids), list(begun.logprobs)
        for span in begun.spans:
            self.versions += [Version(span.term, span.version)] * (span.end - span.start)

    def output(self, *, aborted: bool) -> SampleOutput:
        stopped = bool(self.tokens) and self.tokens[-1] in self.request.params.stop_token_ids
        spans: list[Span] = []
        for place, version in enumerate(self.versions):
            if spans and spans[-1][:2] == version:
                spans[-1] = spans[-1]._replace(end=place + 1)
            else:
                spans.append(Span(*version, place, place + 1))
        return SampleOutput(
            position=self.request.position,
            sample=self.sample,
            token_ids=tuple(self.tokens),
            logprobs=tuple(self.logprobs),
            spans=tuple(spans),
            finish_reason="abort" if aborted else "stop" if stopped else "length",
        )


class FakeEngine:
    """Every token is equally likely; a sample is a function of its request alone. No device, no model, no waiting.

    `pace`: tokens that one poll adds to each running sample. The log-prob of a token tells the version it came from:
    −log V − 0.1 · version number, for a vocabulary of V tokens.
    """

    def __init__(self, *, slots: int = 16, pace: int = 1, max_tokens: int = 64, vocabulary: int = 12) -> None:
        self.version: Version | None = None
        self.closed = False
        self._slots = slots
        self._pace = pace
        self._limits = RequestLimits(max_tokens, vocabulary)
        self._coming: Version | None = None
        self._missing: set[str] = set()
        self._queued: deque[_Running] = deque()
        self._running: list[_Running] = []
        self._done: dict[int, int] = {}

    @property
    def free_slots(self) -> int:
        """Slots that are neither running nor spoken for."""
        return max(0, self._slots - len(self._queued) - len(self._running))

    def submit(self, requests: Sequence[GroupRequest]) -> None:
        """Queue groups; raises ValueError for one that does not fit or is here already."""
        here = set(self._done)
        for request in requests:
            self._limits.check(request)
            if request.position in here:
                raise ValueError(f"group at position {request.position} is already here")
            here.add(request.position)
        for request in requests:
            self._done[request.position] = 0
            length = request.params.max_new_tokens
            drawn = uniforms(request.seed, "sample", request.position, request.samples, length)
            tokens = (drawn * self._limits.vocabulary).astype(int).tolist()
            samples = [_Running(request, sample, tuple(row)) for sample, row in enumerate(tokens)]
            for begun in request.begun:
                samples[begun.sample].go_on_from(begun)
            self._queued.extend(samples)

    def poll(self) -> list[SampleOutput]:
        """`pace` more tokens for every running sample."""
        if self.version is None:
            return []
        while self._queued and len(self._running) < self._slots:
            self._running.append(self._queued.popleft())
        finished = [sample for sample in self._running if _is_over(sample) or self._extend(sample, self.version)]
        self._running = [sample for sample in self._running if not _is_over(sample)]
        for sample in finished:
            self._done[sample.request.position] += len(sample.tokens)
        waiting = {sample.request.position for sample in (*self._running, *self._queued)}
        self._done = {position: tokens for position, tokens in self._done.items() if position in waiting}
        return [sample.output(aborted=False) for sample in finished]

    def begin_update(self, version: Version) -> None:
        """Stand still until `end_update`."""
        self.version, self._coming, self._missing = None, version, set(SHAPES)

    def update(self, tensors: Iterable[tuple[str, Tensor]]) -> None:
        """Check names and shapes; the values do not matter."""
        for name, tensor in tensors:
            if name not in SHAPES:
                raise KeyError(f"unknown parameter {name!r}")
            if tuple(tensor.shape) != SHAPES[name]:
                raise ValueError(f"parameter {name!r} has shape {tuple(tensor.shape)}, expected {SHAPES[name]}")
            self._missing.discard(name)

    def end_update(self) -> None:
        """Go on as the new version; raises ValueError while parameters are missing."""
        if self._missing:
            raise ValueError(f"the update lacks {sorted(self._missing)}")
        self.version = self._coming

    def abort(self, positions: Iterable[int]) -> list[SampleOutput]:
        """Drop these groups; what they had running comes back."""
        wanted = set(positions)
        partial = [sample for sample in self._running if sample.request.position in wanted]
        self._running = [sample for sample in self._running if sample.request.position not in wanted]
        self._queued = deque(sample for sample in self._queued if sample.request.position not in wanted)
        for position in wanted:
            self._done.pop(position, None)
        return [sample.output(aborted=True) for sample in partial]

    def partials(self) -> list[SampleOutput]:
        """What the running samples have."""
        return [sample.output(aborted=True) for sample in self._running]

    def progress(self) -> Mapping[int, int]:
        """Tokens of each group that is here."""
        tokens = dict(self._done)
        for sample in (*self._running, *self._queued):
            tokens[sample.request.position] += len(sample.tokens)
        return tokens

    def offload(self) -> None:
        """There is no device."""

    def onload(self) -> None:
        """There is no device."""

    def close(self) -> None:
        """Take note."""
        self.closed = True

    def _extend(self, sample: _Running, version: Version) -> bool:
        for _ in range(self._pace):
            sample.tokens.append(sample.script[len(sample.tokens)])
            sample.versions.append(version)
            sample.logprobs.append(-math.log(self._limits.vocabulary) - 0.1 * version.number)
            if _is_over(sample):
                return True
        return False


def _is_over(sample: _Running) -> bool:
    stopped = bool(sample.tokens) and sample.tokens[-1] in sample.request.params.stop_token_ids
    return stopped or len(sample.tokens) == len(sample.script)


class FakeBackend:
    """`events` lists what it was asked for: ("accumulate", loss), ("apply", denominator), ("load", names), …"""

    lockstep = False

    def __init__(self) -> None:
        self.events: list[tuple[str, object]] = []
        self.steps = 0

    def score(self, batch: Batch, *, temperature: float, grad: bool, entropy: bool) -> TokenScores:
        """Zero log-probs and entropy."""
        self.events.append(("score", batch.rows))
        response = batch.ragged("response_ids")
        zeros_BT = torch.zeros(response.padded().shape, requires_grad=grad)
        return TokenScores(zeros_BT, torch.zeros_like(zeros_BT) if entropy else None, response.mask())

    def accumulate(self, loss_sum: Tensor) -> None:
        """Recorded."""
        self.events.append(("accumulate", float(loss_sum.detach())))

    def apply(self, denominator: float) -> float:
        """Recorded; the norm is the number of the step."""
        self.steps += 1
        self.events.append(("apply", denominator))
        return float(self.steps)

    @property
    def learning_rate(self) -> float:
        """Falls by half with every step."""
        return 0.5**self.steps

    def named_shards(self) -> Iterator[tuple[str, Tensor]]:
        """Parameters filled with the number of steps done."""
        return ((name, torch.full(shape, float(self.steps))) for name, shape in SHAPES.items())

    def join(self) -> None:
        """Recorded."""
        self.events.append(("join", None))

    def idle(self, *, grad: bool) -> None:
        """Recorded."""
        self.events.append(("idle", grad))

    def state_shards(self) -> Iterator[Shard]:
        """The parameters and the step counter."""
        state = {**dict(self.named_shards()), "steps": torch.tensor(self.steps)}
        return share_of(state, 0, 1)

    def load_state(self, tensors: Mapping[str, Tensor]) -> None:
        """The inverse."""
        self.steps = int(tensors["steps"])
        self.events.append(("load", sorted(tensors)))

    def offload(self) -> None:
        """Recorded."""
        self.events.append(("offload", None))

    def onload(self) -> None:
        """Recorded."""
        self.events.append(("onload", None))

    def close(self) -> None:
        """Recorded."""
        self.events.append(("close", None))
