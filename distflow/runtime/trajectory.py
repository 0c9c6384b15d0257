"""One sample: what its generate step has got from the model, and put between, as segments."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from distflow.exchange.messages import Lease
from distflow.runtime.generate_step import Call
from distflow.types import BegunSample, Episode, FinishReason, SampleKey, SampleOutput, Span


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
