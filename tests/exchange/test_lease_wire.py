from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import Any

import msgpack
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from distflow.comm.message import Buffer
from distflow.errors import ProtocolError
from distflow.exchange.lease_wire import KINDS, from_wire, kind_of, to_wire
from distflow.exchange.messages import (
    Ack,
    Again,
    Ask,
    Bye,
    Cancel,
    Closed,
    Finished,
    Grant,
    HandBack,
    Lease,
    Message,
    Progress,
    Refuse,
    Report,
    Result,
    Running,
)
from distflow.exchange.partials import cut
from distflow.types import BegunSample, SampleOutput, Span, Uid, Version

LEASE = Lease(Uid(0, 5, 9), 1, 2, 1, 42, (3, 4, 5), "2+3=", '{"answer": "5"}', 0, 0)
REPORT = Report("rollout/0", 1, 0, 7, (9, 13), 3, -1)
OUTPUT = SampleOutput(9, 2, (5, 6, 7), (-0.5, -1.5, -2.5), (Span(0, 1, 0, 1), Span(0, 2, 1, 3)), "stop")
PIECE = cut(OUTPUT, 1, 9)
BEGUN = (
    BegunSample(2, OUTPUT.token_ids, OUTPUT.logprobs, OUTPUT.spans, "stop"),
    BegunSample(3, OUTPUT.token_ids[:1], OUTPUT.logprobs[:1], OUTPUT.spans[:1]),
)
MESSAGES: list[Message] = [
    Ask(REPORT, 4, 9, True, True),
    Progress(REPORT, (Running(9, 12, 3), Running(13, 0, -1)), (PIECE,)),
    Result("rollout/0", 1, 0, 9, 1, 1024, Version(0, 3), "", 2),
    Result("rollout/0", 1, 0, 9, 1, 0, None, "reward error", 0),
    Bye("rollout/0", 1),
    Grant("trainer/0", 0, 1, 3, 4, (LEASE, dataclasses.replace(LEASE, kind="val", begun=BEGUN, copy=True))),
    Refuse("trainer/0", 0, 1, 4, True),
    Ack("trainer/0", 0, 1, (9,)),
    Cancel("trainer/0", 0, 1, (9, 13)),
    Closed("trainer/0", 0, -1),
    Finished("trainer/0", 0),
    HandBack(REPORT, (9, 13), (PIECE, dataclasses.replace(PIECE, start=0, token_ids=b"", logprobs=b"", spans=()))),
    Again("trainer/0", 0, 1, (9,)),
]


def frames(payload: Iterable[Buffer]) -> list[memoryview]:
    return [memoryview(bytes(frame)) for frame in payload]


@pytest.mark.parametrize("message", MESSAGES, ids=kind_of)
def test_every_message_survives_msgpack(message: Message) -> None:
    body, payload = to_wire(message)
    assert from_wire(kind_of(message), msgpack.unpackb(msgpack.packb(body)), frames(payload)) == message


@pytest.mark.parametrize("message", [m for m in MESSAGES if to_wire(m).payload], ids=kind_of)
def test_a_payload_that_the_header_does_not_announce_is_refused(message: Message) -> None:
    body, (payload,) = to_wire(message)
    for wrong in ([], [payload[:-1]], [payload + b"x"], [payload, b""], [payload[:8], payload[8:]]):
        with pytest.raises(ProtocolError, match=f"of {len(payload)} bytes in one payload frame were announced, got"):
            from_wire(kind_of(message), body, frames(wrong))
    with pytest.raises(ProtocolError, match="a negative token id in the payload"):
        from_wire(kind_of(message), body, frames([b"\xff" * len(payload)]))


def test_a_number_of_tokens_that_nobody_can_hold_takes_no_memory() -> None:
    body = to_wire(MESSAGES[1]).body | {"pieces": [[9, 2, 0, 1 << 60, [0, 0, 0, 1 << 60], ""]]}
    with pytest.raises(ProtocolError, match=f"of {12 << 60} bytes in one payload frame were announced, got 12 bytes"):
        from_wire("progress", body, frames([b"x" * 12]))
    with pytest.raises(ProtocolError, match="of 0 bytes in one payload frame were announced, got 1 bytes"):
        from_wire("ack", to_wire(MESSAGES[7]).body, frames([b"x"]))


def test_every_kind_is_covered() -> None:
    assert {kind_of(message) for message in MESSAGES} == set(KINDS)


