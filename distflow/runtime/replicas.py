"""What the replicas of a home do together: agree, sum gradients, and send weights in parts to readers.

Decisions for a whole group (stop, how to divide the gradient, what a checkpoint holds) are functions of the training
step and of facts that every member has received from every other, so none has to decide for the rest. A group is the
replicas of one home, or all those of all homes (the stateful set).

torch's process groups are made through `GroupStore`, its view of the store in `distflow.comm.store`, over the endpoint.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from datetime import timedelta
from functools import partial
from itertools import count
from typing import Any, TypeVar

import msgspec
from torch import Tensor
from torch._C._distributed_c10d import Store
from torch.distributed import DistStoreError

from distflow.comm.collective import LOOPBACK, Collective, PendingSum, Rendezvous
from distflow.comm.fact_exchange import KINDS, Agreement, Fact, group_of
from distflow.comm.membership import Lost, MemberMessage
from distflow.comm.message import Message
from distflow.comm.store import ANSWERED, ASKED, Answer, Question, StoreCore
from distflow.comm.traffic import GLOO
from distflow.config.schema import LimitsConfig
from distflow.data.batch import Batch
from distflow.data.batch_wire import decode_batch, encode_batch
from distflow.data.decoding import Form, Whole, read
from distflow.errors import NoProgressError, ProtocolError, ReplicaLost, RunStopped
from distflow.flow.lanes import parts_readers
from distflow.log import logger
from distflow.runtime.assembly import Setting
from distflow.runtime.node import Hosts, Node
from distflow.types import WorkerName
from distflow.weights.shards.conductor import FORM_S, ShardConductor
from distflow.weights.shards.link import LinkSurroundings, ShardLink
from distflow.weights.shards.messages import GO, GROUP, REPORT

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


EVERYONE = "*"
"""Name of the group of all homes; that of a home's own replicas is the name of its pool."""
JOINING = "whether to make the group"
ASK_AGAIN_S = 0.5
STORE_S = 2 * FORM_S
"""For an answer of the store by which a group that moves weights in parts is made."""
CLOSED = "the worker has left: the store of its process group is closed"


class _EndTerm(Form, frozen=True):
    term: Whole


class Replicas(MemberGroup):
    """This replica among `replicas` (all of its home, in order) in a term; `everyone`: those of all homes."""

    def __init__(
        self,
        me: str,
        replicas: Sequence[str],
        everyone: Sequence[str],
        node: Node,
        limits: LimitsConfig,
        address: str,
        term: int = 0,
    ) -> None:
        self._term = term
        agreements = Agreements(node)
        super().__init__(WorkerName.parse(me).pool, me, replicas, agreements, limits)
        self.set = MemberGroup(EVERYONE, me, everyone, agreements, limits)
        """The stateful set: it begins, is saved and stops together."""
        self._address = address
        self._store = GroupStore(node, replicas, limits.no_progress_s)
        self._collective: Collective | None = None
        self.asked_to_leave = False
        """Whether a host agent wants this term to end after the training step, for another number of workers."""
        node.on_agent("end_term", self._on_end_term)
        self.finishes_step = False
        """The present training step will be finished, whoever is asked to stop: its first update is taken, or other
        homes are told to train on it, or told it this one."""

    def _on_end_term(self, message: Message) -> None:
        # One that was sent to the worker before this one, at the same address, may still come.
        if read(message.body, _EndTerm, message.kind).term == self._term:
            self.asked_to_leave = True

    def connect(self, device: str, *, even_alone: bool = False) -> None:
        """Create the process group once all replicas of all homes are present; for a single one only with `even_alone`.

        Raises ReplicaLost if another one is lost meanwhile, WorkerFailed if it fails otherwise.
        """
        if self.set.size == 1 and not even_alone:
            return
        fact = {"address": self._address, "device": device}
        # Nothing has begun yet, so a replica that is asked to stop just leaves, without agreeing on it with the others.
        # But some may know all facts before others do. The group needs every replica, so none begins with it before
        # all have confirmed; one that has left meanwhile cannot confirm.
        facts = self.set.agree("the addresses of the training replicas", fact, stoppable=True)
        self.set.contribute(JOINING, {"stop": self.stopping})
        self.stop_together(self.set.wait(self._all_joining, JOINING))
        if self.size == 1 and not even_alone:
            return
        meeting = Rendezvous(self.rank, self.size, self._address, self._limits.no_progress_s)
        here = zip(self.set.members, facts, strict=True)
        devices = [(fact["address"], fact["device"]) for name, fact in here if name in self.members]
        nccl = all(device.startswith("cuda") for _, device in devices) and len(set(devices)) == self.size
        self._collective = Collective(meeting, self._store, nccl=nccl)

    def _all_joining(self) -> list[Fact] | None:
        left = next((name for name in self.set.missing if name in self.set.left), None)
        if left is not None:
            raise RunStopped(self._board.stopping or f"{left} was asked to stop before the replicas had met")
        return self.set.agreed()

    @property
    def stopping(self) -> bool:
        """Whether this replica was asked to stop and has to agree on that with others; part of its facts."""
        return self.set.size > 1 and self._board.stopping is not None and not self.finishes_step

    def sum_(self, tensors: Sequence[Tensor]) -> None:
        """Replace tensors by their sums over all replicas, which give the same shapes in the same order."""
        if self._collective is None or self.size == 1:
            return
        for piece in self._collective.pieces(tensors):
            piece.begin(self._board.wake)
            self.wait(partial(_if_over, piece), "gradients")
            piece.finish()

    def leave(self) -> None:
        """Leave in order: make sure that the others have received the last facts agreed on."""
        leave([self, self.set], self._node, self._limits)

    def close(self) -> None:
        """Leave the group."""
        if self._collective is not None:
            self._collective.close()


