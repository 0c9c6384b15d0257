"""The trace as it is written: spans, flows, counters; bounded in the queue and on the disk."""

import json
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from distflow.runtime.disk import Disk
from distflow.runtime.metrics import MetricStore
from distflow.runtime.steps import StepContext
from distflow.runtime.trace_writer import Tracer

ABOUT = {"worker": "rollout/0", "host": 1, "pid": 7, "incarnation": 0, "term": 2}


def written(path: Path) -> list[Any]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "trace" / "rollout-0.jsonl"


def test_whatever_is_timed_is_a_span_on_its_thread(path: Path) -> None:
    tracer = Tracer(path, ABOUT, Disk(), file_bytes=1 << 25)
    store = MetricStore(tracer)

    def elsewhere() -> None:
        with store.timed("timing_s/wait_leases"):
            pass

    before = time.time_ns() // 1000
    with store.timed("timing_s/reward", "score"):
        thread = threading.Thread(target=elsewhere, name="helper")
        thread.start()
        thread.join()
    seconds = store.drain()["timing_s/reward"]
    tracer.close()
    header, *lines = written(path)
    assert header == {"format": 1, **ABOUT, "began_us": header["began_us"]}
    assert abs(header["began_us"] - before) < 60e6
    assert lines[0] == ["T", 1, "helper"]
    assert lines[1][:4] == ["X", "wait_leases", "wait", 1]
    assert lines[2] == ["T", 2, threading.current_thread().name]
    kind, name, category, row, begin, duration = lines[3]
    assert (kind, name, category, row) == ("X", "reward", "score", 2)
    assert duration == pytest.approx(seconds * 1e6, abs=1)
    assert begin <= lines[1][4] <= lines[1][4] + lines[1][5] <= begin + duration


def test_a_users_span_flows_and_counters(path: Path) -> None:
    tracer = Tracer(path, ABOUT, Disk(), file_bytes=1 << 25)
    context = StepContext("mine", metrics=MetricStore(tracer))
    with suppress(OSError), context.span("parse ü"):
        tracer.depart("group", ["3", "4"])
        tracer.arrive("weights", ["policy:0:1"])
        tracer.arrive("group", ["3"], ["rollout/1"])
        raise OSError
    context.metrics.mean("staleness/mean", 0.5)
    assert context.metrics.drain().keys() == {"staleness/mean", "staleness/mean.weight"}, "a span is no metric"
    tracer.close()
    lines = [[*line[:3], *line[4:]] if line[0] in "sf" else line for line in written(path)[2:]]
    assert lines[:3] == [
        ["s", "group", 1, ["3", "4"]],
        ["f", "weights", 1, ["policy:0:1"], []],
        ["f", "group", 1, ["3"], ["rollout/1"]],
    ]
    assert lines[3][:4] == ["X", "parse ü", "user", 1]
    assert (lines[4][:2], lines[4][3]) == (["C", "staleness/mean"], 0.5)


def test_a_full_queue_drops_counts_and_does_not_block(path: Path) -> None:
    tracer = Tracer(path, ABOUT, Disk(), file_bytes=1 << 25, queue_limit=10)
    many = 100_000
    for number in range(many):
        tracer.count("n", number)
    tracer.close()
    *_, last = lines = written(path)
    kept = sum(line[0] == "C" for line in lines[1:])
    assert last[0] == "D"
    assert last[2] == tracer.dropped > 0
    assert kept + tracer.dropped == many


def test_a_file_that_is_full_becomes_the_one_before(path: Path) -> None:
    tracer = Tracer(path, ABOUT, Disk(), file_bytes=60_000)
    for number in range(3000):
        tracer.span("step", "runtime", number, number + 1)
    tracer.close()
    before = path.with_suffix(".before.jsonl")
    assert {file.name for file in path.parent.iterdir()} == {path.name, before.name}
    for file in (path, before):
        assert file.stat().st_size < 120_000
        assert written(file)[0]["worker"] == "rollout/0"
        assert written(file)[1][0] == "T", "each file names the threads"
    assert written(path)[-1][4] > written(before)[-1][4]


def test_another_life_is_appended_with_a_header_of_its_own(path: Path) -> None:
    for incarnation in (0, 1):
        tracer = Tracer(path, {**ABOUT, "incarnation": incarnation}, Disk(), file_bytes=1 << 25)
        tracer.count("n", incarnation)
        tracer.close()
    lines = written(path)
    assert [line["incarnation"] for line in lines if isinstance(line, dict)] == [0, 1]
    assert [line[3] for line in lines if isinstance(line, list)] == [0, 1]
