"""The process in which the episodes of a worker run: the other end of `episode_process.py`.

It reads the worker's document, and imports the steps as the worker does. One thread hears the worker, posts to the loop
and says when that has settled; what episodes do is told by whichever thread does it.
"""

from __future__ import annotations

import json
import os
import select
import signal
import sys
import threading
import time
from asyncio import CancelledError
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Protocol

import msgspec
import torch

from distflow import log
from distflow.errors import UserError
from distflow.flow.document import read_worker_document
from distflow.runtime.assembly import build_contexts, build_tokenizer, read_setting
from distflow.runtime.attempt import (
    Attempt,
    ContextFull,
    Event,
    Hear,
    LocalAttempt,
    Raised,
    RequestRefused,
    Returned,
    is_full,
)
from distflow.runtime.episode_loop import SETTLE_S, EpisodeLoop
from distflow.runtime.episode_process import (
    CHUNK,
    FROM_WORKER,
    LOOK_EVERY_S,
    STUCK_S,
    AttemptEnded,
    AttemptTold,
    BeginAttempt,
    GiveRecorded,
    GiveTokens,
    LoopCall,
    LoopPost,
    LoopSeen,
    Measure,
    PostSettled,
    ProcessReady,
    ProcessUnfit,
    RefuseCall,
    StepFault,
    StepMeasured,
    ThreadsCrowded,
    decoded,
    frame,
    frames,
)
from distflow.runtime.metrics import MetricStore
from distflow.runtime.sample_errors import EpisodeFailed
from distflow.runtime.steps import EpisodeContext, StepRunner
from distflow.types import Completion, Episode


def run_episodes(document: str, reports: str) -> int:
    """Run the episodes of the worker that `document` describes, in a process of their own; returns its exit code.

    The worker posts through standard input, and reads what is told from the pipe `reports`.
    """
    return serve_episodes(int(reports), partial(_episode_server, Path(document)))


def serve_episodes(reports: int, make: Callable[[WorkerPipe], EpisodeServer]) -> int:
    """Make the server of a process of episodes, and serve; returns the exit code."""
    source = os.dup(0)
    # What users' code reads is not what the worker posts.
    with open(os.devnull) as nothing:
        os.dup2(nothing.fileno(), 0)
    # Slurm may send it to all processes of a job, and the worker decides when this one ends. Unlike one that is
    # ignored, a signal that is handled is as usual in the programs that tools start.
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda number, frame: None)
    pipe = WorkerPipe(source, reports)
    try:
        server = make(pipe)
    except Exception as error:
        # The top of a process: the worker, which has done all of this before, says it in the place of this one.
        why = _whole(f"{type(error).__name__}: {error}")
        pipe.tell(ProcessUnfit(f"the process of the episodes could not begin: {why}"))
        raise
    server.serve()
    return 0


def _episode_server(path: Path, pipe: WorkerPipe) -> EpisodeServer:
    found = read_worker_document(path)
    log.configure(found.worker)
    setting = replace(read_setting(found, path), resumed=None)
    torch.set_num_threads(setting.me.threads)
    metrics = ToldMetrics(pipe.tell)
    contexts = build_contexts(setting, metrics, {}, {}, build_tokenizer(setting), EpisodeContext)
    loop = hosted_loop(pipe)
    made = [step for step in setting.me.steps if step.role == "generate"]
    steps = StepRunner(found.worker, made, contexts, loop=loop)
    plan = setting.plan
    of_validation = {} if plan.val is None else {plan.generate_step.name: plan.val.settings}

    def now(training_step: int, policy_version: int) -> None:
        for context in contexts.values():
            context.training_step, context.policy_version = training_step, policy_version

    served = {step.name: steps.generate_step(step.name, of_validation.get(step.name)) for step in made}
    return EpisodeServer(pipe, served, loop, now)


def hosted_loop(pipe: WorkerPipe) -> EpisodeLoop:
    """Make the loop of a process of episodes, which the worker ends if too many of its threads are left behind."""
    return EpisodeLoop(SETTLE_S, lambda why: pipe.tell(ThreadsCrowded(why)))


