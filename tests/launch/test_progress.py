"""The live page: it keeps within the terminal, whatever the workers say."""

from __future__ import annotations

from typing import Any

import pytest
from rich.console import Console

from distflow.launch.progress import LiveDisplay, Standing, worker_page, worker_table
from distflow.launch.record import RunRecord

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


@pytest.mark.parametrize("width", [60, 100])
def test_a_line_for_each_thing_however_long_it_is(width: int):
    console = Console(width=width, height=20, force_terminal=True, color_system=None)
    metrics = {"critic/score/mean": 0.1, "perf/tokens_per_s": 30_309.0, "perf/samples_per_s": 3_837.3}
    metrics |= {"critic/rewards/mean": 0.2, "actor/grad_norm": 0.48, "staleness/mean": 0.0}
    display = LiveDisplay(console, 100)
    page = display._page(
        Standing(RECORD, 3, metrics, "training-bound: " + "x" * 100), worker_table([row(0), row(1)], 9)
    )
    lines = drawn(console, page)
    assert len(lines) == 6, lines
    assert max(map(len, lines)) <= width
    assert lines[1].startswith("score 0.100  reward 0.200")
    assert lines[2].endswith("…")
    assert lines[4].startswith("rollout/0  generating")


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
