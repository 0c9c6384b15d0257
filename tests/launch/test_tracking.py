"""What a tracker is given of the files of a run: each row once, when it is complete, whatever is restarted."""

from __future__ import annotations

import json
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from distflow.flow.trackers import TrackedRun
from distflow.launch.observe import tracking
from distflow.launch.observe.tracking import Following, Start, StepRows
from distflow.workers.trackers.prometheus import Prometheus

GIVEN: list[Any] = []


class Noting:
    """A tracker that notes in GIVEN what it is given, and refuses one step."""

    def __init__(self, run: TrackedRun, *, refuses: int = -1) -> None:
        self.refuses = refuses
        run.notes["lives"] = run.notes.get("lives", "") + "+"
        GIVEN.append((run.id, run.notes["lives"], run.recipe["run"]["name"]))

    def log(self, step: int, values: Mapping[str, float]) -> None:
        if step == self.refuses:
            raise ConnectionError("no network")
        GIVEN.append((step, dict(values)))

    def samples(self, step: int, rows: Sequence[Mapping[str, Any]]) -> None:
        GIVEN.append(("samples", step, list(rows)))

    def close(self) -> None:
        GIVEN.append("close")


def write(run_dir: Path, worker: str, *lines: Mapping[str, Any]) -> None:
    path = run_dir / "metrics" / f"{worker}.jsonl"
    path.parent.mkdir(exist_ok=True)
    with path.open("a") as file:
        file.writelines(json.dumps({"term": 0, **line}) + "\n" for line in lines)


def trained(step: int, **values: Any) -> dict[str, Any]:
    return {"step": step, "timing_s/step": 1.0, **values}


def following(run_dir: Path, term: int = 0, begins: int = 0, **options: Any) -> tuple[Following, list[Any]]:
    reports: list[Any] = []
    recipe = {"run": {"name": "x", "training_steps": 9}}
    start = Start(str(run_dir), "noting", f"{__name__}:Noting", options, 2, recipe, term, begins)
    GIVEN.clear()
    return Following(start, reports.append), reports


def steps() -> list[int]:
    return [found[0] for found in GIVEN if isinstance(found[0], int)]


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    now = [100.0]
    monkeypatch.setattr(tracking.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(tracking.time, "sleep", lambda seconds: now.__setitem__(0, now[0] + seconds))
    return lambda seconds: now.__setitem__(0, now[0] + seconds)


def test_a_row_is_complete_when_all_workers_have_written_it_or_after_a_while(tmp_path: Path) -> None:
    rows, workers = StepRows(tmp_path, 0, -1), ["trainer-0", "trainer-1", "rollout-0"]
    write(tmp_path, "trainer-0", trained(1, **{"a": 1.0, "a.weight": 1.0}))
    write(tmp_path, "rollout-0", {"step": 1, "b": 5.0})
    rows.read(0.0)
    assert list(rows.complete(workers, 0.0, 10.0)) == []
    write(tmp_path, "trainer-1", trained(1, **{"a": 4.0, "a.weight": 2.0}))
    rows.read(1.0)
    assert list(rows.complete(workers, 1.0, 10.0)) == [(1, {"a": 3.0, "b": 5.0, "timing_s/step": 1.0})]
    write(tmp_path, "trainer-0", trained(2), trained(3))
    write(tmp_path, "trainer-1", trained(2), trained(3))
    rows.read(2.0)
    assert list(rows.complete(workers, 11.9, 10.0)) == []
    assert [step for step, _ in rows.complete(workers, 12.0, 10.0)] == [2, 3]
    assert len(rows) == 0


def test_a_step_that_only_generating_workers_have_begun_is_no_row(tmp_path: Path) -> None:
    rows = StepRows(tmp_path, 0, -1)
    write(tmp_path, "rollout-0", {"step": 1, "b": 5.0})
    rows.read(0.0)
    assert list(rows.complete([], 100.0, 0.0)) == []


def test_a_later_term_replaces_what_was_not_given_and_repeats_nothing(tmp_path: Path) -> None:
    rows, workers = StepRows(tmp_path, 0, -1), ["trainer-0", "trainer-1"]
    write(tmp_path, "trainer-0", trained(1, a=1.0), trained(2, a=1.0), trained(3, a=1.0))
    write(tmp_path, "trainer-1", trained(1, b=1.0), trained(2, b=1.0))
    rows.read(0.0)
    assert [step for step, _ in rows.complete(workers, 0.0, 10.0)] == [1, 2]
    # The pool begins again after the first step: 2 was given, 3 was not.
    write(tmp_path, "trainer-0", trained(2, term=1, a=2.0), trained(3, term=1, a=2.0))
    rows.read(1.0)
    assert list(rows.complete(workers, 1.0, 10.0)) == []
    write(tmp_path, "trainer-1", trained(2, term=1, b=2.0), trained(3, term=1, b=2.0))
    rows.read(2.0)
    assert list(rows.complete(workers, 2.0, 10.0)) == [(3, {"a": 2.0, "b": 2.0, "timing_s/step": 1.0})]


def test_lines_that_are_cut_short_and_values_that_are_none(tmp_path: Path) -> None:
    rows = StepRows(tmp_path, 0, -1)
    write(tmp_path, "trainer-0", trained(1, a=None, b=1.0))
    with (tmp_path / "metrics" / "trainer-0.jsonl").open("a") as file:
        file.write('{"step": 2, "te\n[]\n{"step": 2, "term": 0, "timing_s/step": 1.0}\n{"step": 3')
    rows.read(0.0)
    assert [values for _, values in rows.complete([], 0.0, 0.0)] == [
        {"b": 1.0, "timing_s/step": 1.0},
        {"timing_s/step": 1.0},
    ]


def test_files_far_ahead_wait_on_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tracking, "AHEAD", 10)
    monkeypatch.setattr(tracking, "READ_BYTES", 200)
    write(tmp_path, "trainer-0", *(trained(step) for step in range(1, 101)))
    rows, given = StepRows(tmp_path, 0, -1), 0
    for now in range(100):
        rows.read(now)
        assert len(rows) < 20
        if now > 20:
            given += len(list(rows.complete([], now, 0.0)))
    assert given == 100


