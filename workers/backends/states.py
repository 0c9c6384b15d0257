"""A saved state against the model that is to go on from it."""

from __future__ import annotations

from collections.abc import Collection, Mapping

import torch
from torch import Tensor


def check_same(own: Mapping[str, Tensor], given: Mapping[str, Tensor]) -> None:
    """Raises ValueError unless `given` has the tensors of `own`, with their shapes and types."""
    check_names(own, given)
    for name, tensor in own.items():
        check_tensor(name, given[name], tuple(tensor.shape), tensor.dtype)


def check_names(own: Collection[str], given: Collection[str]) -> None:
    """Raises ValueError unless the names are the same."""
    missing, unknown = sorted(set(own) - set(given)), sorted(set(given) - set(own))
    if missing or unknown:
        raise ValueError(
            f"checkpoint of another model: it lacks {missing[:3] or 'nothing'} and has unknown "
            f"{unknown[:3] or 'nothing'} ({len(missing)} missing, {len(unknown)} unknown)"
        )


def check_tensor(name: str, given: Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    """Raises ValueError unless a tensor has this shape and type."""
    if tuple(given.shape) != shape or given.dtype != dtype:
        raise ValueError(
            f"checkpoint of another model: {name} is {given.dtype} {list(given.shape)}, "
            f"here it is {dtype} {list(shape)}"
        )
