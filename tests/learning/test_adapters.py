"""Low-rank adapters: what is trained, published and saved, and the model without them."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from distflow.errors import UserError
from distflow.runtime.protocols import Adapted, Backend, BackendSpec, EngineSpec
from distflow.runtime.weight_publisher import Canaries
from distflow.testing.backend_contract import ragged_batch, taken, tiny_model
from distflow.types import Version
from distflow.workers.adapters import adapted_layers, merged
from distflow.workers.backends.deepspeed_backend import DeepSpeedBackend
from distflow.workers.backends.fsdp_backend import FsdpBackend
from distflow.workers.backends.torch_backend import TorchBackend
from distflow.workers.engines.torch_engine import TorchEngine
from distflow.workers.exporting import export_model
from distflow.workers.merging import stage_base
from distflow.workers.models import build_model, outline
from tests.learning.processes import group_of_one

pytest.importorskip("peft")
LORA = {"rank": 2, "alpha": 8.0, "targets": "all-linear"}
LAYERS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
ROWS = ((3, 4, 5, 6, 7, 8), (5, 6, 7, 8, 9, 2))
BACKENDS: Mapping[str, tuple[Any, Mapping[str, Any]]] = MappingProxyType(
    {
        "torch": (TorchBackend, {}),
        "fsdp": (FsdpBackend, {}),
        **{f"zero{stage}": (DeepSpeedBackend, {"zero": stage}) for stage in range(4)},
    }
)
each_backend = pytest.mark.parametrize("kind", BACKENDS)


@pytest.fixture(scope="module", autouse=True)
def _group() -> Iterator[None]:
    with group_of_one():
        yield


def section(dtype: str = "float32", **changes: Any) -> dict[str, Any]:
    path = changes.pop("path", None)
    found = tiny_model(dtype=dtype, **{"lora": LORA, **changes})
    return found if path is None else {**found, "path": path, "init": None}


def backend(kind: str = "torch", *, trainable: bool = True, deterministic: bool = False, **model: Any) -> Any:
    make, options = BACKENDS[kind]
    spec = BackendSpec(section(**model), "cpu", trainable, 7, 10, options, deterministic=deterministic)
    made = make(spec)
    made.join()
    return made


def logprobs(one: Backend) -> Tensor:
    return one.score(ragged_batch(), temperature=1.0, grad=False, entropy=False).logprobs_BT


def step(one: Backend) -> None:
    scores = one.score(ragged_batch(), temperature=1.0, grad=True, entropy=False)
    one.accumulate(-scores.logprobs_BT.sum())
    one.apply(35.0)


@each_backend
def test_adapters_alone_are_trained_published_and_saved(kind: str) -> None:
    one, base = backend(kind), backend(kind, lora=None)
    assert logprobs(one).equal(logprobs(base)), "B is zero at first"
    start = {name: tensor.clone() for name, tensor in one.named_shards()}
    step(one)
    step(one)
    names = {f"model.layers.0.{part}.{name}.lora_{half}.weight" for part, name in _layers() for half in "AB"}
    published = dict(one.named_shards())
    assert published.keys() == names
    assert all(not tensor.equal(start[name]) for name, tensor in published.items())
    assert {name.split(".", 1)[1] for name in taken(one) if name.startswith("model.")} == names
    assert {name.split(".", 2)[2] for name in taken(one) if name.startswith("optimizer.exp_avg.")} == names
    assert float((logprobs(one) - logprobs(base)).abs().max()) > 1e-3


def _layers() -> list[tuple[str, str]]:
    return [("self_attn" if name[0] in "qkvo" else "mlp", name) for name in LAYERS]


@each_backend
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_without_adapters_the_model_is_its_base_to_the_last_bit(kind: str, dtype: str) -> None:
    if (kind, dtype) == ("zero0", "bfloat16"):
        pytest.skip("this backend does not train in bfloat16")
    one, base = backend(kind, dtype=dtype), backend("torch", dtype=dtype, lora=None, trainable=False)
    assert isinstance(one, Adapted)
    frozen = one.without_adapters()
    assert isinstance(frozen, Backend)
    assert frozen.lockstep == one.lockstep
    for _ in range(2):
        step(one)
        with_adapters = logprobs(one)
        frozen.idle(grad=False)
        assert logprobs(frozen).equal(logprobs(base))
        assert logprobs(one).equal(with_adapters), "they are on again"
        assert not with_adapters.equal(logprobs(base))
    assert [*frozen.named_shards(), *frozen.state_shards()] == []
    with pytest.raises(ValueError, match=r"score\(grad=True\) on a frozen model"):
        frozen.score(ragged_batch(), temperature=1.0, grad=True, entropy=False)
    with pytest.raises(ValueError, match="apply on a frozen model"):
        frozen.apply(1.0)


@each_backend
def test_adapters_off_between_a_forward_and_its_backward_change_no_gradient(kind: str) -> None:
    """As for a KL term, whose reference is scored while the policy's graph is there."""
    if BACKENDS[kind][0] is not TorchBackend:
        pytest.skip("backends in lockstep refuse another forward there")
    plain, disturbed = backend(kind), backend(kind)
    for _ in range(2):
        step(plain)
        scores = disturbed.score(ragged_batch(), temperature=1.0, grad=True, entropy=False)
        logprobs(disturbed.without_adapters())
        disturbed.accumulate(-scores.logprobs_BT.sum())
        disturbed.apply(35.0)
    state = taken(plain)
    assert all(tensor.equal(state[name]) for name, tensor in taken(disturbed).items())


