"""Which elements of each parameter a replica owns under ZeRO, and where DeepSpeed keeps their state.

ZeRO 1 and 2 concatenate all parameters into one long vector, of which each replica owns one run. ZeRO 3 shards each
parameter separately. Either way a replica owns at most one run of elements of each parameter; its float32 weights,
gradients and moments are in flat vectors that hold such runs one after another (with padding at the end).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn


@dataclass(frozen=True, slots=True, eq=False)
class Stretch:
    """The `length` elements of a parameter, from number `start` on, that this replica owns."""

    name: str
    parameter: nn.Parameter
    start: int
    length: int
    flat: nn.Parameter
    """What the optimizer steps: a vector of float32 weights, or the parameter itself if nothing is sharded."""
    at: int
    """Where the run begins in `flat`."""
    group: int = 0
    """The parameter group of the optimizer that it belongs to."""

    def of(self, flat: Tensor) -> Tensor:
        """This run's elements of a vector laid out as `flat`, as a view."""
        return flat.detach().view(-1)[self.at : self.at + self.length]

    def cut(self, whole: Tensor) -> Tensor:
        """This run's elements of a tensor of the parameter's shape."""
        return whole.reshape(-1)[self.start : self.start + self.length]


class Partition(Protocol):
    """A replica's part of a model and its optimizer."""

    runs: list[Stretch]

    def gradients(self) -> Iterator[tuple[Stretch, Tensor]]:
        """The summed gradients of each run, as views that the optimizer's step will read; valid before that step."""
        ...

    def weights(self, run: Stretch) -> Tensor:
        """The run's elements of the weights that the model computes with, as a view."""
        ...

    def load_weights(self, name: str, whole: Tensor) -> None:
        """Set the weights that the model computes with: all elements of this parameter that the replica holds."""
        ...


def partition_of(optimizer: Any, parameters: Mapping[str, nn.Parameter], stage: int) -> Partition:
    """The partition of the optimizer that DeepSpeed made for the stage."""
    if stage == 0:
        return Undivided(parameters)
    return Divided(optimizer, parameters) if stage == 3 else Flattened(optimizer, parameters)


class Undivided:
    """Stage 0: every replica holds everything."""

    def __init__(self, parameters: Mapping[str, nn.Parameter]) -> None:
        self._parameters = parameters
        self.runs = [Stretch(name, p, 0, p.numel(), p, 0) for name, p in parameters.items()]

    def gradients(self) -> Iterator[tuple[Stretch, Tensor]]:
        """Gradients of whole parameters."""
        for run in self.runs:
            assert run.parameter.grad is not None, "every parameter has a gradient once they are summed"
            yield run, run.parameter.grad

    def weights(self, run: Stretch) -> Tensor:
        """The parameter itself."""
        return run.of(run.parameter)

    def load_weights(self, name: str, whole: Tensor) -> None:
        """Into the parameter."""
        self._parameters[name].detach().copy_(whole)


class Flattened:
    """Stages 1 and 2: every replica holds all weights, and owns one run of the vector of all parameters."""

    def __init__(self, optimizer: Any, parameters: Mapping[str, nn.Parameter]) -> None:
        self._optimizer = optimizer
        # DeepSpeed has a separate optimizer class for stage 1 in bfloat16.
        self._bf16 = not hasattr(optimizer, "single_partition_of_fp32_groups")
        flats = optimizer.fp32_groups_flat_partition if self._bf16 else optimizer.single_partition_of_fp32_groups
        self._parameters = parameters
        self.runs = []
        for name, parameter in parameters.items():
            mapping: Any = parameter._hp_mapping  # type: ignore[attr-defined]
            if mapping is not None:
                mine, there = mapping.lp_fragment_address, mapping.hp_fragment_address
                group = mapping.param_group_index
                self.runs.append(Stretch(name, parameter, mine.start, mine.numel, flats[group], there.start, group))

    def gradients(self) -> Iterator[tuple[Stretch, Tensor]]:
        """Parts of the owned vectors, one for each parameter group."""
        for group, vector in enumerate(self._vectors()):
            runs = [run for run in self.runs if run.group == group]
            if isinstance(vector, Tensor):
                yield from ((run, run.of(vector)) for run in runs)
            else:
                # One tensor per run, in the order of the vector, and one for the padding.
                yield from zip(sorted(runs, key=lambda run: run.at), vector, strict=False)

    def _vectors(self) -> list[Any]:
        """The gradients of each parameter group: one vector, or a list of its parts."""
        if self._bf16:
            return list(self._optimizer.fp32_groups_gradient_flat_partition)
        if self._optimizer.cpu_offload:
            return [flat.grad for flat in self._optimizer.single_partition_of_fp32_groups]
        gradients = self._optimizer.averaged_gradients
        return [gradients[group] for group in sorted(gradients)]

    def weights(self, run: Stretch) -> Tensor:
        """A part of the whole parameter."""
        return run.cut(run.parameter.detach())

    def load_weights(self, name: str, whole: Tensor) -> None:
        """Into the whole parameter."""
        self._parameters[name].detach().copy_(whole)


class Divided:
    """Stage 3: a replica holds one part of each parameter, and the whole only while computing with it."""

    def __init__(self, optimizer: Any, parameters: Mapping[str, nn.Parameter]) -> None:
        self._optimizer = optimizer
        rank = torch.distributed.get_rank()
        self.runs = []
        for name, parameter in parameters.items():
            p: Any = parameter
            group, at, size = optimizer.grad_position[optimizer.get_param_id(p)]
            length = max(0, min(size, p.ds_numel - rank * size))
            self.runs.append(Stretch(name, p, rank * size, length, optimizer.fp32_partitioned_groups_flat[group], at))
        self._named = {run.name: run for run in self.runs}
        self._of = {id(run.parameter): run for run in self.runs}

    def gradients(self) -> Iterator[tuple[Stretch, Tensor]]:
        """Each parameter's part. Its padding is zeroed: DeepSpeed never writes it, but includes it in the norm."""
        if self._optimizer.offload_optimizer:
            # DeepSpeed's own norms, which include the padding, must not cause the step to be skipped.
            norms = self._optimizer.norm_for_param_grads
            norms.update(dict.fromkeys(norms, 0.0))
        for group, parameters in enumerate(self._optimizer.fp16_groups):
            for number, parameter in enumerate(parameters):
                run = self._of[id(parameter)]
                part = self._part(run, group, number)
                part[run.length :].zero_()
                yield run, part[: run.length]

    def _part(self, run: Stretch, group: int, number: int) -> Tensor:
        if not self._optimizer.offload_optimizer:
            part: Tensor = self._optimizer.averaged_gradients[group][number]
            return part.view(-1)
        assert run.flat.grad is not None, "DeepSpeed has a buffer for offloaded gradients"
        return run.flat.grad.view(-1)[run.at : run.at + run.parameter.ds_tensor.numel()]  # type: ignore[attr-defined]

    def weights(self, run: Stretch) -> Tensor:
        """The part."""
        part: Tensor = run.parameter.ds_tensor  # type: ignore[attr-defined]
        return part.detach().view(-1)[: run.length]

    def load_weights(self, name: str, whole: Tensor) -> None:
        """Into the part."""
        run = self._named[name]
        self.weights(run).copy_(run.cut(whole))
