"""What the recipe may say about the backend `fsdp`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from distflow.errors import UserError


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
    def parse(cls, options: Mapping[str, Any], device: str) -> FsdpBackendOptions:
        """Read the section; raises UserError for unknown keys and impossible values."""
        unknown = sorted(set(options) - set(cls.__slots__))
        if unknown:
            known = ", ".join(cls.__slots__)
            raise UserError(f"backend_options of backend fsdp: unknown {', '.join(unknown)}; it knows {known}")
        for name, value in options.items():
            if not isinstance(value, bool):
                raise UserError(f"backend_options.{name} {value!r}: expected true or false")
        if options.get("cpu_offload") and not device.startswith("cuda"):
            raise UserError(
                f"backend_options.cpu_offload true on device {device}: parameters are in the CPU's memory anyway; "
                "remove it, or give the pool GPUs"
            )
        return cls(**options)