@each_backend
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_a_checkpoint_of_adapters_continues_bit_by_bit(kind: str, dtype: str, optimizer: str) -> None:
    if (kind, dtype) == ("zero0", "bfloat16") or (optimizer == "muon" and kind != "torch"):
        pytest.skip("refused")
    settings: dict[str, Any] = {"dtype": dtype, "optimizer": {"name": optimizer, "schedule": "wsd", "warmup_steps": 2}}
    first, second = backend(kind, **settings), backend(kind, **settings)
    step(first)
    second.load_state(taken(first))
    for _ in range(2):
        step(first)
        step(second)
    state = taken(first)
    assert all(tensor.equal(state[name]) for name, tensor in taken(second).items())
    with pytest.raises(ValueError, match="checkpoint of another model"):
        backend(kind, **settings, lora=None).load_state(state)


@pytest.mark.parametrize(
    ("dtype", "tolerance"), [("float64", 1e-12), ("float32", 1e-5), ("bfloat16", 2e-2)], ids=lambda one: str(one)
)
@pytest.mark.parametrize("model_type", ["qwen2", "gemma2"])
def test_adapters_change_the_engine_as_they_change_the_trainer(dtype: str, tolerance: float, model_type: str) -> None:
    """With the decoder for models like Llama and the other; the base is made from the seed on both sides."""
    more = {"head_dim": 4, "sliding_window": 64} if model_type == "gemma2" else {"num_hidden_layers": 2}
    model = {"init": {"model_type": model_type, **more}, "lora": {**LORA, "targets": ["q_proj", "mlp.down_proj"]}}
    one = backend(dtype=dtype, **model)
    engine = TorchEngine(EngineSpec(section(dtype, **model), "cpu", 4, 20, 7, {}))
    canaries, seen = Canaries(ROWS, dtype), []
    for number in range(3):
        engine.begin_update(Version(1, number))
        engine.update(one.named_shards())
        engine.end_update()
        expected = torch.tensor(canaries.compute(one).logprobs, dtype=torch.float64)
        found = torch.tensor(engine.logprobs(ROWS), dtype=torch.float64)
        torch.testing.assert_close(found, expected, rtol=0, atol=tolerance)
        seen.append(found)
        step(one)
        if number == 1:
            engine.offload()
            engine.onload()
    assert float((seen[2] - seen[0]).abs().max()) > 1e-3


