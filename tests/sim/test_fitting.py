"""Latency models are recovered from times that follow them, and say how far off they are from those that do not."""

from __future__ import annotations

import pytest

from distflow.parts import unshared
from distflow.sim.fitting import fit_decode, fit_training
from distflow.sim.latency import DecodeLatency, TrainLatency
from distflow.sim.profiling import DecodeTime, TrainTime

BATCHES = (1, 2, 4, 8, 16, 32, 64)


@pytest.mark.parametrize("true", [DecodeLatency(0.008, 0.0005, 2e-7, 1e-4), DecodeLatency(0.008, 0.0, 0.0, 0.0)])
def test_the_roofline_of_decoding_is_found(true: DecodeLatency) -> None:
    steps = [DecodeTime(b, c, true.seconds(b, c)) for b in BATCHES for c in (10.0, 500.0)]
    found, error = fit_decode(steps, [(tokens, tokens * true.prefill_s) for tokens in (100, 1000)])
    assert error.worst < 0.01
    assert found.floor_s == pytest.approx(true.floor_s, rel=0.01)
    assert found.seconds(64, 300) == pytest.approx(true.seconds(64, 300), rel=0.01)
    assert found.prefill_s == pytest.approx(true.prefill_s)


def test_tokens_and_pairs_of_training_are_told_apart() -> None:
    true = TrainLatency(1e-4, 1e-8, 0.01, 0.5)
    batches = [(length,) * rows for length in (16, 128, 1024) for rows in (1, 8)]
    found, error = fit_training([TrainTime(unshared(rows), true.seconds(rows)) for rows in batches], 0.5)
    assert (found.token_s, found.pair_s, found.latency_s) == pytest.approx((1e-4, 1e-8, 0.01))
    assert found.apply_s == 0.5
    assert error.worst < 1e-6


def test_no_coefficient_is_negative_and_what_does_not_fit_is_told() -> None:
    falling = [TrainTime(unshared((length,)), 1.0 / length) for length in (10, 100)]
    found, error = fit_training(falling, 0.0)
    assert min(found.token_s, found.pair_s, found.latency_s) >= 0.0
    assert error.worst > 0.5
