"""Which samples run, which wait. Plain Python: no tensors.

A group starts whole: it waits, first come first served, until all its samples find a slot, so that its prompt is read
once. Only a group larger than all slots is cut into parts of as many samples as there are slots; each part reads the
prompt again.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field

from distflow.types import FinishReason, GroupRequest, SampleOutput, Span, Version


@dataclass(slots=True)
class Group:
    """A request, the tokens of its finished samples, and how many samples are not finished."""

    request: GroupRequest
    unfinished: int
    finished_tokens: int = 0


@dataclass(slots=True)
class Part:
    """Samples `first` … `first + count - 1` of a group: they start together."""

    group: Group
    first: int
    count: int


@dataclass(slots=True)
class Sample:
    """A running sample; its place in `Scheduler.running` is its slot."""

    group: Group
    number: int
    prompt: int
    """Tokens of the prompt."""
    limit: int
    stops: frozenset[int]
    marks: list[tuple[Version, int]]
    """Versions in use, each with the number of tokens that existed when it began."""
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)

    def output(self, reason: FinishReason) -> SampleOutput:
        """The sample as it stands."""
        ends = [*(start for _, start in self.marks[1:]), len(self.tokens)]
        spans = tuple(
            Span(version.term, version.number, start, end)
            for (version, start), end in zip(self.marks, ends, strict=True)
            if end > start
        )
        request = self.group.request
        return SampleOutput(
            request.position, self.number, tuple(self.tokens), tuple(self.logprobs), spans, finish_reason=reason
        )


class Scheduler:
    """Groups by prompt position; `running` is dense, its indices are slots."""

    def __init__(self, slots: int, prefill_tokens: int) -> None:
        self.slots = slots
        self.prefill_tokens = prefill_tokens
        self.groups: dict[int, Group] = {}
        self.waiting: deque[Part] = deque()
        self.running: list[Sample] = []

    @property
    def free_slots(self) -> int:
        """Slots that are neither running nor spoken for by waiting samples."""
        return max(0, self.slots - len(self.running) - sum(part.count for part in self.waiting))

    def add(self, request: GroupRequest) -> None:
        """Queue a group."""
        group = Group(request, request.samples)
        self.groups[request.position] = group
        for first in range(0, request.samples, self.slots):
            self.waiting.append(Part(group, first, min(self.slots, request.samples - first)))

    def admit(self) -> list[Part]:
        """Take the parts that start now: they fit the free slots, and their padded prompts fit `prefill_tokens`."""
        parts: list[Part] = []
        free, longest = self.slots - len(self.running), 0
        while self.waiting and self.waiting[0].count <= free:
            longest = max(longest, len(self.waiting[0].group.request.prompt_ids))
            if parts and longest * (len(parts) + 1) > self.prefill_tokens:
                break
            parts.append(self.waiting.popleft())
            free -= parts[-1].count
        return parts

    def start(self, parts: Sequence[Part], version: Version) -> list[Sample]:
        """Give the parts' samples the next slots."""
        started = [
            Sample(
                part.group,
                number,
                len(part.group.request.prompt_ids),
                part.group.request.params.max_new_tokens,
                frozenset(part.group.request.params.stop_token_ids),
                [(version, 0)],
            )
            for part in parts
            for number in range(part.first, part.first + part.count)
        ]
        self.running += started
        return started

    def record(self, tokens: Sequence[int], logprobs: Sequence[float]) -> dict[int, FinishReason]:
        """One new token for each running sample; returns the slots that finished, ascending, with the reason."""
        finished: dict[int, FinishReason] = {}
        for slot, (sample, token, logprob) in enumerate(zip(self.running, tokens, logprobs, strict=True)):
            sample.tokens.append(token)
            sample.logprobs.append(logprob)
            if token in sample.stops:
                finished[slot] = "stop"
            elif len(sample.tokens) == sample.limit:
                finished[slot] = "length"
        return finished

    def release(self, slots: Collection[int]) -> tuple[list[int], list[int]]:
        """Free these slots; the last running samples move into the holes. Returns (targets, sources) of the moves."""
        for slot in slots:
            sample = self.running[slot]
            sample.group.finished_tokens += len(sample.tokens)
            sample.group.unfinished -= 1
            if not sample.group.unfinished:
                self.groups.pop(sample.group.request.position, None)
        freed = set(slots)
        left = len(self.running) - len(freed)
        targets = [slot for slot in slots if slot < left]
        sources = [slot for slot in range(left, len(self.running)) if slot not in freed]
        for target, source in zip(targets, sources, strict=True):
            self.running[target] = self.running[source]
        del self.running[left:]
        return targets, sources

    def forget(self, positions: Collection[int]) -> list[int]:
        """Drop these groups from the queue; returns the slots their running samples hold, ascending."""
        for position in positions:
            self.groups.pop(position, None)
        self.waiting = deque(part for part in self.waiting if part.group.request.position not in positions)
        return [slot for slot, sample in enumerate(self.running) if sample.group.request.position in positions]

    def mark(self, version: Version) -> None:
        """Tokens from here on come from this version."""
        for sample in self.running:
            sample.marks.append((version, len(sample.tokens)))

    def progress(self) -> dict[int, int]:
        """Tokens produced by each group that is here, by prompt position."""
        tokens = {position: group.finished_tokens for position, group in self.groups.items()}
        for sample in self.running:
            tokens[sample.group.request.position] += len(sample.tokens)
        return tokens

    def lengths(self) -> Iterator[int]:
        """Prompt and response tokens of each running sample."""
        return (sample.prompt + len(sample.tokens) for sample in self.running)
