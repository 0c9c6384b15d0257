"""Products with the matrices of a model, in the layout that a CPU's kernels want.

oneDNN multiplies by a matrix that was reordered for it two to four times as fast as torch does by the plain one (see
benchmarks/RESULTS.md), and each row of the result is the same, bit for bit, however many rows there are. The reordered
copy takes as much memory as the matrix; it is made when it is first needed, and anew for new weights.

Shapes: M rows, K in, N out.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from distflow.flow.estimate import REORDERED_FROM

ROWS = 64
"""oneDNN wants to know how many there will be; always the same, so that the layout is, too."""


class Product:
    """x·Wᵀ + b."""

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
        """The weights change, or the memory is wanted: give the copy back."""
        self._reordered = None


def is_reordered(weight: Tensor) -> bool:
    """Whether there are kernels for this matrix that are worth it."""
    # They are what torch's compiler makes use of, and not documented: another torch may be without them. And the call
    # takes 10 µs, which is more than a product with a small matrix.
    kernels: Any = torch.ops.mkldnn
    library: Any = torch.backends.mkldnn
    names = ("_linear_pointwise", "_reorder_linear_weight", "_is_mkldnn_bf16_supported")
    if weight.device.type != "cpu" or weight.numel() < REORDERED_FROM or not library.is_available():
        return False
    if not library.enabled or not all(hasattr(kernels, name) for name in names):
        return False
    in_half = weight.dtype == torch.bfloat16 and bool(kernels._is_mkldnn_bf16_supported())
    return weight.dtype == torch.float32 or in_half
