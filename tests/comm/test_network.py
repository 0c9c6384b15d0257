"""Listening on the network, with real sockets on loopback: two endpoints with listeners stand for two hosts."""

import contextlib
import logging
import queue
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import zmq

from distflow.comm import curve, sockets
from distflow.comm.addresses import place_of
from distflow.comm.client import RequestClient, ask
from distflow.comm.curve import Watch, present_key
from distflow.comm.endpoint import Endpoint
from distflow.comm.keys import Keys, NetworkListener, key_file, make_keys, write_keys
from distflow.comm.message import Message, encode, prefix_of
from distflow.comm.sockets import RECEIVE_LIMIT
from distflow.errors import ProtocolError
from tests.polling import WAIT_S, eventually


class Peer:
    """An endpoint with a network listener; it answers `status` and keeps everything else."""

    def __init__(self, name: str, folder: Path, keys: Keys, known: dict[str, str] | None = None) -> None:
        self.inbox: queue.Queue[Message] = queue.Queue()
        self.keys = keys
        roster = {name: f"ipc://{folder}/{name.replace('/', '-')}", **(known or {})}
        self.endpoint = Endpoint(name, 0, roster, tick_s=0.02, listener=NetworkListener("127.0.0.1", keys))
        self.endpoint.start(self.receive)

    def receive(self, message: Message) -> None:
        if message.kind == "status":
            self.endpoint.reply(message, {"name": self.endpoint.name})
        else:
            self.inbox.put(message)

    @property
    def address(self) -> str:
        assert self.endpoint.network_address is not None
        return self.endpoint.network_address

    @property
    def place(self) -> str:
        return place_of(self.address)

    def next(self) -> Message:
        return self.inbox.get(timeout=WAIT_S)


class Proxy:
    """A link between two hosts: forwards TCP until it is cut; then it holds all bytes, or ends every connection."""

    def __init__(self, target: str) -> None:
        host, port = place_of(target).removeprefix("tcp://").rsplit(":", 1)
        self._target = (host, int(port))
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"tcp://127.0.0.1:{self._listener.getsockname()[1]}"
        self._open = threading.Event()
        self._open.set()
        self._pairs: list[socket.socket] = []
        self._closed = False
        self.seen = b""
        """All that came through, in either direction."""
        threading.Thread(target=self._accept, daemon=True).start()

    def cut(self, *, reset: bool = False) -> None:
        self._open.clear()
        if reset:
            for end in self._pairs:
                _hang_up(end)
            self._pairs = []

    def heal(self) -> None:
        self._open.set()

    def close(self) -> None:
        self._closed = True
        _hang_up(self._listener)
        self.cut(reset=True)
        self._open.set()

    def _accept(self) -> None:
        while not self._closed:
            try:
                near, _ = self._listener.accept()
                far = socket.create_connection(self._target)
            except OSError:
                return
            self._pairs += [near, far]
            for source, target in ((near, far), (far, near)):
                threading.Thread(target=self._pump, args=(source, target), daemon=True).start()

    def _pump(self, source: socket.socket, target: socket.socket) -> None:
        try:
            while data := source.recv(1 << 16):
                assert self._open.wait(WAIT_S), "the test healed the link"
                self.seen += data
                target.sendall(data)
        except OSError:
            # The other direction, or `cut`, has closed them.
            return
        _hang_up(source)
        _hang_up(target)


def _hang_up(end: socket.socket) -> None:
    """Closing alone does not end a connection that another thread is reading from."""
    with contextlib.suppress(OSError):
        end.shutdown(socket.SHUT_RDWR)
    end.close()


@pytest.fixture
def keys() -> Keys:
    return make_keys()


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Callable[..., Peer]]:
    made: list[Peer] = []

    def peer(name: str, keys: Keys, known: dict[str, str] | None = None) -> Peer:
        new = Peer(name, tmp_path, keys, known)
        for other in made:
            # As the host agents do it.
            if other.keys is keys and other.endpoint.name != name:
                other.endpoint.know(name, new.address)
                if other.endpoint.name not in (known or {}):
                    new.endpoint.know(other.endpoint.name, other.address)
        made.append(new)
        return new

    yield peer
    for each in made:
        each.endpoint.close()


