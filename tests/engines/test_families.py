"""The torch engine's cache: a shape for each layer, windows, and the states of recurrent layers."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from distflow.runtime.protocols import Engine, EngineSpec
from distflow.testing.engine_harness import FIRST, by_sample, reference_model, run_until_done
from distflow.types import BegunSample, SampleOutput, SampleRequest, SamplingParams
from distflow.workers.engines.torch_engine import TorchEngine
from distflow.workers.parameters import constants_of, stored_form
from tests.families import FAMILIES, VOCABULARY

SAMPLES = 24
SLOTS = 6
ABORTED, OFFLOADED = 9, 13
"""Polls before one group is aborted, and before the engine leaves its device for a while."""
KEPT = ("mistral", "gemma4_text", "deepseek_v3", "gpt_oss", "lfm2", "qwen3_5_text", "qwen3_next")
"""Families of each kind of layer: within windows, of several shapes, of keys wider than values, recurrent ones."""


def engine_of(family: str, slots: int) -> Engine:
    # Wide weights make the distributions uneven: near-uniform ones would hide mistakes.
    section: dict[str, Any] = {"init": {**FAMILIES[family], "initializer_range": 0.2}, "dtype": "float32"}
    model = reference_model(section, 0)
    engine = TorchEngine(EngineSpec(section, "cpu", slots, 64, 0, {}))
    engine.begin_update(FIRST)
    named = {name: tensor.detach() for name, tensor in (*model.named_parameters(), *constants_of(model).items())}
    stored = stored_form(model)
    engine.update(item for name in stored.tensors for item in stored.cut(name, named[name]))
    engine.end_update()
    return engine


def requests(seed: int) -> list[SampleRequest]:
    """Two samples of each prompt, all of random lengths."""
    drawn = random.Random(seed)
    prompts = [tuple(drawn.choices(range(VOCABULARY), k=drawn.randint(1, 12))) for _ in range(SAMPLES // 2)]
    return [
        SampleRequest(number // 2, number % 2, prompts[number // 2], 5, SamplingParams(max_new_tokens=length))
        for number, length in enumerate(drawn.choices(range(1, 13), k=SAMPLES))
    ]


def together(engine: Engine, asked: list[SampleRequest], drawn: random.Random) -> list[SampleOutput]:
    """The outputs of all, which join whenever there is room; one group is aborted and goes on later."""
    waiting, outputs, polls = list(asked), [], 0
    while waiting or engine.progress():
        for _ in range(min(drawn.randint(0, 3), len(waiting), engine.free_slots)):
            engine.submit([waiting.pop(0)])
        outputs += engine.poll()
        polls += 1
        if polls == ABORTED:
            gone = max(engine.progress(), key=lambda position: engine.progress()[position])
            for partial in engine.abort([gone]):
                had = BegunSample(partial.sample, partial.token_ids, partial.logprobs, partial.spans)
                (again,) = [one for one in asked if (one.position, one.sample) == (gone, partial.sample)]
                assert partial.token_ids, "the aborted sample has begun"
                waiting.append(replace(again, begun=had))
        if polls == OFFLOADED:
            engine.offload()
            engine.onload()
    return outputs


@pytest.mark.parametrize("family", KEPT)
def test_samples_that_join_and_leave_are_what_each_is_alone(family: str) -> None:
    asked = requests(len(family))
    found = by_sample(together(engine_of(family, SLOTS), asked, random.Random(3)))
    assert len(found) == SAMPLES
    single = engine_of(family, 1)
    for request in asked:
        single.submit([request])
        (alone,) = run_until_done(single)
        output = found[request.position, request.sample]
        assert output.token_ids == alone.token_ids, request
        np.testing.assert_allclose(output.logprobs, alone.logprobs, rtol=0, atol=1e-4)
