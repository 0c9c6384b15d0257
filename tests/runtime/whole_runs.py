"""Whole runs in one process: the session of every worker on a thread, over a network in memory.

Sockets and processes are all that is not real. Messages can be lost, doubled, delayed and overtaken, so that hundreds
of runs show what a few with processes would not. `in_memory` replaces what sessions need for that.
"""

from __future__ import annotations

import heapq
import itertools
import random
import signal
import threading
import time
import traceback
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from distflow.comm.collective import Rendezvous
from distflow.comm.membership import Identity
from distflow.comm.message import Buffer, Message, decode, encode
from distflow.comm.outbox import Delivery, delivered
from distflow.comm.traffic import Traffic
from distflow.config.load import load_recipe
from distflow.errors import RunStopped
from distflow.exchange import call_client, rows_core
from distflow.flow.document import Place, document_text, read_worker_document, worker_document
from distflow.flow.planner import make_plan
from distflow.flow.script import render_script
from distflow.launch.run.resume import find_checkpoint
from distflow.runtime import node, replicas, session
from distflow.runtime.assembly import Setting, build_models
from distflow.runtime.checkpoint.parts import CheckpointReader
from distflow.runtime.node import identity
from distflow.runtime.replicas import GroupStore
from distflow.runtime.session import Session
from distflow.runtime.worker import Worker
from distflow.types import WorkerName
from tests.polling import Patience

TICK_S = 0.1
WAIT_S = 10.0
LATE = 3.0
"""How much longer than usual a message may take."""
SMALLEST = (
    "models.policy.init.hidden_size=16",
    "models.policy.init.intermediate_size=16",
    "models.policy.init.num_hidden_layers=1",
    "models.policy.init.num_attention_heads=2",
    "models.policy.init.num_key_value_heads=1",
    "models.policy.dtype=float64",
    "batch.samples_per_prompt=2",
    "flow.steps.sample.with.max_new_tokens=3",
    "run.trace=false",
    "limits.no_progress_s=30",
)
"""A training step takes a tenth of a second."""


@dataclass
class Network:
    """Carries messages between workers, by chance drawn from `seed`. `delay_s`: the longest, usually; `cut`: whether a
    message from one worker to another, of some kind, is lost in any case.
    """

    seed: int = 0
    loss: float = 0.0
    delay_s: float = 0.0
    cut: Callable[[str, str, str], bool] = lambda sender, to, kind: False
    ends: dict[str, MemoryEndpoint] = field(default_factory=dict)
    sums: dict[str, _Sums] = field(default_factory=dict)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def __post_init__(self) -> None:
        self._rng = random.Random(self.seed)

    def copies(self, sender: str, to: str, kind: str) -> list[float]:
        """The delays of all copies of a message that arrive. That a worker leaves is said once, at last."""
        if self.cut(sender, to, kind):
            return []
        with self.lock:
            if kind == "left":
                return [LATE * self.delay_s]
            drawn, late = self._rng.random(), LATE if self._rng.random() < 0.02 else 1.0
            count = 0 if drawn < self.loss else 2 if drawn < 1.5 * self.loss else 1
            return [late * self.delay_s * self._rng.random() for _ in range(count)]


_network = threading.local()
"""That of the run whose worker this thread is."""


class MemoryEndpoint:
    """Stands in for `distflow.comm.endpoint.Endpoint`."""

    network_address = None

    def __init__(self, name: str, incarnation: int, roster: Mapping[str, str], **_more: Any) -> None:
        self.name, self.incarnation, self.roster = name, incarnation, dict(roster)
        self.traffic = Traffic()
        self.network: Network = _network.value
        self.network.ends[name] = self
        self.closing = False
        self._condition = threading.Condition()
        self._arriving: list[tuple[float, int, bytes, list[bytes]]] = []
        self._count = itertools.count()

    def start(
        self,
        on_message: Callable[[Message], None],
        on_tick: Callable[[], None],
        on_fault: Callable[[BaseException], None],
        on_handled: Callable[[], None],
    ) -> None:
        def serve() -> None:
            try:
                self._serve(on_message, on_tick, on_handled)
            except BaseException as error:
                on_fault(error)

        threading.Thread(target=serve, name=f"endpoint of {self.name}", daemon=True).start()

    def know(self, name: str, address: str) -> None:
        self.roster[name] = address

    def reply(self, request: Message, body: Mapping[str, Any], payload: Sequence[Buffer] = ()) -> None:
        """Nobody from outside asks here."""
        raise AssertionError(f"a reply to {request.kind}")

    def disconnect(self, name: str) -> None:
        pass

    def send(self, to: str, kind: str, body: Mapping[str, Any], payload: Sequence[Buffer] = ()) -> Delivery:
        frames = [bytes(part) for part in payload]
        header = encode(kind, self.name, self.incarnation, body, len(frames))
        end = self.network.ends.get(to)
        if end is not None:
            for delay_s in [0.0] if end is self else self.network.copies(self.name, to, kind):
                end.arrive(time.monotonic() + delay_s, header, frames)
        return delivered()

    def arrive(self, at: float, header: bytes, frames: list[bytes]) -> None:
        with self._condition:
            heapq.heappush(self._arriving, (at, next(self._count), header, frames))
            self._condition.notify()

    def close(self) -> None:
        with self._condition:
            self.closing = True
            self._condition.notify()

    def _serve(
        self, on_message: Callable[[Message], None], on_tick: Callable[[], None], on_handled: Callable[[], None]
    ) -> None:
        next_tick = time.monotonic() + TICK_S
        while not self.closing:
            with self._condition:
                first = min(next_tick, *(one[0] for one in self._arriving[:1]), next_tick)
                if time.monotonic() < first:
                    self._condition.wait(first - time.monotonic())
                due = []
                while self._arriving and self._arriving[0][0] <= time.monotonic():
                    due.append(heapq.heappop(self._arriving))
            for _, _, header, frames in due:
                on_message(decode(header, [memoryview(frame) for frame in frames], b"\0route"))
            on_handled()
            if time.monotonic() >= next_tick:
                on_tick()
                next_tick = time.monotonic() + TICK_S


