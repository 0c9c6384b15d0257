"""Whatever a message holds, the worker or agent that takes it goes on: in bounded time, with bounded memory."""

from __future__ import annotations

import gc
import logging
import math
import random
import resource
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from distflow.comm.message import WIRE_FORMAT, decode, decode_all, encode
from distflow.errors import ProtocolError, ReplicaLost
from distflow.weights.swarm_messages import read_ask, read_indices, read_opening, read_peers
from tests.messages.corpus import FOLDER, Example, examples
from tests.messages.mutations import garbled, mutated
from tests.messages.receivers import (
    OVERRIDES,
    WITH_CRITIC,
    WITH_SOLVER,
    AgentReceiver,
    WorkerReceiver,
    no_processes,
    setting_of,
)

RECEIVERS = ("trainer/0", "rollout/0", "trainer/0 of critics", "critic/0", "solver_rollout/0", "agent/0")
"""Those of critics are of a run in which a critic is trained by workers of its own."""
AMONG_TRAINERS = ("agree", "agree.heard", "agree.missing", "store.ask", "store.answer")
"""What a worker of another home rightly refuses."""
SHORT, LONG = 5_000, 100_000
FRESH = 100
"""Messages after which a receiver is made anew: after some of them, it rightly does not listen to others."""
SLOW_S = 2.0
MORE_MIB = 256


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)


def _for_others(example: Example) -> bool:
    """Whether it is of a step, or a model, that those who generate with a further one know nothing of."""
    return example.kind == "weights" or (example.kind == "call.request" and example.body["step"] != "solve")


class Bench:
    """Hands mutated messages of the corpus to one kind of receiver."""

    def __init__(self, name: str, folder: Path) -> None:
        self._folder = folder
        overrides = WITH_CRITIC if "critic" in name else WITH_SOLVER if "solver" in name else OVERRIDES
        name = name.partition(" ")[0]
        self._setting = None if name.startswith("agent") else setting_of(name, folder, overrides)
        endpoint = "agent" if self._setting is None else "worker"
        known = [example for example in examples(endpoint) if example.sender != name]
        self.examples = [one for one in known if name != "critic/0" or one.kind not in AMONG_TRAINERS]
        if name == "solver_rollout/0":
            self.examples = [one for one in self.examples if not _for_others(one)]
        self.receiver = self.fresh()

    def fresh(self) -> WorkerReceiver | AgentReceiver:
        """One that has met its peers."""
        if self._setting is None:
            with no_processes():
                return AgentReceiver(self._folder)
        receiver = WorkerReceiver(self._setting)
        for example in self.examples:
            if example.kind == "hello":
                receiver.take(packed(example), ())
        return receiver

    def renew(self) -> None:
        self.receiver.close()
        self.receiver = self.fresh()
        gc.collect()


def packed(example: Example) -> bytes:
    return encode(example.kind, example.sender, example.incarnation, example.body, len(example.payload))


def wrong(example: Example, rng: random.Random) -> tuple[bytes, tuple[bytes, ...]]:
    """The example with something wrong in its body, its header, or its payload."""
    payload, what = list(example.payload), rng.random()
    if payload and rng.random() < 0.3:
        payload = [garbled(frame, rng) for frame in payload] * rng.choice((0, 1, 1, 1, 2))
    body = mutated(example.body, rng) if what < 0.75 else example.body
    fields = [WIRE_FORMAT, example.sender, example.incarnation, [[example.kind, body, len(payload)]]]
    if 0.75 <= what < 0.82:
        fields = mutated(fields, rng)
    header: bytes = msgpack.packb(fields)
    return garbled(header, rng) if what > 0.88 else header, tuple(payload)


def peak_mib() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def fuzz(name: str, folder: Path, count: int, seed: int) -> None:
    # Collections are a part of what a message takes, those of what other tests have left are not.
    gc.collect()
    gc.freeze()
    bench = Bench(name, folder)
    rng = random.Random(f"{seed}/{name}")
    before = peak_mib()
    refused = taken = 0
    unturned: list[Example] = []
    for number in range(count):
        if number % FRESH == FRESH - 1:
            refused, taken = refused + bench.receiver.refused, taken + bench.receiver.taken
            bench.renew()
            unturned.clear()
        example = rng.choice(bench.examples)
        unturned.append(example)
        header, payload = wrong(example, rng) if rng.random() < 0.9 else (packed(example), example.payload)
        began = time.thread_time()
        try:
            bench.receiver.take(header, payload)
            if number % 5 == 0:
                bench.receiver.turn()
                unturned.clear()
        except ReplicaLost:
            # Well formed, one said that another training worker came anew or, by the agent, that it is gone.
            assert any(one.sender.startswith("trainer/") or one.kind == "lost" for one in unturned)
            bench.renew()
            unturned.clear()
        except Exception as error:
            raise AssertionError(f"{name}, message {number} of seed {seed}: {header[:600]!r}") from error
        assert time.thread_time() - began < SLOW_S, f"{name}, message {number} of seed {seed}: {header[:600]!r}"
    assert peak_mib() - before < MORE_MIB
    # Both ways are gone often, or nothing would be shown.
    assert min(refused, taken) > count / 20, f"{refused} refused, {taken} taken"
    bench.receiver.close()