class HostedStep(Protocol):
    """What is asked of a generate step here."""

    def attempt(self, episode: Episode, hear: Hear, *, number: int = 1, first: int = 0) -> Attempt:
        """Make an attempt at a sample."""

    def failed(self, error: BaseException, episode: Episode, /) -> Exception:
        """What to raise of what the step has raised."""

    def returned(self, value: object) -> Mapping[str, float]:
        """Take what it returned; raises EpisodeFailed."""


class ToldMetrics(MetricStore):
    """The metrics of the worker, as a step in this process knows them: what it measures is told."""

    def __init__(self, tell: Callable[[StepMeasured], None]) -> None:
        super().__init__()
        self._tell = tell

    def mean(self, name: str, value: float, weight: float = 1.0) -> None:
        """Add `value` with `weight` to a mean."""
        self._say("mean", name, [float(value), float(weight)])

    def explained(self, name: str, sums: tuple[float, float, float, float, float]) -> None:
        """Add to an explained variance."""
        self._say("explained", name, [tuple(map(float, sums))])

    def max(self, name: str, value: float) -> None:
        """Keep the largest."""
        self._say("max", name, [float(value)])

    def min(self, name: str, value: float) -> None:
        """Keep the smallest."""
        self._say("min", name, [float(value)])

    def add(self, name: str, value: float) -> None:
        """Add to a sum."""
        self._say("add", name, [float(value)])

    def set(self, name: str, value: float) -> None:
        """Set a value."""
        self._say("set", name, [float(value)])

    def _say(self, measure: Measure, name: object, values: list[float | tuple[float, ...]]) -> None:
        self._tell(StepMeasured(measure, str(name), values))


class WorkerPipe:
    """The pipes to and from the worker."""

    def __init__(self, source: int, into: int) -> None:
        self._source = source
        self._into = into
        self._mutex = threading.Lock()
        self._received = bytearray()
        self._poll = select.poll()
        self._poll.register(source, select.POLLIN)
        os.set_blocking(into, False)
        self._room = select.poll()
        self._room.register(into, select.POLLOUT)

    def tell(self, message: msgspec.Struct) -> None:
        """Tell the worker something; any thread may. If it takes in nothing for STUCK_S, the process ends."""
        data = memoryview(frame(message))
        with self._mutex:
            while data:
                try:
                    data = data[os.write(self._into, data) :]
                except BlockingIOError:
                    if not self._room.poll(STUCK_S * 1000):
                        print(f"the worker has read nothing for {STUCK_S:g} s", file=sys.stderr, flush=True)
                        os._exit(1)

    def posts(self, limit_s: float) -> Sequence[LoopPost] | None:
        """What the worker has posted, after so long at most; None: there is nothing more to come."""
        if not self._poll.poll(limit_s * 1000):
            return []
        data = os.read(self._source, CHUNK)
        self._received += data
        return [FROM_WORKER.decode(one) for one in frames(self._received)] if data else None


