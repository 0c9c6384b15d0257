"""The backend made of plain torch: replicas of one device each, any transformers causal language model."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from distflow.data.batch import Batch
from distflow.runtime.checkpoint.format import Shard, share_of
from distflow.runtime.protocols import BackendSpec, TokenScores
from distflow.workers.backends.backend_options import TorchBackendOptions
from distflow.workers.backends.optimizer import PolicyOptimizer, check_same
from distflow.workers.backends.recomputing import recompute_activations
from distflow.workers.backends.scoring import Scorer
from distflow.workers.models import build_model
from distflow.workers.offload import Parking, bytes_on
from distflow.workers.parameters import stored_model

_MODEL = "model."


class TorchBackend:
    """Implements `distflow.runtime.protocols.Backend`."""

    lockstep = False

    def __init__(self, spec: BackendSpec) -> None:
        options = TorchBackendOptions.parse(spec.options)
        self._replicas = spec.replicas
        self._device = torch.device(spec.device)
        self._model = build_model(
            spec.model, device=spec.device, seed=spec.seed, load_weights=True, deterministic=spec.batch_invariant
        )
        # Evaluation mode: dropout would make the log-probs of one batch differ from call to call.
        self._model.eval()
        self._parameters = dict(self._model.named_parameters())
        self._stored = stored_model(spec.model)
        for parameter in self._parameters.values():
            parameter.requires_grad_(spec.trainable)
        # Activation checkpointing would have to carry the layout of the packed tokens into the backward pass.
        recompute = spec.trainable and bool(spec.model["gradient_checkpointing"])
        self._scorer = Scorer(
            self._model, self._device, packed=options.packed and not recompute, deterministic=spec.batch_invariant
        )
        self._parking = Parking(self._device)
        self._optimizer: PolicyOptimizer | None = None
        if spec.trainable:
            self._optimizer = PolicyOptimizer(
                self._parameters, spec.model["optimizer"], spec.training_steps, spec.replicas
            )
        if recompute:
            recompute_activations(self._model)

    def join(self) -> None:
        """Every replica holds everything."""

    def idle(self, *, grad: bool) -> None:
        """Nothing before `apply` is collective."""

    def score(self, batch: Batch, *, temperature: float, grad: bool, entropy: bool) -> TokenScores:
        """Log-probs (nats) of the response tokens at `temperature`, and the entropy of their distributions: [B, T].

        Raises ValueError for a temperature ≤ 0, an empty prompt, or `grad` on a frozen model.
        """
        if grad:
            self._trained("score(grad=True)")
        self._parking.check()
        with torch.set_grad_enabled(grad):
            return self._scorer.score(batch, temperature=temperature, entropy=entropy)

    def accumulate(self, loss_sum: Tensor) -> None:
        """Backward of a summed loss."""
        optimizer = self._trained("accumulate")
        torch.autograd.backward(loss_sum)
        optimizer.collect()

    def apply(self, denominator: float) -> float:
        """Optimizer step; see `PolicyOptimizer.apply`."""
        return self._trained("apply").apply(denominator)

    @property
    def learning_rate(self) -> float:
        """Of the next `apply`; 0 for a frozen model."""
        return 0.0 if self._optimizer is None else self._optimizer.learning_rate

    def named_shards(self) -> Iterator[tuple[str, Tensor]]:
        """All weights as a checkpoint has them, tied ones once, detached; they change with the next `apply`."""
        self._parking.wait()
        for name, parameter in self._parameters.items():
            yield from self._stored.cut(name, parameter.detach())

    def state_shards(self) -> Iterator[Shard]:
        """This replica's share of the weights, the moments and the step counter."""
        self._parking.wait()
        return share_of(self._state(), self._replicas.rank, self._replicas.size)

    @torch.no_grad()
    def load_state(self, tensors: Mapping[str, Tensor]) -> None:
        """Go on from a saved state; raises ValueError naming what is missing, unknown or of another shape."""
        check_same(self._state(), tensors)
        for name, parameter in self._parameters.items():
            if self._optimizer is not None:
                parameter.copy_(tensors[_MODEL + name])
        if self._optimizer is not None:
            self._optimizer.clear()
            self._optimizer.load_state(tensors)

    def offload(self) -> None:
        """Move everything to the host's memory; on a CPU that is where it is."""
        optimizer = self._optimizer
        moved = [] if optimizer is None else [*optimizer.held(), *optimizer.gradients()]
        self._parking.put([*self._parameters.values(), *moved])

    def onload(self) -> None:
        """Move it back."""
        self._parking.fetch()

    def device_bytes(self) -> Mapping[str, int]:
        """Bytes on the device by what they are for: weights, gradients, optimizer."""
        optimizer = self._optimizer
        return {
            "weights": bytes_on(self._device, self._parameters.values()),
            "gradients": 0 if optimizer is None else bytes_on(self._device, optimizer.gradients()),
            "optimizer": 0 if optimizer is None else bytes_on(self._device, optimizer.held()),
        }

    def close(self) -> None:
        """Nothing is held beyond memory."""

    def _state(self) -> dict[str, Tensor]:
        """Views of everything that is saved; nothing for a frozen model, which is built anew."""
        if self._optimizer is None:
            return {}
        weights = {_MODEL + name: parameter.detach() for name, parameter in self._parameters.items()}
        return {**weights, **self._optimizer.state_tensors()}

    def _trained(self, what: str) -> PolicyOptimizer:
        if self._optimizer is None:
            raise ValueError(f"{what} on a frozen model: it is not trained by any step of the flow")
        return self._optimizer
