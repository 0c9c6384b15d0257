"""Weights into SGLang: what it calls itself, in each of its processes that hold a part of the model."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import Tensor

from distflow.workers.engines.staged import staged_tensors

LOADER = f"{__name__}.load"
"""SGLang finds the loader by this name."""


def load(model: Any, named: Iterable[tuple[str, Tensor]]) -> None:
    """Load what is staged into SGLang's model; the name of the only tensor of `named` says where it lies."""
    ((description, _),) = named
    model.load_weights(staged_tensors(description))
