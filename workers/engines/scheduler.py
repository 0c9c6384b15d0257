"""Which samples run, which wait. Plain Python: no tensors.

A group starts whole: it waits, first come first served, until all its samples find a slot, so that its prompt is read
once. Only a group larger than all slots is cut into parts of as many samples as there are slots; each part reads the
prompt again. Samples that somebody else began are parts of their own: each reads the prompt and its own tokens.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field

from distflow.types import BegunSample, FinishReason, GroupRequest, SampleOutput, Span, Version
from distflow.workers.engines.samples import Group


@dataclass(slots=True)
class Part:
    """Samples `first` … `first + count - 1` of a group: they start together, behind the same tokens."""

    group: Group
    first: int
    count: int
    begun: BegunSample | None = None
    """What there is of the one sample of this part."""

    @property
    def token_ids(self) -> tuple[int, ...]:
        """What must be read before the first token is drawn."""
        prompt = self.group.request.prompt_ids
        return prompt if self.begun is None else prompt + self.begun.token_ids


@dataclass(slots=True)
class RunningSample:
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

    def go_on_from(self, begun: BegunSample, version: Version) -> None:
        """Take over what there is; tokens from here on come from `version`."""
        self.tokens, self.logprobs = list(begun.token_ids), list(begun.logprobs)
        self.marks = [(Version(span.term, span.version), span.start) for span in begun.spans]
        if not self.marks or self.marks[-1][0] != version:
            self.marks.append((version, len(self.tokens)))


class Scheduler:
    """Groups by prompt position; `running` is dense, its indices are slots."""

    def __init__(self, slots: int, prefill_tokens: int) -> None:
        self.slots = slots
        self.prefill_tokens = prefill_tokens
        self.groups: dict[int, Group] = {}
        self.waiting: deque[Part] = deque()
        self.running: list[RunningSample] = []
        self._complete: list[tuple[Group, BegunSample]] = []
        """Samples that were finished when they came."""

    @property
    def free_slots(self) -> int:
        """Slots that are neither running nor spoken for by waiting samples."""
        return max(0, self.slots - len(self.running) - sum(part.count for part in self.waiting))

    def add(self, request: GroupRequest) -> None:
        """Queue a group."""
        group = Group(request, request.samples)
        self.groups[request.position] = group
        begun = {sample.sample: sample for sample in request.begun}
        for sample in begun.values():
            if sample.finish_reason:
                self._complete.append((group, sample))
            else:
                self.waiting.append(Part(group, sample.sample, 1, sample))
        for first, count in _runs([number for number in range(request.samples) if number not in begun], self.slots):
            self.waiting.append(Part(group, first, count))

    def take_complete(self) -> list[SampleOutput]:
        """Samples that need no token more; each is handed out once."""
        outputs = []
        for group, sample in self._complete:
            group.finished_tokens += len(sample.token_ids)
            self._end_sample(group)
            outputs.append(finished_output(group.request.position, sample))
        self._complete.clear()
        return outputs

    def admit(self) -> list[Part]:
        """Take the parts that start now: they fit the free slots, and their padded prompts fit `prefill_tokens`."""
        parts: list[Part] = []
        free, longest = self.slots - len(self.running), 0
        while self.waiting and self.waiting[0].count <= free:
            longest = max(longest, len(self.waiting[0].token_ids))
            if parts and longest * (len(parts) + 1) > self.prefill_tokens:
                break
            parts.append(self.waiting.popleft())
            free -= parts[-1].count
        return parts

    def start(self, parts: Sequence[Part], version: Version) -> list[RunningSample]:
        """Give the parts' samples the next slots."""
        started = []
        for part in parts:
            request = part.group.request
            stops = frozenset(request.params.stop_token_ids)
            for number in range(part.first, part.first + part.count):
                prompt, limit = len(request.prompt_ids), request.params.max_new_tokens
                sample = RunningSample(part.group, number, prompt, limit, stops, [(version, 0)])
                if part.begun is not None:
                    sample.go_on_from(part.begun, version)
                started.append(sample)
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
            self._end_sample(sample.group)
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
        self._complete = [item for item in self._complete if item[0].request.position not in positions]
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
        for part in self.waiting:
            tokens[part.group.request.position] += 0 if part.begun is None else len(part.begun.token_ids)
        for group, complete in self._complete:
            tokens[group.request.position] += len(complete.token_ids)
        return tokens

    def lengths(self) -> Iterator[int]:
        """Prompt and response tokens of each running sample."""
        return (sample.prompt + len(sample.tokens) for sample in self.running)

    def _end_sample(self, group: Group) -> None:
        group.unfinished -= 1
        if not group.unfinished:
            self.groups.pop(group.request.position, None)


def finished_output(position: int, sample: BegunSample) -> SampleOutput:
    """A sample that was finished elsewhere, as this engine's own."""
    reason: FinishReason = "stop" if sample.finish_reason == "stop" else "length"
    return SampleOutput(position, sample.sample, sample.token_ids, sample.logprobs, sample.spans, reason)


def _runs(numbers: Sequence[int], longest: int) -> Iterator[tuple[int, int]]:
    """First number and length of each run of consecutive numbers, cut to `longest`."""
    first = 0
    for place, number in enumerate(numbers):
        count = place - first + 1
        if count == longest or place + 1 == len(numbers) or numbers[place + 1] != number + 1:
            yield numbers[first], count
            first = place + 1
