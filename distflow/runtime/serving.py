"""The answering side of calls at one worker: its script's `w.requests` and `w.answer`, and the messages behind them.

    for batch in w.requests("reward"):
        w.answer(w.call("reward", batch))

Requests of all callers are joined into batches by the server's core (`distflow/exchange/call_server.py`). A service
trains nothing: it goes on until every owner of ledgers has left in order, or it is asked to leave itself. It then
finishes what it has begun, and the rest goes back to the callers.

What a further model is asked to generate is begun as slots become free, and answered group by group:

    for groups in w.generate("solve", w.requests("solve")):
        w.answer(groups)
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from itertools import accumulate, pairwise
from types import MappingProxyType
from typing import NamedTuple

from distflow.comm.membership import Lost
from distflow.comm.message import Message
from distflow.data.batch import Batch, RowRange, join, with_same_parts
from distflow.data.batch_wire import decode_batch, encode_batch
from distflow.data.fields import complaint
from distflow.errors import ProtocolError, StepError, UserError
from distflow.exchange.call_messages import (
    CallAnswer,
    CallRequest,
    CallWithdrawn,
    OutgoingCall,
    from_wire,
    kind_of,
    to_wire,
)
from distflow.exchange.call_server import CallKey, CallServer
from distflow.exchange.facts import BEGINS, LOAD, OWNERS, SERVES, TERM
from distflow.flow.edges import Edge
from distflow.flow.plan import Plan, Port
from distflow.runtime.further_generating import FurtherGenerating, wrong_prompts
from distflow.runtime.metrics import REQUESTS, MetricStore
from distflow.runtime.node import Node
from distflow.types import Version, in_pool, prefixed, written

REQUEST, WITHDRAWN = "call.request", "call.withdrawn"


class _Asked(NamedTuple):
    step: str
    t: int
    version: Version | None
    rows: Batch
    since: float = 0.0
    """When it was begun, if it is generated."""


class Answering:
    """The requests at one worker, for the steps that it runs for others. `ports`: the calls that it answers.

    `owners`: those when this worker started, in their term `term`.
    """

    def __init__(
        self, node: Node, plan: Plan, ports: Sequence[Port], owners: Sequence[str], term: int, metrics: MetricStore
    ) -> None:
        self._node = node
        self._board = node.board
        self._plan = plan
        self._metrics = metrics
        self._edges = {port.edge: plan.edge(port.edge) for port in ports}
        self._core = CallServer()
        self._queued: dict[CallKey, _Asked] = {}
        self._begun: list[tuple[CallKey, _Asked]] = []
        """The requests of the batch that the script has."""
        self._since = 0.0
        """When they were begun."""
        self._on_step: Callable[[int], None] = lambda t: None
        self._further: FurtherGenerating | None = None
        self._asked: dict[CallKey, _Asked] = {}
        """What the engine makes."""
        self._term, self._owners, self._home = term, tuple(owners), plan.home.name
        self._left: set[str] = set()
        """Peers that have left in order."""
        node.on(REQUEST, self._on_request)
        node.on(WITHDRAWN, self._on_withdrawn)
        node.on_lost(self._lost)
        node.on_joined(lambda name, incarnation: self._left.discard(name))
        node.on_tick(self._tick)

    # -- for a worker that trains, too

    def version(self, version: Version) -> None:
        """Answer with this version from now on. Called under the worker's lock."""
        self._node.facts[SERVES] = list(version)
        self._post(self._core.version(version))
        self._forget()

    @property
    def asked(self) -> bool:
        """Whether there is something to answer, or to generate. Called under the worker's lock."""
        return any(not self._makes(asked.step) for asked in self._queued.values()) or self._generates()

    def turn(self, run: Callable[[str, Batch], Batch]) -> bool:
        """Answer one batch of requests, if there are any, and generate a token; `run` runs a step.

        Returns whether there was anything to do.
        """
        with self._board.condition:
            self._begun = self._next([step for step in self._edges if not self._makes(step)])
            generates = self._generates()
            begun = bool(self._begun)
        if begun:
            self.answer(run(self._begun[0][1].step, self._joined()))
        if generates and (groups := self._made()) is not None:
            self.answer(groups)
        return begun or generates

    # -- what is generated

    @property
    def steps(self) -> Collection[str]:
        """The steps that it runs for others."""
        return self._edges.keys()

    def generates_by(self, further: FurtherGenerating) -> None:
        """Set the engine by which the steps are run that generate."""
        self._further = further

    def groups(self, step: str) -> Iterator[Batch]:
        """Yield the groups that are asked for, when they are whole, until training is over or this worker leaves."""
        further = self._further
        if further is None or not self._makes(step):
            made = "nothing" if further is None else repr(further.plan.name)
            raise UserError(f"script of {self._node.endpoint.name}: w.generate({step!r}, …); this worker makes {made}")
        self._node.facts |= {"state": "generating"}
        while not self.over:
            self._board.raise_if_over()
            if (groups := self._made()) is not None:
                yield groups
            elif not further.busy:
                self._await_work(further)

    def _makes(self, step: str) -> bool:
        return self._further is not None and self._further.plan.name == step

    def _generates(self) -> bool:
        """Whether there is something to generate, or to take for it."""
        further = self._further
        return further is not None and (further.something or self._may_begin(further))

    def _may_begin(self, further: FurtherGenerating) -> bool:
        """Whether something is asked for that there is room for."""
        asked = any(self._makes(one.step) for one in self._queued.values())
        return asked and further.has_room(self._plan.batch.samples_per_prompt)

    def _drop_unwanted(self, further: FurtherGenerating) -> None:
        """End what nobody waits for any more; the same may have been asked for again since."""
        gone = [key for key in self._asked if not self._core.works_on(key)]
        further.cancel(gone)
        for key in gone:
            del self._asked[key]

    def _made(self) -> Batch | None:
        """Begin what there is room for, decode a token, and return the groups that are whole: they are in hand."""
        further = self._further
        assert further is not None, "only called where a model generates"
        with self._board.condition:
            self._drop_unwanted(further)
            while self._may_begin(further) and (begun := self._next([further.plan.name], 0)):
                for key, asked in begun:
                    assert asked.version is not None, f"a request for {asked.step!r} says with which version"
                    self._asked[key] = asked._replace(since=self._since)
                    further.ask(key, asked.rows, asked.t, asked.version)
        further.advance()
        with self._board.condition:
            self._drop_unwanted(further)
            whole = [(key, answer) for key, answer in further.take() if isinstance(key, CallKey)]
            self._begun = [(key, self._asked.pop(key)) for key, _ in whole]
        if not whole:
            return None
        return Batch.concat([answer for _, answer in whole])

    def _await_work(self, further: FurtherGenerating) -> None:
        with self._metrics.timed(REQUESTS):
            self._board.until(
                lambda: True if self._generates() or self.over else None,
                name=lambda: (further.waiting() or (f"requests of {further.plan.name}", ()))[0],
                peers=lambda: (further.waiting() or ("", ()))[1],
                limit_s=self._plan.recipe.limits.no_progress_s,
                progress=lambda: (
                    further.signs_of_life,
                    [(p.progress, p.facts) for p in self._node.membership.peers.values()],
                ),
            )

    # -- called by the script

    def requests(self, steps: Sequence[str]) -> Iterator[tuple[str, Batch]]:
        """Yield batches of requests, each of one step, until training is over or this worker leaves.

        Raises StepError if a batch was not answered before the next one.
        """
        unknown = [step for step in steps if step not in self._edges] or [s for s in self._edges if s not in steps]
        if unknown:
            raise UserError(
                f"script of {self._node.endpoint.name}: w.requests names {', '.join(steps) or 'nothing'}; this worker "
                f"answers {', '.join(self._edges)}"
            )
        self._node.facts |= {"state": "serving"}
        while begun := self._await(steps):
            self._begun = begun
            first = begun[0][1]
            with self._board.condition:
                self._follow_term()
            self._on_step(first.t)
            yield first.step, self._joined()

    def answer(self, batch: Batch) -> None:
        """Send what the step wrote for the batch in hand back to those who asked."""
        begun, self._begun = self._begun, []
        asked = sum(request.rows.rows for _, request in begun)
        if not begun or batch.rows != asked:
            raise StepError(
                f"w.answer got {batch.rows} rows for requests of {asked} — answer each batch of w.requests once, with "
                "all its rows"
            )
        edge = self._edges[begun[0][1].step]
        answers = batch.only([name for name in batch.columns if written(name, edge.back)])
        ends = list(accumulate(request.rows.rows for _, request in begun))
        parts = {key: answers.slice(a, b) for (key, _), (a, b) in zip(begun, pairwise([0, *ends]), strict=True)}
        by = {key: newest for key, part in parts.items() if (newest := self._newest(edge, part)) is not None}
        now = time.monotonic()
        with self._board.condition:
            if not by:
                self._post(self._core.done(list(parts), now - self._since), parts)
            for key, request in begun if by else ():
                self._post(self._core.done([key], now - request.since, by), parts)
        self._metrics.add("calls/answered", len(parts))
        self._node.work_done()

    def on_step(self, handler: Callable[[int], None]) -> None:
        """Call `handler` with the training step that each batch is for, before the script gets it."""
        self._on_step = handler

    # -- how it ends

    def drain(self) -> None:
        """Leave: finish what was begun, give back the rest. Any thread may call this."""
        with self._board.condition:
            self._post(self._core.drain())
            self._queued.clear()
            self._board.condition.notify_all()

    @property
    def over(self) -> bool:
        """Whether there is nothing more to answer."""
        return self._core.drained or self.training_over

    @property
    def term(self) -> int:
        """The newest term that is known."""
        return self._term

    @property
    def training_over(self) -> bool:
        """Whether every owner has left in order."""
        return self._left.issuperset(self._owners)

    @property
    def over_in(self) -> int | None:
        """The training workers' term that has ended in order; None: none has. A later term may need this worker."""
        with self._board.condition:
            # Both of one term: the endpoint's thread learns of the next one.
            return self._term if self.training_over else None

    def _await(self, steps: Sequence[str]) -> list[tuple[CallKey, _Asked]]:
        """Wait for requests and begin them; an empty list when there will be none."""
        if self._begun:
            raise StepError("w.requests: the last batch was not answered — call w.answer for each of them")

        def ready() -> list[tuple[CallKey, _Asked]] | None:
            begun = self._next()
            return begun if begun or self.over else None

        with self._metrics.timed(REQUESTS):
            return self._board.until(
                ready,
                name=f"requests of {', '.join(steps)}",
                peers=(),  # nobody in particular has to have any
                limit_s=self._plan.recipe.limits.no_progress_s,
                progress=lambda: [(peer.progress, peer.facts) for peer in self._node.membership.peers.values()],
            )

    def _next(self, steps: Collection[str] | None = None, budget: int | None = None) -> list[tuple[CallKey, _Asked]]:
        self._since = time.monotonic()
        if budget is None:
            budget = 0 if self._plan.recipe.run.deterministic else self._plan.batch.tokens_per_microbatch
        return [(key, self._queued.pop(key)) for key in self._core.next(budget, steps)]

    def _newest(self, edge: Edge, rows: Batch) -> Version | None:
        """Of what was generated, the newest version of any token."""
        if edge.version != "at least":
            return None
        field = prefixed("policy_versions", self._plan.generate_step_of(str(edge.model)).prefix)
        return max(Version(term, number) for term, number, _, _ in rows.ragged(field).values.tolist())

    def _joined(self) -> Batch:
        """The rows of the batch in hand."""
        return join(with_same_parts([RowRange(asked.rows, 0, asked.rows.rows) for _, asked in self._begun]))

    # -- on the endpoint's thread

    def _on_request(self, message: Message) -> None:
        request = from_wire(message.kind, message.body)
        assert isinstance(request, CallRequest), f"{message.kind} is a request"
        key = CallKey(message.sender, message.incarnation, request.number)
        rows = None if key in self._core else self._read(request, message)
        out = self._core.handle(message.sender, message.incarnation, request)
        if rows is not None and key in self._core:
            self._queued[key] = _Asked(request.step, request.t, request.version, rows)
        self._forget()
        self._post(out)

    def _on_withdrawn(self, message: Message) -> None:
        withdrawn = from_wire(message.kind, message.body)
        assert isinstance(withdrawn, CallWithdrawn), f"{message.kind} withdraws"
        self._core.withdrawn(message.sender, message.incarnation, withdrawn.numbers)
        self._forget()

    def _read(self, request: CallRequest, message: Message) -> Batch:
        """The rows of a request; raises ProtocolError if they are not what the step reads."""
        if request.step not in self._edges:
            raise ProtocolError(f"a request for step {request.step!r}; this worker answers {', '.join(self._edges)}")
        if len(message.payload) != 1:
            raise ProtocolError(f"a request with {len(message.payload)} payload frames; expected 1")
        rows = decode_batch(request.batch, message.payload[0])
        missing = [field for field in self._edges[request.step].fields if field not in rows and "*" not in field]
        if missing:
            raise ProtocolError(f"a request for {request.step!r} without {', '.join(missing)}")
        read = [name for name in rows.columns if written(name, self._edges[request.step].fields)]
        wrong = complaint(rows, read)
        if wrong is None and self._makes(request.step):
            wrong = wrong_prompts(self._plan, request.step, rows)
        if wrong is not None or not rows.rows:
            raise ProtocolError(f"a request for {request.step!r} that {wrong or 'has no rows'}")
        # What else came would keep it from being joined with others.
        return rows.only(read)

    def _lost(self, lost: Lost) -> None:
        if lost.orderly:
            self._left.add(lost.name)
        self._core.client_lost(lost.name, lost.incarnation)
        self._forget()

    def _forget(self) -> None:
        """Let go of the rows of requests that nobody waits for any more."""
        for key in [key for key in self._queued if key not in self._core]:
            del self._queued[key]

    def _tick(self, now: float) -> None:
        self._node.facts[LOAD] = self._core.load
        self._follow_term()

    def _follow_term(self) -> None:
        """Learn of a later term from its owners, who may be others than before."""
        peers = self._node.membership.peers
        for facts in [peers[name].facts for name in in_pool(self._home, peers) if OWNERS in peers[name].facts]:
            if facts[TERM] > self._term:
                self._term, self._owners = facts[TERM], tuple(facts[OWNERS])
                if self._further is not None:
                    self._further.begin_term(self._term, dict(facts[BEGINS]))

    def _post(self, out: Sequence[OutgoingCall], answers: Mapping[CallKey, Batch] = MappingProxyType({})) -> None:
        for item in out:
            said = item.message
            if isinstance(said, CallAnswer):
                described, buffer = encode_batch(answers[CallKey(item.to, said.incarnation, said.number)])
                body, payload = {**to_wire(said), "batch": described}, [buffer]
                self._node.endpoint.send(item.to, kind_of(said), body, payload)
            else:
                self._node.send(item.to, kind_of(said), to_wire(said))


class Requests:
    """What other workers ask a worker for: batches to answer, or what is to be generated."""

    def __init__(self, serving: Answering, step: str) -> None:
        self._serving = serving
        self._step = step

    def __iter__(self) -> Iterator[Batch]:
        return (batch for _, batch in self._serving.requests([self._step]))

    def generated(self, step: str) -> Iterator[Batch]:
        """The groups that are asked for, when they are whole."""
        return self._serving.groups(step)
