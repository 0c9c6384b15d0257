"""The live page: it keeps within the terminal, whatever the workers say."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
from msgspec import structs
from rich.console import Console

from distflow.cluster.processes import ProcessId
from distflow.launch.deploy import monitor
from distflow.launch.deploy.monitor import StatusReader
from distflow.launch.observe.progress import (
    AutoscaleDisplay,
    LiveDisplay,
    PlainDisplay,
    RunStatus,
    duration,
    sparkline,
    worker_page,
    worker_table,
)
from distflow.launch.run.record import RunRecord, WorkerEntry
from distflow.metrics.autoscale import Autoscaler, AutoscaleRule

LONG = "samples of training step 123 from " + ", ".join(f"rollout/{i}" for i in range(9)) + " for 3.1 s"
RECORD = RunRecord("some", "/none", 100, (), {}, drain_s=1.0, restarts=0, state="starting")


def row(index: int, state: str = "generating", seconds: float = 0.0) -> dict[str, Any]:
    waits = [{"name": "leases", "peers": ["trainer/0"], "seconds": seconds}] if seconds else []
    common = {"name": f"rollout/{index}", "state": state, "step": 7, "version": 7}
    return {**common, "waiting_for": LONG, "waits": waits}


def drawn(console: Console, *things: Any) -> list[str]:
    with console.capture() as capture:
        for thing in things:
            console.print(thing)
    return capture.get().splitlines()


@pytest.mark.parametrize("width", [60, 80, 100])
def test_a_line_for_each_thing_however_long_it_is(width: int):
    console = Console(width=width, height=20, force_terminal=True, color_system=None)
    metrics = {"critic/score/mean": 0.1, "perf/tokens_per_s": 30_309.0, "perf/samples_per_s": 3_837.3}
    metrics |= {"critic/rewards/mean": 0.2, "actor/grad_norm": 0.48, "staleness/mean": 0.0}
    display = LiveDisplay(console, 100)
    rewards = [step / 200 for step in range(200)]
    standing = RunStatus(RECORD, 3, metrics, "training-bound: " + "x" * 100, rewards=rewards, left_s=754.0)
    display._update_bar(standing)
    lines = drawn(console, display._page(standing, worker_table([row(0), row(1)], 9)))
    assert len(lines) == 7, lines
    assert max(map(len, lines)) <= width
    assert " 3/100 " in lines[0]
    assert lines[0].rstrip().endswith("left 12:34") or width < 80
    assert lines[1].startswith("score 0.100  reward 0.200")
    assert lines[1].rstrip().endswith("stale 0.00") == (width >= 80), "80 columns are enough for all figures"
    assert lines[2].rstrip() == f"reward {sparkline(rewards, width - 7)}"
    assert lines[3].endswith("…")
    assert lines[5].startswith("rollout/0  generating")


def test_a_sparkline_goes_from_the_least_to_the_largest_and_leaves_out_what_is_missing():
    assert sparkline([0.0, 0.5, math.nan, 1.0], 9) == "▁▅ █"
    assert sparkline([9.0, 0.0, 1.0], 2) == "▁█"
    assert sparkline([2.0, 2.0], 9) == "▁▁"
    assert sparkline([], 9) == sparkline([math.nan], 9) == ""


@pytest.mark.parametrize("seconds, text", [(6.6, "0:07"), (754, "12:34"), (3723, "1:02:03")])
def test_durations(seconds: float, text: str):
    assert duration(seconds) == text


def test_before_the_first_training_step_it_is_said_what_goes_on(capsys: pytest.CaptureFixture[str]):
    entries = (WorkerEntry("rollout/0", False), WorkerEntry("trainer/0", True))
    begun = structs.replace(RECORD, workers=entries)
    mark = ProcessId(7, 1.0)
    display = PlainDisplay()
    for record in (
        begun,
        begun,
        structs.replace(begun, pids={"agent/0": mark}),
        structs.replace(begun, pids={"agent/0": mark, "rollout/0": mark}),
        structs.replace(begun, state="running"),
    ):
        display.show(RunStatus(record, 0, {}))
    assert capsys.readouterr().out.splitlines() == [
        "starting the host agent",
        "importing torch and other libraries, once for all 2 workers of a host",
        "starting the workers: 1 of 2 are running",
        "the workers are loading their models and connecting; then the first training step begins",
    ]


def of_owner(kind: str, groups: int, of: int, tokens: int) -> dict[str, Any]:
    return row(0) | {"arriving": [{"kind": kind, "step": 1, "groups": groups, "of": of, "tokens": tokens}]}


def test_before_the_first_training_step_it_is_said_how_far_it_has_come(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    display, record = PlainDisplay(), structs.replace(RECORD, state="running")
    looks = [
        (100, [row(0)]),
        (101, [of_owner("val", 0, 8, 40), of_owner("train", 0, 8, 9)]),
        (108, [of_owner("val", 5, 8, 900)]),
        (112, [of_owner("val", 7, 8, 1200)]),
        (123, [of_owner("val", 8, 8, 5000), of_owner("train", 1, 8, 30), of_owner("train", 2, 8, 40)]),
        (140, [row(0)]),
    ]
    for now, rows in looks:
        monkeypatch.setattr("distflow.launch.observe.progress.time.monotonic", lambda now=now: float(now))
        display.show(RunStatus(record, 0, {}, rows=rows))
    assert capsys.readouterr().out.splitlines() == [
        "the workers are loading their models and connecting; then the first training step begins",
        "validating: 0 of 8 prompts, 40 tokens so far; generating for training step 1: 0 of 8 prompts, 9 tokens so far",
        "validating: 7 of 8 prompts, 1,200 tokens so far",
        "generating for training step 1: 3 of 16 prompts, 70 tokens so far",
    ]


def test_one_worker_is_told_of_as_one():
    alone = structs.replace(RECORD, workers=(WorkerEntry("trainer/0", True),), pids={"agent/0": ProcessId(7, 1.0)})
    assert RunStatus(alone, 0, {}).stage == "importing torch and other libraries, for the worker"


def test_without_a_terminal_it_is_said_how_long_the_rest_takes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    record = structs.replace(RECORD, workers=(WorkerEntry("trainer/0", True),), state="running", run_dir=str(tmp_path))
    (tmp_path / "metrics").mkdir()
    monkeypatch.setattr(monitor, "worker_rows", lambda record, timeout_s: [])
    now = [100.0]
    monkeypatch.setattr(monitor.time, "monotonic", lambda: now[0])
    status_reader = StatusReader(tmp_path, PlainDisplay())
    with (tmp_path / "metrics" / "trainer-0.jsonl").open("a") as file:
        for step in range(1, 6):
            line = {"step": step, "term": 0, "timing_s/step": 2.0, "critic/rewards/mean": step / 10}
            file.write(json.dumps(line) + "\n")
            file.flush()
            standing = status_reader.read(record)
            now[0] += 2.0
    assert standing.left_s == pytest.approx(2.0 * 95)
    assert str(standing).endswith("left 3:10")
    assert standing.rewards == [0.1, 0.2, 0.3, 0.4, 0.5]


def test_the_pace_is_that_of_the_present_term(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Also if a checkpoint of every step brings the training workers back to where they were."""
    record = structs.replace(RECORD, workers=(WorkerEntry("trainer/0", True),), state="running", run_dir=str(tmp_path))
    (tmp_path / "metrics").mkdir()
    monkeypatch.setattr(monitor, "worker_rows", lambda record, timeout_s: [])
    now = [100.0]
    monkeypatch.setattr(monitor.time, "monotonic", lambda: now[0])
    status_reader = StatusReader(tmp_path, PlainDisplay())
    with (tmp_path / "metrics" / "trainer-0.jsonl").open("a") as file:
        for step in range(1, 11):
            term = int(step > 5)
            file.write(json.dumps({"step": step, "term": term, "timing_s/step": 2.0}) + "\n")
            file.flush()
            standing = status_reader.read(structs.replace(record, term=term))
            now[0] += 500.0 if step == 5 else 8.0 if step < 5 else 2.0
    assert standing.left_s == pytest.approx(2.0 * 90)


