"""Under `run.deterministic` a sample's log-probs are the same to the last bit in any batch.

In the engine as in training, which compute the very same ones.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from distflow.data.batch import Batch, Ragged
from distflow.errors import UserError
from distflow.runtime.protocols import BackendSpec, EngineSpec
from distflow.testing.backend_contract import tiny_model
from distflow.testing.engine_harness import FIRST, WholeGroup, run_until_done, submit
from distflow.types import BegunSample, SampleOutput, SamplingParams, Span
from distflow.workers import batch_invariant
from distflow.workers.backends import scoring
from distflow.workers.backends.torch_backend import TorchBackend
from distflow.workers.engines.torch_engine import TorchEngine

# The quickstart's model, but with weights large enough for both likely and unlikely tokens.
QWEN2 = {
    "model_type": "qwen2",
    "hidden_size": 64,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "max_position_embeddings": 256,
    "initializer_range": 0.3,
}
QWEN3 = {**QWEN2, "model_type": "qwen3", "hidden_size": 96, "head_dim": 20, "intermediate_size": 304}
QWEN3 |= {"num_attention_heads": 6, "tie_word_embeddings": False}
LLAMA = {**QWEN2, "model_type": "llama", "num_key_value_heads": 4, "hidden_size": 256}
MODELS = [
    pytest.param(QWEN2, "float32", 1, id="qwen2"),
    pytest.param(QWEN2, "float32", 2, id="qwen2, 2 threads", marks=pytest.mark.long),
    pytest.param(QWEN3, "float32", 1, id="qwen3"),
    pytest.param(LLAMA, "float32", 1, id="llama"),
    pytest.param(LLAMA, "float64", 1, id="llama, float64"),
]
DYNAMIC = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}
VOCABULARY = 13
Rows = dict[tuple[int, int], list[Tensor]]
Outputs = dict[tuple[int, int], SampleOutput]


@pytest.fixture
def threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


class Recorded(TorchEngine):
    """Records the logits that each token was drawn from."""

    def __init__(self, spec: EngineSpec) -> None:
        super().__init__(spec)
        self.rows: Rows = {}
        draw = self.sampler.draw

        def recording(logits_NV: Tensor, **settings: bool) -> tuple[Tensor, Tensor]:
            for sample, row in zip(self.schedule.running, logits_NV, strict=True):
                self.rows.setdefault((sample.request.position, sample.request.sample), []).append(row.clone())
            return draw(logits_NV, **settings)

        self.sampler.draw = recording  # type: ignore[method-assign]


def requests(seed: int, count: int) -> list[WholeGroup]:
    drawn = random.Random(seed)
    lengths, news = [1, 2, 3, 5, 7, 15, 16, 17, 31, 33, 60], [1, 3, 9, 20, 40]
    return [
        WholeGroup(
            position,
            tuple(drawn.randrange(2, VOCABULARY) for _ in range(drawn.choice(lengths))),
            drawn.choice([1, 2, 4, 8]),
            seed,
            SamplingParams(max_new_tokens=drawn.choice(news), temperature=drawn.choice([1.0, 0.7])),
        )
        for position in range(count)
    ]


class Machine:
    """A backend, and engines with its weights."""

    def __init__(self, init: dict[str, Any], dtype: str) -> None:
        self.model = tiny_model(init=init, dtype=dtype)
        self.backend = self.trainer(packed=True)

    def trainer(self, *, packed: bool) -> TorchBackend:
        return TorchBackend(BackendSpec(self.model, "cpu", True, 0, 10, {"packed": packed}, deterministic=True))

    def engine(self, slots: int) -> Recorded:
        engine = Recorded(EngineSpec(self.model, "cpu", slots, 120, 0, {}, deterministic=True))
        engine.begin_update(FIRST)
        engine.update(self.backend.named_shards())
        engine.end_update()
        return engine

    def generate(self, slots: int, wanted: Sequence[WholeGroup], polls: int = 0) -> tuple[Rows, list[SampleOutput]]:
        """All at once, or each `polls` polls after the previous one."""
        engine = self.engine(slots)
        outputs: list[SampleOutput] = []
        for request in wanted:
            submit(engine, [request])
            outputs += [output for _ in range(polls) for output in engine.poll()]
        outputs += run_until_done(engine)
        return engine.rows, outputs


def differing(found: Rows, expected: Rows) -> list[str]:
    return [
        f"{key}, token {len(expected[key]) - len(rows) + place}"
        for key, rows in found.items()
        for place, (row, other) in enumerate(zip(rows, expected[key][-len(rows) :], strict=True))
        if not torch.equal(row, other)
    ]


def continued(request: WholeGroup, outputs: Outputs, drawn: random.Random) -> WholeGroup:
    """As if another engine had begun some of its samples."""
    begun = []
    for number in range(request.samples):
        output = outputs[request.position, number]
        count = drawn.randrange(len(output.token_ids))
        spans = (Span(0, 0, 0, count),) if count else ()
        begun.append(BegunSample(number, output.token_ids[:count], output.logprobs[:count], spans))
    return replace(request, begun=tuple(begun))


def batch_of(samples: Sequence[tuple[WholeGroup, SampleOutput]]) -> Batch:
    return Batch(
        {
            "prompt_ids": Ragged.from_rows([request.prompt_ids for request, _ in samples], torch.int64),
            "response_ids": Ragged.from_rows([output.token_ids for _, output in samples], torch.int64),
        }
    )


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize(("init", "dtype", "threads_used"), MODELS)
def test_logits_are_the_same_to_the_last_bit_wherever_they_are_computed(
    init: dict[str, Any], dtype: str, threads_used: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.set_num_threads(threads_used)
    # In float64 attention takes 512 keys at a time.
    machine, wanted, drawn = Machine(init, dtype), requests(3, 12 if dtype == "float32" else 5), random.Random(1)
    expected, outputs = machine.generate(128, wanted)
    by_sample = {(output.position, output.sample): output for output in outputs}
    assert len(by_sample) == sum(request.samples for request in wanted)
    # In other batches, in other slots, alone, continued by another engine.
    for slots, order, polls in ((128, wanted[::-1], 0), (9, wanted, 0), (40, drawn.sample(wanted, len(wanted)), 3)):
        rows, again = machine.generate(slots, order, polls)
        assert differing(rows, expected) == []
        assert {(output.position, output.sample): output for output in again} == by_sample
    for request in wanted[:3]:
        assert differing(machine.generate(8, [request])[0], expected) == []
    rows, again = machine.generate(64, [continued(request, by_sample, drawn) for request in wanted])
    assert differing(rows, expected) == []
    assert {(output.position, output.sample): output for output in again} == by_sample
    # In training, in micro-batches of any size.
    kept: list[Tensor] = []
    scores = scoring.candidate_scores

    def recording(logits_NV: Tensor, *rest: Any, **settings: Any) -> tuple[Tensor, Tensor | None, Tensor | None]:
        kept.append(logits_NV.detach().clone())
        return scores(logits_NV, *rest, **settings)

    monkeypatch.setattr(scoring, "candidate_scores", recording)
    samples = [(request, by_sample[request.position, n]) for request in wanted for n in range(request.samples)]
    for packed, size in ((True, 200), (True, 7), (True, 1), (False, 200), (False, 7)):
        trainer = machine.trainer(packed=packed)
        for first in range(0, len(samples) if size > 1 else 9, size):
            part = samples[first : first + size]
            trainer.score(batch_of(part), temperature=1.0, grad=True, entropy=True)
            rows_NV = torch.cat([torch.stack(expected[out.position, out.sample]) for _, out in part])
            assert torch.equal(kept.pop(), rows_NV), f"packed {packed}, rows {first} …"


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_log_probs_are_those_that_training_computes(temperature: float) -> None:
    """So the measured mismatch between engine and trainer is exactly 0."""
    machine = Machine(QWEN2, "float32")
    wanted = [replace(r, params=replace(r.params, temperature=temperature)) for r in requests(4, 10)]
    # Samples that are drawn from a part of the vocabulary run in the same batch.
    params = SamplingParams(max_new_tokens=30, top_k=3, temperature=0.5)
    beside = [WholeGroup(100 + position, (3, 4), 4, 0, params) for position in range(4)]
    _, outputs = machine.generate(64, [*beside, *wanted])
    outputs = [output for output in outputs if output.position < 100]
    by_position = {request.position: request for request in wanted}
    samples = [(by_position[output.position], output) for output in outputs]
    scores = machine.backend.score(batch_of(samples), temperature=temperature, grad=False, entropy=False)
    assert scores.logprobs_BT[scores.mask_BT].tolist() == [p for output in outputs for p in output.logprobs]


@pytest.mark.usefixtures("threads")
def test_activations_do_not_depend_on_how_threads_divide_the_rows() -> None:
    torch.set_num_threads(3)
    x = torch.randn(3001, 304, generator=torch.Generator().manual_seed(0)) * 4
    activation = batch_invariant.InvariantActivation(F.silu)
    whole = activation(x)
    for rows in (1, 100, 109, 217, 325, 1001, 2999):
        assert torch.equal(activation(x[:rows]), whole[:rows])
    torch.testing.assert_close(whole, F.silu(x))


@pytest.mark.parametrize("part", ["product", "_attend"])
def test_a_machine_whose_kernels_look_at_the_batch_is_refused(part: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not only through its results: the worker does not start."""

    def plain(x: Tensor, *rest: Any) -> Tensor:
        result: Tensor = computed(x, *rest)
        return result * (1.0 + x.shape[-2] * 1e-3)

    computed = getattr(batch_invariant, part)
    monkeypatch.setattr(batch_invariant, part, plain)
    batch_invariant._agreed_widths.cache_clear()
    what = "products with" if part == "product" else "attention over heads of 16"
    message = rf"run.deterministic: on this machine {what}.* in float32 and \d threads depend on the rest of the batch"
    with pytest.raises(UserError, match=message):
        Machine(QWEN2, "float32")


