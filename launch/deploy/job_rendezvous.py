"""How the nodes of a job find each other: who has come, who is missing, and when to give up.

    gathering ──all have come──▶ complete
        └──deadline────────────▶ failed: names who is missing

A node says again and again that it is there, so nothing is lost with a message. A node that comes twice with another
life (it was restarted) replaces itself while the others are still awaited, and is refused afterwards. `JobRendezvous`
is this alone, without socket or clock.

Over ZeroMQ, node 0 then speaks with a probe in every other node's process, encrypted by the job's key.
"""

from __future__ import annotations

import hashlib
import json
import os
import queue
import secrets
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import Any

import msgspec
import zmq
from zmq.utils import z85

from distflow.comm.curve import Gate, present_key, tune
from distflow.comm.keys import Keys
from distflow.data.decoding import decoder, read
from distflow.errors import DistflowError, ProtocolError, UserError
from distflow.launch.agent.remote_helper import RemoteHelper
from distflow.launch.deploy.ssh import HostFault
from distflow.log import logger

log = logger(__name__)
RUN_KEY = "DISTFLOW_RUN_KEY"
JOIN_S = 0.5
BEAT_S = 1.0
SILENCE_S = 20.0
BIND_S = 10.0
LINGER_MS = 2000
_SHORTEST = 32


class RendezvousFailed(DistflowError):
    """Nodes did not come, or are not of one job."""

    exit_code = 3


@dataclass(frozen=True, slots=True)
class Hello:
    """What a node says of itself."""

    rank: int
    nodes: int
    life: str
    """Random, new with every start of the process."""
    hostname: str
    address: str
    """Its own address on the way to node 0."""
    python: str
    slots: int | None


class JobRendezvous:
    """Node 0's account of who has come."""

    def __init__(self, nodes: int, deadline: float, name: Callable[[int], str]) -> None:
        self.hellos: dict[int, Hello] = {}
        self._nodes = nodes
        self._deadline = deadline
        self._name = name

    @property
    def complete(self) -> bool:
        """Whether all have come."""
        return len(self.hellos) == self._nodes

    @property
    def missing(self) -> list[int]:
        """Ranks that have not come."""
        return [rank for rank in range(self._nodes) if rank not in self.hellos]

    def heard(self, hello: Hello) -> str | None:
        """Somebody says that it is there; returns why it is refused, None if it is not."""
        if hello.nodes != self._nodes:
            return f"it counts {hello.nodes} nodes, node 0 counts {self._nodes}: start all with the same number"
        if not 0 <= hello.rank < self._nodes:
            return f"there is no node {hello.rank} among {self._nodes}"
        known = self.hellos.get(hello.rank)
        if known is not None and known.life != hello.life and self.complete:
            return f"{self._name(hello.rank)} is there already, on {known.hostname} at {known.address}"
        self.hellos[hello.rank] = hello
        return None

    def tick(self, now: float, where: str, refused: int) -> None:
        """Raises RendezvousFailed when it is too late; `refused`: connections turned away for their key."""
        if self.complete or now < self._deadline:
            return
        names = ", ".join(map(self._name, self.missing))
        keys = f"; {refused} connection(s) with another DISTFLOW_RUN_KEY were refused" if refused else ""
        raise RendezvousFailed(
            f"{len(self.missing)} of {self._nodes} nodes have not come to {where}: {names}{keys} — were they "
            "started, do they reach this port, and have all the same DISTFLOW_RUN_KEY? limits.connect_s is their time"
        )


def job_keys(environment: Mapping[str, str]) -> Keys:
    """The job's key pair, from the secret that all nodes share; raises UserError with the cure when there is none."""
    text = environment.get(RUN_KEY, "")
    if len(text) < _SHORTEST or not all(letter in "0123456789abcdefABCDEF" for letter in text):
        found = "is not set" if not text else f"has {len(text)} characters"
        raise UserError(
            f"{RUN_KEY} {found}: expected {_SHORTEST} hexadecimal digits or more, the same on all nodes — "
            f"export {RUN_KEY}=$(openssl rand -hex 32), once for the whole job"
        )
    secret = z85.encode(hashlib.blake2b(text.lower().encode(), digest_size=32, person=b"distflow-meeting").digest())
    return Keys(zmq.curve_public(secret), secret)


