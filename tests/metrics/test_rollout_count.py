"""What another number of generating workers would bring: the formula at its edges, and where it is shown."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from distflow.metrics.merge import MetricsReader
from distflow.metrics.rollout_count import ONE_MORE, GenerationLoad, other_count

BOUND = GenerationLoad(training_waits=0.7, idle=0.0, generates=1.0, scores=0.0, slots=0.9, batch=0.0, stale=True)
"""Generation is all that takes time."""
METRICS = {
    "perf/trainer_idle_share": 0.7,
    "perf/rollout_idle_share": 0.0,
    "perf/generate_share": 1.0,
    "perf/score_share": 0.0,
    "perf/slots_share": 0.9,
    "perf/batch_share": 0.0,
    "staleness/max": 1.0,
}


def test_with_full_slots_the_time_goes_with_the_number_of_workers() -> None:
    assert BOUND.change(2, 3) == pytest.approx(2 / 3 - 1)
    assert BOUND.change(2, 4) == pytest.approx(2 / 4 - 1)
    assert BOUND.change(3, 2) == pytest.approx(3 / 2 - 1)
    assert BOUND.change(2, 2) == 0.0


def test_no_more_is_gained_than_training_waits() -> None:
    assert replace(BOUND, training_waits=0.1).change(2, 3) == -0.1
    assert replace(BOUND, training_waits=0.0).change(2, 3) == 0.0


def test_the_longest_samples_are_nobody_elses_to_take() -> None:
    assert replace(BOUND, slots=0.3).change(2, 3) == 0.0
    assert replace(BOUND, slots=0.55).change(2, 3) == pytest.approx((2 / 3 - 1) / 2)
    # But rewards are.
    assert replace(BOUND, slots=0.3, generates=0.4, scores=0.6).change(2, 3) == pytest.approx(0.6 * (2 / 3 - 1))


def test_what_a_batch_adds_to_its_steps_is_shared_however_many_slots_there_are() -> None:
    crowded = replace(BOUND, slots=0.1, batch=0.6)
    assert crowded.change(2, 3) == pytest.approx(0.6 * (2 / 3 - 1))
    assert replace(crowded, slots=0.01).change(2, 3) == crowded.change(2, 3)
    assert crowded.change(3, 2) == pytest.approx(0.6 * (3 / 2 - 1))
    # Of what full slots do not make others wait for.
    assert replace(BOUND, batch=0.6).change(2, 3) == BOUND.change(2, 3)
    assert replace(BOUND, slots=0.55, batch=0.6).change(2, 3) == pytest.approx((0.5 + 0.5 * 0.6) * (2 / 3 - 1))


def test_slots_of_an_engine_that_loads_weights_are_no_work_for_others() -> None:
    """A quarter of the time weights are loaded: slots are in use for 0.75 · 0.9 of it."""
    loads = replace(BOUND, generates=0.75)
    assert loads.change(2, 3) == pytest.approx(0.75 * (0.675 - 0.4) / 0.3 * (2 / 3 - 1))
    assert replace(loads, idle=0.25).change(2, 3) == pytest.approx(0.75 * (2 / 3 - 1))


def test_workers_that_are_ahead_can_be_done_without() -> None:
    ahead = GenerationLoad(0.0, idle=0.5, generates=0.5, scores=0.0, slots=0.9, batch=0.0, stale=True)
    assert ahead.change(4, 3) == 0.0
    assert ahead.change(2, 1) == pytest.approx(0.0)
    assert ahead.change(4, 1) == pytest.approx(1.0)
    # Without staleness they wait since training takes its turn.
    assert replace(ahead, stale=False).change(2, 1) == pytest.approx(0.5)


@pytest.mark.parametrize("missing", [name for name in METRICS if name != "staleness/max"])
def test_what_is_not_measured_gives_no_prediction(missing: str) -> None:
    assert GenerationLoad.of(METRICS) == BOUND
    assert GenerationLoad.of({name: value for name, value in METRICS.items() if name != missing}) is None
    assert GenerationLoad.of({**METRICS, "perf/generation_share": 0.5}) is None, "colocated"


def test_merged_metrics_have_it_for_each_training_step(tmp_path: Path) -> None:
    def line(stem: str, **values: float) -> None:
        (tmp_path / "metrics").mkdir(exist_ok=True)
        told = {name.replace("__", "/"): value for name, value in values.items()}
        told |= {f"{name}.weight": 2.0 for name in told if name.endswith("_share")}
        (tmp_path / "metrics" / f"{stem}.jsonl").write_text(json.dumps({"step": 1, "term": 0, **told}) + "\n")

    line("trainer-0", timing_s__step=2.0, perf__trainer_idle_share=0.7, staleness__max=1)
    for number in range(3):
        shares = {"rollout_idle": 0.0, "generate": 1.0, "score": 0.0, "slots": 0.9, "batch": 0.0}
        line(f"rollout-{number}", **{f"perf__{name}_share": value for name, value in shares.items()})
    reader = MetricsReader(tmp_path)
    reader.read()
    (merged,) = reader.merged()
    assert merged[ONE_MORE] == pytest.approx(3 / 4 - 1), "three workers, by their time"
    assert ONE_MORE not in reader.window(1, 1, list(METRICS))


@pytest.mark.parametrize(
    "changes, now, expected",
    [
        (
            {},
            2,
            "one more rollout is predicted to make training steps 33% shorter (in simulations, such predictions are 2% "
            "off on average, and 14% at most): distflow scale mine rollout=3",
        ),
        (
            {"perf/trainer_idle_share": 0.06},
            1,
            "one more rollout is predicted to make training steps 6% shorter, less than predictions may be off",
        ),
        (
            {"perf/trainer_idle_share": 0.01},
            2,
            "one more rollout is predicted to make training steps hardly shorter (1%)",
        ),
        (
            {"perf/trainer_idle_share": 0.0, "perf/rollout_idle_share": 0.6, "perf/generate_share": 0.4},
            2,
            "one rollout fewer is predicted to make training steps hardly longer (0%), one more hardly shorter",
        ),
        (
            {"perf/trainer_idle_share": 0.0},
            1,
            "one more rollout is predicted to make training steps hardly shorter (0%)",
        ),
    ],
)
def test_it_is_said_in_one_line(changes: dict[str, float], now: int, expected: str) -> None:
    steps = [METRICS | changes, {"step": 2.0}, METRICS | changes]
    assert list(other_count(steps, "rollout", now, "mine")) == [expected]
    assert list(other_count([{"step": 1.0}], "rollout", now, "mine")) == []
