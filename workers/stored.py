"""The form in which a model is stored on disk, beside the one in which transformers holds it.

transformers fuses parameters as it loads: all experts of a layer are one tensor, `mlp.experts.gate_up_proj`, while the
checkpoint has `mlp.experts.7.gate_proj.weight` and so on. Published weights and exported models have the names of the
checkpoint, which engines of other projects know: an unknown name they skip without a word. Each stored tensor is a view
of one parameter, found by running transformers' own conversion for saving on tensors without memory.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from distflow.errors import UserError
from distflow.workers.models import outline

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """One tensor of the checkpoint as a view of a parameter: `mlp.experts.7.up_proj.weight` of `gate_up_proj`."""

    name: str
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    """First element, from the parameter's first."""
    whole: bool
    """It is the parameter itself."""

    @property
    def last(self) -> int:
        """Last element, from the parameter's first."""
        return self.offset + sum((size - 1) * step for size, step in zip(self.shape, self.stride, strict=True))

    def of(self, parameter: Tensor) -> Tensor:
        """The view; `parameter` has the shape in which transformers holds it."""
        if self.whole:
            return parameter
        assert parameter.is_contiguous(), f"{self.name} is read from a contiguous parameter"
        return parameter.as_strided(self.shape, self.stride, parameter.storage_offset() + self.offset)


@dataclass(frozen=True, slots=True)
class StoredModel:
    """How a model is stored: which tensors each parameter becomes, in the order of the parameters."""

    tensors: Mapping[str, Sequence[StoredTensor]]
    """By the parameter's name; tied parameters once."""
    tied: Mapping[str, str]
    """Further names of tied parameters, each with its name in `tensors`."""

    def cut(self, parameter: str, tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
        """What a whole parameter is stored as, by name: views of it."""
        return ((stored.name, stored.of(tensor)) for stored in self.tensors[parameter])

    def by_rows(self, parameter: str, shape: Sequence[int]) -> bool:
        """Whether each of several tensors lies in one row of the parameter of this shape: experts do."""
        parts, row = self.tensors[parameter], math.prod(shape[1:])
        return len(parts) > 1 and all(part.offset // row == part.last // row for part in parts)

    def cut_rows(self, parameter: str, first: int, rows: Tensor) -> Iterator[tuple[str, Tensor]]:
        """What the rows from number `first` on are stored as: views of them."""
        skipped = first * rows[0].numel()
        for part in self.tensors[parameter]:
            if skipped <= part.offset < skipped + rows.numel():
                yield part.name, rows.as_strided(part.shape, part.stride, part.offset - skipped)

    def places(self) -> dict[str, tuple[str, StoredTensor]]:
        """By each stored name the parameter that has it, and where; a tied parameter under all its names."""
        found = {stored.name: (name, stored) for name, parts in self.tensors.items() for stored in parts}
        for alias, name in self.tied.items():
            (stored,) = self.tensors[name]
            found[alias] = (name, stored)
        return found


def stored_model(model: Mapping[str, Any]) -> StoredModel:
    """Of a `models.<name>` section; the same for every worker of the run, whatever it has loaded.

    Raises UserError as `distflow.workers.models` does, and where a stored tensor is not a part of one parameter.
    """
    return stored_form(outline(model))


def stored_form(skeleton: PreTrainedModel) -> StoredModel:
    """Of a model, which may have no memory; raises UserError as `stored_model` does."""
    first: dict[int, str] = {}
    parameters: dict[str, Tensor] = {}
    tied: dict[str, str] = {}
    for name, parameter in skeleton.named_parameters(remove_duplicate=False):
        if id(parameter) in first:
            tied[name] = first[id(parameter)]
        else:
            first[id(parameter)] = name
            parameters[name] = parameter.detach()
    memory = {_memory(tensor): name for name, tensor in parameters.items()}
    found: dict[str, list[StoredTensor]] = {name: [] for name in parameters}
    for stored, tensor in _converted(skeleton, parameters).items():
        source = memory.get(_memory(tensor))
        if source is None:
            kind = skeleton.config.model_type
            raise UserError(
                f"models: model_type {kind!r} is stored with {stored} put together from several parameters, which "
                f"cannot be published tensor by tensor — train a model of another family"
            )
        shape, offset = tuple(tensor.shape), int(tensor.storage_offset())
        whole = (shape, tensor.stride(), offset) == (tuple(parameters[source].shape), parameters[source].stride(), 0)
        found[source].append(StoredTensor(stored, shape, tensor.stride(), offset, whole))
    for name, parts in found.items():
        size = sum(torch.Size(part.shape).numel() for part in parts)
        assert size == parameters[name].numel(), f"{size} elements of {name} are stored, not {parameters[name].numel()}"
    return StoredModel(found, tied)


def _memory(tensor: Tensor) -> int:
    """Equal for views of the same memory, though there be none."""
    return int(tensor.untyped_storage()._cdata)


def _converted(skeleton: PreTrainedModel, parameters: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """As transformers would save them, in views of what is given."""
    from transformers.core_model_loading import revert_weight_conversion

    with _Views():
        converted: dict[str, Tensor] = revert_weight_conversion(skeleton, dict(parameters))
    return converted


class _Views(TorchFunctionMode):
    """Nothing is copied to be contiguous: what is cut from a tensor stays a view of it."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.Tensor.contiguous:
            return args[0]
        return func(*args, **(kwargs or {}))
