"""The asyncio event loop of one worker, on a thread of its own: its episodes live there, and nothing else does.

The engine and what belongs to it stay on the worker's main thread. That thread posts what is to happen on the loop
(`post`: episodes begin, get answers, are ended), and then waits for a moment until all of them have come to their next
`await` (`settle`): what they ask for next enters the engine together, and does not depend on how threads take turns.
An episode that takes longer, because it waits for a tool, is not waited for: what it does is heard later.

A step that is a plain function runs in a thread of its own; so does what `asyncio.to_thread` is given. These threads
are as many as are needed, and none of them keeps a process from ending. Nothing can end one that is busy: where its
episode is over it is named, and if there are many of them the worker begins anew.

Example: post([begin 8 episodes]) → settle() → 8 requests → … → post([8 answers]) → settle() → …
"""

from __future__ import annotations

import asyncio
import queue
import threading
import time
from collections.abc import Callable, Collection, Generator
from concurrent import futures
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractAsyncContextManager, suppress
from contextvars import Context, ContextVar, copy_context
from functools import partial
from itertools import pairwise
from math import inf
from pathlib import Path
from types import CoroutineType
from typing import Any, ParamSpec, Protocol, TypeVar

from distflow.comm import users_code
from distflow.comm.users_code import SharedLoop, UsersCode
from distflow.errors import StepError
from distflow.flow.plan import StepPlan
from distflow.flow.user_frames import frames_of, log_whole
from distflow.log import logger, note_origins
from distflow.runtime.attempt import NUMBERS, Attempt, Belongings, Hear, LocalAttempt, Numbers, innermost
from distflow.runtime.process_record import current_frames
from distflow.runtime.waits import SettlePatience
from distflow.types import Episode

SETTLE_S = 0.005
"""So long the thread of an engine waits for episodes, but for some patience: a decode step of a small model takes as
long."""
ALONE_S = 10.0
"""So long it waits where no engine has anything better to do."""
THREADS = 32
"""So many threads there may be in any case."""
BLOCKED_S = 0.5
"""A loop that has run nothing for so long is held up."""
CLEANUP_S = 5.0
"""So long what was cancelled may take to end."""
LEAVE_S = 3 * CLEANUP_S
"""So long the end of a loop may take: of its episodes, of what they share, and of all that is left."""
SETUP_S = 120.0
"""So long what episodes share may take until it is there, further tries included: clients may load models."""
CROWDED = 0.25
"""Of the threads that there may be, so many may be busy for episodes that are over."""
CLOSE_S = 2.0
BACK_OFF_S = (0.5, 2.0, 8.0)
"""So long it is waited for before it is tried again: what it connects to may be starting, too."""
IDLE_S = 10.0
"""So long a thread waits for something to run before it ends."""
Setup = Callable[[Any], AbstractAsyncContextManager[Any]]
Begin = Callable[[Episode, Any], Any]
"""Begins a step for an episode, given what to ask by."""
P = ParamSpec("P")
T = TypeVar("T")
log = logger(__name__)


_OURS = tuple(str(Path(file).parent) for file in (__file__, users_code.__file__, asyncio.__file__, threading.__file__))
"""Folders of code that is no user's."""


