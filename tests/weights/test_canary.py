"""The canary of a version: an engine that computes something else than the trainer is found, whatever the bytes say."""

from __future__ import annotations

import math
import threading
from collections.abc import Sequence
from typing import Any

import msgpack
import pytest
import torch
from msgspec import structs

from distflow.errors import ProtocolError, WorkerFailed
from distflow.types import Version
from distflow.weights.canary import TOKENS, Canary, Scoring, ScoringLater, canary_rows
from distflow.weights.in_place import InPlace
from distflow.weights.manifest import FP8, Manifest, TensorEntry
from distflow.weights.prefetch import Stage
from distflow.weights.receiver import WeightInbox
from distflow.weights.transport import InprocLink
from tests.polling import WAIT_S, eventually
from tests.weights.test_prefetch import SlowReader

PLACE = "/dev/shm/distflow-run-policy-t0-0"
ROWS = canary_rows(13, 20)
CANARY = Canary(ROWS, tuple((-1.5,) * 18 for _ in ROWS), "float32")


class ScoringEngine:
    """Its log-probs are off by what `wrong` says of its loads, in turn."""

    precision = "float32"

    def __init__(self, *wrong: float) -> None:
        self.wrong = list(wrong)
        self.loads = 0
        self.begun: list[tuple[Version | None, Version]] = []
        """Updates: from which version to which."""
        self.version: Version | None = None
        self._coming: Version | None = None

    def begin_update(self, version: Version) -> None:
        self.begun.append((self.version, version))
        self.version, self._coming = None, version

    def update(self, tensors: Any) -> None:
        self.loads += 1

    def end_update(self) -> None:
        self.version = self._coming

    def logprobs(self, rows: Sequence[Sequence[int]]) -> list[list[float]]:
        off = self.wrong[self.loads - 1]
        return [[-1.5 + off * (-1) ** place for place in range(len(row) - 1)] for row in rows]


def announced(number: int, canary: Canary | None = CANARY) -> Manifest:
    return structs.replace(Manifest("policy", Version(0, number), PLACE, 0, (), ()), canary=canary)


def inbox_with(number: int = 0) -> tuple[WeightInbox, InprocLink]:
    link = InprocLink("policy")
    inbox = WeightInbox(InPlace(link))
    inbox.announce(structs.replace(link.publish(Version(0, number), [("w", torch.ones(1))]), canary=CANARY))
    return inbox, link


@pytest.mark.parametrize(("vocabulary", "longest"), [(13, 20), (2, 2), (151936, 40000), (7, 65)])
def test_enough_tokens_that_every_engine_has_room_for(vocabulary: int, longest: int) -> None:
    rows = canary_rows(vocabulary, longest)
    assert TOKENS <= sum(len(row) - 1 for row in rows) < TOKENS + longest
    assert {len(row) for row in rows} == {max(2, min(longest - 1, 65))}
    assert all(0 <= token < vocabulary for row in rows for token in row)
    assert rows == canary_rows(vocabulary, longest), "the same with every version"


def test_it_travels_in_the_announcement() -> None:
    body = msgpack.unpackb(msgpack.packb(announced(3).to_wire()))
    assert Manifest.from_wire(body).canary == CANARY
    assert Manifest.from_wire(announced(3, None).to_wire()).canary is None


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda rows, logprobs, kind: [rows, logprobs[:-1], kind], "without a log-prob for every token"),
        (lambda rows, logprobs, kind: [[], [], kind], "without a log-prob for every token"),
        (lambda rows, logprobs, kind: [[[*rows[0][1:], -1]], logprobs[:1], kind], "Expected `int` >= 0"),
        (lambda rows, logprobs, kind: [[[True] * 2], [[-1.0]], kind], "Expected `int`, got `bool`"),
        (lambda rows, logprobs, kind: [rows, [["x"] * 18 for _ in rows], kind], "Expected `float`, got `str`"),
        (lambda rows, logprobs, kind: [rows, logprobs, "int3"], "unknown precision 'int3'"),
        (lambda rows, logprobs, kind: [[[1]] * 5000, [[]] * 5000, kind], "Expected `array` of length <= 4096"),
        (lambda rows, logprobs, kind: [[[1] * 4000] * 2, [[-1.0] * 3999] * 2, kind], "more than 4096 tokens"),
        (lambda rows, logprobs, kind: [rows, logprobs, kind, 0], "Expected `array` of at most length 3"),
        (lambda rows, logprobs, kind: 7, "Expected `array | null`, got `int`"),
    ],
)
def test_a_malformed_one_is_refused(change: Any, message: str) -> None:
    body = announced(3).to_wire()
    canary = change(*body["canary"])
    with pytest.raises(ProtocolError, match=f"malformed weights announcement: .*{message}.*canary"):
        Manifest.from_wire({**body, "canary": canary})