@pytest.mark.parametrize(
    ("init", "message"),
    [
        ({"model_type": "gemma2", "head_dim": 4}, "model_type 'gemma2' is not computed batch-invariantly, only "),
        (
            {**QWEN2, "rope_parameters": DYNAMIC},
            "rotary embeddings of type 'dynamic' depend on the longest row of a batch",
        ),
        ({**QWEN2, "model_type": "mistral", "sliding_window": 8}, "sliding windows .* set sliding_window to null"),
    ],
)
def test_models_whose_rows_depend_on_each_other_are_refused(init: dict[str, Any], message: str) -> None:
    model = tiny_model(init=init, dtype="float32")
    with pytest.raises(UserError, match=f"run.deterministic: .*{message}"):
        TorchEngine(EngineSpec(model, "cpu", 4, 32, 0, {}, deterministic=True))
    with pytest.raises(UserError, match=message):
        TorchBackend(BackendSpec(model, "cpu", True, 0, 10, {}, deterministic=True))


def test_the_decoder_of_transformers_is_refused() -> None:
    spec = EngineSpec(tiny_model(init=QWEN2), "cpu", 4, 32, 0, {"decoder": "module"}, deterministic=True)
    with pytest.raises(UserError, match="decoder 'module' is not batch-invariant: run.deterministic needs auto"):
        TorchEngine(spec)