class RendezvousServer:
    """Node 0's side. One thread owns the socket; lines to nodes hand it requests and await the answers in queues."""

    def __init__(self, address: str, keys: Keys, rendezvous: JobRendezvous) -> None:
        self._address = address
        self._keys = keys
        self._rendezvous = rendezvous
        self._outbox: deque[list[bytes]] = deque()
        self._wake_r, self._wake_w = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._routes: dict[int, bytes] = {}
        self._answers: dict[int, queue.SimpleQueue[dict[str, Any]]] = {}
        self._news: queue.SimpleQueue[Exception | None] = queue.SimpleQueue()
        self._closing = False
        self._refused = 0
        self._thread = threading.Thread(target=self._serve, name="meeting", daemon=True)

    def gather(self) -> dict[int, Hello]:
        """Wait until all nodes have come; raises RendezvousFailed, UserError when it cannot listen."""
        self._thread.start()
        fault = self._news.get()
        if fault is not None:
            raise fault
        return self._rendezvous.hellos

    def line(self, rank: int) -> NodeLine:
        """To a node that has come."""
        self._answers[rank] = queue.SimpleQueue()
        return NodeLine(self, rank, self._answers[rank])

    def post(self, rank: int, header: Mapping[str, Any], payload: bytes) -> None:
        """Hand a request to the thread that owns the socket."""
        self._outbox.append([self._routes[rank], json.dumps(header).encode(), payload])
        self._wake()

    def close(self) -> None:
        """Send what is queued and close."""
        self._closing = True
        self._wake()
        self._thread.join(BIND_S)

    def _wake(self) -> None:
        with suppress(BlockingIOError):
            # A pipe that is full wakes as well.
            os.write(self._wake_w, b"x")

    def _serve(self) -> None:
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        router = context.socket(zmq.ROUTER)
        gate = Gate(context, router, self._keys)
        try:
            tune(router, self._address)
            router.bind(self._address)
            self._loop(router, gate)
        except zmq.ZMQError as error:
            self._news.put(UserError(f"{self._address}: the rendezvous cannot listen there: {error} — give another "
                                     "MASTER_PORT, and a MASTER_ADDR of node 0"))  # fmt: skip
        except RendezvousFailed as error:
            self._news.put(error)
        finally:
            gate.close()
            router.close(linger=LINGER_MS)
            context.term()

    def _loop(self, router: zmq.Socket[bytes], gate: Gate) -> None:
        poller = zmq.Poller()
        for source in (router, gate.questions, self._wake_r):
            poller.register(source, zmq.POLLIN)
        told, beat_at = False, 0.0
        while not (self._closing and not self._outbox):
            ready = dict(poller.poll(int(JOIN_S * 1000)))
            if self._wake_r in ready:
                os.read(self._wake_r, 4096)
            if gate.questions in ready:
                gate.answer()
            if router in ready:
                self._hear(router, router.recv_multipart())
            self._refused += gate.refused()
            self._rendezvous.tick(time.monotonic(), self._address, self._refused)
            if self._rendezvous.complete and not told:
                told = True
                self._news.put(None)
            if time.monotonic() >= beat_at:
                beat_at = time.monotonic() + BEAT_S
                self._outbox.extend([route, b'{"verb": "beat"}', b""] for route in self._routes.values())
            while self._outbox:
                router.send_multipart(self._outbox.popleft())

    def _hear(self, router: zmq.Socket[bytes], frames: list[bytes]) -> None:
        route = frames[0]
        try:
            said = _said(frames)
        except ProtocolError as error:
            log.warning("dropped a message of a node: %s", error)
            return
        if isinstance(said, Hello):
            hello = said
            fault = self._rendezvous.heard(hello)
            if fault is None:
                self._routes[hello.rank] = route
            else:
                router.send_multipart([route, json.dumps({"verb": "refuse", "reason": fault}).encode(), b""])
        elif said["rank"] in self._answers:
            self._answers[said["rank"]].put(said)


class _Joining(msgspec.Struct, frozen=True):
    join: Hello


class _Answer(msgspec.Struct, frozen=True):
    rank: int
    asked: int
    answer: dict[str, Any] = {}
    fault: str = ""


@decoder
def _said(frames: list[bytes]) -> Hello | dict[str, Any]:
    """What a node says: that it is there, or the answer to a request."""
    body = json.loads(frames[1])
    if "join" in body:
        return read(body, _Joining, "hello of a node").join
    read(body, _Answer, "answer of a node")
    found: dict[str, Any] = body
    return found


