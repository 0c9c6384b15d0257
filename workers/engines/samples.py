"""The samples that an engine has taken on: which requests it accepts, and what each sample has so far.

Plain Python: no tensors.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count
from math import inf, isfinite
from typing import Any

from distflow.errors import UserError
from distflow.types import (
    FIRST_CALL,
    BegunSample,
    FinishReason,
    RequestKey,
    SampleOutput,
    SampleRequest,
    SamplingParams,
    Span,
    Version,
    joined_filtered,
)

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

    def check_all(self, requests: Iterable[SampleRequest], taken: Iterable[RequestKey]) -> None:
        """`check` each; raise ValueError for a request that is there twice, `taken` being those that are here."""
        keys = set(taken)
        for request in requests:
            self.check(request)
            if request.key in keys:
                raise ValueError(f"{_named(request)} is already here; abort its group before resubmitting")
            keys.add(request.key)

    def check(self, request: SampleRequest) -> None:
        """Raise ValueError, naming sample, position and limit, if this request can never be served."""
        for problem in self._problems(request):
            raise ValueError(f"{_named(request)}: {problem}")

    def _problems(self, request: SampleRequest) -> list[str]:
        params = request.params
        prompt, new = len(request.prompt_ids), params.max_new_tokens
        checks = [
            (prompt < 1, "its prompt is empty; expected at least 1 token"),
            (new < 1, f"max_new_tokens is {new}; expected at least 1"),
            (
                prompt + new > self.max_tokens,
                f"a prompt of {prompt} tokens and max_new_tokens {new} make {prompt + new} tokens; a slot holds "
                f"{self.max_tokens}",
            ),
            (
                prompt > 0 and not 0 <= min(request.prompt_ids) <= max(request.prompt_ids) < self.vocabulary,
                f"its prefix has token ids outside 0 … {self.vocabulary - 1}: {self._unknown(request.prompt_ids)}",
            ),
            (not 0 <= params.temperature < float("inf"), f"temperature {params.temperature}; expected 0 or more"),
            (not 0 < params.top_p <= 1, f"top_p {params.top_p}; expected 0 < top_p ≤ 1"),
            (params.top_k < 0, f"top_k {params.top_k}; expected 0 (off) or more"),
            *self._further_checks(params),
        ]
        problems = [message for wrong, message in checks if wrong]
        return problems or ([] if request.begun is None else self._begun_problems(request.begun, new - 1))

    def _further_checks(self, params: SamplingParams) -> list[tuple[bool, str]]:
        if not (params.shifts or params.min_p or params.min_new_tokens):
            return []
        held = params.min_new_tokens > 0 and len({t for t in params.stop_token_ids if t >= 0}) >= self.vocabulary
        return [
            (not 0 <= params.min_p <= 1, f"min_p {params.min_p}; expected 0 (off) to 1"),
            (params.min_new_tokens < 0, f"min_new_tokens {params.min_new_tokens}; expected 0 (off) or more"),
            (held, "min_new_tokens rules out stop_token_ids, which are all tokens that there are"),
            (not 0 < params.repetition_penalty < inf, f"repetition_penalty {params.repetition_penalty}; expected > 0"),
            *(
                (not 0 <= token < self.vocabulary, f"logit_bias of token {token}; expected 0 … {self.vocabulary - 1}")
                for token, _ in params.biases
            ),
            *((not isfinite(bias), f"logit_bias {bias}; expected finite numbers") for _, bias in params.biases),
        ]

    def _unknown(self, tokens: Sequence[int]) -> str:
        """Name the first token that the model does not know."""
        return next((str(token) for token in tokens if not 0 <= token < self.vocabulary), "")

    def _begun_problems(self, begun: BegunSample, longest: int) -> list[str]:
        tokens = begun.token_ids
        end = begun.spans[-1].end if begun.spans else 0
        checks = [
            (len(tokens) > longest, f"{len(tokens)} tokens; expected at most {longest}"),
            (len(tokens) != len(begun.logprobs), f"{len(tokens)} tokens, but {len(begun.logprobs)} log-probs"),
            (not all(0 <= t < self.vocabulary for t in tokens), f"token ids outside 0 … {self.vocabulary - 1}"),
            (
                len(begun.filtered_logprobs) not in (0, len(tokens)),
                f"{len(tokens)} tokens, but {len(begun.filtered_logprobs)} filtered log-probs",
            ),
            (end != len(tokens), f"its spans end at {end}, its tokens at {len(tokens)}"),
            (begun.finish_reason != "", f"it is finished ({begun.finish_reason!r}): there is nothing to continue"),
        ]
        return [f"begun elsewhere: {message}" for wrong, message in checks if wrong]


def _named(request: SampleRequest) -> str:
    call = "" if request.call == FIRST_CALL else f", call {'.'.join(map(str, request.call))}"
    return f"sample {request.sample} of position {request.position}{call}"


@dataclass(slots=True)
class Sample:
    """One sample: `before` is what it had when it was queued here, the lists hold what was added since."""

    request: SampleRequest
    before: BegunSample
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    filtered: list[float] = field(default_factory=list)
    """Filtered log-probs of the same tokens, or none."""
    version_starts: list[VersionStart] = field(default_factory=list)
    input_length: int = field(init=False)
    """Tokens to read before the first new one is drawn: the prompt, and what was there before."""
    remaining: int = field(init=False)
    """How many tokens may be added here."""

    def __post_init__(self) -> None:
        begun = len(self.before.token_ids)
        self.input_length = len(self.request.prompt_ids) + begun
        self.remaining = self.request.params.max_new_tokens - begun

    @property
    def key(self) -> RequestKey:
        """Of its request."""
        return self.request.key

    @property
    def length(self) -> int:
        """Sampled tokens so far."""
        return len(self.before.token_ids) + len(self.tokens)

    @property
    def input_ids(self) -> list[int]:
        """The `input_length` tokens to read."""
        return [*self.request.prompt_ids, *self.before.token_ids]

    def tokens_after(self, number: int) -> Sequence[int]:
        """Return the sampled tokens from this number on."""
        before = self.before.token_ids
        return self.tokens[number - len(before) :] if number >= len(before) else (*before[number:], *self.tokens)

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
        filtered = joined_filtered(
            [(self.before.logprobs, self.before.filtered_logprobs), (self.logprobs, self.filtered)]
        )
        merged = merge_spans((*self.before.spans, *spans))
        return BegunSample(self.before.sample, tokens, logprobs, merged, filtered_logprobs=filtered)

    def output(self, reason: FinishReason) -> SampleOutput:
        """The sample as it stands."""
        return as_output(self.request, self.so_far(), reason)


class EngineSamples(ABC):
    """The unfinished samples of an engine. A subclass decides which of them wait and which run.

    `continues`: samples that have tokens already go on after them; otherwise they restart from the prompt. Restarting
    gives the same tokens where an engine's random numbers depend on the sample, and not on where it began.
    """

    def __init__(self, slots: int, *, continues: bool = True) -> None:
        self.slots = slots
        self.continues = continues
        self.here: set[RequestKey] = set()

    @abstractmethod
    def _queue(self, samples: list[Sample]) -> None:
        """Let these samples wait."""

    @abstractmethod
    def _unfinished(self) -> Iterable[Sample]:
        """All that wait or run."""

    def add(self, requests: Sequence[SampleRequest]) -> None:
        """Queue samples, in this order."""
        self.here.update(request.key for request in requests)
        self._queue([Sample(request, self._start(request.sample, request.begun)) for request in requests])

    def progress(self) -> Mapping[int, int]:
        """Tokens sampled so far by the samples that are here, by prompt position."""
        tokens: dict[int, int] = {}
        for sample in self._unfinished():
            position = sample.request.position
            tokens[position] = tokens.get(position, 0) + sample.length
        return tokens

    def tokens_after(self, had: Mapping[RequestKey, int]) -> Mapping[RequestKey, Sequence[int]]:
        """Return the response's tokens from that number on, of those of these requests that have more."""
        found = {sample.key: sample for sample in self._unfinished() if sample.key in had}
        return {key: sample.tokens_after(had[key]) for key, sample in found.items() if sample.length > had[key]}

    def _start(self, number: int, had: BegunSample | None) -> BegunSample:
        """What a sample goes on after."""
        return had if had is not None and self.continues else BegunSample(number, (), (), ())

    def of(self, positions: Collection[int]) -> set[RequestKey]:
        """The requests of these groups."""
        return {key for key in self.here if key[0] in positions}


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
        filtered: Sequence[float] = (),
    ) -> list[SampleOutput]:
        """Add new tokens to a running sample; returns its output if it finished. Names of past samples are ignored.

        `finish` is "" while the sample runs on. `starts`, if the inner engine keeps them, replace `version_starts`.
        `filtered`: the filtered log-probs of a sample with filters, if they are wanted.
        """
        sample = self.running.get(name)
        if sample is None:
            return []
        sample.tokens += tokens
        # At temperature 0 all the mass is on one token.
        sample.logprobs += logprobs if sample.request.params.temperature > 0 else [0.0] * len(logprobs)
        sample.filtered += filtered
        if starts is not None:
            sample.version_starts = [(term, number, start) for term, number, start in starts]
        if not finish:
            return []
        del self.running[name]
        self.here.discard(sample.key)
        return [sample.output("stop" if finish == "stop" else "length")]

    def outputs(self, positions: Collection[int] | None = None) -> list[SampleOutput]:
        """What the running samples of these groups (None: all) have so far, with finish_reason abort.

        Samples without a token are left out.
        """
        return [
            sample.output("abort")
            for sample in self.running.values()
            if (positions is None or sample.request.position in positions) and sample.length
        ]

    def forget(self, requests: Collection[RequestKey]) -> list[str]:
        """Drop these requests; returns the names of those that run."""
        self.here.difference_update(requests)
        dropped = [name for name, sample in self.running.items() if sample.key in requests]
        for name in dropped:
            del self.running[name]
        self.waiting = deque(sample for sample in self.waiting if sample.key not in requests)
        return dropped

    def put_back(self, *, begun: bool) -> list[str]:
        """Move running samples to the front of the queue, with what they have; returns the names they had.

        Those with new tokens are moved only if `begun`.
        """
        names = [name for name, sample in self.running.items() if begun or not sample.tokens]
        back = [self.running.pop(name) for name in names]
        self.waiting.extendleft(
            Sample(sample.request, self._start(sample.request.sample, sample.so_far())) for sample in reversed(back)
        )
        return names

    @property
    def _startable(self) -> int:
        return min(len(self.waiting), self.slots - len(self.running))

    def _queue(self, samples: list[Sample]) -> None:
        self.waiting.extend(samples)

    def _unfinished(self) -> Iterable[Sample]:
        return (*self.running.values(), *self.waiting)


def merge_spans(spans: Iterable[Span]) -> tuple[Span, ...]:
    """The same spans, with neighbours of one version merged."""
    merged: list[Span] = []
    for span in spans:
        if merged and (merged[-1].term, merged[-1].version) == (span.term, span.version):
            merged[-1] = merged[-1]._replace(end=span.end)
        else:
            merged.append(span)
    return tuple(merged)


def as_output(request: SampleRequest, sample: BegunSample, reason: FinishReason) -> SampleOutput:
    """A sample as an engine returns it."""
    about = (sample.token_ids, sample.logprobs, sample.spans, reason, sample.filtered_logprobs)
    return SampleOutput(request.position, request.sample, *about, request.call)
