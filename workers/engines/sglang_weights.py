"""Weights into SGLang: what it calls itself, in each of its processes that hold a part of the model."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import Tensor

from distflow.workers.engines.shared_staging import staged_tensors
from distflow.workers.engines.written import check_written, load_checked, poison

LOADER = f"{__name__}.load"
"""SGLang finds the loader by this name."""
POISON, CHECK = "poison", "check"
"""Told in place of where the weights lie, around a first load that comes another way."""


def load(model: Any, named: Iterable[tuple[str, Tensor]]) -> None:
    """Load what is staged into SGLang's model; the name of the only tensor of `named` says where it lies.

    The first load is watched: raises WorkerFailed where a tensor is skipped, or a parameter not written.
    """
    ((told, _),) = named
    if told == POISON:
        poison(model)
    elif told == CHECK:
        check_written(model)
    else:
        load_checked(model, staged_tensors(told), model.load_weights)
