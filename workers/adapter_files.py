"""Adapters of a checkpoint: merged into a whole model for export, or as files that peft reads."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from distflow.errors import UserError
from distflow.runtime.checkpoint.format import SavedTensor, write_tensors
from distflow.workers.adapters import A, B, adapted_layers, adapters_of, merged, scale_of
from distflow.workers.heads import TOKENS, head_of
from distflow.workers.models import auto_class, build_model, load_config, outline, torch_dtype
from distflow.workers.parameters import constants_of
from distflow.workers.quantized import round_weights

MODEL = "model."
"""Prefix of parameter names in a checkpoint."""
_PEFT = "base_model.model."
"""Prefix of parameter names in peft's files."""


def whole_state(state: Mapping[str, Tensor], model: Mapping[str, Any], seed: int) -> Mapping[str, Tensor]:
    """The tensors of a checkpoint with its adapters merged into the base; the checkpoint's own if it has none.

    What training leaves as it is comes from the base too. Raises UserError for adapters of another shape or of other
    layers than the section's.
    """
    if isinstance(state, _Merged | _Completed):
        return state
    if model.get("lora") is not None:
        return _Merged(state, model, seed)
    return _Completed(state, model, seed) if constants_of(outline(model)) else state


class _Completed(Mapping[str, Tensor]):
    """All weights of a model: those of the checkpoint, and what training leaves as it is."""

    def __init__(self, state: Mapping[str, Tensor], model: Mapping[str, Any], seed: int) -> None:
        base = build_model(model, device="cpu", seed=seed, load_weights=True)
        self._state = state
        self._constants = {MODEL + name: constant for name, constant in constants_of(base).items()}

    def __getitem__(self, key: str) -> Tensor:
        return self._constants[key] if key in self._constants else self._state[key]

    def __iter__(self) -> Iterator[str]:
        return iter((*self._state, *self._constants))

    def __len__(self) -> int:
        return len(self._state) + len(self._constants)


class _Merged(Mapping[str, Tensor]):
    """All weights of a model, each merged when it is asked for; the whole base is in memory."""

    def __init__(self, state: Mapping[str, Tensor], model: Mapping[str, Any], seed: int) -> None:
        self._state = state
        base = build_model(model, device="cpu", seed=seed, load_weights=True)
        self._layers = set(adapted_layers(base, model["lora"]["targets"]))
        _check(state, self._layers)
        self._base = {name: parameter.detach() for name, parameter in base.named_parameters()} | constants_of(base)
        self._scale = scale_of(model["lora"])

    def __getitem__(self, key: str) -> Tensor:
        name = key.removeprefix(MODEL)
        weight: Tensor = self._base[name]
        layer = name.removesuffix(".weight")
        if layer not in self._layers or not name.endswith(".weight"):
            return weight
        a, b = (self._state[f"{MODEL}{layer}.{half}"] for half in (A, B))
        return merged(weight, a, b, self._scale)

    def __iter__(self) -> Iterator[str]:
        return (MODEL + name for name in self._base)

    def __len__(self) -> int:
        return len(self._base)


def _check(state: Mapping[str, Tensor], layers: set[str]) -> None:
    wanted = {f"{layer}.{half}" for layer in layers for half in (A, B)}
    saved = {name.removeprefix(MODEL) for name in state if name.startswith(MODEL)}
    if saved != wanted:
        differing = sorted(saved ^ wanted)
        raise UserError(
            f"the checkpoint does not match the adapters in the recipe: only one of them has {', '.join(differing[:3])}"
        )


def check_separable(model: Mapping[str, Any]) -> None:
    """Raises UserError for a model whose adapters cannot be written alone."""
    if model.get("lora") is None:
        raise UserError("--adapters: this model was trained whole, without lora — leave it out")
    if model.get("path") is None:
        raise UserError(
            "--adapters: they belong to a base that was made from run.seed and lies in no folder — leave it out, and "
            "the merged model is written"
        )


def write_adapters(state: Mapping[str, Tensor], model: Mapping[str, Any], folder: Path) -> int:
    """Write `adapter_model.safetensors` and `adapter_config.json`; returns the bytes of the weights."""
    lora, dtype = model["lora"], torch_dtype(model)
    layers = adapted_layers(outline(model), lora["targets"])
    _check(state, set(layers))
    saved = {f"{_PEFT}{layer}.{half}": f"{MODEL}{layer}.{half}" for layer in layers for half in (A, B)}
    entries = {name: SavedTensor(dtype, tuple(state[key].shape)) for name, key in saved.items()}
    write_tensors(
        folder / "adapter_model.safetensors", entries, lambda name: state[saved[name]].to(dtype), {"format": "pt"}
    )
    settings = {
        "base_model_name_or_path": str(model["path"]),
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "r": lora["rank"],
        "lora_alpha": lora["alpha"],
        "lora_dropout": 0.0,
        "target_modules": layers,
        "bias": "none",
        "inference_mode": True,
    }
    (folder / "adapter_config.json").write_text(json.dumps(settings, indent=1) + "\n")
    return sum(entry.nbytes for entry in entries.values())


def own_outputs(state: Mapping[str, Tensor], model: Mapping[str, Any], rows: Sequence[Sequence[int]]) -> Tensor:
    """What the checkpoint's adapters give beside the base, as in training, in float32."""
    own = build_model(model, device="cpu", seed=0, load_weights=True, adapters=True).float()
    with torch.no_grad():
        for name, parameter in adapters_of(own).items():
            parameter.copy_(state[MODEL + name])
    return outputs(own, rows, model)


def loaded_outputs(model: Mapping[str, Any], rows: Sequence[Sequence[int]], folder: Path) -> Tensor:
    """The same with the adapters that peft loads from a folder."""
    from peft import PeftModel

    config = load_config(model)
    base = auto_class(config).from_pretrained(str(model["path"]), config=config, dtype=torch_dtype(model))
    if model.get("quantize") is not None:
        round_weights(base)
    return outputs(PeftModel.from_pretrained(base, folder).float().eval(), rows, model)


@torch.no_grad()
def outputs(built: PreTrainedModel, rows: Sequence[Sequence[int]], model: Mapping[str, Any]) -> Tensor:
    """Of every token of each row, concatenated: what the head gives; log-probs, without the first, of one of tokens."""
    found = []
    for row in rows:
        ids = torch.tensor([list(row)])
        logits = built(input_ids=ids, use_cache=False).logits[0].float()
        if head_of(model) == TOKENS:
            found.append(logits[:-1].log_softmax(-1).gather(-1, ids[0, 1:, None]).squeeze(-1))
        else:
            found.append(logits.flatten())
    return torch.cat(found)
