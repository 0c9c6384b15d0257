import math
from typing import Any

import numpy as np
import torch

from distflow.runtime.checkpoint.format import put_together
from distflow.runtime.protocols import Backend, Engine
from distflow.testing.engine_contract import EngineContract
from distflow.testing.engine_harness import Probs, WholeGroup, by_sample, run_until_done, submit
from distflow.testing.fakes import SHAPES, FakeBackend, FakeEngine
from distflow.types import SampleOutput, SampleRequest, SamplingParams, Version


class TestFakeEngine(EngineContract):
    """The whole suite: every token is equally likely, whatever the settings, so filters have nothing to filter."""

    exact = False
    tolerance = 1e-9
    vocabulary = 12

    def make_engine(self, *, slots: int = 16, max_tokens: int = 64) -> Engine:
        return FakeEngine(slots=slots, max_tokens=max_tokens, vocabulary=self.vocabulary)

    def reference(self, number: int) -> Any:
        model = torch.nn.Linear(3, 2)
        assert {name: tuple(p.shape) for name, p in model.named_parameters()} == SHAPES
        return model

    def logits(self, number: int, tokens: Any) -> list[list[float]]:
        return [[0.0] * self.vocabulary for _ in tokens]

    def expected(self, number: int, request: WholeGroup | SampleRequest, output: SampleOutput) -> list[Probs]:
        return [np.full(self.vocabulary, math.exp(-0.1 * number) / self.vocabulary) for _ in output.token_ids]


def test_the_pace_is_tokens_per_poll() -> None:
    lengths = []
    for pace in (1, 3):
        engine = FakeEngine(pace=pace)
        engine.begin_update(Version(0, 0))
        engine.update((name, torch.zeros(shape)) for name, shape in SHAPES.items())
        engine.end_update()
        submit(engine, [WholeGroup(0, (1,), 2, seed=1, params=SamplingParams(max_new_tokens=7))])
        polls = 0
        while engine.progress():
            engine.poll()
            polls += 1
        lengths.append(polls)
    assert lengths == [7, 3]


def test_a_sample_depends_on_its_request_alone() -> None:
    outputs = []
    for slots in (2, 9):
        engine = FakeEngine(slots=slots, pace=2)
        engine.begin_update(Version(0, 0))
        engine.update((name, torch.zeros(shape)) for name, shape in SHAPES.items())
        engine.end_update()
        submit(engine, [WholeGroup(p, (1,), 3, seed=1, params=SamplingParams(max_new_tokens=5)) for p in range(3)])
        outputs.append(by_sample(run_until_done(engine)))
    assert outputs[0] == outputs[1]


def test_the_fake_backend_is_a_backend() -> None:
    backend = FakeBackend()
    assert isinstance(backend, Backend)
    assert backend.apply(4.0) == 1.0
    other = FakeBackend()
    other.load_state(put_together(backend.state_shards()))
    assert (other.steps, other.learning_rate) == (1, 0.5)
    assert backend.events == [("apply", 4.0)]
