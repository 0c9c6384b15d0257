"""A worker among its peers, over real sockets: who is answered, who is not, and what cannot kill it."""

import json
import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import zmq

from distflow.comm.client import ask
from distflow.comm.endpoint import Endpoint
from distflow.comm.keys import NetworkListener, make_keys
from distflow.comm.membership import Identity, Lost, Membership
from distflow.comm.message import Message, encode
from distflow.errors import ProtocolError, RecipeMismatch, RunStopped
from distflow.runtime.node import Greeting, Node
from distflow.runtime.waits import WaitBoard
from tests.polling import WAIT_S, eventually

NAMES = ("trainer/0", "rollout/0", "agent/0")


class Town:
    def __init__(self, folder: Path) -> None:
        self.roster = {name: f"ipc://{folder}/{name.replace('/', '-')}" for name in NAMES}
        self.nodes: list[Node] = []
        self.keys = make_keys()

    def node(
        self, name: str, peers: list[str], *, incarnation: int = 0, digest: str = "same", host: int | None = None
    ) -> Node:
        """With a `host` it listens on the network, and knows no addresses but its own."""
        me = Identity(name, incarnation, os.getpid(), 0.0, digest, {"batch": digest}, host or 0)
        listener = None if host is None else NetworkListener("127.0.0.1", self.keys)
        roster = self.roster if host is None else {**dict.fromkeys(NAMES, ""), name: self.roster[name]}
        endpoint = Endpoint(name, incarnation, roster, tick_s=0.02, listener=listener)
        node = Node(endpoint, Membership(me, peers, lambda pid, started: True), WaitBoard())
        self.nodes.append(node)
        return node

    def raw(self, name: str, *frames: bytes) -> None:
        """What any process on this machine may send to a socket."""
        context = zmq.Context()
        socket = context.socket(zmq.DEALER)
        socket.connect(self.roster[name])
        socket.send_multipart(frames)
        socket.close(linger=2000)
        context.term()


@pytest.fixture
def town(tmp_path: Path) -> Iterator[Town]:
    made = Town(tmp_path)
    yield made
    for node in made.nodes:
        if os.path.exists(made.roster[node.endpoint.name].removeprefix("ipc://")):
            node.close(orderly=True)


def until(node: Node, ready: Callable[[], object], what: str) -> None:
    with node.board.condition:
        assert node.board.condition.wait_for(lambda: bool(ready()), WAIT_S), what


def acquainted(town: Town, heard: list[Message] | None = None) -> tuple[Node, Node]:
    trainer, rollout = town.node("trainer/0", ["rollout/0"]), town.node("rollout/0", ["trainer/0"])
    trainer.on("news", (heard if heard is not None else []).append)
    trainer.start()
    rollout.start()
    until(trainer, lambda: trainer.membership.present("rollout/0"), "rollout/0's hello")
    until(rollout, lambda: rollout.membership.present("trainer/0"), "trainer/0's welcome")
    return trainer, rollout


def asked_while_it_waits(town: Town, trainer: Node, kind: str, name: str) -> dict[str, Any]:
    """What `trainer/0` answers while its main thread waits for `name` from rollout/0."""
    answers: list[dict[str, Any] | None] = []

    def ask_it() -> None:
        eventually(lambda: trainer.board.current, "the wait that is to be told of")
        answers.append(ask(town.roster["trainer/0"], kind, {}, WAIT_S))

    asking = threading.Thread(target=ask_it)
    asking.start()
    trainer.board.until(
        lambda: True if answers else None, name=name, peers=("rollout/0",), limit_s=WAIT_S, progress=lambda: 0
    )
    asking.join()
    (answer,) = answers
    assert answer is not None
    return answer


def test_peers_find_each_other_and_talk(town: Town) -> None:
    heard: list[Message] = []
    trainer, rollout = acquainted(town, heard)
    rollout.send("trainer/0", "news", {"n": 1})
    until(trainer, lambda: heard, "the news")
    assert (heard[0].sender, heard[0].body) == ("rollout/0", {"n": 1})


