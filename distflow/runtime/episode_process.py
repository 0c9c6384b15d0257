"""The episodes of one worker in a process of their own: `layout.pools.NAME.environments: process`.

What a step or its tools compute there holds up no engine, and what ends, floods or forks there ends no worker.

    engine's thread · EpisodeProcess ──Post──▶ EpisodeServer · EpisodeLoop · attempts
                            ◀──Told, Ended, Settled, Seen──

The worker's end has what `EpisodeLoop` has, and attempts that pass on what they are posted: whoever drives them sees no
difference. The process keeps nothing that the worker needs: if it ends, in whatever way, its episodes have failed, and
the next post starts another one. It reads the worker's document, and imports the steps as the worker does.

Both pipes carry frames: a length of four bytes, and msgpack.
"""

from __future__ import annotations

import json
import os
import select
import threading
import time
from asyncio import CancelledError
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import partial
from itertools import count
from numbers import Integral
from queue import SimpleQueue
from typing import Any, Literal, Protocol

import msgspec

from distflow.comm.kept_process import KeptProcess
from distflow.errors import UserError
from distflow.log import logger
from distflow.runtime.attempt import (
    AskedTokens,
    AskedTool,
    Attempt,
    ContextFull,
    Event,
    Hear,
    LocalAttempt,
    Raised,
    RequestRefused,
    Returned,
    ToolAnswered,
    Withdrawn,
    is_full,
)
from distflow.runtime.episode_loop import CLEANUP_S, CLOSE_S, EpisodeLoop, Patience, SetupFailed
from distflow.runtime.metrics import MetricStore
from distflow.runtime.sample_errors import EpisodeFailed
from distflow.types import CallNumber, Completion, Episode, FinishReason, SampleKey, Uid

ROUND_TRIP_S = 0.01
"""So long the engine's thread waits for the process, which itself waits for episodes, but for some patience."""
BOOT_S = 120.0
"""So long it may take to import the steps, on a busy machine."""
STUCK_S = 60.0
"""A process that takes in nothing for so long is ended."""
LOOK_EVERY_S = 0.25
"""So often it tells what its episodes wait for."""
_CHUNK = 1 << 18
_LENGTH = 4
Measure = Literal["mean", "explained", "max", "min", "add", "set"]
log = logger(__name__)


# -- from the worker


class Begin(msgspec.Struct, tag=True):
    """Begin an attempt at a sample."""

    attempt: int
    step: str
    uid: Uid
    sample: int
    prompt_ids: tuple[int, ...]
    prompt: bytes
    task: str
    """As JSON text."""
    number: int
    first: int


class Answer(msgspec.Struct, tag=True):
    """The model has written this."""

    attempt: int
    call: CallNumber
    response: bytes
    finish_reason: FinishReason
    response_ids: tuple[int, ...]


class Recorded(msgspec.Struct, tag=True):
    """A tool has answered this before; b"": it has not."""

    attempt: int
    call: CallNumber
    answer: bytes


class Refuse(msgspec.Struct, tag=True):
    """There will be no answer."""

    attempt: int
    call: CallNumber
    did: str
    more: str
    full: bool


class Close(msgspec.Struct, tag=True):
    """The sample is not wanted any more."""

    attempt: int


class Post(msgspec.Struct):
    """What is to happen on the loop, in this order."""

    number: int
    training_step: int
    policy_version: int
    episodes: int
    """So many are open."""
    calls: list[Begin | Answer | Recorded | Refuse | Close]
    moving: list[int]


# -- from the process


class Ready(msgspec.Struct, tag=True):
    """It has imported its steps."""


class Unfit(msgspec.Struct, tag=True):
    """It cannot serve them, now or later."""

    why: str


class Told(msgspec.Struct, tag=True):
    """What an attempt has done."""

    attempt: int
    event: AskedTokens | Withdrawn | AskedTool | ToolAnswered


class Fault(msgspec.Struct):
    """What a step has raised. `kind` says by what the worker is to hear of it."""

    kind: Literal["failed", "refused", "full", "settings", "setup", "cancelled"]
    message: str
    reason: str = ""
    cause: str = ""
    place: str = ""


class Ended(msgspec.Struct, tag=True):
    """An attempt has come to its end."""

    attempt: int
    calls: int
    fields: dict[str, float]
    fault: Fault | None


class Settled(msgspec.Struct, tag=True):
    """All posts up to this one have had their effect, or take longer than is waited for."""

    number: int


