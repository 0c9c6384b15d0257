"""One sample: what its generate step has got from the model, and put between, as segments; finished ones as a batch."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import torch

from distflow.data.batch import Batch, Ragged
from distflow.exchange.messages import Lease
from distflow.runtime.generate_step import Call
from distflow.runtime.protocols import Tokenizer
from distflow.types import FINISH_REASONS, BegunSample, Episode, FinishReason, SampleKey, SampleOutput, Span


@dataclass(frozen=True, slots=True)
class Segment:
    """Tokens of one writer, in a row. An environment's have neither log-probs nor versions, and are not trained on."""

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...] = ()
    spans: tuple[Span, ...] = ()
    trains: bool = False


@dataclass(slots=True)
class Trajectory:
    """One sample, as far as it is."""

    key: SampleKey
    lease: Lease
    episode: Episode
    call: Call
    begun: BegunSample | None
    """What another worker had of it."""
    replayed: int = 0
    """Of those tokens, how many have answered requests of the step."""
    segments: list[Segment] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)
    """Of the model's segments."""
    written: list[Segment] = field(default_factory=list)
    """What the model has written, in the order of the requests, aside too."""
    asked: list[tuple[int, ...]] = field(default_factory=list)
    """The prefixes of all requests."""
    train: bool = True
    """Whether the tokens of its newest request are trained on."""
    aside: bool = False
    """Whether they are no part of the sample."""
    finish_reason: FinishReason = "stop"
    fields: Mapping[str, float] = field(default_factory=dict)
    """What the step returned."""

    @property
    def token_ids(self) -> tuple[int, ...]:
        """All tokens behind the prompt."""
        if len(self.segments) == 1:
            return self.segments[0].token_ids
        return tuple(token for segment in self.segments for token in segment.token_ids)

    def recorded(self, more: SampleOutput | None, reason: FinishReason) -> SampleOutput:
        """What the model has written, without gaps: the form in which it is replayed. `more`: of an open request."""
        parts = self.written
        if more is not None:
            if not parts:
                return more
            parts = [*parts, Segment(more.token_ids, more.logprobs, more.spans)]
        if len(parts) == 1:
            (only,) = parts
            return SampleOutput(*self.key, only.token_ids, only.logprobs, only.spans, reason)
        tokens = tuple(token for part in parts for token in part.token_ids)
        logprobs = tuple(logprob for part in parts for logprob in part.logprobs)
        spans = joined((part.spans, len(part.token_ids)) for part in parts)
        return SampleOutput(*self.key, tokens, logprobs, spans, reason)


def joined(parts: Iterable[tuple[Sequence[Span], int]]) -> tuple[Span, ...]:
    """Spans of parts that follow each other, given with the number of tokens of each; neighbours of one version are
    merged."""
    found: list[Span] = []
    start = 0
    for spans, tokens in parts:
        for span in spans:
            moved = span._replace(start=start + span.start, end=start + span.end)
            if found and found[-1][:2] == span[:2] and found[-1].end == moved.start:
                found[-1] = found[-1]._replace(end=moved.end)
            else:
                found.append(moved)
        start += tokens
    return tuple(found)


def assemble(samples: Sequence[Trajectory], tokenizer: Tokenizer, dtype: torch.dtype) -> Batch:
    """One row a sample, in the given order; log-probs in `dtype`, 0 for tokens that the model did not write."""
    leases = [sample.lease for sample in samples]
    ids = [sample.token_ids for sample in samples]
    response_ids = Ragged.from_rows(ids, torch.int64)
    return Batch(
        {
            "uid": torch.tensor([lease.uid for lease in leases], dtype=torch.int64),
            "group": torch.tensor([lease.position for lease in leases], dtype=torch.int64),
            "sample": torch.tensor([sample.episode.sample for sample in samples], dtype=torch.int64),
            "prompt_ids": Ragged.from_rows([lease.prompt_ids for lease in leases], torch.int64),
            "prompt_text": Ragged.from_texts([lease.prompt_text for lease in leases]),
            "task": Ragged.from_texts([lease.task for lease in leases]),
            "response_ids": response_ids,
            "response_mask": response_ids.like(_mask(samples, response_ids)),
            "response_text": Ragged.from_texts(_texts(samples, ids, tokenizer)),
            "rollout_logprobs": Ragged.from_rows([_logprobs(sample) for sample in samples], dtype),
            "policy_versions": _versions(samples),
            "finish_reason": torch.tensor([FINISH_REASONS.index(sample.finish_reason) for sample in samples]),
            **_further(samples),
        }
    )


def _mask(samples: Sequence[Trajectory], response_ids: Ragged) -> torch.Tensor:
    segments = [segment for sample in samples for segment in sample.segments]
    trained = torch.tensor([segment.trains for segment in segments], dtype=torch.bool)
    if trained.all():
        return torch.ones_like(response_ids.values, dtype=torch.bool)
    return trained.repeat_interleave(torch.tensor([len(segment.token_ids) for segment in segments]))


def _texts(samples: Sequence[Trajectory], ids: Sequence[Sequence[int]], tokenizer: Tokenizer) -> list[str]:
    """Of whole responses: those of single turns are known."""
    several = [number for number, sample in enumerate(samples) if len(sample.segments) > 1]
    decoded = dict(zip(several, tokenizer.decode_batch([ids[n] for n in several], skip_special=True), strict=True))
    return [decoded[n] if n in decoded else sample.texts[0] for n, sample in enumerate(samples)]


def _logprobs(sample: Trajectory) -> Sequence[float]:
    if len(sample.segments) == 1:
        return sample.segments[0].logprobs
    return [logprob for segment in sample.segments for logprob in segment.logprobs or [0.0] * len(segment.token_ids)]


def _versions(samples: Sequence[Trajectory]) -> Ragged:
    rows = [_spans(sample.segments) for sample in samples]
    counts = torch.tensor([0, *map(len, rows)], dtype=torch.int64)
    values = torch.tensor([tuple(span) for row in rows for span in row], dtype=torch.int64).view(-1, 4)
    return Ragged(values, counts.cumsum(0))


def _spans(segments: Sequence[Segment]) -> Sequence[Span]:
    if len(segments) == 1:
        return segments[0].spans
    return joined((segment.spans, len(segment.token_ids)) for segment in segments)


def _further(samples: Sequence[Trajectory]) -> dict[str, torch.Tensor]:
    """What the step returned for each sample."""
    names = samples[0].fields if samples else ()
    return {name: torch.tensor([float(sample.fields[name]) for sample in samples]) for name in names}
