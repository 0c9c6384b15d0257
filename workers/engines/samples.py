"""The samples that an engine around another project's has taken on: which wait, which run in it, what they have so far.

Plain Python. A sample waits here until a slot is free; in the inner engine it has a name, under which its tokens come.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from distflow.errors import UserError
from distflow.types import BegunSample, FinishReason, GroupRequest, SampleOutput, Span, Version


@dataclass(frozen=True, slots=True)
class RequestLimits:
    """What a slot holds, and the ids the model knows."""

    max_tokens: int
    vocabulary: int

    @classmethod
    def of(cls, config: Any, max_tokens: int) -> RequestLimits:
        """From the model's config and the slot length asked for (0: the model's limit, which it may not exceed)."""
        text = config.get_text_config()
        own = int(text.max_position_embeddings)
        if max_tokens > own:
            raise UserError(
                f"engine: slots of {max_tokens} tokens (prompt + response) are longer than the model's {own} "
                f"positions; lower data.max_prompt_tokens or max_new_tokens"
            )
        return cls(max_tokens or own, int(text.vocab_size))

    def check_all(self, requests: Iterable[GroupRequest], here: Iterable[int]) -> None:
        """`check` each, and raise ValueError for a second group of one position; those `here` are there already."""
        taken = set(here)
        for request in requests:
            self.check(request)
            if request.position in taken:
                raise ValueError(f"group at position {request.position} is already here; abort it before resubmitting")
            taken.add(request.position)

    def check(self, request: GroupRequest) -> None:
        """Raise ValueError, naming position and limit, if this request can never be served."""
        for problem in self._problems(request):
            raise ValueError(f"group at position {request.position}: {problem}")

    def _problems(self, request: GroupRequest) -> list[str]:
        params = request.params
        prompt, new = len(request.prompt_ids), params.max_new_tokens
        checks = [
            (request.samples < 1, f"{request.samples} samples asked for; expected at least 1"),
            (prompt < 1, "its prompt is empty; expected at least 1 token"),
            (new < 1, f"max_new_tokens is {new}; expected at least 1"),
            (
                prompt + new > self.max_tokens,
                f"a prompt of {prompt} and max_new_tokens {new} are {prompt + new} tokens; a slot holds "
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
            (not 0 <= begun.sample < request.samples, f"there are samples 0 … {request.samples - 1}"),
            (twice, "it is there twice"),
            (len(tokens) > longest, f"{len(tokens)} tokens; expected at most {longest}"),
            (len(tokens) != len(begun.logprobs), f"{len(tokens)} tokens, but {len(begun.logprobs)} log-probs"),
            (not all(0 <= t < self.vocabulary for t in tokens), f"token ids outside 0 … {self.vocabulary - 1}"),
            ((ends or [0])[-1] != len(tokens), f"its spans end at {(ends or [0])[-1]}, its tokens at {len(tokens)}"),
            (begun.finish_reason not in ("", "stop", "length"), f"finish_reason {begun.finish_reason!r}"),
        ]
        return [f"begun sample {begun.sample}: {message}" for wrong, message in checks if wrong]


@dataclass(slots=True)
class Group:
    """A request, how many of its samples are not finished, and the tokens of those that are."""

    request: GroupRequest
    unfinished: int
    finished_tokens: int = 0


@dataclass(slots=True)
class Sample:
    """`before` is what it had when it started here; `tokens`, `logprobs` and `marks` were added since."""

    group: Group
    before: BegunSample
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    marks: Sequence[tuple[int, int, int]] = ()
    """Term and number of each version in use, with the number of added tokens there were when it began."""

    @property
    def length(self) -> int:
        """Tokens of the response so far."""
        return len(self.before.token_ids) + len(self.tokens)

    @property
    def input_ids(self) -> list[int]:
        """What is to be read before a token is drawn."""
        return [*self.group.request.prompt_ids, *self.before.token_ids]

    def so_far(self) -> BegunSample:
        """All of it, to be continued."""
        had = len(self.before.token_ids)
        ends = [*(start for _, _, start in self.marks[1:]), len(self.tokens)][: len(self.marks)]
        added = [
            Span(term, number, had + start, had + min(end, len(self.tokens)))
            for (term, number, start), end in zip(self.marks, ends, strict=True)
            if min(end, len(self.tokens)) > start
        ]
        tokens, logprobs = (*self.before.token_ids, *self.tokens), (*self.before.logprobs, *self.logprobs)
        return BegunSample(self.before.sample, tokens, logprobs, joined((*self.before.spans, *added)))

    def output(self, reason: FinishReason) -> SampleOutput:
        """The sample as it stands."""
        return as_output(self.group.request.position, self.so_far(), reason)


class Samples:
    """Groups by prompt position; samples wait in order, or run under their name.

    `continues`: samples with some tokens go on behind them; else they start from the prompt again, which gives the same
    tokens where an engine draws by numbers that belong to the sample, and not to the place where it began.
    """

    def __init__(self, slots: int, *, continues: bool = True) -> None:
        self.slots = slots
        self.continues = continues
        self.groups: dict[int, Group] = {}
        self.waiting: deque[Sample] = deque()
        self.running: dict[str, Sample] = {}
        self._complete: list[Sample] = []
        """Those that were finished when they came."""

    @property
    def free_slots(self) -> int:
        """Slots that are neither running nor spoken for by waiting samples."""
        return max(0, self.slots - len(self.running) - len(self.waiting))

    def add(self, request: GroupRequest) -> None:
        """Queue a group."""
        group = self.groups[request.position] = Group(request, request.samples)
        begun = {sample.sample: sample for sample in request.begun if self.continues or sample.finish_reason}
        for number in range(request.samples):
            sample = Sample(group, begun.get(number, BegunSample(number, (), (), ())))
            (self._complete if sample.before.finish_reason else self.waiting).append(sample)

    def take_complete(self) -> list[SampleOutput]:
        """Samples that need no token more; each is handed out once."""
        outputs = []
        for sample in self._complete:
            reason: FinishReason = "stop" if sample.before.finish_reason == "stop" else "length"
            outputs.append(as_output(sample.group.request.position, sample.before, reason))
            self._end(sample)
        self._complete.clear()
        return outputs

    def admit(self, name: Callable[[], str]) -> dict[str, Sample]:
        """Those that start now, as far as there are slots, under new names."""
        count = min(len(self.waiting), self.slots - len(self.running))
        started = {name(): self.waiting.popleft() for _ in range(count)}
        self.running |= started
        return started

    def take(self, rows: Iterable[Sequence[Any]]) -> list[SampleOutput]:
        """Rows of name, new tokens, their log-probs, all marks, and finish reason ("": none yet).

        Returns the samples that finished. Unknown names are of the past.
        """
        finished = []
        for name, tokens, logprobs, marks, finish in rows:
            sample = self.running.get(name)
            if sample is None:
                continue
            sample.tokens += tokens
            # The distribution that a greedy sample is drawn from has all its mass on one token.
            sample.logprobs += [0.0] * len(logprobs) if is_greedy(sample.group.request) else logprobs
            sample.marks = [(term, number, start) for term, number, start in marks]
            if finish:
                finished.append(sample.output("stop" if finish == "stop" else "length"))
                del self.running[name]
                self._end(sample)
        return finished

    def outputs(self, positions: Collection[int] | None = None) -> list[SampleOutput]:
        """What the running samples of these groups (None: of all) have produced so far; none without a token."""
        return [
            sample.output("abort")
            for sample in self.running.values()
            if (positions is None or sample.group.request.position in positions) and sample.length
        ]

    def forget(self, positions: Collection[int]) -> list[str]:
        """Drop these groups; returns the names of their running samples."""
        for position in positions:
            self.groups.pop(position, None)
        gone = [name for name, sample in self.running.items() if sample.group.request.position in positions]
        for name in gone:
            del self.running[name]
        self.waiting = deque(sample for sample in self.waiting if sample.group.request.position not in positions)
        self._complete = [sample for sample in self._complete if sample.group.request.position not in positions]
        return gone

    def put_back(self, *, begun: bool) -> list[str]:
        """Running samples (those with new tokens only if `begun`) wait again, first of all, with what they have.

        Returns the names that they had.
        """
        names = [name for name, sample in self.running.items() if begun or not sample.tokens]
        back = [self.running.pop(name) for name in names]
        self.waiting.extendleft(Sample(sample.group, self._left_of(sample)) for sample in reversed(back))
        return names

    def progress(self) -> Mapping[int, int]:
        """Tokens produced by each group that is here, by prompt position."""
        tokens = {position: group.finished_tokens for position, group in self.groups.items()}
        for sample in (*self.running.values(), *self.waiting, *self._complete):
            tokens[sample.group.request.position] += sample.length
        return tokens

    def _left_of(self, sample: Sample) -> BegunSample:
        return sample.so_far() if self.continues else BegunSample(sample.before.sample, (), (), ())

    def _end(self, sample: Sample) -> None:
        sample.group.finished_tokens += sample.length
        sample.group.unfinished -= 1
        if not sample.group.unfinished:
            del self.groups[sample.group.request.position]


def is_greedy(request: GroupRequest) -> bool:
    """Whether only the likeliest token can be drawn."""
    return request.params.temperature == 0 or request.params.top_k == 1


def joined(spans: Iterable[Span]) -> tuple[Span, ...]:
    """Spans, those of one version side by side as one."""
    whole: list[Span] = []
    for span in spans:
        if whole and (whole[-1].term, whole[-1].version) == (span.term, span.version):
            whole[-1] = whole[-1]._replace(end=span.end)
        else:
            whole.append(span)
    return tuple(whole)


def as_output(position: int, sample: BegunSample, reason: FinishReason) -> SampleOutput:
    """A sample as the engine hands it out."""
    return SampleOutput(position, sample.sample, sample.token_ids, sample.logprobs, sample.spans, reason)


def salt(version: Version) -> str:
    """Keeps the cached keys and values of a version apart from those of all others."""
    return f"{version.term}.{version.number}"
