from __future__ import annotations

import json
import statistics
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from distflow.metrics.merge import MetricsReader, merge_step
from distflow.runtime.metrics import MetricStore


def trained(step: int, term: int = 0, **values: float) -> dict[str, float]:
    """A training worker's line."""
    return {"step": step, "term": term, "timing_s/step": 0.5, **values}


def write(run_dir: Path, worker: str, *lines: dict[str, float]) -> Path:
    path = run_dir / "metrics" / f"{worker}.jsonl"
    path.parent.mkdir(exist_ok=True)
    with path.open("a") as file:
        file.writelines(json.dumps(line) + "\n" for line in lines)
    return path


def read(run_dir: Path) -> list[dict[str, float]]:
    reader = MetricsReader(run_dir)
    reader.read()
    return reader.merged()


def test_workers_merge_by_the_kind_of_each_metric(tmp_path):
    one = {"m": 1.0, "m.weight": 3, "len/max": 5, "len/min": 2, "timing_s/gen": 0.5, "perf/tokens_per_s": 10}
    one |= {"copies": 2.0, "copies.summed": 1.0}
    two = {"m": 5.0, "m.weight": 1, "len/max": 4, "len/min": 1, "timing_s/gen": 0.7, "perf/tokens_per_s": 20}
    two |= {"copies": 3.0, "copies.summed": 1.0}
    write(tmp_path, "rollout-0", {"step": 1, "term": 0, **one})
    write(tmp_path, "rollout-1", {"step": 1, "term": 0, **two})
    write(tmp_path, "trainer-0", {"step": 1, "term": 0, "timing_s/step": 2.0, "actor/lr": 1e-3})
    merged = {
        "m": 2.0,
        "len/max": 5,
        "len/min": 1,
        "timing_s/gen": 0.7,
        "perf/tokens_per_s": 30,
        "copies": 5.0,
        "timing_s/step": 2.0,
        "actor/lr": 1e-3,
    }
    assert read(tmp_path) == [{"step": 1, "term": 0, **merged}]


@given(st.lists(st.tuples(st.floats(-10, 10), st.integers(0, 50)), min_size=1, max_size=6))
def test_weighted_means_merge_as_if_one_worker_had_seen_all(parts):
    merged = merge_step([{"step": 1, "term": 0, "m": mean, "m.weight": weight} for mean, weight in parts])
    total = sum(weight for _, weight in parts)
    if total:
        assert merged["m"] == pytest.approx(sum(mean * weight for mean, weight in parts) / total)


def test_a_newer_term_replaces_what_it_did_again_and_what_it_never_reached(tmp_path):
    write(tmp_path, "trainer-0", *(trained(step, x=0) for step in range(1, 9)))
    write(tmp_path, "trainer-0", *(trained(step, 1, x=1) for step in range(5, 7)))
    assert [(line["step"], line["x"]) for line in read(tmp_path)] == [(1, 0), (2, 0), (3, 0), (4, 0), (5, 1), (6, 1)]


def test_a_step_that_only_generating_workers_have_begun_is_not_listed(tmp_path):
    write(tmp_path, "rollout-0", *({"step": step, "term": 0, "timing_s/gen": 1.0} for step in (1, 2, 3)))
    write(tmp_path, "trainer-0", trained(1), trained(2))
    assert [line["step"] for line in read(tmp_path)] == [1, 2]
    write(tmp_path, "trainer-0", trained(3))
    assert [line["step"] for line in read(tmp_path)] == [1, 2, 3]


def test_steps_of_an_older_term_that_are_being_trained_again_are_not_listed(tmp_path):
    write(tmp_path, "trainer-0", *(trained(step) for step in (1, 2, 3)))
    write(tmp_path, "rollout-0", {"step": 2, "term": 1, "timing_s/gen": 1.0})
    assert [line["step"] for line in read(tmp_path)] == [1]


def test_reading_goes_on_where_it_stopped_and_leaves_half_a_line(tmp_path):
    path = write(tmp_path, "trainer-0", trained(1))
    reader = MetricsReader(tmp_path)
    assert reader.read()
    with path.open("a") as file:
        file.write('{"step": 2, "te')
        file.flush()
        assert not reader.read()
        file.write('rm": 0, "timing_s/step": 0.5}\n')
    assert reader.read()
    assert [line["step"] for line in reader.merged()] == [1, 2]
    assert reader.last_step(["trainer-0"], term=0) == 2


def test_a_step_is_reached_when_all_training_workers_have_written_it_in_this_term(tmp_path):
    write(tmp_path, "trainer-0", *({"step": step, "term": 0} for step in range(1, 7)))
    write(tmp_path, "trainer-0", *({"step": step, "term": 1} for step in range(3, 6)))
    write(tmp_path, "trainer-1", {"step": 3, "term": 1}, {"step": 4, "term": 1})
    reader = MetricsReader(tmp_path)
    reader.read()
    assert reader.last_step(["trainer-0", "trainer-1"], term=1) == 4
    assert reader.first_step(term=1) == 3
    assert reader.last_step(["trainer-0"], term=2) == 0


def test_a_line_cut_off_by_a_kill_is_counted_not_fatal(tmp_path):
    path = write(tmp_path, "trainer-0", trained(1))
    with path.open("a") as file:
        file.write('{"step": 2, "te{"step": 2, "term": 0}\n')
    reader = MetricsReader(tmp_path)
    reader.read()
    assert reader.malformed == 1
    assert len(reader.merged()) == 1


@given(st.permutations([0.1, 0.2, 0.3, 1e16, -1e16, 0.7]))
def test_the_order_in_which_lines_were_read_does_not_show(values: list[float]) -> None:
    """Not in the last bit either: a run that repeats is read back equal."""
    lines = [{"m": value, "m.weight": 3.0, "copies": value, "copies.summed": 1.0} for value in values]
    merged = merge_step(lines)
    assert merged == merge_step(sorted(lines, key=lambda line: line["m"]))


def test_an_explained_variance_is_that_of_all_workers_together() -> None:
    """Each worker has one value, of which none varies."""
    values, errors = [1.0, 3.0, 8.0], [0.5, -1.0, 0.25]
    stores = [MetricStore() for _ in values]
    for store, value, error in zip(stores, values, errors, strict=True):
        store.explained("critic/vf_explained_var", (1.0, value, value**2, error, error**2))
    merged = merge_step([store.drain() for store in stores])
    expected = 1 - statistics.variance(errors) / statistics.variance(values)
    assert merged == {"critic/vf_explained_var": pytest.approx(expected, rel=1e-12)}
