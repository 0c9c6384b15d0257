"""The torch engine under the contract suite: both decoders, on the CPU, and on a GPU if there is one."""

import json
import math
from functools import cache

import pytest
import torch

from distflow.errors import UserError
from distflow.runtime.protocols import Engine, EngineSpec
from distflow.testing.engine_contract import SECOND, EngineContract
from distflow.testing.engine_harness import FIRST, reference_model, run_until_done, submit
from distflow.workers.engines.kernels import is_reordered
from distflow.workers.engines.llama_decoder import LlamaDecoder
from distflow.workers.engines.module_decoder import ModuleDecoder
from distflow.workers.engines.torch_engine import TorchEngine

VOCABULARY = 23
SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 128,
    # Wide weights make the distributions uneven: near-uniform ones would hide mistakes.
    "initializer_range": 0.3,
}
QWEN2 = {"model_type": "qwen2", **SIZES, "num_key_value_heads": 2, "tie_word_embeddings": True}
WIDE = {**QWEN2, "hidden_size": 256, "intermediate_size": 256, "initializer_range": 0.08}
LLAMA = {"model_type": "llama", **SIZES, "num_key_value_heads": 1, "tie_word_embeddings": False, "mlp_bias": True}
QWEN3 = {"model_type": "qwen3", **SIZES, "num_key_value_heads": 1, "head_dim": 16}
MISTRAL = {"model_type": "mistral", **SIZES, "num_key_value_heads": 2, "sliding_window": 4}
GEMMA2 = {"model_type": "gemma2", **SIZES, "num_key_value_heads": 2, "head_dim": 8, "sliding_window": 4}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 100.0,
    "factor": 2.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
YARN_ROPE = {"rope_type": "yarn", "rope_theta": 100.0, "factor": 2.0, "original_max_position_embeddings": 64}
DYNAMIC_ROPE = {"rope_type": "dynamic", "rope_theta": 100.0, "factor": 2.0}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "num_key_value_heads": 2}
QWEN3_MOE = {"model_type": "qwen3_moe", **SIZES, **EXPERTS, "head_dim": 8}
QWEN2_MOE = {"model_type": "qwen2_moe", **SIZES, **EXPERTS, "shared_expert_intermediate_size": 40}
GPT2 = {"model_type": "gpt2", "vocab_size": VOCABULARY, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 128}
STEPS = {"float64": (1e-9, True), "float32": (1e-4, False)}


@cache
def reference(init: str, dtype: str, number: int) -> torch.nn.Module:
    return reference_model({"init": json.loads(init), "dtype": dtype}, number)


class TorchContract(EngineContract):
    vocabulary = VOCABULARY
    init = QWEN2
    dtype = "float64"
    device = "cpu"
    decoder = "auto"
    tells_filtered = True

    @property
    def tolerance(self):
        return STEPS[self.dtype][0]

    @property
    def exact(self):
        return STEPS[self.dtype][1]

    def make_engine(self, *, slots: int = 16, max_tokens: int = 64) -> Engine:
        model = {"path": None, "init": self.init, "tokenizer": None, "dtype": self.dtype}
        options = {"decoder": self.decoder}
        return TorchEngine(EngineSpec(model, self.device, slots, max_tokens, 0, options, filtered_logprobs=True))

    def reference(self, number: int):
        return reference(json.dumps(self.init), self.dtype, number)


class TestQwen2(TorchContract):
    def test_is_an_engine_with_the_lean_decoder(self):
        engine = self.make_engine()
        assert isinstance(engine, Engine)
        assert isinstance(engine.decoder, LlamaDecoder)


class TestQwen2Float32(TorchContract):
    dtype = "float32"


class TestWideQwen2Float32(TorchContract):
    """Its matrices are large enough to be reordered; new weights must reach the copies."""

    init = WIDE
    dtype = "float32"

    def test_its_matrices_are_reordered(self):
        decoder = self.make_engine().decoder
        assert isinstance(decoder, LlamaDecoder)
        assert all(is_reordered(product.weight_NK) for product in decoder.layers[0].products)


class TestLlama(TorchContract):
    init = LLAMA


class TestLlamaFloat32(TorchContract):
    init = LLAMA
    dtype = "float32"


class TestQwen2ThroughTheModule(TorchContract):
    decoder = "module"

    def test_decoder(self):
        assert isinstance(self.make_engine().decoder, ModuleDecoder)


@pytest.mark.parametrize(
    "init, decoder, dtype",
    [
        (QWEN3, LlamaDecoder, "float64"),
        ({**LLAMA, "rope_parameters": LLAMA3_ROPE}, LlamaDecoder, "float64"),
        ({**QWEN2, "rope_parameters": {**YARN_ROPE}}, LlamaDecoder, "float64"),
        ({**MISTRAL, "sliding_window": None}, LlamaDecoder, "float64"),
        (MISTRAL, ModuleDecoder, "float64"),
        (GEMMA2, ModuleDecoder, "float32"),
        (GPT2, ModuleDecoder, "float64"),
        ({**LLAMA, "rope_parameters": DYNAMIC_ROPE}, ModuleDecoder, "float64"),
        (QWEN3_MOE, ModuleDecoder, "float32"),
        (QWEN2_MOE, ModuleDecoder, "float32"),
    ],
    ids=[
        *("qwen3", "llama3-rope", "yarn-rope", "mistral", "mistral-window", "gemma2", "gpt2", "dynamic-rope"),
        *("qwen3-moe", "qwen2-moe"),
    ],
)
def test_other_families(init, decoder, dtype):
    contract = TorchContract()
    contract.init, contract.dtype = init, dtype
    assert type(contract.make_engine().decoder) is decoder
    contract.test_many_groups_through_few_slots()
    contract.test_same_tokens_in_any_batch()
    contract.test_new_weights_between_groups()


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision_runs(dtype):
    contract = TorchContract()
    contract.dtype = "float32"
    weights = list(contract.reference(0).named_parameters())
    contract.dtype = dtype
    engine = contract.make_engine()
    engine.begin_update(FIRST)
    engine.update(weights)
    engine.end_update()
    submit(engine, [contract.request(p, max_new_tokens=5) for p in range(6)])
    outputs = run_until_done(engine)
    assert len(outputs) == 24
    contract.dtype = "float32"
    for output in outputs:
        expected = contract.expected(0, contract.request(output.position, max_new_tokens=5), output)
        wanted = [math.log(probs[token]) for probs, token in zip(expected, output.token_ids, strict=True)]
        assert output.logprobs == pytest.approx(wanted, abs=0.5)


