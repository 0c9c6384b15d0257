"""The merged trace by the rules of its format, and clocks that disagree."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from distflow.errors import UserError
from distflow.launch.cli import run as distflow
from distflow.launch.commands.trace import TraceSpan, corrections, merged_trace, nested

SLACK_US = 0.01
"""Times are written with three decimals."""


def write(run_dir: Path, worker: str, *lines: list[Any], host: int = 0, began: int = 1_000_000, text: str = "") -> None:
    folder = run_dir / "trace"
    folder.mkdir(parents=True, exist_ok=True)
    header = {"format": 1, "worker": worker, "host": host, "pid": 9, "incarnation": 0, "term": 0, "began_us": began}
    with (folder / f"{worker.replace('/', '-')}.jsonl").open("a") as file:
        for line in (header, ["T", 1, "MainThread"], *lines):
            file.write(json.dumps(line) + "\n")
        file.write(text)


def check_format(trace: dict[str, Any]) -> None:
    """What Chrome's trace format asks for, and what a reader of the picture does."""
    events = trace["traceEvents"]
    for event in events:
        assert {"ph", "ts", "pid", "tid", "name"} <= event.keys(), event
        assert event["ph"] in "XsfCM"
        assert event["ts"] >= 0
    timed = [event for event in events if event["ph"] != "M"]
    assert [event["ts"] for event in timed] == sorted(event["ts"] for event in timed)
    starts = {event["id"]: event for event in timed if event["ph"] == "s"}
    ends = [event for event in timed if event["ph"] == "f"]
    assert {event["id"] for event in ends} == starts.keys()
    assert max(Counter(event["id"] for event in timed if event["ph"] == "s").values(), default=1) == 1
    for end in ends:
        assert end["bp"] == "e"
        assert (end["name"], end["cat"]) == (starts[end["id"]]["name"], starts[end["id"]]["cat"])
        assert end["ts"] >= starts[end["id"]]["ts"]
    spans = [event for event in timed if event["ph"] == "X"]
    named = {(event["pid"], event["tid"]) for event in events if event["name"] == "thread_name"}
    for row in named | {(span["pid"], span["tid"]) for span in spans}:
        assert row in named
        check_nesting([span for span in spans if (span["pid"], span["tid"]) == row])
    for end in [*ends, *starts.values()]:
        inside = [
            span
            for span in spans
            if (span["pid"], span["tid"]) == (end["pid"], end["tid"])
            and span["ts"] - SLACK_US <= end["ts"] <= span["ts"] + span["dur"] + SLACK_US
        ]
        assert inside, f"an arrow needs a span to be tied to: {end}"


def check_nesting(spans: list[dict[str, Any]]) -> None:
    stack: list[float] = []
    for span in spans:
        end = span["ts"] + span["dur"]
        while stack and stack[-1] <= span["ts"] + SLACK_US:
            stack.pop()
        assert not stack or end <= stack[-1] + SLACK_US, f"{span} reaches out of the span around it"
        stack.append(end)


def spans_of(trace: dict[str, Any], name: str) -> list[dict[str, Any]]:
    return [event for event in trace["traceEvents"] if event["ph"] == "X" and event["name"] == name]


def arrows_of(trace: dict[str, Any]) -> dict[str, tuple[float, float]]:
    ends = {(event["ph"], event["name"]): event["ts"] for event in trace["traceEvents"] if event["ph"] in "sf"}
    return {name: (at, ends["f", name]) for (kind, name), at in ends.items() if kind == "s"}


def trainer(run_dir: Path, *, host: int = 0, began: int = 1_000_000) -> None:
    lines: list[list[Any]] = [
        ["s", "weights", 1, 12.0, ["policy:0:0"]],
        ["X", "publish", "runtime", 1, 10.0, 5.0],
        ["f", "group", 1, 61.0, ["7", "8"], ["rollout/0", "rollout/9"]],
        ["X", "take", "runtime", 1, 60.0, 2.0],
        ["X", "training step 1", "step", 1, 20.0, 70.0],
        ["C", "staleness/mean", 90.0, 0.5],
        ["X", "training step 2", "step", 1, 100.0, 50.0],
        ["C", "staleness/mean", 150.0, 1.0],
    ]
    write(run_dir, "trainer/0", *lines, host=host, began=began)


def rollout(run_dir: Path, *, host: int = 0, began: int = 1_000_000) -> None:
    lines: list[list[Any]] = [
        ["f", "weights", 1, 22.0, ["policy:0:0"], []],
        ["X", "weight_sync", "runtime", 1, 20.0, 5.0],
        ["s", "group", 1, 41.0, ["7", "8"]],
        ["X", "send", "runtime", 1, 40.0, 4.0],
        ["X", "gen", "runtime", 1, 110.0, 10.0],
        ["D", 130.0, 3],
    ]
    write(run_dir, "rollout/0", *lines, host=host, began=began, text='["X","cut off by the wor')


