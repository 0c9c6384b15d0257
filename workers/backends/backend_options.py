"""`backend_options` of the backends `torch` and `fsdp`. Imports no torch: the plan checks them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, ClassVar, Self

from distflow.config.plugins import PluginUse, check_keys
from distflow.errors import KeyedError, UserError


def refuse_undivided(use: PluginUse, backend: str) -> None:
    """Raises KeyedError for what needs whole tensors, where replicas have parts: some optimizers, and 4-bit weights."""
    if use.model.get("quantize") is not None:
        message = f"{use.model['quantize']} with backend {backend}, which divides models: not built; backend: torch"
        raise KeyedError(f"models.{use.model_name}.quantize", message)
    name = use.model["optimizer"]["name"]
    if use.trained and name != "adamw":
        why = {"muon": "whole matrices", "adamw_8bit": "blocks of whole tensors, which it quantizes together"}[name]
        message = f"{name} with backend {backend}: it needs {why}, and a replica has a part; adamw, or backend: torch"
        raise KeyedError(f"models.{use.model_name}.optimizer.name", message)


@dataclass(frozen=True, slots=True)
class TorchBackendOptions:
    """The pool's `backend_options` for backend torch."""

    backend: ClassVar[str] = "torch"

    packed: bool = True
    """Compute no padding, and shared prompts once, where the model's attention allows it."""

    @classmethod
    def parse(cls, options: Mapping[str, Any]) -> Self:
        """Read the section; raises UserError for unknown keys and impossible values."""
        check_keys("backend_options", f"backend {cls.backend}", options, [field.name for field in fields(cls)])
        for name, value in options.items():
            if not isinstance(value, bool):
                raise UserError(f"backend_options.{name} {value!r}: expected true or false")
        return cls(**options)

    def check(self, use: PluginUse) -> None:
        """Raises KeyedError for a model that the backend cannot train."""
        if use.trained and use.model["optimizer"]["name"] == "adamw_8bit" and use.model["dtype"] == "float64":
            message = (
                "adamw_8bit steps float32, bfloat16 and float16, and models.{}.dtype is float64; adamw, or float32"
            )
            raise KeyedError(f"models.{use.model_name}.optimizer.name", message.format(use.model_name))


@dataclass(frozen=True, slots=True)
class FsdpBackendOptions(TorchBackendOptions):
    """The pool's `backend_options` for backend fsdp."""

    backend: ClassVar[str] = "fsdp"

    reshard_after_forward: bool = True
    """Free a layer's parameters after its forward, and fetch them again for the backward: less memory, more traffic."""
    cpu_offload: bool = False
    """Keep parameters, gradients and optimizer in the CPU's memory, and compute the optimizer step there."""

    def check(self, use: PluginUse) -> None:
        """Raises UserError for options that have no effect on this device, and as `refuse_undivided` does."""
        refuse_undivided(use, self.backend)
        if self.cpu_offload and use.device == "cpu":
            raise UserError(
                "backend_options.cpu_offload true on device cpu: parameters are in the CPU's memory anyway; "
                "remove it, or give the pool GPUs"
            )
