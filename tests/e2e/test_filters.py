"""Filters of the sampler change no weight: without a word, masks by such weights would leave nothing to learn from."""

from __future__ import annotations

import pytest

from tests.e2e.runs import SMALL, Launch

ROUNDING = 1e-5
"""Some hundred times the float32 ε of a log-prob of a few nats: engine and trainer add up in another order."""


FILTERS = ("top_p=0.8", "top_k=6", "temperature=0.7", "min_p=0.02")
SHIFTS = ("repetition_penalty=1.1", "logit_bias={5: 0.5}", "min_new_tokens=2")
STOPS = ("7", "33")
LENGTHS = ("stop=['7','33']", "max_new_tokens=6")


def test_filters_shifts_and_stop_strings_change_no_weight(launch: Launch) -> None:
    """And a response ends with the first text of `stop`, behind `min_new_tokens`, that it has."""
    filters = [f"flow.steps.sample.with.{one}" for one in (*FILTERS, *SHIFTS, *LENGTHS)]
    correction = "flow.steps.update.with.correction={geometric_mask: [0.99, 1.01]}"
    run = launch("quickstart", "layout=colocated", *SMALL, *filters, correction, "run.training_steps=3")
    assert run.wait() == 0, run.output
    for metrics in run.metrics():
        assert metrics["actor/grad_norm"] > 0.01
        assert metrics["rollout_corr/ratio/mean"] == pytest.approx(1.0, abs=ROUNDING)
        assert metrics["rollout_corr/kept"] == pytest.approx(1.0, abs=ROUNDING)
        assert metrics["rollout_corr/kl"] == pytest.approx(0.0, abs=ROUNDING)
    ended = 0
    for line in run.dumps():
        tokens = line["response_ids"]
        assert 1 not in tokens[:2], "an end token came too early"
        texts = [_text(tokens[:count]) for count in range(len(tokens) + 1)]
        stops = [count for count in range(3, len(texts)) if texts[count] > texts[2] and texts[count].endswith(STOPS)]
        assert stops in ([], [len(tokens)])
        stop = next(stop for stop in (*STOPS, "") if texts[-1].endswith(stop)) if stops else ""
        assert line["response"] == texts[-1].removesuffix(stop)
        ended += bool(stops)
    assert ended > 5


def _text(tokens: list[int]) -> str:
    return "".join("0123456789="[token - 2] for token in tokens if token > 1)
