"""Replaces a model's parameters by name, in place, and knows when they are whole."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

from distflow.types import Version


class ParameterTable:
    """Parameters by their Hugging Face names. Tied ones, which are one tensor, are wanted once, under any name."""

    def __init__(self, parameters: Mapping[str, Tensor]) -> None:
        self.parameters = parameters
        first_name: dict[int, str] = {}
        self.canonical = {name: first_name.setdefault(id(p), name) for name, p in parameters.items()}
        self.missing: set[str] = set()
        self.incoming: Version | None = None
        self.version: Version | None = None

    def begin(self, version: Version) -> None:
        """From here on the weights are torn; an update under way is given up."""
        self.version, self.incoming = None, version
        self.missing = set(self.canonical.values())

    @torch.no_grad()
    def update(self, tensors: Iterable[tuple[str, Tensor]]) -> None:
        """Copy in. Raises KeyError for an unknown name, ValueError for a wrong shape or outside an update."""
        if self.incoming is None:
            raise ValueError("update of an engine's weights outside begin_update and end_update")
        for name, tensor in tensors:
            if name not in self.parameters:
                raise KeyError(f"{name!r} is not a parameter of this model; it has for example {self._examples()}")
            target = self.parameters[name]
            if tensor.shape != target.shape:
                raise ValueError(f"parameter {name}: got shape {tuple(tensor.shape)}, expected {tuple(target.shape)}")
            target.copy_(tensor)
            self.missing.discard(self.canonical[name])

    def end(self) -> Version:
        """The weights are whole. Raises ValueError naming what is missing; more updates may then follow."""
        if self.incoming is None:
            raise ValueError("end_update of an engine's weights without begin_update")
        if self.missing:
            some = ", ".join(sorted(self.missing)[:3])
            raise ValueError(
                f"version {self.incoming.number} of term {self.incoming.term} lacks {len(self.missing)} of "
                f"{len(set(self.canonical.values()))} parameters, for example {some}; the engine stays torn"
            )
        self.version, self.incoming = self.incoming, None
        return self.version

    def _examples(self) -> str:
        return ", ".join(list(self.parameters)[:3])
