"""The backend in plain torch: each replica holds the whole of any transformers causal language model on one device."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor

from distflow.config.plugins import PluginUse
from distflow.data.batch import Batch, Ragged
from distflow.runtime.checkpoint.format import Shard, share_of
from distflow.runtime.protocols import BackendSpec, TokenScores, TokenValues
from distflow.workers.backends.backend_options import TorchBackendOptions
from distflow.workers.backends.model_backend import ModelBackend
from distflow.workers.backends.optimizer import PolicyOptimizer, check_same
from distflow.workers.backends.text_judge import TextJudge
from distflow.workers.heads import SCORE
from distflow.workers.models import inner_matrices
from distflow.workers.offload import Offloader, bytes_on
from distflow.workers.quantized import narrow_layers

_MODEL = "model."


class TorchBackend(ModelBackend[PolicyOptimizer]):
    """Implements `distflow.runtime.protocols.Backend`."""

    lockstep = False

    def __init__(self, spec: BackendSpec) -> None:
        options = TorchBackendOptions.parse(spec.options)
        options.check(PluginUse(spec.model, spec.device, trained=spec.trainable))
        super().__init__(spec, home=spec.device, packed=options.packed)
        self._parameters = self._learned
        narrow = [tensor for layer in narrow_layers(self._model) for tensor in (layer.packed, layer.scales)]
        self._weights = [*self._model.parameters(), *narrow]
        self._offloader = Offloader(self._device)
        self._texts = TextJudge(self._model, spec) if self._head == SCORE else None
        if spec.trainable:
            self._optimizer = PolicyOptimizer(
                self._parameters,
                spec.model["optimizer"],
                spec.training_steps,
                spec.replicas,
                inner_matrices(self._model),
            )

    def join(self) -> None:
        """Nothing to divide: every replica holds everything."""

    def idle(self, *, grad: bool) -> None:
        """Nothing to do: nothing before `apply` is collective."""

    def _forward(self, batch: Batch, *, temperature: float, entropy: bool, candidates: int | Ragged) -> TokenScores:
        self._offloader.check()
        return self._scorer.score(batch, temperature=temperature, entropy=entropy, candidates=candidates)

    def _forward_values(self, batch: Batch) -> TokenValues:
        self._offloader.check()
        return self._scorer.values(batch)

    def longest_text(self) -> int | None:
        """Tokens of the longest text that a model with `head: score` takes; None: not known."""
        return self._judge().longest

    def encode(self, prompt: str, response: str) -> list[int]:
        """Token ids of a prompt and a response; raises ValueError for a model with another head."""
        return self._judge().encode(prompt, response)

    def score_texts(self, rows: Sequence[Sequence[int]], *, tokens: int) -> Tensor:
        """One number for each row of token ids, [B]; raises ValueError for a model with another head."""
        self._offloader.check()
        return self._judge().score(rows, self._device, tokens)

    def rate_texts(self, rows: Sequence[Sequence[int]]) -> Tensor:
        """The same with a gradient, all at once; raises ValueError for a frozen model too."""
        self._trained("rate_texts")
        self._offloader.check()
        return self._judge().rate(rows, self._device)

    def _judge(self) -> TextJudge:
        self._expect_head(SCORE)
        assert self._texts is not None, "it was built with the model"
        return self._texts

    def apply(self, denominator: float) -> float:
        """Optimizer step; see `PolicyOptimizer.apply`."""
        return self._trained("apply").apply(denominator)

    def forget_failed(self) -> bool:
        """Drop what a forward or backward that raised has left; see `PolicyOptimizer.forget_failed`."""
        return self._optimizer is None or self._optimizer.forget_failed()

    def named_shards(self) -> Iterator[tuple[str, Tensor]]:
        """All weights as a checkpoint has them, tied ones once, or the adapters; the next `apply` changes them."""
        self._offloader.wait()
        for name, parameter in self._parameters.items():
            yield from self._cut(name, parameter.detach())
        yield from self._constant_shards()

    def state_shards(self) -> Iterator[Shard]:
        """This replica's part of the weights, the moments and the step counter."""
        self._offloader.wait()
        return share_of(self._state(), self._spec.replicas.rank, self._spec.replicas.size)

    @torch.no_grad()
    def load_state(self, tensors: Mapping[str, Tensor]) -> None:
        """Continue from a saved state; raises ValueError naming what is missing, unknown or of another shape."""
        check_same(self._state(), tensors)
        if self._optimizer is None:
            return
        for name, parameter in self._parameters.items():
            parameter.copy_(tensors[_MODEL + name])
        self._optimizer.clear()
        self._optimizer.load_state(tensors)

    def offload(self) -> None:
        """Move everything to the host's memory; on a CPU it is there already."""
        optimizer = self._optimizer
        moved = [] if optimizer is None else [*optimizer.held(), *optimizer.gradients()]
        self._offloader.put([*self._weights, *moved])

    def onload(self) -> None:
        """Move it back."""
        self._offloader.fetch()

    def device_bytes(self) -> Mapping[str, int]:
        """Bytes on the device by purpose: weights, gradients, optimizer."""
        optimizer = self._optimizer
        return {
            "weights": bytes_on(self._device, self._weights),
            "gradients": 0 if optimizer is None else bytes_on(self._device, optimizer.gradients()),
            "optimizer": 0 if optimizer is None else bytes_on(self._device, optimizer.held()),
        }

    def _state(self) -> dict[str, Tensor]:
        """Views of everything that is saved; nothing for a frozen model, which is rebuilt."""
        if self._optimizer is None:
            return {}
        weights = {_MODEL + name: parameter.detach() for name, parameter in self._parameters.items()}
        return {**weights, **self._optimizer.state_tensors()}