def test_tied_weights_may_come_once_under_either_name():
    contract = TorchContract()
    parameters = dict(contract.reference(0).named_parameters())
    assert "lm_head.weight" not in parameters
    parameters["lm_head.weight"] = parameters.pop("model.embed_tokens.weight")
    engine = contract.make_engine()
    engine.begin_update(FIRST)
    engine.update(parameters.items())
    engine.end_update()
    request = contract.request(3, max_new_tokens=4)
    submit(engine, [request])
    for output in run_until_done(engine):
        contract.check(request, output)


def test_a_new_update_gives_up_the_one_under_way():
    contract = TorchContract()
    engine = contract.ready()
    engine.begin_update(SECOND)
    engine.update(list(contract.reference(1).named_parameters())[:3])
    engine.begin_update(SECOND)
    with pytest.raises(ValueError, match="the engine cannot serve it"):
        engine.end_update()
    contract.load(engine, 1, SECOND)
    assert engine.version == SECOND


def test_fused_experts_are_refused_by_name():
    """transformers fuses tensors that no checkpoint contains; publishing them would fail with other engines."""
    contract = TorchContract()
    contract.init = QWEN3_MOE
    engine = contract.make_engine()
    engine.begin_update(FIRST)
    with pytest.raises(KeyError, match=r"this model stores no tensor '.*experts\.gate_up_proj'; its tensors are"):
        engine.update((name, parameter.detach()) for name, parameter in contract.reference(0).named_parameters())


def test_an_expert_that_is_missing_is_named():
    contract = TorchContract()
    contract.init = QWEN3_MOE
    lost = "model.layers.1.mlp.experts.3.up_proj.weight"
    engine = contract.make_engine()
    engine.begin_update(FIRST)
    engine.update((name, tensor) for name, tensor in contract.weights(0) if name != lost)
    with pytest.raises(ValueError, match=rf"lacks 1 of 45 tensors, for example {lost}"):
        engine.end_update()


def test_nothing_of_a_new_engine_is_left_unwritten():
    """Weights start as NaN: any NaN left or published by the first complete version is named."""
    contract = TorchContract()
    engine = contract.make_engine()
    assert all(parameter.isnan().all() for parameter in engine.model.parameters())
    name = "model.layers.0.mlp.down_proj.weight"
    broken = [(key, tensor.clone()) for key, tensor in contract.weights(0)]
    dict(broken)[name][3, 5] = math.nan
    engine.begin_update(FIRST)
    engine.update(broken)
    with pytest.raises(ValueError, match=rf"1 of 26 parameters contain NaN after a complete version.*{name}"):
        engine.end_update()
    assert engine.version is None


def test_an_engine_that_was_away_before_its_first_version_begins_with_nan_too():
    contract = TorchContract()
    engine = contract.make_engine()
    engine.offload()
    engine.onload()
    assert all(parameter.isnan().all() for parameter in engine.model.parameters())
    contract.load(engine, 0, FIRST)
    assert engine.version == FIRST


def test_updates_outside_an_update_are_refused():
    engine = TorchContract().make_engine()
    with pytest.raises(ValueError, match="outside begin_update"):
        engine.update([])
    with pytest.raises(ValueError, match="without begin_update"):
        engine.end_update()


def test_a_prompt_longer_than_the_prefill_budget_is_read_alone():
    contract = TorchContract()
    model = {"init": QWEN2, "dtype": "float64"}
    engine = TorchEngine(EngineSpec(model, "cpu", 16, 64, 0, {"prefill_tokens": 1}))
    contract.load(engine, 0, FIRST)
    requests = [contract.request(p, max_new_tokens=2) for p in range(4)]
    submit(engine, requests)
    engine.poll()
    assert [tokens for _, tokens in sorted(engine.progress().items())] == [4, 0, 0, 0]
    for output in run_until_done(engine):
        contract.check(requests[output.position], output)


@pytest.mark.parametrize(
    "options, message",
    [
        ({"prefil_tokens": 3}, "prefil_tokens 3: engine torch has no such option — did you mean 'prefill_tokens'"),
        ({"prefill_tokens": 0}, "prefill_tokens 0: expected 1 or more"),
        ({"decoder": "fast"}, "decoder 'fast': expected auto or module"),
    ],
)
def test_wrong_options(options, message):
    with pytest.raises(UserError, match=message):
        TorchEngine(EngineSpec({"init": QWEN2, "dtype": "float32"}, "cpu", 4, 0, 0, options))


def test_slots_longer_than_the_model():
    with pytest.raises(UserError, match=r"slots of 129 tokens .* longer than the model's 128 positions"):
        TorchContract().make_engine(max_tokens=129)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
class TestQwen2Gpu(TorchContract):
    device = "cuda:0"
    # Rotary tables are computed in float32 on either device, and differ in the last bit.
    tolerance = 1e-5


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
class TestLlamaFloat32Gpu(TorchContract):
    init = LLAMA
    dtype = "float32"
    device = "cuda:0"
