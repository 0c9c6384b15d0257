"""The tests of two deepspeed replicas, as jobs of `tests.learning.processes`.

Under lockstep all hold the same rounds, as the runtime has it: who has no samples is idle.
"""

from __future__ import annotations

import gc
from collections.abc import Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from distflow.data.batch import Batch
from distflow.errors import UserError
from distflow.runtime.protocols import Backend, BackendSpec, Reducer
from distflow.testing.backend_contract import ragged_batch, tiny_model
from distflow.workers.backends import scoring
from distflow.workers.backends.deepspeed_backend import DeepSpeedBackend
from distflow.workers.backends.model_backend import ModelBackend

STEPS = 3
SAVED_BEHIND = 2
BEHIND = 1
"""Which step is repeated behind the one that is skipped."""
DENOMINATOR = 35.0
# Sizes that do not divide by two: parts are padded, and parameters are cut at odd places.
ODD = {"model_type": "qwen3", "hidden_size": 15, "num_attention_heads": 3, "num_key_value_heads": 1, "head_dim": 4}


@dataclass(frozen=True)
class Case:
    """Backend options, and changes of `tiny_model`."""

    options: dict[str, Any]
    model: dict[str, Any] = field(default_factory=dict)
    chunk: int = 1 << 26
    """`scoring.LOGITS_CHUNK`."""
    deterministic: bool = False

    def section(self) -> dict[str, Any]:
        optimizer = {"lr": 1e-3, "eps": 1e-5, "schedule": "cosine", "warmup_steps": 2, "max_grad_norm": 0.3}
        model = {"dtype": "float32", "optimizer": optimizer, **self.model}
        return tiny_model(**{**model, "init": model.get("init", ODD)})

    def spec(self, replicas: Reducer | None = None, **changes: Any) -> BackendSpec:
        extra = {} if replicas is None else {"replicas": replicas}
        options, same = {**self.options, **changes}, self.deterministic
        return BackendSpec(self.section(), "cpu", True, 0, 6, options, **extra, deterministic=same)


HALF = {"dtype": "bfloat16"}
ALL_DIVIDED = {"zero_optimization": {"stage3_param_persistence_threshold": 0}}
EXPERTS = {
    **{"model_type": "qwen3_moe", "num_experts": 3, "num_experts_per_tok": 2, "moe_intermediate_size": 8},
    **{"head_dim": 4, "tie_word_embeddings": False},
}
GROUPS = {
    "groups": [
        {"match": "norm|bias", "lr": None, "weight_decay": 0.0},
        {"match": "mlp", "lr": 2e-3, "weight_decay": None},
    ],
    **{"lr": 1e-3, "eps": 1e-5, "schedule": "wsd", "min_lr": 1e-4, "decay_steps": 3, "max_grad_norm": 0.3},
}
LORA = {"rank": 3, "alpha": 64.0, "targets": "all-linear"}
PIECES = 13 * 4
"""Logits of four tokens at a time, so that replicas compute theirs in different numbers of pieces."""
RECOMPUTED = {"gradient_checkpointing": True}
CASES = {
    "0": Case({"zero": 0}),
    "1": Case({"zero": 1}),
    "2": Case({"zero": 2, "ds_config": {"zero_optimization": {"reduce_bucket_size": 300}}}, RECOMPUTED, PIECES),
    "3": Case({"zero": 3}, chunk=PIECES),
    "3-deterministic": Case({"zero": 3}, {"init": {}}, chunk=PIECES, deterministic=True),
    "1-bfloat16": Case({"zero": 1}, HALF),
    "2-bfloat16": Case({"zero": 2}, HALF),
    "3-bfloat16": Case({"zero": 3}, {**HALF, "gradient_checkpointing": True}),
    "1-offload": Case({"zero": 1, "offload_optimizer": True}, HALF),
    "2-offload": Case({"zero": 2, "offload_optimizer": True}),
    "3-offload": Case({"zero": 3, "offload_optimizer": True}),
    "1-values": Case({"zero": 1}, {"head": "value"}),
    "2-values": Case({"zero": 2}, {"head": "value"}),
    "3-values": Case({"zero": 3, "ds_config": ALL_DIVIDED}, {"head": "value"}),
    "2-experts": Case({"zero": 2}, {"init": EXPERTS}),
    "3-experts": Case({"zero": 3, "ds_config": ALL_DIVIDED}, {"init": EXPERTS}),
    "1-groups": Case({"zero": 1}, {"optimizer": GROUPS, **HALF}),
    "2-groups": Case({"zero": 2}, {"optimizer": GROUPS}),
    "2-groups-offload": Case({"zero": 2, "offload_optimizer": True}, {"optimizer": GROUPS}),
    "3-groups": Case({"zero": 3}, {"optimizer": GROUPS}),
    "3-untied": Case(
        {"zero": 3, "packed": False, "ds_config": ALL_DIVIDED}, {"init": {"tie_word_embeddings": False}}, PIECES
    ),
}
ADAPTED = {
    "0-lora": Case({"zero": 0}, {"lora": LORA}),
    "1-lora-bfloat16": Case({"zero": 1}, {**HALF, "lora": LORA}),
    "2-lora": Case({"zero": 2}, {"lora": LORA}),
    "2-lora-bfloat16": Case({"zero": 2}, {**HALF, "gradient_checkpointing": True, "lora": LORA}),
    "3-lora": Case({"zero": 3}, {"lora": LORA}, chunk=PIECES),
}
CASES |= ADAPTED if find_spec("peft") is not None else {}


