"""A model's parameters under the names a checkpoint stores them by, for publishing, exporting and replacing weights.

transformers fuses parameters as it loads: all experts of a layer are one tensor, `mlp.experts.gate_up_proj`, while the
checkpoint has `mlp.experts.7.gate_proj.weight` and so on. Published weights and exported models use the checkpoint's
names, which other engines know: an unknown name they skip silently. Each stored tensor is a view of one parameter,
found by running transformers' own save conversion on tensors without memory.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from transformers.conversion_mapping import get_checkpoint_conversion_mapping

from distflow.errors import UserError
from distflow.workers.models import outline

if TYPE_CHECKING:
    from transformers import PreTrainedModel
from collections.abc import Iterable

from distflow.types import Version

# transformers compiles some six hundred patterns when it is first asked how a model is stored, and keeps them: once for
# all workers of a host, whose fork server imports this, and not in each of them.
get_checkpoint_conversion_mapping("")


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """One tensor of the checkpoint as a view of a parameter: `mlp.experts.7.up_proj.weight` of `gate_up_proj`."""

    name: str
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    """First element, from the parameter's first."""
    whole: bool
    """Whether it is the parameter itself."""

    @property
    def last(self) -> int:
        """Last element, from the parameter's first."""
        return self.offset + sum((size - 1) * step for size, step in zip(self.shape, self.stride, strict=True))

    def of(self, parameter: Tensor) -> Tensor:
        """The view of `parameter`, which has the shape that transformers gives it."""
        if self.whole:
            return parameter
        assert parameter.is_contiguous(), f"{self.name} can only be a view of a contiguous parameter"
        return parameter.as_strided(self.shape, self.stride, parameter.storage_offset() + self.offset)


