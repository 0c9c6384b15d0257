from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import msgpack
import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import structs

from distflow.comm.message import Buffer
from distflow.errors import ProtocolError
from distflow.exchange import lease_wire
from distflow.exchange.lease_wire import INLINE_BYTES, KINDS, from_wire, kind_of, to_wire
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
    BegunSample(4, OUTPUT.token_ids, OUTPUT.logprobs, OUTPUT.spans, "", (-0.25, -1.0, -2.0)),
    BegunSample(4, OUTPUT.token_ids, OUTPUT.logprobs, OUTPUT.spans, "length", call=(2, 0, 1), digest=(1 << 62) - 1),
    BegunSample(4, (), (), (), "stop", call=(2, 1), digest=3, answer=bytes(range(99))),
)
FILTERED = cut(replace(OUTPUT, filtered_logprobs=(-0.25, -1.0, -2.0), call=(1, 0), digest=1 << 61), 0, 2)
ANSWER = cut(SampleOutput(9, 2, (), (), (), "stop", call=(3,), digest=5, answer=b"told"), 0, 2)
MESSAGES: list[Message] = [
    Ask(REPORT, 4, 9, True, True),
    Progress(REPORT, (Running(9, 12, 3), Running(13, 0, -1)), (PIECE, ANSWER, FILTERED)),
    Result("rollout/0", 1, 0, 9, 1, 1024, Version(0, 3), "", 2, (), 57),
    Result("rollout/0", 1, 0, 9, 1, 0, None, "equal rewards", 0, (1.0, 0.5), 12),
    Bye("rollout/0", 1),
    Grant("trainer/0", 0, 1, 3, 4, (LEASE, structs.replace(LEASE, kind="val", begun=BEGUN, copy=True))),
    Refuse("trainer/0", 0, 1, 4, True),
    Ack("trainer/0", 0, 1, (9,)),
    Cancel("trainer/0", 0, 1, (9, 13)),
    Closed("trainer/0", 0, -1),
    Finished("trainer/0", 0),
    HandBack(REPORT, (9, 13), (PIECE, structs.replace(PIECE, start=0, token_ids=b"", logprobs=b"", spans=()))),
    Again("trainer/0", 0, 1, (9,)),
]


def plain(message: Message) -> tuple[dict[str, Any], tuple[Buffer, ...]]:
    """As it arrives: body and payload."""
    body, payload = to_wire(message)
    return msgpack.unpackb(msgspec.msgpack.encode(body)), payload


def frames(payload: Iterable[Buffer]) -> list[memoryview]:
    return [memoryview(bytes(frame)) for frame in payload]


@pytest.mark.parametrize("message", MESSAGES, ids=kind_of)
def test_every_message_survives_msgpack(message: Message) -> None:
    body, payload = plain(message)
    assert not payload, "a few tokens lie in the head"
    assert from_wire(kind_of(message), body) == message
    sent = to_wire(message)
    assert from_wire(kind_of(message), sent.body, frames(sent.payload)) == message, "to oneself: as it is"


