"""What the samples of a batch add to a decode step: the fit, and what a look at an engine tells."""

from __future__ import annotations

import pytest

from distflow.metrics.batch_cost import BatchCost, BatchMeter
from distflow.types import SampleOutput


def test_the_line_through_steps_of_several_sizes_is_found() -> None:
    cost = BatchCost()
    for samples, steps in ((1, 10), (3, 10)):
        cost.add(samples, steps, steps * (0.5 + 0.5 * samples))
    assert cost.share == pytest.approx(2 / 3)
    flat = BatchCost()
    for samples in (1, 30):
        flat.add(samples, 10, 5.0)
    assert flat.share == 0.0


def test_sums_of_several_engines_and_of_a_while_are_sums() -> None:
    parts = [BatchCost(), BatchCost()]
    parts[0].add(1, 10, 10.0)
    parts[1].add(3, 10, 20.0)
    both = BatchCost.of(parts)
    assert both.share == pytest.approx(2 / 3)
    assert both.since(parts[0]) == parts[1]
    assert both.faded(0.5).share == both.share


def test_batches_that_hardly_differ_tell_nothing() -> None:
    cost = BatchCost()
    for samples in (20, 21):
        cost.add(samples, 10, 10.0 * samples)
    assert cost.share == BatchCost().share == 0.0


def output(position: int, sample: int, tokens: int) -> SampleOutput:
    return SampleOutput(position, sample, (1,) * tokens, (0.0,) * tokens, (), "stop")


def test_tokens_are_counted_of_samples_that_stay_and_of_those_that_leave() -> None:
    """0.2 s and 0.1 s a sample for a step; groups of two samples, 12 steps long, then a single sample for 40."""
    meter, had = BatchMeter(), 0
    meter.look(2, 0.0, {0: 6}, [])
    for step in range(1, 13):
        there = {} if step == 12 else {0: 6 + 2 * step}
        left = [output(0, sample, 15) for sample in range(2)] if step == 12 else []
        meter.look(2, 0.4, there, left)
    assert meter.share == 0.0, "all batches were alike"
    meter.look(1, 0.0, {7: 100}, [])
    for had in range(101, 141):
        meter.look(1, 0.3, {7: had}, [])
    # 52 steps of 64 samples in 16.8 s: 0.1 s for each sample.
    assert meter.share == pytest.approx(6.4 / 16.8, rel=0.05)
    assert had == 140


def test_what_a_group_came_with_is_not_taken_for_made() -> None:
    """Continued samples come with thousands of tokens, and given up ones leave with none."""
    meter = BatchMeter()
    for number in range(200):
        samples = 1 + number % 2 * 9
        meter.look(samples, 1.0, {number: 5_000}, [])
        meter.look(samples, 1.0, {number: 5_000 + 10 * samples, number - 1: 7}, [])
    # As many steps a second with one sample as with ten.
    assert meter.share == pytest.approx(0.0, abs=0.05)