def test_messages_and_payloads_cross_the_network_in_order(make: Callable[..., Peer], keys: Keys) -> None:
    trainer = make("trainer/0", keys)
    rollout = make("rollout/0", keys, {"trainer/0": trainer.address})
    big = bytes(range(256)) * 4096
    rollout.endpoint.send("trainer/0", "results", {"n": 1}, [big, b"x"])
    rollout.endpoint.send("trainer/0", "results", {"n": 2})
    first, second = trainer.next(), trainer.next()
    assert (first.sender, first.body, [bytes(part) for part in first.payload]) == ("rollout/0", {"n": 1}, [big, b"x"])
    assert second.body == {"n": 2}


def test_replies_go_back_the_way_they_came(make: Callable[..., Peer], keys: Keys) -> None:
    trainer = make("trainer/0", keys)
    assert ask(trainer.address, "status", {}, WAIT_S, keys) == {"name": "trainer/0"}
    assert ask(trainer.endpoint.roster["trainer/0"], "status", {}, WAIT_S) == {"name": "trainer/0"}
    trainer.endpoint.send("trainer/0", "status", {})
    assert trainer.next().kind == "status.reply"


def test_nothing_secret_is_readable_on_the_network(make: Callable[..., Peer], keys: Keys) -> None:
    trainer = make("trainer/0", keys)
    proxy = Proxy(trainer.address)
    assert ask(proxy.address, "status", {"secret-word": 1}, WAIT_S, keys) == {"name": "trainer/0"}
    proxy.close()
    assert b"CURVE" in proxy.seen
    assert b"secret-word" not in proxy.seen