def build_replicas(setting: Setting, node: Node) -> Replicas:
    """This replica of its home."""
    address, standing = setting.document.address or LOOPBACK, setting.standing
    home = next(iter(standing.gradients.values()))
    about = (node, setting.recipe.limits, address, setting.document.term)
    return Replicas(str(setting.me.name), home, standing.members, *about)


def _if_over(piece: PendingSum) -> bool | None:
    return True if piece.over else None


class GroupStore(Store):
    """torch's view of the store, for one member; the first of `members` keeps the values. Threads of torch call it too.

    A request that is not answered within `limit_s` seconds (or torch's own timeout) raises DistStoreError, and so does
    every request once the endpoint is closed. Only `check`, which NCCL's monitor thread polls until its process group
    ends, then returns False: nothing catches an exception there, and the process would be aborted.
    `suffix`: of the kinds of its messages, for a store beside that of the replicas.
    """

    def __init__(self, node: Node, members: Sequence[str], limit_s: float, suffix: str = "") -> None:
        super().__init__()
        self._node = node
        self._limit_s = limit_s
        self._asked, self._answered = ASKED + suffix, ANSWERED + suffix
        self._numbers = count(1)
        self._answers: dict[int, Answer | None] = {}
        """Answers by number of the open questions."""
        self.begin(members)
        node.on(self._asked, self._on_question)
        node.on(self._answered, self._on_answer)

    def begin(self, members: Sequence[str]) -> None:
        """Empty the store; from now on it is of these members."""
        self._keeper, self._core = members[0], StoreCore(members)

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
                        self._node.send(self._keeper, self._asked, msgspec.structs.asdict(question))
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

    def _on_question(self, message: Message) -> None:
        if self._node.endpoint.name != self._keeper:
            raise ProtocolError(f"the store that {message.sender} asks for is kept by {self._keeper}")
        for item in self._core.handle(message.sender, message.body):
            self._node.send(item.to, self._answered, item.body)


def _bytes(value: Any) -> bytes:
    return value.encode() if isinstance(value, str) else bytes(value)


def build_shard_links(setting: Setting, node: Node, hosts: Hosts) -> Mapping[str, ShardLink]:
    """This worker's part in moving weights in parts (`weights.link: collective`), by model."""
    me, plan = setting.me, setting.plan
    links = {}
    for model in plan.generating:
        pools = parts_readers(plan, model)
        trainers = setting.home_of(model) if pools else ()
        trains = str(me.name) in trainers
        if (trains and len(trainers) > 1) or me.name.pool in pools:
            conducts = trains and trainers[0] == str(me.name)
            conductor = ShardConductor(model, setting.document.term, trainers) if conducts else None
            link = ShardLink(model, _surroundings(model, pools, node, hosts), conductor)
            if trains:
                link.reports_to(trainers[0], setting.document.term)
            links[model] = link
    _connect(node, links)
    return links


def _surroundings(model: str, pools: Container[str], node: Node, hosts: Hosts) -> LinkSurroundings:
    me, membership = node.endpoint.name, node.membership
    store = GroupStore(node, [me], STORE_S, f".{model}")

    def store_of(members: Sequence[str]) -> GroupStore:
        store.begin(members)
        return store

    return LinkSurroundings(
        me=me,
        address=hosts.address or LOOPBACK,
        lock=node.board.condition,
        post=node.send,
        store=store_of,
        readers=lambda: [
            name for name in membership.peers if WorkerName.parse(name).pool in pools and membership.present(name)
        ],
        count=lambda nbytes: node.endpoint.traffic.count(GLOO, 1, nbytes),
        fault=node.board.fault,
    )


def _connect(node: Node, links: Mapping[str, ShardLink]) -> None:
    if not links:
        return

    def on_message(message: Message) -> None:
        link = links.get(str(message.body.get("model")))
        if link is not None:
            link.on_message(message.sender, message.kind, message.body)

    for kind in (REPORT, GROUP, GO):
        node.on(kind, on_message)
    for link in links.values():
        node.on_tick(link.tick)
        node.on_lost(link.lost)
        node.on_close(link.close)
    node.status_rows["weights_in_parts"].append(lambda: [link.status() for link in links.values()])
