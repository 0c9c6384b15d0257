"""An engine of a device that takes just the time that it is said to take, by a clock of its own."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from distflow.runtime.protocols import EngineSpec
from distflow.types import RequestKey, SampleOutput, SampleRequest, Span, Version


class Clock:
    """Seconds as the device has spent them."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def perf_counter(self) -> float:
        self.seconds += 1e-9  # nothing else takes any time, and no two readings are alike
        return self.seconds


CLOCK = Clock()


@dataclass
class Running:
    request: SampleRequest
    done: int = 0


class ClockedEngine:
    """Options: `floor_s` of a decode step, `context_s` a token of context, `prefill_s` a prompt token, and how many
    prompts a poll reads, after which it decodes a token of all that run."""

    def __init__(self, spec: EngineSpec) -> None:
        self.version: Version | None = None
        self._options = {"floor_s": 0.01, "context_s": 0.0, "prefill_s": 5e-6, "at_once": 1, **spec.options}
        self._slots = spec.slots
        self._queued: deque[SampleRequest] = deque()
        self._running: list[Running] = []

    @property
    def free_slots(self) -> int:
        return self._slots - len(self._queued) - len(self._running)

    def submit(self, requests: Sequence[SampleRequest]) -> None:
        self._queued.extend(requests)

    def poll(self) -> list[SampleOutput]:
        for _ in range(min(len(self._queued), int(self._options["at_once"]))):
            request = self._queued.popleft()
            CLOCK.seconds += len(request.prompt_ids) * self._options["prefill_s"]
            self._running.append(Running(request))
        context = sum(len(one.request.prompt_ids) + one.done for one in self._running)
        CLOCK.seconds += self._options["floor_s"] + context * self._options["context_s"]
        for one in self._running:
            one.done += 1
        ended = [one for one in self._running if one.done == one.request.params.max_new_tokens]
        self._running = [one for one in self._running if one not in ended]
        return [self._output(one) for one in ended]

    def _output(self, one: Running) -> SampleOutput:
        assert self.version is not None
        spans = (Span(*self.version, 0, one.done),)
        tokens, logprobs = (1,) * one.done, (-1.0,) * one.done
        return SampleOutput(one.request.position, one.request.sample, tokens, logprobs, spans, "length")

    def begin_update(self, version: Version) -> None:
        self._coming, self.version = version, None

    def update(self, tensors: Iterable[tuple[str, Tensor]]) -> None:
        list(tensors)

    def end_update(self) -> None:
        self.version = self._coming

    def abort(self, positions: Iterable[int]) -> list[SampleOutput]:
        gone = set(positions)
        partial = [self._output(one) for one in self._running if one.request.position in gone]
        self._running = [one for one in self._running if one.request.position not in gone]
        self._queued = deque(request for request in self._queued if request.position not in gone)
        return partial

    def withdraw(self, requests: Collection[RequestKey]) -> None:
        self._running = [one for one in self._running if one.request.key not in requests]
        self._queued = deque(request for request in self._queued if request.key not in requests)

    def partials(self) -> list[SampleOutput]:
        return [self._output(one) for one in self._running]

    def progress(self) -> Mapping[int, int]:
        queued = {request.position: 0 for request in self._queued}
        return queued | {one.request.position: one.done for one in self._running}

    def offload(self) -> None:
        pass

    def onload(self) -> None:
        pass

    def close(self) -> None:
        pass
