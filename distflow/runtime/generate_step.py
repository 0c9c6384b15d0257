"""A generate step: a user's coroutine, one call for each sample, which says what to sample after which tokens.

    @step(role="generate", …)
    async def sample(episode, generate, ctx, *, temperature: float = 1.0, max_new_tokens: int = 16):
        await generate(episode.prompt_ids, SamplingParams(temperature, max_new_tokens=max_new_tokens))

At `await` the step is set aside, and the worker's loop (`rollout_loop.py`) takes leases and weights and decodes until
what was asked for is sampled: no wait of the runtime lies within a user's frames. There is no event loop: a step awaits
`generate(…)`, and nothing else. What it asked for and got is recorded by the runtime (`trajectories.py`).
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Coroutine, Generator, Sequence
from operator import index
from typing import Any, NamedTuple, Protocol

from distflow.errors import StepError
from distflow.flow.plan import StepPlan
from distflow.flow.step import GENERATED, SEQUENCES
from distflow.types import Completion, Episode, SamplingParams

Call = Coroutine[Any, Any, object]


class Generate(Protocol):
    """What a generate step awaits."""

    def __call__(
        self, prompt_ids: Sequence[int], params: SamplingParams, *, train: bool = True, aside: bool = False
    ) -> Awaitable[Completion]:
        """What the model writes after these tokens, sampled so. `train`: whether these tokens are trained on; `aside`:
        they are no part of the sample, and only the step sees them.

        Tokens that begin with all that a sequence of the sample has continue it; others begin a new sequence.
        """


class Wanted:
    """What `generate(prompt_ids, params)` returns, for a step to await."""

    __slots__ = ("aside", "params", "prompt_ids", "train")

    def __init__(
        self, prompt_ids: Sequence[int], params: SamplingParams, *, train: bool = True, aside: bool = False
    ) -> None:
        """Raises TypeError for what are no token ids, or no SamplingParams."""
        if not isinstance(params, SamplingParams):
            raise TypeError(
                f"generate(prompt_ids, params): params is a {type(params).__name__}; expected SamplingParams"
            )
        self.prompt_ids = _token_ids(prompt_ids)
        self.params = params
        self.train = train
        self.aside = aside

    def __await__(self) -> Generator[Wanted, Completion, Completion]:
        """Hand itself to whoever drives the step, and return the completion that it sends back."""
        return (yield self)


def _token_ids(prompt_ids: Sequence[int]) -> tuple[int, ...]:
    """The same tuple, if it is one of integers."""
    found = tuple(prompt_ids)
    if set(map(type, found)) <= {int}:
        return found
    try:
        return tuple(map(index, found))
    except TypeError as error:
        raise TypeError(f"generate(prompt_ids, params): {error}; expected token ids, which are integers") from error


class Returned(NamedTuple):
    """The end of a call."""

    value: object


class GenerateStep:
    """The generate step of one worker: begins a call for each sample, and goes on with it.

    `failed` makes what is raised of what a user's step raises for an episode.
    """

    def __init__(
        self,
        plan: StepPlan,
        begin: Callable[[Episode], Call],
        where: str,
        failed: Callable[[Exception | SystemExit, Episode], Exception],
    ) -> None:
        self.plan = plan
        self.where = where
        """Which step, on which worker."""
        self.further = tuple(name for name in plan.writes if name not in (*GENERATED, *SEQUENCES))
        """The fields that it returns a number for, for each sample."""
        self.begin = begin
        self._failed = failed

    def go_on(self, call: Call, episode: Episode, sent: Completion | None) -> Wanted | Returned:
        """What the step awaits next, or returns. Raises what it raises, and StepError for another awaitable."""
        try:
            found = call.send(sent)
        except StopIteration as end:
            return Returned(end.value)
        except (Exception, SystemExit) as error:
            raise self._failed(error, episode) from error
        if not isinstance(found, Wanted):
            raise StepError(
                f"{self.where} awaited a {type(found).__name__}; a generate step awaits generate(prompt_ids, params) "
                "and nothing else"
            )
        return found

    def end(self, call: Call, episode: Episode) -> None:
        """End a call whose sample is not wanted any more; raises what it raises then."""
        try:
            call.close()
        except (Exception, SystemExit) as error:
            raise self._failed(error, episode) from error
