"""Judges samples in parallel in child processes, which are killed when they exceed their time and replaced early.

    loading ──its first line──▶ idle ──a sample──▶ busy ──verdict──▶ idle
                                                    ├──timeout──▶ killed
                                                    └──exited: error
Samples go to idle children, so a kill costs no more than its own sample as long as another child is loaded. Therefore
there is always one spare child, and one more for each busy child that has used half of its time. A fast function is
served by one child; the others are started when it turns out to be slow.
"""

from __future__ import annotations

import atexit
import select
import time
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from distflow.errors import PluginError
from distflow.log import logger
from distflow.types import Completion
from distflow.workers.reward_calls import NO_STATE, TrainerState
from distflow.workers.reward_judging import Verdict, shown, takes_lists
from distflow.workers.reward_process import RewardProcess

log = logger(__name__)

START_S = 120.0
"""Limit for a child's imports."""
LATE_STARTS = 3
"""If so many children in a row are not ready in time, and none is loaded, the function cannot be loaded any more."""
SLOW_S = 0.05
"""A sample that takes longer justifies more children."""
_Request = tuple[Sequence[int], Sequence[Completion]]
"""Samples, with their numbers, that are judged by one call."""
Judged = list[tuple[int, Verdict]]
"""Verdicts by the number of the sample."""


@dataclass(slots=True)
class _Child:
    process: RewardProcess
    since: float
    """When it was started, or was given its sample."""
    loaded: bool = False
    rows: Sequence[int] = ()
    """The numbers of the samples that it judges now: one, unless a function takes lists."""

    @property
    def idle(self) -> bool:
        return self.loaded and not self.rows


def _numbered(together: Iterable[Sequence[Completion]]) -> Iterator[_Request]:
    """Number the samples that are judged by one call each."""
    first = 0
    for samples in together:
        yield range(first, first + len(samples)), samples
        first += len(samples)


class RewardPool:
    """Children with one reward function: at most `processes` calls at a time, each for at most `timeout_s`.

    A call judges one sample, or with a function that takes lists all samples that are given together.
    """

    def __init__(self, spec: str, processes: int, timeout_s: float) -> None:
        self._spec = spec
        self._name = shown(spec)
        self._processes = processes
        self._timeout_s = timeout_s
        self._children: list[_Child] = []
        self._slow = False
        self._late_starts: int | None = None
        """Number of late starts since a child was last loaded; None: none ever was."""
        atexit.register(self.close)

    def judge(self, samples: Iterable[Completion], state: TrainerState = NO_STATE) -> Iterator[Judged]:
        """The verdicts of all samples, some at a time, in the order in which they arrive.

        A sample whose child times out or dies is a failure. Raises PluginError if the function cannot be loaded, and
        UserError if it reports that it cannot work at all.
        """
        together = [list(samples)] if takes_lists(self._spec) else ([sample] for sample in samples)
        # Nobody is asked about no samples: a child with no rows counts as idle, and its answer would meet the next.
        waiting = deque(_numbered(one for one in together if one))
        try:
            while waiting or any(child.rows for child in self._children):
                self._start_children(len(waiting), time.monotonic())
                self._assign(waiting, state)
                found = self._wait()
                if found:
                    yield found
        finally:
            # If the caller stopped half-way, the next call must not receive these answers.
            for child in [child for child in self._children if child.rows]:
                self._end(child)

    def close(self) -> None:
        """End all children."""
        for child in list(self._children):
            self._end(child)

    def _start_children(self, waiting: int, now: float) -> None:
        """Start the children that are missing; replace those that exited while idle."""
        for child in [child for child in self._children if child.idle and child.process.ended]:
            self._end(child)
        busy = [child for child in self._children if child.rows]
        late = sum(now - child.since > self._timeout_s / 2 for child in busy)
        wanted = min(self._processes, waiting + len(busy)) if self._slow else 1
        for _ in range(wanted + max(1, late) - len(self._children)):
            self._children.append(_Child(RewardProcess(self._spec), now))

    def _assign(self, waiting: deque[_Request], state: TrainerState) -> None:
        busy = sum(bool(child.rows) for child in self._children)
        for child in self._children:
            if waiting and child.idle and busy < self._processes:
                child.rows, samples = waiting.popleft()
                child.since = time.monotonic()
                child.process.ask(samples, state)
                busy += 1

    def _wait(self) -> Judged:
        """Wait for answers, and kill children that exceed their time."""
        now = time.monotonic()
        poller = select.poll()
        by_source = {child.process.source: child for child in self._children}
        by_sink = {child.process.sink: child for child in self._children if child.process.unsent}
        for source in by_source:
            poller.register(source, select.POLLIN)
        for sink in by_sink:
            poller.register(sink, select.POLLOUT)
        ready = [number for number, _ in poller.poll(max(0.0, self._wake_at(now) - now) * 1000 + 1)]
        for number in ready:
            if number in by_sink:
                by_sink[number].process.write()
        judged = [found for number in ready if number in by_source for found in self._read(by_source[number])]
        return judged + self._end_late(time.monotonic())

    def _wake_at(self, now: float) -> float:
        """When something has to be done even if no child answers."""
        delays = (self._timeout_s, self._timeout_s / 2, self._timeout_s if self._slow else SLOW_S)
        due = [now + START_S]
        for child in self._children:
            if not child.loaded:
                due.append(child.since + START_S)
            elif child.rows:
                due.append(min((at for delay in delays if (at := child.since + delay) > now), default=now))
        return min(due)

    def _read(self, child: _Child) -> Judged:
        """The verdict, if any, in what a child has written."""
        line = child.process.read()
        if line is None:
            return []
        if not line:
            self._children.remove(child)
        if not child.loaded:
            child.process.loaded(line)
            child.loaded, self._late_starts = True, 0
            return []
        rows, child.rows = child.rows, ()
        self._slow = self._slow or time.monotonic() - child.since > SLOW_S
        verdicts = child.process.verdicts(line)
        # If it exited between two samples, nothing is lost.
        return list(zip(rows, verdicts, strict=True)) if rows else []

    def _end_late(self, now: float) -> Judged:
        late: Judged = []
        for child in list(self._children):
            if not child.loaded and now - child.since >= START_S:
                self._end(child)
                self._check_starts()
            if child.rows:
                self._slow = self._slow or now - child.since > SLOW_S
                if now - child.since >= self._timeout_s:
                    message = f"reward function {self._name!r} took longer than timeout_s={self._timeout_s}"
                    late += [(row, Verdict({}, "timeout", message)) for row in child.rows]
                    self._end(child)
        return late

    def _check_starts(self) -> None:
        """After a child was not ready in time: as long as others are loaded, it is simply replaced."""
        if self._late_starts is not None:
            self._late_starts += 1
            if self._late_starts < LATE_STARTS or any(child.loaded for child in self._children):
                log.warning("reward function %r was not ready within %g s; retrying", self._name, START_S)
                return
        raise PluginError(f"reward function {self._name!r} was not ready within {START_S:g} s")

    def _end(self, child: _Child) -> None:
        self._children.remove(child)
        child.process.kill()
