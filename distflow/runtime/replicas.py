"""What the replicas of a training pool do together: exchange facts, and sum gradients.

Decisions for the whole pool (stop, how to divide the gradient, what a checkpoint holds) are functions of the training
step and of facts that every replica has received from every other, so none has to decide for the rest.

torch's process groups are made through `GroupStore`, its view of the store in `distflow.comm.store`, over the endpoint.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from datetime import timedelta
from functools import partial
from itertools import count
from typing import Any, TypeVar

import msgspec
from torch import Tensor
from torch._C._distributed_c10d import Store
from torch.distributed import DistStoreError

from distflow.comm.collective import Collective, PendingSum, Rendezvous
from distflow.comm.fact_exchange import KINDS, Agreement, Fact
from distflow.comm.membership import Lost, MemberMessage
from distflow.comm.message import Message
from distflow.comm.store import ANSWERED, ASKED, Answer, Question, StoreCore
from distflow.config.schema import LimitsConfig
from distflow.data.batch import Batch
from distflow.data.batch_wire import decode_batch, encode_batch
from distflow.data.decoding import read
from distflow.errors import NoProgressError, ReplicaLost, RunStopped
from distflow.log import logger
from distflow.runtime.node import Node

T = TypeVar("T")
ABOUT = "about"
JOINING = "whether to make the group"

log = logger(__name__)
ASK_AGAIN_S = 0.5
CLOSED = "the worker has left: the store of its process group is closed"


class Replicas:
    """This replica among `owners` (all of them, in order). A single one never waits."""

    def __init__(self, me: str, owners: Sequence[str], node: Node, limits: LimitsConfig, address: str) -> None:
        self.rank = owners.index(me)
        self.size = len(owners)
        self.others = tuple(owner for owner in owners if owner != me)
        self._node = node
        self._board = node.board
        self._limits = limits
        self._address = address
        self._agreement = Agreement(me, owners)
        self._store = GroupStore(node, owners, limits.no_progress_s)
        self._collective: Collective | None = None
        self._what = ""
        self._leaving = False
        self._left: set[str] = set()
        """Replicas that left in order."""
        for kind in sorted(KINDS):
            node.on(kind, self._on_message)
        node.on_tick(lambda now: self._send(self._agreement.tick(now)))
        node.on_lost(self._on_lost)

    def connect(self, device: str, *, even_alone: bool = False) -> None:
        """Create the process group once all replicas are present; for a single one only with `even_alone`.

        Raises ReplicaLost if another one is lost meanwhile, WorkerFailed if it fails otherwise.
        """
        if self.size == 1 and not even_alone:
            return
        meeting = Rendezvous(self.rank, self.size, self._address, self._limits.no_progress_s)
        fact = {"address": self._address, "device": device}
        # Nothing has begun yet, so a replica that is asked to stop just leaves, without agreeing on it with the others.
        # But some may know all facts before others do. The group needs every replica, so none begins with it before
        # all have confirmed; one that has left meanwhile cannot confirm.
        facts = self.agree("the addresses of the training replicas", fact, stoppable=True)
        self.contribute(JOINING, {"stop": self.stopping})
        self.stop_together(self._wait(self._all_joining, JOINING))
        devices = [(fact["address"], fact["device"]) for fact in facts]
        nccl = all(device.startswith("cuda") for _, device in devices) and len(set(devices)) == self.size
        self._collective = Collective(meeting, self._store, nccl=nccl)

    def _all_joining(self) -> list[Fact] | None:
        left = next((name for name in self.missing if name in self._left), None)
        if left is not None:
            raise RunStopped(self._board.stopping or f"{left} was asked to stop before the replicas had met")
        return self.agreed()

    def agree(self, what: str, fact: Fact, *, stoppable: bool = False) -> list[Fact]:
        """Contribute a fact and return those of all replicas, in order; all replicas call this at the same points.

        Unless `stoppable`, it waits for the others even while the run is being stopped, since they contribute too.
        """
        self.contribute(what, fact)
        return self._wait(self.agreed, what, stoppable=stoppable)

    @property
    def stopping(self) -> bool:
        """Whether this replica was asked to stop and has to agree on that with others; part of its facts."""
        return self.size > 1 and self._board.stopping is not None

    def stop_together(self, facts: Iterable[Fact]) -> None:
        """Raise RunStopped if the facts of any replica say `stop`: then all raise it, at the same point."""
        if any(fact["stop"] for fact in facts):
            raise RunStopped(self._board.stopping or "another training replica was asked to stop")

    def contribute(self, what: str, fact: Fact) -> None:
        """The first half of `agree`, for callers with something to do meanwhile."""
        self._what = what
        with self._board.condition:
            self._send(self._agreement.contribute({ABOUT: what, **fact}, time.monotonic()))

    def agreed(self) -> list[Fact] | None:
        """The second half (under the board's lock): all facts, or None as long as some are missing."""
        facts = self._agreement.agreed()
        if facts is not None:
            topics = [fact[ABOUT] for fact in facts]
            assert set(topics) == {self._what}, f"the replicas agree on different things: {topics}"
        return facts

    def gather(self, tensor: Tensor) -> list[Tensor]:
        """The tensors that all replicas contribute here, in their order; for small ones, of any shapes."""
        described, data = encode_batch(Batch({"values": tensor.reshape(-1)}))
        own = {"batch": described, "data": bytes(data), "shape": list(tensor.shape)}
        facts = self.agree("a tensor to gather", own)
        parts = [decode_batch(fact["batch"], memoryview(fact["data"])).dense("values") for fact in facts]
        return [part.reshape(fact["shape"]).to(tensor.device) for part, fact in zip(parts, facts, strict=True)]

    def progress(self) -> object:
        """A value that changes as long as the others make progress, for waits."""
        return [self._node.membership.peers[name].progress for name in self.others]

    @property
    def opened(self) -> bool:
        """Whether another replica waits for this one to agree on something (under the board's lock)."""
        return self._agreement.opened

    @property
    def missing(self) -> tuple[str, ...]:
        """The replicas whose facts are not here yet."""
        return self._agreement.missing()

    def sum_(self, tensors: Sequence[Tensor]) -> None:
        """Replace tensors by their sums over all replicas, which give the same shapes in the same order."""
        if self._collective is None or self.size == 1:
            return
        for piece in self._collective.pieces(tensors):
            piece.begin(self._board.wake)
            self._wait(partial(_if_over, piece), "gradients")
            piece.finish()

    def leave(self) -> None:
        """Leave in order: make sure that the others have received the last facts agreed on."""
        if self.size == 1:
            return
        membership = self._node.membership
        with self._board.condition:
            self._leaving = True
            self._send(self._agreement.leave(time.monotonic()))
        try:
            self._board.until(
                # A replica that has left has received all that it needed.
                lambda: None if any(map(membership.present, self._agreement.unheard())) else True,
                name="the other training replicas to receive the last facts",
                peers=self._agreement.unheard,
                limit_s=self._limits.connect_s,
                limit="limits.connect_s",
                progress=self._agreement.unheard,
                even_when_stopping=True,
            )
        except NoProgressError as error:
            log.warning("%s; shutting down anyway", error)

    def close(self) -> None:
        """Leave the group."""
        if self._collective is not None:
            self._collective.close()

    def _wait(self, ready: Callable[[], T | None], what: str, *, stoppable: bool = False) -> T:
        return self._board.until(
            ready,
            name=f"{what} of the other training replicas" if self.size > 1 else what,
            peers=lambda: self._agreement.missing() or self.others,
            limit_s=self._limits.no_progress_s,
            progress=self.progress,
            even_when_stopping=not stoppable,
        )

    def _on_message(self, message: Message) -> None:
        self._send(self._agreement.handle(message.kind, message.sender, message.body))

    def _send(self, out: Iterable[MemberMessage]) -> None:
        for item in out:
            self._node.send(item.to, item.kind, item.body)

    def _on_lost(self, lost: Lost) -> None:
        # A replica whose work is done does not need the others: one that is gone may have left in order, and only its
        # message about that got lost. If it failed, its host agent reports it.
        if lost.orderly:
            self._left.add(lost.name)
        if lost.name in self.others and not (lost.orderly or self._leaving):
            self._board.fault(
                ReplicaLost(f"{lost.name} is lost ({lost.reason}); resume the run from its last checkpoint")
            )


def _if_over(piece: PendingSum) -> bool | None:
    return True if piece.over else None


class GroupStore(Store):
    """torch's view of the store, for one member; the first of `members` keeps the values. Threads of torch call it too.

    A request that is not answered within `limit_s` seconds (or torch's own timeout) raises DistStoreError, and so does
    every request once the endpoint is closed. Only `check`, which NCCL's monitor thread polls until its process group
    ends, then returns False: nothing catches an exception there, and the process would be aborted.
    """

    def __init__(self, node: Node, members: Sequence[str], limit_s: float) -> None:
        super().__init__()
        self._node = node
        self._keeper = members[0]
        self._limit_s = limit_s
        self._numbers = count(1)
        self._answers: dict[int, Answer | None] = {}
        """Answers by number of the open questions."""
        self._core = StoreCore(members)
        if node.endpoint.name == self._keeper:
            node.on(ASKED, lambda message: self._send(self._core.handle(message.sender, message.body)))
        node.on(ANSWERED, self._on_answer)

    def set(self, key: str, value: str | bytes) -> None:
        """Store a value."""
        self._ask(Question(next(self._numbers), "set", (key,), _bytes(value)))

    def get(self, key: str) -> bytes:
        """Return a value, once it has been set."""
        return self._ask(Question(next(self._numbers), "get", (key,))).found

    def add(self, key: str, value: int) -> int:
        """Add to a number that starts at 0; return the sum."""
        return self._ask(Question(next(self._numbers), "add", (key,), amount=value)).count

    def check(self, keys: list[str]) -> bool:
        """Whether all keys are set."""
        return bool(self._ask(Question(next(self._numbers), "check", tuple(keys))).count)

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        """Return once all keys are set."""
        limit_s = self._limit_s if timeout is None else timeout.total_seconds()
        self._ask(Question(next(self._numbers), "wait", tuple(keys)), limit_s)

    def compare_set(self, key: str, expected_value: str | bytes, desired_value: str | bytes) -> bytes:
        """Replace a value if it is the expected one (b"": if none is set); return the value then set."""
        expected, desired = _bytes(expected_value), _bytes(desired_value)
        return self._ask(Question(next(self._numbers), "swap", (key,), desired, expected)).found

    def delete_key(self, key: str) -> bool:
        """Remove a key; return whether it was set."""
        return bool(self._ask(Question(next(self._numbers), "delete", (key,))).count)

    def num_keys(self) -> int:
        """Return the number of keys."""
        return self._ask(Question(next(self._numbers), "count")).count

    def set_timeout(self, timeout: timedelta) -> None:
        """Set the time limit of every further call."""
        self._limit_s = timeout.total_seconds()

    def clone(self) -> GroupStore:
        """Return this store, which several threads may use at once."""
        return self

    def _ask(self, question: Question, limit_s: float | None = None) -> Answer:
        limit_s = self._limit_s if limit_s is None else limit_s
        board, number = self._node.board, question.number
        deadline, ask_at = time.monotonic() + limit_s, 0.0
        with board.condition:
            self._answers[number] = None
            try:
                while (answer := self._answers[number]) is None:
                    now = time.monotonic()
                    failure = self._failure(question, limit_s, late=now >= deadline)
                    if failure is not None and question.verb == "check":
                        return Answer(number)
                    if failure is not None:
                        raise failure
                    if now >= ask_at:
                        ask_at = now + ASK_AGAIN_S
                        self._send([MemberMessage(self._keeper, ASKED, msgspec.structs.asdict(question))])
                    board.condition.wait(max(0.001, min(ask_at, deadline) - now))
            finally:
                del self._answers[number]
        return answer

    def _failure(self, question: Question, limit_s: float, *, late: bool) -> BaseException | None:
        """Why there will be no answer, if that is certain."""
        if self._node.board.failure is not None:
            return self._node.board.failure
        if self._node.endpoint.closing:
            return DistStoreError(CLOSED)
        if not late:
            return None
        return DistStoreError(
            f"{self._keeper} did not answer {question.verb} {', '.join(question.keys)} within {limit_s:g} s: not all "
            "members of the process group are present"
        )

    def _on_answer(self, message: Message) -> None:
        answer = read(message.body, Answer, ANSWERED)
        if message.sender == self._keeper and answer.number in self._answers:
            self._answers[answer.number] = answer

    def _send(self, out: Sequence[MemberMessage]) -> None:
        for item in out:
            self._node.send(item.to, item.kind, item.body)


def _bytes(value: Any) -> bytes:
    return value.encode() if isinstance(value, str) else bytes(value)
