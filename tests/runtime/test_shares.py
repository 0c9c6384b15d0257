"""Shares of time: by pure numbers, and as a worker's store writes them."""

import time

import pytest

from distflow.runtime.metrics import MetricStore, time_shares


def test_a_trainer_waits_a_share_of_its_step() -> None:
    timings = {"timing_s/step": 4.0, "timing_s/wait_samples": 1.0, "timing_s/update": 2.0}
    assert time_shares(timings, {"train": 2.0}, 99.0) == {"perf/trainer_idle_share": (0.25, 4.0)}


def test_a_rollouts_time_goes_to_waits_generation_and_scores() -> None:
    timings = {"timing_s/gen": 2.0, "timing_s/wait_leases": 1.0, "timing_s/wait_weights": 4.0, "timing_s/reward": 1.0}
    assert time_shares(timings, {"score": 1.0}, 10.0) == {
        "perf/rollout_idle_share": (0.5, 10.0),
        "perf/generate_share": (0.2, 10.0),
        "perf/score_share": (0.1, 10.0),
    }
    assert time_shares({"timing_s/wait_leases": 10.0}, {}, 10.0)["perf/rollout_idle_share"] == (1.0, 10.0)
    waiting = time_shares({"timing_s/gen": 2.0, "timing_s/environment": 7.0}, {}, 10.0)
    assert (waiting["perf/environment_share"], waiting["perf/rollout_idle_share"]) == ((0.7, 10.0), (0.0, 10.0))


def test_a_colocated_workers_phases_are_measured_each_by_itself() -> None:
    timings = {
        "timing_s/step": 10.0,
        "timing_s/generation": 6.0,
        "timing_s/gen": 3.0,
        "timing_s/wait_leases": 1.5,
        "timing_s/wait_samples": 1.0,
        "timing_s/wait_replicas": 2.0,
        "timing_s/wait_homes": 0.5,
    }
    assert time_shares(timings, {"score": 0.6, "train": 2.0}, 99.0) == {
        "perf/trainer_idle_share": (0.25, 4.0),
        "perf/generation_share": (0.6, 10.0),
        "perf/rollout_idle_share": (0.25, 6.0),
        "perf/generate_share": (0.5, 6.0),
        "perf/score_share": (pytest.approx(0.1), 6.0),
    }


def test_parts_never_pass_the_whole_and_nothing_is_divided_by_zero() -> None:
    assert time_shares({"timing_s/gen": 1.01}, {}, 1.0)["perf/generate_share"] == (1.0, 1.0)
    assert time_shares({"timing_s/step": 0.0}, {}, 0.0) == {}
    assert time_shares({}, {}, 5.0) == {}


def test_a_store_counts_from_its_first_timing_and_then_from_line_to_line() -> None:
    store = MetricStore()
    begin = time.perf_counter()
    for _ in range(2):
        with store.timed("timing_s/gen"), store.timed("timing_s/mine"):
            pass
        with store.timed("timing_s/reward", "score"):
            pass
        before = time.perf_counter()
        line = store.drain()
        end = time.perf_counter()
        assert 0 < line["perf/generate_share.weight"] <= end - begin
        assert line["perf/generate_share"] == line["timing_s/gen"] / line["perf/generate_share.weight"]
        assert line["perf/score_share"] == line["timing_s/reward"] / line["perf/score_share.weight"]
        begin = before
    assert store.drain() == {}


def test_a_service_is_no_idle_rollout() -> None:
    store = MetricStore(service="judge")
    with store.timed("timing_s/wait_requests"):
        time.sleep(0.02)
    with store.timed("timing_s/reward", "score"):
        time.sleep(0.02)
    line = store.drain()
    assert 0 < line["perf/idle_share/judge"] < 1
    assert not any(name.startswith(("perf/rollout", "perf/generate", "perf/score")) for name in line)