@dataclass(frozen=True, slots=True)
class StoredModel:
    """How a model is stored: which tensors each parameter becomes, in the order of the parameters."""

    tensors: Mapping[str, Sequence[StoredTensor]]
    """By the parameter's name; tied parameters once."""
    tied: Mapping[str, str]
    """Further names of tied parameters, each with its name in `tensors`."""

    def cut(self, parameter: str, tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
        """The stored tensors of a whole parameter, by name: views of it."""
        return ((stored.name, stored.of(tensor)) for stored in self.tensors[parameter])

    def by_rows(self, parameter: str, shape: Sequence[int]) -> bool:
        """Whether the parameter is stored as several tensors each of which is in a single row of it, as experts are."""
        parts, row = self.tensors[parameter], math.prod(shape[1:])
        return len(parts) > 1 and all(part.offset // row == part.last // row for part in parts)

    def cut_rows(self, parameter: str, first: int, rows: Tensor) -> Iterator[tuple[str, Tensor]]:
        """The stored tensors in these rows, of which the first has number `first`: views of them."""
        skipped = first * rows[0].numel()
        for part in self.tensors[parameter]:
            if skipped <= part.offset < skipped + rows.numel():
                yield part.name, rows.as_strided(part.shape, part.stride, part.offset - skipped)

    def places(self) -> dict[str, tuple[str, StoredTensor]]:
        """Each stored name with its parameter and the view of it; tied parameters under all their names."""
        found = {stored.name: (name, stored) for name, parts in self.tensors.items() for stored in parts}
        for alias, name in self.tied.items():
            (stored,) = self.tensors[name]
            found[alias] = (name, stored)
        return found


def stored_model(model: Mapping[str, Any]) -> StoredModel:
    """The stored form of a `models.<name>` section's model; the same for every worker of the run.

    Raises UserError as `distflow.workers.models` does, and if a stored tensor is not part of a single parameter.
    """
    return stored_form(outline(model))


def constants_of(model: PreTrainedModel) -> dict[str, Tensor]:
    """Return what a checkpoint has besides parameters: numbers that training leaves as they are.

    A router's bias is one. Some are in float32 beside parameters in half precision.
    """
    saved = model.state_dict(keep_vars=True)
    return {name: kept for name, kept in model.named_buffers() if name in saved and kept.is_floating_point()}


def stored_form(skeleton: PreTrainedModel) -> StoredModel:
    """The stored form of a model, which may be on the meta device; raises UserError as `stored_model` does."""
    first: dict[int, str] = {}
    parameters: dict[str, Tensor] = {}
    tied: dict[str, str] = {}
    for name, parameter in skeleton.named_parameters(remove_duplicate=False):
        if id(parameter) in first:
            tied[name] = first[id(parameter)]
        else:
            first[id(parameter)] = name
            parameters[name] = parameter.detach()
    parameters |= constants_of(skeleton)
    memory = {_memory(tensor): name for name, tensor in parameters.items()}
    found: dict[str, list[StoredTensor]] = {name: [] for name in parameters}
    for stored, tensor in _converted(skeleton, parameters).items():
        source = memory.get(_memory(tensor))
        if source is None:
            kind = skeleton.config.model_type
            raise UserError(
                f"models: model_type {kind!r} stores {stored} as a combination of several parameters, which cannot be "
                "published tensor by tensor — train a model of another family"
            )
        shape, offset = tuple(tensor.shape), int(tensor.storage_offset())
        whole = (shape, tensor.stride(), offset) == (tuple(parameters[source].shape), parameters[source].stride(), 0)
        found[source].append(StoredTensor(stored, shape, tensor.stride(), offset, whole))
    for name, parts in found.items():
        size = sum(torch.Size(part.shape).numel() for part in parts)
        assert size == parameters[name].numel(), f"{size} elements of {name} are stored, not {parameters[name].numel()}"
    return StoredModel(found, tied)


def _memory(tensor: Tensor) -> int:
    """An identity of the storage, equal for views of one tensor even on the meta device."""
    return int(tensor.untyped_storage()._cdata)


def _converted(skeleton: PreTrainedModel, parameters: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors that transformers would save, as views of the parameters."""
    from transformers.core_model_loading import revert_weight_conversion

    with _Views():
        converted: dict[str, Tensor] = revert_weight_conversion(skeleton, dict(parameters))
    return converted


class _Views(TorchFunctionMode):
    """Turns `contiguous` into a no-op, so that slices stay views."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.Tensor.contiguous:
            return args[0]
        return func(*args, **(kwargs or {}))


class ParameterTable:
    """Replaces parameters in place, by their stored names, and knows when all of them have been replaced.

    Tied parameters are expected once, under any of their names. Without `stored` every parameter is stored as one
    tensor under its own name, and parameters that are the same tensor are tied.
    """

    def __init__(self, parameters: Mapping[str, Tensor], stored: StoredModel | None = None) -> None:
        self.parameters = parameters
        self._places = _own_names(parameters) if stored is None else stored.places()
        self.missing: set[str] = set()
        self.incoming: Version | None = None
        self.version: Version | None = None
        self.unwritten = False
        self._expected = {_key(place) for place in self._places.values()}

    def kept(self) -> list[Tensor]:
        """Weights from which versions are made, beside those in use: none, each version brings all."""
        return []

    def poison(self) -> None:
        """Fill everything with NaN, of which nothing may remain after the first complete version."""
        for parameter in self.parameters.values():
            parameter.detach().fill_(torch.nan)
        self.unwritten = True

    def begin(self, version: Version) -> None:
        """Start replacing all weights; an update in progress is abandoned."""
        self.version, self.incoming = None, version
        self.missing = set(self._expected)

    @torch.no_grad()
    def update(self, tensors: Iterable[tuple[str, Tensor]]) -> None:
        """Copy tensors in. Raises KeyError for an unknown name, ValueError for a wrong shape or outside an update."""
        if self.incoming is None:
            raise ValueError("update of an engine's weights outside begin_update and end_update")
        for name, tensor in tensors:
            if name not in self._places:
                raise KeyError(f"this model stores no tensor {name!r}; its tensors are for example {self._examples()}")
            parameter, stored = self._places[name]
            target = stored.of(self.parameters[parameter])
            if tensor.shape != target.shape:
                raise ValueError(f"parameter {name}: got shape {tuple(tensor.shape)}, expected {tuple(target.shape)}")
            target.copy_(tensor)
            self.missing.discard(_key(self._places[name]))

    def end(self) -> Version:
        """Complete the update. Raises ValueError naming what is missing; more updates may then follow."""
        if self.incoming is None:
            raise ValueError("end_update of an engine's weights without begin_update")
        if self.missing:
            some = ", ".join(sorted(self.missing)[:3])
            raise ValueError(
                f"version {self.incoming.number} of term {self.incoming.term} lacks {len(self.missing)} of "
                f"{len(self._expected)} tensors, for example {some}; the engine cannot serve it"
            )
        if self.unwritten:
            self._check_written()
            self.unwritten = False
        self.version, self.incoming = self.incoming, None
        return self.version

    def _check_written(self) -> None:
        empty = [name for name, tensor in self.parameters.items() if bool(tensor.isnan().any())]
        if empty:
            raise ValueError(
                f"{len(empty)} of {len(self.parameters)} parameters contain NaN after a complete version, for example "
                f"{', '.join(empty[:3])}: nothing was written there, or the trainer published NaN"
            )

    def _examples(self) -> str:
        return ", ".join(list(self._places)[:3])


Place = tuple[str, StoredTensor]


def _key(place: Place) -> str:
    """The name under which a tensor counts as missing: the same for tied ones."""
    parameter, stored = place
    return parameter if stored.whole else stored.name


def _own_names(parameters: Mapping[str, Tensor]) -> dict[str, Place]:
    first: dict[int, str] = {}
    found = {}
    for name, tensor in parameters.items():
        shape = tuple(tensor.shape)
        found[name] = (first.setdefault(id(tensor), name), StoredTensor(name, shape, tensor.stride(), 0, True))
    return found