class _Sums:
    """The sums of one home: each ends when all replicas have given their tensors."""

    def __init__(self, members: int) -> None:
        self.members = members
        self.given: dict[int, dict[int, _Sum]] = defaultdict(dict)
        self.lock = threading.Lock()


class _Sum:
    """Stands in for `distflow.comm.collective.PendingSum`."""

    def __init__(self, sums: _Sums, number: int, rank: int, tensors: Sequence[Tensor]) -> None:
        self._sums, self._number, self._rank, self._tensors = sums, number, rank, tensors
        self._given: list[Tensor] = []
        self._found: list[Tensor] = []
        self._done: Callable[[], None] = lambda: None
        self.over = False

    def begin(self, done: Callable[[], None]) -> None:
        self._given, self._done = [tensor.detach().clone() for tensor in self._tensors], done
        with self._sums.lock:
            parts = self._sums.given[self._number]
            parts[self._rank] = self
            if len(parts) < self._sums.members:
                return
        shapes = {tuple(tensor.shape for tensor in part._given) for part in parts.values()}
        assert len(shapes) == 1, f"the replicas sum different tensors: {shapes}"
        rows = [parts[rank]._given for rank in range(self._sums.members)]
        total = [torch.stack(same).sum(0) for same in zip(*rows, strict=True)]
        for part in parts.values():
            part._found, part.over = total, True
        for part in parts.values():
            part._done()

    @torch.no_grad()
    def finish(self) -> None:
        for tensor, found in zip(self._tensors, self._found, strict=True):
            tensor.copy_(found)


class _Collective:
    """Stands in for `distflow.comm.collective.Collective`."""

    def __init__(self, meeting: Rendezvous, store: GroupStore, *, nccl: bool) -> None:
        endpoint: Any = store._node.endpoint
        network: Network = endpoint.network
        with network.lock:
            self._sums = network.sums.setdefault(WorkerName.parse(endpoint.name).pool, _Sums(meeting.members))
        self._rank, self._numbers = meeting.rank, itertools.count()

    def pieces(self, tensors: Sequence[Tensor]) -> Iterator[_Sum]:
        yield _Sum(self._sums, next(self._numbers), self._rank, list(tensors))

    def close(self) -> None:
        pass


@contextmanager
def in_memory() -> Iterator[None]:
    """Sessions made meanwhile need no sockets, and as many as wanted run in this process."""
    pids, threads = itertools.count(10_000_000), dict[int, threading.Thread]()
    building = threading.RLock()

    def identified(*given: Any) -> Identity:
        pid = next(pids)
        threads[pid] = threading.current_thread()
        return replace(identity(*given), pid=pid)

    def alone(build: Callable[..., Any]) -> Callable[..., Any]:
        # transformers sets torch's default type while it makes a model, and loads itself piece by piece.
        def locked(*given: Any) -> Any:
            with building:
                return build(*given)

        return locked

    def divided(setting: Setting, *given: Any) -> Any:
        models = build_models(setting, *given)
        for model in models.values() if setting.standing.members and setting.me.name.pool in _network.divided else ():
            vars(model).update(lockstep=True, idle=lambda *, grad: None)
        return models

    no_signals = SimpleNamespace(
        SIGTERM=signal.SIGTERM, SIG_IGN=signal.SIG_IGN, getsignal=lambda number: signal.SIG_IGN
    )
    with (
        mock.patch.object(node, "Endpoint", MemoryEndpoint),
        mock.patch.object(node, "identity", identified),
        mock.patch.object(node, "process_alive", lambda pid, started: threads[pid].is_alive()),
        mock.patch.object(session, "signal", no_signals),
        mock.patch.object(session, "build_models", alone(divided)),
        mock.patch.object(session, "build_engine", alone(session.build_engine)),
        mock.patch.object(session, "build_tokenizer", alone(session.build_tokenizer)),
        mock.patch.object(replicas, "Collective", _Collective),
        mock.patch.multiple(call_client, RESEND_S=0.5, LONGEST_RESEND_S=2.0),
        mock.patch.multiple(rows_core, RESEND_S=0.2, LONGEST_RESEND_S=1.0),
    ):
        yield


