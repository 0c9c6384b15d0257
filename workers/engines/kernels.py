"""Matrix products, rotary embedding and attention of the Llama decoder: the fast kernels and the batch-invariant ones.

The fast products use oneDNN's layout on a CPU: multiplying by a matrix that was reordered for it is two to four times
as fast as torch's plain product (benchmarks/RESULTS.md), and each row of the result is the same, bit for bit, however
many rows there are. The reordered copy takes as much memory as the matrix; it is made on first use, and again after
each weight update.

Shapes: M rows, K in (products) or key/value heads (attention), N out (products) or samples (attention), H query heads,
R = H / K, D head width, P prompts, L prompt tokens, T tokens attended to.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from distflow.flow.estimate import REORDERED_FROM
from distflow.workers import batch_invariant


class MatrixProduct(Protocol):
    """x·Wᵀ + b for one matrix."""

    def __call__(self, x_MK: Tensor) -> Tensor:
        """[M, N]."""
        ...

    def forget(self) -> None:
        """Drop whatever was derived from the weights: they change, or the memory is needed."""
        ...


class Kernels(Protocol):
    """The operations that differ between the fast and the batch-invariant kernels."""

    def width(self, tokens: int) -> int:
        """How many tokens of each slot are read when the longest sample has `tokens`."""
        ...

    def product(self, weight_NK: Tensor, bias_N: Tensor | None, parts: Sequence[int] = ()) -> MatrixProduct:
        """A product with this matrix, which may stack several of the model's: `parts` are their row counts."""
        ...

    def rotate(self, x_MAD: Tensor, cos_M1D: Tensor, sin_M1D: Tensor) -> Tensor:
        """Rotary embedding; `sin` includes the sign of rotate_half."""
        ...

    def read_prompts(self, q_PHLD: Tensor, k_PKLD: Tensor, v_PKLD: Tensor, scale: float) -> Tensor:
        """Causal attention, [P, H, L, D]."""
        ...

    def mask(self, positions_N: Tensor, width: int, *, even: bool, dtype: torch.dtype) -> Tensor | None:
        """[N, 1, 1, width]: sample i attends to tokens 0 … position i; None if every one attends to all (`even`)."""
        ...

    def read_tokens(self, q_NKRD: Tensor, k_NKTD: Tensor, v_NKTD: Tensor, mask: Tensor | None, scale: float) -> Tensor:
        """Attention of one token per sample, [N, K, R, D]: the query heads that share a key head act as queries."""
        ...


class FastKernels:
    """Products in oneDNN's layout, fused rotation, and no more keys than needed."""

    def width(self, tokens: int) -> int:
        """Exactly as many as there are."""
        return tokens

    def product(self, weight_NK: Tensor, bias_N: Tensor | None, parts: Sequence[int] = ()) -> MatrixProduct:
        """One product for all parts."""
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
        """An additive mask."""
        if even:
            return None
        zero = torch.zeros((), dtype=dtype, device=positions_N.device)
        return torch.where(_seen(positions_N, width), zero, -torch.inf)

    def read_tokens(self, q_NKRD: Tensor, k_NKTD: Tensor, v_NKTD: Tensor, mask: Tensor | None, scale: float) -> Tensor:
        """Attention of one token per sample."""
        return F.scaled_dot_product_attention(q_NKRD, k_NKTD, v_NKTD, attn_mask=mask, scale=scale)