class NodeLine:
    """What the preflight and the start need of a node, over the meeting."""

    def __init__(self, server: RendezvousServer, rank: int, answers: queue.SimpleQueue[dict[str, Any]]) -> None:
        self._server = server
        self._rank = rank
        self._answers = answers
        self._asked = 0

    def ask(self, verb: str, given: Mapping[str, Any], *, limit_s: float, payload: bytes = b"") -> dict[str, Any]:
        """One request, answered within `limit_s` seconds; raises HostFault."""
        self._asked += 1
        self._server.post(self._rank, {"verb": verb, "with": given, "asked": self._asked}, payload)
        deadline = time.monotonic() + limit_s
        while True:
            try:
                answer = self._answers.get(timeout=max(0.0, deadline - time.monotonic()))
            except queue.Empty:
                raise HostFault(f"no answer to {verb!r} within {limit_s:g} s", "did the node go down?") from None
            if answer["asked"] == self._asked:
                break
        if "fault" in answer:
            raise HostFault(f"{verb}: {answer['fault']}", "make room or correct the folder's rights there")
        found: dict[str, Any] = answer["answer"]
        return found

    def close(self) -> None:
        """The node goes on by itself, or undoes everything if it was not told to keep it."""
        self._server.post(self._rank, {"verb": "end"}, b"")


class LocalLine:
    """Node 0's own part, in this process."""

    def __init__(self, helper: RemoteHelper) -> None:
        self._helper = helper

    def ask(self, verb: str, given: Mapping[str, Any], *, limit_s: float, payload: bytes = b"") -> dict[str, Any]:
        """Done at once; raises HostFault."""
        try:
            return self._helper.do(verb, dict(given), payload)
        except OSError as error:
            raise HostFault(f"{verb}: {error}", "make room or correct the folder's rights here") from error

    def close(self) -> None:
        """Undo what is not to be kept."""
        self._helper.undo()


def attend(address: str, keys: Keys, hello: Hello, helper: RemoteHelper, limit_s: float) -> None:
    """Another node's side: come to the meeting and do as node 0 asks, until it has what it wants.

    Raises RendezvousFailed when node 0 is not there within `limit_s` seconds, refuses us, or goes silent; then
    everything that was made here is undone.
    """
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    dealer = context.socket(zmq.DEALER)
    try:
        tune(dealer, address)
        present_key(dealer, keys)
        dealer.connect(address)
        _join(dealer, address, hello, time.monotonic() + limit_s, limit_s)
        _serve_node(dealer, address, hello.rank, helper)
    finally:
        helper.undo()
        dealer.close(linger=LINGER_MS)
        context.term()


def _join(dealer: zmq.Socket[bytes], address: str, hello: Hello, deadline: float, limit_s: float) -> None:
    """Say that we are there until node 0 says anything."""
    while not dealer.poll(int(JOIN_S * 1000)):
        if time.monotonic() > deadline:
            raise RendezvousFailed(
                f"node 0 did not answer at {address} within {limit_s:g} s — was it started, does this node reach the "
                f"port, and have both the same {RUN_KEY}?"
            )
        dealer.send(json.dumps({"join": asdict(hello)}).encode())


def _serve_node(dealer: zmq.Socket[bytes], address: str, rank: int, helper: RemoteHelper) -> None:
    while True:
        if not dealer.poll(int(SILENCE_S * 1000)):
            raise RendezvousFailed(f"node 0 at {address} has been silent for {SILENCE_S:g} s — its output says why")
        frames = dealer.recv_multipart()
        request = json.loads(frames[0])
        if request["verb"] == "refuse":
            raise RendezvousFailed(f"node 0 at {address} refuses this node: {request['reason']}")
        if request["verb"] == "end":
            return
        if request["verb"] != "beat":
            answer = _act(helper, request, frames[1])
            dealer.send(json.dumps({"rank": rank, "asked": request["asked"], **answer}).encode())


def _act(helper: RemoteHelper, request: Mapping[str, Any], payload: bytes) -> dict[str, Any]:
    try:
        return {"answer": helper.do(request["verb"], request["with"], payload)}
    except OSError as error:
        return {"fault": str(error)}


def new_start_id() -> str:
    """Tells two starts of one node apart."""
    return secrets.token_hex(8)