class WholeRun:
    """One run, or what resumes it. Models of the pools `divided` are computed in rounds, as if they were divided."""

    def __init__(
        self,
        folder: Path,
        overrides: Sequence[str],
        network: Network | None = None,
        *,
        divided: Sequence[str] = (),
        term: int = 0,
    ) -> None:
        self.folder = folder
        self.plan = make_plan(load_recipe("quickstart", [*SMALLEST, *overrides]).recipe)
        self.sessions: dict[str, Session] = {}
        self.ended: dict[str, str] = {}
        """How each worker has ended: done, stopped, or by which error."""
        self._network = network or Network()
        self._divided = divided
        self._term = term
        self._names = [str(worker.name) for worker in self.plan.workers]
        (folder / "workers").mkdir(parents=True, exist_ok=True)

    def go(self, limit_s: float = 60.0, each: Callable[[float], None] = lambda seconds: None) -> None:
        """Let workers run to their end, calling `each` all the time. Raises AssertionError if one hangs or fails."""
        resumed = find_checkpoint(self.folder).checkpoint
        threads = {name: threading.Thread(target=self._work, args=(name, resumed), daemon=True) for name in self._names}
        began, patience = time.monotonic(), Patience(limit_s)
        for thread in threads.values():
            thread.start()
        try:
            while any(thread.is_alive() for thread in threads.values()):
                each(time.monotonic() - began)
                self._check()
                assert not patience.over, f"{limit_s:g} s without work: {self._waits(threads)}"
                time.sleep(0.005)
        finally:
            for one in self.sessions.values():
                one._board.fault(RunStopped("the test is over"))
            for thread in threads.values():
                thread.join(WAIT_S)
        self._check()

    def _check(self) -> None:
        failed = [end for end in self.ended.values() if end not in ("done", "stopped")]
        assert not failed, "\n".join(failed)

    def stop(self, name: str) -> None:
        """Ask a worker to stop, as its agent does."""
        if name in self.sessions and self.sessions[name]._node.facts["state"] != "finished":
            self.sessions[name]._board.stop("asked to stop")

    def _work(self, name: str, resumed: Path | None) -> None:
        _network.value, _network.divided = self._network, self._divided
        try:
            setting = self._setting(name, resumed)
            scope: dict[str, Callable[[Worker], None]] = {}
            exec(render_script(self.plan, setting.me.name), scope)
            self.sessions[name] = Session(setting, self._term)
            self.sessions[name].run(scope["script"])
            self.ended[name] = "done"
        except RunStopped:
            self.ended[name] = "stopped"
        except BaseException:
            self.ended[name] = f"{name}: {traceback.format_exc()}"

    def _setting(self, name: str, resumed: Path | None) -> Setting:
        worker = WorkerName.parse(name)
        place = Place(self.folder, {one: f"ipc://{self.folder}/{one.replace('/', '-')}" for one in self._names})
        document = worker_document(
            self.plan,
            worker,
            place,
            recipe_source="quickstart",
            resume=None if resumed is None else str(resumed),
            term=self._term,
        )
        path = self.folder / "workers" / f"{worker.file_stem}.yaml"
        path.write_text(document_text(document))
        read = read_worker_document(path)
        plan = make_plan(read.recipe)
        trains = resumed is not None and name in plan.members
        reader = CheckpointReader(resumed, worker.file_stem, unread=True) if resumed is not None and trains else None
        return Setting(read, plan.recipe, plan, plan.worker(worker), self.folder, reader)

    def _waits(self, threads: Mapping[str, threading.Thread]) -> str:
        now, found = time.monotonic(), []
        for name, thread in threads.items():
            wait = self.sessions[name]._board.current if name in self.sessions else None
            if thread.is_alive():
                found.append(f"{name} waits for {'nothing' if wait is None else wait.describe(now)}")
        return "; ".join(found)