def test_versions_are_made_from_the_base_and_not_from_each_other() -> None:
    """After many versions and back the weights have the same bits; an update that is begun again starts anew."""
    one = backend()
    engine = TorchEngine(EngineSpec(section(), "cpu", 4, 20, 7, {}))
    first = {name: tensor.clone() for name, tensor in one.named_shards()}
    found = []
    for number in range(6):
        step(one)
        engine.begin_update(Version(1, number))
        engine.update(list(one.named_shards())[:3])
        engine.begin_update(Version(1, number))
        engine.update((first if number in (0, 5) else dict(one.named_shards())).items())
        engine.end_update()
        found.append([parameter.clone() for parameter in engine.model.parameters()])
    assert all(tensor.equal(other) for tensor, other in zip(found[0], found[5], strict=True))
    assert not all(tensor.equal(other) for tensor, other in zip(found[0], found[4], strict=True))


def test_an_engine_refuses_what_are_not_its_adapters() -> None:
    one = backend()
    engine = TorchEngine(EngineSpec(section(), "cpu", 4, 20, 7, {}))
    shards = dict(one.named_shards())
    name = next(iter(shards))
    with pytest.raises(ValueError, match="outside begin_update"):
        engine.update(shards.items())
    engine.begin_update(Version(1, 0))
    with pytest.raises(KeyError, match=r"no adapter 'lm_head.weight'; its adapters are for example model.layers.0"):
        engine.update([("lm_head.weight", torch.zeros(1))])
    with pytest.raises(ValueError, match=r"adapter model.layers.0.self_attn.q_proj.lora_A.weight: got shape \(3, 16\)"):
        engine.update([(name, torch.zeros(3, 16))])
    engine.update(list(shards.items())[1:])
    with pytest.raises(ValueError, match=f"lacks 1 of 14 tensors, for example {name}"):
        engine.end_update()
    engine.update([(name, shards[name])])
    engine.end_update()
    assert engine.version == Version(1, 0)


def test_every_dtype_starts_from_the_same_adapters_and_every_seed_from_its_own() -> None:
    wide = dict(backend(dtype="float64").named_shards())
    for dtype in ("float32", "bfloat16"):
        for name, tensor in backend(dtype=dtype).named_shards():
            assert tensor.equal(wide[name].to(tensor.dtype)), name
    other = dict(TorchBackend(BackendSpec(section("float64"), "cpu", True, 8, 10, {})).named_shards())
    assert not any(wide[name].equal(other[name]) for name in wide if "lora_A" in name)


def test_rows_of_a_deterministic_run_do_not_depend_on_others() -> None:
    one = backend(deterministic=True)
    step(one)
    together = logprobs(one)
    for row in ragged_batch().ragged("response_ids").lengths.nonzero().flatten().tolist():
        part = ragged_batch().slice(row, row + 1)
        alone = one.score(part, temperature=1.0, grad=False, entropy=False).logprobs_BT[0]
        assert alone.equal(together[row, : len(alone)])


def test_other_engines_get_the_base_by_the_names_it_is_stored_by() -> None:
    model = section("bfloat16", init={"tie_word_embeddings": False})
    base = build_model({**model, "lora": None}, device="cpu", seed=7, load_weights=True)
    staged = {name: torch.full_like(tensor, torch.nan) for name, tensor in base.named_parameters()}
    layers = stage_base(staged, model, 7)
    assert all(staged[name].equal(tensor) for name, tensor in base.named_parameters())
    assert {name.rpartition(".")[2] for name in layers} == set(LAYERS)
    assert layers["model.layers.0.mlp.up_proj"] is staged["model.layers.0.mlp.up_proj.weight"]


