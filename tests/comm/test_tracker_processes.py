"""Trackers that hang, crash, refuse or never end: told once, counted, started again, and never waited for for long."""

from __future__ import annotations

import json
import threading
import time
from collections import Counter
from pathlib import Path

import psutil
import pytest

from distflow.comm import tracker_processes
from distflow.comm.tracker_processes import TrackerProcesses, TrackerStart
from tests.comm.test_kept_process import helpers_of
from tests.polling import eventually


class Trackers:
    """Trackers that behave as `plans` say, by name, a word for each life."""

    def __init__(self, folder: Path, timeout_s: float, **plans: list[str]) -> None:
        self.folder = folder
        self.counts: Counter[str] = Counter()
        self.told: list[str] = []
        for name, plan in plans.items():
            (folder / name).mkdir()
            (folder / name / "start.json").write_text(json.dumps(plan))
        starts = [
            TrackerStart(
                name,
                "tests.comm.kept_children:tracker",
                folder / name / "start.json",
                folder / name / "output.log",
                f"test {folder} {name}",
                timeout_s,
            )
            for name in plans
        ]
        self.processes = TrackerProcesses(starts, self.count, self.told.append)

    def count(self, name: str, value: float) -> None:
        self.counts[name] += int(value)

    def lives(self, name: str) -> int:
        path = self.folder / name / "lives"
        return path.read_text().count("\n") if path.exists() else 0


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tracker_processes, "RETRY_S", (0.1,))
    monkeypatch.setattr(tracker_processes, "TICK_S", 0.05)


def test_one_that_crashes_or_hangs_is_started_again_and_told_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    trackers = Trackers(tmp_path, 2.0, crashing=["crashes", "crashes", "works"], hanging=["hangs", "works"])
    eventually(lambda: caplog.text.count("works again") == 2, "both of them")
    trackers.processes.close(20.0)
    assert trackers.lives("crashing") == 3
    assert trackers.lives("hanging") == 2
    assert trackers.counts == {
        "trackers/crashing/failures": 2,
        "trackers/crashing/dropped": 2,
        "trackers/hanging/failures": 1,
        "trackers/hanging/dropped": 1,
    }
    errors = [record.getMessage() for record in caplog.records if record.levelname == "ERROR"]
    assert len(errors) == 2
    assert any("crashing: its process ended with" in line and "in training step 4" in line for line in errors)
    assert any("hanging: training step 4 took longer than timeout_s=2" in line for line in errors)
    assert helpers_of(tmp_path) == []


def test_the_time_that_its_process_needs_to_begin_is_not_a_call_of_it(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    trackers = Trackers(tmp_path, 1.0, late=["begins late"], hanging=["hangs", "works"])
    eventually(lambda: "hanging works again" in caplog.text, "a call that hangs, and a new start")
    time.sleep(3.5)
    trackers.processes.close(20.0)
    assert trackers.lives("late") == 1
    assert trackers.counts == {"trackers/hanging/failures": 1, "trackers/hanging/dropped": 1}


def test_one_whose_process_never_begins_is_started_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tracker_processes, "BOOT_S", 1.5)
    trackers = Trackers(tmp_path, 1.0, late=["begins late", "works"])
    eventually(lambda: "late works again" in caplog.text, "its second life")
    trackers.processes.close(20.0)
    assert "late: its start took longer than 1.5 s" in caplog.text


def test_one_that_refuses_its_options_is_not_started_again(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    trackers = Trackers(tmp_path, 20.0, wrong=["refuses"], good=["raises"])
    eventually(lambda: "wrong: no such option" in caplog.text and "works again" in caplog.text, "both")
    time.sleep(0.5)
    trackers.processes.close(20.0)
    assert trackers.lives("wrong") == 1
    assert "it is not started again" in caplog.text
    assert trackers.counts["trackers/good/dropped"] == 1
    wrong, good = trackers.told
    assert wrong.startswith("tracker wrong: ")
    assert "no such option (see " in wrong
    assert good.startswith("tracker good: ")
    assert "; rows lost: 1 (see " in good


def test_the_end_of_the_run_waits_no_longer_than_it_says(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    trackers = Trackers(tmp_path, 60.0, endless=["never ends"])
    eventually(lambda: trackers.lives("endless"), "its start")
    began = time.monotonic()
    trackers.processes.close(3.0)
    assert time.monotonic() - began < 15.0
    assert trackers.counts["trackers/endless/dropped"] == 2
    assert "rows lost: 2" in caplog.text
    assert "it was not done 3 s after the end of the run; rows lost: 2" in trackers.told[0]
    assert helpers_of(tmp_path) == []


def test_without_trackers_nothing_is_started() -> None:
    before = psutil.Process().children(), threading.active_count()
    processes = TrackerProcesses([], lambda name, value: None, print)
    assert (psutil.Process().children(), threading.active_count()) == before
    processes.close(60.0)