class DaemonThreads(ThreadPoolExecutor):
    """An executor whose threads end with the process, however long what they run still takes. `most` says how many
    there may be, which may change.

    That of the standard library waits for its threads when the process ends, and has as many as there are processors.
    """

    def __init__(self, most: Callable[[], int]) -> None:
        super().__init__(1)
        self._most = most
        self._work: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._mutex = threading.Lock()
        self._idle = self._running = 0
        """Threads that are free, less what waits for one; and all there are."""
        self._busy: dict[int, Belongings] = {}
        """For which episodes threads are busy, by their numbers."""

    def submit(self, fn: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        """Run a function in a thread of its own, if there may be one more, or as soon as one is free."""
        future: Future[T] = Future()
        numbers = NUMBERS.get(None)

        def work() -> None:
            if not future.set_running_or_notify_cancel():
                return
            me = threading.get_ident()
            if numbers is not None:
                self._busy[me] = numbers.episode
            try:
                with UsersCode():
                    result = fn(*args, **kwargs)
            except BaseException as error:
                future.set_exception(error)
            else:
                future.set_result(result)
            self._busy.pop(me, None)

        with self._mutex:
            self._idle -= 1
            # There may be more threads than when others were submitted, which wait.
            more = max(0, min(-self._idle, self._most() - self._running))
            self._idle += more
            self._running += more
        self._work.put(work)
        for _ in range(more):
            threading.Thread(target=self._serve, name="episode", daemon=True).start()
        return future

    def left_behind(self) -> list[int]:
        """Find the threads that are busy for episodes that have been over for a while."""
        latest = time.monotonic() - CLEANUP_S
        return [thread for thread, episode in self._busy.copy().items() if episode.over_since < latest]

    @property
    def most(self) -> int:
        """How many there may be now."""
        return self._most()

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """End the threads that have nothing to do; nothing is waited for."""
        with self._mutex:
            running = self._running
        for _ in range(running):
            self._work.put(None)

    def _serve(self) -> None:
        note_origins()
        while (work := self._next()) is not None:
            work()
            del work
            with self._mutex:
                self._idle += 1

    def _next(self) -> Callable[[], None] | None:
        """What a thread is to run; None: it is to end."""
        while True:
            with suppress(queue.Empty):
                return self._work.get(timeout=IDLE_S)
            with self._mutex:
                # What has been submitted meanwhile counts on it.
                if self._idle > 0:
                    self._idle -= 1
                    self._running -= 1
                    return None


class EpisodeLoop:
    """The loop of one worker. Its thread starts with the first post. `settle_s`: how long `settle` waits, but for some
    patience; `crowded` is called once, with how it is, if too many threads are busy with what nobody waits for."""

    def __init__(self, settle_s: float = ALONE_S, crowded: Callable[[str], None] = lambda why: None) -> None:
        self._patience = SettlePatience(settle_s)
        self._crowded: Callable[[str], None] | None = crowded
        self._quiet = threading.Condition()
        self._posted = self._run = self._settled = self._awaited = 0
        """Numbers of posts: the newest one, the newest that has been run, the newest that has had its effect, and the
        newest that was waited for."""
        self._tasks: set[asyncio.Task[Any]] = set()
        """Of episodes."""
        self._setups: list[StepSetup] = []
        self._ending: asyncio.Task[None] | None = None
        self._waits_since = 0.0
        """Since when something waits to be run."""
        self._moving: set[object] = set()
        """Episodes in threads of their own that have been posted to, and have not come to their next request."""
        self._episodes = 0
        self._left_tasks: list[str] = []
        self._loop: SharedLoop | None = None
        self._thread: threading.Thread | None = None
        self._ident = 0
        self.threads = DaemonThreads(lambda: max(THREADS, self._episodes))

    # -- called by the worker's main thread

    def post(self, calls: Collection[Callable[[], None]], moving: Collection[object] = ()) -> None:
        """Have the loop run these, in this order. `moving`: episodes in threads that go on by that."""
        loop = self._started()
        with self._quiet:
            if self._run >= self._posted:
                self._waits_since = time.monotonic()
            self._posted += 1
            self._moving.update(moving)
            number = self._posted

        def run() -> None:
            for call in calls:
                call()
            self._run = number

        loop.call_soon_threadsafe(run)

    def settle(self) -> bool:
        """Wait until all that was posted has had its effect: no task can go on, and no thread that was posted to has
        failed to ask for something. Gives up after a moment, since some tool may compute, and does not wait again while
        tasks still do; returns whether they have come to rest."""
        with self._quiet:
            if self._settled >= self._awaited:
                self._patience.wait(self._quiet, lambda: self._settled >= self._posted and not self._moving)
                self._awaited = self._posted
            self._moving.clear()
            return self._settled >= self._posted

    def blocked(self) -> str:
        """Where a coroutine holds up all others now, `file:line`; "" where none does. To be called again and again."""
        if self._loop is None:
            return ""
        if self._run >= self._posted:
            self.post(())
            return ""
        return _place(self._ident) if time.monotonic() - self._waits_since >= BLOCKED_S else ""

    def left_behind(self) -> list[str]:
        """Say where threads are busy whose episodes are over, each as `file:line`. To be called again and again."""
        threads, most = self.threads.left_behind(), self.threads.most
        places = [place for place in map(_place, threads) if place]
        if len(threads) > CROWDED * most and self._crowded is not None:
            crowded, self._crowded = self._crowded, None
            where = ", ".join(sorted(set(places)))
            crowded(
                f"{len(threads)} of {most} threads of episodes are still busy at {where}, and nobody waits for them"
            )
        return places

    def left_tasks(self) -> list[str]:
        """As of any episodes."""
        return self._left_tasks.copy()

    @property
    def preparing(self) -> bool:
        """As of any episodes."""
        return any(setup.entering for setup in self._setups)

    def await_start(self) -> None:
        """As of any episodes: the first post starts it."""

    def attempt(self, step: AttemptedStep, episode: Episode, hear: Hear, *, number: int, first: int) -> LocalAttempt:
        """As of any episodes."""
        begin, blocking = partial(step.begin, episode), step.blocking
        return LocalAttempt(episode, begin, blocking=blocking, loop=self, hear=hear, number=number, first=first)

    def behind(self, setup: StepSetup, begin: Begin, *, blocking: bool) -> Begin:
        """As of any episodes; the setup is left before the loop ends."""
        self._setups.append(setup)

        async def begun(episode: Episode, generate: Any) -> Any:
            await setup.ready()
            return await begin(episode, generate)

        def begun_in_thread(episode: Episode, generate: Any) -> Any:
            setup.ready_in_thread(self.asyncio_loop)
            return begin(episode, generate)

        return begun_in_thread if blocking else begun

    def count(self, more: int) -> None:
        """So many more episodes are open: each may have a thread."""
        self._episodes += more

    def close(self) -> None:
        """End the loop and all that waits in it; a thread that is busy is left alone."""
        loop, thread = self._loop, self._thread
        if loop is None or thread is None:
            return
        loop.call_soon_threadsafe(self._end)
        thread.join(LEAVE_S + CLOSE_S)
        self.threads.shutdown(wait=False)
        self._loop = None

    # -- called on the loop, or by threads of episodes

    @property
    def asyncio_loop(self) -> asyncio.AbstractEventLoop:
        """Where tasks are made; it runs."""
        assert self._loop is not None, "what runs on the loop was posted to it"
        return self._loop

    @property
    def thread(self) -> int:
        """The number of its thread."""
        return self._ident

    def keep(self, task: asyncio.Task[Any]) -> None:
        """Keep a task of an episode until it has ended: asyncio does not, and the sample may be forgotten before."""
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def leave(self, task: asyncio.Task[Any]) -> None:
        """Note a task that its episode has left, unless it is at its end already, or is a request."""
        coro: object = task.get_coro()
        if task.done() or task.cancelling() or not isinstance(coro, CoroutineType) or coro.cr_code is _result.__code__:
            return
        what = f"{coro.__qualname__} ({coro.cr_code.co_filename}:{coro.cr_code.co_firstlineno})"
        if what not in self._left_tasks:
            self._left_tasks.append(what)

    def place(self, thread: int) -> str:
        """As of any loop of attempts."""
        return _place(thread)

    def arrived(self, episode: object) -> None:
        """An episode in a thread of its own has come to its next request, or to its end."""
        with self._quiet:
            self._moving.discard(episode)
            self._quiet.notify_all()

    # -- details

    def _started(self) -> SharedLoop:
        if self._loop is None:
            self._loop = SharedLoop(self._is_idle)
            self._loop.set_task_factory(self._make_task)
            self._loop.set_default_executor(self.threads)
            self._thread = threading.Thread(target=self._serve, args=[self._loop], name="episodes", daemon=True)
            self._thread.start()
        return self._loop

    def _serve(self, loop: SharedLoop) -> None:
        self._ident = threading.get_ident()
        asyncio.set_event_loop(loop)
        while not loop.over:
            try:
                loop.run_forever()
            except (SystemExit, KeyboardInterrupt) as error:
                # Of a task of a user's: it has ended by it, and whoever awaits it gets it.
                at = "".join(f" at {frame.filename}:{frame.lineno}" for frame in frames_of(error)[-1:])
                log.warning("a task of an episode raised %s%s", type(error).__name__, at)
        loop.close()

    def _is_idle(self) -> None:
        if self._settled < self._run:
            with self._quiet:
                self._settled = self._run
                self._quiet.notify_all()

    def _make_task(
        self, loop: asyncio.AbstractEventLoop, coro: Generator[Any, None, T] | Any, context: Context | None = None
    ) -> asyncio.Task[Any]:
        """A task of an episode gets the next number of the task that makes it, and numbers of its own."""
        if isinstance(coro, asyncio.Future):
            # As `asyncio.create_task(generate(…))`, which is as good as `await` of the same later.
            coro = _result(coro)
        numbers = NUMBERS.get(None)
        if numbers is None:
            shared: asyncio.Task[Any] = asyncio.Task(coro, loop=loop, context=context)
            if (setup := SETUP.get(None)) is not None:
                shared.add_done_callback(setup.look)
            return shared
        own = copy_context() if context is None else context.copy()
        own.run(NUMBERS.set, Numbers(numbers.take(), episode=numbers.episode, tool=numbers.tool))
        task: asyncio.Task[Any] = asyncio.Task(coro, loop=loop, context=own)
        numbers.episode.tasks.add(task)
        self.keep(task)
        return task

    def _end(self) -> None:
        self._ending = asyncio.Task(self._last(), loop=self.asyncio_loop)

    async def _last(self) -> None:
        """End the episodes, then leave what they share, which they may need to the last; each for a moment."""
        await _end_tasks(self._tasks.copy())
        await asyncio.gather(*(setup.leave() for setup in self._setups))
        await _end_tasks({task for task in asyncio.all_tasks() if task is not self._ending})
        if self._loop is not None:
            self._loop.end()


ALONE = EpisodeLoop()
"""The loop of a process that is no worker, such as one that tests a step."""


def _place(thread: int) -> str:
    """Say where a thread is, as `file:line` of the innermost call in a user's file; "" if it is nowhere there."""
    frame, calls = current_frames().get(thread), list[tuple[str, int]]()
    while frame is not None:
        calls.append((frame.f_code.co_filename, frame.f_lineno))
        frame = frame.f_back
    return innermost([(file, line) for file, line in reversed(calls) if not file.startswith(_OURS)])


async def _end_tasks(tasks: Collection[asyncio.Task[Any]]) -> None:
    """Cancel tasks, and wait for them for a moment."""
    for task in tasks:
        task.cancel()
    left = (await asyncio.wait(tasks, timeout=CLEANUP_S))[1] if tasks else ()
    if left:
        log.warning(
            "%d tasks of episodes go on %g s after they were cancelled, and are left alone", len(left), CLEANUP_S
        )


async def _result(future: asyncio.Future[T]) -> T:
    return await future


class SetupFailed(StepError):
    """There is nothing that episodes could share, however often it was tried: no accident of one sample."""


class StepSetup:
    """What all episodes of a generate step share at one worker, such as the clients of its tools: the step's `setup`.

    @asynccontextmanager
    async def clients(ctx):
        async with httpx.AsyncClient() as client:
            yield client                       # ctx.shared

    @step(role="generate", reads=[], writes=[], setup=clients)

    It is entered on the event loop before the first episode, and left when the loop ends, by one task, as cancel scopes
    have to be: those of anyio, and so clients of MCP servers.

    `make` is the step's; `give` gets what it yields; `failed` makes a message of what is raised there and of what the
    setup has done.
    """

    def __init__(
        self, make: Setup, context: Any, give: Callable[[Any], None], failed: Callable[[BaseException, str], str]
    ) -> None:
        self._make = make
        self._context = context
        self._give = give
        self._failed = failed
        self._entering: asyncio.Task[None] | None = None
        self._life: asyncio.Task[None] | None = None
        self._over = asyncio.Event()
        self._entered = self._told = False
        """It has given what episodes share; what has gone wrong with that since was told."""
        self._until = 0.0
        """When it is entered, or has failed, unless it holds up the loop."""

    @property
    def entering(self) -> bool:
        """Tell whether it is waited for now."""
        return self._entering is not None and not self._entering.done() and time.monotonic() < self._until

    async def ready(self) -> None:
        """Return when it is entered; raises SetupFailed."""
        if self._entering is None:
            self._until = time.monotonic() + SETUP_S + 2 * CLEANUP_S
            # In a context of its own: it is no task of the episode that comes first.
            self._entering = asyncio.Task(self._enter(), loop=asyncio.get_running_loop(), context=Context())
        await asyncio.shield(self._entering)

    def ready_in_thread(self, loop: asyncio.AbstractEventLoop) -> None:
        """Return when it is entered on this loop, within the same time; raises SetupFailed, and `CancelledError` where
        the episode is over."""
        waiting = asyncio.run_coroutine_threadsafe(self.ready(), loop)
        try:
            waiting.result(SETUP_S + 2 * CLEANUP_S)
        except futures.CancelledError:
            raise asyncio.CancelledError("the sample is not wanted any more") from None
        except TimeoutError as error:
            raise SetupFailed(self._failed(error, "holds up the event loop")) from error

    async def leave(self) -> None:
        """Leave it, if it was entered, and log what goes wrong."""
        if self._life is None:
            return
        if self._entering is not None and not self._entering.done():
            self._entering.cancel()
            self._life.cancel()
        self._over.set()
        await asyncio.wait([self._life], timeout=CLEANUP_S)
        if not self._life.done():
            log.warning("%s", self._failed(TimeoutError(), f"was not left within {CLEANUP_S:g} s"))
        elif not self._told and not self._life.cancelled() and (error := self._life.exception()) is not None:
            log.warning("%s", self._failed(error, f"raised {type(error).__name__} when it was left"))

    def look(self, task: asyncio.Task[Any]) -> None:
        """Tell of a task of its own that has failed."""
        if not task.cancelled() and (error := task.exception()) is not None:
            what = getattr(task.get_coro(), "__qualname__", task.get_name())
            self._tell(error, f"has lost its task {what}, which raised {type(error).__name__}")

    def _tell(self, error: BaseException, did: str) -> None:
        """Tell at once, and once, what has gone wrong while episodes share what it gives."""
        if self._entered and not self._told and not self._over.is_set():
            self._told = True
            log_whole(error)
            log.warning("%s", self._failed(error, f"{did} while episodes go on with what it has given (ctx.shared)"))

    async def _enter(self) -> None:
        """Have a task enter it in time."""
        loop = asyncio.get_running_loop()
        entered: asyncio.Future[None] = loop.create_future()
        context = Context()
        context.run(SETUP.set, self)
        self._life = asyncio.Task(self._live(entered), loop=loop, context=context)
        for limit_s in (SETUP_S, CLEANUP_S):
            await asyncio.wait([entered], timeout=limit_s)
            if entered.done():
                return entered.result()
            self._life.cancel()
        raise SetupFailed(self._failed(TimeoutError(), f"had given nothing after {SETUP_S:g} s, and goes on"))

    async def _live(self, entered: asyncio.Future[None]) -> None:
        """Enter it, wait until all is over, and leave it."""
        for wait_s, next_s in pairwise((0.0, *BACK_OFF_S, inf)):
            try:
                await asyncio.sleep(wait_s)
                with UsersCode():
                    async with self._make(self._context) as shared:
                        self._give(shared)
                        self._entered = True
                        entered.set_result(None)
                        await self._over.wait()
                return
            except BaseException as error:
                if entered.done() or isinstance(error, GeneratorExit):
                    self._tell(error, f"raised {type(error).__name__}")
                    raise
                me = asyncio.current_task()
                late = me is not None and me.cancelling() > 0
                what = self._failed(
                    error, f"had given nothing after {SETUP_S:g} s" if late else f"raised {type(error).__name__}"
                )
                if late or next_s == inf:
                    entered.set_exception(SetupFailed(what))
                    entered.exception()  # Nobody may be left whom it concerns.
                    return
                log.warning("%s; it is tried again in %g s", what, next_s)


SETUP: ContextVar[StepSetup] = ContextVar("setup")
"""Whose code runs, where it is no episode's."""


class AttemptedStep(Protocol):
    """A generate step, as far as its attempts go."""

    plan: StepPlan
    begin: Begin
    blocking: bool


class Episodes(Protocol):
    """Where the episodes of a worker run, as its main thread sees it: a loop here, or one in another process."""

    @property
    def preparing(self) -> bool:
        """Tell whether episodes wait for what they share: that is no time of theirs."""

    def await_start(self) -> None:
        """Wait until steps can run; raises SetupFailed if they never will."""

    def attempt(self, step: AttemptedStep, episode: Episode, hear: Hear, *, number: int, first: int) -> Attempt:
        """Make an attempt at a sample, which is to be begun; `hear` gets what it does, by any thread."""

    def behind(self, setup: StepSetup, begin: Begin, *, blocking: bool) -> Begin:
        """Return the call of a step for an episode, once what its episodes share is there. `blocking`: it is a plain
        function."""

    def post(self, calls: Collection[Callable[[], None]], moving: Collection[object] = ()) -> None:
        """Have these run there, in this order. `moving`: episodes in threads that go on by that."""

    def settle(self) -> bool:
        """Wait until all that was posted has had its effect, for a moment; returns whether it has."""

    def blocked(self) -> str:
        """Say where a coroutine holds up all others, as `file:line`; "" where none does."""

    def left_behind(self) -> list[str]:
        """Say where threads are busy whose episodes are over, each as `file:line`."""

    def left_tasks(self) -> list[str]:
        """Name the tasks that went on when their episodes ended, and were cancelled, each once."""

    def count(self, more: int) -> None:
        """Count so many more episodes as open."""

    def close(self) -> None:
        """End all that runs there."""