def test_status_tells_what_the_worker_waits_for(town: Town) -> None:
    trainer, _ = acquainted(town)
    trainer.facts |= {"state": "training", "step": 4, "version": 4}
    trainer.counts = lambda: {"reward/timeouts": 2.0}
    for model in ("policy", "critic"):
        trainer.status_rows["weights"].append(lambda model=model: [{"model": model}])
    row = asked_while_it_waits(town, trainer, "status", "samples of training step 4")
    assert row.pop("weights") == [{"model": "policy"}, {"model": "critic"}]
    (wait,) = row.pop("waits")
    assert wait["description"].startswith("samples of training step 4 from rollout/0 for ")
    assert (wait["name"], wait["peers"], wait["seconds"] >= 0) == ("samples of training step 4", ["rollout/0"], True)
    traffic = row.pop("traffic")
    assert traffic["bytes_sent"] > 0
    assert traffic["bytes_received"] > 0
    assert traffic["dropped"] == 0
    assert traffic["lanes"]["zmq"]["bytes"] == traffic["bytes_sent"]
    assert row.pop("segments") == {}
    assert row.pop("memory_mb") > 1
    assert row.pop("waiting_for").startswith("samples of training step 4 from rollout/0 for ")
    assert row == {
        "name": "trainer/0",
        "incarnation": 0,
        "pid": os.getpid(),
        "host": os.uname().nodename,
        "state": "training",
        "step": 4,
        "version": 4,
        "counts": {"reward/timeouts": 2.0},
        "checkpointed": 0,
    }
    assert json.dumps(row)
    later = ask(town.roster["trainer/0"], "status", {}, WAIT_S)
    assert later is not None
    assert (later["waiting_for"], later["waits"]) == (None, [])


def test_anybody_may_ask_for_its_stacks(town: Town) -> None:
    trainer, _ = acquainted(town)
    answer = asked_while_it_waits(town, trainer, "stacks", "an answer")
    first, *others = answer["threads"]
    assert first["name"] == "MainThread"
    assert "in asked_while_it_waits" in "".join(first["frames"])
    assert "endpoint" in {thread["name"] for thread in others}
    assert answer["waits"][0]["name"] == "an answer"


def test_anybody_may_ask_it_to_stop(town: Town) -> None:
    trainer, _ = acquainted(town)
    assert ask(town.roster["trainer/0"], "stop", {"reason": "enough learnt"}, WAIT_S) == {"stopping": True}
    with pytest.raises(RunStopped, match="enough learnt"):
        trainer.board.until(lambda: None, name="x", peers=(), limit_s=WAIT_S, progress=lambda: 0)


def test_a_worker_that_is_done_is_not_stopped_any_more(town: Town) -> None:
    trainer, _ = acquainted(town)
    trainer.facts |= {"state": "finished"}
    assert ask(town.roster["trainer/0"], "stop", {}, WAIT_S) == {"stopping": True}
    assert trainer.board.stopping is None


def test_strangers_and_former_lives_are_not_heard(town: Town) -> None:
    heard: list[Message] = []
    trainer, rollout = acquainted(town, heard)
    town.raw("trainer/0", encode("news", "client", 0, {"n": 1}))
    town.raw("trainer/0", encode("news", "rollout/7", 0, {"n": 2}))
    town.raw("trainer/0", encode("news", "rollout/0", 5, {"n": 3}))
    town.raw("trainer/0", encode("nonsense", "rollout/0", 0, {}))
    rollout.send("trainer/0", "news", {"n": 4})
    until(trainer, lambda: heard, "the peer's own news")
    assert ask(town.roster["trainer/0"], "status", {}, WAIT_S) is not None
    assert [message.body["n"] for message in heard] == [4]


