"""The rendezvous of a job's nodes: which have joined, which are missing, and when to give up.

    gathering ──all joined──▶ complete
        └──deadline─────────▶ failed: names the missing nodes

Nodes repeat their hello, so a lost message does no harm. A restarted node (same rank, another start id) replaces its
earlier hello while others are still missing, and is refused afterwards. `JobRendezvous` has this logic alone, without
socket or clock.

Node 0 then sends requests to a remote helper in each other node's process, over ZeroMQ encrypted with the job's key.
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
from distflow.data.decoding import Form, decoder, read
from distflow.errors import DistflowError, ProtocolError, UserError
from distflow.launch.agent.remote_helper import RemoteHelper
from distflow.launch.deploy.job_environment import RUN_KEY
from distflow.launch.deploy.ssh import HostFault
from distflow.log import logger

log = logger(__name__)
JOIN_S = 0.5
BEAT_S = 1.0
SILENCE_S = 20.0
BIND_S = 10.0
LINGER_MS = 2000
_SHORTEST = 32


class RendezvousFailed(DistflowError):
    """Nodes did not join, or do not belong to one job."""

    exit_code = 3


@dataclass(frozen=True, slots=True)
class Hello:
    """What a node tells node 0 about itself."""

    rank: int
    nodes: int
    life: str
    """Start id: random, new for every start of the process."""
    hostname: str
    address: str
    """Its own address on the route to node 0."""
    python: str
    slots: int | None


class JobRendezvous:
    """Node 0's list of the nodes that have joined."""

    def __init__(self, nodes: int, deadline: float, name: Callable[[int], str]) -> None:
        self.hellos: dict[int, Hello] = {}
        self._nodes = nodes
        self._deadline = deadline
        self._name = name

    @property
    def complete(self) -> bool:
        """Whether all nodes have joined."""
        return len(self.hellos) == self._nodes

    @property
    def missing(self) -> list[int]:
        """Ranks that have not joined."""
        return [rank for rank in range(self._nodes) if rank not in self.hellos]

    def heard(self, hello: Hello) -> str | None:
        """Take a node's hello; returns why it is refused, or None."""
        if hello.nodes != self._nodes:
            return f"it expects {hello.nodes} nodes, node 0 expects {self._nodes}: start all with the same number"
        if not 0 <= hello.rank < self._nodes:
            return f"there is no node {hello.rank} among {self._nodes}"
        known = self.hellos.get(hello.rank)
        if known is not None and known.life != hello.life and self.complete:
            return f"{self._name(hello.rank)} has joined already, on {known.hostname} at {known.address}"
        self.hellos[hello.rank] = hello
        return None

    def tick(self, now: float, where: str, refused: int) -> None:
        """Raises RendezvousFailed after the deadline; `refused`: number of connections with a wrong key."""
        if self.complete or now < self._deadline:
            return
        names = ", ".join(map(self._name, self.missing))
        keys = f"; {refused} connection(s) with another DISTFLOW_RUN_KEY were refused" if refused else ""
        raise RendezvousFailed(
            f"{len(self.missing)} of {self._nodes} nodes did not join at {where}: {names}{keys} — were they "
            "started, can they reach this port, is DISTFLOW_RUN_KEY the same on all? limits.connect_s is the limit"
        )


def job_keys(environment: Mapping[str, str]) -> Keys:
    """The job's key pair, from the secret that all nodes share; raises UserError if there is none."""
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
    """Node 0's side. One thread owns the socket; `NodeLine`s hand it requests and get the answers from queues."""

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
        self._thread = threading.Thread(target=self._serve, name="rendezvous", daemon=True)

    def gather(self) -> dict[int, Hello]:
        """Wait until all nodes have joined; raises RendezvousFailed, or UserError if it cannot listen."""
        self._thread.start()
        fault = self._news.get()
        if fault is not None:
            raise fault
        return self._rendezvous.hellos

    def line(self, rank: int) -> NodeLine:
        """The connection to a node that has joined."""
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
            # A full pipe wakes the thread as well.
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
                                     "MASTER_PORT, and an address of node 0 as MASTER_ADDR"))  # fmt: skip
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
            self._refused += len(gate.refused())
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
            log.warning("dropped a malformed message from a node: %s", error)
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


class _Joining(Form, frozen=True):
    join: Hello


class _Answer(Form, frozen=True):
    rank: int
    asked: int
    answer: dict[str, Any] = msgspec.field(default_factory=dict)
    fault: str = ""


@decoder
def _said(frames: list[bytes]) -> Hello | dict[str, Any]:
    """A message from a node: its hello, or the answer to a request."""
    body = json.loads(frames[1])
    if "join" in body:
        return read(body, _Joining, "hello of a node").join
    read(body, _Answer, "answer of a node")
    found: dict[str, Any] = body
    return found


class NodeLine:
    """A connection to another node, for the preflight and the start."""

    def __init__(self, server: RendezvousServer, rank: int, answers: queue.SimpleQueue[dict[str, Any]]) -> None:
        self._server = server
        self._rank = rank
        self._answers = answers
        self._asked = 0

    def ask(self, verb: str, given: Mapping[str, Any], *, limit_s: float, payload: bytes = b"") -> dict[str, Any]:
        """Send one request, to be answered within `limit_s` seconds; raises HostFault."""
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
            raise HostFault(
                f"{verb}: {answer['fault']}", "free some space there, or correct the permissions of the folder"
            )
        found: dict[str, Any] = answer["answer"]
        return found

    def close(self) -> None:
        """End the session: the node undoes everything it was not told to keep."""
        self._server.post(self._rank, {"verb": "end"}, b"")


class LocalLine:
    """The same for node 0 itself, in this process."""

    def __init__(self, helper: RemoteHelper) -> None:
        self._helper = helper

    def ask(self, verb: str, given: Mapping[str, Any], *, limit_s: float, payload: bytes = b"") -> dict[str, Any]:
        """Execute a request; raises HostFault."""
        try:
            return self._helper.do(verb, dict(given), payload)
        except OSError as error:
            raise HostFault(
                f"{verb}: {error}", "free some space here, or correct the permissions of the folder"
            ) from error

    def close(self) -> None:
        """Undo what is not to be kept."""
        self._helper.undo()


def attend(address: str, keys: Keys, hello: Hello, helper: RemoteHelper, limit_s: float) -> None:
    """Another node's side: join and execute node 0's requests until it ends the session.

    Raises RendezvousFailed if node 0 does not answer within `limit_s` seconds, refuses this node, or goes silent; then
    everything created here is undone.
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
    """Repeat the hello until node 0 sends anything."""
    while not dealer.poll(int(JOIN_S * 1000)):
        if time.monotonic() > deadline:
            raise RendezvousFailed(
                f"node 0 did not answer at {address} within {limit_s:g} s — was it started, can this node reach "
                f"the port, and is {RUN_KEY} the same on both?"
            )
        dealer.send(json.dumps({"join": asdict(hello)}).encode())


def _serve_node(dealer: zmq.Socket[bytes], address: str, rank: int, helper: RemoteHelper) -> None:
    while True:
        if not dealer.poll(int(SILENCE_S * 1000)):
            raise RendezvousFailed(f"node 0 at {address} has been silent for {SILENCE_S:g} s — see its output")
        frames = dealer.recv_multipart()
        request = json.loads(frames[0])
        if request["verb"] == "refuse":
            raise RendezvousFailed(f"node 0 at {address} refused this node: {request['reason']}")
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
    """A random id that tells two starts of one node apart."""
    return secrets.token_hex(8)
