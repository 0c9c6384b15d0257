"""A disk that is full costs records, which are counted, and nothing else; when there is room again they go on."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from distflow.data.batch import Batch, Ragged
from distflow.runtime.disk import REFUSED, Disk
from distflow.runtime.dumps import PENDING_STEPS, DumpWriter
from distflow.runtime.metrics import MetricStore, MetricWriter
from distflow.runtime.trace_writer import Tracer
from distflow.types import WorkerName
from tests.disks import SmallDisk
from tests.polling import eventually

ABOUT = {"worker": "trainer/0", "host": 0, "pid": 1, "incarnation": 0, "term": 0}


@pytest.fixture
def counts() -> Counter[str]:
    return Counter()


@pytest.fixture
def disk(counts: Counter[str]) -> Disk:
    def count(name: str, value: float) -> None:
        counts[name] += int(value)

    return Disk(count)


def samples(characters: int) -> list[tuple[Batch, list[str]]]:
    text = Ragged.from_texts(["x" * characters])
    columns = {"uid": torch.tensor([[0, 7, 5]]), "sample": torch.arange(1), "finish_reason": torch.arange(1)}
    texts = {"prompt_text": text, "response_text": text}
    rows = {"response_ids": Ragged.from_rows([[3]], torch.int64)}
    rows["policy_versions"] = Ragged(torch.tensor([[0, 1]]), torch.arange(2))
    return [(Batch({**columns, **texts, **rows}), ["rollout/0"])]


def lines(path: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_metrics_lose_whole_lines_and_say_how_many(small_disk: SmallDisk, caplog: pytest.LogCaptureFixture) -> None:
    store = MetricStore()
    writer = MetricWriter(small_disk.folder, "trainer-0", Disk(store.add))
    writer.write(1, 0, store.drain())
    small_disk.fill()
    for step in range(2, 2000):
        writer.write(step, 0, store.drain())
    small_disk.free()
    writer.write(2000, 0, store.drain())
    writer.close()
    *_, last = written = lines(small_disk.folder / "metrics/trainer-0.jsonl")
    assert last["step"] == 2000
    assert last["disk/dropped_metrics"] == 2000 - len(written)
    assert last["disk/dropped_metrics"] > 1500
    assert last["disk/refused.summed"] == 1.0
    assert [record.message.split(":")[0] for record in caplog.records] == [
        "could not write metrics, training continues",
        "writing metrics works again; dropped meanwhile",
    ], "told once each"


def test_dumps_wait_for_room_and_beyond_what_can_be_kept_the_oldest_are_dropped(
    small_disk: SmallDisk, disk: Disk, counts: Counter[str]
) -> None:
    writer = DumpWriter(small_disk.folder, WorkerName.parse("trainer/0"), disk, 1 << 30)
    small_disk.fill()
    for step in range(1, PENDING_STEPS + 11):
        writer.write(step, 0, samples(100))
    with pytest.raises(OSError, match="No space left"):
        writer.flush()
    assert counts["disk/dropped_dumps"] == 10
    assert counts[REFUSED] >= PENDING_STEPS
    small_disk.free()
    writer.flush()
    writer.close()
    found = sorted(int(path.parent.name[5:]) for path in small_disk.folder.glob("rollouts/*/*"))
    assert found == list(range(11, PENDING_STEPS + 11))
    assert counts["disk/dropped_dumps"] == 10


def test_dumps_that_nobody_can_write_do_not_hold_up_the_end(
    small_disk: SmallDisk, disk: Disk, counts: Counter[str]
) -> None:
    writer = DumpWriter(small_disk.folder, WorkerName.parse("trainer/0"), disk, 1 << 30)
    small_disk.fill()
    writer.write(1, 0, samples(100))
    writer.close()
    assert counts["disk/dropped_dumps"] == 1


def test_a_trace_goes_on_when_there_is_room_again(small_disk: SmallDisk, disk: Disk, counts: Counter[str]) -> None:
    path = small_disk.folder / "trace" / "trainer-0.jsonl"
    small_disk.fill()
    tracer = Tracer(path, ABOUT, disk, file_bytes=1 << 20)
    tracer.span("lost", "runtime", 0.0, 1.0)
    eventually(lambda: counts["disk/dropped_trace_events"] > 0)
    small_disk.free()
    tracer.span("kept", "runtime", 1.0, 2.0)
    eventually(lambda: path.exists() and "kept" in path.read_text())
    small_disk.fill()
    before = counts["disk/dropped_trace_events"]
    for number in range(5000):
        tracer.span("lost", "runtime", number, number + 1)
    eventually(lambda: counts["disk/dropped_trace_events"] > before)
    small_disk.free()
    tracer.span("kept again", "runtime", 2.0, 3.0)
    tracer.close()
    header, thread, *events = lines(path)
    assert header["worker"] == "trainer/0"
    assert thread[:2] == ["T", 1], "told in the file, though it was lost at first"
    assert {"kept", "kept again"} <= {event[1] for event in events if event[0] == "X"}
    assert tracer.dropped == counts["disk/dropped_trace_events"]


def test_printing_into_a_log_that_cannot_grow_raises_nothing(small_disk: SmallDisk) -> None:
    """A reward that prints must not fail for it."""
    code = "from distflow.runtime.disk import spare_output\nspare_output()\nfor _ in range(2000): print('x' * 100)"
    log = small_disk.folder / "log"
    log.touch()
    small_disk.fill()
    with log.open("ab") as file:
        done = subprocess.run(
            [sys.executable, "-c", code], stdout=file, stderr=subprocess.PIPE, check=False, timeout=60, env=os.environ
        )
    assert (done.returncode, done.stderr) == (0, b"")


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[SmallDisk]:
    with SmallDisk(tmp_path / "disk") as made:
        yield made
