"""An engine and a backend without a model: the engine decodes at a fixed pace, the backend records its calls."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from distflow.data.batch import Batch, Ragged
from distflow.data.randomness import sample_stream, uniform_rows
from distflow.runtime.checkpoint.format import Shard, share_of
from distflow.runtime.protocols import TokenScores, TokenValues
from distflow.types import RequestKey, SampleOutput, SampleRequest, SamplingParams, Version
from distflow.workers.engines.samples import NamedSamples, RequestLimits, Sample

SHAPES: Mapping[str, tuple[int, ...]] = {"weight": (2, 3), "bias": (2,)}
"""Parameters of the fake model."""


class FakeEngine:
    """Every token is equally likely; a sample is a function of its request alone. No device, no model, no waiting.

    `pace`: tokens that one poll adds to each running sample. The log-prob of a token tells the version it came from:
    −log V − 0.1 · version number, for a vocabulary of V tokens.
    """

    def __init__(self, *, slots: int = 16, pace: int = 1, max_tokens: int = 64, vocabulary: int = 12) -> None:
        self.version: Version | None = None
        self.closed = False
        self._pace = pace
        self._limits = RequestLimits(max_tokens, vocabulary)
        self._samples = NamedSamples(slots)
        self._scripts: dict[RequestKey, list[int]] = {}
        """All tokens of each sample, from the first that it may sample here."""
        self._coming: Version | None = None
        self._missing: set[str] = set()

    @property
    def free_slots(self) -> int:
        """Slots that are neither in use nor claimed by waiting samples."""
        return self._samples.free_slots

    def submit(self, requests: Sequence[SampleRequest]) -> None:
        """Queue samples; raises ValueError for one that does not fit or is here already."""
        self._limits.check_all(requests, self._samples.here)
        for request in requests:
            stream = sample_stream(request.seed, request.position, request.stream)
            drawn = uniform_rows([stream], [request.sample], request.params.max_new_tokens, [request.offset])
            script = (drawn[0] * self._limits.vocabulary).astype(int).tolist()
            self._scripts[request.key] = _held(script, request.params, self._limits.vocabulary)
        # Greedy or not, every token is equally likely, and reported as such.
        self._samples.add([replace(r, params=replace(r.params.plain, temperature=1.0)) for r in requests])

    def poll(self) -> list[SampleOutput]:
        """`pace` more tokens for every running sample."""
        if self.version is None:
            return []
        finished: list[SampleOutput] = []
        self._samples.admit(self.version)
        for name, sample in list(self._samples.running.items()):
            finished += self._extend(name, sample, self.version)
        return finished

    def begin_update(self, version: Version) -> None:
        """Stop generating until `end_update`."""
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
        """Continue with the new version; raises ValueError while parameters are missing."""
        if self._missing:
            raise ValueError(f"the update lacks {sorted(self._missing)}")
        assert self._coming is not None, "end_update follows begin_update"
        self.version = self._coming
        for sample in self._samples.running.values():
            sample.use_version(self.version)

    def abort(self, positions: Iterable[int]) -> list[SampleOutput]:
        """Drop these groups; returns what their running samples had."""
        dropped = set(positions)
        partials = self._samples.outputs(dropped)
        self._samples.forget(self._samples.of(dropped))
        return partials

    def withdraw(self, requests: Collection[RequestKey]) -> None:
        """Drop these requests."""
        self._samples.forget(set(requests))

    def partials(self) -> list[SampleOutput]:
        """What the running samples have."""
        return self._samples.outputs()

    def progress(self) -> Mapping[int, int]:
        """Tokens of each group that is here."""
        return self._samples.progress()

    def offload(self) -> None:
        """There is no device."""

    def onload(self) -> None:
        """There is no device."""

    def close(self) -> None:
        """Recorded."""
        self.closed = True

    def _extend(self, name: str, sample: Sample, version: Version) -> list[SampleOutput]:
        params = sample.request.params
        tokens = self._scripts[sample.key][sample.length : sample.length + self._pace]
        ends = [place for place, token in enumerate(tokens) if token in params.stop_token_ids]
        tokens = tokens[: ends[0] + 1] if ends else tokens
        over = "length" if sample.length + len(tokens) == params.max_new_tokens else ""
        logprob = -math.log(self._limits.vocabulary) - 0.1 * version.number
        return self._samples.take(name, tokens, [logprob] * len(tokens), "stop" if ends else over)


def _held(tokens: list[int], params: SamplingParams, vocabulary: int) -> list[int]:
    """Return the same tokens, but for stop tokens that come too early: the next one that is none takes their place."""
    others = [token for token in range(vocabulary) if token not in params.stop_token_ids]
    for place in range(min(params.min_new_tokens, len(tokens))):
        if tokens[place] in params.stop_token_ids:
            tokens[place] = others[tokens[place] % len(others)]
    return tokens


def candidates_of(logprobs_BT: Tensor, candidates: int | Ragged) -> tuple[Tensor, Tensor] | tuple[None, None]:
    """Ids and log-probs [B, T, K] of candidates that are as likely as the tokens that are there."""
    if not isinstance(candidates, Ragged) and not candidates:
        return None, None
    ids_BTK = candidates.padded() if isinstance(candidates, Ragged) else torch.arange(candidates)
    ids_BTK = ids_BTK.expand(*logprobs_BT.shape, ids_BTK.shape[-1])
    return ids_BTK, logprobs_BT[..., None].expand(ids_BTK.shape)


class FakeBackend:
    """`events` lists the calls: ("accumulate", loss), ("apply", denominator), ("load", names), …"""

    lockstep = False

    def __init__(self) -> None:
        self.events: list[tuple[str, object]] = []
        self.steps = 0

    def score(
        self, batch: Batch, *, temperature: float, grad: bool, entropy: bool, candidates: int | Ragged = 0
    ) -> TokenScores:
        """Zero log-probs and entropy; the likeliest tokens are those with the first ids."""
        self.events.append(("score", batch.rows))
        response = batch.ragged("response_ids")
        zeros_BT = torch.zeros(response.padded().shape, requires_grad=grad)
        entropy_BT = torch.zeros_like(zeros_BT) if entropy else None
        return TokenScores(zeros_BT, entropy_BT, response.mask(), *candidates_of(zeros_BT, candidates))

    def values(self, batch: Batch, *, grad: bool) -> TokenValues:
        """Zero values."""
        self.events.append(("values", batch.rows))
        response = batch.ragged("response_ids")
        return TokenValues(torch.zeros(response.padded().shape, requires_grad=grad), response.mask())

    def accumulate(self, loss_sum: Tensor) -> None:
        """Recorded."""
        self.events.append(("accumulate", float(loss_sum.detach())))

    def apply(self, denominator: float) -> float:
        """Recorded; the norm is the number of the step."""
        self.steps += 1
        self.events.append(("apply", denominator))
        return float(self.steps)

    def schedule_at(self, done: int) -> None:
        """The rate follows the steps done all the same."""

    @property
    def learning_rate(self) -> float:
        """Halved by every step."""
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
        """The inverse of `state_shards`."""
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