def test_many_tokens_lie_beside_the_head() -> None:
    for count in (INLINE_BYTES // 4, INLINE_BYTES // 4 + 1):
        grant = Grant("trainer/0", 0, 1, 3, 4, (structs.replace(LEASE, prompt_ids=tuple(range(count))),))
        body, payload = plain(grant)
        assert len(payload) == (4 * count > INLINE_BYTES)
        assert from_wire("grant", body, frames(payload)) == grant


@pytest.mark.parametrize("message", [m for m in MESSAGES if "bulk" in plain(m)[0]], ids=kind_of)
def test_a_payload_that_the_header_does_not_announce_is_refused(
    message: Message, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lease_wire, "INLINE_BYTES", -1)
    body, (payload,) = plain(message)
    payload = bytes(payload)
    said = f"of {len(payload)} bytes in one place were announced, got"
    for wrong in ([], [payload[:-1]], [payload + b"x"], [payload, b""], [payload[:8], payload[8:]]):
        with pytest.raises(ProtocolError, match=said):
            from_wire(kind_of(message), body, frames(wrong))
    for inside, beside in ((payload[:8], [payload[8:]]), (payload, [b""]), (payload[1:], [])):
        with pytest.raises(ProtocolError, match=said):
            from_wire(kind_of(message), body | {"bulk": inside}, frames(beside))
    with pytest.raises(ProtocolError, match="a negative token id in the payload"):
        from_wire(kind_of(message), body, frames([b"\xff" * len(payload)]))


def test_a_number_of_tokens_that_nobody_can_hold_takes_no_memory() -> None:
    body = plain(MESSAGES[1])[0] | {"pieces": [[9, 2, 0, 1 << 60, [0, 0, 0, 1 << 60], ""]], "bulk": b""}
    with pytest.raises(ProtocolError, match=f"of {12 << 60} bytes in one place were announced, got 12 bytes"):
        from_wire("progress", body, frames([b"x" * 12]))
    with pytest.raises(ProtocolError, match="of 0 bytes in one place were announced, got 1 bytes"):
        from_wire("ack", plain(MESSAGES[7])[0], frames([b"x"]))


def test_every_kind_is_covered() -> None:
    assert {kind_of(message) for message in MESSAGES} == set(KINDS)


WRONG: list[tuple[int, str, Any, str]] = [
    (0, "groups", -1, r"malformed lease message ask: Expected `int` >= 0 - at `\$\.groups`"),
    (0, "groups", 1 << 62, r"ask: Expected `int` <= \d+ - at `\$\.groups`"),
    (0, "park", 1, r"ask: Expected `bool`, got `int` - at `\$\.park`"),
    (0, "ask", True, r"ask: Expected `int`, got `bool` - at `\$\.ask`"),
    (0, "report", ["rollout/0"], r"ask: Expected `array` of at least length 7, got 1 - at `\$\.report`"),
    (0, "report", ["w", 1, 0, 7, [], 3, -1, 0], r"ask: Expected `array` of at most length 7, got 8 - at `\$\.report`"),
    (0, "report", ["", 1, 0, 7, [], 3, -1], r"ask: Expected `str` of length >= 1 - at `\$\.report\[0\]`"),
    (0, "report", ["w" * 257, 1, 0, 7, [], 3, -1], r"ask: Expected `str` of length <= 256 - at `\$\.report\[0\]`"),
    (0, "report", ["w", 1, 0, 7, [-3], 3, -1], r"ask: Expected `int` >= 0 - at `\$\.report\[4\]\[0\]`"),
    (0, "report", ["w", 1, 0, 7, [], 3, -2], r"ask: Expected `int` >= -1 - at `\$\.report\[6\]`"),
    (
        1,
        "running",
        [[9, 12, 3], [1, 2]],
        r"Expected `array` of at least length 3, got 2 - at `\$\.running\[1\]`",
    ),
    (2, "oldest", [1, 2, 3], r"result: Expected `array` of length 2, got 3 - at `\$\.oldest`"),
    (2, "oldest", [1, -2], r"result: expected two integers >= 0 for oldest, got Version\(term=1, number=-2\)"),
    (2, "oldest", None, r"result: expected \[term, number\] for oldest, unless dropped: got null"),
    (2, "dropped", 5, r"result: Expected `str`, got `int` - at `\$\.dropped`"),
    (5, "leases", {}, r"grant: Expected `array`, got `object` - at `\$\.leases`"),
    (1, "pieces", [[9, 2, 1, b"abc", [], ""]], r"progress: Expected `int`, got `bytes` - at `\$\.pieces\[0\]\[3\]`"),
    (1, "pieces", [[9, 2, 1, -1, [], ""]], r"progress: Expected `int` >= 0 - at `\$\.pieces\[0\]\[3\]`"),
    (
        1,
        "pieces",
        [[9, 2, 1, 1, [], ""]],
        r"join up and cover tokens 1 … 2, got \(\) - at `\$\.pieces\[0\]`",
    ),
    (1, "pieces", [[9, 2, 1, 1, [0, 0, 0, 2], ""]], r"cover tokens 1 … 2, got \(0, 0, 0, 2\) - at"),
    (1, "pieces", [[9, 2, 1, 1, [0, 0, 1, 2, 0], ""]], r"cover tokens 1 … 2, got \(0, 0, 1, 2, 0\) - at"),
    (1, "pieces", [[9, 2, 0, 4, [0, 0, 0, 2, 0, 1, 3, 4], ""]], r"spans .* that join up and cover tokens 0 … 4"),
    (1, "pieces", [[9, 2, 0, 2, [0, 0, 0, 0, 0, 1, 0, 2], ""]], r"spans .* that join up and cover tokens 0 … 2"),
    (1, "pieces", [[9, 2, 1, 0, [], "abort"]], r"progress: Expected `str` matching regex .* at `\$\.pieces\[0\]\[5\]`"),
    (7, "positions", [1.5], r"ack: Expected `int`, got `float` - at `\$\.positions\[0\]`"),
]


@pytest.mark.parametrize("index, field, value, match", WRONG)
def test_a_wrong_value_is_named(index: int, field: str, value: Any, match: str) -> None:
    body = plain(MESSAGES[index])[0] | {field: value}
    with pytest.raises(ProtocolError, match=match):
        from_wire(kind_of(MESSAGES[index]), body)


@pytest.mark.parametrize(
    "place, value, match",
    [
        (0, [0, 5], r"Expected `array` of length 3, got 2 - at `\$\.leases\[0\]\[0\]`"),
        (5, ["a"], r"Expected `int`, got `array` - at `\$\.leases\[0\]\[5\]`"),
        (10, "test", r"Invalid enum value 'test' - at `\$\.leases\[0\]\[10\]`"),
    ],
)
def test_a_wrong_value_inside_a_lease_is_named(place: int, value: Any, match: str) -> None:
    body, _ = plain(MESSAGES[5])
    body["leases"][0][place] = value
    with pytest.raises(ProtocolError, match=match):
        from_wire("grant", body)


def test_missing_and_extra_fields_and_kinds_are_refused() -> None:
    for message in MESSAGES:
        body, kind = plain(message)[0], kind_of(message)
        for name in body:
            with pytest.raises(ProtocolError, match=f"lease message {kind}: Object missing required field `{name}`"):
                from_wire(kind, {key: value for key, value in body.items() if key != name})
        with pytest.raises(ProtocolError, match=f"lease message {kind}: Object contains unknown field `other`"):
            from_wire(kind, {**body, "other": 1})
    with pytest.raises(ProtocolError, match="lease message bye: Expected `object`, got `array`"):
        from_wire("bye", [])
    with pytest.raises(ProtocolError, match="lease message kind 'steal': expected one of ask, progress"):
        from_wire("steal", {})


def test_long_values_are_shortened_in_errors() -> None:
    ack, grant = plain(MESSAGES[7])[0], plain(MESSAGES[5])[0]
    grant["leases"][0][10] = "x" * 10_000
    for kind, body in (("ack", ack | {"positions": ["x"] * 1000}), ("ack", ack | {"x" * 10_000: 1}), ("grant", grant)):
        with pytest.raises(ProtocolError) as caught:
            from_wire(kind, body)
        assert len(str(caught.value)) < 400


PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers(-5, 2**40) | st.text(max_size=5) | st.binary(max_size=5) | st.floats(),
    lambda inner: st.lists(inner, max_size=11),
    max_leaves=20,
)


@settings(max_examples=200, derandomize=True)
@given(index=st.integers(0, len(MESSAGES) - 1), data=st.data())
def test_nonsense_is_refused_or_read_never_anything_else(index: int, data: st.DataObject) -> None:
    body, payload = plain(MESSAGES[index])
    body[data.draw(st.sampled_from(sorted(body)))] = data.draw(PLAIN)
    try:
        message = from_wire(kind_of(MESSAGES[index]), body, frames(payload))
    except ProtocolError:
        return
    assert plain(message)[0].keys() == body.keys()
