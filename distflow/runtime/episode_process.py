"""The episodes of one worker in a process of their own: `layout.pools.NAME.environments: process`.

What a step or its tools compute there holds up no engine, and what ends, floods or forks there ends no worker.

    engine's thread · EpisodeProcess ──LoopPost──▶ EpisodeServer · EpisodeLoop · attempts
                         ◀──AttemptTold, AttemptEnded, PostSettled──

The worker's end is what `EpisodeLoop` is, and attempts that pass on what they are posted: whoever drives them sees no
difference. The process keeps nothing that the worker needs: if it ends, in whatever way, its episodes have failed, and
the next post starts another one. It reads the worker's document, and imports the steps as the worker does.

Both pipes carry frames: a length of four bytes, and msgpack.
"""

from __future__ import annotations

import json
import os
import select
import threading
from asyncio import CancelledError
from collections.abc import Callable, Collection, Iterator
from contextlib import AbstractContextManager, nullcontext
from itertools import count
from numbers import Integral
from queue import SimpleQueue
from typing import Literal

import msgspec

from distflow.comm.kept_process import KeptProcess
from distflow.errors import UserError
from distflow.log import logger
from distflow.runtime.attempt import (
    AskedTokens,
    AskedTool,
    ContextFull,
    Event,
    Hear,
    Raised,
    RequestRefused,
    Returned,
    ToolAnswered,
    Withdrawn,
)
from distflow.runtime.episode_loop import CLOSE_S, LEAVE_S, AttemptedStep, Begin, SetupFailed, StepSetup
from distflow.runtime.metrics import MetricStore
from distflow.runtime.sample_errors import EpisodeFailed
from distflow.runtime.waits import SettlePatience
from distflow.types import CallNumber, Completion, Episode, FinishReason, SampleKey, Uid

ROUND_TRIP_S = 0.05
"""So long the engine's thread waits for word from the process, which itself waits for episodes, but for some patience:
on a busy machine the way there and back takes as long. One that has not answered is not waited for again before it
does: something in it lets no other thread run."""
BOOT_S = 120.0
"""So long it may take to import the steps, on a busy machine."""
UNBORN = 2
"""If so many in a row end before they have imported the steps, no other is started."""
STUCK_S = 60.0
"""A process that takes in nothing for so long is ended."""
LOOK_EVERY_S = 0.25
"""So often it tells what its episodes wait for."""
CHUNK = 1 << 18
MOST_BYTES = 256 << 20
"""Of a message: tokens of a context that no model has."""
_LENGTH = 4
_SEE = " — the file `*.episodes.log` among the run's logs has what it printed"
Measure = Literal["mean", "explained", "max", "min", "add", "set"]
log = logger(__name__)


# -- from the worker


class BeginAttempt(msgspec.Struct, tag=True):
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


class GiveTokens(msgspec.Struct, tag=True):
    """The model has written this."""

    attempt: int
    call: CallNumber
    response: bytes
    finish_reason: FinishReason
    response_ids: tuple[int, ...]


class GiveRecorded(msgspec.Struct, tag=True):
    """A tool has answered this before; b"": it has not."""

    attempt: int
    call: CallNumber
    answer: bytes


class RefuseCall(msgspec.Struct, tag=True):
    """There will be no answer."""

    attempt: int
    call: CallNumber
    did: str
    more: str
    full: bool


class CloseAttempt(msgspec.Struct, tag=True):
    """The sample is not wanted any more."""

    attempt: int


LoopCall = BeginAttempt | GiveTokens | GiveRecorded | RefuseCall | CloseAttempt


class LoopPost(msgspec.Struct):
    """What is to happen on the loop, in this order."""

    number: int
    training_step: int
    policy_version: int
    episodes: int
    """So many are open."""
    calls: list[LoopCall]
    moving: list[int]


# -- from the process


class ProcessReady(msgspec.Struct, tag=True):
    """It has imported its steps."""


class ProcessUnfit(msgspec.Struct, tag=True):
    """It cannot serve them, now or later."""

    why: str


class AttemptTold(msgspec.Struct, tag=True):
    """What an attempt has done."""

    attempt: int
    event: AskedTokens | Withdrawn | AskedTool | ToolAnswered


