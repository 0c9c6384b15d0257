"""Frozen weights of 4 bits: NF4 of QLoRA (arXiv 2305.14314), in the form of bitsandbytes and with its numbers.

The weights of linear layers are cut into blocks of 64. Each block has a scale, its largest absolute value, and 4 bits
for each weight: which of 16 quantiles of a normal distribution comes nearest to the weight over the scale. Embeddings,
norms, biases and the output layer keep the model's dtype.

A backend keeps such weights in 4 bits, and widens those of a layer to the model's dtype whenever it is computed,
forward and backward. Engines and exports have them widened: the same numbers, so that all compute with one base.
It is computed in plain torch, since the kernels of bitsandbytes for CPUs widen some shapes wrongly (0.50.2).
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn.functional import embedding, linear, pad

from distflow.workers.adapters import adapted_layers

if TYPE_CHECKING:
    from transformers import PreTrainedModel

BLOCK = 64
QUANTILES = (
    -1.0,
    -0.6961928009986877,
    -0.5250730514526367,
    -0.39491748809814453,
    -0.28444138169288635,
    -0.18477343022823334,
    -0.09105003625154495,
    0.0,
    0.07958029955625534,
    0.16093020141124725,
    0.24611230194568634,
    0.33791524171829224,
    0.44070982933044434,
    0.5626170039176941,
    0.7229568362236023,
    1.0,
)


@torch.no_grad()
def narrowed(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Two weights a byte, in whole blocks of the flattened tensor, and the float32 scale of each block."""
    flat = weight.detach().float().flatten()
    blocks = pad(flat, (0, -len(flat) % BLOCK)).view(-1, BLOCK)
    scales = blocks.abs().amax(1)
    quantiles = torch.tensor(QUANTILES, device=weight.device)
    between = (quantiles[1:] + quantiles[:-1]) / 2
    # A block of zeros has no scale, and zero is one of the quantiles.
    nearest = torch.bucketize(blocks / torch.where(scales > 0, scales, 1.0)[:, None], between, out_int32=True)
    pairs = nearest.view(-1, 2).to(torch.uint8)
    return pairs[:, 0] << 4 | pairs[:, 1], scales


@torch.no_grad()
def widened(packed: Tensor, scales: Tensor, shape: torch.Size, dtype: torch.dtype) -> Tensor:
    """The weights that 4 bits stand for."""
    pairs = embedding(packed.int(), _pairs(packed.device))
    blocks = pairs.view(-1, BLOCK).mul_(scales[:, None])
    return blocks.flatten()[: shape.numel()].view(shape).to(dtype)


@functools.cache
def _pairs(device: torch.device) -> Tensor:
    """[256, 2]: the two quantiles of each byte."""
    quantiles = torch.tensor(QUANTILES, device=device)
    byte = torch.arange(256, device=device)
    return torch.stack([quantiles[byte >> 4], quantiles[byte & 15]], 1)


class NarrowLinear(nn.Linear):
    """A frozen linear layer whose weights are kept in 4 bits."""

    packed: Tensor
    scales: Tensor

    def __init__(self, layer: nn.Linear) -> None:
        nn.Module.__init__(self)
        self.in_features, self.out_features = layer.in_features, layer.out_features
        self._shape, self._dtype = layer.weight.shape, layer.weight.dtype
        packed, scales = narrowed(layer.weight)
        self.register_buffer("packed", packed, persistent=False)
        self.register_buffer("scales", scales, persistent=False)
        self.bias = layer.bias

    @property
    def weight(self) -> Tensor:  # type: ignore[override]
        """[out, in]: what the layer computes with, made anew each time."""
        return widened(self.packed, self.scales, self._shape, self._dtype)

    def forward(self, input: Tensor) -> Tensor:
        """[…, out] of […, in]."""
        given = (input, self.packed, self.scales, self.bias, self._shape)
        product: Tensor = _Product.apply(*given)  # type: ignore[no-untyped-call]
        return product


class _Product(torch.autograd.Function):
    """Widens the weights again in the backward pass, instead of keeping those of all layers until then."""

    @staticmethod
    def forward(
        ctx: Any, input: Tensor, packed: Tensor, scales: Tensor, bias: Tensor | None, shape: torch.Size
    ) -> Tensor:
        ctx.save_for_backward(packed, scales)
        ctx.shape = shape
        return linear(input, widened(packed, scales, shape, input.dtype), bias)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None, None]:
        packed, scales = ctx.saved_tensors
        return grads[0] @ widened(packed, scales, ctx.shape, grads[0].dtype), None, None, None, None


def keep_narrow(model: PreTrainedModel) -> None:
    """Keep the weights of all linear layers but the output layer in 4 bits from now on."""
    for name in adapted_layers(model, "all-linear"):
        parent, _, last = name.rpartition(".")
        setattr(model.get_submodule(parent), last, NarrowLinear(model.get_submodule(name)))


@torch.no_grad()
def round_weights(model: PreTrainedModel) -> None:
    """Give all linear layers but the output layer the weights that they would have in 4 bits."""
    for name in adapted_layers(model, "all-linear"):
        weight = model.get_submodule(name).weight
        assert isinstance(weight, Tensor), "a linear layer has a weight"
        weight.copy_(widened(*narrowed(weight), weight.shape, weight.dtype))


def narrow_layers(model: nn.Module) -> Iterator[NarrowLinear]:
    """The layers that keep their weights in 4 bits."""
    return (module for module in model.modules() if isinstance(module, NarrowLinear))