def test_an_engine_that_agrees_has_the_version() -> None:
    inbox, _ = inbox_with(4)
    engine = ScoringEngine(1e-4)
    assert isinstance(engine, Scoring)
    inbox.load(engine)
    assert inbox.loaded == engine.version == Version(0, 4)
    assert inbox.difference == pytest.approx(1e-4)


def test_weights_that_an_engine_reads_wrongly_are_fetched_once_more() -> None:
    inbox, _ = inbox_with()
    engine = ScoringEngine(0.5, 0.0)
    inbox.load(engine)
    assert engine.loads == 2
    assert (Version(0, 0), Version(0, 0)) in engine.begun, "begun again while in use: an engine gives up what it drew"
    assert inbox.loaded == Version(0, 0)
    assert inbox.difference == 0.0


@pytest.mark.parametrize("wrong", [0.003, 7.0, math.nan, math.inf])
def test_an_engine_that_computes_something_else_stops_the_run(wrong: float) -> None:
    inbox, _ = inbox_with()
    engine = ScoringEngine(wrong, wrong)
    message = r"log-probs of 72 fixed tokens differ .* expected at most 0\.002 between float32 and float32, even after"
    with pytest.raises(WorkerFailed, match=message):
        inbox.load(engine)
    assert engine.loads == 2
    assert inbox.loaded is None


def test_the_coarser_type_says_how_much_may_differ() -> None:
    inbox, _ = inbox_with()
    engine = ScoringEngine(0.1)
    engine.precision = "bfloat16"
    inbox.load(engine)
    assert inbox.loaded == Version(0, 0)
    assert [CANARY.tolerance(kind) for kind in ("float64", "float16", "fp8")] == [2e-3, 0.1, 1.0]


@pytest.mark.parametrize(
    ("dtype", "may_differ", "rounded"),
    [
        ("torch.float32", 2e-3, ""),
        ("torch.bfloat16", 0.5, ", with weights in bfloat16"),
        (FP8, 1.0, ", with weights in fp8"),
    ],
)
def test_weights_that_were_rounded_on_their_way_may_differ_by_more(dtype: str, may_differ: float, rounded: str) -> None:
    entries = (TensorEntry("w", dtype, (1,), 0, 4), TensorEntry("v", "torch.float32", (1,), 4, 4))
    for off, agrees in ((0.9 * may_differ, True), (1.1 * may_differ, False)):
        (inbox, link), engine = inbox_with(), ScoringEngine(off, off)
        near = link.publish(Version(0, 1), [("w", torch.ones(1))])
        inbox.announce(structs.replace(near, canary=CANARY, entries=entries))
        if agrees:
            inbox.load(engine)
            assert inbox.loaded == Version(0, 1)
        else:
            with pytest.raises(WorkerFailed, match=rf"between float32 and float32{rounded}, even after"):
                inbox.load(engine)


def test_staged_weights_come_over_the_network_once_more() -> None:
    """Meanwhile the engine is torn: it generates nothing with those that are wrong."""
    reader, ready = SlowReader(), threading.Event()
    inbox, engine = WeightInbox(Stage(reader, ready.set)), ScoringEngine(0.5, 0.5)
    inbox.announce(announced(1))
    reader.may_end.release()
    assert ready.wait(WAIT_S)
    ready.clear()
    inbox.load(engine)
    assert (inbox.loaded, engine.version) == (None, None)
    reader.may_end.release()
    assert ready.wait(WAIT_S)
    with pytest.raises(WorkerFailed, match="even after the weights were fetched again"):
        inbox.load(engine)
    assert reader.begun == [1, 1]
    inbox.close()