class StepFault(msgspec.Struct):
    """What a step has raised. `kind` says by what the worker is to hear of it."""

    kind: Literal["failed", "refused", "full", "settings", "setup", "cancelled"]
    message: str
    reason: str = ""
    cause: str = ""
    place: str = ""


class AttemptEnded(msgspec.Struct, tag=True):
    """An attempt has come to its end."""

    attempt: int
    calls: int
    fields: dict[str, float]
    fault: StepFault | None


class PostSettled(msgspec.Struct, tag=True):
    """All posts up to this one have had their effect, but for threads that take longer than is waited for."""

    number: int


class LoopSeen(msgspec.Struct, tag=True):
    """What holds up the loop, which threads are left behind, which tasks were left, whether episodes wait for what they
    share, and where attempts wait, as far as that has changed."""

    blocked: str = ""
    left_behind: list[str] = []
    left_tasks: list[str] = []
    preparing: bool = False
    places: dict[int, str] = {}


class ThreadsCrowded(msgspec.Struct, tag=True):
    """Too many threads are left behind: it is to be ended."""

    why: str


class StepMeasured(msgspec.Struct, tag=True):
    """A step has measured something."""

    measure: Measure
    name: str
    values: list[float | tuple[float, ...]]


FromProcess = (
    ProcessReady | ProcessUnfit | AttemptTold | AttemptEnded | PostSettled | LoopSeen | ThreadsCrowded | StepMeasured
)
FROM_PROCESS = msgspec.msgpack.Decoder(FromProcess)
FROM_WORKER = msgspec.msgpack.Decoder(LoopPost)


def _number(value: object) -> float:
    """Write numbers of other libraries as plain ones."""
    if isinstance(value, Integral):
        return int(value)
    return float(value)  # type: ignore[arg-type]  # raises TypeError


_ENCODER = msgspec.msgpack.Encoder(enc_hook=_number)


def frame(message: msgspec.Struct) -> bytes:
    """Write a message with its length before it; raises ValueError for one that is too long."""
    data = _ENCODER.encode(message)
    if len(data) > MOST_BYTES - _LENGTH:
        raise ValueError(f"{len(data)} bytes are too much for the process of episodes; at most {MOST_BYTES}")
    return len(data).to_bytes(_LENGTH, "big") + data


def frames(received: bytearray) -> Iterator[bytes]:
    """Take the whole frames from what was received; raises ValueError for one that is too long to be one."""
    while len(received) >= _LENGTH:
        end = _LENGTH + int.from_bytes(received[:_LENGTH], "big")
        if end > MOST_BYTES:
            raise ValueError(f"a message of {end} bytes; at most {MOST_BYTES}")
        if len(received) < end:
            return
        yield bytes(received[_LENGTH:end])
        del received[:end]


def encoded(text: str) -> bytes:
    """Write any text, that of half a surrogate pair too."""
    return text.encode("utf-8", "surrogatepass")


def decoded(text: bytes) -> str:
    """Read it again."""
    return text.decode("utf-8", "surrogatepass")


# -- the worker's end


class RemoteAttempt:
    """An attempt that runs in the process of the worker's episodes."""

    def __init__(
        self, process: EpisodeProcess, episode: Episode, hear: Hear, first: BeginAttempt, *, blocking: bool
    ) -> None:
        self.episode = episode
        self.key: SampleKey = (episode.uid.position, episode.sample)
        self.blocking = blocking
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
            self._process.put(GiveRecorded(self.id, call, found))
        else:
            told = (encoded(found.response), found.finish_reason, found.response_ids)
            self._process.put(GiveTokens(self.id, call, *told))

    def refuse(self, call: CallNumber, error: RequestRefused) -> None:
        """As any attempt does."""
        full = isinstance(error, ContextFull)
        self._process.put(RefuseCall(self.id, call, error.did, error.more, full))

    def close(self) -> None:
        """As any attempt does."""
        self.closed = True
        self._process.put(CloseAttempt(self.id))

    def hear(self, event: Event) -> None:
        """Pass on what it has done."""
        if isinstance(event, AskedTokens | AskedTool):
            self.calls = max(self.calls, event.call[0] + 1)
        self._hear(self, event)


