"""An engine in virtual time: all samples that run advance together, by a token with each decode step.

A fluid: there is an event where a sample starts or finishes, none for a token. The engine's clock counts decode steps;
while b samples with C tokens of context run, n steps take

    n · (max(floor_s, b · sample_s) + C · context_s) + n²/2 · b · context_s      seconds, times `slow`

since each step adds b tokens of context. A sample's `rate` is its tokens a step: 1, or what a test gives it. Samples of
several `SampleTurns` ask their environment in between, which the worker computes while nothing is decoded.

Example: FluidEngine(64, DecodeLatency(0.01, 1e-4)), 200 samples of 100 tokens: 64 run, the first end after 1 s.
"""

from __future__ import annotations

import heapq
import math
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import count
from typing import NamedTuple, cast

from distflow.metrics.batch_cost import BatchCost
from distflow.sim.latency import DecodeLatency
from distflow.types import BegunSample, FinishReason, SampleOutput, Span, Version

_EXACT = 1e-9
_ROUNDED = 4.0
"""Times an end is rounded between when it is foreseen and when it comes."""
Tokens = tuple[int, ...]


class SampleTurns(NamedTuple):
    """After every so many tokens of a sample its environment takes the worker so many seconds; 0 tokens: never."""

    tokens: int = 0
    seconds: float = 0.0

    def end(self, tokens: int, length: int) -> int:
        """Tokens of a sample of this length when the turn ends in which it has `tokens`."""
        return min(length, (tokens // self.tokens + 1) * self.tokens) if self.tokens else length


ONE_TURN = SampleTurns()


@dataclass(slots=True, eq=False)
class FluidSample:
    """A sample that runs, or waits for a slot."""

    position: int
    number: int
    length: int
    """Its tokens when it is finished."""
    prompt: int = 0
    """Tokens of context before its first."""
    rate: float = 1.0
    """Tokens a decode step."""
    begun: BegunSample | None = None
    """What another worker has made of it."""
    had: int = 0
    """Tokens of that."""
    since: float = 0.0
    """The engine's clock when it started."""
    first: int = 0
    """Which of the engine's versions it started under; −1: it waits."""
    turn_end: int = 0
    """Its tokens when its present turn ends."""

    def __post_init__(self) -> None:
        self.had = 0 if self.begun is None else len(self.begun.token_ids)
        self.first = -1

    def tokens(self, clock: float) -> int:
        """Its tokens when the engine's clock shows `clock`."""
        if self.first < 0:
            return self.had
        return min(self.length, self.had + int((clock - self.since) * self.rate + _EXACT))


@dataclass(slots=True)
class FluidEngine:
    """`mark`: the token that it writes, so that it is known who wrote it; None: token i of any sample is i."""

    slots: int
    decode: DecodeLatency
    slow: float = 1.0
    """Factor on all times."""
    mark: int | None = None
    turns: SampleTurns = ONE_TURN
    produced: int = 0
    """Tokens made of samples that have left."""
    slot_s: float = 0.0
    """Seconds in which it decoded, times the samples that ran."""
    stalled_s: float = 0.0
    """Seconds in which it computed prompts or an environment."""
    loading_s: float = 0.0
    """Seconds in which it changed weights."""
    batch: BatchCost = field(default_factory=BatchCost)
    """What its decode steps took, by the samples that ran."""
    context: float = 0.0
    """Tokens of context of all that run."""
    paused: bool = False
    _clock: float = 0.0
    _at: float = 0.0
    """The time at which the clock is right; ahead of now while the engine is stalled."""
    _heap: list[tuple[float, int, FluidSample]] = field(default_factory=list)
    """Running samples by the clock at which they end; those that have left are taken out when they come up."""
    _live: dict[int, FluidSample] = field(default_factory=dict)
    """Running samples by their number in the heap."""
    _groups: dict[int, dict[int, int]] = field(default_factory=dict)
    """Number in the heap by position and sample."""
    _queue: deque[FluidSample] = field(default_factory=deque)
    _marks: list[tuple[float, Version]] = field(default_factory=list)
    """Versions and the clock when each was loaded."""
    _numbers: count[int] = field(default_factory=count)

    @property
    def running(self) -> int:
        """Samples in slots."""
        return len(self._live)

    @property
    def free_slots(self) -> int:
        """Slots that nobody has or waits for."""
        return self.slots - len(self._live) - len(self._queue)

    @property
    def news(self) -> tuple[float, tuple[int, ...]]:
        """While it stays the same, so do `progress` and `partials`: nothing was decoded, and no group came or left."""
        return self._clock, tuple(self._groups)

    # -- time
    def advance(self, now: float) -> None:
        """Let it run until `now`."""
        seconds = now - self._at
        if seconds <= 0.0:
            return
        self._at = now
        if self.paused or not self._live:
            return
        steps = self._steps_in(seconds)
        self._clock += steps
        self.context += steps * len(self._live)
        self.slot_s += seconds * len(self._live)
        self.batch.add(len(self._live), steps, seconds)

    def pause(self, now: float, *, paused: bool) -> None:
        """Stand still, or go on."""
        self.advance(now)
        self.paused = paused

    def stall(self, now: float, seconds: float) -> None:
        """Compute prompts or an environment for a while."""
        self._stand_still(now, seconds)
        self.stalled_s += seconds

    def change_weights(self, now: float, seconds: float) -> None:
        """Load new weights for a while."""
        self._stand_still(now, seconds)
        self.loading_s += seconds

    def next_end(self) -> float | None:
        """When the next sample ends, if nothing changes."""
        while self._heap and self._heap[0][1] not in self._live:
            heapq.heappop(self._heap)
        if not self._heap or self.paused:
            return None
        return self._at + self._seconds_of(max(0.0, self._heap[0][0] - self._clock))

    # -- samples
    def load(self, version: Version) -> None:
        """All tokens from here on come from this version."""
        self._marks.append((self._clock, version))

    def add(self, samples: Iterable[FluidSample]) -> None:
        """Take samples in; those without a slot wait."""
        for sample in samples:
            self._groups.setdefault(sample.position, {})[sample.number] = -1
            self._queue.append(sample)
        self._fill()

    def take_ended(self, now: float) -> list[SampleOutput]:
        """The samples that have ended by now."""
        self.advance(now)
        ended = []
        # What is left may take less than the time is exact to: it would end now, and now again.
        left = self._steps_in(_ROUNDED * math.ulp(self._at)) if self._live else 0.0
        limit = self._clock + max(_EXACT * max(1.0, self._clock), left)
        while self._heap and (self._heap[0][0] <= limit or self._heap[0][1] not in self._live):
            clock, number, sample = heapq.heappop(self._heap)
            if number in self._live and sample.turn_end < sample.length:
                self._next_turn(now, clock, number, sample)
            elif number in self._live:
                ended.append(self._output(sample, sample.length))
                self._remove(number, sample, sample.length)
        self._fill()
        return ended

    def abort(self, positions: Iterable[int]) -> None:
        """Drop groups."""
        for position in positions:
            for number in self._groups.get(position, {}).copy().values():
                if number >= 0:
                    self._remove(number, self._live[number], self._live[number].tokens(self._clock))
            self._groups.pop(position, None)
        self._queue = deque(sample for sample in self._queue if sample.position in self._groups)
        self._fill()

    def close(self, now: float) -> list[SampleOutput]:
        """Drop all; returns what they had."""
        self.advance(now)
        outputs = self.partials()
        self.abort(tuple(self._groups))
        return outputs

    def partials(self) -> list[SampleOutput]:
        """What all samples have now."""
        waiting = [self._output(sample, sample.had) for sample in self._queue]
        return [*(self._output(sample, sample.tokens(self._clock)) for sample in self._live.values()), *waiting]

    def progress(self) -> dict[int, int]:
        """Tokens of the samples that are here, by position; at least 1."""
        live, clock = self._live, self._clock
        return {
            position: max(1, sum([live[number].tokens(clock) for number in numbers.values() if number >= 0]))
            for position, numbers in self._groups.items()
        }

    def wrote(self, sample: FluidSample) -> Tokens:
        """The tokens of a sample that it has, or had; those after it was dropped are made up."""
        return self._written(sample, sample.tokens(self._clock))[0]

    # -- details
    def _stand_still(self, now: float, seconds: float) -> None:
        self.advance(now)
        self._at = max(self._at, now) + seconds

    def _fill(self) -> None:
        while self._queue and len(self._live) < self.slots:
            sample = self._queue.popleft()
            number = next(self._numbers)
            sample.since, sample.first = self._clock, len(self._marks) - 1
            self.context += sample.prompt + sample.had
            self._groups[sample.position][sample.number] = number
            self._live[number] = sample
            sample.turn_end = self.turns.end(sample.had, sample.length)
            heapq.heappush(self._heap, (self._clock + (sample.turn_end - sample.had) / sample.rate, number, sample))

    def _next_turn(self, now: float, clock: float, number: int, sample: FluidSample) -> None:
        self.stall(now, self.turns.seconds)
        ended, sample.turn_end = sample.turn_end, self.turns.end(sample.turn_end, sample.length)
        heapq.heappush(self._heap, (clock + (sample.turn_end - ended) / sample.rate, number, sample))

    def _remove(self, number: int, sample: FluidSample, tokens: int) -> None:
        del self._live[number]
        group = self._groups[sample.position]
        del group[sample.number]
        if not group:
            del self._groups[sample.position]
        self.produced += tokens - sample.had
        self.context = max(0.0, self.context - sample.prompt - tokens) if self._live else 0.0

    def _pace(self) -> tuple[float, float]:
        """Seconds of the next decode step, and what each adds to the one after it."""
        decode, running = self.decode, len(self._live)
        more = decode.context_s * self.slow
        return max(decode.floor_s, running * decode.sample_s) * self.slow + self.context * more, running * more

    def _seconds_of(self, steps: float) -> float:
        pace, growth = self._pace()
        return steps * (pace + growth * steps / 2)

    def _steps_in(self, seconds: float) -> float:
        pace, growth = self._pace()
        if growth * seconds <= _EXACT * pace * pace:
            return seconds / pace
        return (math.sqrt(pace * pace + 2 * growth * seconds) - pace) / growth

    def _output(self, sample: FluidSample, tokens: int) -> SampleOutput:
        reason: FinishReason = "length" if tokens == sample.length else "abort"
        ids, logprobs = self._written(sample, tokens)
        return SampleOutput(sample.position, sample.number, ids, logprobs, self._spans(sample, tokens), reason)

    def _written(self, sample: FluidSample, tokens: int) -> tuple[Tokens, tuple[float, ...]]:
        if self.mark is None:
            # As good as tuples for those who read them, and made at once.
            return cast(Tokens, range(tokens)), cast(tuple[float, ...], range(tokens))
        before = () if sample.begun is None else sample.begun.token_ids
        ids = (*before, *(self.mark,) * (tokens - sample.had))
        return ids, tuple(map(float, range(tokens)))

    def _spans(self, sample: FluidSample, tokens: int) -> tuple[Span, ...]:
        spans: list[Span] = [] if sample.begun is None else list(sample.begun.spans)
        if sample.first < 0:
            return tuple(spans)
        ends = [min(tokens, sample.tokens(clock)) for clock, _ in self._marks[sample.first + 1 :]]
        begin = sample.had
        for (_, version), end in zip(self._marks[sample.first :], [*ends, tokens], strict=True):
            if end > begin:
                spans.append(Span(version.term, version.number, begin, end))
                begin = end
        return tuple(spans)