class InvariantKernels:
    """The kernels of `distflow.workers.batch_invariant`, which training uses too."""

    def __init__(self, model: Any) -> None:
        self._widths = batch_invariant.key_widths(model.dtype, model.model.layers[0].self_attn.head_dim)

    def width(self, tokens: int) -> int:
        """Rounded up to a width that needs no padding."""
        return self._widths(tokens)

    def product(self, weight_NK: Tensor, bias_N: Tensor | None, parts: Sequence[int] = ()) -> MatrixProduct:
        """One product per part, as in training: some matrix widths have kernels of their own."""
        return InvariantProduct(weight_NK, bias_N, parts or [weight_NK.shape[0]])

    def rotate(self, x_MAD: Tensor, cos_M1D: Tensor, sin_M1D: Tensor) -> Tensor:
        """Rotary embedding, with the roundings of transformers."""
        return x_MAD * cos_M1D + x_MAD.roll(x_MAD.shape[-1] // 2, -1) * sin_M1D

    def read_prompts(self, q_PHLD: Tensor, k_PKLD: Tensor, v_PKLD: Tensor, scale: float) -> Tensor:
        """Causal attention."""
        length = q_PHLD.shape[2]
        visible_LL = torch.ones(length, length, dtype=torch.bool, device=q_PHLD.device).tril()
        return batch_invariant.attention(q_PHLD, k_PKLD, v_PKLD, visible_LL[None, None], scale)

    def mask(self, positions_N: Tensor, width: int, *, even: bool, dtype: torch.dtype) -> Tensor | None:
        """A boolean mask."""
        return _seen(positions_N, width)

    def read_tokens(self, q_NKRD: Tensor, k_NKTD: Tensor, v_NKTD: Tensor, mask: Tensor | None, scale: float) -> Tensor:
        """Attention of one token per sample."""
        assert mask is not None, "`mask` of these kernels always returns one"
        return batch_invariant.attention(q_NKRD, k_NKTD, v_NKTD, mask, scale)


class InvariantProduct:
    """x·Wᵀ + b in whole tiles of rows."""

    def __init__(self, weight_NK: Tensor, bias_N: Tensor | None, parts: Sequence[int]) -> None:
        weights = torch.split(weight_NK, list(parts))
        biases = [None] * len(weights) if bias_N is None else torch.split(bias_N, list(parts))
        self._parts = list(zip(weights, biases, strict=True))

    def __call__(self, x_MK: Tensor) -> Tensor:
        """[M, N]."""
        products = [batch_invariant.product(x_MK, weight, bias) for weight, bias in self._parts]
        return products[0] if len(products) == 1 else torch.cat(products, dim=1)

    def forget(self) -> None:
        """Nothing is derived from the weights."""


def _seen(positions_N: Tensor, width: int) -> Tensor:
    return (torch.arange(width, device=positions_N.device) <= positions_N[:, None])[:, None, None, :]


ROWS = 64
"""The number of rows oneDNN is told to expect: always the same, so that the layout is, too."""


class Product:
    """x·Wᵀ + b, in oneDNN's layout where that is faster."""

    def __init__(self, weight_NK: Tensor, bias_N: Tensor | None = None) -> None:
        self.weight_NK = weight_NK
        self.bias_N = bias_N
        self._reorders = is_reordered(weight_NK)
        self._reordered: Tensor | None = None

    def __call__(self, x_MK: Tensor) -> Tensor:
        """[M, N]."""
        if not self._reorders:
            return F.linear(x_MK, self.weight_NK, self.bias_N)
        kernels: Any = torch.ops.mkldnn
        if self._reordered is None:
            self._reordered = kernels._reorder_linear_weight(self.weight_NK.detach(), ROWS)
        product: Tensor = kernels._linear_pointwise(x_MK, self._reordered, self.bias_N, "none", [], "")
        return product

    def forget(self) -> None:
        """Free the reordered copy."""
        self._reordered = None


def is_reordered(weight: Tensor) -> bool:
    """Whether oneDNN has kernels for this matrix, and it is large enough to be worth it."""
    # These operators are what torch's compiler emits, and undocumented: another torch may lack them. Each call takes
    # 10 µs, which is more than a product with a small matrix.
    kernels: Any = torch.ops.mkldnn
    library: Any = torch.backends.mkldnn
    names = ("_linear_pointwise", "_reorder_linear_weight", "_is_mkldnn_bf16_supported")
    if weight.device.type != "cpu" or weight.numel() < REORDERED_FROM or not library.is_available():
        return False
    if not library.enabled or not all(hasattr(kernels, name) for name in names):
        return False
    in_half = weight.dtype == torch.bfloat16 and bool(kernels._is_mkldnn_bf16_supported())
    return weight.dtype == torch.float32 or in_half
