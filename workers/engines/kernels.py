"""How the lean decoder multiplies, rotates and attends: as fast as it goes, or batch-invariantly.

Shapes: M rows, K key/value heads, H query heads, R = H / K, D head width; P prompts, L prompt tokens; N samples,
T tokens attended to.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from distflow.workers import batch_invariant
from distflow.workers.engines.onednn_matmul import Product


class MatrixProduct(Protocol):
    """x·Wᵀ + b for one matrix."""

    def __call__(self, x_MK: Tensor) -> Tensor:
        """[M, N]."""
        ...

    def forget(self) -> None:
        """The weights change, or the memory is wanted."""
        ...


class Kernels(Protocol):
    """What differs between the two ways."""

    def width(self, tokens: int) -> int:
        """Of so many tokens in the cache, how many are read."""
        ...

    def product(self, weight_NK: Tensor, bias_N: Tensor | None, parts: Sequence[int] = ()) -> MatrixProduct:
        """With this matrix, in which several of the model's are stacked: `parts` are their rows."""
        ...

    def rotate(self, x_MAD: Tensor, cos_M1D: Tensor, sin_M1D: Tensor) -> Tensor:
        """Rotary embedding; `sin` with the sign of rotate_half in it."""
        ...

    def read_prompts(self, q_PHLD: Tensor, k_PKLD: Tensor, v_PKLD: Tensor, scale: float) -> Tensor:
        """Causal attention, [P, H, L, D]."""
        ...

    def mask(self, positions_N: Tensor, width: int, *, even: bool, dtype: torch.dtype) -> Tensor | None:
        """[N, 1, 1, width]: sample i attends to tokens 0 … position i; None if all of them do to all (`even`)."""
        ...

    def read_tokens(self, q_NKRD: Tensor, k_NKTD: Tensor, v_NKTD: Tensor, mask: Tensor | None, scale: float) -> Tensor:
        """Attention of one token a sample, [N, K, R, D]: query heads that share a key head stand for queries."""
        ...


class FastKernels:
    """Products in oneDNN's layout, fused rotation, no more keys than needed."""

    def width(self, tokens: int) -> int:
        """Just those."""
        return tokens

    def product(self, weight_NK: Tensor, bias_N: Tensor | None, parts: Sequence[int] = ()) -> MatrixProduct:
        """With all of it at once."""
        return Product(weight_NK, bias_N)

    def rotate(self, x_MAD: Tensor, cos_M1D: Tensor, sin_M1D: Tensor) -> Tensor:
        """Rotary embedding."""
        return torch.addcmul(x_MAD * cos_M1D, x_MAD.roll(x_MAD.shape[-1] // 2, -1), sin_M1D)

    def read_prompts(self, q_PHLD: Tensor, k_PKLD: Tensor, v_PKLD: Tensor, scale: float) -> Tensor:
        """Causal attention."""
        shared = q_PHLD.shape[1] // k_PKLD.shape[1]
        k_PHLD, v_PHLD = (x.repeat_interleave(shared, dim=1) for x in (k_PKLD, v_PKLD))
        return F.scaled_dot_product_attention(q_PHLD, k_PHLD, v_PHLD, is_causal=True, scale=scale)

    def mask(self, positions_N: Tensor, width: int, *, even: bool, dtype: torch.dtype) -> Tensor | None:
        """Additive."""
        if even:
            return None
        zero = torch.zeros((), dtype=dtype, device=positions_N.device)
        return torch.where(_seen(positions_N, width), zero, -torch.inf)

    def read_tokens(self, q_NKRD: Tensor, k_NKTD: Tensor, v_NKTD: Tensor, mask: Tensor | None, scale: float) -> Tensor:
        """Attention of one token a sample."""
        return F.scaled_dot_product_attention(q_NKRD, k_NKTD, v_NKTD, attn_mask=mask, scale=scale)


class InvariantKernels:
    """Those of `distflow.workers.batch_invariant`, which training uses too."""

    def __init__(self, model: Any) -> None:
        self._widths = batch_invariant.key_widths(model.dtype, model.model.layers[0].self_attn.head_dim)

    def width(self, tokens: int) -> int:
        """As many as need no filling up."""
        return self._widths(tokens)

    def product(self, weight_NK: Tensor, bias_N: Tensor | None, parts: Sequence[int] = ()) -> MatrixProduct:
        """Part by part, as training does: some widths have kernels of their own."""
        return InvariantProduct(weight_NK, bias_N, parts or [weight_NK.shape[0]])

    def rotate(self, x_MAD: Tensor, cos_M1D: Tensor, sin_M1D: Tensor) -> Tensor:
        """Rotary embedding, rounded where transformers rounds."""
        return x_MAD * cos_M1D + x_MAD.roll(x_MAD.shape[-1] // 2, -1) * sin_M1D

    def read_prompts(self, q_PHLD: Tensor, k_PKLD: Tensor, v_PKLD: Tensor, scale: float) -> Tensor:
        """Causal attention."""
        length = q_PHLD.shape[2]
        visible_LL = torch.ones(length, length, dtype=torch.bool, device=q_PHLD.device).tril()
        return batch_invariant.attention(q_PHLD, k_PKLD, v_PKLD, visible_LL[None, None], scale)

    def mask(self, positions_N: Tensor, width: int, *, even: bool, dtype: torch.dtype) -> Tensor | None:
        """What each sample sees."""
        return _seen(positions_N, width)

    def read_tokens(self, q_NKRD: Tensor, k_NKTD: Tensor, v_NKTD: Tensor, mask: Tensor | None, scale: float) -> Tensor:
        """Attention of one token a sample."""
        assert mask is not None, "this `mask` always gives one"
        return batch_invariant.attention(q_NKRD, k_NKTD, v_NKTD, mask, scale)


class InvariantProduct:
    """x·Wᵀ + b by whole tiles of rows."""

    def __init__(self, weight_NK: Tensor, bias_N: Tensor | None, parts: Sequence[int]) -> None:
        weights = torch.split(weight_NK, list(parts))
        biases = [None] * len(weights) if bias_N is None else torch.split(bias_N, list(parts))
        self._parts = list(zip(weights, biases, strict=True))

    def __call__(self, x_MK: Tensor) -> Tensor:
        """[M, N]."""
        products = [batch_invariant.product(x_MK, weight, bias) for weight, bias in self._parts]
        return products[0] if len(products) == 1 else torch.cat(products, dim=1)

    def forget(self) -> None:
        """Nothing is kept."""


def _seen(positions_N: Tensor, width: int) -> Tensor:
    return (torch.arange(width, device=positions_N.device) <= positions_N[:, None])[:, None, None, :]
