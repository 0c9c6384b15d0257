"""The messages of calls: as they are documented, as they travel, and what is wrong with them."""

from __future__ import annotations

import random
from typing import Any

import msgpack
import pytest

from distflow.data.batch_wire import decode_batch
from distflow.errors import ProtocolError
from distflow.exchange.call_client import Call, CallClient
from distflow.exchange.call_messages import KINDS, CallRequest, CallWithdrawn, from_wire, kind_of, to_wire
from distflow.exchange.call_server import CallServer
from distflow.types import Version
from tests.messages.corpus import FOLDER, Example, examples
from tests.messages.mutations import mutated

CORPUS = tuple(examples("calls"))
MUTATED = 3_000


def test_the_corpus_has_every_kind() -> None:
    assert {path.stem for path in (FOLDER / "calls").glob("*.json")} == set(KINDS)


@pytest.mark.parametrize("example", CORPUS, ids=lambda example: example.kind)
def test_examples_are_read_and_written_as_they_travel(example: Example) -> None:
    message = from_wire(example.kind, example.body)
    assert kind_of(message) == example.kind
    assert msgpack.unpackb(msgpack.packb(to_wire(message))) == example.body
    for frame in example.payload:
        assert decode_batch(example.body["batch"], memoryview(frame)).rows == 2


WRONG = [
    ("call.request", {"step": ""}, r"malformed call\.request: .*length >= 1 - at `\$\.step`"),
    ("call.request", {"number": -1}, r"malformed call\.request: .*>= 0 - at `\$\.number`"),
    ("call.request", {"version": [0, -1]}, r"expected two integers >= 0 for version"),
    ("call.request", {"priority": 1}, r"unknown field `priority`"),
    ("call.answer", {"number": True}, r"malformed call\.answer: .*got `bool` - at `\$\.number`"),
    ("call.not_yet", {"numbers": [1, "2"]}, r"malformed call\.not_yet: .*at `\$\.numbers\[1\]`"),
    ("call.not_yet", {"has": [1 << 62, 0]}, r"expected two integers >= 0 for has"),
    ("call.returned", {"load": None}, r"malformed call\.returned: .*at `\$\.load`"),
]


@pytest.mark.parametrize(("kind", "change", "message"), WRONG)
def test_what_does_not_fit_is_refused_by_name(kind: str, change: dict[str, Any], message: str) -> None:
    body = next(example.body for example in CORPUS if example.kind == kind)
    with pytest.raises(ProtocolError, match=message):
        from_wire(kind, {**body, **change})


def test_whatever_a_message_holds_the_cores_go_on() -> None:
    rng = random.Random(0)
    client, server = CallClient(2, {"reward": "reward", "values": "critic"}, 1 << 20, rng), CallServer()
    for name in ("reward/0", "critic/1"):
        client.server(name, 1, present=True, load=0, now=0.0)
    server.version(Version(0, 7))
    refused = 0
    for number in range(MUTATED):
        step, need = ("values", Version(0, 7)) if number % 2 else ("reward", None)
        client.ask(Call(step, number, number // 100, need, 1000, 10), number / 10)
        example = rng.choice(CORPUS)
        body = {**example.body, **({"number": number} if "number" in example.body else {"numbers": [number, number]})}
        try:
            message = from_wire(example.kind, mutated(body, rng))
        except ProtocolError:
            refused += 1
            continue
        if isinstance(message, CallRequest):
            server.handle(example.sender, example.incarnation, message)
            server.done(server.next(100), 0.1)
        elif isinstance(message, CallWithdrawn):
            server.withdrawn(example.sender, example.incarnation, message.numbers)
        else:
            client.handle(example.sender, 1, message, number / 10)
            client.tick(number / 10)
    assert MUTATED / 20 < refused < 19 * MUTATED / 20
    assert client.take_answered()
