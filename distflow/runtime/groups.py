"""What the members of a group agree on: the replicas of one home, or all those of all homes (the stateful set).

Decisions for a whole group (stop, how to divide the gradient, what a checkpoint holds) are functions of the training
step and of facts that every member has received from every other, so none has to decide for the rest.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from typing import TypeVar

from torch import Tensor

from distflow.comm.fact_exchange import KINDS, Agreement, Fact, group_of
from distflow.comm.membership import Lost, MemberMessage
from distflow.comm.message import Message
from distflow.config.schema import LimitsConfig
from distflow.data.batch import Batch
from distflow.data.batch_wire import decode_batch, encode_batch
from distflow.errors import NoProgressError, ProtocolError, ReplicaLost, RunStopped
from distflow.log import logger
from distflow.runtime.node import Node

T = TypeVar("T")
ABOUT = "about"

log = logger(__name__)


class Agreements:
    """The groups of one worker: each message of an agreement reaches the one that it names."""

    def __init__(self, node: Node) -> None:
        self.node = node
        self._groups: dict[str, Agreement] = {}
        for kind in sorted(KINDS):
            node.on(kind, self._on_message)
        node.on_tick(self._tick)

    def join(self, group: str, me: str, members: Sequence[str]) -> Agreement:
        """This worker's part in a group that is new to it."""
        assert group not in self._groups, f"{me} is in group {group!r} already"
        self._groups[group] = Agreement(group, me, members)
        return self._groups[group]

    def send(self, out: Iterable[MemberMessage]) -> None:
        """Send what an agreement gave."""
        for item in out:
            self.node.send(item.to, item.kind, item.body)

    def _on_message(self, message: Message) -> None:
        group = group_of(message.kind, message.body)
        if group not in self._groups:
            raise ProtocolError(f"this worker is not in group {group!r}; its own are {', '.join(self._groups)}")
        self.send(self._groups[group].handle(message.kind, message.sender, message.body))

    def _tick(self, now: float) -> None:
        for agreement in self._groups.values():
            self.send(agreement.tick(now))


class MemberGroup:
    """This worker among `members` (all of them, in order). A single one never waits."""

    def __init__(
        self, name: str, me: str, members: Sequence[str], agreements: Agreements, limits: LimitsConfig
    ) -> None:
        self.me = me
        self.rank = members.index(me)
        self.size = len(members)
        self.members = tuple(members)
        self.others = tuple(member for member in members if member != me)
        self._node = agreements.node
        self._board = self._node.board
        self._limits = limits
        self._agreements = agreements
        self._agreement = agreements.join(name, me, members)
        self._what = ""
        self._leaving = False
        self.left: set[str] = set()
        """Members that left in order."""
        self._node.on_lost(self._on_lost)

    def agree(self, what: str, fact: Fact, *, stoppable: bool = False) -> list[Fact]:
        """Contribute a fact and return those of all members, in order; all members call this at the same points.

        Unless `stoppable`, it waits for the others even while the run is being stopped, since they contribute too.
        """
        self.contribute(what, fact)
        return self.wait(self.agreed, what, stoppable=stoppable)

    def contribute(self, what: str, fact: Fact) -> None:
        """The first half of `agree`, for callers with something to do meanwhile."""
        self._what = what
        with self._board.condition:
            self._agreements.send(self._agreement.contribute({ABOUT: what, **fact}, time.monotonic()))

    def agreed(self) -> list[Fact] | None:
        """The second half (under the board's lock): all facts, or None as long as some are missing."""
        facts = self._agreement.agreed()
        if facts is not None:
            topics = [fact[ABOUT] for fact in facts]
            assert set(topics) == {self._what}, f"the replicas agree on different things: {topics}"
        return facts

    def stop_together(self, facts: Iterable[Fact]) -> None:
        """Raise RunStopped if the facts of any member say `stop`: then all raise it, at the same point."""
        if any(fact["stop"] for fact in facts):
            raise RunStopped(self._board.stopping or "another training replica was asked to stop")

    def gather(self, tensor: Tensor) -> list[Tensor]:
        """The tensors that all members contribute here, in their order; for small ones, of any shapes."""
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
        """Whether another member waits for this one to agree on something (under the board's lock)."""
        return self._agreement.opened

    @property
    def missing(self) -> tuple[str, ...]:
        """The members whose facts are not here yet."""
        return self._agreement.missing()

    def wait(self, ready: Callable[[], T | None], what: str, *, stoppable: bool = False) -> T:
        """Wait until `ready` returns something, as long as the others make progress; `what` is awaited of them."""
        return self._board.until(
            ready,
            name=f"{what} of the other training replicas" if self.size > 1 else what,
            peers=lambda: self._agreement.missing() or self.others,
            limit_s=self._limits.no_progress_s,
            progress=self.progress,
            even_when_stopping=not stoppable,
        )

    def _on_lost(self, lost: Lost) -> None:
        # A replica whose work is done does not need the others: one that is gone may have left in order, and only its
        # message about that got lost. If it failed, its host agent reports it.
        if lost.orderly:
            self.left.add(lost.name)
        if lost.name in self.others and not (lost.orderly or self._leaving):
            self._board.fault(
                ReplicaLost(f"{lost.name} is lost ({lost.reason}); resume the run from its last checkpoint")
            )

    def begin_to_leave(self) -> None:
        """Have the others confirm the last facts agreed on; `unheard` names those that have not."""
        if self.size > 1:
            with self._board.condition:
                self._leaving = True
                self._agreements.send(self._agreement.leave(time.monotonic()))

    def unheard(self) -> tuple[str, ...]:
        """Members that have not confirmed them. One that has left has received all that it needed."""
        return tuple(filter(self._node.membership.present, self._agreement.unheard()))


def leave(groups: Sequence[MemberGroup], node: Node, limits: LimitsConfig) -> None:
    """Leave groups in order: make sure that the others have received the last facts agreed on."""
    for group in groups:
        group.begin_to_leave()

    def unheard() -> tuple[str, ...]:
        return tuple(dict.fromkeys(name for group in groups for name in group.unheard()))

    try:
        node.board.until(
            lambda: None if unheard() else True,
            name="the other training replicas to receive the last facts",
            peers=unheard,
            limit_s=limits.connect_s,
            limit="limits.connect_s",
            progress=unheard,
            even_when_stopping=True,
        )
    except NoProgressError as error:
        log.warning("%s; shutting down anyway", error)
