"""What all backends have in common: a transformers model, the scorer of its tokens, and the optimizer if it is trained.

Shapes: B samples, T response tokens of the longest sample, N of all samples, K candidates for each.
"""

from __future__ import annotations

import textwrap
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any, Generic, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from distflow.config.plugins import PluginUse, refuse_float16
from distflow.data.batch import Batch, Ragged
from distflow.errors import UserError
from distflow.flow.families import refuse_attention
from distflow.runtime.checkpoint.format import Shard
from distflow.runtime.protocols import BackendSpec, Repeats, TokenScores, TokenValues
from distflow.workers.adapters import adapters_of, adapters_off
from distflow.workers.backends.optimizer import ScheduledOptimizer, check_same
from distflow.workers.backends.scoring import Scorer
from distflow.workers.heads import SCORE, head_of
from distflow.workers.models import build_model
from distflow.workers.parameters import constants_of, stored_model
from distflow.workers.quantized import narrow_layers

_ONE_TOKEN = Ragged.from_rows([[0]], torch.int64)
DUMMY_BATCH = Batch({"prompt_ids": _ONE_TOKEN, "response_ids": _ONE_TOKEN})
"""What an idle replica computes: one response token, whose loss is multiplied by zero."""
OptimizerT = TypeVar("OptimizerT", bound=ScheduledOptimizer)