def test_malformed_messages_are_dropped_and_counted(town: Town, caplog: pytest.LogCaptureFixture) -> None:
    heard: list[Message] = []
    trainer, rollout = acquainted(town)

    def picky(message: Message) -> None:
        if "n" not in message.body:
            raise ProtocolError("news without n")
        heard.append(message)

    trainer.on("news", picky)
    before = trainer.endpoint.traffic.dropped
    town.raw("trainer/0", b"\xff\x00 not a header")
    town.raw("trainer/0", b"")
    town.raw("trainer/0", encode("hello", "rollout/0", 0, {"digest": 3}))
    town.raw("trainer/0", encode("lost", "rollout/0", 0, {"worker": "rollout/0", "incarnation": 0, "reason": "me"}))
    rollout.send("trainer/0", "news", {})
    until(trainer, lambda: trainer.endpoint.traffic.dropped >= before + 5, "five drops")
    rollout.send("trainer/0", "news", {"n": 1})
    until(trainer, lambda: heard, "the good news")
    assert trainer.membership.present("rollout/0"), "only a host agent may report a death"
    assert "dropped a 'news' message from rollout/0: news without n" in caplog.text
    trainer.board.raise_if_over()


def test_a_request_that_cannot_be_read_is_answered(town: Town) -> None:
    trainer = town.node("trainer/0", [])

    def picky(message: Message) -> None:
        raise ProtocolError("a question without n")

    trainer.on_request("question", picky)
    trainer.start()
    before = trainer.endpoint.traffic.dropped
    reply = ask(town.roster["trainer/0"], "question", {"number": 7, "consumer": "all", "more": [1]}, WAIT_S)
    assert reply == {"number": 7, "consumer": "all", "error": "a question without n"}
    assert ask(town.roster["trainer/0"], "question", {"number": [7]}, WAIT_S) == {"error": "a question without n"}
    assert trainer.endpoint.traffic.dropped == before + 2