def parts_of(step: int) -> list[list[Batch]]:
    """The micro-batches of each replica: two and one, none and three, one and two."""
    batch = ragged_batch()
    four = [batch.slice(start, start + 4) for start in range(0, 12, 4)]
    return [[four[:2], four[2:]], [[], four], [four[:1], four[1:]]][step]


def loss_of(backend: Backend, part: Batch) -> Tensor:
    if valued(backend):
        found = backend.values(part, grad=True)
        return (found.values_BT - 1.0).square()[found.mask_BT].sum()
    scores = backend.score(part, temperature=0.9, grad=True, entropy=True)
    assert scores.entropy_BT is not None
    return -(scores.logprobs_BT + 0.1 * scores.entropy_BT).sum()


def valued(backend: Backend) -> bool:
    """Whether it holds a model with a value head."""
    assert isinstance(backend, ModelBackend)
    return backend._spec.model.get("head") == "value"


def train(backend: Backend, step: int, parts: Sequence[Batch], rounds: int) -> float:
    """One step; in the second one every micro-batch is first scored without gradients."""
    for grad in (False, True) if step == 1 else (True,):
        for number in range(rounds):
            if number < len(parts) and grad:
                backend.accumulate(loss_of(backend, parts[number]))
            elif number < len(parts) and valued(backend):
                backend.values(parts[number], grad=False)
            elif number < len(parts):
                backend.score(parts[number], temperature=0.9, grad=False, entropy=False)
            elif backend.lockstep:
                backend.idle(grad=grad)
    return backend.apply(DENOMINATOR)


def shards(backend: Backend) -> list[tuple[str, tuple[int, ...], int, Tensor]]:
    return [(shard.name, shard.shape, shard.start, shard.data.clone()) for shard in backend.state_shards()]


def weights(backend: Backend) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in backend.named_shards()}


def trained(replicas: Reducer, name: str, folder: Path) -> dict[str, Any]:
    """Three steps, one with a loss that is not finite, and one more; then one from a state that another saved."""
    gc.freeze()  # ZeRO 3 collects garbage whenever a model is divided: not among all that was imported
    case = CASES[name]
    scoring.LOGITS_CHUNK = case.chunk
    backend = DeepSpeedBackend(case.spec(replicas))
    backend.join()
    seen: dict[str, Any] = {"norms": [], "rates": [], "lockstep": backend.lockstep}
    for step in range(STEPS):
        if step == SAVED_BEHIND:
            seen["state"] = shards(backend)
        seen["rates"].append(backend.learning_rate)
        seen["norms"].append(train_share(backend, step, replicas.rank))
    seen["weights"] = weights(backend)
    seen["final"] = shards(backend)
    # Only one of them sees it.
    backend.accumulate(loss_of(backend, parts_of(0)[0][0]) * (float("nan") if replicas.rank else 1.0))
    seen["skipped norm"] = backend.apply(DENOMINATOR)
    seen["skipped"] = weights(backend)
    seen["norm behind"] = train_share(backend, BEHIND, replicas.rank)
    seen["behind"] = shards(backend)
    backend.close()
    resumed = DeepSpeedBackend(case.spec(replicas))
    resumed.join()
    resumed.load_state(torch.load(folder / f"{name}.pt"))
    seen["resumed norm"] = train_share(resumed, SAVED_BEHIND, replicas.rank)
    seen["resumed"] = shards(resumed)
    resumed.close()
    return seen


def train_share(backend: Backend, step: int, rank: int) -> float:
    parts = parts_of(step)
    return train(backend, step, parts[rank], max(map(len, parts)))


def different(replicas: Reducer) -> str:
    """The error message of replicas with different stages."""
    try:
        DeepSpeedBackend(CASES["1"].spec(replicas, zero=1 + replicas.rank)).join()
    except UserError as error:
        return str(error)
    return ""


def frozen(replicas: Reducer) -> dict[str, Any]:
    """The scores of a frozen model that is divided over both; replica 1 has nothing to score."""
    backend = DeepSpeedBackend(BackendSpec(CASES["3"].section(), "cpu", False, 0, 6, {"zero": 3}, replicas))
    backend.join()
    if replicas.rank:
        backend.idle(grad=False)
    else:
        seen = backend.score(ragged_batch(), temperature=0.9, grad=False, entropy=False).logprobs_BT
    found = {"lockstep": backend.lockstep, "weights": weights(backend), "scores": None if replicas.rank else seen}
    backend.close()
    return found
