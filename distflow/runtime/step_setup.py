"""What all episodes of a generate step share at one worker, such as the clients of its tools: the step's `setup`.

    @asynccontextmanager
    async def clients(ctx):
        async with httpx.AsyncClient() as client:
            yield client                       # ctx.shared

    @step(role="generate", reads=[], writes=[], setup=clients)

It is entered on the event loop before the first episode, and left when the loop ends.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from contextvars import Context
from typing import Any

from distflow.errors import StepError
from distflow.log import logger

BACK_OFF_S = (0.5, 2.0, 8.0)
"""So long it is waited for before it is tried again: what it connects to may be starting, too."""
Setup = Callable[[Any], AbstractAsyncContextManager[Any]]
log = logger(__name__)


class SetupFailed(StepError):
    """There is nothing that episodes could share, however often it was tried: no accident of one sample."""


class StepSetup:
    """`make` is the step's; `give` gets what it yields; `failed` makes a message of what it raises."""

    def __init__(
        self, make: Setup, context: Any, give: Callable[[Any], None], failed: Callable[[Exception], str]
    ) -> None:
        self._make = make
        self._context = context
        self._give = give
        self._failed = failed
        self._entering: asyncio.Task[None] | None = None
        self._manager: AbstractAsyncContextManager[Any] | None = None

    async def ready(self) -> None:
        """Return when it is entered; raises SetupFailed."""
        if self._entering is None:
            # In a context of its own: it is no task of the episode that comes first.
            loop = asyncio.get_running_loop()
            self._entering = asyncio.Task(self._enter(), loop=loop, context=Context())
        await asyncio.shield(self._entering)

    async def leave(self) -> None:
        """Leave it, if it was entered."""
        if self._entering is not None:
            self._entering.cancel()
        if self._manager is not None:
            await self._manager.__aexit__(None, None, None)

    async def _enter(self) -> None:
        for wait_s in (*BACK_OFF_S, None):
            try:
                manager = self._make(self._context)
                self._give(await manager.__aenter__())
                self._manager = manager
                return
            except Exception as error:
                what = self._failed(error)
                if wait_s is None:
                    raise SetupFailed(what) from error
                log.warning("%s; it is tried again in %g s", what, wait_s)
            await asyncio.sleep(wait_s)
