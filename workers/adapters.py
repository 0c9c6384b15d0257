"""Low-rank adapters (LoRA, arXiv 2106.09685) beside the linear layers of a model: made, switched off, merged.

Trainers compute with peft's layers, base and adapters apart. Engines and exported models have the product merged into
the weights, always from the untouched base: subtracting it again would not restore the bits.

An adapter is called by the layer it belongs to: `model.layers.0.mlp.up_proj.lora_A.weight`, as in peft's files behind
their prefix.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from distflow.errors import UserError
from distflow.workers.heads import output_layer

if TYPE_CHECKING:
    from transformers import PreTrainedModel

A, B = "lora_A.weight", "lora_B.weight"
_NAME = "default"
_SHOWN = 6
MERGED_ROWS = 64


def adapted_layers(model: PreTrainedModel, targets: str | Sequence[str]) -> list[str]:
    """Names of the layers that get adapters, in the order of the model, which may be on the meta device.

    Raises UserError for a target that is the end of no linear layer's name but the output layer's.
    """
    head = output_layer(model)
    linear = [name for name, layer in model.named_modules() if isinstance(layer, nn.Linear) and layer is not head]
    if not linear:
        raise UserError(f"models.<name>.lora: model_type {model.config.model_type!r} has no linear layers to adapt")
    if isinstance(targets, str):
        return linear
    for target in targets:
        if not any(_ends(name, target) for name in linear):
            ends = ", ".join(list(dict.fromkeys(name.rpartition(".")[2] for name in linear))[:_SHOWN])
            raise UserError(
                f"models.<name>.lora.targets: {target!r} is the end of no name of a linear layer (the output layer is "
                f"not adapted); they end in {ends}"
            )
    return [name for name in linear if any(_ends(name, target) for target in targets)]


def _ends(name: str, target: str) -> bool:
    return name == target or name.endswith(f".{target}")


def add_adapters(model: PreTrainedModel, lora: Mapping[str, Any], seed: int) -> None:
    """Put adapters of a `models.<name>.lora` section beside the layers of a model, in its dtype and on its device.

    A is drawn in float32 on the CPU with `seed`, so that every dtype and device starts from the same; B is zero, so the
    model computes what it did. Raises UserError if peft is missing, or as `adapted_layers` does.
    """
    layers = adapted_layers(model, lora["targets"])
    try:
        from peft import LoraConfig, inject_adapter_in_model
    except ImportError as error:
        raise UserError(
            f"models.<name>.lora: the package peft cannot be imported ({error}); install it with: "
            "pip install 'distflow-rl[lora]', or remove lora"
        ) from error
    config = LoraConfig(r=lora["rank"], lora_alpha=lora["alpha"], target_modules=layers, lora_dropout=0.0)
    inject_adapter_in_model(config, model, adapter_name=_NAME)
    drawn = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in adapters_of(model).items():
            start = torch.zeros(parameter.shape)
            if name.endswith(A):
                nn.init.kaiming_uniform_(start, a=math.sqrt(5), generator=drawn)
            # peft may have chosen another dtype than the model's.
            parameter.data = start.to(device=parameter.device, dtype=model.dtype)
    model.eval()


def adapters_of(model: nn.Module) -> dict[str, nn.Parameter]:
    """The adapters of a model by name; none if it has none."""
    return {own_name(name): p for name, p in model.named_parameters() if f".{_NAME}." in name and ".lora_" in name}


def own_name(parameter: str) -> str:
    """The name of a parameter without what peft adds: that of the layer's own weight, or of its adapter."""
    return parameter.replace(".base_layer.", ".").replace(f".{_NAME}.", ".") if _peft(parameter) else parameter


def _peft(name: str) -> bool:
    return ".base_layer." in name or ".lora_" in name


@contextmanager
def adapters_off(model: nn.Module) -> Iterator[None]:
    """Within it the model computes what it would without adapters, to the last bit."""
    from peft.tuners.lora import LoraLayer

    layers = [layer for layer in model.modules() if isinstance(layer, LoraLayer)]
    for layer in layers:
        layer.enable_adapters(False)
    try:
        yield
    finally:
        for layer in layers:
            layer.enable_adapters(True)


def scale_of(lora: Mapping[str, Any]) -> float:
    """How often the product of B and A counts."""
    return float(lora["alpha"]) / int(lora["rank"])


@torch.no_grad()
def merged(weight: Tensor, a: Tensor, b: Tensor, scale: float) -> Tensor:
    """The weight [R, C] with an adapter, a [r, C] and b [R, r], added in float32 at least and rounded once."""
    wide = torch.promote_types(weight.dtype, torch.float32)
    a, b = a.to(wide), b.to(wide)
    out = torch.empty_like(weight)
    # A few rows at a time stay in the cache: three wide copies of the whole would take most of the time.
    rows = torch.empty(MERGED_ROWS, weight.shape[1], dtype=wide, device=weight.device)
    for start in range(0, len(weight), MERGED_ROWS):
        some = slice(start, min(start + MERGED_ROWS, len(weight)))
        part = rows[: some.stop - start].copy_(weight[some])
        out[some] = part.addmm_(b[some], a, alpha=scale)
    return out
