"""Adapters for engines that compute without them: each version is merged into the weights as it arrives."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from distflow.errors import UserError
from distflow.types import Version
from distflow.workers.adapters import A, B, adapted_layers, merged, scale_of
from distflow.workers.models import build_model, outline
from distflow.workers.parameters import ParameterTable, StoredModel, constants_of, stored_form


class AdapterTable(ParameterTable):
    """Weights to which adapters are added, from a copy of the base: what was added before is never subtracted.

    `layers`: for each layer with adapters its weight, which has the base's values, at its place in the engine.
    """

    def __init__(self, layers: Mapping[str, Tensor], lora: Mapping[str, Any]) -> None:
        super().__init__({f"{layer}.{half}": weight for layer, weight in layers.items() for half in (A, B)})
        self._layers = layers
        self._base = {layer: weight.detach().clone() for layer, weight in layers.items()}
        self._rank = int(lora["rank"])
        self._scale = scale_of(lora)
        self._arrived: dict[str, Tensor] = {}
        self._expected = set(self.parameters)

    def kept(self) -> list[Tensor]:
        """The base of the adapted layers."""
        return list(self._base.values())

    def begin(self, version: Version) -> None:
        """Start replacing the adapters; an update in progress is abandoned."""
        super().begin(version)
        self._arrived.clear()

    @torch.no_grad()
    def update(self, tensors: Iterable[tuple[str, Tensor]]) -> None:
        """Merge each adapter when both halves are there. Raises as the base class does."""
        if self.incoming is None:
            raise ValueError("update of an engine's weights outside begin_update and end_update")
        for name, tensor in tensors:
            if name not in self.parameters:
                examples = ", ".join(list(self.parameters)[:3])
                raise KeyError(f"this model has no adapter {name!r}; its adapters are for example {examples}")
            layer, half = (name.removesuffix(f".{A}"), A) if name.endswith(A) else (name.removesuffix(f".{B}"), B)
            rows, columns = self._base[layer].shape
            expected = (self._rank, columns) if half == A else (rows, self._rank)
            if tuple(tensor.shape) != expected:
                raise ValueError(f"adapter {name}: got shape {tuple(tensor.shape)}, expected {expected}")
            base = self._base[layer]
            # The memory that it is read from may be overwritten before the other half has arrived.
            self._arrived[name] = tensor.to(device=base.device, copy=True)
            self.missing.discard(name)
            if not {f"{layer}.{A}", f"{layer}.{B}"} & self.missing:
                a, b = self._arrived.pop(f"{layer}.{A}"), self._arrived.pop(f"{layer}.{B}")
                self._layers[layer].copy_(merged(base, a, b, self._scale))


def adapted_weights(parameters: Mapping[str, Tensor], model: Mapping[str, Any]) -> dict[str, Tensor]:
    """Of a whole model's parameters the weights of the layers that the section's `lora` adapts, by layer."""
    return {layer: parameters[f"{layer}.weight"] for layer in adapted_layers(outline(model), model["lora"]["targets"])}


def stage_base(staged: Mapping[str, Tensor], model: Mapping[str, Any], seed: int) -> dict[str, Tensor]:
    """Write the base's weights to tensors by their stored names; returns those of the adapted layers, by layer.

    Raises UserError for an adapted layer that is not stored as one tensor.
    """
    built = build_model(model, device="cpu", seed=seed, load_weights=True)
    stored = stored_form(outline(model))
    with torch.no_grad():
        for name, parameter in (*built.named_parameters(), *constants_of(built).items()):
            for place, tensor in stored.cut(name, parameter.detach()):
                staged[place].copy_(tensor)
    return {layer: staged[_place(stored, layer)] for layer in adapted_layers(built, model["lora"]["targets"])}


def _place(stored: StoredModel, layer: str) -> str:
    parts = stored.tensors[f"{layer}.weight"]
    if len(parts) != 1 or not parts[0].whole:
        raise UserError(
            f"models.<name>.lora: {layer} is stored as {len(parts)} tensors, to which this engine cannot add an "
            "adapter — leave it out of lora.targets, or use engine: torch"
        )
    return parts[0].name