def test_of_many_workers_those_in_trouble_are_shown():
    rows = [row(index) for index in range(40)]
    rows[33] = row(33, seconds=9.0)
    rows[35] = row(35, "no answer")
    lines = drawn(Console(width=100), worker_table(rows, 4))
    assert [line.split()[0] for line in lines] == ["worker", "rollout/35", "rollout/33", "rollout/0", "…"]
    assert lines[-1].split("  ")[0] == "… 37 more"


def test_who_holds_up_whom_is_said_below_the_table():
    rows = [{**row(0), "waits": [{"name": "leases", "peers": ["trainer/0"], "seconds": 1.0}]}]
    rows.append({**row(0, "no answer"), "name": "trainer/0", "waits": []})
    assert drawn(Console(width=100), worker_page(rows, 9))[-1].rstrip() == (
        "everything waits for trainer/0, which does not answer"
    )


def test_whom_outside_of_the_run_it_waits_for_is_said_below_the_table():
    rows = [{**row(0), "outside": [{"on": "prompts", "text": "clients to put prompts: put some"}]}] * 2
    lines = drawn(Console(width=100), worker_page(rows, 9))
    assert lines[-1].rstrip() == "the run waits for clients to put prompts: put some"


def test_what_was_before_autoscaling_began_is_not_said_again(tmp_path: Path, capsys):
    record = structs.replace(RECORD, run_dir=str(tmp_path), state="running", renewed="term 1 has begun", term=1)
    display = AutoscaleDisplay(record, "rollout", Autoscaler(AutoscaleRule(), 1), lambda now, count: "")
    reader = StatusReader(tmp_path, display)
    display.show(reader.read(record))
    assert capsys.readouterr().out == ""
    display.show(reader.read(structs.replace(record, renewed="term 2 has begun", term=2)))
    assert capsys.readouterr().out == "term 2 has begun\n"
