"""Rounds of divided models: forwards and backwards in which every training replica takes part, agreed on one by one.

If a model is divided over the replicas (FSDP, ZeRO), its forward and backward are collective. But replicas have
different numbers of micro-batches and wait for samples at different times. So they agree on each round in advance:

- A round is one forward of one model, without gradient (`F`) or with its backward (`FB`).
- A replica that wants a round says so and waits for the facts of all others. One with nothing to compute answers as
  soon as another has begun to agree. All then hold the same round, the first that is wanted; replicas that did not
  want it take part without samples (`Backend.idle`), and those that wanted another ask for it again.
- A replica that has reached a point where all must meet (the optimizer step, a gather, a stop) says so once, and then
  answers the others until all have reached it. So none polls: an agreement begins only where one has something new.
- A replica that is being stopped says so in its next facts: then all stop, after the same round.
- Requests of other workers for a forward (`serving.py`) make rounds, too: each replica brings its own to them.
- The facts also carry which groups have arrived, from which all deal them alike (`exchange/deal_core.py`): so replicas
  usually want the same rounds at the same time, and with as much to compute.

Example, two replicas; replica 1 waits for samples until its last group comes:
    0 wants FB, 1 answers: 0 computes, 1 is idle        0 is done, 1 answers: no round is held
    1 wants FB, 0 answers: 1 computes, 0 is idle        1 is done, 0 answers that it is too: both go on to the step
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Literal, TypeVar

from torch import Tensor

from distflow.comm.collective import losing_members
from distflow.comm.fact_exchange import Fact
from distflow.data.batch import Batch, Ragged
from distflow.errors import UserError
from distflow.exchange.deal_core import ReadyGroups
from distflow.runtime.checkpoint.format import Shard
from distflow.runtime.metrics import MetricStore
from distflow.runtime.protocols import Backend, Measured, Priced, TokenScores, TokenValues, packs
from distflow.runtime.replicas import Replicas
from distflow.runtime.waits import WaitBoard

T = TypeVar("T")
Kind = Literal["F", "FB"]
STEP, GATHER, STOP, VALIDATED = "the optimizer step", "a gather", "the stop", "the end of a part of validation"
"""Points at which all replicas meet."""


class Rounds:
    """This replica's part in the rounds of `models`. A single replica never waits for a round."""

    def __init__(
        self,
        models: Mapping[str, Backend],
        replicas: Replicas,
        board: WaitBoard,
        metrics: MetricStore,
        no_progress_s: float,
    ) -> None:
        self.models: Mapping[str, Backend] = {name: LockstepModel(name, inner, self) for name, inner in models.items()}
        """The models that steps get: every `score` and `accumulate` on them is a round."""
        self._inner = models
        self._replicas = replicas
        self._board = board
        self._metrics = metrics
        self._limit_s = no_progress_s
        self._graded: str | None = None
        self._tell: Callable[[], ReadyGroups] = list
        self._hear: Callable[[Sequence[ReadyGroups]], None] = lambda news: None

    def carry(self, tell: Callable[[], ReadyGroups], hear: Callable[[Sequence[ReadyGroups]], None]) -> None:
        """Have every agreement carry what `tell` returns; `hear` gets that of all replicas, under the board's lock."""
        self._tell, self._hear = tell, hear

    @contextmanager
    def apart(self) -> Iterator[None]:
        """Between two training steps: agreements carry nothing meanwhile."""
        carried = self._tell, self._hear
        self.carry(list, lambda news: None)
        try:
            yield
        finally:
            self.carry(*carried)

    @property
    def called(self) -> bool:
        """Whether another replica wants a round, or has other news (under the board's lock)."""
        return self._replicas.opened

    def answer(self) -> None:
        """Exchange facts with the others, and take part in the round that they want."""
        self._say({})

    def meet(self, point: str) -> None:
        """Take part in the rounds of the others until all replicas have come to this point.

        Raises RunStopped, on all replicas alike, if one of them was asked to stop.
        """
        self._refuse_unfinished(point)
        while self._replicas.size > 1:
            facts = self._say({"at": point})
            points = [fact.get("at") for fact in facts]
            if None not in points:
                assert set(points) == {point}, f"the replicas have come to different points: {points}"
                return
            self._board.until(
                # A stop is news too, for replicas that only answer.
                lambda: True if self.called or self._replicas.stopping else None,
                name="rounds of the other training replicas",
                peers=self._replicas.others,
                limit_s=self._limit_s,
                progress=self._replicas.progress,
                even_when_stopping=True,
            )

    def gather(self, tensor: Tensor) -> list[Tensor]:
        """`Replicas.gather`, for steps that all replicas call alike."""
        self.meet(GATHER)
        return self._replicas.gather(tensor)

    # -- for LockstepModel

    def begin(self, model: str, kind: Kind) -> None:
        """Return when all replicas hold this round; raises UserError inside an unfinished one."""
        self._refuse_unfinished(f"score of model {model!r}")
        while self._replicas.size > 1:
            facts = self._say({"wants": [model, kind]})
            if _held(facts) == (model, kind):
                break
        self._graded = model if kind == "FB" else None

    def end(self, model: str) -> None:
        """Begin the backward of the round; raises UserError if there was no forward for it."""
        if self._graded != model:
            raise UserError(f"accumulate of model {model!r} without a score(grad=True) of it before: {_RULE}")
        self._graded = None

    @contextmanager
    def together(self, what: str) -> Iterator[None]:
        """Run a collective operation; raises ReplicaLost if a replica is lost in it."""
        if self._replicas.size == 1:
            yield
            return
        shown = self._board.shown(f"{what}, computed with the other training replicas", self._replicas.others)
        with losing_members(f"in {what}"), shown:
            yield

    # -- details

    def _say(self, news: Fact) -> list[Fact]:
        """Agree on the next round, and take part in it without samples unless this replica wants it."""
        with self._board.condition:
            there = self._tell()
        facts = self._replicas.agree("a round", {**news, "there": there, "stop": self._replicas.stopping})
        self._replicas.stop_together(facts)
        with self._board.condition:
            self._hear([fact["there"] for fact in facts])
        held = _held(facts)
        if held is not None and list(held) != news.get("wants"):
            model, kind = held
            with self.together(f"an idle round of model {model!r}"):
                self._inner[model].idle(grad=kind == "FB")
            self._metrics.add("lockstep/idle_rounds", 1)
        return facts

    def _refuse_unfinished(self, what: str) -> None:
        if self._graded is not None:
            raise UserError(f"{what} after score(grad=True) of model {self._graded!r} without accumulate: {_RULE}")