class Seen(msgspec.Struct, tag=True):
    """What holds up the loop, which threads are left behind, and where attempts wait, as far as that has changed."""

    blocked: str
    left_behind: list[str]
    places: dict[int, str]


class Crowded(msgspec.Struct, tag=True):
    """Too many threads are left behind."""

    why: str


class Measured(msgspec.Struct, tag=True):
    """A step has measured something."""

    measure: Measure
    name: str
    values: list[Any]


_FROM_PROCESS = msgspec.msgpack.Decoder(Ready | Unfit | Told | Ended | Settled | Seen | Crowded | Measured)
_FROM_WORKER = msgspec.msgpack.Decoder(Post)


def _number(value: object) -> float:
    """Write numbers of other libraries as plain ones."""
    if isinstance(value, Integral):
        return int(value)
    return float(value)  # type: ignore[arg-type]  # raises TypeError


_ENCODER = msgspec.msgpack.Encoder(enc_hook=_number)


def _frame(message: msgspec.Struct) -> bytes:
    data = _ENCODER.encode(message)
    return len(data).to_bytes(_LENGTH, "big") + data


def _frames(received: bytearray) -> Iterator[bytes]:
    """Take the whole frames from what was received."""
    while len(received) >= _LENGTH and len(received) >= (end := _LENGTH + int.from_bytes(received[:_LENGTH], "big")):
        yield bytes(received[_LENGTH:end])
        del received[:end]


def _encoded(text: str) -> bytes:
    """Write any text, that of half a surrogate pair too."""
    return text.encode("utf-8", "surrogatepass")


def _decoded(text: bytes) -> str:
    return text.decode("utf-8", "surrogatepass")


# -- the worker's end


class RemoteAttempt:
    """An attempt that runs in the process of the worker's episodes."""

    def __init__(self, process: EpisodeProcess, step: str, episode: Episode, hear: Hear, first: Begin) -> None:
        self.episode = episode
        self.key: SampleKey = (episode.uid.position, episode.sample)
        self.blocking = process.blocking[step]
        self.number = first.number
        self.calls = first.first
        self.place = ""
        self.id = first.attempt
        self.closed = False
        self._process = process
        self._hear = hear
        self._first = first

    def begin(self) -> None:
        """As any attempt does."""
        if not self.closed:
            self._process.begin(self, self._first)

    def answer(self, call: CallNumber, found: Completion | bytes) -> None:
        """As any attempt does."""
        if isinstance(found, bytes):
            self._process.put(Recorded(self.id, call, found))
        else:
            told = (_encoded(found.response), found.finish_reason, found.response_ids)
            self._process.put(Answer(self.id, call, *told))

    def refuse(self, call: CallNumber, error: RequestRefused) -> None:
        """As any attempt does."""
        full = isinstance(error, ContextFull)
        self._process.put(Refuse(self.id, call, error.did, error.more, full))

    def close(self) -> None:
        """As any attempt does."""
        self.closed = True
        self._process.put(Close(self.id))

    def hear(self, event: Event) -> None:
        """Pass on what it has done."""
        if isinstance(event, AskedTokens | AskedTool):
            self.calls = max(self.calls, event.call[0] + 1)
        self._hear(self, event)


