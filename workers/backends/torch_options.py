"""What a pool's `backend_options` may say for the backend `torch`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from distflow.config.plugins import check_keys
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
