"""The asking side of calls at one worker: what it asks other workers for, and the samples that wait for their answers.

`Calls` connects the client's core (`distflow/exchange/call_client.py`) with the worker's sockets. `Asking` holds whole
groups of a generating worker until another pool has run a step on them: its script's `w.ask("reward", …)`.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

from distflow.comm.membership import Lost, Member
from distflow.comm.message import Message
from distflow.comm.outbox import SentOnce
from distflow.data.batch import Batch, RowRange, group_ranges, row_lengths
from distflow.data.batch_wire import decode_batch, encode_batch
from distflow.data.fields import complaint, with_fields
from distflow.data.samples import unrewarded_where_failed, untrained_where_left_out
from distflow.errors import NoProgressError, ProtocolError, StepError
from distflow.exchange.call_client import Call, CallClient
from distflow.exchange.call_messages import (
    CallAnswer,
    CallRequest,
    CallWithdrawn,
    OutgoingCall,
    from_wire,
    kind_of,
    to_wire,
)
from distflow.exchange.facts import LOAD, SERVES
from distflow.exchange.owner_links import Held
from distflow.flow.memory import BYTES_PER_TOKEN
from distflow.flow.plan import Plan, Port
from distflow.log import logger
from distflow.runtime.further_generating import FurtherGenerating, wrong_prompts
from distflow.runtime.metrics import MetricStore
from distflow.runtime.node import Node
from distflow.types import Version, WorkerName, lease_kind, written

ANSWERS = ("call.answer", "call.not_yet", "call.returned")
Deliver = Callable[[int, Batch], None]
Key = tuple[str, int]
"""Step, and position of a group."""
log = logger(__name__)


class Calls:
    """All that one worker asks for, as its plan says. Always called under the worker's lock."""

    def __init__(self, node: Node, plan: Plan, ports: Sequence[Port], metrics: MetricStore, term: int) -> None:
        self._node = node
        self._metrics = metrics
        self._edges = {port.edge: plan.edge(port.edge) for port in ports}
        self._writes = {step.name: step.writes for step in plan.steps if step.name in self._edges}
        pools = {name: edge.target for name, edge in self._edges.items()}
        rng = random.Random(f"{node.endpoint.name}/{node.endpoint.incarnation}")
        ahead_bytes = 2 * plan.batch.tokens_per_microbatch * BYTES_PER_TOKEN
        self._core = CallClient(node.endpoint.incarnation, pools, ahead_bytes, rng)
        self._servers = frozenset(pools.values())
        self._term = term
        self._versioned = {edge.target for edge in self._edges.values() if edge.version in ("exact", "at least")}
        """Pools whose workers say which version they answer with."""
        self.newest: Version | None = None
        """The newest version that has generated an answer."""
        self._sent = SentOnce()
        self._rows: dict[Key, Batch] = {}
        """What the open calls are about."""
        self._answered: dict[str, list[tuple[int, Batch]]] = {edge: [] for edge in self._edges}
        """Answers that have not been taken, by step: the position of the group, and what the step wrote."""
        self._deliver: dict[str, Deliver] = {}
        self._heard: dict[str, float] = {}
        self._facts: dict[str, Mapping[str, Any]] = {}
        """Those of each server that were taken note of last."""
        for kind in ANSWERS:
            node.on(kind, self._on_message)
        node.on_joined(self._joined)
        node.on_lost(self._lost)
        node.on_tick(self._tick)

    def ask(self, step: str, position: int, group: RowRange, t: int, least: Version | None = None) -> None:
        """Ask for a step over a group, in training step t; raises StepError if it lacks a field.

        What computes with a trained model is answered by version t of it, and by no other; what generates with one, by
        version `least` or a later one.
        """
        rows = group.rows
        asked = rows.only(fields_of(rows, self._edges[step].fields, f"step {step!r}"))
        key = (step, position)
        self._rows[key] = asked
        tokens = rows.rows * max(1, int(row_lengths(asked).max()))
        version = self._edges[step].version
        need = Version(self._term, t) if version == "exact" else least if version == "at least" else None
        call = Call(step, key, t, need, asked.nbytes, tokens, at_least=version == "at least")
        self._post(self._core.ask(call, time.monotonic()))

    def deliver(self, step: str, handler: Deliver) -> None:
        """Hand answers of a step to `handler(position, answer)` as they come; the others, and those about samples of
        validation, are there to be taken.
        """
        self._deliver[step] = handler

    def take(self, step: str) -> list[tuple[int, Batch]]:
        """The answers since the last call: positions of groups, each with what the step wrote for it."""
        answered, self._answered[step] = self._answered[step], []
        return answered

    def has_answers(self, step: str | None = None) -> bool:
        """Whether there are answers to take, of this step or of any."""
        return any(self._answered.values()) if step is None else bool(self._answered[step])

    def cancel(self, keys: Collection[Key]) -> None:
        """The answers of these are not wanted any more."""
        for key in keys:
            self._rows.pop(key, None)
        for step, answered in self._answered.items():
            self._answered[step] = [(position, batch) for position, batch in answered if (step, position) not in keys]
        self._post(self._core.cancel(keys))

    def restarted(self, begins: Mapping[int, int]) -> None:
        """Training has restarted (`begins`: training steps by term)."""
        self._core.restarted(begins)

    def waiting(self) -> tuple[str, tuple[str, ...]] | None:
        """What the oldest open call waits for, and the workers that could help; None if nothing is open."""
        return self._core.waiting()

    # -- on the endpoint's thread

    def _on_message(self, message: Message) -> None:
        said = from_wire(message.kind, message.body)
        assert not isinstance(said, CallRequest | CallWithdrawn), f"{message.kind} is not of a caller"
        answer = self._read(said, message) if isinstance(said, CallAnswer) else None
        out = self._core.handle(message.sender, message.incarnation, said, time.monotonic())
        for key, _number in self._core.take_answered():
            assert isinstance(key, tuple), f"{key} is not one of ours"
            assert answer is not None, "only an answer answers a call"
            step, position = key
            del self._rows[step, position]
            if isinstance(said, CallAnswer) and said.version is not None:
                self.newest = said.version if self.newest is None else max(self.newest, said.version)
            if step in self._deliver and lease_kind(position) == "train":
                self._deliver[step](position, answer)
            else:
                self._answered[step].append((position, answer))
            self._metrics.add("calls/answers", 1)
            self._node.work_done()
        self._post(out)

    def _read(self, answer: CallAnswer, message: Message) -> Batch | None:
        """The rows of an answer that may count; raises ProtocolError if they do not fit to the request."""
        key = self._core.key_of(answer.number) if answer.incarnation == self._node.endpoint.incarnation else None
        if key is None:
            return None
        assert isinstance(key, tuple), f"{key} is not one of ours"
        if len(message.payload) != 1:
            raise ProtocolError(f"an answer with {len(message.payload)} payload frames; expected 1")
        batch = decode_batch(answer.batch, message.payload[0])
        edge, rows = self._edges[key[0]], self._rows[key].rows
        missing = [field for field in self._writes[edge.name] if field not in batch and "*" not in field]
        if batch.rows != rows or missing:
            raise ProtocolError(
                f"an answer of {edge.name!r} with {batch.rows} rows of {sorted(batch.columns)}; expected {rows} rows "
                f"of {', '.join(edge.back)}"
            )
        found = batch.only([name for name in batch.columns if written(name, edge.back)])
        wrong = complaint(self._rows[key].with_columns(**found.columns), list(found.columns))
        if wrong is not None:
            raise ProtocolError(f"an answer of {edge.name!r} that {wrong}")
        return found

    def _joined(self, name: str, incarnation: int) -> None:
        if WorkerName.parse(name).pool in self._servers:
            self._post(self._core.server(name, incarnation, present=True, load=0, now=time.monotonic()))

    def _lost(self, lost: Lost) -> None:
        if WorkerName.parse(lost.name).pool in self._servers:
            now = time.monotonic()
            self._post(self._core.server(lost.name, lost.incarnation, present=False, load=0, now=now))

    def _tick(self, now: float) -> None:
        for name, peer in self._node.membership.peers.items():
            if WorkerName.parse(name).pool in self._servers and self._heard.get(name) != peer.heard_at:
                self._heard[name] = peer.heard_at
                self._core.heard(name, now)
                self._hear_facts(name, peer, now)
        self._post(self._core.tick(now))

    def _hear_facts(self, name: str, peer: Member, now: float) -> None:
        """With each heartbeat servers say how much they have to do, for whomever, and which version they have: what
        they said before may have been lost.
        """
        if peer.facts is self._facts.get(name) or peer.state != "present":
            return
        self._facts[name] = peer.facts
        if LOAD in peer.facts:
            load = peer.facts[LOAD]
            self._post(self._core.server(name, peer.incarnation, present=True, load=load, now=now))
        if WorkerName.parse(name).pool in self._versioned and SERVES in peer.facts:
            self._post(self._core.announced(name, peer.incarnation, Version(*peer.facts[SERVES])))

    def _post(self, out: Sequence[OutgoingCall]) -> None:
        for item in out:
            request = item.message
            if isinstance(request, CallWithdrawn):
                self._node.send(item.to, kind_of(request), to_wire(request))
                continue
            assert isinstance(request, CallRequest), f"callers send no {kind_of(request)}"
            if self._sent.under_way(item.to, request.number):
                continue
            key = self._core.key_of(request.number)
            assert isinstance(key, tuple), f"request {request.number} is not open"
            described, buffer = encode_batch(self._rows[key])
            body = {**to_wire(request), "batch": described}
            self._sent.note(
                item.to, request.number, self._node.endpoint.send(item.to, kind_of(request), body, [buffer])
            )
            self._metrics.add("calls/requests", 1)