@pytest.mark.parametrize(
    ("model", "targets", "message"),
    [
        ({}, ["q_prj"], "'q_prj' is the end of no name of a linear layer .* they end in q_proj, k_proj, v_proj"),
        ({}, ["lm_head"], "'lm_head' is the end of no name .*the output layer is not adapted"),
    ],
)
def test_layers_that_cannot_be_adapted_are_refused(model: dict[str, Any], targets: Any, message: str) -> None:
    with pytest.raises(UserError, match=message):
        adapted_layers(outline(tiny_model(**model)), targets)


def test_a_family_without_linear_layers_is_refused() -> None:
    init = {"model_type": "gpt2", "n_embd": 16, "n_layer": 1, "n_head": 2}
    with pytest.raises(UserError, match="model_type 'gpt2' has no linear layers to adapt"):
        adapted_layers(outline({**tiny_model(), "init": init}), "all-linear")


def test_peft_is_asked_for_if_it_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "peft", None)
    with pytest.raises(UserError, match=r"peft cannot be imported .*pip install 'distflow-rl\[lora\]'"):
        backend()
    backend(trainable=False)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A base in a folder."""
    base = build_model(section(lora=None), device="cpu", seed=5, load_weights=True)
    base.save_pretrained(tmp_path / "base")
    return tmp_path / "base"


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_exported_adapters_and_the_merged_model_are_those_of_peft(folder: Path, tmp_path: Path, dtype: str) -> None:
    from peft import PeftModel

    one = backend(dtype=dtype, path=str(folder), optimizer={"lr": 0.1})
    for _ in range(3):
        step(one)
    model = section(dtype, path=str(folder))
    first, second = export_model(taken(one), model, [], tmp_path / "adapters", adapters=True)
    assert f"adapters of {folder}" in first
    assert "reloaded with peft: 31 log-probs" in second
    assert "merged" not in first
    export_model(taken(one), model, [("407=", (6, 2))], tmp_path / "merged", seed=7)
    base = AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype))
    by_peft = PeftModel.from_pretrained(base, tmp_path / "adapters").merge_and_unload()
    ours = dict(AutoModelForCausalLM.from_pretrained(tmp_path / "merged").named_parameters())
    rounding = 1e-6 if dtype == "float32" else 1e-2
    for name, tensor in by_peft.named_parameters():
        torch.testing.assert_close(ours[name], tensor, rtol=rounding, atol=rounding)


def test_adapters_of_a_new_model_are_merged_into_the_base_of_the_seed(tmp_path: Path) -> None:
    one = backend()
    step(one)
    export_model(taken(one), section(), [], tmp_path / "merged", seed=7)
    ours = dict(AutoModelForCausalLM.from_pretrained(tmp_path / "merged").named_parameters())
    base = dict(build_model(section(lora=None), device="cpu", seed=7, load_weights=True).named_parameters())
    halves = dict(one.named_shards())
    for name, tensor in base.items():
        layer = name.removesuffix(".weight")
        if f"{layer}.lora_A.weight" in halves:
            tensor = merged(tensor, halves[f"{layer}.lora_A.weight"], halves[f"{layer}.lora_B.weight"], 4.0)
        assert ours[name].equal(tensor), name


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"lora": None, "path": "x"}, "--adapters: this model was trained whole, without lora"),
        ({}, "--adapters: they belong to a base that was made from run.seed and lies in no folder"),
    ],
)
def test_adapters_that_cannot_be_written_alone(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        export_model({}, section(**changes), [], tmp_path / "out", adapters=True)
    assert not (tmp_path / "out").exists()


def test_a_checkpoint_of_other_adapters_is_not_exported(tmp_path: Path) -> None:
    state = taken(backend(lora={**LORA, "targets": ["q_proj"]}))
    with pytest.raises(UserError, match=r"does not match the adapters in the recipe: only one of them has .*lora_A"):
        export_model(state, section(), [], tmp_path / "out", seed=7)