class EpisodeProcess:
    """The worker's end of the process of its episodes, which has what `EpisodeLoop` has.

    `start` starts the process; `now` returns the training step and the version; `blocking` says of each step whether it
    is a plain function; `metrics` gets what steps measure, `crowded` why the worker is to begin anew.
    """

    def __init__(
        self,
        start: Callable[[], KeptProcess],
        blocking: Mapping[str, bool],
        now: Callable[[], tuple[int, int]],
        metrics: MetricStore,
        crowded: Callable[[str], None],
    ) -> None:
        self.blocking = blocking
        self._start = start
        self._now = now
        self._metrics = metrics
        self._crowded = crowded
        self._patience = Patience(ROUND_TRIP_S)
        self._numbers = count(1)
        self._posted = 0
        self._episodes = 0
        self._calls: list[Begin | Answer | Recorded | Refuse | Close] = []
        """Of the next post."""
        self._life = self._begin_life()

    def attempt(self, step: str, episode: Episode, hear: Hear, *, number: int, first: int) -> RemoteAttempt:
        """Make an attempt of a step."""
        about = (episode.uid, episode.sample, episode.prompt_ids, _encoded(episode.prompt), json.dumps(episode.task))
        return RemoteAttempt(self, step, episode, hear, Begin(next(self._numbers), step, *about, number, first))

    # -- as of a loop

    def post(self, calls: Collection[Callable[[], None]], moving: Collection[object] = ()) -> None:
        """Have the process run these, in this order."""
        if self._life.over:
            self._life = self._begin_life()
        for call in calls:
            call()
        told, self._calls = self._calls, []
        self._posted += 1
        numbers = [one.id for one in moving if isinstance(one, RemoteAttempt)]
        self._life.put(Post(self._posted, *self._now(), self._episodes, told, numbers))

    def settle(self) -> None:
        """Wait until all that was posted has had its effect there. Gives up after a moment, but where the process has
        still to import the steps: nothing else could be done meanwhile."""
        life = self._life
        life.await_start()
        with life.changed:
            self._patience.wait(life.changed, lambda: life.settled >= self._posted or life.over)

    def blocked(self) -> str:
        """Where a coroutine holds up all others, as the process has last said."""
        return self._life.seen.blocked

    def left_behind(self) -> list[str]:
        """Where threads are busy whose episodes are over, as the process has last said."""
        return self._life.seen.left_behind

    def count(self, more: int) -> None:
        """So many more episodes are open."""
        self._episodes += more

    def close(self) -> None:
        """Have the process end, with what its episodes share; it is killed if that takes long."""
        self._life.end()

    # -- for attempts

    def begin(self, attempt: RemoteAttempt, first: Begin) -> None:
        """Begin an attempt with the next post."""
        if self._life.add(attempt):
            self.put(first)

    def put(self, call: Begin | Answer | Recorded | Refuse | Close) -> None:
        """Do something with the next post."""
        self._calls.append(call)

    def _begin_life(self) -> _Life:
        return _Life(self._start(), self._measured, self._crowded)

    def _measured(self, told: Measured) -> None:
        getattr(self._metrics, told.measure)(told.name, *told.values)


class _Life:
    """One process, from its start to its end: a thread writes to it, and another one hears it."""

    def __init__(
        self, process: KeptProcess, measured: Callable[[Measured], None], crowded: Callable[[str], None]
    ) -> None:
        self.changed = threading.Condition()
        self.settled = 0
        self.over = self._ready = self._ending = False
        self.seen = Seen("", [], {})
        self._unfit = self._killed = ""
        """Why it cannot serve; why it was killed."""
        self._process = process
        self._measured = measured
        self._crowded = crowded
        self._attempts: dict[int, RemoteAttempt] = {}
        self._writes: SimpleQueue[bytes] = SimpleQueue()
        self._threads = [
            threading.Thread(target=run, name="episodes", daemon=True) for run in (self._write, self._read)
        ]
        for thread in self._threads:
            thread.start()

    def add(self, attempt: RemoteAttempt) -> bool:
        """Expect an attempt; returns whether it can begin. If not, it has failed."""
        with self.changed:
            over = self.over
            if not over:
                self._attempts[attempt.id] = attempt
        if over:
            attempt.hear(self._lost())
        return not over

    def put(self, post: Post) -> None:
        """Have it written."""
        self._writes.put(_frame(post))

    def await_start(self) -> None:
        """Return when it has imported its steps, or has ended."""
        with self.changed:
            if self.changed.wait_for(lambda: self._ready or self.over, BOOT_S):
                return
        self._kill(f"it had not imported the steps after {BOOT_S:g} s")

    def end(self) -> None:
        """End it in order, or by force."""
        self._ending = True
        self._writes.put(b"")
        _, reads = self._threads
        reads.join(CLEANUP_S + CLOSE_S)
        self._kill("")
        reads.join(CLOSE_S)

    # -- by its threads

    def _write(self) -> None:
        while data := self._writes.get():
            if not self._process.tell(data, STUCK_S):
                self._kill(f"it took in nothing for {STUCK_S:g} s")
                return
        self._process.finish()

    def _read(self) -> None:
        received = bytearray()
        source = select.poll()
        source.register(self._process.reports, select.POLLIN)
        while not self._process.ended:
            if not source.poll(LOOK_EVERY_S * 1000):
                continue
            data = os.read(self._process.reports, _CHUNK)
            if not data:
                break
            received += data
            for frame in _frames(received):
                self._hear(_FROM_PROCESS.decode(frame))
        self._process.close()
        with self.changed:
            self.over = True
            left = [attempt for attempt in self._attempts.values() if not attempt.closed]
            self.changed.notify_all()
        self._writes.put(b"")
        for attempt in () if self._ending else left:
            attempt.hear(self._lost())

    def _hear(self, message: Ready | Unfit | Told | Ended | Settled | Seen | Crowded | Measured) -> None:
        if isinstance(message, Told | Ended):
            self._hear_attempt(message)
        elif isinstance(message, Measured):
            self._measured(message)
        elif isinstance(message, Crowded):
            self._crowded(message.why)
        elif isinstance(message, Seen):
            self.seen = message
            for number in self._attempts.keys() & message.places.keys():
                self._attempts[number].place = message.places[number]
        else:
            with self.changed:
                self._ready = self._ready or isinstance(message, Ready)
                self._unfit = message.why if isinstance(message, Unfit) else ""
                self.settled = message.number if isinstance(message, Settled) else self.settled
                self.changed.notify_all()

    def _hear_attempt(self, message: Told | Ended) -> None:
        attempt = self._attempts.get(message.attempt)
        if attempt is None:
            return
        if isinstance(message, Told):
            attempt.hear(message.event)
            return
        del self._attempts[message.attempt]
        attempt.calls = message.calls
        attempt.hear(Returned(message.fields) if message.fault is None else Raised(_raised(message.fault)))

    def _kill(self, why: str) -> None:
        self._killed = self._killed or why
        self._process.kill()

    def _lost(self) -> Raised:
        """What its attempts have come to."""
        if self._unfit:
            return Raised(SetupFailed(self._unfit))
        code = self._process.code or 0
        how = f"by signal {code - 128}" if code > 128 else f"with exit code {code}"
        did = f"lost the process of its episodes, which ended {how}"
        why = f": {self._killed}" if self._killed else ""
        return Raised(
            RequestRefused(did, f"{why} — the file `*.episodes.log` among the run's logs has what it printed")
        )


