"""Which samples of the torch engine run and which wait. Plain Python: no tensors.

Samples of one group that are submitted in one call, with the same tokens to read, start together: they wait, first
come first served, until all of them find a slot, so that those tokens are read once. If they are more than all slots,
they are cut into parts of as many samples as there are slots; each part reads the tokens again. A sample begun by
another engine is a part of its own: it reads the prompt and its own tokens.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable, Iterator, Sequence

from distflow.types import FinishReason, RequestKey, Version
from distflow.workers.engines.samples import EngineSamples, Sample

Part = list[Sample]
"""Samples of one group that start together, after the same tokens."""


class Scheduler(EngineSamples):
    """`running` is dense: the index of a sample is its slot."""

    def __init__(self, slots: int, prefill_tokens: int) -> None:
        super().__init__(slots)
        self.prefill_tokens = prefill_tokens
        self.waiting: deque[Part] = deque()
        self.running: list[Sample] = []

    @property
    def free_slots(self) -> int:
        """Slots that are neither in use nor claimed by waiting samples."""
        return max(0, self.slots - len(self.running) - sum(map(len, self.waiting)))

    def admit(self) -> list[Part]:
        """Take the parts that start now: they fit the free slots, and their padded prompts fit `prefill_tokens`."""
        parts: list[Part] = []
        free, longest = self.slots - len(self.running), 0
        while self.waiting and len(self.waiting[0]) <= free:
            longest = max(longest, self.waiting[0][0].input_length)
            if parts and longest * (len(parts) + 1) > self.prefill_tokens:
                break
            parts.append(self.waiting.popleft())
            free -= len(parts[-1])
        return parts

    def start(self, parts: Sequence[Part], version: Version) -> list[Sample]:
        """Give the parts' samples the next slots."""
        started = [sample for part in parts for sample in part]
        for sample in started:
            sample.use_version(version)
        self.running += started
        return started

    def record(
        self, tokens: Sequence[int], logprobs: Sequence[float], filtered: Sequence[float] = ()
    ) -> dict[int, FinishReason]:
        """Add one token to each running sample; returns the slots that finished, ascending, with the reason.

        `filtered`: the filtered log-probs, where they are wanted and some sample's distribution departs from
        the model's.
        """
        finished: dict[int, FinishReason] = {}
        for slot, (sample, token, logprob) in enumerate(zip(self.running, tokens, logprobs, strict=True)):
            sample.tokens.append(token)
            sample.logprobs.append(logprob)
            if filtered and sample.request.params.departs:
                sample.filtered.append(filtered[slot])
            if token in sample.request.params.stop_token_ids:
                finished[slot] = "stop"
            elif len(sample.tokens) == sample.remaining:
                finished[slot] = "length"
        return finished

    def release(self, slots: Collection[int]) -> tuple[list[int], list[int]]:
        """Free these slots; the last running samples move into the gaps. Returns (targets, sources) of the moves."""
        self.here.difference_update([self.running[slot].key for slot in slots])
        freed = set(slots)
        left = len(self.running) - len(freed)
        targets = [slot for slot in slots if slot < left]
        sources = [slot for slot in range(left, len(self.running)) if slot not in freed]
        for target, source in zip(targets, sources, strict=True):
            self.running[target] = self.running[source]
        del self.running[left:]
        return targets, sources

    def forget(self, requests: Collection[RequestKey]) -> list[int]:
        """Drop these requests from the queue; returns the slots of those that run, ascending."""
        self.here.difference_update(requests)
        left = ([sample for sample in part if sample.key not in requests] for part in self.waiting)
        self.waiting = deque(part for part in left if part)
        return [slot for slot, sample in enumerate(self.running) if sample.key in requests]

    def use_version(self, version: Version) -> None:
        """Tokens of all running samples come from this version from now on."""
        for sample in self.running:
            sample.use_version(version)

    def lengths(self) -> Iterator[int]:
        """Prompt and response tokens of each running sample."""
        return (sample.input_length + len(sample.tokens) for sample in self.running)

    def _queue(self, samples: list[Sample]) -> None:
        alike: dict[tuple[int, RequestKey | None, tuple[int, ...]], Part] = {}
        for sample in samples:
            alike.setdefault(_read_together(sample), []).append(sample)
        for part in alike.values():
            self.waiting.extend(part[first : first + self.slots] for first in range(0, len(part), self.slots))

    def _unfinished(self) -> Iterable[Sample]:
        return (*self.running, *(sample for part in self.waiting for sample in part))


def _read_together(sample: Sample) -> tuple[int, RequestKey | None, tuple[int, ...]]:
    """Equal for samples whose tokens are read once for all of them."""
    alone = sample.key if sample.before.token_ids else None
    return sample.request.position, alone, sample.request.prompt_ids