class EpisodeServer:
    """Runs the episodes of a worker in this process, whose main thread calls `serve`. `now` is told the training step
    and the version before episodes go on."""

    def __init__(
        self, pipe: WorkerPipe, steps: Mapping[str, HostedStep], loop: EpisodeLoop, now: Callable[[int, int], None]
    ) -> None:
        self._pipe = pipe
        self._steps = steps
        self._loop = loop
        self._now = now
        self._attempts: dict[int, Attempt] = {}
        self._episodes = 0
        self._look_at = 0.0
        self._seen = LoopSeen()
        self._places: dict[int, str] = {}

    def serve(self) -> None:
        """Run what is posted, until nothing more comes."""
        self._pipe.tell(ProcessReady())
        while (posts := self._pipe.posts(LOOK_EVERY_S)) is not None:
            for post in posts:
                self._take(post)
            if time.monotonic() >= self._look_at:
                self._look()
                self._look_at = time.monotonic() + LOOK_EVERY_S
        self._loop.close()

    def _take(self, post: LoopPost) -> None:
        self._now(post.training_step, post.policy_version)
        self._loop.count(post.episodes - self._episodes)
        self._episodes = post.episodes
        calls = [call for one in post.calls if (call := self._call(one)) is not None]
        self._loop.post(calls, [moving for number in post.moving if (moving := self._attempts.get(number)) is not None])
        if self._loop.settle():
            self._pipe.tell(PostSettled(post.number))

    def _call(self, told: LoopCall) -> Callable[[], None] | None:
        """What is to run on the loop; None: its attempt has ended."""
        if isinstance(told, BeginAttempt):
            step = self._steps[told.step]
            about = (told.prompt_ids, decoded(told.prompt), json.loads(told.task))
            episode = Episode(told.uid, told.sample, *about)
            hear = partial(self._hear, told.attempt, step)
            attempt = step.attempt(episode, hear, number=told.number, first=told.first)
            self._attempts[told.attempt] = attempt
            return attempt.begin
        # Looked up once: the thread on which it comes to its end forgets it.
        known = self._attempts.get(told.attempt)
        if known is None:
            return None
        attempt = known
        if isinstance(told, GiveTokens):
            episode = attempt.episode
            written = (decoded(told.response), episode.task, told.finish_reason, told.response_ids)
            found = Completion(episode.prompt, *written)
            return partial(attempt.answer, told.call, found)
        if isinstance(told, GiveRecorded):
            return partial(attempt.answer, told.call, told.answer)
        if isinstance(told, RefuseCall):
            error = (ContextFull if told.full else RequestRefused)(told.did, told.more)
            return partial(attempt.refuse, told.call, error)
        self._attempts.pop(told.attempt, None)
        return attempt.close

    def _hear(self, number: int, step: HostedStep, attempt: Attempt, event: Event) -> None:
        """Tell what an attempt has done; by the loop's thread, or that of the attempt."""
        if not isinstance(event, Returned | Raised):
            self._pipe.tell(AttemptTold(number, event))
            return
        closed = self._attempts.pop(number, None) is None
        fields: dict[str, float] = {}
        error = event.error if isinstance(event, Raised) else None
        if isinstance(event, Returned):
            try:
                fields = {name: float(value) for name, value in step.returned(event.value).items()}
            except Exception as failed:  # of a value of a class of the user's, too
                error = failed
        fault = None if error is None else _fault(error, step, attempt.episode, closed=closed)
        self._pipe.tell(AttemptEnded(number, attempt.calls, fields, fault))

    def _look(self) -> None:
        """Tell what has changed of what is waited for."""
        waiting = [
            (number, attempt)
            for number, attempt in self._attempts.copy().items()
            if isinstance(attempt, LocalAttempt) and not attempt.waits
        ]
        places = {number: attempt.place for number, attempt in waiting}
        changed = {number: place for number, place in places.items() if self._places.get(number) != place}
        seen = LoopSeen(self._loop.blocked(), self._loop.left_behind(), self._loop.left_tasks(), self._loop.preparing)
        if changed or seen != self._seen:
            self._pipe.tell(msgspec.structs.replace(seen, places=changed))
        self._places, self._seen = places, seen


def _fault(error: BaseException, step: HostedStep, episode: Episode, *, closed: bool) -> StepFault:
    """What the worker is to hear of what a step has raised; `closed`: when it was not wanted any more."""
    if closed and isinstance(error, CancelledError):
        return StepFault("cancelled", "")
    if is_full(error):
        full = _leaf(error)
        return StepFault("full", full.did, full.more)
    if isinstance(error, RequestRefused):
        return StepFault("refused", error.did, error.more)
    if isinstance(error, UserError):
        return StepFault("settings", _whole(str(error)))
    found = step.failed(error, episode)
    if isinstance(found, EpisodeFailed):
        return StepFault("failed", *map(_whole, (str(found), found.reason, found.cause, found.place)))
    return StepFault("setup", _whole(str(found)))


def _whole(text: str) -> str:
    """The text of an error, with halves of surrogate pairs written out."""
    return text.encode("utf-8", "backslashreplace").decode()


def _leaf(error: BaseException) -> ContextFull:
    """The first of the errors of branches, all of which say that there is no more room."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    assert isinstance(error, ContextFull), "all of them say so"
    return error
