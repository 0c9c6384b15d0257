"""Penalties that are added to the reward of a sample. Shapes: B samples."""

from __future__ import annotations

from torch import Tensor

from distflow.errors import UserError


def overlong(lengths_B: Tensor, *, limit: float, buffer: float) -> Tensor:
    """0 up to `limit` − `buffer` tokens, then falling in a straight line to −1 at `limit` and beyond, arXiv 2503.14476.

    `lengths_B` [B]: tokens of each response; `limit`, `buffer`: in tokens. Returns [B] float64. Raises UserError unless
    0 < buffer ≤ limit.
    """
    if not 0 < buffer <= limit:
        raise UserError(f"overlong: buffer={buffer}, limit={limit}: expected tokens with 0 < buffer <= limit")
    return ((limit - buffer - lengths_B.double()) / buffer).clamp(-1.0, 0.0)
