"""One attempt of a generate step at one sample: a task on the worker's event loop, or a thread where the step is a
plain function.

What the step does is told to the worker's main thread as it happens: that it asks for tokens, gives a request up,
returns or raises. What comes back is the answer to a request, or why there is none, which is raised in the step.

The life of an attempt: begun → (asks → is answered) … → returned or raised; or closed, where its sample is not wanted
any more, or is begun anew. Whatever a closed attempt still does is no part of any sample.
"""

from __future__ import annotations

import asyncio
import os
import threading
import time
from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent import futures
from contextvars import ContextVar, copy_context
from dataclasses import dataclass, field
from functools import partial
from inspect import isawaitable, iscoroutinefunction
from math import inf
from operator import index
from pathlib import Path
from types import CoroutineType
from typing import Any, NamedTuple, Protocol
from weakref import WeakSet

import msgspec
from xxhash import xxh3_64_intdigest

from distflow.comm.users_code import end_copy
from distflow.exchange.partials import ANSWER_BYTES
from distflow.types import CallNumber, Completion, Episode, SampleKey, SamplingParams, is_flag


@dataclass(slots=True, eq=False)
class Belongings:
    """What an episode has made."""

    tasks: WeakSet[asyncio.Task[Any]] = field(default_factory=WeakSet)
    over_since: float = inf
    """When it has ended, in whatever way, or was ended."""


@dataclass(slots=True, eq=False)
class Numbers:
    """The numbers of what a task of an episode begins: calls of `generate`, and tasks, in the order of its code."""

    path: CallNumber = ()
    """The number of the task itself; that of the episode has none."""
    next: int = 0
    episode: Belongings = field(default_factory=Belongings)
    tool: str = ""
    """Of the tool that runs: what is begun there happens once, and is no part of what is played again."""

    def take(self) -> CallNumber:
        """Number something."""
        self.next += 1
        return (*self.path, self.next - 1)


NUMBERS: ContextVar[Numbers] = ContextVar("numbers")
"""Of the task that runs."""


class AskedTokens(msgspec.Struct, frozen=True, tag=True):
    """The step asks for what follows these tokens."""

    call: CallNumber
    prompt_ids: tuple[int, ...]
    params: SamplingParams
    train: bool
    aside: bool


class Withdrawn(msgspec.Struct, frozen=True, tag=True):
    """It does not wait for the answer any more."""

    call: CallNumber


class AskedTool(msgspec.Struct, frozen=True, tag=True):
    """The step is to ask a tool, unless that has answered before."""

    call: CallNumber
    digest: int


class ToolAnswered(msgspec.Struct, frozen=True, tag=True):
    """A tool has answered."""

    call: CallNumber
    digest: int
    answer: bytes


class Returned(NamedTuple):
    """It has come to its end."""

    value: object


class Raised(NamedTuple):
    """It has failed, or was closed."""

    error: BaseException


Event = AskedTokens | Withdrawn | AskedTool | ToolAnswered | Returned | Raised
Hear = Callable[["Attempt", Event], None]
Future = asyncio.Future[Any] | futures.Future[Any]
MOST_ANSWER_BYTES = 16 << 10
"""Of one answer of a tool (`ctx.once`)."""
_VALUES = (bool, float, str, bytes, type(None))
ATTEMPT: ContextVar[LocalAttempt] = ContextVar("attempt")
"""Whose code runs."""


class RequestRefused(ValueError):
    """There cannot be what the step asks for: `did` says what it did, `more` why that is wrong."""

    def __init__(self, did: str, more: str) -> None:
        super().__init__(f"{did}{more}")
        self.did = did
        self.more = more


class ContextFull(RequestRefused):
    """There is no room for what the step asks for: its sequence has all tokens that it may have (`max_tokens`), or the
    sample has (`max_sample_tokens`). A step that lets it pass ends the sample there, with finish_reason `length`."""


