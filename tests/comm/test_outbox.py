"""Queues of an endpoint: bounded in bytes for each peer, and closed without touching anybody else's descriptors."""

from __future__ import annotations

import os
import select
import threading
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import zmq
from hypothesis import given
from hypothesis import strategies as st

from distflow.comm import outbox
from distflow.comm.endpoint import Endpoint
from distflow.comm.message import MAX_BUNDLED, Message
from distflow.comm.outbox import BUNDLE_BYTES, Delivery, Outbox, Posted, SentOnce, bundles
from distflow.comm.sockets import RECEIVE_LIMIT
from distflow.errors import ProtocolError
from tests.polling import WAIT_S, eventually

MIB = 1 << 20


def resident_mb() -> float:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4 / 1024


@pytest.fixture
def roster(tmp_path: Path) -> dict[str, str]:
    return {name: f"ipc://{tmp_path}/{name.replace('/', '-')}" for name in ("trainer/0", "rollout/0")}


@pytest.fixture
def sender(roster: dict[str, str]) -> Iterator[Endpoint]:
    endpoint = Endpoint("rollout/0", 0, roster, tick_s=0.05)
    endpoint.start(lambda message: None)
    yield endpoint
    endpoint.close(linger_s=0.1)


def test_an_absent_peer_costs_a_bounded_number_of_bytes(sender: Endpoint) -> None:
    before = resident_mb()
    sent = [sender.send("trainer/0", "results", {"n": n}, (bytearray(2 * MIB),)) for n in range(150)]
    eventually(lambda: len(sender._outbox) == 0)
    waiting = [delivery for delivery in sent if not delivery.left]
    assert len(waiting) == outbox.QUEUE_BYTES // (2 * MIB) - 1, "headers count too"
    assert waiting == sent[: len(waiting)], "the newest are dropped"
    assert sender.traffic.dropped == 150 - len(waiting)
    assert resident_mb() - before < 100
    small = sender.send("trainer/0", "beat", {})
    assert not small.dropped, "small messages still find room"


def test_what_waits_for_a_peer_that_is_gone_is_let_go_of(sender: Endpoint) -> None:
    sent = sender.send("trainer/0", "results", {}, (bytearray(MIB),))
    small = sender.send("trainer/0", "results", {}, (b"few",))
    eventually(lambda: len(sender._outbox) == 0)
    assert not sent.left
    assert not small.left, "small ones are followed as well if they have a payload"
    sender.disconnect("trainer/0")
    eventually(lambda: sent.left and small.left)
    eventually(lambda: not sender._outbox._under_way)


def test_what_was_sent_has_left_and_makes_room(sender: Endpoint, roster: dict[str, str]) -> None:
    arrived: list[Message] = []
    trainer = Endpoint("trainer/0", 0, roster)
    trainer.start(arrived.append)
    for n in range(40):
        delivery = sender.send("trainer/0", "results", {"n": n}, (bytearray(4 * MIB), b"", b"x"))
        assert not delivery.dropped
        eventually(partial(getattr, delivery, "left"))
    eventually(lambda: len(arrived) == 40)
    assert [len(part) for part in arrived[39].payload] == [4 * MIB, 0, 1]
    eventually(lambda: not sender._outbox._under_way)
    trainer.close()


def test_a_receiver_that_stands_still_leaves_messages_with_their_sender(
    sender: Endpoint, roster: dict[str, str]
) -> None:
    go_on = threading.Event()
    arrived: list[Message] = []

    def stand_still(message: Message) -> None:
        assert go_on.wait(WAIT_S)
        arrived.append(message)

    trainer = Endpoint("trainer/0", 0, roster)
    trainer.start(stand_still)
    sent = [sender.send("trainer/0", "results", {"n": n}, (bytearray(MIB),)) for n in range(40)]
    eventually(lambda: sum(delivery.left for delivery in sent) >= RECEIVE_LIMIT)
    time.sleep(0.3)
    assert sum(delivery.left for delivery in sent) <= RECEIVE_LIMIT + 6, "one is read, some lie in the kernel"
    go_on.set()
    eventually(lambda: len(arrived) == 40)
    assert [message.body["n"] for message in arrived] == list(range(40))
    trainer.close()


def test_a_message_larger_than_the_bound_goes_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(outbox, "QUEUE_BYTES", 1000)
    box = Outbox()
    assert not box.put("trainer/0", [bytes(5000)]).dropped
    assert box.put("trainer/0", [b"header", bytes(10)]).dropped
    assert not box.put("trainer/1", [bytes(5000)]).dropped, "each peer has its own bound"
    box.close()
    assert box.put("trainer/2", [b"x"]).dropped


