"""Weights for another project's engine: staged in shared memory, then loaded by each of the engine's processes.

The memory is an anonymous memfd: it is freed when the last process that maps it exits.

The loaders of SGLang and vLLM silently skip names they do not know, and leave parameters that nothing names as they
were: such an engine would sample from random weights forever. So the first load into each model is checked: parameters
are filled with NaN beforehand, of which none may remain, and each tensor records whether its values were read.
"""

from __future__ import annotations

import json
import mmap
import os
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from distflow.errors import WorkerFailed

ALIGN = 64


class StagedWeights:
    """One version of all weights, most in the engine's dtype, as tensors to write to; `descriptor` is the memfd's."""

    def __init__(
        self,
        shapes: Mapping[str, Sequence[int]],
        dtype: torch.dtype,
        tied: Mapping[str, str],
        wide: Collection[str] = (),
    ) -> None:
        """`shapes` by name; `tied`: further names, each with the name in `shapes` whose tensor it shares.

        `wide`: names of those that are in float32 at least.
        """
        places, size = [], 0
        for name, shape in shapes.items():
            own = torch.promote_types(dtype, torch.float32) if name in wide else dtype
            places.append((name, str(own).removeprefix("torch."), list(shape), size))
            size += -(-torch.Size(shape).numel() * own.itemsize // ALIGN) * ALIGN
        self.descriptor = os.memfd_create("distflow-weights")
        os.truncate(self.descriptor, max(size, ALIGN))
        # The views keep the memory mapped; it is unmapped with the last of them.
        memory = mmap.mmap(self.descriptor, max(size, ALIGN))
        self.tensors = {name: _view(memory, kind, shape, start) for name, kind, shape, start in places}
        self.tensors |= {name: self.tensors[other] for name, other in tied.items()}
        self.layout = {"tensors": places, "tied": dict(tied)}

    def described(self, holder: int, descriptor: int) -> str:
        """JSON for `staged_tensors`: process `holder` has the memory open as `descriptor`."""
        return json.dumps({"place": f"/proc/{holder}/fd/{descriptor}", **self.layout})

    def close(self) -> None:
        """Free this process's hold on the memory."""
        self.tensors.clear()
        os.close(self.descriptor)


def staged_tensors(description: str, *, all_names: bool = False) -> Iterator[tuple[str, Tensor]]:
    """The staged tensors behind a `described` text, mapped copy-on-write into this process.

    Tied parameters come once, or with `all_names` under each of their names.
    """
    staged = json.loads(description)
    with open(staged["place"], "rb") as file:
        memory = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
    found = {name: _view(memory, kind, shape, start) for name, kind, shape, start in staged["tensors"]}
    yield from found.items()
    if all_names:
        yield from ((name, found[other]) for name, other in staged["tied"].items())


def _view(memory: mmap.mmap, kind: str, shape: Sequence[int], start: int) -> Tensor:
    dtype: torch.dtype = getattr(torch, kind)
    count = torch.Size(shape).numel()
    if not count:
        return torch.empty(shape, dtype=dtype)
    return torch.frombuffer(memory, dtype=dtype, count=count, offset=start).view(*shape)


SHOWN = 4
Named = tuple[str, Tensor]
Load = Callable[[Iterable[Named]], Collection[str] | None]
_loaded: weakref.WeakSet[nn.Module] = weakref.WeakSet()
"""Models of this process that had a complete first load."""


def load_checked(model: nn.Module, tensors: Iterable[Named], load: Load) -> None:
    """`load_watched` until it succeeded once for this model, then plainly `load`."""
    if model in _loaded:
        load(tensors)
    else:
        load_watched(model, tensors, load)
        _loaded.add(model)


def load_watched(model: nn.Module, tensors: Iterable[Named], load: Load) -> None:
    """The first `load` of `tensors` into `model`; raises WorkerFailed naming tensors skipped or parameters not written.

    `load` may return the names of all parameters it wrote, for kernels that keep values elsewhere. If the model is
    divided over processes, each has a part and need not read the experts of others, so skipped tensors are allowed.
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
            f"{type(model).__name__} ignores {_shown(skipped, len(watched))} published tensors — this engine cannot "
            "generate with this model; use engine torch, or another version of the engine"
        )
    check_written(model, told)


def poison(model: nn.Module) -> None:
    """Fill all parameters that a checkpoint contains with NaN."""
    for _, parameter in _loadable(model):
        parameter.detach().fill_(torch.nan)


def check_written(model: nn.Module, told: Collection[str] | None = None) -> None:
    """Raise WorkerFailed for parameters that still hold what `poison` wrote, or are missing from `told`, if given."""
    parameters = list(_loadable(model))
    empty = [
        name
        for name, parameter in parameters
        if bool(parameter.isnan().any()) or (told is not None and name not in told)
    ]
    if empty:
        raise WorkerFailed(
            f"no published values, or NaN, were written into {_shown(empty, len(parameters))} parameters of "
            f"{type(model).__name__} — this engine cannot generate with this model; use engine torch, or another "
            "version of the engine"
        )


class Watched(Tensor):
    """A tensor that records whether its values were used, beyond its shape and type."""

    was_read: bool

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Results are plain tensors."""
        with torch._C.DisableTorchFunctionSubclass():
            result = func(*args, **(kwargs or {}))
        # Properties are read through their getters, and shapes by methods that return no tensor.
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
    """Parameters that a checkpoint has values for: neither quantized ones nor scales, which engines compute."""
    for name, parameter in model.named_parameters():
        if parameter.is_floating_point() and parameter.itemsize > 1 and not name.endswith(("scale", "scale_inv")):
            yield name, parameter


def _shown(names: list[str], of: int) -> str:
    more = ", …" if len(names) > SHOWN else ""
    return f"{len(names)} of {of} ({', '.join(names[:SHOWN])}{more})"


LOADER = f"{__name__}.load_into_sglang"
"""The import path of the loader, for SGLang's `custom_weight_loader`."""
POISON, CHECK = "poison", "check"
"""Sent in place of a description, before and after a first load that bypasses the staged memory."""


def load_into_sglang(model: Any, named: Iterable[tuple[str, Tensor]]) -> None:
    """Load the staged weights into SGLang's model; `named` has one empty tensor, whose name describes where they are.

    Called by SGLang in each of its processes that hold a part of the model. The first load is checked: raises
    WorkerFailed if a tensor is skipped or a parameter not written.
    """
    ((told, _),) = named
    if told == POISON:
        poison(model)
    elif told == CHECK:
        check_written(model)
    else:
        load_checked(model, staged_tensors(told), model.load_weights)


EXTENSION = f"{__name__}.Extension"
"""The import path for vLLM's `worker_extension_cls`."""
LOAD = "load_staged"


class Extension:
    """Mixed by vLLM into the class of its workers, each of which holds a part of the model."""

    model_runner: Any

    def load_staged(self, description: str) -> None:
        """Replace all weights; the first time, raises WorkerFailed if a tensor is skipped or a parameter not written.

        Tied tensors are loaded under each of their names: on a CPU the output layer's weights are packed apart from the
        embedding's, and would stay the old ones.
        """
        load_checked(self.model_runner.get_model(), staged_tensors(description, all_names=True), self._reload)

    def _reload(self, named: Iterable[Named]) -> Collection[str] | None:
        """Returns the names of the parameters that vLLM's model reports as written, if it does."""
        model = self.model_runner.get_model()
        plain: Load = model.load_weights
        written: Collection[str] | None = None

        def load_weights(weights: Iterable[Named]) -> Collection[str] | None:
            nonlocal written
            written = plain(weights)
            return written

        _pack_anew(model)
        # reload_weights writes these names to vLLM's log only.
        model.load_weights = load_weights
        try:
            self.model_runner.reload_weights(weights_iterator=iter(named), is_checkpoint_format=True)
        finally:
            del model.load_weights
        return written


def _pack_anew(model: Any) -> None:
    """On a CPU, drop the kernels of the experts so that each version gets new ones.

    vLLM packs experts only when it makes their kernel: it would take later, unpacked versions for packed ones.
    """
    if next(model.parameters()).device.type != "cpu":
        return
    for layer in model.modules():
        if hasattr(layer, "quant_method") and hasattr(layer.quant_method, "moe_kernel"):
            layer.quant_method.moe_kernel = None