def test_a_sender_of_many_malformed_messages_does_not_fill_the_log(
    town: Town, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer, rollout = acquainted(town)

    def picky(message: Message) -> None:
        raise ProtocolError("news")

    trainer.on("news", picky)
    before = trainer.endpoint.traffic.dropped
    for _ in range(50):
        rollout.send("trainer/0", "news", {})
    until(trainer, lambda: trainer.endpoint.traffic.dropped >= before + 50, "fifty drops")
    assert caplog.text.count("dropped a 'news' message from rollout/0") == 1
    monkeypatch.setattr("distflow.runtime.node.COMPLAIN_EVERY_S", 0.0)
    rollout.send("trainer/0", "news", {})
    until(trainer, lambda: trainer.endpoint.traffic.dropped >= before + 51, "one more")
    assert "news (and 49 more since the last such line)" in caplog.text


def test_the_agents_word_ends_a_life(town: Town) -> None:
    trainer, _ = acquainted(town)
    gone: list[Lost] = []
    trainer.on_lost(gone.append)
    body = {"worker": "rollout/0", "incarnation": 0, "reason": "signal 9 (SIGKILL)"}
    town.raw("trainer/0", encode("lost", "agent/0", 0, body))
    until(trainer, lambda: gone, "the loss")
    assert gone == [Lost("rollout/0", 0, "signal 9 (SIGKILL)")]
    assert not trainer.membership.present("rollout/0")


@pytest.mark.parametrize("orderly", [True, False])
def test_only_an_orderly_leave_is_announced(town: Town, orderly: bool) -> None:
    """After a failure the host agent tells; a farewell would make the others fail first and hide the cause."""
    heard: list[Message] = []
    trainer, rollout = acquainted(town, heard)
    gone: list[Lost] = []
    trainer.on_lost(gone.append)
    rollout.send("trainer/0", "news", {"n": "the last"})
    rollout.close(orderly=orderly)
    until(trainer, lambda: heard, "the last news")
    if orderly:
        until(trainer, lambda: gone, "the farewell")
        assert [(lost.reason, lost.orderly) for lost in gone] == [("it left the run", True)]
    assert not os.path.exists(town.roster["rollout/0"].removeprefix("ipc://"))
    # What came after the news, if anything, has been read by now.
    assert ask(town.roster["trainer/0"], "status", {}, WAIT_S) is not None
    assert bool(gone) == orderly


def test_another_recipe_ends_the_worker_that_is_refused(town: Town) -> None:
    """Which of the two depends on who speaks first; neither goes on with the other."""
    trainer, rollout = town.node("trainer/0", ["rollout/0"]), town.node("rollout/0", ["trainer/0"], digest="other")
    trainer.start()
    rollout.start()
    with pytest.raises(RecipeMismatch, match=r"compiled from different recipes: they differ in batch — start all"):
        trainer.board.until(rollout.board.raise_if_over, name="x", peers=(), limit_s=WAIT_S, progress=lambda: 0)
    assert not trainer.membership.present("rollout/0")
    assert not rollout.membership.present("trainer/0")


def test_work_travels_with_the_heartbeat(town: Town) -> None:
    trainer, rollout = acquainted(town)
    rollout.count_work(lambda: 40)
    rollout.work_done(2)
    until(trainer, lambda: trainer.membership.peers["rollout/0"].progress == 42, "a heartbeat")
    assert trainer.membership.peers["rollout/0"].facts["state"] == "starting"


def test_who_greets_from_another_host_is_answered_as_soon_as_it_is_known_by_its_key(town: Town) -> None:
    trainer, rollout = town.node("trainer/0", ["rollout/0"], host=0), town.node("rollout/0", ["trainer/0"], host=1)
    trainer.start()
    rollout.start()
    assert trainer.endpoint.network_address is not None
    rollout.endpoint.know("trainer/0", trainer.endpoint.network_address)
    assert rollout.endpoint.network_address is not None
    trainer.endpoint.know("rollout/0", rollout.endpoint.network_address)
    until(trainer, lambda: trainer.membership.present("rollout/0"), "rollout/0's hello")
    until(rollout, lambda: rollout.membership.present("trainer/0"), "trainer/0's welcome")


def test_one_address_that_cannot_be_used_does_not_cost_a_worker_the_rest_of_a_roster(town: Town) -> None:
    node = town.node("rollout/0", [], host=0)
    greeting = Greeting(node, SimpleNamespace(here=0, address="127.0.0.1"), lambda name: name != "agent/0")
    key = "#" + "ab" * 32
    addresses = {"trainer/0": f"tcp://10.0.0.1:9{key}", "trainer/1": f"tcp://10.0.0.1:9{key}", "trainer/2": ""}
    greeting._on_roster(Message("roster", "agent/0", 0, {"addresses": addresses}))
    assert node.membership.peers.keys() == {"trainer/0", "trainer/2"}
    assert "trainer/1" not in node.endpoint.roster
    node.start()


def test_a_worker_says_which_roster_it_has_and_soon_if_one_was_lost(town: Town) -> None:
    node = town.node("rollout/0", [], host=0)
    greeting = Greeting(node, SimpleNamespace(here=0, address="127.0.0.1"), lambda name: False)
    sent: list[int] = []
    node.send = lambda to, kind, body: sent.append(body["has"])

    def hear(number: int, since: int, **addresses: str) -> None:
        told = {"addresses": addresses, "since": since, "number": number}
        greeting._on_roster(Message("roster", "agent/0", 0, told))

    greeting._tick(0.0)
    hear(40, 0)
    hear(41, 40)
    greeting._tick(10.0)
    hear(43, 42)
    greeting._tick(10.1)
    greeting._on_roster(Message("roster", "agent/1", 0, {"addresses": {}}))
    greeting._tick(10.2)
    assert sent == [0, 41, 41], "what another agent tells instead of ours has no number"
    hear(43, 41)
    greeting._tick(40.0)
    assert sent[3:] == [43]
    hear(43, 41)
    greeting._tick(40.1)
    assert sent[4:] == [], "it came twice, and nothing is missing"
    hear(7, 0)
    greeting._tick(80.0)
    assert sent[4:] == [7], "the next agent of our host counts for itself"
    node.start()
