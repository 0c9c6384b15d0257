"""Optimizers by name: each step is that of the library's own, and a checkpoint continues to the last bit."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import Tensor

from distflow.errors import KeyedError, UserError
from distflow.runtime.protocols import BackendSpec
from distflow.testing.backend_contract import ragged_batch, taken, tiny_model
from distflow.workers.backends.backend_options import TorchBackendOptions
from distflow.workers.backends.deepspeed_backend import DeepSpeedBackend
from distflow.workers.backends.fsdp_backend import FsdpBackend
from distflow.workers.backends.torch_backend import TorchBackend

WIDE = {"hidden_size": 64, "intermediate_size": 80}
"""Matrices of more than 4096 elements, from which bitsandbytes keeps moments in 8 bits."""
MATRICES = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def backend(dtype: str = "float32", *, head: str = "tokens", **optimizer: Any) -> TorchBackend:
    section = tiny_model(dtype=dtype, init=WIDE, optimizer=optimizer, head=head)
    return TorchBackend(BackendSpec(section, "cpu", True, 0, 10, {}))


def step(one: TorchBackend) -> None:
    scores = one.score(ragged_batch(), temperature=1.0, grad=True, entropy=False)
    one.accumulate(-scores.logprobs_BT.sum())
    one.apply(35.0)


def twin_step(one: TorchBackend, optimizers: list[torch.optim.Optimizer]) -> None:
    """The same step by optimizers of the test's own, over the parameters of `one`."""
    scores = one.score(ragged_batch(), temperature=1.0, grad=True, entropy=False)
    torch.autograd.backward(-scores.logprobs_BT.sum())
    for parameter in one._parameters.values():
        assert parameter.grad is not None
        parameter.grad *= 1.0 / 35.0
    for optimizer in optimizers:
        optimizer.step()
        optimizer.zero_grad()


def inner(parameters: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {n: p for n, p in parameters.items() if n.endswith(tuple(f"{name}.weight" for name in MATRICES))}


def assert_equal(found: TorchBackend, expected: TorchBackend) -> None:
    for name, tensor in found._parameters.items():
        torch.testing.assert_close(tensor, expected._parameters[name], rtol=0, atol=0, msg=lambda m, n=name: n + m)


def test_muon_is_for_the_matrices_within_the_layers_and_adamw_for_the_rest() -> None:
    ours, twin = backend(name="muon", momentum=0.9, betas=[0.9, 0.99]), backend()
    matrices = inner(twin._parameters)
    others = [p for name, p in twin._parameters.items() if name not in matrices]
    muon = torch.optim.Muon(
        list(matrices.values()), lr=1e-2, weight_decay=0.01, momentum=0.9, adjust_lr_fn="match_rms_adamw"
    )
    adamw = torch.optim.AdamW(others, lr=1e-2, betas=(0.9, 0.99), weight_decay=0.01, fused=True)
    for _ in range(3):
        step(ours)
        twin_step(twin, [muon, adamw])
    assert_equal(ours, twin)
    assert len(matrices) == 7
    assert {f"optimizer.momentum_buffer.{name}" for name in matrices} < taken(ours).keys()


def test_adamw_of_8_bits_is_that_of_bitsandbytes() -> None:
    bitsandbytes = pytest.importorskip("bitsandbytes")
    ours, twin = backend(name="adamw_8bit"), backend()
    library = bitsandbytes.optim.AdamW8bit(
        list(twin._parameters.values()), lr=1e-2, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.01
    )
    for _ in range(3):
        step(ours)
        twin_step(twin, [library])
    assert_equal(ours, twin)
    state = taken(ours)
    assert state["optimizer.state1.model.layers.0.mlp.up_proj.weight"].dtype == torch.uint8
    assert state["optimizer.state1.model.norm.weight"].dtype == torch.float32, "it is small"


@pytest.mark.parametrize("name", ["muon", "adamw_8bit"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_checkpoint_continues_bit_by_bit(name: str, dtype: str) -> None:
    if name == "adamw_8bit":
        pytest.importorskip("bitsandbytes")
    groups = [
        {"match": "norm|bias", "lr": None, "weight_decay": 0.0},
        {"match": "up_proj", "lr": 0.02, "weight_decay": 1},
    ]
    given = {"name": name, "schedule": "wsd", "decay_steps": 8, "min_lr": 1e-3, "groups": groups}
    first = backend(dtype, **given)
    for _ in range(3):
        step(first)
    second = backend(dtype, **given)
    second.load_state(taken(first))
    for _ in range(3):
        step(first)
        step(second)
    state = taken(first)
    assert state["optimizer.steps"] == 6
    assert all(tensor.equal(state[key]) for key, tensor in taken(second).items())


def test_what_8_bits_keep_is_counted_and_moves() -> None:
    pytest.importorskip("bitsandbytes")
    plain, small = backend(), backend(name="adamw_8bit")
    sizes = [one.device_bytes()["optimizer"] for one in (plain, small)]
    assert sizes[1] < 0.5 * sizes[0], "biases, norms and the small embeddings stay in float32"


def test_a_group_that_matches_nothing_is_refused() -> None:
    groups = [
        {"match": "norm", "lr": 0.0, "weight_decay": None},
        {"match": "layernorm", "lr": 1.0, "weight_decay": None},
    ]
    with pytest.raises(
        UserError, match=r"groups\[1\].match 'layernorm' is in the name of no .*no group before.*embed_tok"
    ):
        backend(groups=groups)


@pytest.mark.parametrize("kind", [FsdpBackend, DeepSpeedBackend])
@pytest.mark.parametrize("name", ["muon", "adamw_8bit"])
def test_backends_that_divide_tensors_refuse_what_needs_them_whole(kind: Any, name: str) -> None:
    section = tiny_model(dtype="float32", optimizer={"name": name})
    with pytest.raises(KeyedError, match=rf"optimizer.name — {name} with backend .*a part; adamw, or backend: torch"):
        kind(BackendSpec(section, "cpu", True, 0, 10, {}))
    kind(BackendSpec(section, "cpu", False, 0, 10, {"zero": 1} if kind is DeepSpeedBackend else {}))


def test_8_bits_of_float64_are_refused() -> None:
    with pytest.raises(KeyedError, match="adamw_8bit steps float32, bfloat16 and float16, .* is float64; adamw"):
        backend("float64", name="adamw_8bit")


def test_a_missing_package_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "bitsandbytes.optim", None)
    with pytest.raises(UserError, match=r"bitsandbytes cannot be imported .*pip install 'distflow-rl\[bitsandbytes\]'"):
        backend(name="adamw_8bit")


def test_muon_trains_a_value_head() -> None:
    one = backend(name="muon", head="value")
    found = one.values(ragged_batch(), grad=True)
    one.accumulate((found.values_BT - 1.0).square()[found.mask_BT].sum())
    one.apply(35.0)
    assert "optimizer.exp_avg.score.weight" in taken(one)
    assert TorchBackendOptions.parse({}).packed
