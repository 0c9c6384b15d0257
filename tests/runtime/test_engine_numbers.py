"""Log-probs as engines give them: which can be trained on, and what is said of the others."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from distflow.errors import WorkerFailed
from distflow.exchange.messages import Lease
from distflow.runtime.generate_step import SampleLimits
from distflow.runtime.metrics import MetricStore
from distflow.runtime.sample_errors import EngineNumbers, complaint, sound
from distflow.runtime.trajectories import Trajectories
from distflow.testing.fakes import FakeEngine
from distflow.types import VALIDATION, FinishedSample, LeaseKind, SampleOutput, Span, Uid, Version
from tests.runtime.kit import generate_step
from tests.runtime.test_trajectories import TOKENIZER

UID = Uid(0, 7, 12)
NAN, INF = float("nan"), float("inf")


def output(logprobs: Any, tokens: int = 2, position: int = 12, sample: int = 3) -> SampleOutput:
    return SampleOutput(position, sample, tuple(range(tokens)), logprobs, (Span(0, 4, 0, tokens),), "stop")


@pytest.mark.parametrize(
    ("logprobs", "wrong"),
    [
        ((-0.5, NAN), "nan as the log-prob of token 1 of 2"),
        ((INF, -0.5), "inf as the log-prob of token 0 of 2"),
        ((-0.5, -INF), "-inf as the log-prob of token 1 of 2"),
        ((-0.5, 0.01), "0.01 as the log-prob of token 1 of 2"),
        ((INF, -INF), "inf as the log-prob of token 0 of 2"),
        ((-0.5, None), "None as the log-prob of token 1 of 2"),
        ((-0.5, "-1"), "-1 as the log-prob of token 1 of 2"),
        ((-0.5,), "1 log-probs for 2 tokens"),
        ((-0.5, -0.5, -0.5), "3 log-probs for 2 tokens"),
        ((), "0 log-probs for 2 tokens"),
        (None, "no log-probs for 2 tokens"),
    ],
)
def test_what_is_no_log_prob_is_named_and_counted(logprobs: Any, wrong: str, caplog: pytest.LogCaptureFixture) -> None:
    metrics = MetricStore()
    numbers = EngineNumbers("engine mine on rollout/1", metrics)
    judged, why = numbers.judge(output(logprobs), UID, Version(1, 4))
    assert why == wrong
    assert judged.logprobs == (0.0, 0.0)
    assert metrics.counts() == {"engine/bad_logprobs": 1}
    assert f"engine mine on rollout/1, version 4 of term 1, gave {wrong}, in sample 3 of uid" in caplog.text
    assert "(0, 7, 12)" in caplog.text


@pytest.mark.parametrize("logprobs", [(-0.5, 0.0), (-1e4, -0.0), (-0.5, 1e-4), (5e-5, 3e-6)])
def test_rounding_may_exceed_certainty_a_little(logprobs: tuple[float, ...]) -> None:
    metrics = MetricStore()
    judged, why = EngineNumbers("mine", metrics).judge(output(logprobs), UID, None)
    assert not why
    assert judged.logprobs == tuple(min(value, 0.0) for value in logprobs)
    assert metrics.counts() == {}


def test_arrays_are_log_probs_too() -> None:
    judged, why = EngineNumbers("mine", MetricStore()).judge(output(np.array([-0.5, 5e-5])), UID, None)
    assert (judged.logprobs, why) == ((-0.5, 0.0), "")


def test_no_tokens_have_no_log_probs() -> None:
    assert complaint((), ()) == ""
    assert sound(output((), tokens=0)) == output((), tokens=0)


@pytest.mark.parametrize(("good", "bad"), [(94, 6), (0, 100)])
def test_too_many_end_the_run_with_engine_and_version(good: int, bad: int) -> None:
    numbers = EngineNumbers("engine mine on rollout/1", MetricStore())
    for _ in range(good):
        numbers.judge(output((-0.5, -0.5)), UID, Version(0, 2))
    for _ in range(bad - 1):
        numbers.judge(output((-0.5, NAN)), UID, Version(0, 2))
    with pytest.raises(
        WorkerFailed, match=rf"engine mine on rollout/1, version 2 of term 0: {bad} of its last 100 sam"
    ):
        numbers.judge(output((-0.5, NAN)), UID, Version(0, 2))


@pytest.mark.parametrize(("good", "bad"), [(95, 5), (0, 99), (1900, 50)])
def test_a_few_do_not(good: int, bad: int) -> None:
    numbers = EngineNumbers("mine", MetricStore())
    for number in range(good + bad):
        numbers.judge(output((-0.5, NAN) if number >= good else (-0.5, -0.5)), UID, None)


@pytest.mark.parametrize("position", [12, VALIDATION + 12])
def test_a_sample_that_is_left_out_is_not_trained_on(position: int) -> None:
    """Its siblings are; and what a running sample has of it goes to no other worker. Validation uses no log-probs."""
    limits: dict[LeaseKind, SampleLimits] = {"train": SampleLimits(2, 8, 8), "val": SampleLimits(2, 8, 8)}
    engine, samples = FakeEngine(), Trajectories(generate_step(), limits, TOKENIZER, torch.float32)
    engine.begin_update(Version(0, 1))
    engine.update([("weight", torch.zeros(2, 3)), ("bias", torch.zeros(2))])
    engine.end_update()
    samples.submit(
        engine, samples.begin([Lease(UID._replace(position=position), 0, position, 1, 7, (2, 3), "01", "{}", 0, 0)])
    )
    engine.poll()
    running = engine.partials()
    spoilt = [SampleOutput(position, 0, running[0].token_ids, (NAN,), running[0].spans, "abort"), running[1]]
    assert [(out.key, out.token_ids) for out in samples.partials(spoilt)] == [(running[1].key, running[1].token_ids)]
    done: list[FinishedSample] = []
    while len(done) < 2:
        found = [
            SampleOutput(position, 0, one.token_ids, (None,) * len(one.token_ids), one.spans, one.finish_reason)  # type: ignore[arg-type]
            if one.sample == 0
            else one
            for one in engine.poll()
        ]
        judged, wrong = samples.judge(found, engine.version)
        samples.leave_out(wrong)
        done += samples.take(judged)[1]
    batch = samples.batch([position])
    trained = [bool(row.any()) for row in batch.ragged("response_mask").rows()]
    assert trained == [position != 12, True]
    assert bool(batch.ragged("rollout_logprobs").values.isfinite().all())
    assert batch.texts("left_out") == ["unusable log-probs" if position == 12 else "", ""]
