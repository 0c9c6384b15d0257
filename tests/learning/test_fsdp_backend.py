"""The fsdp backend: the contract in one process, and several processes against the torch backend."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from importlib.util import find_spec
from types import MappingProxyType
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from distflow import parts
from distflow.errors import UserError
from distflow.parts import MOST_VISIBLE
from distflow.runtime.checkpoint.format import Shard, put_together
from distflow.runtime.protocols import Backend, BackendSpec
from distflow.testing.backend_contract import BackendContract, ragged_batch, taken, tiny_model
from distflow.workers.backends import fsdp_backend
from distflow.workers.backends.fsdp_backend import FsdpBackend
from distflow.workers.backends.model_backend import ModelBackend
from distflow.workers.backends.torch_backend import TorchBackend
from tests.learning.processes import Job, Members, group_of_one, together

SMALL = {"hidden_size": 8, "num_attention_heads": 2, "num_key_value_heads": 1, "num_hidden_layers": 2}
"""Keys and values have 4 rows each: 2, 2 and none for three replicas."""
EXPERTS = {
    **{"model_type": "qwen3_moe", "num_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 8},
    **{"head_dim": 4, "tie_word_embeddings": False},
}
"""Three replicas have two, two and one of the fused experts; each expert is published separately."""
SMALL_PIECES = 600
STEPS: list[list[list[tuple[int, int]]]] = [
    [[(0, 3), (3, 4), (4, 7)], [(7, 12)]],
    [[(0, 6), (6, 12)], []],
    [[], [(0, 12)]],
]
"""Rows of each micro-batch by step and replica. All replicas together train on all rows."""


@pytest.fixture(scope="module", autouse=True)
def _group() -> Iterator[None]:
    with group_of_one():
        yield


class TestFsdpBackend(BackendContract):
    whole_matrices = False
    options: Mapping[str, Any] = MappingProxyType({})

    def make_backend(self, spec: BackendSpec) -> Backend:
        backend = FsdpBackend(
            BackendSpec(spec.model, spec.device, spec.trainable, spec.seed, spec.training_steps, self.options)
        )
        backend.join()
        return backend


class TestFsdpBackendPadded(TestFsdpBackend):
    options = MappingProxyType({"packed": False, "reshard_after_forward": False})


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
class TestFsdpBackendOnGpu(TestFsdpBackend):
    device = "cuda:0"


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
class TestFsdpBackendOffloaded(TestFsdpBackend):
    device = "cuda:0"
    options = MappingProxyType({"cpu_offload": True})


def _fsdp(members: Members, model: dict[str, Any], options: dict[str, Any], *, trainable: bool = True) -> FsdpBackend:
    backend = FsdpBackend(BackendSpec(model, "cpu", trainable, 0, 10, options, members))
    backend.join()
    return backend


def _torch(model: dict[str, Any]) -> TorchBackend:
    return TorchBackend(BackendSpec(model, "cpu", True, 0, 10, {}))


def _accumulate(backend: Backend, rows: tuple[int, int]) -> float:
    assert isinstance(backend, ModelBackend)
    if backend._spec.model.get("head") == "value":
        found = backend.values(ragged_batch().slice(*rows), grad=True)
        loss = (found.values_BT - 1.0).square()[found.mask_BT].sum()
        backend.accumulate(loss)
        return float(loss.detach())
    scores = backend.score(ragged_batch().slice(*rows), temperature=0.8, grad=True, entropy=True)
    assert scores.entropy_BT is not None
    loss = -(scores.logprobs_BT + 0.1 * scores.entropy_BT).sum()
    backend.accumulate(loss)
    return float(loss.detach())


def _weights(backend: Backend) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in backend.named_shards()}


def _train(backend: Backend, steps: list[list[list[tuple[int, int]]]], rank: int) -> tuple[list[float], list[float]]:
    """Losses and norms; replicas without a micro-batch are idle in the rounds of the others."""
    losses, norms = [], []
    for step in steps:
        for number in range(max(map(len, step))):
            if number < len(step[rank]):
                losses.append(_accumulate(backend, step[rank][number]))
            else:
                backend.idle(grad=True)
        norms.append(backend.apply(35.0))
    return losses, norms


def _trained_by_one(backend: TorchBackend) -> tuple[list[float], list[float]]:
    whole = [[[rows for replica in step for rows in replica]] for step in STEPS]
    return _train(backend, whole, 0)


def _plain(shards: Iterator[Shard]) -> list[tuple[str, tuple[int, ...], int, Tensor]]:
    return [(shard.name, shard.shape, shard.start, shard.data.clone()) for shard in shards]


def _job(members: Members, model: dict[str, Any], options: dict[str, Any]) -> Any:
    fsdp_backend.PIECE_BYTES = SMALL_PIECES
    # Where activations are recomputed, some micro-batches of a step are packed, others padded.
    parts.MOST_VISIBLE = 100 if model["gradient_checkpointing"] else MOST_VISIBLE
    backend = _fsdp(members, model, options)
    steps = [[*step, *[[]] * (members.size - 2)] for step in STEPS]
    first = _weights(backend)
    losses, norms = _train(backend, steps, members.rank)
    return first, losses, norms, _weights(backend), _plain(backend.state_shards()), backend.learning_rate


def _assembled(results: list[Any]) -> dict[str, Tensor]:
    return put_together(Shard(*row) for result in results for row in result[4])


RESUMED = {"float64": 1e-10, "bfloat16": 1e-4}
"""Dtypes of the weights, and tolerances."""
OPTIMIZER = {"max_grad_norm": 0.5, "schedule": "cosine", "warmup_steps": 2}
GROUPS = {
    "groups": [
        {"match": "norm|bias", "lr": None, "weight_decay": 0.0},
        {"match": "mlp", "lr": 0.1, "weight_decay": 0.5},
    ],
    **{"schedule": "wsd", "min_lr": 1e-4},
}
LORA = {"rank": 3, "alpha": 4.0, "targets": "all-linear"}
CASES: dict[str, tuple[int, float, dict[str, Any], dict[str, Any]]] = {
    "float64": (2, 1e-10, {}, {"dtype": "float64"}),
    "float32, layers kept": (2, 1e-5, {"reshard_after_forward": False}, {"dtype": "float32"}),
    "bfloat16": (2, 1e-4, {}, {"dtype": "bfloat16"}),
    "values": (2, 1e-10, {}, {"dtype": "float64", "head": "value"}),
    "experts": (2, 1e-4, {}, {"dtype": "float32", "init": EXPERTS}),
    "three, experts": (3, 1e-4, {}, {"dtype": "float32", "init": EXPERTS}),
    "three": (3, 1e-10, {}, {"dtype": "float64"}),
    "groups": (2, 1e-10, {}, {"dtype": "float64", "optimizer": GROUPS}),
    "three, recomputed": (3, 1e-10, {}, {"dtype": "float64", "gradient_checkpointing": True}),
    "two, recomputed": (2, 1e-10, {}, {"dtype": "float64", "gradient_checkpointing": True}),
}
"""Replicas, tolerance, backend options, and model settings."""
ADAPTED: dict[str, tuple[int, float, dict[str, Any], dict[str, Any]]] = {
    "lora": (2, 1e-10, {}, {"dtype": "float64", "lora": LORA}),
    "lora, bfloat16": (2, 1e-4, {}, {"dtype": "bfloat16", "lora": LORA}),
    "three, lora, recomputed": (
        3,
        1e-5,
        {"reshard_after_forward": False},
        {"dtype": "float32", "gradient_checkpointing": True, "lora": {**LORA, "targets": ["q_proj", "down_proj"]}},
    ),
}
CASES |= ADAPTED if find_spec("peft") is not None else {}


def _model(case: str) -> dict[str, Any]:
    changes = dict(CASES[case][3])
    return tiny_model(
        init=SMALL | changes.pop("init", {}), optimizer=OPTIMIZER | changes.pop("optimizer", {}), **changes
    )


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Any]]:
    """Results of all jobs, run together because processes take long to start."""
    found = {}
    for size in (2, 3):
        jobs: dict[str, Job] = {
            name: (_job, (_model(name), case[2])) for name, case in CASES.items() if case[0] == size
        }
        if size == 2:
            jobs["careful"] = (_careful_job, ())
            for dtype in RESUMED:
                one = _torch(tiny_model(init=SMALL, dtype=dtype))
                _trained_by_one(one)
                jobs[f"resumed {dtype}"] = (_resume_job, (tiny_model(init=SMALL, dtype=dtype), taken(one)))
        found |= together(size, tmp_path_factory.mktemp("replicas"), jobs)
    return found


@pytest.mark.parametrize("case", CASES)
def test_several_replicas_train_as_one_that_holds_the_whole(case: str, results: dict[str, list[Any]]) -> None:
    """Uneven micro-batches, and replicas without a sample in some step; then one replica continues from the state."""
    tolerance, replicas, model = CASES[case][1], results[case], _model(case)
    one = _torch(model)
    first = _weights(one)
    losses, norms = _trained_by_one(one)
    found = sorted(loss for result in replicas for loss in result[1])
    assert found == pytest.approx(sorted(losses), rel=tolerance)
    for result in replicas:
        assert result[0].keys() == first.keys()
        assert all(tensor.equal(first[name]) for name, tensor in result[0].items())
        assert any(".experts.4." in name for name in first) == ("experts" in case)
        assert result[2] == replicas[0][2] == pytest.approx(norms, rel=tolerance)
        assert result[5] == one.learning_rate
        for name, tensor in _weights(one).items():
            torch.testing.assert_close(result[3][name], tensor, rtol=tolerance, atol=tolerance)
            assert result[3][name].equal(replicas[0][3][name])
    state = _assembled(replicas)
    for name, tensor in taken(one).items():
        torch.testing.assert_close(state[name], tensor, rtol=tolerance, atol=tolerance)
    resumed = _torch(model)
    resumed.load_state(state)
    assert [_accumulate(backend, (0, 12)) for backend in (resumed, one)] == pytest.approx([losses[-1]] * 2, rel=0.9)
    assert resumed.apply(35.0) == pytest.approx(one.apply(35.0), rel=tolerance)


def _resume_job(members: Members, model: dict[str, Any], state: dict[str, Tensor]) -> Any:
    parts.MOST_VISIBLE = MOST_VISIBLE
    backend = _fsdp(members, model, {})
    backend.load_state(state)
    loaded = _plain(backend.state_shards())
    losses, norms = _train(backend, STEPS, members.rank)
    return None, losses, norms, _weights(backend), loaded, None


@pytest.mark.parametrize("dtype", RESUMED)
def test_several_replicas_go_on_from_the_state_of_one(dtype: str, results: dict[str, list[Any]]) -> None:
    replicas, tolerance = results[f"resumed {dtype}"], RESUMED[dtype]
    one = _torch(tiny_model(init=SMALL, dtype=dtype))
    _trained_by_one(one)
    state, loaded = taken(one), _assembled(replicas)
    assert loaded.keys() == state.keys()
    assert all(tensor.equal(state[name]) for name, tensor in loaded.items())
    _, norms = _trained_by_one(one)
    for result in replicas:
        assert result[2] == pytest.approx(norms, rel=tolerance)
        for name, tensor in _weights(one).items():
            torch.testing.assert_close(result[3][name], tensor, rtol=tolerance, atol=tolerance)


def _careful_job(members: Members) -> dict[str, Any]:
    """What a replica holds between rounds, and how it handles a gradient that is not finite elsewhere."""
    model = tiny_model(init=SMALL)
    backend, frozen = _fsdp(members, model, {}), _fsdp(members, model, {}, trainable=False)
    before = _weights(backend)
    frozen.idle(grad=False)
    scores = frozen.score(ragged_batch(), temperature=1.0, grad=False, entropy=False)
    backend.idle(grad=False)
    held = {name: parameter.to_local().numel() for name, parameter in _parameters(backend).items()}
    with pytest.raises(ValueError, match="0 accumulated gradients"):
        backend.apply(1.0)
    if members.rank == 0:
        bad = backend.score(ragged_batch(), temperature=1.0, grad=True, entropy=False)
        backend.accumulate(bad.logprobs_BT.sum() * float("nan"))
    else:
        backend.idle(grad=True)
    skipped = backend.apply(1.0)
    unchanged = all(tensor.equal(before[name]) for name, tensor in backend.named_shards())
    _, norms = _train(backend, STEPS, members.rank)
    return {
        **{"held": held, "skipped": skipped, "unchanged": unchanged, "scores": scores.logprobs_BT},
        **{"norms": norms, "weights": _weights(backend)},
    }


def _parameters(backend: FsdpBackend) -> dict[str, DTensor]:
    found = dict(backend._model.named_parameters())
    assert all(isinstance(parameter, DTensor) for parameter in found.values()), "a forward has left something whole"
    return found  # type: ignore[return-value]  # just checked


def test_a_replica_holds_its_rows_and_all_skip_a_step_together(results: dict[str, list[Any]]) -> None:
    first, second = results["careful"]
    sizes = {name: tensor.numel() for name, tensor in _torch(tiny_model(init=SMALL)).named_shards()}
    assert {name: first["held"][name] + second["held"][name] for name in sizes} == sizes
    assert sum(second["held"].values()) < 0.5 * sum(sizes.values())
    undisturbed = _torch(tiny_model(init=SMALL))
    _, norms = _trained_by_one(undisturbed)
    for seen in (first, second):
        assert math.isnan(seen["skipped"])
        assert seen["unchanged"]
        assert seen["norms"] == pytest.approx(norms, rel=1e-10)
        for name, tensor in _weights(undisturbed).items():
            torch.testing.assert_close(seen["weights"][name], tensor, rtol=1e-10, atol=1e-10)
    whole = _torch(tiny_model(init=SMALL)).score(ragged_batch(), temperature=1.0, grad=False, entropy=False)
    torch.testing.assert_close(first["scores"], whole.logprobs_BT, rtol=0, atol=1e-12)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"pakced": True}, "pakced True: backend fsdp has no such option — did you mean 'packed'"),
        ({"reshard_after_forward": 1}, "reshard_after_forward 1: expected true or false"),
        ({"cpu_offload": True}, "cpu_offload true on device cpu: .* remove it, or give the pool GPUs"),
    ],
)
def test_backend_options_are_checked(options: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        FsdpBackend(BackendSpec(tiny_model(), "cpu", True, 0, 10, options))
