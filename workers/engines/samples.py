"""The samples that an engine has taken on: which requests it accepts, and what each sample has so far.

Plain Python: no tensors.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Any

from distflow.errors import UserError
from distflow.types import BegunSample, FinishReason, GroupRequest, SampleOutput, Span, Version

VersionStart = tuple[int, int, int]
"""Term and number of a policy version, and how many tokens an engine had added to a sample when it came into use."""
_NUMBERS = count()


@dataclass(frozen=True, slots=True)
class RequestLimits:
    """How many tokens a slot holds, and how many token ids the model knows."""

    max_tokens: int
    vocabulary: int

    @classmethod
    def of(cls, config: Any, max_tokens: int) -> RequestLimits:
        """From the model's config and the requested slot length (0: the model's limit, which it may not exceed)."""
        text = config.get_text_config()
        own = int(text.max_position_embeddings)
        if max_tokens > own:
            raise UserError(
                f"engine: slots of {max_tokens} tokens (prompt + response) are longer than the model's {own} "
                f"positions; lower data.max_prompt_tokens or max_new_tokens"
            )
        return cls(max_tokens or own, int(text.vocab_size))

    def check_all(self, requests: Iterable[GroupRequest], taken: Iterable[int]) -> None:
        """`check` each; raise ValueError for a second group at one position, `taken` being those in use already."""
        positions = set(taken)
        for request in requests:
            self.check(request)
            if request.position in positions:
                raise ValueError(f"group at position {request.position} is already here; abort it before resubmitting")
            positions.add(request.position)

    def check(self, request: GroupRequest) -> None:
        """Raise ValueError, naming position and limit, if this request can never be served."""
        for problem in self._problems(request):
            raise ValueError(f"group at position {request.position}: {problem}")

    def _problems(self, request: GroupRequest) -> list[str]:
        params = request.params
        prompt, new = len(request.prompt_ids), params.max_new_tokens
        checks = [
            (request.samples < 1, f"{request.samples} samples requested; expected at least 1"),
            (prompt < 1, "its prompt is empty; expected at least 1 token"),
            (new < 1, f"max_new_tokens is {new}; expected at least 1"),
            (
                prompt + new > self.max_tokens,
                f"a prompt of {prompt} tokens and max_new_tokens {new} make {prompt + new} tokens; a slot holds "
                f"{self.max_tokens}",
            ),
            (
                not all(0 <= token < self.vocabulary for token in request.prompt_ids),
                f"its prompt has token ids outside 0 … {self.vocabulary - 1}",
            ),
            (not 0 <= params.temperature < float("inf"), f"temperature {params.temperature}; expected 0 or more"),
            (not 0 < params.top_p <= 1, f"top_p {params.top_p}; expected 0 < top_p ≤ 1"),
            (params.top_k < 0, f"top_k {params.top_k}; expected 0 (off) or more"),
        ]
        problems = [message for wrong, message in checks if wrong]
        return problems or [problem for sample in request.begun for problem in self._begun_problems(request, sample)]

    def _begun_problems(self, request: GroupRequest, begun: BegunSample) -> list[str]:
        tokens, new = begun.token_ids, request.params.max_new_tokens
        longest = new if begun.finish_reason else new - 1
        ends = [span.end for span in begun.spans]
        twice = sum(other.sample == begun.sample for other in request.begun) > 1
        checks = [
            (not 0 <= begun.sample < request.samples, f"expected a sample number in 0 … {request.samples - 1}"),
            (twice, "it is listed twice"),
            (len(tokens) > longest, f"{len(tokens)} tokens; expected at most {longest}"),
            (len(tokens) != len(begun.logprobs), f"{len(tokens)} tokens, but {len(begun.logprobs)} log-probs"),
            (not all(0 <= t < self.vocabulary for t in tokens), f"token ids outside 0 … {self.vocabulary - 1}"),
            ((ends or [0])[-1] != len(tokens), f"its spans end at {(ends or [0])[-1]}, its tokens at {len(tokens)}"),
            (begun.finish_reason not in ("", "stop", "length"), f"unknown finish_reason {begun.finish_reason!r}"),
        ]
        return [f"begun sample {begun.sample}: {message}" for wrong, message in checks if wrong]


@dataclass(slots=True)
class Group:
    """A request, how many of its samples are unfinished, and the number of tokens in the finished ones."""

    request: GroupRequest
    unfinished: int
    finished_tokens: int = 0
    stops: frozenset[int] = field(init=False)

    def __post_init__(self) -> None:
        self.stops = frozenset(self.request.params.stop_token_ids)


@dataclass(slots=True)
class Sample:
    """One sample: `before` is what it had when it was queued here, the lists hold what was added since."""

    group: Group
    before: BegunSample
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    version_starts: list[VersionStart] = field(default_factory=list)
    input_length: int = field(init=False)
    """Tokens to read before the first new one is drawn: the prompt, and what was there before."""
    remaining: int = field(init=False)
    """How many tokens may be added here."""

    def __post_init__(self) -> None:
        begun, request = len(self.before.token_ids), self.group.request
        self.input_length = len(request.prompt_ids) + begun
        self.remaining = request.params.max_new_tokens - begun

    @property
    def length(self) -> int:
        """Response tokens so far."""
        return len(self.before.token_ids) + len(self.tokens)

    @property
    def input_ids(self) -> list[int]:
        """The `input_length` tokens to read."""
        return [*self.group.request.prompt_ids, *self.before.token_ids]

    def use_version(self, version: Version) -> None:
        """Tokens added from now on come from this version."""
        self.version_starts.append((version.term, version.number, len(self.tokens)))

    def so_far(self) -> BegunSample:
        """All of it, in the form in which another engine can continue it."""
        had, added = len(self.before.token_ids), len(self.tokens)
        ends = [*(start for _, _, start in self.version_starts[1:]), added][: len(self.version_starts)]
        # An inner engine may announce a version before the tokens drawn ahead of it have arrived.
        spans = [
            Span(term, number, had + start, had + min(end, added))
            for (term, number, start), end in zip(self.version_starts, ends, strict=True)
            if min(end, added) > start
        ]
        tokens, logprobs = (*self.before.token_ids, *self.tokens), (*self.before.logprobs, *self.logprobs)
        return BegunSample(self.before.sample, tokens, logprobs, merge_spans((*self.before.spans, *spans)))

    def output(self, reason: FinishReason) -> SampleOutput:
        """The sample as it stands."""
        return as_output(self.group.request.position, self.so_far(), reason)


class EngineSamples(ABC):
    """The groups of an engine by prompt position. A subclass decides which of their samples wait and which run.

    `continues`: samples that have tokens already go on after them; otherwise they restart from the prompt. Restarting
    gives the same tokens where an engine's random numbers depend on the sample, and not on where it began.
    """

    def __init__(self, slots: int, *, continues: bool = True) -> None:
        self.slots = slots
        self.continues = continues
        self.groups: dict[int, Group] = {}
        self._complete: list[Sample] = []
        """Samples that were already finished when they were submitted."""

    @abstractmethod
    def _queue(self, samples: list[Sample]) -> None:
        """Let these unfinished samples of one group wait."""

    @abstractmethod
    def _unfinished(self) -> Iterable[Sample]:
        """All that wait or run."""

    def add(self, request: GroupRequest) -> None:
        """Queue a group."""
        group = self.groups[request.position] = Group(request, request.samples)
        begun = {sample.sample: sample for sample in request.begun if self.continues or sample.finish_reason}
        samples = [Sample(group, begun.get(n, BegunSample(n, (), (), ()))) for n in range(request.samples)]
        self._complete += [sample for sample in samples if sample.before.finish_reason]
        self._queue([sample for sample in samples if not sample.before.finish_reason])

    def take_complete(self) -> list[SampleOutput]:
        """The samples that need no more tokens; each is returned once."""
        outputs = []
        for sample in self._complete:
            reason: FinishReason = "stop" if sample.before.finish_reason == "stop" else "length"
            outputs.append(as_output(sample.group.request.position, sample.before, reason))
            self._end(sample)
        self._complete.clear()
        return outputs

    def progress(self) -> Mapping[int, int]:
        """Response tokens so far of each group, by prompt position."""
        tokens = {position: group.finished_tokens for position, group in self.groups.items()}
        for sample in (*self._unfinished(), *self._complete):
            tokens[sample.group.request.position] += sample.length
        return tokens

    def _forget(self, positions: Collection[int]) -> None:
        for position in positions:
            self.groups.pop(position, None)
        self._complete = [sample for sample in self._complete if sample.group.request.position not in positions]

    def _end(self, sample: Sample) -> None:
        sample.group.finished_tokens += sample.length
        sample.group.unfinished -= 1
        if not sample.group.unfinished:
            self.groups.pop(sample.group.request.position, None)


class NamedSamples(EngineSamples):
    """Samples of an engine around another project's, in which each running sample has a name.

    A sample waits here, first come first served, until a slot is free.
    """

    def __init__(self, slots: int, *, continues: bool = True) -> None:
        super().__init__(slots, continues=continues)
        self.waiting: deque[Sample] = deque()
        self.running: dict[str, Sample] = {}

    @property
    def free_slots(self) -> int:
        """Slots that are neither in use nor claimed by waiting samples."""
        return max(0, self.slots - len(self.running) - len(self.waiting))

    def admit(self, version: Version) -> dict[str, Sample]:
        """Give the samples that now start under `version` new names, as far as there are slots.

        No name ever occurs twice, and none is the prefix of another: SGLang aborts by prefix.
        """
        started = {f"{next(_NUMBERS)}.": self.waiting.popleft() for _ in range(self._startable)}
        for sample in started.values():
            sample.use_version(version)
        self.running |= started
        return started

    def take(
        self,
        name: str,
        tokens: Sequence[int],
        logprobs: Sequence[float],
        finish: str,
        starts: Iterable[Any] | None = None,
    ) -> list[SampleOutput]:
        """Add new tokens to a running sample; returns its output if it finished. Names of past samples are ignored.

        `finish` is "" while the sample runs on. `starts`, if the inner engine keeps them, replace `version_starts`.
        """
        sample = self.running.get(name)
        if sample is None:
            return []
        sample.tokens += tokens
        # A greedy sample is drawn from a distribution with all its mass on one token.
        sample.logprobs += [0.0] * len(logprobs) if is_greedy(sample.group.request) else logprobs
        if starts is not None:
            sample.version_starts = [(term, number, start) for term, number, start in starts]
        if not finish:
            return []
        del self.running[name]
        self._end(sample)
        return [sample.output("stop" if finish == "stop" else "length")]

    def outputs(self, positions: Collection[int] | None = None) -> list[SampleOutput]:
        """What the running samples of these groups (None: all) have so far, with finish_reason abort.

        Samples without a token are left out.
        """
        return [
            sample.output("abort")
            for sample in self.running.values()
            if (positions is None or sample.group.request.position in positions) and sample.length
        ]

    def forget(self, positions: Collection[int]) -> list[str]:
        """Drop these groups; returns the names of their running samples."""
        self._forget(positions)
        dropped = [name for name, sample in self.running.items() if sample.group.request.position in positions]
        for name in dropped:
            del self.running[name]
        self.waiting = deque(sample for sample in self.waiting if sample.group.request.position not in positions)
        return dropped

    def put_back(self, *, begun: bool) -> list[str]:
        """Move running samples to the front of the queue, with what they have; returns the names they had.

        Those with new tokens are moved only if `begun`.
        """
        names = [name for name, sample in self.running.items() if begun or not sample.tokens]
        back = [self.running.pop(name) for name in names]
        self.waiting.extendleft(Sample(sample.group, self._kept(sample)) for sample in reversed(back))
        return names

    @property
    def _startable(self) -> int:
        return min(len(self.waiting), self.slots - len(self.running))

    def _kept(self, sample: Sample) -> BegunSample:
        return sample.so_far() if self.continues else BegunSample(sample.before.sample, (), (), ())

    def _queue(self, samples: list[Sample]) -> None:
        self.waiting.extend(samples)

    def _unfinished(self) -> Iterable[Sample]:
        return (*self.running.values(), *self.waiting)


def is_greedy(request: GroupRequest) -> bool:
    """Whether only the likeliest token can be drawn."""
    return request.params.temperature == 0 or request.params.top_k == 1


def merge_spans(spans: Iterable[Span]) -> tuple[Span, ...]:
    """The same spans, with neighbours of one version merged."""
    merged: list[Span] = []
    for span in spans:
        if merged and (merged[-1].term, merged[-1].version) == (span.term, span.version):
            merged[-1] = merged[-1]._replace(end=span.end)
        else:
            merged.append(span)
    return tuple(merged)


def as_output(position: int, sample: BegunSample, reason: FinishReason) -> SampleOutput:
    """A sample as an engine returns it."""
    return SampleOutput(position, sample.sample, sample.token_ids, sample.logprobs, sample.spans, reason)