def test_arrows_lead_from_the_worker_whose_copy_was_kept(tmp_path: Path) -> None:
    trainer(tmp_path)
    rollout(tmp_path, began=1_000_003)
    trace = merged_trace(tmp_path, None)
    check_format(trace)
    # Position 8 was taken from a worker that left no trace.
    assert arrows_of(trace) == {"weights policy:0:0": (2.0, 15.0), "group 7": (34.0, 51.0)}
    names = [event["args"]["name"] for event in trace["traceEvents"] if event["name"] == "process_name"]
    assert names == ["trainer/0 (host 0, pid 9)", "rollout/0 (host 0, pid 9)"], "those that train come first"
    curve = [event["args"]["value"] for event in trace["traceEvents"] if event["ph"] == "C"]
    assert curve == [0.5, 1.0]
    assert (trace["otherData"]["events dropped"], trace["otherData"]["lines cut off"]) == (3, 1)


def test_the_last_steps_alone(tmp_path: Path) -> None:
    trainer(tmp_path)
    rollout(tmp_path)
    trace = merged_trace(tmp_path, 1)
    check_format(trace)
    assert spans_of(trace, "training step 1") == spans_of(trace, "send") == []
    assert [(span["ts"], span["dur"]) for span in spans_of(trace, "training step 2")] == [(0.0, 50.0)]
    assert [(span["ts"], span["dur"]) for span in spans_of(trace, "gen")] == [(10.0, 10.0)]
    assert arrows_of(trace) == {}
    assert len(merged_trace(tmp_path, 2)["traceEvents"]) > len(trace["traceEvents"])


def test_a_resumed_run_counts_its_steps_as_they_were_done_last(tmp_path: Path) -> None:
    trainer(tmp_path)
    write(tmp_path, "trainer/0", ["X", "training step 2", "step", 1, 5.0, 50.0], began=2_000_000)
    trace = merged_trace(tmp_path, 1)
    check_format(trace)
    assert [(span["ts"], span["dur"]) for span in spans_of(trace, "training step 2")] == [(0.0, 50.0)]


@pytest.mark.parametrize("wrong_us", [-5_000_000, 5_000_000])
def test_nothing_is_received_before_it_was_sent_whatever_the_clocks_say(tmp_path: Path, wrong_us: int) -> None:
    trainer(tmp_path)
    rollout(tmp_path, host=1, began=1_000_000 + wrong_us)
    trace = merged_trace(tmp_path, None)
    check_format(trace)
    # 10 µs one way, 20 the other, by right clocks: the middle makes them 15 each.
    assert {name: end - begin for name, (begin, end) in arrows_of(trace).items()} == {
        "weights policy:0:0": 15.0,
        "group 7": 15.0,
    }


def test_one_host_has_one_clock(tmp_path: Path) -> None:
    trainer(tmp_path)
    rollout(tmp_path, began=1_000_500)
    trace = merged_trace(tmp_path, None)
    assert set(trace["otherData"]["clock corrections in µs"].values()) == {0.0}


@given(
    clocks=st.lists(st.floats(-1e6, 1e6), min_size=2, max_size=5),
    messages=st.lists(st.tuples(st.integers(0, 4), st.integers(0, 4), st.floats(0, 1e4)), max_size=30),
)
def test_corrected_delays_are_never_negative(clocks: list[float], messages: list[tuple[int, int, float]]) -> None:
    hosts = list(range(len(clocks)))
    known = [(a, b, clocks[b] - clocks[a] + delay) for a, b, delay in messages if a < len(hosts) and b < len(hosts)]
    found = corrections(hosts, known)
    assert found[0] == 0.0
    for sender, receiver, delay in known:
        if sender != receiver:
            assert delay + found[receiver] - found[sender] >= -1e-6


def test_a_clock_that_may_be_right_is_left_alone() -> None:
    assert corrections([0, 1, 2], [(0, 1, 30.0)]) == {0: 0.0, 1: 0.0, 2: 0.0}
    assert corrections([0, 1], [(0, 1, -30.0)]) == {0: 0.0, 1: 30.0}
    assert corrections([0, 1], [(1, 0, -30.0)]) == {0: 0.0, 1: -30.0}


def test_a_span_left_open_too_long_is_cut_off() -> None:
    outer, inner = TraceSpan("outer", "", 1, 0.0, 10.0), TraceSpan("inner", "", 1, 5.0, 12.0)
    assert nested([inner, outer]) == [outer, TraceSpan("inner", "", 1, 5.0, 10.0)]
    elsewhere = TraceSpan("inner", "", 2, 5.0, 12.0)
    assert nested([outer, elsewhere]) == [outer, elsewhere]


def test_the_command_writes_a_file_and_says_what_is_missing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run_dir = tmp_path / "runs" / "some"
    (run_dir / "metrics").mkdir(parents=True)
    out = tmp_path / "trace.json"
    assert distflow(["trace", str(run_dir), "-o", str(out)]) == 2
    assert "no trace of this run — it records one unless" in capsys.readouterr().err
    trainer(run_dir)
    rollout(run_dir)
    assert distflow(["trace", str(run_dir), "-o", str(out)]) == 0
    check_format(json.loads(out.read_text()))
    said = capsys.readouterr()
    assert f"{out}: 7 spans and 2 arrows of 2 workers" in said.out
    assert "3 events are missing" in said.err
    assert distflow(["trace", str(run_dir), "-o", str(tmp_path / "no" / "t.json")]) == 2
    assert "cannot be written (No such file or directory)" in capsys.readouterr().err


def test_last_needs_a_step_that_is_over(tmp_path: Path) -> None:
    rollout(tmp_path)
    with pytest.raises(UserError, match="no training step is finished yet"):
        merged_trace(tmp_path, 1)