@pytest.mark.parametrize("name", RECEIVERS)
def test_no_message_ends_a_worker_or_an_agent(name: str, tmp_path: Path) -> None:
    fuzz(name, tmp_path, SHORT // len(RECEIVERS), seed=0)


@pytest.mark.long
@pytest.mark.parametrize("name", RECEIVERS)
def test_no_message_ends_a_worker_or_an_agent_many(name: str, tmp_path: Path) -> None:
    fuzz(name, tmp_path, LONG // len(RECEIVERS), seed=1)


@pytest.mark.parametrize("name", RECEIVERS)
def test_the_corpus_has_every_kind_and_every_example_is_taken(name: str, tmp_path: Path) -> None:
    bench = Bench(name, tmp_path)
    assert bench.receiver.kinds <= {path.stem for path in FOLDER.glob("*/*.json")}
    for example in bench.examples:
        if example.kind in bench.receiver.kinds and example.kind not in ("refused", "welcome"):
            with suppress(ReplicaLost):
                bench.receiver.take(packed(example), example.payload)
                if not bench.receiver.refused:
                    continue
            # After what came before it, it may be rightly refused: a new one takes it.
            bench.renew()
            bench.receiver.take(packed(example), example.payload)
            assert bench.receiver.refused == 0, f"{example.kind} of {example.sender} is refused"
    bench.receiver.close()


def test_every_file_of_the_corpus_is_of_a_kind_that_somebody_takes(tmp_path: Path) -> None:
    for folder, names in (("worker", RECEIVERS[:-1]), ("agent", RECEIVERS[-1:])):
        kinds = set[str]().union(*[Bench(name, tmp_path).receiver.kinds for name in names])
        assert {path.stem for path in (FOLDER / folder).glob("*.json")} == kinds


MISTYPED = {
    "a key of bytes": (
        "trainer/0",
        "hello",
        "rollout/0",
        lambda body: {**body, "parts": {b"flow": "1"}, "digest": "other"},
    ),
    "a flag for a batch": ("trainer/0", "results", "rollout/0", lambda body: {**body, "batch": True}),
    "a shape of nothing": ("trainer/0", "results", "rollout/0", lambda body: _with_shape(body, [0, 1 << 39, 1 << 39])),
    "a negative stage": ("trainer/0", "agree", "trainer/1", lambda body: {**body, "stage": -1}),
    "a flag for a number": ("trainer/0", "beat", "rollout/0", lambda body: {**body, "progress": True}),
    "a number for bytes": ("rollout/0", "weights", "trainer/0", lambda body: {**body, "digests": 1_000_000_000}),
    "a size without chunks": ("rollout/0", "weights", "trainer/1", lambda body: {**body, "size": 1 << 40}),
    "infinity for a number": ("agent/0", "scale", "client", lambda body: {**body, "count": math.inf}),
    "no address": ("rollout/0", "roster", "agent/0", lambda body: {"addresses": {"trainer/1": "junk"}}),
    "another's report": ("trainer/0", "ask", "rollout/1", lambda body: body),
}


def _with_shape(body: Any, shape: list[int]) -> Any:
    (name, dtype, _, offsets), *others = msgpack.unpackb(body["batch"]["columns"])
    columns = msgpack.packb([[name, dtype, shape, offsets], *others])
    return {**body, "batch": {**body["batch"], "columns": columns}}


@pytest.mark.parametrize("what", MISTYPED)
def test_a_message_with_one_mistyped_value_is_refused(what: str, tmp_path: Path) -> None:
    name, kind, sender, change = MISTYPED[what]
    bench = Bench(name, tmp_path)
    example = next(one for one in bench.examples if one.kind == kind and one.sender in (sender, "rollout/0"))
    before = peak_mib()
    bench.receiver.take(packed(replace(example, sender=sender, body=change(example.body))), example.payload)
    bench.receiver.turn()
    assert (bench.receiver.refused, peak_mib() - before < MORE_MIB) == (1, True)
    bench.receiver.close()


@given(data=st.binary(max_size=60))
def test_any_bytes_are_a_message_or_refused(data: bytes) -> None:
    for read in (decode, decode_all, read_ask, read_opening, read_peers, read_indices):
        try:
            read(data)
        except ProtocolError:
            continue