class Asking:
    """Whole groups of a generating worker on which other pools, or engines here, run steps before they are sent.

    `further`: those engines, by step; `training_step` gives the one that groups are asked for now; `find` what is held
    of a position, None if its lease is gone; `leave_s` is how long a leaving worker waits for them.
    """

    def __init__(
        self,
        calls: Calls | None,
        further: Mapping[str, FurtherGenerating],
        node: Node,
        plan: Plan,
        training_step: Callable[[], int],
        find: Callable[[int], Held | None],
        leave_s: float,
    ) -> None:
        self._calls = calls
        self._further = further
        self._board = node.board
        self._plan = plan
        self._generated = {step.name for step in plan.further_generation}
        self._training_step = training_step
        self._find = find
        self._leave_s = leave_s
        self._leaves_at: float | None = None
        self._out: dict[Key, RowRange] = {}
        """The groups that are asked for."""

    def through(self, step: str, source: Iterator[Batch | None]) -> Iterator[Batch | None]:
        """Yield the groups of `source` once `step` has been run on them; None where nothing has come for now.

        What is out when `source` ends stays here: a colocated worker goes on with it when it generates again.
        """
        for groups in source:
            with self._board.condition:
                for position, rows in ({} if groups is None else group_ranges(groups)).items():
                    self._ask(step, position, rows)
            yield from self._back(step)

    def rest(self, step: str) -> Iterator[Batch | None]:
        """This worker leaves: yield what is out, as far as it comes back soon."""
        while any(key[0] == step for key in self._out) and self._wait(step):
            yield from self._back(step)

    @property
    def news(self) -> bool:
        """Whether answers have come. Called under the worker's lock."""
        return (self._calls is not None and self._calls.has_answers()) or any(
            further.has_answers for further in self._further.values()
        )

    def advance(self) -> None:
        """Decode a token with the further engines here."""
        for further in self._further.values():
            further.advance()

    @property
    def something(self) -> bool:
        """Whether a further engine has something to do. Called under the worker's lock."""
        return any(further.something for further in self._further.values())

    @property
    def signs_of_life(self) -> float:
        """A number that changes while further engines get weights, or their episodes wait for something else."""
        return sum(further.signs_of_life for further in self._further.values())

    def waiting(self) -> tuple[str, tuple[str, ...]] | None:
        """What the oldest group that is asked for waits for, and the workers that could help; None: none is."""
        waits = [] if self._calls is None else [self._calls.waiting()]
        waits += [further.waiting() for further in self._further.values()]
        return next((wait for wait in waits if wait is not None), None)

    def cancel(self, positions: Collection[int]) -> None:
        """These groups are not wanted any more. Called under the worker's lock."""
        gone = [key for key in self._out if key[1] in positions]
        for key in gone:
            del self._out[key]
        for further in self._further.values():
            further.cancel(positions)
        if self._calls is not None:
            self._calls.cancel(gone)

    def cancel_all(self) -> None:
        """No group is wanted any more. Called under the worker's lock."""
        self.cancel({position for _, position in self._out})

    def _ask(self, step: str, position: int, rows: RowRange) -> None:
        held = self._find(position)
        if held is None:
            return  # the group is not wanted any more
        if step in self._generated and (wrong := wrong_prompts(self._plan, step, rows.rows)) is not None:
            raise StepError(f"step {step!r} gets a group, of prompt position {position}, that {wrong}")
        self._out[step, position] = rows
        if step in self._further:
            self._further[step].ask(position, rows.rows, self._training_step(), held.lease.least)
        else:
            assert self._calls is not None, f"{step!r} is asked for, so there is a port for it"
            self._calls.ask(step, position, rows, self._training_step(), held.lease.least)

    def _take(self, step: str) -> list[tuple[int, Batch]]:
        if step not in self._further:
            return [] if self._calls is None else self._calls.take(step)
        return [(position, answer) for position, answer in self._further[step].take() if isinstance(position, int)]

    def _back(self, step: str) -> Iterator[Batch | None]:
        """The groups with answers, in batches of equal columns; None if there are none."""
        with self._board.condition:
            groups = [(self._out.pop((step, position)), answer) for position, answer in self._take(step)]
        if not groups:
            yield None
        alike: dict[frozenset[str], list[Batch]] = {}
        for group, answer in groups:
            found = with_fields(group.rows, answer.columns)
            whole = untrained_where_left_out(unrewarded_where_failed(found))
            alike.setdefault(frozenset(whole.columns), []).append(whole)
        for batches in alike.values():
            names = list(batches[0].columns)
            yield Batch.concat([batch.only(names) for batch in batches])

    def _wait(self, step: str) -> bool:
        """Wait for answers; returns whether there are any."""
        now = time.monotonic()
        self._leaves_at = now + self._leave_s if self._leaves_at is None else self._leaves_at
        if step in self._further:
            return self._made(self._further[step], self._leaves_at)
        calls = self._calls
        assert calls is not None, f"{step!r} is asked for, so there is a port for it"
        try:
            return self._board.until(
                lambda: calls.has_answers(step) or None,
                name=f"answers of {step!r} before this worker leaves",
                peers=lambda: (calls.waiting() or ("", ()))[1],
                limit_s=max(0.0, self._leaves_at - now),
                limit="limits.drain_s",
                progress=lambda: None,
                even_when_stopping=True,
            )
        except NoProgressError as error:
            log.warning("%s; the samples are handed back", error)
            return False

    def _made(self, further: FurtherGenerating, until: float) -> bool:
        """Whether the engine here has made a group by then."""
        while not further.has_answers and further.busy and time.monotonic() < until:
            further.advance()
        return further.has_answers


def fields_of(batch: Batch, wanted: Sequence[str], reader: str) -> list[str]:
    """The fields of a batch that are wanted, by names and patterns; raises StepError if one is missing."""
    found: list[str] = []
    for field in wanted:
        if field.endswith("*"):
            found += [name for name in batch.columns if name.startswith(field[:-1])]
        elif field in batch:
            found.append(field)
        else:
            raise StepError(
                f"field {field!r} is read by {reader}, but the groups to send have only {sorted(batch.columns)} — "
                "a script must call the step that writes it before"
            )
    return found
