"""The DeepSpeed backend: ZeRO 0 to 3 (arXiv:1910.02054) over the replicas of a training pool.

DeepSpeed computes gradients, sums them and shards the state. Scaling and clipping happen here, in one operation, just
before its optimizer steps (`apply`): so the division comes before clipping, and every stage gives the torch backend's
numbers. Its checkpoints are not used either: the state is saved in the form that all backends share.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from distflow.comm.collective import losing_members
from distflow.config.plugins import PluginUse
from distflow.data.batch import Batch, Ragged
from distflow.errors import UserError
from distflow.runtime.checkpoint.format import Shard
from distflow.runtime.protocols import BackendSpec, TokenScores, TokenValues
from distflow.workers.backends.deepspeed_config import DeepSpeedOptions, engine_config
from distflow.workers.backends.deepspeed_engine import (
    BorrowedLinear,
    ScoringModel,
    ensure_group,
    load_deepspeed,
    make_engine,
    taken_apart,
)
from distflow.workers.backends.deepspeed_optimizer import ZeroOptimizer
from distflow.workers.backends.model_backend import ModelBackend
from distflow.workers.backends.optimizer import check_same
from distflow.workers.backends.update_rules import adamw
from distflow.workers.heads import output_layer
from distflow.workers.offload import bytes_on

GATHERED_BYTES = 64 << 20
"""In stage 3, weights are gathered for publishing in pieces of about this size (larger parameters singly)."""


class DeepSpeedBackend(ModelBackend[ZeroOptimizer]):
    """Implements `distflow.runtime.protocols.Backend`."""

    lockstep = True
    """Only in stages 2 and 3."""

    def __init__(self, spec: BackendSpec) -> None:
        options = DeepSpeedOptions.parse(spec.options)
        self._stage = options.zero
        # Stage 3 gathers weights in every forward and backward, stage 2 sums gradients in every backward. Stage 1 sums
        # them once, in `apply`, and so does stage 0: there, replicas may have different numbers of micro-batches.
        self.lockstep = self._stage == 3 or (self._stage == 2 and spec.trainable)
        use = PluginUse(spec.model, spec.device, trained=spec.trainable)
        options.check(use)
        self._config = engine_config(options, use)
        self._deepspeed = load_deepspeed(torch.device(spec.device))
        super().__init__(spec, home="cpu" if self._stage == 3 else spec.device, packed=options.packed)
        self._scorer.device = self._device
        self._parameters = self._learned
        self._frozen = [p for p in self._model.parameters() if all(p is not one for one in self._learned.values())]
        self._shapes = {name: parameter.shape for name, parameter in self._parameters.items()}
        self._scoring = ScoringModel(self._model, self._scorer)
        self._engine: Any = None

    def join(self) -> None:
        """Divide the model over the replicas.

        Raises UserError unless all of them have the same settings and, on GPUs, one GPU each.
        """
        self._check_same_settings()
        if not self._spec.trainable and self._stage < 3:
            return
        ensure_group(self._device)
        self._check_own_gpu("deepspeed")
        self._borrow_head()
        settings = self._spec.model["optimizer"]
        steps = adamw(self._parameters, settings) if self._spec.trainable else None
        with losing_members("while the model was divided"):
            self._engine = make_engine(self._deepspeed, self._scoring, steps, self._config, self._device)
        if self._spec.trainable:
            self._optimizer = ZeroOptimizer(
                self._engine,
                self._parameters,
                self._shapes,
                settings,
                self._spec.training_steps,
                self._spec.replicas,
            )

    def _check_same_settings(self) -> None:
        """Raises UserError if they differ, before any collective call hangs or mixes up weights."""
        replicas = self._spec.replicas
        text = json.dumps([self._config, self._spec.model["optimizer"]], sort_keys=True, default=list)
        own = float(zlib.crc32(text.encode()) % 2**20)
        sums = torch.tensor([own, own * own], dtype=torch.float64, device=self._device)
        replicas.sum_([sums])
        if sums.tolist() != [replicas.size * own, replicas.size * own * own]:
            raise UserError(
                f"backend deepspeed: the {replicas.size} training replicas have different backend_options; set them "
                "for the pool, not for one of its workers (layout.pools.NAME.each)"
            )

    def _borrow_head(self) -> None:
        head = output_layer(self._model)
        if self._stage < 3:
            return
        if not isinstance(head, nn.Linear):
            raise UserError(
                f"backend_options.zero 3 with an output layer of type {type(head).__name__}: a plain linear one is "
                "needed; use zero: 2"
            )
        self._scorer.use_head(BorrowedLinear(head))

    def idle(self, *, grad: bool) -> None:
        """Score one token; with `grad` also run a backward pass, in which every gradient grows by zero."""
        loss = self._nothing(grad=grad)
        if grad:
            self.accumulate(loss)

    def _forward(self, batch: Batch, *, temperature: float, entropy: bool, candidates: int | Ragged) -> TokenScores:
        forward = self._scoring if self._engine is None else self._engine
        joined = forward(batch=batch, temperature=temperature, entropy=entropy, candidates=candidates)
        return taken_apart(joined, batch.ragged("response_ids").mask().to(self._device), entropy, candidates)

    def _forward_values(self, batch: Batch) -> TokenValues:
        forward = self._scoring if self._engine is None else self._engine
        values_BT = forward(batch=batch, temperature=None, entropy=False, candidates=0)
        return TokenValues(values_BT, batch.ragged("response_ids").mask().to(self._device))

    def apply(self, denominator: float) -> float:
        """Optimizer step; see `ZeroOptimizer.apply`."""
        optimizer = self._trained("apply")
        if optimizer.untouched and not self.lockstep and self._spec.replicas.size > 1:
            # The other replicas sum gradients now; this one had no samples and adds zeros.
            self.idle(grad=True)
        with losing_members("while gradients were summed"):
            return optimizer.apply(denominator)

    def forget_failed(self) -> bool:
        """Say whether a forward that raised has left nothing: of a frozen model that is not divided."""
        return self._engine is None

    def named_shards(self) -> Iterator[tuple[str, Tensor]]:
        """All weights as a checkpoint has them, tied ones once, detached.

        Below stage 3 they change with the next `apply`. In stage 3 all replicas gather them, a few at a time.
        """
        for names in self._pieces():
            parameters = [self._parameters[name] for name in names]
            with self._deepspeed.zero.GatheredParameters(parameters, enabled=self._stage == 3):
                for name in names:
                    yield from self._cut(name, self._parameters[name].detach())
        yield from self._constant_shards()

    def _pieces(self) -> Iterator[list[str]]:
        piece: list[str] = []
        size = 0
        for name, parameter in self._parameters.items():
            nbytes = self._shapes[name].numel() * parameter.element_size()
            if piece and size + nbytes > GATHERED_BYTES:
                yield piece
                piece, size = [], 0
            piece.append(name)
            size += nbytes
        if piece:
            yield piece

    def state_shards(self) -> Iterator[Shard]:
        """This replica's part of the weights, the moments and the step counter."""
        return iter(()) if self._optimizer is None else self._optimizer.state_shards()

    def load_state(self, tensors: Mapping[str, Tensor]) -> None:
        """Continue from a saved state; raises ValueError naming what is missing, unknown or of another shape."""
        if self._optimizer is None:
            check_same({}, tensors)
        else:
            self._optimizer.load_state(tensors)

    def offload(self) -> None:
        """Move what DeepSpeed can move to the CPU's memory.

        It cannot do so for a frozen model in stage 3, nor in stage 1 with bfloat16.
        """
        if self._optimizer is not None:
            self._optimizer.offload()
        elif self._engine is None:
            self._model.to("cpu")

    def onload(self) -> None:
        """Move it back."""
        if self._optimizer is not None:
            self._optimizer.onload()
        elif self._engine is None:
            self._model.to(self._device)

    def device_bytes(self) -> Mapping[str, int]:
        """Bytes on the device by purpose: weights, optimizer."""
        whole = list(self._parameters.values())
        weights = whole if self._optimizer is None else self._optimizer.weights()
        weights += [getattr(parameter, "ds_tensor", parameter) for parameter in self._frozen]
        return {
            "weights": bytes_on(self._device, weights),
            "optimizer": 0 if self._optimizer is None else bytes_on(self._device, self._optimizer.held()),
        }

    def close(self) -> None:
        """Let DeepSpeed remove its hooks from the model, unless the process group is gone because the run has ended."""
        if self._engine is not None and torch.distributed.is_initialized():
            self._engine.destroy()