def test_the_end_of_a_connection_takes_no_room_and_comes_in_its_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(outbox, "QUEUE_BYTES", 1000)
    box = Outbox()
    sent = [box.put("trainer/0", [bytes(5000)]), box.put("trainer/0", []), box.put("trainer/1", [])]
    assert not any(delivery.dropped for delivery in sent)
    box.sweep()
    for number, (delivery, bundle) in enumerate(zip(sent, bundles(box.take()), strict=True)):
        (posted,) = bundle
        assert posted.delivery is delivery
        posted.delivery.hand_over()
        box.handed_over(bundle)
        assert [one.left for one in sent] == [True] * (number + 1) + [False] * (2 - number)
    box.sweep()
    assert not box._under_way
    box.close()


@given(st.lists(st.tuples(st.sampled_from(["a", "b", b"c"]), st.sampled_from([0, 10, 5000, BUNDLE_BYTES, 3 * MIB]))))
def test_bundles_keep_the_order_of_each_receiver_and_their_bounds(asked: list[tuple[str | bytes, int]]) -> None:
    posted = [Posted(to, [bytes(size)] if size else []) for to, size in asked]
    found = list(bundles(posted))
    for to in ("a", "b", b"c"):
        assert [one for bundle in found for one in bundle if one.to == to] == [one for one in posted if one.to == to]
    for bundle in found:
        assert len({one.to for one in bundle}) == 1
        if len(bundle) > 1:
            assert all(one.frames for one in bundle), "the end of a connection comes alone"
            assert sum(one.nbytes for one in bundle) <= BUNDLE_BYTES
            assert len(bundle) <= MAX_BUNDLED
    if all(0 < size <= 5000 for _, size in asked) and sum(size for _, size in asked) <= BUNDLE_BYTES:
        assert len(found) == len({to for to, _ in asked}), "one message for each receiver"