WRONG: list[tuple[int, str, Any, str]] = [
    (0, "groups", -1, r"ask, field groups: expected an integer ≥ 0, got -1"),
    (0, "park", 1, r"ask, field park: expected true or false, got 1"),
    (0, "ask", True, r"ask, field ask: expected an integer ≥ 0, got True"),
    (0, "report", ["rollout/0"], r"ask, field report: expected a list of 7 values \(worker, "),
    (0, "report", ["", 1, 0, 7, [], 3, -1], r"ask, field report\.worker: expected a worker's name"),
    (0, "report", ["w", 1, 0, 7, [-3], 3, -1], r"ask, field report\.held: expected a list of integers ≥ 0"),
    (0, "report", ["w", 1, 0, 7, [], 3, -2], r"ask, field report\.closed_seen: expected an integer ≥ −1, got -2"),
    (1, "running", [[9, 12, 3], [1, 2]], r"progress, field running\[1\]: expected a list of 3 values"),
    (2, "oldest", [1, 2, 3], r"result, field oldest: expected \[term, number\] or null"),
    (2, "oldest", None, r"result, field oldest: expected \[term, number\] unless dropped, got null"),
    (2, "dropped", 5, r"result, field dropped: expected text, got 5"),
    (5, "leases", {}, r"grant, field leases: expected a list, got \{\}"),
    (1, "pieces", [[9, 2, 1, b"abc", [], ""]], r"field pieces\[0\]\.tokens: expected an integer ≥ 0, got b'abc'"),
    (1, "pieces", [[9, 2, 1, -1, [], ""]], r"field pieces\[0\]\.tokens: expected an integer ≥ 0, got -1"),
    (1, "pieces", [[9, 2, 1, 1, [], ""]], r"pieces\[0\]\.spans: expected spans of tokens 1 … 2"),
    (1, "pieces", [[9, 2, 1, 1, [0, 0, 0, 2], ""]], "spans: expected spans of tokens 1 … 2"),
    (1, "pieces", [[9, 2, 1, 0, [0, 0, 0, 2, 0, 1, 3, 4], ""]], r"spans: expected spans .* that join up"),
    (1, "pieces", [[9, 2, 1, 0, [], "abort"]], r"finish_reason: expected stop, length or nothing, got 'abort'"),
    (7, "positions", [1.5], r"ack, field positions: expected a list of integers ≥ 0, got \[1\.5\]"),
]


@pytest.mark.parametrize("index, field, value, match", WRONG)
def test_a_wrong_value_is_named(index: int, field: str, value: Any, match: str) -> None:
    body = to_wire(MESSAGES[index]).body | {field: value}
    with pytest.raises(ProtocolError, match=match):
        from_wire(kind_of(MESSAGES[index]), body)


@pytest.mark.parametrize(
    "place, value, match",
    [
        (0, [0, 5], r"leases\[0\]\.uid: expected \[epoch, index, position\]"),
        (5, ["a"], r"leases\[0\]\.prompt_ids: expected an integer"),
        (10, "test", r"leases\[0\]\.kind: expected train or val, got 'test'"),
    ],
)
def test_a_wrong_value_inside_a_lease_is_named(place: int, value: Any, match: str) -> None:
    body = to_wire(MESSAGES[5]).body
    body["leases"][0][place] = value
    with pytest.raises(ProtocolError, match=match):
        from_wire("grant", body)


def test_missing_and_extra_fields_and_kinds_are_refused() -> None:
    with pytest.raises(
        ProtocolError, match=r"lease message bye: expected the fields worker, incarnation, got \['worker'\]"
    ):
        from_wire("bye", {"worker": "rollout/0"})
    with pytest.raises(ProtocolError, match="lease message bye: expected the fields worker, incarnation, got list"):
        from_wire("bye", [])
    with pytest.raises(ProtocolError, match="lease message kind 'steal': expected one of ask, progress"):
        from_wire("steal", {})


def test_long_values_are_shortened_in_errors() -> None:
    body = to_wire(MESSAGES[7]).body | {"positions": ["x"] * 1000}
    with pytest.raises(ProtocolError) as caught:
        from_wire("ack", body)
    assert len(str(caught.value)) < 200


PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers(-5, 2**40) | st.text(max_size=5) | st.binary(max_size=5) | st.floats(),
    lambda inner: st.lists(inner, max_size=11),
    max_leaves=20,
)


@settings(max_examples=200, derandomize=True, deadline=None)
@given(index=st.integers(0, len(MESSAGES) - 1), data=st.data())
def test_nonsense_is_refused_or_read_never_anything_else(index: int, data: st.DataObject) -> None:
    body, payload = to_wire(MESSAGES[index])
    body[data.draw(st.sampled_from(sorted(body)))] = data.draw(PLAIN)
    try:
        message = from_wire(kind_of(MESSAGES[index]), body, frames(payload))
    except ProtocolError:
        return
    assert to_wire(message).body.keys() == body.keys()
