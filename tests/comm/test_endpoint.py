import queue
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import zmq

from distflow.comm.client import ask
from distflow.comm.endpoint import Endpoint
from distflow.comm.keys import NetworkListener, make_keys
from distflow.comm.message import Message
from distflow.errors import ProtocolError

WAIT_S = 20.0


class Peer:
    """An endpoint whose messages land in a queue."""

    def __init__(self, name: str, roster: dict[str, str], incarnation: int = 0) -> None:
        self.inbox: queue.Queue[Message] = queue.Queue()
        self.endpoint = Endpoint(name, incarnation, roster)
        self.endpoint.start(self.inbox.put)

    def next(self) -> Message:
        return self.inbox.get(timeout=WAIT_S)


@pytest.fixture
def roster(tmp_path: Path) -> dict[str, str]:
    return {name: f"ipc://{tmp_path}/{name.replace('/', '-')}" for name in ("trainer/0", "rollout/0")}


@pytest.fixture
def pair(roster: dict[str, str]) -> Iterator[tuple[Peer, Peer]]:
    peers = Peer("trainer/0", roster), Peer("rollout/0", roster)
    yield peers
    for peer in peers:
        peer.endpoint.close()


def test_messages_and_payloads_arrive_in_order(pair: tuple[Peer, Peer]) -> None:
    trainer, rollout = pair
    big = bytes(range(256)) * 4096
    rollout.endpoint.send("trainer/0", "results", {"n": 1}, [big, b"x"])
    rollout.endpoint.send("trainer/0", "results", {"n": 2})
    first, second = trainer.next(), trainer.next()
    assert (first.sender, first.body, [bytes(part) for part in first.payload]) == ("rollout/0", {"n": 1}, [big, b"x"])
    assert second.body == {"n": 2}


def test_a_message_to_itself_arrives(pair: tuple[Peer, Peer]) -> None:
    pair[0].endpoint.send("trainer/0", "note", {"a": 1})
    assert pair[0].next().body == {"a": 1}


def test_messages_wait_for_a_peer_that_comes_later(roster: dict[str, str]) -> None:
    early = Peer("rollout/0", roster)
    early.endpoint.send("trainer/0", "hello", {})
    late = Peer("trainer/0", roster)
    assert late.next().kind == "hello"
    early.endpoint.close()
    late.endpoint.close()


def test_a_restarted_peer_is_reached_at_the_same_address(roster: dict[str, str]) -> None:
    trainer, first = Peer("trainer/0", roster), Peer("rollout/0", roster)
    trainer.endpoint.send("rollout/0", "note", {"n": 1})
    assert first.next().body == {"n": 1}
    first.endpoint.close()
    second = Peer("rollout/0", roster, incarnation=1)
    for n in range(100):
        trainer.endpoint.send("rollout/0", "note", {"n": n})
        try:
            assert second.inbox.get(timeout=0.5).kind == "note"
            break
        except queue.Empty:
            continue
    else:
        pytest.fail("nothing reached the new incarnation")
    trainer.endpoint.close()
    second.endpoint.close()


def test_a_client_gets_its_reply(pair: tuple[Peer, Peer], roster: dict[str, str]) -> None:
    trainer, _ = pair
    thread = threading.Thread(target=lambda: trainer.endpoint.reply(trainer.next(), {"state": "training"}))
    thread.start()
    assert ask(roster["trainer/0"], "status", {}, WAIT_S) == {"state": "training"}
    thread.join()


def test_nobody_there_is_none(tmp_path: Path) -> None:
    assert ask(f"ipc://{tmp_path}/nobody", "status", {}, 0.2) is None


def test_nonsense_on_the_socket_is_dropped_and_the_endpoint_goes_on(
    pair: tuple[Peer, Peer], roster: dict[str, str]
) -> None:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    socket = context.socket(zmq.DEALER)
    socket.connect(roster["trainer/0"])
    socket.send(b"\x80\x04\x95 a pickle, say")
    socket.send_multipart([b"\xff" * 100, b"more"])
    pair[1].endpoint.send("trainer/0", "note", {"after": True})
    assert pair[0].next().body == {"after": True}
    socket.close(linger=0)
    context.term()