def test_who_goes_on_begins_where_the_last_one_was(tmp_path: Path, clock: Callable[[float], None]) -> None:
    write(tmp_path, "trainer-0", trained(1), trained(2), {"step": 0, "val/acc": 0.5})
    first, _ = following(tmp_path)
    first.go_on(settle_s=0.0)
    assert steps() == [0, 1, 2]
    identity = GIVEN[0][0]
    # It is killed. StepRows 3 and 4 are written meanwhile, 2 again by a later term, and validation is repeated.
    write(tmp_path, "trainer-0", trained(3), trained(2, term=1), trained(3, term=1), trained(4, term=1))
    write(tmp_path, "trainer-0", {"step": 0, "term": 1, "val/acc": 0.5}, {"step": 2, "term": 1, "val/acc": 0.6})
    second, _ = following(tmp_path, term=1, begins=1)
    assert GIVEN[0] == (identity, "++", "x")
    second.close()
    assert steps() == [2, 3, 4]
    assert GIVEN[1] == (2, {"val/acc": 0.6})
    assert GIVEN[-1] == "close"


def test_without_a_state_a_later_term_begins_at_its_own_steps(tmp_path: Path, clock: Callable[[float], None]) -> None:
    write(tmp_path, "trainer-1", trained(1), trained(2), trained(2, term=1), trained(3, term=1))
    found, _ = following(tmp_path, term=1, begins=1)
    found.close()
    assert steps() == [2, 3]


def test_a_row_that_is_refused_is_lost_and_the_others_are_not(tmp_path: Path, clock: Callable[[float], None]) -> None:
    write(tmp_path, "trainer-0", trained(1), trained(2), trained(3))
    found, reports = following(tmp_path, refuses=2)
    found.close()
    assert steps() == [1, 3]
    lost = [report for report in reports if "lost" in report]
    assert lost == [{"lost": 1, "why": "training step 2: ConnectionError: no network"}]
    assert {"busy": "training step 3", "rows": 1, "behind": 0} in reports


def test_samples_are_shown_once_their_file_no_longer_grows(tmp_path: Path, clock: Callable[[float], None]) -> None:
    write(tmp_path, "trainer-0", trained(1))
    sample = {"uid": [1], "prompt": "1+1=", "response": "2" * 9000, "response_ids": [5], "rewards": {"format": 0.5}}
    path = tmp_path / "rollouts" / "step_000001" / "trainer-0.jsonl"
    path.parent.mkdir(parents=True)
    path.write_text(json.dumps(sample) + "\n")
    found, _ = following(tmp_path)
    found.go_on(settle_s=0.0)
    with path.open("a") as file:
        file.write(json.dumps({**sample, "reward": 1.0}) + "\n" + json.dumps(sample) + "\n")
    found.go_on(settle_s=0.0)
    assert not [one for one in GIVEN if one[0] == "samples"]
    found.go_on(settle_s=0.0)
    found.go_on(settle_s=0.0)
    (shown,) = [one for one in GIVEN if one[0] == "samples"]
    first, second = shown[2]
    assert first == {"prompt": "1+1=", "response": "2" * 4000, "rewards/format": 0.5, "reward": None}
    assert second["reward"] == 1.0


def test_the_page_for_prometheus(tmp_path: Path) -> None:
    page = Prometheus(TrackedRun('my "run"', "id", {}, tmp_path, {}), port=0)
    page.log(3, {"critic/score/mean": 0.5, "val/avg@4": float("nan")})
    address = f"http://127.0.0.1:{(tmp_path / 'port').read_text().strip()}"
    with urllib.request.urlopen(f"{address}/metrics", timeout=10) as answer:
        assert answer.headers["Content-Type"].startswith("text/plain; version=0.0.4")
        lines = answer.read().decode().splitlines()
    assert lines == [
        "# TYPE distflow_critic_score_mean gauge",
        'distflow_critic_score_mean{run="my \\"run\\""} 0.5',
        "# TYPE distflow_val_avg_4 gauge",
        'distflow_val_avg_4{run="my \\"run\\""} NaN',
        "# TYPE distflow_validated_step gauge",
        'distflow_validated_step{run="my \\"run\\""} 3.0',
    ]
    page.close()