class ModelBackend(ABC, Generic[OptimizerT]):
    """Base of the classes that implement `distflow.runtime.protocols.Backend`."""

    _optimizer: OptimizerT | None = None

    def __init__(self, spec: BackendSpec, *, home: str, packed: bool) -> None:
        """Build the model on device `home`; `packed`: compute no padding, where the model's attention allows it."""
        use = PluginUse(spec.model, spec.device, trained=spec.trainable)
        refuse_float16(use)
        self._spec = spec
        self._device = torch.device(spec.device)
        # In evaluation mode: dropout would make the log-probs of one batch differ from call to call.
        self._model: PreTrainedModel = build_model(
            spec.model,
            device=home,
            seed=spec.seed,
            load_weights=True,
            deterministic=spec.batch_invariant,
            adapters=spec.trainable,
            narrow=True,
            new_head=spec.trainable,
        )
        text = self._model.config.get_text_config().to_dict()
        refuse_attention(replace(use, config=text))
        attention = str(spec.model.get("attn_implementation") or "auto")
        self._head = head_of(spec.model)
        self.quadratic = _quadratic(self._model)
        """A row of n tokens costs n + quadratic·n² forwards of a token without attention."""
        adapters = adapters_of(self._model)
        self._learned: dict[str, nn.Parameter] = adapters or dict(self._model.named_parameters())
        """What is trained, published and saved, by name: all parameters, or the adapters alone."""
        for parameter in self._model.parameters():
            parameter.requires_grad_(False)
        for parameter in self._learned.values():
            parameter.requires_grad_(spec.trainable)
        self._stored = None if adapters else stored_model(spec.model)
        stored = () if self._stored is None else self._stored.tensors
        self._constants = [name for name in constants_of(self._model) if name in stored]
        if spec.trainable and bool(spec.model["gradient_checkpointing"]):
            _recompute_activations(self._model)
        self.packs = False
        """Whether it computes a prompt once for the rows that have it, and no padding."""
        if self._head != SCORE:
            packed = packed and attention == "auto"
            self._scorer = Scorer(self._model, torch.device(home), packed=packed, deterministic=spec.batch_invariant)
            self.packs = self._scorer.packs
        if attention != "auto":
            # Behind what the scorer has computed at home, which may be a CPU that lacks the kernel.
            _use_attention(self._model, attention)

    def score(
        self, batch: Batch, *, temperature: float, grad: bool, entropy: bool, candidates: int | Ragged = 0
    ) -> TokenScores:
        """Log-probs (nats) of the response tokens at `temperature`, and the entropy of their distributions: [B, T].

        `candidates`: how many of the likeliest tokens to score in their places too, or which ones, [N, K] ids.
        Raises ValueError for a temperature ≤ 0, an empty prompt, or `grad` on a frozen model.
        """
        self._expect_head("tokens")
        if grad:
            self._trained("score(grad=True)")
        with torch.set_grad_enabled(grad):
            return self._forward(batch, temperature=temperature, entropy=entropy, candidates=candidates)

    def values(self, batch: Batch, *, grad: bool) -> TokenValues:
        """Values of the states before each response token: [B, T].

        Raises ValueError for a model without a value head, an empty prompt, or `grad` on a frozen model.
        """
        self._expect_head("value")
        if grad:
            self._trained("values(grad=True)")
        with torch.set_grad_enabled(grad):
            return self._forward_values(batch)

    def _nothing(self, *, grad: bool) -> Tensor:
        """What a replica without samples computes in a round, as a loss of zero."""
        if self._head == "value":
            return self.values(DUMMY_BATCH, grad=grad).values_BT.sum() * 0.0
        return self.score(DUMMY_BATCH, temperature=1.0, grad=grad, entropy=False).logprobs_BT.sum() * 0.0

    lockstep: bool

    @abstractmethod
    def idle(self, *, grad: bool) -> None:
        """Take part in a round without samples."""

    @abstractmethod
    def _forward(self, batch: Batch, *, temperature: float, entropy: bool, candidates: int | Ragged) -> TokenScores:
        """Score, with or without gradients as torch is set."""

    @abstractmethod
    def _forward_values(self, batch: Batch) -> TokenValues:
        """Values, with or without gradients as torch is set."""

    def without_adapters(self) -> AdaptersOff:
        """The model as it would be without its adapters, as a frozen model of its own that shares the weights."""
        return AdaptersOff(self)

    def _cut(self, name: str, tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
        """What a whole parameter is published as: views of it."""
        return iter([(name, tensor)]) if self._stored is None else self._stored.cut(name, tensor)

    def _constant_shards(self) -> Iterator[tuple[str, Tensor]]:
        """What a checkpoint has besides parameters, for engines that load none."""
        for name in self._constants:
            yield from self._cut(name, self._model.get_buffer(name).to(self._device))

    def accumulate(self, loss_sum: Tensor) -> None:
        """Backward pass of a summed loss; gradients add up until `apply`."""
        self._trained("accumulate").backward(loss_sum)

    def schedule_at(self, done: int) -> None:
        """The next `apply` has the learning rate after `done` optimizer steps."""
        self._trained("schedule_at").scheduled = done

    @property
    def learning_rate(self) -> float:
        """Learning rate of the next `apply`; 0 for a frozen model."""
        return 0.0 if self._optimizer is None else self._optimizer.learning_rate

    def close(self) -> None:
        """Give everything back; here nothing is held but memory."""

    def _trained(self, method: str) -> OptimizerT:
        """The optimizer; raises ValueError if the model is frozen."""
        if not self._spec.trainable:
            raise ValueError(f"{method} on a frozen model: it is not trained by any step of the flow")
        assert self._optimizer is not None, "join comes before everything else"
        return self._optimizer

    def _expect_head(self, head: str) -> None:
        if self._head != head:
            raise ValueError(f"the model has `head: {self._head}`, and the step needs one with `head: {head}`")

    def _check_own_gpu(self, backend: str) -> None:
        """Raises UserError if the replicas have to share a GPU: libraries that divide models cannot do that."""
        if self._device.type == "cuda" and "nccl" not in dist.get_backend_config():
            raise UserError(f"backend {backend}: every training worker needs a GPU of its own; lower the pool's count")


class AdaptersOff:
    """Implements `distflow.runtime.protocols.Backend`: a model with adapters, as it is without them.

    It holds nothing of its own: the backend with the adapters divides, moves and saves what both have.
    """

    def __init__(self, inner: ModelBackend[Any]) -> None:
        self._inner = inner
        self.lockstep = inner.lockstep
        self.quadratic, self.packs = inner.quadratic, inner.packs
        self.learning_rate = 0.0

    def join(self) -> None:
        """Nothing to divide."""

    def idle(self, *, grad: bool) -> None:
        """Take part in a forward of the other replicas; raises ValueError for one with gradients."""
        self._frozen(grad, "idle(grad=True)")
        with adapters_off(self._inner._model):
            self._inner.idle(grad=False)

    def score(
        self, batch: Batch, *, temperature: float, grad: bool, entropy: bool, candidates: int | Ragged = 0
    ) -> TokenScores:
        """As that of the model with adapters; raises ValueError for `grad`."""
        self._frozen(grad, "score(grad=True)")
        with adapters_off(self._inner._model):
            return self._inner.score(batch, temperature=temperature, grad=False, entropy=entropy, candidates=candidates)

    def values(self, batch: Batch, *, grad: bool) -> TokenValues:
        """As that of the model with adapters; raises ValueError for `grad`."""
        self._frozen(grad, "values(grad=True)")
        with adapters_off(self._inner._model):
            return self._inner.values(batch, grad=False)

    def accumulate(self, loss_sum: Tensor) -> None:
        """Raises ValueError: it is not trained."""
        self._frozen(True, "accumulate")

    def apply(self, denominator: float) -> float:
        """Raises ValueError: it is not trained."""
        raise self._refusal("apply")

    def forget_failed(self) -> bool:
        """Forget as the model with adapters does, if its backend can do that."""
        return isinstance(self._inner, Repeats) and self._inner.forget_failed()

    def schedule_at(self, done: int) -> None:
        """Raises ValueError: it is not trained."""
        self._frozen(True, "schedule_at")

    def named_shards(self) -> Iterator[tuple[str, Tensor]]:
        """None: engines get the weights of trained models."""
        return iter(())

    def state_shards(self) -> Iterator[Shard]:
        """None: it is rebuilt."""
        return iter(())

    def load_state(self, tensors: Mapping[str, Tensor]) -> None:
        """Raises ValueError for anything: nothing of it is saved."""
        check_same({}, tensors)

    def offload(self) -> None:
        """Nothing of its own."""

    def onload(self) -> None:
        """Nothing of its own."""

    def close(self) -> None:
        """Nothing of its own."""

    def _frozen(self, grad: bool, method: str) -> None:
        if grad:
            raise self._refusal(method)

    @staticmethod
    def _refusal(method: str) -> ValueError:
        return ValueError(f"{method} on a frozen model: it is not trained by any step of the flow")


def _use_attention(model: PreTrainedModel, chosen: str) -> None:
    """Make a model compute attention so; raises UserError if the kernel's package is missing, or the hub's kernel."""
    try:
        # Other kernels than those of one organization are taken too: each is pinned by its commit.
        model.set_attn_implementation(chosen, allow_all_kernels=True)
    except (ImportError, OSError, ValueError) as error:
        reason = textwrap.shorten(str(error), 300, placeholder=" …")
        raise UserError(
            f"models.NAME.attn_implementation {chosen}: {reason}; install it, or use sdpa or auto"
        ) from error


def _recompute_activations(model: PreTrainedModel) -> None:
    """Make all layers of a model in evaluation mode recompute their activations in the backward pass."""
    model.gradient_checkpointing_enable({"use_reentrant": False})
    # transformers recomputes only in layers in training mode; the dropout inside them stays off.
    for module in model.modules():
        if isinstance(module, GradientCheckpointingLayer):
            module.training = True


def _quadratic(model: PreTrainedModel) -> float:
    """Per token and layer, a causal model computes 2·(its parameters) in products with weights, and n·2·width in
    attention over n tokens (arXiv 2001.08361, table 1). All experts are counted, so for these it is too little."""
    config = model.config.get_text_config()
    body = model.base_model.num_parameters(exclude_embeddings=True)
    body += sum(layer.in_features * layer.out_features for layer in narrow_layers(model))
    return float(config.num_hidden_layers * config.hidden_size / body)
