"""Replaces a model's parameters by name, in place, and knows when they are whole."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

from distflow.types import Version
from distflow.workers.stored import StoredModel, StoredTensor


class ParameterTable:
    """Parameters by the names under which they are stored (see `distflow.workers.stored`).

    Tied ones, which are one tensor, are wanted once, under any name. Without `stored` every parameter is one tensor of
    its own name, and those that are the same tensor are tied.
    """

    def __init__(self, parameters: Mapping[str, Tensor], stored: StoredModel | None = None) -> None:
        self.parameters = parameters
        self._places = _own_names(parameters) if stored is None else stored.places()
        self.missing: set[str] = set()
        self.incoming: Version | None = None
        self.version: Version | None = None
        self.unwritten = False

    def poison(self) -> None:
        """Fill everything with NaN, of which the first whole version must leave nothing."""
        for parameter in self.parameters.values():
            parameter.detach().fill_(torch.nan)
        self.unwritten = True

    def begin(self, version: Version) -> None:
        """From here on the weights are torn; an update under way is given up."""
        self.version, self.incoming = None, version
        self.missing = {_key(place) for place in self._places.values()}

    @torch.no_grad()
    def update(self, tensors: Iterable[tuple[str, Tensor]]) -> None:
        """Copy in. Raises KeyError for an unknown name, ValueError for a wrong shape or outside an update."""
        if self.incoming is None:
            raise ValueError("update of an engine's weights outside begin_update and end_update")
        for name, tensor in tensors:
            if name not in self._places:
                raise KeyError(f"{name!r} is no tensor of this model; it is stored as for example {self._examples()}")
            parameter, stored = self._places[name]
            target = stored.of(self.parameters[parameter])
            if tensor.shape != target.shape:
                raise ValueError(f"parameter {name}: got shape {tuple(tensor.shape)}, expected {tuple(target.shape)}")
            target.copy_(tensor)
            self.missing.discard(_key(self._places[name]))

    def end(self) -> Version:
        """The weights are whole. Raises ValueError naming what is missing; more updates may then follow."""
        if self.incoming is None:
            raise ValueError("end_update of an engine's weights without begin_update")
        if self.missing:
            some = ", ".join(sorted(self.missing)[:3])
            raise ValueError(
                f"version {self.incoming.number} of term {self.incoming.term} lacks {len(self.missing)} of "
                f"{len({_key(place) for place in self._places.values()})} tensors, for example {some}; the engine "
                "stays torn"
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
                f"{len(empty)} of {len(self.parameters)} parameters are not numbers after a whole version, for example "
                f"{', '.join(empty[:3])}: nothing was written there, or the trainer published NaN"
            )

    def _examples(self) -> str:
        return ", ".join(list(self._places)[:3])


Place = tuple[str, StoredTensor]


def _key(place: Place) -> str:
    """The name under which a tensor is missing: tied ones have the same."""
    parameter, stored = place
    return parameter if stored.whole else stored.name


def _own_names(parameters: Mapping[str, Tensor]) -> dict[str, Place]:
    first: dict[int, str] = {}
    found = {}
    for name, tensor in parameters.items():
        shape = tuple(tensor.shape)
        found[name] = (first.setdefault(id(tensor), name), StoredTensor(name, shape, tensor.stride(), 0, True))
    return found