class EpisodeProcess:
    """The worker's end of the process of its episodes: `Episodes`, as `EpisodeLoop` is.

    `start` starts the process; `now` returns the training step and the version; `metrics` gets what steps measure;
    `shown` shows that it is waited for, by this name.
    """

    def __init__(
        self,
        start: Callable[[], KeptProcess],
        now: Callable[[], tuple[int, int]],
        metrics: MetricStore,
        shown: Callable[[str], AbstractContextManager[object]] = nullcontext,
    ) -> None:
        self._start = start
        self._now = now
        self._metrics = metrics
        self._shown = shown
        self._patience = SettlePatience(ROUND_TRIP_S)
        self._numbers = count(1)
        self._posted = self._awaited = self._unborn = 0
        """Numbers of posts: the newest one, and the newest that was waited for; and how many processes, the
        last ones, have ended before they had imported the steps."""
        self._episodes = 0
        self._calls: list[LoopCall] = []
        """Of the next post."""
        self._life = self._begin_life()

    # -- as of any episodes

    def attempt(self, step: AttemptedStep, episode: Episode, hear: Hear, *, number: int, first: int) -> RemoteAttempt:
        """Make an attempt of a step there, where its `begin` is another one."""
        about = (episode.uid, episode.sample, episode.prompt_ids, encoded(episode.prompt), json.dumps(episode.task))
        begin = BeginAttempt(next(self._numbers), step.plan.name, *about, number, first)
        return RemoteAttempt(self, episode, hear, begin, blocking=step.blocking)

    def behind(self, setup: StepSetup, begin: Begin, *, blocking: bool) -> Begin:
        """As of any episodes: the process enters its own."""
        return begin

    def post(self, calls: Collection[Callable[[], None]], moving: Collection[object] = ()) -> None:
        """Have the process run these, in this order; raises SetupFailed if it dies again and again as it starts."""
        if self._life.over:
            self._unborn = 0 if self._life.ready else self._unborn + 1
            if self._unborn >= UNBORN:
                how, why = self._life.end
                did = f"ended {how} before it had imported the steps, {UNBORN} times in a row"
                raise SetupFailed(f"the process of the episodes {did}{why}")
            self._life, self._awaited = self._begin_life(), 0
        for call in calls:
            call()
        told, self._calls = self._calls, []
        self._posted += 1
        numbers = [one.id for one in moving if isinstance(one, RemoteAttempt)]
        self._life.put(LoopPost(self._posted, *self._now(), self._episodes, told, numbers))

    def await_start(self) -> None:
        """Wait until the process has imported the steps, or has ended; raises SetupFailed for one that cannot."""
        if not self._life.begun:
            with self._shown("the process of its episodes"):
                self._life.await_start()

    def settle(self) -> bool:
        """Wait until all that was posted has had its effect there; returns whether it has. Gives up after a moment, but
        where the process has still to import the steps: nothing else could be done meanwhile."""
        self.await_start()
        life = self._life
        with life.changed:
            if life.settled >= self._awaited:
                self._patience.wait(life.changed, lambda: life.settled >= self._posted or life.over)
                self._awaited = self._posted
            return life.settled >= self._posted

    def blocked(self) -> str:
        """Where a coroutine holds up all others, as the process has last said."""
        return self._life.seen.blocked

    @property
    def preparing(self) -> bool:
        """Tell whether episodes wait for what they share, as the process has last said."""
        return self._life.seen.preparing

    def left_behind(self) -> list[str]:
        """Where threads are busy whose episodes are over, as the process has last said."""
        return self._life.seen.left_behind

    def left_tasks(self) -> list[str]:
        """Which tasks went on when their episodes ended, as the process has last said."""
        return self._life.seen.left_tasks

    def count(self, more: int) -> None:
        """So many more episodes are open."""
        self._episodes += more

    def close(self) -> None:
        """Have the process end, with what its episodes share; it is killed if that takes long."""
        self._life.finish()

    # -- for attempts

    def begin(self, attempt: RemoteAttempt, first: BeginAttempt) -> None:
        """Begin an attempt with the next post."""
        if self._life.add(attempt):
            self.put(first)

    def put(self, call: LoopCall) -> None:
        """Do something with the next post."""
        self._calls.append(call)

    def _begin_life(self) -> _Life:
        return _Life(self._start(), self._measured)

    def _measured(self, told: StepMeasured) -> None:
        getattr(self._metrics, told.measure)(told.name, *told.values)