def test_a_version_that_came_meanwhile_is_the_second_try() -> None:
    reader, ready = SlowReader(), threading.Event()
    inbox, engine = WeightInbox(Stage(reader, ready.set)), ScoringEngine(0.5, 0.0)
    inbox.announce(announced(1))
    reader.may_end.release()
    assert ready.wait(WAIT_S)
    ready.clear()
    inbox.announce(announced(2))
    inbox.load(engine)
    reader.may_end.release()
    assert ready.wait(WAIT_S)
    inbox.load(engine)
    assert inbox.loaded == Version(0, 2)
    assert reader.begun == [1, 2]
    inbox.close()


def test_a_version_whose_fetch_has_begun_is_the_second_try_too() -> None:
    """What is wrong is not fetched behind it, or the engine would go back to it."""
    reader, ready = SlowReader(), threading.Event()
    stage = Stage(reader, ready.set)
    wrong, newer = announced(1), announced(2)
    stage.offer(wrong)
    reader.may_end.release()
    assert ready.wait(WAIT_S)
    stage.take()
    stage.offer(newer)
    stage.release()
    eventually(lambda: reader.begun == [1, 2], "the fetch of the newer one")
    ready.clear()
    stage.again(wrong)
    reader.may_end.release()
    assert ready.wait(WAIT_S)
    taken = stage.take()
    assert taken is not None
    assert taken[0] is newer
    ready.clear()
    stage.release()
    reader.may_end.release()
    assert not ready.wait(0.2), "nothing comes behind the newer one"
    stage.close()


def test_an_engine_without_room_for_it_goes_on() -> None:
    class Full(ScoringEngine):
        def logprobs(self, rows: Any) -> Any:
            return None

    inbox, _ = inbox_with()
    inbox.load(Full())
    assert inbox.loaded == Version(0, 0)
    assert inbox.difference is None


class FullEngine(ScoringEngine):
    """Has room for the canary when a test says so; `answers`: False if it never has."""

    def __init__(self, *wrong: float) -> None:
        super().__init__(*wrong)
        self.scoring, self.answers = False, True

    def logprobs(self, rows: Sequence[Sequence[int]]) -> list[list[float]]:
        self.scoring = True
        return None  # type: ignore[return-value]

    def late_logprobs(self) -> list[list[float]] | None:
        return super().logprobs(ROWS) if self.answers else None


def test_a_full_engine_is_judged_when_it_has_had_room() -> None:
    inbox, _ = inbox_with()
    engine = FullEngine(1e-4)
    assert isinstance(engine, ScoringLater)
    inbox.load(engine)
    assert inbox.loaded == Version(0, 0), "it generates meanwhile"
    assert not inbox.judge(engine)
    assert inbox.difference is None
    engine.scoring = False
    assert inbox.judge(engine)
    assert inbox.difference == pytest.approx(1e-4)
    assert not inbox.judge(engine), "once"
    assert inbox.skipped == 0


def test_what_a_full_engine_computed_wrongly_is_fetched_once_more_and_then_ends_the_run() -> None:
    inbox, _ = inbox_with()
    engine = FullEngine(0.5, 0.5)
    for _ in range(2):
        assert inbox.waiting
        inbox.load(engine)
        assert inbox.loaded == Version(0, 0)
        engine.scoring = False
        if engine.loads == 2:
            with pytest.raises(WorkerFailed, match="even after the weights were fetched again"):
                inbox.judge(engine)
        else:
            assert inbox.judge(engine)
            assert (inbox.loaded, engine.version) == (None, None), "nothing is drawn from it"
    assert engine.loads == 2


@pytest.mark.parametrize("why", ["no room for long", "a newer version"])
def test_versions_that_are_never_compared_are_counted(why: str) -> None:
    inbox, link = inbox_with()
    engine = FullEngine(0.5, 0.5)
    inbox.load(engine)
    if why == "a newer version":
        inbox.announce(structs.replace(link.publish(Version(0, 1), [("w", torch.ones(1))]), canary=CANARY))
        inbox.load(engine)
    else:
        engine.scoring = engine.answers = False
        assert not inbox.judge(engine)
    assert inbox.skipped == 1
    assert inbox.loaded is not None
