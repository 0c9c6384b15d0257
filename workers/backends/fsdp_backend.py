"""The backend that divides a model over the replicas by rows: FSDP2 (arXiv 2304.11277), `fully_shard` of torch.

Between rounds a replica holds its rows of every parameter, of their gradients and moments; a layer is whole only while
it is computed. Weights of half precision are computed in it, while the rows that are held, the sums of gradients and
the step are float32: the rows are the masters.
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

from distflow.config.options import PluginUse
from distflow.data.batch import Batch
from distflow.runtime.checkpoint.format import Shard, whole
from distflow.runtime.protocols import BackendSpec, TokenScores
from distflow.workers.backends.backend_options import FsdpBackendOptions
from distflow.workers.backends.model_backend import DUMMY_BATCH, ModelBackend
from distflow.workers.backends.optimizer import MOMENTS, STEPS, ShardedOptimizer, check_names, check_tensor
from distflow.workers.backends.row_sharding import Rows
from distflow.workers.models import torch_dtype
from distflow.workers.offload import Parking, bytes_on

PIECE_BYTES = 64 << 20
"""Larger parameters that are stored in several tensors are published in pieces of about this size."""
_HALF = (torch.bfloat16, torch.float16)


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
            for parameter in self._model.parameters():
                parameter.data = parameter.data.float()
        self._whole = _Whole(self._model)
        self._rows: dict[str, Rows] = {}
        self._parking = Parking(self._device)

    def join(self) -> None:
        """Keep this replica's rows of every parameter; raises UserError if the replicas have to share a GPU."""
        self._check_own_gpu("fsdp")
        if self._device.type == "cuda":
            torch.cuda.set_device(self._device)
        self._divide(DeviceMesh(self._device.type, torch.arange(dist.get_world_size())))
        self._scorer.device = self._device
        self._rows = {name: Rows(parameter) for name, parameter in self._model.named_parameters()}
        if self._spec.trainable:
            self._optimizer = ShardedOptimizer(
                {name: rows.held for name, rows in self._rows.items()},
                self._spec.model["optimizer"],
                self._spec.training_steps,
                self._spec.replicas,
            )

    def idle(self, *, grad: bool) -> None:
        """A round with one token, whose loss counts for nothing."""
        scores = self.score(DUMMY_BATCH, temperature=1.0, grad=grad, entropy=False)
        if grad:
            torch.autograd.backward(scores.logprobs_BT.sum() * 0.0)

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
        """All weights as a checkpoint has them, tied ones once, each parameter put together when its turn comes.

        Of fused experts, which are one parameter, some are put together at a time.
        """
        for name, rows in self._rows.items():
            if math.prod(rows.shape) * self._dtype.itemsize > PIECE_BYTES and self._stored.by_rows(name, rows.shape):
                for first, piece in rows.pieces(self._dtype, self._device, PIECE_BYTES):
                    yield from self._stored.cut_rows(name, first, piece)
            else:
                yield from self._stored.cut(name, rows.gathered(self._dtype, self._device))

    def state_shards(self) -> Iterator[Shard]:
        """This replica's rows of weights and moments; the first replica has the step counter."""
        if self._optimizer is None:
            return
        self._parking.wait()
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
        """Go on from a saved state, tensor by tensor; raises ValueError naming what is missing, unknown or misshapen.

        Where there are masters the weights, which are those rounded, are not read.
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
        """Move everything to the host's memory; on a CPU, and with `cpu_offload`, that is where it is."""
        self._move(torch.device("cpu"))
        if self._optimizer is not None and not self._on_host:
            self._parking.put(self._optimizer.held())

    def onload(self) -> None:
        """Move it back."""
        self._move(self._device)
        self._parking.fetch()

    def device_bytes(self) -> Mapping[str, int]:
        """Bytes on the device by what they are for: weights (of this replica's rows), gradients, optimizer."""
        optimizer = self._optimizer
        return {
            "weights": bytes_on(self._device, [rows.held for rows in self._rows.values()]),
            "gradients": bytes_on(self._device, [rows.gradient for rows in self._rows.values()]),
            "optimizer": 0 if optimizer is None else bytes_on(self._device, optimizer.held()),
        }

    def _divide(self, mesh: DeviceMesh) -> None:
        """Layer by layer; what is left (embeddings, head, last norm) is the outermost part."""
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
        # The backward begins with the outermost part: it may stay.
        divide(self._whole, reshard_after_forward=False)
        for part in self._parts():
            # Sums, not means; by division afterwards where the library knows no sum that is scaled.
            part.set_gradient_divide_factor(1.0)
            part.set_force_sum_reduction_for_comms(True)

    def _parts(self) -> list[FSDPModule]:
        return [module for module in self._whole.modules() if isinstance(module, FSDPModule)]

    def _forward(self, batch: Batch, *, temperature: float, entropy: bool) -> TokenScores:
        def compute() -> TokenScores:
            return self._scorer.score(batch, temperature=temperature, entropy=entropy)

        self._parking.check()
        logprobs_BT, entropy_BT, mask_BT = self._whole(compute)
        if not torch.is_grad_enabled():
            # Only a backward would free what stays after the forward, and the next step would not change it.
            for part in self._parts():
                part.reshard()
        return TokenScores(logprobs_BT, entropy_BT, mask_BT)

    @property
    def _on_host(self) -> bool:
        return self._device.type == "cpu" or self._options.cpu_offload

    def _move(self, device: torch.device) -> None:
        if self._on_host:
            return
        self._whole.to(device)
        for name, parameter in self._model.named_parameters():
            self._rows[name].rebind(parameter)


class _Whole(nn.Module):
    """All of a forward, logits included, as one module: what `fully_shard` puts together for its duration."""

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__()
        self.model = model

    def forward(self, compute: Callable[[], TokenScores]) -> tuple[Tensor, Tensor | None, Tensor]:
        """As a tuple: the backward is noticed by tensors, which are looked for in tuples only."""
        scores = compute()
        return scores.logprobs_BT, scores.entropy_BT, scores.mask_BT