_RULE = (
    "the backend divides its models over the training replicas, which take part in every forward and backward; call "
    "accumulate after each score(grad=True), before anything else"
)


def _held(facts: list[Fact]) -> tuple[str, Kind] | None:
    """The round that all hold: the first by name of the model, a backward first; None if no replica wants one."""
    wanted = [fact["wants"] for fact in facts if "wants" in fact]
    model, kind = min(wanted, key=lambda want: (want[0], want[1] != "FB")) if wanted else (None, None)
    return None if model is None else (str(model), "FB" if kind == "FB" else "F")


class LockstepModel:
    """Implements `distflow.runtime.protocols.Backend`: the backend of one divided model, called by rounds only."""

    lockstep = True

    def __init__(self, name: str, inner: Backend, rounds: Rounds) -> None:
        self._name = name
        self._inner = inner
        self._rounds = rounds

    def join(self) -> None:
        """Divide the model."""
        with self._together("the division"):
            self._inner.join()

    def idle(self, *, grad: bool) -> None:
        """Never called: `Rounds` itself takes part in the rounds of others."""
        raise AssertionError("Rounds takes part in the rounds of the others")

    def score(
        self, batch: Batch, *, temperature: float, grad: bool, entropy: bool, candidates: int | Ragged = 0
    ) -> TokenScores:
        """A round's forward; raises UserError between another forward with gradient and its backward."""
        kind: Kind = "FB" if grad else "F"
        self._rounds.begin(self._name, kind)
        with self._together("a forward"):
            return self._inner.score(batch, temperature=temperature, grad=grad, entropy=entropy, candidates=candidates)

    def values(self, batch: Batch, *, grad: bool) -> TokenValues:
        """A round's forward, as `score`."""
        self._rounds.begin(self._name, "FB" if grad else "F")
        with self._together("a forward"):
            return self._inner.values(batch, grad=grad)

    def score_together(self, batch: Batch) -> TokenScores:
        """A forward at a point where all replicas compute the same one, so there is nothing to agree on."""
        with self._together("a forward"):
            return self._inner.score(batch, temperature=1.0, grad=False, entropy=False)

    def accumulate(self, loss_sum: Tensor) -> None:
        """The backward of the round; raises UserError without the forward."""
        self._rounds.end(self._name)
        with self._together("a backward"):
            self._inner.accumulate(loss_sum)

    def apply(self, denominator: float) -> float:
        """The optimizer step; all replicas have met before it."""
        with self._together("the optimizer step"):
            return self._inner.apply(denominator)

    def schedule_at(self, done: int) -> None:
        """Set where the schedule is."""
        self._inner.schedule_at(done)

    @property
    def learning_rate(self) -> float:
        """Learning rate of the next `apply`."""
        return self._inner.learning_rate

    def named_shards(self) -> Iterator[tuple[str, Tensor]]:
        """All parameters, one by one; every replica goes through them."""
        return self._each("the weights", self._inner.named_shards)

    def state_shards(self) -> Iterator[Shard]:
        """What this replica saves of the state."""
        return self._each("the state", self._inner.state_shards)

    def load_state(self, tensors: Mapping[str, Tensor]) -> None:
        """Load a whole state."""
        with self._together("the state"):
            self._inner.load_state(tensors)

    def offload(self) -> None:
        """Move everything off the device."""
        self._inner.offload()

    def onload(self) -> None:
        """Move it back."""
        self._inner.onload()

    @property
    def quadratic(self) -> float:
        """How much attention adds to the cost of long rows, if the backend knows."""
        return self._inner.quadratic if isinstance(self._inner, Priced) else 0.0

    @property
    def packs(self) -> bool:
        """Tell whether the backend packs."""
        return packs(self._inner)

    def device_bytes(self) -> Mapping[str, int]:
        """Bytes on the device of this replica's part, if the backend can measure them."""
        return self._inner.device_bytes() if isinstance(self._inner, Measured) else {}

    def close(self) -> None:
        """Give everything back."""
        self._inner.close()

    def _each(self, what: str, make: Callable[[], Iterator[T]]) -> Iterator[T]:
        items = make()
        while True:
            with self._together(what):
                item = next(items, None)
            if item is None:
                return
            yield item
            del item  # before the next one is put together

    def _together(self, what: str) -> AbstractContextManager[None]:
        return self._rounds.together(f"{what} of model {self._name!r}")
