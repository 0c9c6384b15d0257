"""`backend_options` of the backends `torch` and `fsdp`. Imports no torch: the plan checks them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from distflow.config.options import PluginUse, check_keys
from distflow.errors import UserError


@dataclass(frozen=True, slots=True)
class TorchBackendOptions:
    """The pool's `backend_options` for this backend."""

    packed: bool = True
    """Compute no padding, and shared prompts once, where the model's attention allows it."""

    @classmethod
    def parse(cls, options: Mapping[str, Any]) -> TorchBackendOptions:
        """Read the section; raises UserError for unknown keys and impossible values."""
        check_keys("backend_options", "backend torch", options, cls.__slots__)
        parsed = cls(**options)
        if not isinstance(parsed.packed, bool):
            raise UserError(f"backend_options.packed {parsed.packed!r}: expected true or false")
        return parsed


@dataclass(frozen=True, slots=True)
class FsdpBackendOptions:
    """The pool's `backend_options` for this backend."""

    packed: bool = True
    """Compute no padding, and shared prompts once, where the model's attention allows it."""
    reshard_after_forward: bool = True
    """Free a layer's parameters after its forward, and fetch them again for the backward: less memory, more traffic."""
    cpu_offload: bool = False
    """Keep parameters, gradients and optimizer in the CPU's memory; the optimizer step is computed there."""

    @classmethod
    def parse(cls, options: Mapping[str, Any]) -> FsdpBackendOptions:
        """Read the section; raises UserError for unknown keys and impossible values."""
        check_keys("backend_options", "backend fsdp", options, cls.__slots__)
        for name, value in options.items():
            if not isinstance(value, bool):
                raise UserError(f"backend_options.{name} {value!r}: expected true or false")
        return cls(**options)

    def check(self, use: PluginUse) -> None:
        """Raises UserError for options that have no effect on this device."""
        if self.cpu_offload and use.device == "cpu":
            raise UserError(
                "backend_options.cpu_offload true on device cpu: parameters are in the CPU's memory anyway; "
                "remove it, or give the pool GPUs"
            )