def _raised(fault: Fault) -> BaseException:
    """What the worker hears of what a step has raised."""
    if fault.kind == "failed":
        return EpisodeFailed(fault.message, fault.reason, fault.cause, fault.place)
    if fault.kind in ("refused", "full"):
        return (ContextFull if fault.kind == "full" else RequestRefused)(fault.message, fault.reason)
    plain = {"settings": UserError, "setup": SetupFailed, "cancelled": CancelledError}
    return plain[fault.kind](fault.message)


# -- the end of the process


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

    def __init__(self, tell: Callable[[Measured], None]) -> None:
        super().__init__()
        self._tell = tell

    def mean(self, name: str, value: float, weight: float = 1.0) -> None:
        """Add `value` with `weight` to a mean."""
        self._tell(Measured("mean", name, [value, weight]))

    def explained(self, name: str, sums: tuple[float, float, float, float, float]) -> None:
        """Add to an explained variance."""
        self._tell(Measured("explained", name, [sums]))

    def max(self, name: str, value: float) -> None:
        """Keep the largest."""
        self._tell(Measured("max", name, [value]))

    def min(self, name: str, value: float) -> None:
        """Keep the smallest."""
        self._tell(Measured("min", name, [value]))

    def add(self, name: str, value: float) -> None:
        """Add to a sum."""
        self._tell(Measured("add", name, [value]))

    def set(self, name: str, value: float) -> None:
        """Set a value."""
        self._tell(Measured("set", name, [value]))


