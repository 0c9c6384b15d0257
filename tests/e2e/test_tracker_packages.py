"""Runs with the real packages of trackers, offline; by the Python of `make trackers-venv`, which has them."""

from __future__ import annotations

import json
import os
import signal
import sqlite3
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from tests.e2e.runs import PACED, SMALL, Launch, Run

PACKAGES = ("tensorboard", "wandb", "trackio", "mlflow", "swanlab")
for package in PACKAGES:
    pytest.importorskip(package, reason=f"{package} is not installed: make trackers-venv")
pytestmark = pytest.mark.long
STEPS = 6
BLOCK, FULL, LAST = 32768, 1, 4
SCORE = "critic/rewards/mean"


def scalars(folder: Path) -> dict[int, float]:
    """The score by training step, as TensorBoard reads it."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    read = EventAccumulator(str(folder), {"scalars": 0, "tensors": 0})
    read.Reload()
    assert {"samples", "recipe"} <= set(read.Tags()["tensors"])
    return {event.step: event.value for event in read.Scalars(SCORE)}


def wandb_rows(folder: Path) -> list[dict[str, object]]:
    """The rows of all files of a run, as wandb wrote them."""
    from wandb.proto.wandb_internal_pb2 import Record

    rows = []
    for path in sorted(folder.glob("wandb/offline-run-*/run-*.wandb")):
        for data in log_records(path.read_bytes()):
            record = Record()
            record.ParseFromString(data)
            if record.WhichOneof("record_type") == "history":
                items = record.history.item
                rows.append({item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in items})
    return rows


def log_records(data: bytes) -> Iterator[bytes]:
    """The records of a file in the format of LevelDB's log, behind a header of 7 bytes, up to one that is cut short."""
    at, begun = 7, b""
    while at + 7 <= len(data):
        if BLOCK - at % BLOCK < 7:
            at += BLOCK - at % BLOCK
            continue
        size, kind = int.from_bytes(data[at + 4 : at + 6], "little"), data[at + 6]
        begun += data[at + 7 : at + 7 + size]
        at += 7 + size
        if kind in (FULL, LAST):
            yield begun
            begun = b""


def tracked(run: Run) -> list[psutil.Process]:
    """Keepers, trackers and all that these have started."""
    return psutil.Process(run.pid_of("trainer/0")).children(recursive=True)


def told(processes: list[psutil.Process]) -> list[str]:
    """Their command lines, of those that have not ended meanwhile."""
    lines = []
    for process in processes:
        with suppress(psutil.NoSuchProcess):
            lines.append(" ".join(process.cmdline()))
    return lines


def test_every_package_gets_every_row(launch: Launch, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))
    options = ["tensorboard=true", "wandb.mode=offline", "trackio.project=tests", "mlflow=true", "swanlab.mode=offline"]
    trackers = [f"run.trackers.{option}" for option in (*options, "prometheus.port=0")]
    run = launch("quickstart", *SMALL, f"run.training_steps={STEPS}", *trackers, cold=True)
    assert run.wait() == 0, run.output
    assert "failed" not in run.output
    assert run.leftovers() == []
    folder = run.folder / "trackers"
    scores = {int(line["step"]): line[SCORE] for line in run.metrics() if SCORE in line}
    expected = {step: pytest.approx(scores[step], abs=1e-6) for step in range(1, STEPS + 1)}

    assert scalars(folder / "tensorboard") == expected

    rows = wandb_rows(folder / "wandb")
    assert {row["training_step"]: row[SCORE] for row in rows if SCORE in row} == expected
    shown = [row["training_step"] for row in rows if any(name.startswith("samples") for name in row)]
    assert shown == list(range(1, STEPS + 1))

    with sqlite3.connect(tmp_path / "trackio" / "tests.db") as database:
        found = database.execute("select step, metrics from metrics order by step").fetchall()
    logged = [(step, json.loads(text)) for step, text in found]
    assert {step: values[SCORE] for step, values in logged if SCORE in values} == expected

    with sqlite3.connect(folder / "mlflow" / "mlflow.db") as database:
        found = database.execute("select step, value from metrics where key = ?", (SCORE,)).fetchall()
    assert dict(found) == expected
    assert len(list((folder / "mlflow" / "artifacts").glob("*/artifacts/samples/*.jsonl"))) == STEPS

    assert list((folder / "swanlab").glob("run-*/*.swanlab"))
    assert len(list((folder / "swanlab").glob("run-*/media/text/*"))) > 0


def test_what_wandb_starts_ends_with_a_killed_worker(launch: Launch) -> None:
    run = launch(
        "quickstart", *PACED, "run.training_steps=20", "run.save_every=3", "run.trackers.wandb.mode=offline", cold=True
    )
    run.until(lambda: run.saved() and any("wandb-core" in line for line in told(tracked(run))), "wandb, a checkpoint")
    before = tracked(run)
    os.kill(run.pid_of("trainer/0"), signal.SIGKILL)
    run.until(lambda: not any(process.is_running() for process in before), "the end of all of them")
    assert run.wait() == 0, run.output
    assert run.leftovers() == []
    steps = [row["training_step"] for row in wandb_rows(run.folder / "trackers" / "wandb") if SCORE in row]
    # What wandb had not written when it was killed is lost; nothing is there twice.
    assert steps == sorted(set(steps))
    assert steps[-1] == 20
