"""Messages of a worker to itself: handled at once, one after another, by whoever sent the first of them."""

import threading
from pathlib import Path

import pytest

from distflow.comm.endpoint import Endpoint
from distflow.comm.message import Message
from distflow.comm.traffic import LaneTraffic
from distflow.exchange.lease_lanes import Lanes

ME, OTHER = "worker/0", "worker/1"


@pytest.fixture
def lanes(tmp_path: Path) -> Lanes:
    return Lanes(Endpoint(ME, 3, {ME: f"ipc://{tmp_path}/me", OTHER: f"ipc://{tmp_path}/other"}))


def test_a_message_to_oneself_is_handled_before_post_returns(lanes: Lanes) -> None:
    heard: list[Message] = []
    lanes.on("ask", lambda message, now: heard.append(message))
    lanes.post(ME, "ask", {"n": 1}, [b"payload"])
    message = heard[0]
    assert (message.kind, message.sender, message.incarnation, message.body) == ("ask", ME, 3, {"n": 1})
    assert [bytes(part) for part in message.payload] == [b"payload"]
    assert lanes._endpoint.traffic.lanes["inproc"] == LaneTraffic(1, len(b"payload"))


def test_what_a_handler_sends_comes_after_it_and_in_order(lanes: Lanes) -> None:
    """Never inside it: the cores are not re-entrant."""
    order: list[str] = []

    def on_ask(message: Message, now: float) -> None:
        order.append(f"ask {message.body['n']} begins")
        if message.body["n"] == 0:
            for n in (1, 2):
                lanes.post(ME, "grant", {"n": n}, ())
            lanes.post(ME, "ask", {"n": 3}, ())
        order.append(f"ask {message.body['n']} ends")

    lanes.on("ask", on_ask)
    lanes.on("grant", lambda message, now: order.append(f"grant {message.body['n']}"))
    lanes.post(ME, "ask", {"n": 0}, ())
    assert order == ["ask 0 begins", "ask 0 ends", "grant 1", "grant 2", "ask 3 begins", "ask 3 ends"]


def test_after_a_handler_that_raised_the_lane_is_open_again(lanes: Lanes) -> None:
    heard: list[int] = []

    def on_ask(message: Message, now: float) -> None:
        if message.body["n"] == 0:
            raise OSError("disk")
        heard.append(message.body["n"])

    lanes.on("ask", on_ask)
    with pytest.raises(OSError, match="disk"):
        lanes.post(ME, "ask", {"n": 0}, ())
    lanes.post(ME, "ask", {"n": 1}, ())
    assert heard == [1]


def test_messages_to_others_go_over_the_endpoint(tmp_path: Path) -> None:
    roster = {ME: f"ipc://{tmp_path}/me", OTHER: f"ipc://{tmp_path}/other"}
    ends = {name: Endpoint(name, 0, roster) for name in roster}
    heard: list[str] = []
    arrived = threading.Event()

    def receive(message: Message) -> None:
        heard.append(message.kind)
        arrived.set()

    ends[OTHER].start(receive)
    ends[ME].start(lambda message: None)
    lanes = Lanes(ends[ME])
    lanes.on("ask", lambda message, now: heard.append("here"))
    lanes.post(OTHER, "ask", {}, ())
    assert arrived.wait(20.0)
    assert heard == ["ask"]
    for end in ends.values():
        end.close(linger_s=0.1)