def test_names_outside_the_roster_are_refused(roster: dict[str, str], pair: tuple[Peer, Peer]) -> None:
    with pytest.raises(KeyError, match="'critic/0' is not in the roster"):
        pair[0].endpoint.send("critic/0", "note", {})
    with pytest.raises(ProtocolError, match="'critic/0' is not in the roster"):
        Endpoint("critic/0", 0, roster)


def test_an_address_in_use_is_named(tmp_path: Path) -> None:
    missing = {"trainer/0": f"ipc://{tmp_path}/no/such/folder"}
    with pytest.raises(ProtocolError, match="cannot listen on ipc://.*no/such/folder"):
        Endpoint("trainer/0", 0, missing).start(lambda message: None)


def test_any_fault_of_the_start_is_raised_by_it() -> None:
    unencodable = {"trainer/0": "ipc:///tmp/\udcff"}
    with pytest.raises(ProtocolError, match="cannot listen on ipc:///tmp/.*surrogates not allowed"):
        Endpoint("trainer/0", 0, unencodable).start(lambda message: None)


def test_a_fault_of_a_handler_is_handed_over(roster: dict[str, str]) -> None:
    faults: queue.Queue[BaseException] = queue.Queue()
    endpoint = Endpoint("trainer/0", 0, roster, tick_s=0.01)
    endpoint.start(lambda message: None, on_tick=lambda: 1 / 0, on_fault=faults.put)
    assert isinstance(faults.get(timeout=20), ZeroDivisionError)
    endpoint.close()


def test_what_no_receiver_accepts_is_refused_by_its_sender_and_ends_no_receiver(tmp_path: Path) -> None:
    small = Endpoint("trainer/0", 0, {"trainer/0": f"ipc://{tmp_path}/t"}, max_frame_bytes=1 << 20)
    arrived: queue.Queue[Message] = queue.Queue()
    small.start(arrived.put)
    roster = {"rollout/0": f"ipc://{tmp_path}/r", "trainer/0": f"ipc://{tmp_path}/t"}
    large = Endpoint("rollout/0", 0, roster, max_frame_bytes=4 << 20)
    large.start(lambda message: None)
    with pytest.raises(ProtocolError, match="rollout/0 cannot send 5242880 bytes at once: .* at most 4194304"):
        large.send("trainer/0", "results", {}, [bytes(5 << 20)])
    large.send("trainer/0", "results", {}, [bytes(2 << 20)])
    deadline = time.monotonic() + 20.0
    while arrived.empty() and time.monotonic() < deadline:
        large.send("trainer/0", "note", {})
        time.sleep(0.05)
    assert arrived.get(timeout=1.0).kind == "note"
    large.close(0.0)
    small.close(0.0)


def test_of_many_addresses_the_good_ones_are_learned_at_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    key, other = "#" + "ab" * 32, "#" + "cd" * 32
    endpoint = Endpoint("a/0", 0, {"a/0": f"ipc://{tmp_path}/a"}, listener=NetworkListener("127.0.0.1", make_keys()))
    before = endpoint.roster
    told = {"b/0": f"tcp://10.0.0.1:1{key}", "b/1": f"tcp://10.0.0.1:2{key}", "b/2": "junk", "b/3": ""}
    assert endpoint.learn_all(told) == {"b/0", "b/3"}
    assert endpoint.learn_all(told) == {"b/0", "b/3"}
    assert before.keys() == {"a/0"}, "who reads it has one state of it"
    assert endpoint.roster == {**before, "b/0": told["b/0"], "b/3": ""}
    assert caplog.text.count("ignored the address of b/1: b/1 announced the key of b/0") == 1
    endpoint.know_all({"b/0": f"tcp://10.0.0.1:1{other}", "b/1": f"tcp://10.0.0.1:2{key}"})
    assert endpoint.roster["b/1"].endswith(key), "a key that nobody has any more is free"
    with pytest.raises(ProtocolError, match="b/4 announced the key of b/0"):
        endpoint.know_all({"b/4": f"tcp://10.0.0.1:3{other}"})
    endpoint.close()
