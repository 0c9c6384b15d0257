"""Filters of the sampler change no weight: without a word, masks by such weights would leave nothing to learn from."""

from __future__ import annotations

import pytest

from tests.e2e.runs import SMALL, Launch

ROUNDING = 1e-5
"""Some hundred times the float32 ε of a log-prob of a few nats: engine and trainer add up in another order."""


def test_filters_change_no_weight(launch: Launch) -> None:
    filters = [f"flow.steps.sample.with.{one}" for one in ("top_p=0.8", "top_k=6", "temperature=0.7")]
    correction = "flow.steps.update.with.correction={geometric_mask: [0.99, 1.01]}"
    run = launch("quickstart", "layout=colocated", *SMALL, *filters, correction, "run.training_steps=3")
    assert run.wait() == 0, run.output
    for metrics in run.metrics():
        assert metrics["actor/grad_norm"] > 0.01
        assert metrics["rollout_corr/ratio/mean"] == pytest.approx(1.0, abs=ROUNDING)
        assert metrics["rollout_corr/kept"] == pytest.approx(1.0, abs=ROUNDING)
        assert metrics["rollout_corr/kl"] == pytest.approx(0.0, abs=ROUNDING)