def is_full(error: BaseException) -> bool:
    """Tell whether a step has come to its end since there is no more room, in whatever branches."""
    if isinstance(error, BaseExceptionGroup):
        return error.split(ContextFull)[1] is None
    return isinstance(error, ContextFull)


def in_order(news: tuple[Attempt, Event]) -> tuple[SampleKey, int, int, CallNumber]:
    """Sort events: by sample and call, whatever came first; the end of an attempt behind all that it has asked for."""
    attempt, event = news
    if not isinstance(event, Returned | Raised):
        return attempt.key, attempt.number, int(isinstance(event, Withdrawn)), event.call
    return attempt.key, attempt.number, 2, ()


class AttemptLoop(Protocol):
    """The loop on which attempts of this process run."""

    @property
    def threads(self) -> futures.Executor:
        """Where steps that are plain functions run."""

    @property
    def asyncio_loop(self) -> asyncio.AbstractEventLoop:
        """Where tasks are made."""

    @property
    def thread(self) -> int:
        """The number of its thread."""

    def keep(self, task: asyncio.Task[Any]) -> None:
        """Keep a task until it has ended."""

    def leave(self, task: asyncio.Task[Any]) -> None:
        """An episode has come to its end before this task of its own, which is cancelled."""

    def place(self, thread: int) -> str:
        """Where a thread is in users' code, as `file:line`; "" if it is not there."""

    def arrived(self, episode: object) -> None:
        """An episode in a thread of its own has come to its next request, or to its end."""


class Attempt(Protocol):
    """An attempt, numbered from 1, wherever it runs. `begin`, `answer`, `refuse` and `close` are posted to the loop."""

    episode: Episode
    key: SampleKey
    blocking: bool
    """The step is a plain function, in a thread."""
    number: int

    @property
    def calls(self) -> int:
        """How many numbers it and earlier attempts have used."""

    @property
    def place(self) -> str:
        """The line at which it is, in the innermost function of the step's file; "" where it is not there."""

    def begin(self) -> None:
        """Begin the step."""

    def answer(self, call: CallNumber, found: Completion | bytes) -> None:
        """Go on with what the model has written, or with what a tool has answered before, b"" if it has not."""

    def refuse(self, call: CallNumber, error: RequestRefused) -> None:
        """Raise this where the step waits for the call."""

    def close(self) -> None:
        """End it: `CancelledError` is raised where it waits, and where it asks again."""