def test_another_runs_key_is_refused_and_both_sides_say_so(
    make: Callable[..., Peer], keys: Keys, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    trainer = make("trainer/0", keys)
    stranger = make("rollout/0", make_keys(), {"trainer/0": trainer.address})
    stranger.endpoint.send("trainer/0", "note", {})
    eventually(lambda: stranger.endpoint.traffic.refused and trainer.endpoint.traffic.refused, "both refused")
    eventually(lambda: stranger.endpoint.traffic.refused > 2, "a few attempts")
    assert trainer.inbox.empty()
    texts = [record.getMessage() for record in caplog.records]
    hint = "another run's key, or not a port of this run: every host needs the same <run_dir>/keys/run.key"
    assert texts.count(f"trainer/0 at {trainer.place} refused the connection — {hint}") == 1
    assert texts.count(f"refused a client at {trainer.place} — {hint}") == 1


def test_the_public_half_alone_does_not_open_the_door(make: Callable[..., Peer], keys: Keys) -> None:
    """Who knows the server's key but not the secret gets as far as the question who he is."""
    trainer, other = make("trainer/0", keys), make_keys()
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    dealer = context.socket(zmq.DEALER)
    dealer.curve_serverkey, dealer.curve_publickey, dealer.curve_secretkey = keys.public, other.public, other.secret
    dealer.connect(trainer.place)
    dealer.send_multipart([b"anything"])
    eventually(lambda: trainer.endpoint.traffic.refused, "refused")
    assert trainer.endpoint.traffic.dropped == 0, "not even nonsense came in"
    dealer.close(linger=0)
    context.term()


def test_asking_with_a_wrong_key_or_none_says_what_is_wrong(make: Callable[..., Peer], keys: Keys) -> None:
    address = make("trainer/0", keys).place
    with pytest.raises(ProtocolError, match=f"{address} refused the connection — another run's key"):
        ask(address, "status", {}, WAIT_S, make_keys())
    with pytest.raises(ProtocolError, match=r"asked without the run's key — pass the keys of <run_dir>/keys/run\.key"):
        ask(address, "status", {}, WAIT_S)


def test_a_client_that_was_refused_is_refused_again_and_not_left_waiting(make: Callable[..., Peer], keys: Keys) -> None:
    """A question that failed leaves no half-made connection to the next one."""
    address = make("trainer/0", keys).place
    for given, said in ((None, "without the run's key"), (make_keys(), "refused the connection")):
        with RequestClient(address, given) as client:
            for _ in range(2):
                with pytest.raises(ProtocolError, match=said):
                    client.ask("status", {}, WAIT_S)


def test_plain_clients_do_not_get_in(make: Callable[..., Peer], keys: Keys) -> None:
    trainer = make("trainer/0", keys)
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    dealer = context.socket(zmq.DEALER)
    watch = Watch(dealer)
    dealer.connect(trainer.place)
    dealer.send(b"\x95\x01")
    eventually(watch.refused, "refused")
    assert trainer.endpoint.traffic.dropped == 0, "not even nonsense came in"
    watch.close()
    dealer.close(linger=0)
    context.term()


@pytest.mark.parametrize("reset", [False, True])
def test_a_link_that_was_cut_heals(make: Callable[..., Peer], keys: Keys, reset: bool) -> None:
    trainer = make("trainer/0", keys)
    proxy = Proxy(trainer.address)
    rollout = make("rollout/0", keys, {"trainer/0": proxy.address})
    rollout.endpoint.send("trainer/0", "note", {"n": 0})
    assert trainer.next().body == {"n": 0}
    proxy.cut(reset=reset)
    for n in range(1, 6):
        rollout.endpoint.send("trainer/0", "note", {"n": n})
    with pytest.raises(queue.Empty):
        trainer.inbox.get(timeout=1.0)
    proxy.heal()
    found = [trainer.next().body["n"]]
    while found[-1] < 5:
        found.append(trainer.next().body["n"])
    # What was under way when the connection ended may be lost, what was queued is not; nothing comes twice.
    assert found == sorted(set(found))
    assert reset or found == [1, 2, 3, 4, 5]
    proxy.close()


def test_a_busy_receiver_survives_a_full_queue_and_the_end_of_its_sender(
    tmp_path: Path, make: Callable[..., Peer], keys: Keys
) -> None:
    write_keys(key_file(tmp_path), keys)
    rollout = make("rollout/0", keys)
    arguments = [sys.executable, "-m", "tests.comm.slow_receiver", str(tmp_path), rollout.address]
    with subprocess.Popen(arguments, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as busy:
        assert busy.stdin is not None
        assert busy.stdout is not None
        rollout.endpoint.know("trainer/0", busy.stdout.readline().strip())
        for n in range(3 * RECEIVE_LIMIT):
            delivery = rollout.endpoint.send("trainer/0", "note", {"n": n})
            eventually(lambda sent=delivery: sent.sent, "handed over")
        assert busy.stdout.readline() == "0\n"
        rollout.endpoint.close()
        # ZeroMQ's pings would end it within two or three of them.
        with pytest.raises(subprocess.TimeoutExpired):
            busy.wait(timeout=3.5)
        print(file=busy.stdin, flush=True)
        assert [int(busy.stdout.readline()) for _ in range(RECEIVE_LIMIT - 1)] == list(range(1, RECEIVE_LIMIT))
        with pytest.raises(subprocess.TimeoutExpired):
            busy.wait(timeout=0.5)
        busy.kill()


def test_a_peer_without_address_gets_nothing_until_it_is_known(make: Callable[..., Peer], keys: Keys) -> None:
    rollout = make("rollout/0", keys, {"trainer/0": ""})
    rollout.endpoint.send("trainer/0", "note", {"n": 1})
    eventually(lambda: rollout.endpoint.traffic.dropped == 1, "dropped")
    trainer = make("trainer/0", keys)
    rollout.endpoint.know("trainer/0", trainer.address)
    rollout.endpoint.send("trainer/0", "note", {"n": 2})
    assert trainer.next().body == {"n": 2}
    assert rollout.endpoint.roster["trainer/0"] == trainer.address


def test_a_peer_that_moved_or_is_new_is_reached_at_its_new_address(
    make: Callable[..., Peer], keys: Keys, tmp_path: Path
) -> None:
    first = make("trainer/0", keys)
    rollout = make("rollout/0", keys, {"trainer/0": first.address})
    rollout.endpoint.send("trainer/0", "note", {"n": 1})
    assert first.next().body == {"n": 1}
    (tmp_path / "there").mkdir()
    for name in ("trainer/0", "trainer/1"):
        second = Peer(name, tmp_path / "there", keys)
        second.endpoint.know("rollout/0", rollout.address)
        rollout.endpoint.know(name, second.address)
        rollout.endpoint.send(name, "note", {"for": name})
        assert second.next().body == {"for": name}
        second.endpoint.close()
    assert first.inbox.empty()


def test_one_worker_cannot_speak_for_another(
    make: Callable[..., Peer], keys: Keys, caplog: pytest.LogCaptureFixture
) -> None:
    """Whoever has taken over rollout/1 has its key and the run's, and no others."""
    caplog.set_level(logging.WARNING)
    trainer, stolen = make("trainer/0", keys), make("rollout/1", keys)
    stolen.endpoint.send("trainer/0", "note", {"n": 1})
    assert trainer.next().sender == "rollout/1"
    stolen.endpoint._prefix = prefix_of("agent/0", 0)
    stolen.endpoint.send("trainer/0", "lost", {})
    eventually(lambda: trainer.endpoint.traffic.dropped, "dropped")
    assert "'agent/0' used the key of 'rollout/1'" in caplog.text
    # Nor by the run's key: that is for commands.
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    dealer = context.socket(zmq.DEALER)
    present_key(dealer, keys)
    dealer.connect(trainer.place)
    dealer.send(encode("lost", "agent/0", 0, {}))
    eventually(lambda: trainer.endpoint.traffic.dropped == 2, "dropped again")
    assert trainer.inbox.empty()
    dealer.close(linger=0)
    context.term()
    with pytest.raises(ProtocolError, match="trainer/1 announced the key of rollout/1"):
        trainer.endpoint.know("trainer/1", stolen.address)


def test_a_worker_that_is_not_known_yet_waits_for_its_introduction(tmp_path: Path, keys: Keys) -> None:
    trainer = Peer("trainer/0", tmp_path, keys)
    rollout = Peer("rollout/0", tmp_path, keys, {"trainer/0": trainer.address})
    rollout.endpoint.send("trainer/0", "note", {"n": 1})
    with pytest.raises(queue.Empty):
        trainer.inbox.get(timeout=0.5)
    trainer.endpoint.know("rollout/0", rollout.address)
    assert trainer.next().body == {"n": 1}
    assert (trainer.endpoint.traffic.refused, rollout.endpoint.traffic.refused) == (0, 0)
    rollout.endpoint.close()
    trainer.endpoint.close()


def test_knowing_an_address_again_keeps_the_connection(make: Callable[..., Peer], keys: Keys) -> None:
    """Rosters are repeated; a new connection each time would lose and reorder messages."""
    trainer = make("trainer/0", keys)
    rollout = make("rollout/0", keys, {"trainer/0": trainer.address})
    for n in range(200):
        rollout.endpoint.know("trainer/0", str(trainer.address))
        rollout.endpoint.send("trainer/0", "note", {"n": n})
    found = [trainer.next() for _ in range(200)]
    assert [message.body["n"] for message in found] == list(range(200))
    assert len({message.route for message in found}) == 1


def test_network_addresses_need_a_door(tmp_path: Path, keys: Keys) -> None:
    roster = {"trainer/0": f"ipc://{tmp_path}/t", "rollout/0": "tcp://127.0.0.1:1"}
    with pytest.raises(ProtocolError, match="tcp://127.0.0.1:1 is on another host, but this worker has neither"):
        Endpoint("trainer/0", 0, roster)
    endpoint = Endpoint("trainer/0", 0, {"trainer/0": f"ipc://{tmp_path}/t"})
    with pytest.raises(ProtocolError, match="tcp://127.0.0.1:2 is on another host"):
        endpoint.know("rollout/0", "tcp://127.0.0.1:2")
    endpoint.start(lambda message: None)
    assert endpoint.network_address is None
    endpoint.close()


def test_an_address_of_another_machine_cannot_be_bound(tmp_path: Path, keys: Keys) -> None:
    endpoint = Endpoint(
        "trainer/0", 0, {"trainer/0": f"ipc://{tmp_path}/t"}, listener=NetworkListener("192.0.2.1", keys)
    )
    with pytest.raises(ProtocolError, match=r"cannot listen on tcp://192\.0\.2\.1:\*: .* must be one of its own"):
        endpoint.start(lambda message: None)


@pytest.mark.skipif(not socket.has_ipv6, reason="no IPv6 here")
@pytest.mark.parametrize("host", ["::1", "[::1]"])
def test_ipv6(tmp_path: Path, keys: Keys, host: str) -> None:
    peer = Endpoint("trainer/0", 0, {"trainer/0": f"ipc://{tmp_path}/t"}, listener=NetworkListener(host, keys))
    try:
        peer.start(lambda message: peer.reply(message, {"six": True}))
    except ProtocolError as error:
        pytest.skip(str(error))
    assert peer.network_address is not None
    assert peer.network_address.startswith("tcp://[::1]:")
    assert ask(peer.network_address, "status", {}, WAIT_S, keys) == {"six": True}
    peer.close()


def test_a_peer_that_has_not_heard_of_us_is_not_said_to_have_another_key(
    tmp_path: Path, keys: Keys, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a busy machine the address of a new worker may take longer than its connection waits."""
    caplog.set_level(logging.WARNING)
    monkeypatch.setattr(sockets, "INTRODUCED_S", 0.0)
    trainer = Peer("trainer/0", tmp_path, keys)
    rollout = Peer("rollout/0", tmp_path, keys, {"trainer/0": trainer.address})
    rollout.endpoint.send("trainer/0", "note", {"n": 1})
    eventually(lambda: rollout.endpoint.traffic.refused and trainer.endpoint.traffic.refused, "both refused")
    for said in (f"trainer/0 at {trainer.place} refused the connection", f"refused a client at {trainer.place}"):
        assert f"{said} — the run's key is right, but the server does not know the client's own (yet)" in caplog.text
    assert "another run's key" not in caplog.text
    rollout.endpoint.close()
    trainer.endpoint.close()


@pytest.mark.parametrize("who", ["we", "they"])
def test_a_handshake_that_takes_too_long_is_lost_and_not_refused(
    tmp_path: Path, keys: Keys, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, who: str
) -> None:
    """A server that is too busy accepts connections and says nothing, until one of the two gives up."""
    caplog.set_level(logging.WARNING)
    for module in (curve, sockets):
        monkeypatch.setattr(module, "HANDSHAKE_MS", 300)
    if who == "they":
        monkeypatch.setattr(sockets, "tune", lambda socket, address: None)
    with socket.create_server(("127.0.0.1", 0)) as busy:
        place = f"tcp://127.0.0.1:{busy.getsockname()[1]}"
        rollout = Peer("rollout/0", tmp_path, keys, {"trainer/0": place})
        rollout.endpoint.send("trainer/0", "note", {})
        for _ in range(3 if who == "they" else 0):
            connection, _ = busy.accept()
            time.sleep(0.4)
            connection.close()
        eventually(lambda: "the handshake with trainer/0" in caplog.text, "the loss is told")
    assert f"the handshake with trainer/0 at {place} was not finished within 0.3 s and is tried again" in caplog.text
    assert "another run's key" not in caplog.text
    assert rollout.endpoint.traffic.refused == 0
    rollout.endpoint.close()
