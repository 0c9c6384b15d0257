"""A generate step: a user's coroutine, which says how to sample and makes a batch of what is finished.

    @step(role="generate", …)
    async def sample(generate, ctx, *, temperature: float = 1.0, max_new_tokens: int = 16):
        groups = await generate(SamplingParams(temperature, max_new_tokens=max_new_tokens))
        return assemble(groups, …)

One call makes one batch. At `await` the step is set aside, and the worker's loop (`rollout_loop.py`) takes leases and
weights and decodes until groups are finished: no wait of the runtime lies within a user's frames. There is no event
loop: a step awaits `generate(…)`, and nothing else.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Coroutine, Generator, Sequence
from typing import Any, NamedTuple

from distflow.errors import StepError
from distflow.exchange.rollout_core import FinishedGroup
from distflow.types import SamplingParams

Groups = Sequence[FinishedGroup]
Source = Callable[[SamplingParams], Groups | None]
"""The next groups that are finished; an empty list: there are no more; None: there may be later."""
Generate = Callable[[SamplingParams], Awaitable[Groups]]
"""`await generate(params)`: the next groups of this worker that are finished, all samples of each, sampled so."""


class Wanted:
    """What `generate(params)` returns, for a step to await."""

    def __init__(self, params: SamplingParams) -> None:
        self.params = params

    def __await__(self) -> Generator[Wanted, Groups, Groups]:
        """Hand itself to `run_call`, and return the groups that it sends back."""
        return (yield self)


class Returned(NamedTuple):
    """The end of a call."""

    value: object


def run_call(call: Coroutine[Any, Any, object], groups: Source, where: str) -> Generator[None, None, Returned | None]:
    """Run one call of a generate step to its end; returns None if `groups` has no more to make a batch of.

    Yields whenever `groups` is asked again later.
    Raises what either raises, and StepError (`where`: which step, on which worker) for one that does not await
    `generate` exactly once.
    """
    try:
        wanted = _next(call, None)
        if not isinstance(wanted, Wanted):
            done = "returned" if isinstance(wanted, Returned) else f"awaited a {type(wanted).__name__}"
            raise StepError(f"{where} {done} before it awaited groups; expected groups = await generate(params)")
        while (finished := groups(wanted.params)) is None:
            yield
        if not finished:
            return None
        answer = _next(call, finished)
        if not isinstance(answer, Returned):
            raise StepError(f"{where} awaits a second time; a call makes one batch of the groups that it awaited")
        return answer
    finally:
        call.close()


def _next(call: Coroutine[Any, Any, object], sent: Groups | None) -> object:
    """What the step awaits next, or `Returned`."""
    try:
        return call.send(sent)
    except StopIteration as end:
        return Returned(end.value)