class LocalAttempt:
    """An attempt of this process. `function` is the step for its episode, given what to ask by; `hear` is called with
    what it does, by any thread. `first`: the number of its first call, as many as earlier attempts have had.
    """

    def __init__(
        self,
        episode: Episode,
        function: Callable[[Any], Any],
        *,
        blocking: bool,
        loop: AttemptLoop,
        hear: Hear,
        number: int = 1,
        first: int = 0,
    ) -> None:
        self.episode = episode
        self.key: SampleKey = (episode.uid.position, episode.sample)
        self.blocking = blocking
        self.number = number
        self._function = function
        self._loop = loop
        self._listener = hear
        self._process = os.getpid()
        self._numbers = Numbers(next=first)
        self._open: dict[CallNumber, Future] = {}
        self._answer_bytes = 0
        """Of its tools' answers."""
        self._task: asyncio.Task[None] | None = None
        self._thread = 0
        self._over = False

    @property
    def calls(self) -> int:
        """As of any attempt."""
        return self._numbers.next

    @property
    def waits(self) -> bool:
        """Tell whether it waits for tokens, or for what is recorded."""
        return bool(self._open)

    @property
    def place(self) -> str:
        """As of any attempt."""
        if self.blocking:
            return self._loop.place(self._thread) if self._thread and not self._over else ""
        places = list[tuple[str, int]]()
        waiting: object = None if self._task is None else self._task.get_coro()
        # Its frame is asked for once: another thread asks here, and the coroutine may come to its end meanwhile.
        while isinstance(waiting, CoroutineType) and (frame := waiting.cr_frame) is not None:
            places.append((frame.f_code.co_filename, frame.f_lineno))
            waiting = waiting.cr_await
        return innermost([(file, line) for file, line in places if not file.startswith(_HERE)])

    def begin(self) -> None:
        """As any attempt does."""
        if self._over:
            return
        context = copy_context()
        context.run(NUMBERS.set, self._numbers)
        context.run(ATTEMPT.set, self)
        if self.blocking:
            # In the context, by which it is known whose thread this is; what runs there has one of its own.
            context.run(partial(self._loop.threads.submit, context.copy().run, self._in_thread))
        else:
            self._task = asyncio.Task(self._on_loop(), loop=self._loop.asyncio_loop, context=context)
            self._loop.keep(self._task)

    def answer(self, call: CallNumber, found: Completion | bytes) -> None:
        """As any attempt does."""
        future = self._open.pop(call, None)
        if future is not None and not future.done():
            future.set_result(found)

    def refuse(self, call: CallNumber, error: RequestRefused) -> None:
        """As any attempt does."""
        future = self._open.pop(call, None)
        if future is not None and not future.done():
            future.set_exception(error)
            # A step that does not wait for it does not care: nobody has to be told.
            future.exception()

    def close(self) -> None:
        """As any attempt does."""
        self._is_over()
        if self._task is not None:
            self._task.cancel()
        self._drop()

    def once(self, name: str, function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Ask a tool, unless it has answered before; called by the step. Returns what is to be awaited, or in a plain
        function the answer."""
        if self.blocking:
            return self._once_in_thread(name, function, args, kwargs)
        return self._once(name, function, args, kwargs)

    # -- details

    async def _once(
        self, name: str, function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> Any:
        if threading.get_ident() != self._loop.thread:
            raise RuntimeError(_NOT_HERE.format("ctx.once"))
        numbers = self._own_numbers(name)
        asked = AskedTool(numbers.take(), question(name, args, kwargs))
        recorded: asyncio.Future[bytes] = self._loop.asyncio_loop.create_future()
        self._put(asked, recorded)
        answer = await recorded
        if not answer:
            inside = NUMBERS.set(Numbers(asked.call, episode=self._numbers.episode, tool=name))
            try:
                # A tool that blocks holds up nobody.
                direct = iscoroutinefunction(function)
                value = function(*args, **kwargs) if direct else await asyncio.to_thread(function, *args, **kwargs)
                value = await value if isawaitable(value) else value
            finally:
                NUMBERS.reset(inside)
            answer = self._note(asked, packed(name, value, self._answer_bytes))
        self._answer_bytes += len(answer)
        return unpacked(answer)

    def _once_in_thread(
        self, name: str, function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> Any:
        if threading.get_ident() != self._thread:
            raise RuntimeError(_NOT_HERE.format("ctx.once"))
        numbers = self._own_numbers(name)
        asked = AskedTool(numbers.take(), question(name, args, kwargs))
        recorded: futures.Future[bytes] = futures.Future()
        self._put(asked, recorded)
        self._loop.arrived(self)
        answer = recorded.result()
        if not answer:
            numbers.tool = name
            try:
                value = function(*args, **kwargs)
            finally:
                numbers.tool = ""
            if isawaitable(value):
                if isinstance(value, CoroutineType):
                    value.close()
                raise TypeError(
                    f"ctx.once({name!r}): {function!r} is to be awaited, and the step is a plain def — let the step be "
                    "an async def, and await ctx.once(…); or give it a plain function, such as one of a client that "
                    "is not asynchronous"
                )
            answer = self._note(asked, packed(name, value, self._answer_bytes))
        self._answer_bytes += len(answer)
        return unpacked(answer)

    def _own_numbers(self, what: str) -> Numbers:
        """The numbers of what runs; raises RuntimeError within a tool."""
        numbers = NUMBERS.get(self._numbers)
        if numbers.tool:
            raise RuntimeError(
                f"{what} was asked within the tool {numbers.tool!r} of ctx.once, which is not called again where the "
                "sample is played again: let the step ask, before or after it"
            )
        return numbers

    def _put(self, asked: AskedTokens | AskedTool, future: Future) -> None:
        self._open[asked.call] = future
        if self._over:
            raise asyncio.CancelledError("the sample is not wanted any more")
        self._hear(asked)

    def _note(self, asked: AskedTool, answer: bytes) -> bytes:
        self._hear(ToolAnswered(asked.call, asked.digest, answer))
        return answer

    async def _on_loop(self) -> None:
        try:
            value = await self._function(self._ask)
        except BaseException as error:  # an exit would end the loop as if it was done
            self._end(Raised(error))
        else:
            self._end(Returned(value))
        self._drop()

    def _hear(self, event: Event) -> None:
        """Tell what the step does, unless it is a copy of this process that does it."""
        end_copy(self._process, event.error if isinstance(event, Raised) else None)
        self._listener(self, event)

    def _in_thread(self) -> None:
        self._thread = threading.get_ident()
        try:
            if self._over:  # while it waited for a thread
                raise asyncio.CancelledError("the sample is not wanted any more")
            value = self._function(self._ask_in_thread)
        except BaseException as error:
            self._end(Raised(error))
        else:
            self._end(Returned(value))

    def _is_over(self) -> None:
        episode = self._numbers.episode
        self._over, episode.over_since = True, min(episode.over_since, time.monotonic())

    def _end(self, event: Event) -> None:
        self._is_over()
        self._hear(event)
        if self.blocking:
            self._loop.arrived(self)
        elif not (isinstance(event, Raised) and is_full(event.error)):
            for task in list(self._numbers.episode.tasks):
                self._loop.leave(task)

    def _drop(self) -> None:
        """End the tasks that are left, and what waits for tokens."""
        for task in list(self._numbers.episode.tasks):
            task.cancel()
        for future in [self._open.pop(call) for call in list(self._open)]:
            if isinstance(future, asyncio.Future):
                future.cancel()
            elif not future.done():
                future.set_exception(asyncio.CancelledError())

    def _ask(
        self, prompt_ids: Sequence[int], params: SamplingParams, *, train: bool = True, aside: bool = False
    ) -> asyncio.Future[Completion]:
        """Make a request; raises TypeError for what are no token ids, or no SamplingParams."""
        loop = self._loop.asyncio_loop
        if threading.get_ident() != self._loop.thread:
            raise RuntimeError(_NOT_HERE.format("generate"))
        about = _checked(prompt_ids, params, train=train, aside=aside)
        asked = AskedTokens(self._own_numbers("generate(…)").take(), *about)
        future: asyncio.Future[Completion] = loop.create_future()
        self._put(asked, future)
        future.add_done_callback(lambda done: self._given_up(asked.call, done))
        return future

    def _given_up(self, call: CallNumber, future: asyncio.Future[Completion]) -> None:
        if future.cancelled() and self._open.pop(call, None) is not None:
            self._hear(Withdrawn(call))

    def _ask_in_thread(
        self, prompt_ids: Sequence[int], params: SamplingParams, *, train: bool = True, aside: bool = False
    ) -> Completion:
        """Make a request, and wait for the answer; raises TypeError as `_ask`."""
        if threading.get_ident() != self._thread:
            raise RuntimeError(_NOT_HERE.format("generate"))
        about = _checked(prompt_ids, params, train=train, aside=aside)
        asked = AskedTokens(self._own_numbers("generate(…)").take(), *about)
        future: futures.Future[Completion] = futures.Future()
        self._put(asked, future)
        self._loop.arrived(self)
        # Its deadline is that of the episode, which is closed by it.
        return future.result()


def innermost(calls: Sequence[tuple[str, int | None]]) -> str:
    """Say where nested calls, each with its file and line, are in the file of the outermost one, as `file:line`; "" for
    none."""
    own = [f"{file}:{line}" for file, line in calls if file == calls[0][0]]
    return own[-1] if own else ""


_HERE = str(Path(__file__).parent)
_NOT_HERE = (
    "{}(…) was called in another thread than the step's own: in which order threads ask depends on the clock — "
    "let an async def step await it, several at a time by asyncio.gather"
)


def _checked(
    prompt_ids: Sequence[int], params: object, **flags: object
) -> tuple[tuple[int, ...], SamplingParams, bool, bool]:
    """The same as plain values, which mean the same wherever they go; raises TypeError."""
    if not isinstance(params, SamplingParams):
        raise TypeError(f"generate(prompt_ids, params): params is a {type(params).__name__}; expected SamplingParams")
    for name, value in flags.items():
        if not is_flag(value):
            raise TypeError(f"generate(prompt_ids, params, {name}={value!r}): expected True or False")
    try:
        found = tuple(prompt_ids)
        found = found if set(map(type, found)) <= {int} else tuple(map(index, found))
        array("q", found)
    except (TypeError, OverflowError) as error:
        raise TypeError(f"generate(prompt_ids, params): {error}; expected token ids, which are integers") from error
    train, aside = map(bool, flags.values())
    return found, params, train, aside


def packed(name: str, value: object, had: int) -> bytes:
    """Write an answer of a tool for the record; `had`: bytes of the sample's other answers.

    A sample that is replayed elsewhere gets the answers that its tools gave before: nothing is bought, sent or deleted
    twice. Each is known by its call number, as what the model has written is, and by the name and the arguments that it
    was asked with. Raises TypeError for what no record can hold, ValueError for what is too long.
    """
    for place, what in _wrong(value, "the answer"):
        raise TypeError(
            f"ctx.once({name!r}): {place} is a {what}; expected None, bool, numbers, text, bytes, and lists and dicts "
            "of them: return the part of it that the step needs"
        )
    try:
        data = msgspec.msgpack.encode(value)
    except (ValueError, OverflowError) as error:
        raise TypeError(f"ctx.once({name!r}): the answer cannot be recorded: {error}") from error
    if len(data) > MOST_ANSWER_BYTES or had + len(data) > ANSWER_BYTES:
        raise ValueError(
            f"ctx.once({name!r}): the answer has {len(data)} bytes, after {had} of the sample's earlier ones; expected "
            f"at most {MOST_ANSWER_BYTES}, and {ANSWER_BYTES} in all: return less, or the name of where it is kept"
        )
    return data


def unpacked(data: bytes) -> Any:
    """Read an answer. Tuples have become lists."""
    return msgspec.msgpack.decode(data)


def question(name: str, args: Sequence[object], kwargs: Mapping[str, object]) -> int:
    """Tell questions apart by name and arguments, those that are no values by their types: 62 bits."""
    given = [("", value) for value in args] + sorted(kwargs.items())
    shown = [(key, type(value).__qualname__ if any(_wrong(value, "")) else repr(value)) for key, value in given]
    return xxh3_64_intdigest(repr((name, shown)).encode(errors="surrogatepass")) >> 2


def _wrong(value: object, place: str) -> Iterator[tuple[str, str]]:
    """What is no plain value in here: where, and its type."""
    if type(value) in _VALUES:
        return
    if type(value) is int:
        if not -(1 << 63) <= value < 1 << 64:
            yield place, "number of more than 64 bits"
    elif isinstance(value, list | tuple) and type(value) in (list, tuple):
        for number, entry in enumerate(value):
            yield from _wrong(entry, f"{place}[{number}]")
    elif isinstance(value, dict) and type(value) is dict:
        for key, entry in value.items():
            if type(key) is str:
                yield from _wrong(entry, f"{place}[{key!r}]")
            else:
                yield f"key {key!r} of {place}", type(key).__name__
    else:
        yield place, type(value).__name__
