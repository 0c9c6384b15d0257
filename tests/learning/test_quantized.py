"""Base weights of 4 bits: the numbers of NF4, and one base for trainers, references, engines, exports."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from distflow.runtime.protocols import Adapted, Backend, BackendSpec, EngineSpec
from distflow.runtime.weight_publisher import Canaries
from distflow.testing.backend_contract import ragged_batch, taken, tiny_model
from distflow.types import Version
from distflow.workers.backends.torch_backend import TorchBackend
from distflow.workers.engines.torch_engine import TorchEngine
from distflow.workers.exporting import export_model
from distflow.workers.merging import stage_base
from distflow.workers.models import build_model
from distflow.workers.quantized import BLOCK, QUANTILES, NarrowLinear, narrow_layers, narrowed, widened

LORA = {"rank": 2, "alpha": 8.0, "targets": ["q_proj", "down_proj"]}
ROWS = ((3, 4, 5, 6, 7, 8), (5, 6, 7, 8, 9, 2))
DTYPES = ("float32", "float64", "bfloat16")


def drawn(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(1)).to(dtype)


def section(dtype: str = "float32", **changes: Any) -> dict[str, Any]:
    path = changes.pop("path", None)
    found = tiny_model(dtype=dtype, **{"lora": LORA, "quantize": "nf4", "init": {"num_hidden_layers": 2}, **changes})
    return found if path is None else {**found, "path": path, "init": None}


def backend(model: Mapping[str, Any], *, trainable: bool = True) -> TorchBackend:
    return TorchBackend(BackendSpec(model, "cpu", trainable, 7, 10, {}))


def logprobs(one: Backend) -> Tensor:
    return one.score(ragged_batch(), temperature=1.0, grad=False, entropy=False).logprobs_BT


def step(one: Backend) -> float:
    scores = one.score(ragged_batch(), temperature=1.0, grad=True, entropy=False)
    one.accumulate(-scores.logprobs_BT.sum())
    return one.apply(35.0)


@pytest.mark.parametrize("shape", [(64, 64), (13, 64), (65, 7), (3, 5)])
def test_weights_become_the_nearest_quantiles_of_their_block(shape: tuple[int, int]) -> None:
    weight = drawn(*shape)
    packed, scales = narrowed(weight)
    found = widened(packed, scales, weight.shape, weight.dtype).flatten().tolist()
    assert packed.dtype == torch.uint8
    assert len(packed) * 2 == len(scales) * BLOCK == -(-weight.numel() // BLOCK) * BLOCK
    values = weight.flatten().tolist()
    for first in range(0, len(values), BLOCK):
        block = values[first : first + BLOCK]
        scale = max(map(abs, block))
        nearest = [scale * min(QUANTILES, key=lambda q, x=value, s=scale: abs(x / s - q)) for value in block]
        assert found[first : first + BLOCK] == pytest.approx(nearest, rel=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_numbers_are_those_of_bitsandbytes(dtype: torch.dtype) -> None:
    functional = pytest.importorskip("bitsandbytes.functional")
    weight = drawn(48, 64, dtype=dtype)
    packed, state = functional.quantize_4bit(weight, quant_type="nf4", blocksize=BLOCK)
    ours, scales = narrowed(weight)
    assert ours.equal(packed.flatten())
    assert scales.equal(state.absmax)
    assert widened(ours, scales, weight.shape, dtype).equal(functional.dequantize_4bit(packed, state))


def test_zeros_stay_zeros() -> None:
    weight = torch.zeros(2, 96)
    weight[1] = drawn(96)
    found = widened(*narrowed(weight), weight.shape, weight.dtype)
    assert not found[0, :64].any()
    assert bool(found[1].isfinite().all())


@pytest.mark.parametrize("bias", [False, True])
def test_a_layer_computes_as_one_with_the_rounded_weights(bias: bool) -> None:
    plain = nn.Linear(12, 10, bias=bias).requires_grad_(False)
    narrow = NarrowLinear(plain)
    with torch.no_grad():
        plain.weight.copy_(narrow.weight)
    slopes = []
    for layer in (plain, narrow):
        x = drawn(2, 3, 12).requires_grad_()
        y = layer(x)
        (slope,) = torch.autograd.grad(y.square().sum(), x)
        slopes.append((y.detach(), slope))
    assert slopes[0][0].equal(slopes[1][0])
    torch.testing.assert_close(slopes[0][1], slopes[1][1])


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_base_is_rounded_once_and_the_same_for_all(dtype: str) -> None:
    pytest.importorskip("peft")
    one, frozen = backend(section(dtype)), backend(section(dtype, lora=None), trainable=False)
    rounded = build_model(section(dtype, lora=None), device="cpu", seed=7, load_weights=True)
    whole = backend(section(dtype, lora=None, quantize=None), trainable=False)
    kept = {name: layer for name, layer in frozen._model.named_modules() if isinstance(layer, NarrowLinear)}
    assert len(kept) == 2 * 7
    assert all(layer.weight.equal(rounded.get_submodule(name).weight) for name, layer in kept.items())
    assert "lm_head" not in " ".join(kept)
    assert logprobs(one).equal(logprobs(frozen)), "B is zero at first"
    assert not torch.allclose(logprobs(one), logprobs(whole), atol=1e-4)
    weights = sum(layer.packed.nbytes + layer.scales.nbytes for layer in narrow_layers(frozen._model))
    parameters = sum(layer.in_features * layer.out_features for layer in kept.values())
    assert weights <= 0.6 * parameters, "bytes"
    assert frozen.quadratic == whole.quadratic
    whole_bytes = parameters * rounded.dtype.itemsize
    assert whole.device_bytes()["weights"] - frozen.device_bytes()["weights"] == whole_bytes - weights


@pytest.mark.parametrize("dtype", DTYPES)
def test_adapters_alone_are_trained_beside_it(dtype: str) -> None:
    pytest.importorskip("peft")
    one, base = backend(section(dtype)), backend(section(dtype, lora=None), trainable=False)
    norms = [step(one) for _ in range(3)]
    assert min(norms) > 0
    assert all(".lora_" in name for name, _ in one.named_shards())
    assert all(".lora_" in name for name in taken(one) if name.startswith("model."))
    assert float((logprobs(one) - logprobs(base)).abs().max()) > 1e-3
    assert isinstance(one, Adapted)
    assert logprobs(one.without_adapters()).equal(logprobs(base)), "the reference is the rounded base"
    again = backend(section(dtype))
    again.load_state(taken(one))
    assert logprobs(again).equal(logprobs(one))
    assert step(again) == step(one)


@pytest.mark.parametrize(("dtype", "tolerance"), [("float64", 1e-12), ("float32", 1e-5), ("bfloat16", 2e-2)])
def test_an_engine_merges_into_the_same_base(dtype: str, tolerance: float) -> None:
    pytest.importorskip("peft")
    one = backend(section(dtype))
    engine = TorchEngine(EngineSpec(section(dtype), "cpu", 4, 20, 7, {}))
    for number in range(2):
        step(one)
        engine.begin_update(Version(1, number))
        engine.update(one.named_shards())
        engine.end_update()
        expected = torch.tensor(Canaries(ROWS, dtype).compute(one).logprobs, dtype=torch.float64)
        found = torch.tensor(engine.logprobs(ROWS), dtype=torch.float64)
        torch.testing.assert_close(found, expected, rtol=0, atol=tolerance)


def test_exports_have_the_rounded_base(tmp_path: Path) -> None:
    """Merged: what engines have. Adapters alone are compared beside a base that is rounded after it was loaded."""
    pytest.importorskip("peft")
    folder = tmp_path / "base"
    export_model(_whole_state(), section(lora=None, quantize=None), [], folder)
    model = section(path=str(folder))
    one = backend(model)
    step(one)
    export_model(taken(one), model, [], tmp_path / "adapters", adapters=True)
    export_model(taken(one), model, [], tmp_path / "merged")
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    rounded = build_model({**model, "lora": None}, device="cpu", seed=7, load_weights=True)
    name = "model.layers.0.self_attn.k_proj.weight"
    assert dict(merged.named_parameters())[name].equal(dict(rounded.named_parameters())[name])


def _whole_state() -> dict[str, Tensor]:
    return taken(backend(section(lora=None, quantize=None)))


def test_engines_that_stage_weights_get_the_rounded_base() -> None:
    rounded = dict(build_model(section(lora=None), device="cpu", seed=7, load_weights=True).named_parameters())
    staged = {name: torch.zeros_like(parameter) for name, parameter in rounded.items()}
    layers = stage_base(staged, section(), 7)
    assert layers.keys() == {f"model.layers.{n}.{end}" for n in (0, 1) for end in ("self_attn.q_proj", "mlp.down_proj")}
    assert all(tensor.equal(rounded[name]) for name, tensor in staged.items())