class WorkerPipe:
    """The pipes to and from the worker."""

    def __init__(self, source: int, into: int) -> None:
        self._source = source
        self._into = into
        self._mutex = threading.Lock()
        self._received = bytearray()
        self._poll = select.poll()
        self._poll.register(source, select.POLLIN)

    def tell(self, message: msgspec.Struct) -> None:
        """Tell the worker something; any thread may."""
        data = memoryview(_frame(message))
        with self._mutex:
            while data:
                try:
                    data = data[os.write(self._into, data) :]
                except BlockingIOError:
                    select.select([], [self._into], [], STUCK_S)

    def posts(self, limit_s: float) -> Sequence[Post] | None:
        """What the worker has posted, after so long at most; None: there is nothing more to come."""
        if not self._poll.poll(limit_s * 1000):
            return []
        data = os.read(self._source, _CHUNK)
        self._received += data
        return [_FROM_WORKER.decode(frame) for frame in _frames(self._received)] if data else None


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
        self._seen = Seen("", [], {})
        self._places: dict[int, str] = {}

    def serve(self) -> None:
        """Run what is posted, until nothing more comes."""
        self._pipe.tell(Ready())
        while (posts := self._pipe.posts(LOOK_EVERY_S)) is not None:
            for post in posts:
                self._take(post)
            if time.monotonic() >= self._look_at:
                self._look()
                self._look_at = time.monotonic() + LOOK_EVERY_S
        self._loop.close()

    def _take(self, post: Post) -> None:
        self._now(post.training_step, post.policy_version)
        self._loop.count(post.episodes - self._episodes)
        self._episodes = post.episodes
        calls = [call for one in post.calls if (call := self._call(one)) is not None]
        self._loop.post(calls, [self._attempts[number] for number in post.moving if number in self._attempts])
        self._loop.settle()
        self._pipe.tell(Settled(post.number))

    def _call(self, told: Begin | Answer | Recorded | Refuse | Close) -> Callable[[], None] | None:
        """What is to run on the loop; None: its attempt has ended."""
        if isinstance(told, Begin):
            step = self._steps[told.step]
            about = (told.prompt_ids, _decoded(told.prompt), json.loads(told.task))
            episode = Episode(told.uid, told.sample, *about)
            hear = partial(self._hear, told.attempt, step)
            attempt = step.attempt(episode, hear, number=told.number, first=told.first)
            self._attempts[told.attempt] = attempt
            return attempt.begin
        if told.attempt not in self._attempts:
            return None
        attempt = self._attempts[told.attempt]
        if isinstance(told, Answer):
            episode = attempt.episode
            written = (_decoded(told.response), episode.task, told.finish_reason, told.response_ids)
            found = Completion(episode.prompt, *written)
            return partial(attempt.answer, told.call, found)
        if isinstance(told, Recorded):
            return partial(attempt.answer, told.call, told.answer)
        if isinstance(told, Refuse):
            error = (ContextFull if told.full else RequestRefused)(told.did, told.more)
            return partial(attempt.refuse, told.call, error)
        del self._attempts[told.attempt]
        return attempt.close

    def _hear(self, number: int, step: HostedStep, attempt: Attempt, event: Event) -> None:
        """Tell what an attempt has done; by the loop's thread, or that of the attempt."""
        if not isinstance(event, Returned | Raised):
            self._pipe.tell(Told(number, event))
            return
        self._attempts.pop(number, None)
        fields: Mapping[str, float] = {}
        error = event.error if isinstance(event, Raised) else None
        if isinstance(event, Returned):
            try:
                fields = step.returned(event.value)
            except EpisodeFailed as failed:
                error = failed
        fault = None if error is None else _fault(error, step, attempt.episode)
        self._pipe.tell(Ended(number, attempt.calls, dict(fields), fault))

    def _look(self) -> None:
        """Tell what has changed of what is waited for."""
        waiting = [
            (number, attempt)
            for number, attempt in self._attempts.copy().items()
            if isinstance(attempt, LocalAttempt) and not attempt.waits
        ]
        places = {number: attempt.place for number, attempt in waiting}
        changed = {number: place for number, place in places.items() if self._places.get(number) != place}
        seen = Seen(self._loop.blocked(), self._loop.left_behind(), changed)
        if changed or (seen.blocked, seen.left_behind) != (self._seen.blocked, self._seen.left_behind):
            self._pipe.tell(seen)
        self._places, self._seen = places, seen


def _fault(error: BaseException, step: HostedStep, episode: Episode) -> Fault:
    """What the worker is to hear of what a step has raised."""
    if isinstance(error, CancelledError):
        return Fault("cancelled", "")
    if is_full(error):
        full = _leaf(error)
        return Fault("full", full.did, full.more)
    if isinstance(error, RequestRefused):
        return Fault("refused", error.did, error.more)
    if isinstance(error, UserError):
        return Fault("settings", str(error))
    found = step.failed(error, episode)
    if isinstance(found, EpisodeFailed):
        return Fault("failed", str(found), found.reason, found.cause, found.place)
    return Fault("setup", str(found))


def _leaf(error: BaseException) -> ContextFull:
    """The first of the errors of branches, all of which say that there is no more room."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    assert isinstance(error, ContextFull), "all of them say so"
    return error
