"""Whether a model class of another project takes every tensor that it is given, and gets all its parameters written.

The loaders of SGLang and vLLM skip names that they do not know, and parameters that nobody names keep what they had,
without a word: such an engine would sample from random weights for ever. So their first load is watched. Parameters are
filled with NaN before it, of which nothing may be left; tensors note whether their values were read.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from distflow.errors import WorkerFailed

SHOWN = 4
Named = tuple[str, Tensor]
Load = Callable[[Iterable[Named]], Collection[str] | None]
_loaded: weakref.WeakSet[nn.Module] = weakref.WeakSet()
"""Models of this process that have had weights."""


def load_checked(model: nn.Module, tensors: Iterable[Named], load: Load) -> None:
    """`load_watched` the first time of each model, then plainly `load`."""
    if model in _loaded:
        load(tensors)
    else:
        load_watched(model, tensors, load)
        _loaded.add(model)


def load_watched(model: nn.Module, tensors: Iterable[Named], load: Load) -> None:
    """The first `load` of `tensors` into `model`; raises WorkerFailed by the names that are skipped or not covered.

    `load` may return the names of all parameters that it wrote: kernels may hold values in another place. Of a model
    that is divided over processes each has a part, and need not read the experts of others.
    """
    poison(model)
    alone = not (torch.distributed.is_initialized() and torch.distributed.get_world_size() > 1)
    watched: dict[str, Watched] = {}

    def each() -> Iterator[Named]:
        for name, tensor in tensors:
            watched[name] = watch(tensor)
            yield name, watched[name]

    told = load(each())
    skipped = [name for name, tensor in watched.items() if not tensor.was_read]
    if skipped and alone:
        raise WorkerFailed(
            f"{type(model).__name__} ignores {_shown(skipped, len(watched))} tensors that are published — "
            "this engine cannot generate with this model; use engine torch, or another version of the engine"
        )
    check_written(model, told)


def poison(model: nn.Module) -> None:
    """Fill the parameters that a checkpoint has with NaN."""
    for _, parameter in _loadable(model):
        parameter.detach().fill_(torch.nan)


def check_written(model: nn.Module, told: Collection[str] | None = None) -> None:
    """Raise WorkerFailed for parameters that still hold what `poison` wrote, or are not among those `told`, if any."""
    parameters = list(_loadable(model))
    empty = [
        name
        for name, parameter in parameters
        if bool(parameter.isnan().any()) or (told is not None and name not in told)
    ]
    if empty:
        raise WorkerFailed(
            f"nothing that is published was written into {_shown(empty, len(parameters))} parameters of "
            f"{type(model).__name__}, or NaN was — this engine cannot generate with this model; use engine torch, or "
            "another version of the engine"
        )


class Watched(Tensor):
    """A tensor that notes whether its values were used, beyond its shape and type."""

    was_read: bool

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Results are plain tensors."""
        with torch._C.DisableTorchFunctionSubclass():
            result = func(*args, **(kwargs or {}))
        # Properties are read by their getters, and shapes by methods that give no tensor.
        if func not in _LOOKS and getattr(func, "__name__", "") != "__get__":
            for one in (*args, *(kwargs or {}).values()):
                for tensor in one if isinstance(one, (list, tuple)) else (one,):
                    if isinstance(tensor, Watched):
                        tensor.was_read = True
        elif getattr(func, "__name__", "") == "__get__" and isinstance(result, Tensor):
            args[0].was_read = True
        return result


def watch(tensor: Tensor) -> Watched:
    """The same memory, watched."""
    watched = tensor.as_subclass(Watched)
    watched.was_read = False
    return watched


_LOOKS = (Tensor.size, Tensor.dim, Tensor.numel, Tensor.stride, Tensor.is_contiguous, Tensor.__len__)


def _loadable(model: nn.Module) -> Iterator[Named]:
    """Parameters with values of a checkpoint: not quantized ones, nor scales, which engines compute by themselves."""
    for name, parameter in model.named_parameters():
        if parameter.is_floating_point() and parameter.itemsize > 1 and not name.endswith(("scale", "scale_inv")):
            yield name, parameter


def _shown(names: list[str], of: int) -> str:
    more = ", …" if len(names) > SHOWN else ""
    return f"{len(names)} of {of} ({', '.join(names[:SHOWN])}{more})"