def test_what_waits_for_a_peer_travels_as_one_message_and_each_delivery_is_told(
    sender: Endpoint, roster: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    ends: list[int] = []
    send = zmq.Socket.send

    def counted(self: zmq.Socket[bytes], frame: object, flags: int = 0, *args: object, **kwargs: object) -> object:
        if self.type == zmq.DEALER and not flags & zmq.SNDMORE:
            ends.append(flags)
        return send(self, frame, flags, *args, **kwargs)  # type: ignore[arg-type]

    monkeypatch.setattr(zmq.Socket, "send", counted)
    arrived: list[Message] = []
    trainer = Endpoint("trainer/0", 0, roster)
    trainer.start(arrived.append)
    sent: list[Delivery] = []
    go_on = threading.Event()

    def queue_all(message: Message) -> None:
        # On the sender's endpoint thread: nothing is flushed until this returns.
        parts = [(n, (bytes([n % 256]) * n,) * (n % 3)) for n in range(MAX_BUNDLED + 10)]
        sent.extend(sender.send("trainer/0", "note", {"n": n}, payload) for n, payload in parts)
        go_on.set()

    sender._on_message = queue_all
    sender.send("rollout/0", "go", {})
    assert go_on.wait(WAIT_S)
    eventually(lambda: len(arrived) == MAX_BUNDLED + 10)
    assert len(ends) == 2, "as many messages as one may have, and the rest"
    for n, message in enumerate(arrived):
        assert (message.kind, message.sender, message.body) == ("note", "rollout/0", {"n": n})
        assert [bytes(part) for part in message.payload] == [bytes([n % 256]) * n] * (n % 3)
    eventually(lambda: all(delivery.left and not delivery.dropped for delivery in sent))
    eventually(lambda: not sender._outbox._under_way)
    assert sender.traffic.sent == trainer.traffic.received == MAX_BUNDLED + 10
    trainer.close()


def test_a_message_to_oneself_is_never_encoded(sender: Endpoint) -> None:
    arrived: list[Message] = []
    sender._on_message = arrived.append
    body, part = {"n": object()}, bytearray(3)
    delivery = sender.send("rollout/0", "note", body, [part])
    eventually(lambda: len(arrived) == 1)
    assert arrived[0].body is body
    assert arrived[0].payload[0].obj is part
    assert delivery.left
    assert not delivery.dropped
    sender.reply(arrived[0], {"of": "mine"})
    eventually(lambda: len(arrived) == 2)
    assert (arrived[1].kind, arrived[1].sender, arrived[1].body) == ("note.reply", "rollout/0", {"of": "mine"})
    eventually(lambda: not sender._outbox._under_way)


def test_messages_not_yet_sent_are_dropped_when_the_thread_fails(roster: dict[str, str]) -> None:
    endpoint = Endpoint("rollout/0", 0, roster)
    faults: list[BaseException] = []
    sent: list[Delivery] = []

    def fail(message: Message) -> None:
        if message.body["n"]:
            raise ValueError("a bug")
        sent.extend(endpoint.send("rollout/0", "note", {"n": n}) for n in (1, 2, 3))

    endpoint.start(fail, on_fault=faults.append)
    endpoint.send("rollout/0", "note", {"n": 0})
    eventually(lambda: bool(faults))
    eventually(lambda: len(sent) == 3 and all(one.left for one in sent))
    assert [one.dropped for one in sent] == [False, True, True]
    endpoint.close()


def test_one_copy_is_under_way_at_a_time() -> None:
    box, once = Outbox(), SentOnce()
    once.note("trainer/0", 5, box.put("trainer/0", [b"a"]))
    assert once.under_way("trainer/0", 5)
    assert not once.under_way("trainer/0", 6)
    assert not once.under_way("trainer/1", 5)
    once.note("trainer/0", 6, box.put("trainer/0", [b"b"]))
    assert once.under_way("trainer/0", 5)
    box.close()
    assert not once.under_way("trainer/0", 5)
    for number in range(7, 200):
        once.note("trainer/0", number, box.put("trainer/0", [b"c"]))
        assert len(once._deliveries["trainer/0"]) <= 33, "what has left is forgotten"


def test_a_copy_that_has_just_left_may_still_be_in_the_network(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr("distflow.comm.outbox.time", SimpleNamespace(monotonic=lambda: now))
    once, copy = SentOnce(settle_s=1.0), Delivery()
    once.note("trainer/0", 5, copy)
    now += 60.0
    assert once.under_way("trainer/0", 5), "a slow link has not taken it yet"
    copy.hand_over()
    assert once.under_way("trainer/0", 5)
    now += 0.9
    assert once.under_way("trainer/0", 5)
    now += 0.1
    assert not once.under_way("trainer/0", 5)
    lost = Delivery()
    once.note("trainer/0", 5, lost)
    lost.drop()
    assert not once.under_way("trainer/0", 5), "what was dropped need not be waited for"
    for number in range(100):
        once.note("trainer/0", number, copy)
    assert len(once._left_at) <= 1


# -- closing


class Stranger:
    """Pipes that get the numbers of descriptors just closed; nobody else has any business to write into them."""

    def __init__(self) -> None:
        self.pipes = [os.pipe() for _ in range(4)]

    def close(self) -> int:
        """How many bytes somebody wrote."""
        ends = [read for read, _ in self.pipes]
        count = sum(len(os.read(end, 100)) for end in select.select(ends, [], [], 0)[0])
        for pipe in self.pipes:
            for end in pipe:
                os.close(end)
        return count


def test_what_is_sent_after_the_close_goes_nowhere(roster: dict[str, str]) -> None:
    endpoint = Endpoint("rollout/0", 0, roster)
    endpoint.start(lambda message: None)
    endpoint.close()
    stranger = Stranger()
    assert endpoint.send("trainer/0", "note", {}).dropped
    assert endpoint.traffic.dropped == 1
    endpoint.disconnect("trainer/0")
    endpoint.close()
    assert stranger.close() == 0
    assert len(endpoint._outbox) == 0


def test_threads_that_send_while_it_closes_never_write_into_other_descriptors(roster: dict[str, str]) -> None:
    for _ in range(20):
        endpoint = Endpoint("rollout/0", 0, roster)
        endpoint.start(lambda message: None)
        over = threading.Event()

        def send(endpoint: Endpoint = endpoint, over: threading.Event = over) -> None:
            while not over.is_set():
                endpoint.send("rollout/0", "note", {})

        threads = [threading.Thread(target=send) for _ in range(3)]
        closers = [threading.Thread(target=endpoint.close, args=(0.1,)) for _ in range(2)]
        for thread in (*threads, *closers):
            thread.start()
        for thread in closers:
            thread.join(WAIT_S)
        stranger = Stranger()
        time.sleep(0.01)
        over.set()
        for thread in threads:
            thread.join(WAIT_S)
        assert stranger.close() == 0


def test_an_endpoint_that_failed_takes_nothing_more(roster: dict[str, str]) -> None:
    faults: list[BaseException] = []
    endpoint = Endpoint("rollout/0", 0, roster, tick_s=0.01)
    endpoint.start(lambda message: None, on_tick=lambda: 1 / 0, on_fault=faults.append)
    eventually(lambda: bool(faults))
    eventually(lambda: endpoint.send("trainer/0", "note", {}).dropped)
    stranger = Stranger()
    endpoint.send("trainer/0", "note", {})
    endpoint.close()
    assert stranger.close() == 0


def test_an_endpoint_may_be_closed_unstarted_and_by_its_own_thread(roster: dict[str, str]) -> None:
    Endpoint("rollout/0", 0, roster).close()
    endpoint = Endpoint("rollout/0", 0, roster)
    endpoint.start(lambda message: endpoint.close(0.1))
    endpoint.send("rollout/0", "note", {})
    thread = endpoint._thread
    assert thread is not None
    thread.join(WAIT_S)
    assert not thread.is_alive()


def test_an_endpoint_that_cannot_listen_leaves_no_descriptors(tmp_path: Path) -> None:
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(5):
        with pytest.raises(ProtocolError, match="cannot listen on"):
            Endpoint("trainer/0", 0, {"trainer/0": f"ipc://{tmp_path}/no/folder"}).start(lambda message: None)
    eventually(lambda: len(os.listdir("/proc/self/fd")) <= before)
