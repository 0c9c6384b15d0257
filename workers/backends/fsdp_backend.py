"""The backend that shards a model over the replicas by rows: FSDP2 (arXiv 2304.11277), torch's `fully_shard`.

Between rounds a replica holds its rows of every parameter, and of their gradients and moments; a layer is gathered only
while it is computed. A half-precision model computes in half precision, but its rows, its gradient sums and the
optimizer step are float32: the rows are the masters.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
)
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from distflow.config.plugins import PluginUse
from distflow.data.batch import Batch, Ragged
from distflow.runtime.checkpoint.format import Shard, whole
from distflow.runtime.protocols import BackendSpec, TokenScores, TokenValues
from distflow.workers.adapters import own_name
from distflow.workers.backends.backend_options import FsdpBackendOptions
from distflow.workers.backends.model_backend import ModelBackend
from distflow.workers.backends.optimizer import STEPS, ShardedOptimizer, check_names, check_tensor
from distflow.workers.backends.row_sharding import Rows
from distflow.workers.backends.update_rules import MOMENTS
from distflow.workers.models import torch_dtype
from distflow.workers.offload import Offloader, bytes_on

PIECE_BYTES = 64 << 20
"""Larger parameters that are stored as several tensors are published in pieces of about this size."""
_HALF = (torch.bfloat16, torch.float16)
Computed = tuple[Tensor, Tensor | None, Tensor, Tensor | None, Tensor | None]
"""Log-probs or values, entropy, mask, [B, T] each; candidates and their log-probs, [B, T, K]."""


class FsdpBackend(ModelBackend[ShardedOptimizer]):
    """Implements `distflow.runtime.protocols.Backend`."""

    lockstep = True

    def __init__(self, spec: BackendSpec) -> None:
        self._options = FsdpBackendOptions.parse(spec.options)
        self._options.check(PluginUse(spec.model, spec.device, trained=spec.trainable))
        # On the host: the device need never hold the whole model.
        super().__init__(spec, home="cpu", packed=self._options.packed)
        self._dtype = torch_dtype(spec.model)
        self._masters = spec.trainable and self._dtype in _HALF
        if self._masters:
            for parameter in self._learned.values():
                parameter.data = parameter.data.float()
        self._whole = _Whole(self._model)
        self._all_rows: dict[str, Rows] = {}
        self._rows: dict[str, Rows] = {}
        """Of what is trained."""
        self._offloader = Offloader(self._device)

    def join(self) -> None:
        """Keep this replica's rows of every parameter; raises UserError if the replicas have to share a GPU."""
        self._check_own_gpu("fsdp")
        if self._device.type == "cuda":
            torch.cuda.set_device(self._device)
        self._divide(DeviceMesh(self._device.type, torch.arange(dist.get_world_size())))
        self._scorer.device = self._device
        self._all_rows = {name: Rows(parameter) for name, parameter in self._model.named_parameters()}
        self._rows = {own_name(name): rows for name, rows in self._all_rows.items() if own_name(name) in self._learned}
        if self._spec.trainable:
            self._optimizer = ShardedOptimizer(
                {name: rows.held for name, rows in self._rows.items()},
                self._spec.model["optimizer"],
                self._spec.training_steps,
                self._spec.replicas,
            )

    def idle(self, *, grad: bool) -> None:
        """A round with one token, whose loss is multiplied by zero."""
        loss = self._nothing(grad=grad)
        if grad:
            torch.autograd.backward(loss)

    def apply(self, denominator: float) -> float:
        """Optimizer step; see `ShardedOptimizer.apply`."""
        optimizer = self._trained("apply")
        for rows in self._rows.values():
            rows.take_gradient()
        norm = optimizer.apply(denominator)
        for rows in self._rows.values():
            rows.clear_gradient()
        return norm

    def named_shards(self) -> Iterator[tuple[str, Tensor]]:
        """All weights as a checkpoint has them, tied ones once; each parameter is gathered when its turn comes.

        Fused experts, which are one parameter, are gathered a few at a time.
        """
        for name, rows in self._rows.items():
            stored, large = self._stored, math.prod(rows.shape) * self._dtype.itemsize > PIECE_BYTES
            if large and stored is not None and stored.by_rows(name, rows.shape):
                for first, piece in rows.pieces(self._dtype, self._device, PIECE_BYTES):
                    yield from stored.cut_rows(name, first, piece)
            else:
                yield from self._cut(name, rows.gathered(self._dtype, self._device))
        yield from self._constant_shards()

    def state_shards(self) -> Iterator[Shard]:
        """This replica's rows of weights and moments; the first replica adds the step counter."""
        if self._optimizer is None:
            return
        self._offloader.wait()
        state = self._optimizer.state_tensors()
        if self._spec.replicas.rank == 0:
            yield whole(STEPS, state[STEPS])
        for name, rows in self._rows.items():
            if not rows.held.numel():
                continue
            yield rows.shard(f"model.{name}", rows.held.detach().to(self._dtype))
            if self._masters:
                yield rows.shard(f"optimizer.master.{name}", rows.held.detach())
            for moment in MOMENTS:
                yield rows.shard(f"optimizer.{moment}.{name}", state[f"optimizer.{moment}.{name}"])

    @torch.no_grad()
    def load_state(self, tensors: Mapping[str, Tensor]) -> None:
        """Continue from a saved state, tensor by tensor; raises ValueError for what is missing, unknown or misshapen.

        If there are masters, the weights, which are the masters rounded, are not read.
        """
        if self._optimizer is None:
            return
        kinds = ("model", *(f"optimizer.{moment}" for moment in MOMENTS))
        kinds += ("optimizer.master",) if self._masters else ()
        check_names({STEPS, *(f"{kind}.{name}" for kind in kinds for name in self._rows)}, tensors)
        self._optimizer.clear()
        self._optimizer.set_steps(int(tensors[STEPS]))
        state = self._optimizer.state_tensors()
        for name, rows in self._rows.items():
            rows.refresh()
            targets = {f"optimizer.{moment}.{name}": state[f"optimizer.{moment}.{name}"] for moment in MOMENTS}
            targets[f"{'optimizer.master' if self._masters else 'model'}.{name}"] = rows.held
            for key, target in targets.items():
                given = tensors[key]
                check_tensor(key, given, rows.shape, target.dtype)
                target.copy_(rows.of(given))

    def offload(self) -> None:
        """Move everything to the host's memory; on a CPU, and with `cpu_offload`, it is there already."""
        self._move(torch.device("cpu"))
        if self._optimizer is not None and not self._on_host:
            self._offloader.put(self._optimizer.held())

    def onload(self) -> None:
        """Move it back."""
        self._move(self._device)
        self._offloader.fetch()

    def device_bytes(self) -> Mapping[str, int]:
        """Bytes on the device by purpose: weights (this replica's rows), gradients, optimizer."""
        optimizer = self._optimizer
        return {
            "weights": bytes_on(self._device, [rows.held for rows in self._all_rows.values()]),
            "gradients": bytes_on(self._device, [rows.gradient for rows in self._rows.values()]),
            "optimizer": 0 if optimizer is None else bytes_on(self._device, optimizer.held()),
        }

    def _divide(self, mesh: DeviceMesh) -> None:
        """Shard layer by layer; the rest (embeddings, head, last norm) forms the outermost module."""
        precision = MixedPrecisionPolicy(cast_forward_inputs=False)
        if self._masters:
            precision = MixedPrecisionPolicy(self._dtype, torch.float32, cast_forward_inputs=False)
        offload: OffloadPolicy = CPUOffloadPolicy() if self._options.cpu_offload else OffloadPolicy()

        def divide(module: nn.Module, *, reshard_after_forward: bool) -> None:
            fully_shard(
                module,
                mesh=mesh,
                reshard_after_forward=reshard_after_forward,
                mp_policy=precision,
                offload_policy=offload,
            )

        for module in self._model.modules():
            if isinstance(module, GradientCheckpointingLayer):
                divide(module, reshard_after_forward=self._options.reshard_after_forward)
        # The backward pass begins with the outermost module, so it need not be resharded.
        divide(self._whole, reshard_after_forward=False)
        for part in self._parts():
            # Sums, not means; where the library has no scaled sum, divide afterwards.
            part.set_gradient_divide_factor(1.0)
            part.set_force_sum_reduction_for_comms(True)

    def _parts(self) -> list[FSDPModule]:
        return [module for module in self._whole.modules() if isinstance(module, FSDPModule)]

    def _forward(self, batch: Batch, *, temperature: float, entropy: bool, candidates: int | Ragged) -> TokenScores:
        def compute() -> Computed:
            found = self._scorer.score(batch, temperature=temperature, entropy=entropy, candidates=candidates)
            of_candidates = (found.candidate_ids_BTK, found.candidate_logprobs_BTK)
            return found.logprobs_BT, found.entropy_BT, found.mask_BT, *of_candidates

        return TokenScores(*self._gathered(compute))

    def _forward_values(self, batch: Batch) -> TokenValues:
        def compute() -> Computed:
            values = self._scorer.values(batch)
            return values.values_BT, None, values.mask_BT, None, None

        values_BT, _, mask_BT, *_ = self._gathered(compute)
        return TokenValues(values_BT, mask_BT)

    def _gathered(self, compute: Callable[[], Computed]) -> Computed:
        """A forward pass with all parameters gathered."""
        self._offloader.check()
        computed: Computed = self._whole(compute)
        if not torch.is_grad_enabled():
            # Only a backward pass would free what stays gathered, and the next step would not update it.
            for part in self._parts():
                part.reshard()
        return computed

    @property
    def _on_host(self) -> bool:
        return self._device.type == "cpu" or self._options.cpu_offload

    def _move(self, device: torch.device) -> None:
        if self._on_host:
            return
        self._whole.to(device)
        for name, parameter in self._model.named_parameters():
            self._all_rows[name].rebind(parameter)


class _Whole(nn.Module):
    """A whole forward pass, logits included, as one module: `fully_shard` gathers parameters for its duration."""

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__()
        self.model = model

    def forward(self, compute: Callable[[], Computed]) -> Computed:
        """Returns a tuple: FSDP hooks the backward pass to tensors, which it looks for in tuples only."""
        return compute()