class _Life:
    """One process, from its start to its end: a thread writes to it, and another one hears it."""

    def __init__(self, process: KeptProcess, measured: Callable[[StepMeasured], None]) -> None:
        self.changed = threading.Condition()
        self.settled = 0
        self.over = self.ready = self._ending = False
        self.seen = LoopSeen()
        self._unfit = self._killed = ""
        """Why it cannot serve; why it was killed."""
        self._process = process
        self._measured = measured
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

    def put(self, post: LoopPost) -> None:
        """Have it written."""
        self._writes.put(frame(post))

    @property
    def begun(self) -> bool:
        """Tell whether it has imported its steps, or has ended without having said that it cannot."""
        return self.ready or (self.over and not self._unfit)

    @property
    def end(self) -> tuple[str, str]:
        """How it has ended, and why, for messages."""
        code = self._process.code or 0
        how = f"by signal {code - 128}" if code > 128 else f"with exit code {code}"
        return how, f"{f': {self._killed}' if self._killed else ''}{_SEE}"

    def await_start(self) -> None:
        """Wait for that; raises SetupFailed if it cannot, or takes longer than BOOT_S."""
        with self.changed:
            if not self.changed.wait_for(lambda: self.begun or self._unfit, BOOT_S):
                self._unfit = f"the process of the episodes had not imported the steps after {BOOT_S:g} s{_SEE}"
                self._kill(self._unfit)
            if self._unfit:
                raise SetupFailed(self._unfit)

    def finish(self) -> None:
        """End it in order, or by force."""
        self._ending = True
        self._writes.put(b"")
        _, reads = self._threads
        reads.join(LEAVE_S + CLOSE_S)
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
            data = os.read(self._process.reports, CHUNK)
            if not data:
                break
            received += data
            try:
                for data in frames(received):
                    self._hear(FROM_PROCESS.decode(data))
            except (msgspec.MsgspecError, ValueError) as error:
                # A step may write wherever it likes, there.
                self._kill(f"it wrote what is no message ({error})")
                break
        # Who writes ends first: the number of the pipe is that of another file once it is closed.
        self._process.kill()
        self._writes.put(b"")
        self._threads[0].join(CLOSE_S)
        self._process.close()
        with self.changed:
            self.over, self.seen = True, LoopSeen()
            left = [attempt for attempt in self._attempts.values() if not attempt.closed]
            self.changed.notify_all()
        for attempt in () if self._ending else left:
            attempt.hear(self._lost())

    def _hear(self, message: FromProcess) -> None:
        if isinstance(message, AttemptTold | AttemptEnded):
            self._hear_attempt(message)
        elif isinstance(message, StepMeasured):
            self._measured(message)
        elif isinstance(message, ThreadsCrowded):
            # Its threads are all that is to be got rid of: the worker itself has done nothing wrong.
            log.warning("%s: the process of the episodes is ended, and the next one is started", message.why)
            self._kill(message.why)
        elif isinstance(message, LoopSeen):
            self.seen = message
            for number in self._attempts.keys() & message.places.keys():
                self._attempts[number].place = message.places[number]
        else:
            with self.changed:
                self.ready = self.ready or isinstance(message, ProcessReady)
                self._unfit = message.why if isinstance(message, ProcessUnfit) else self._unfit
                self.settled = message.number if isinstance(message, PostSettled) else self.settled
                self.changed.notify_all()

    def _hear_attempt(self, message: AttemptTold | AttemptEnded) -> None:
        attempt = self._attempts.get(message.attempt)
        if attempt is None:
            return
        if isinstance(message, AttemptTold):
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
        how, why = self.end
        return Raised(RequestRefused(f"lost the process of its episodes, which ended {how}", why))


def _raised(fault: StepFault) -> BaseException:
    """What the worker hears of what a step has raised."""
    if fault.kind == "failed":
        return EpisodeFailed(fault.message, fault.reason, fault.cause, fault.place)
    if fault.kind in ("refused", "full"):
        return (ContextFull if fault.kind == "full" else RequestRefused)(fault.message, fault.reason)
    plain = {"settings": UserError, "setup": SetupFailed, "cancelled": CancelledError}
    return plain[fault.kind](fault.message)
