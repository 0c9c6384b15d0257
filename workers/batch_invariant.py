"""Batch-invariant forward passes: to the last bit, a row's result does not depend on the other rows of its batch.

Used under `run.deterministic`, by the engine and by the backends alike, so that both compute the same log-probs. A
CPU's kernels add in a different order for different numbers of rows or keys. These measures make the results agree
(`check_products` and `key_widths` check on this machine whether they do):

- products get whole tiles of rows: MKL has separate kernels for 1 row, for 2 and 3, and for more;
- attention gets whole tiles of queries, and padded, masked numbers of keys for which a longer sum starts with exactly
  the additions of a shorter one: torch takes 512 keys at a time, and MKL splits the sum over more than about 200 keys
  by their number;
- activations are computed in whole vectors, in pieces for one thread each: for a remainder torch switches from the
  vector kernel to a scalar one, which rounds differently.

Norms, softmax and the rest are computed row by row anyway.

Shapes: M rows, K in, N out; B samples, H heads, L queries, S keys, D head width.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface, PreTrainedModel

from distflow.errors import UserError
from distflow.flow.deterministic import unsupported

ROW_TILE = 64
TILE = 16
"""Tile of queries, and of keys where there are few."""
KEYS_AT_ONCE = 512
"""Block of keys in torch's attention on a CPU."""
FINE = (192, 0)
"""Limits up to which keys (beyond whole blocks of 512) may come in small tiles: the first that passes is used."""
VECTORS = 64
"""A multiple of the width of every vector kernel."""
SERIAL = 32768
"""Number of elements below which torch computes an elementwise function on one thread."""
MOST_CHECKED = 1 << 24
"""Most elements of a matrix with which products are tried."""
WHERE = "run.deterministic"
CAUSAL = "distflow_causal"


@dataclass(frozen=True, slots=True)
class KeyWidths:
    """Pads a number of keys: beyond whole blocks of 512, to tiles of 16 up to `fine`, else to another block of 512."""

    fine: int

    def __call__(self, count: int) -> int:
        """The padded number, at least `count`."""
        whole, rest = divmod(count, KEYS_AT_ONCE)
        return KEYS_AT_ONCE * whole + (tiled(rest, TILE) if rest <= self.fine else KEYS_AT_ONCE)


def tiled(count: int, tile: int) -> int:
    """`count` rounded up to whole tiles."""
    return -(-count // tile) * tile


def product(x_MK: Tensor, weight_NK: Tensor, bias_N: Tensor | None = None) -> Tensor:
    """x·Wᵀ + b, [M, N]."""
    rows = x_MK.shape[0]
    missing = tiled(rows, ROW_TILE) - rows
    return F.linear(F.pad(x_MK, (0, 0, 0, missing)) if missing else x_MK, weight_NK, bias_N)[:rows]


def attention(q_BHLD: Tensor, k_BHSD: Tensor, v_BHSD: Tensor, visible_B1LS: Tensor | None, scale: float) -> Tensor:
    """Scaled dot-product attention [B, H, L, D]. There may be fewer key heads than query heads.

    `visible` is True where a query attends; its dimensions B and L may each be 1. None: to the past, where L is S.
    """
    if visible_B1LS is None:
        length = q_BHLD.shape[2]
        visible_B1LS = torch.ones(length, length, dtype=torch.bool, device=q_BHLD.device).tril()[None, None]
    return _attend(q_BHLD, k_BHSD, v_BHSD, visible_B1LS, scale, key_widths(q_BHLD.dtype, q_BHLD.shape[-1]))


def _attend(q: Tensor, k: Tensor, v: Tensor, visible: Tensor, scale: float, widths: KeyWidths) -> Tensor:
    queries, keys = q.shape[2], k.shape[2]
    more_queries, more_keys = tiled(queries, TILE) - queries, widths(keys) - keys
    if more_keys:
        k, v = (F.pad(x, (0, 0, 0, more_keys)) for x in (k, v))
        visible = F.pad(visible, (0, more_keys))
    if more_queries:
        q = F.pad(q, (0, 0, 0, more_queries))
        # Padding queries attend everywhere: one that attended nowhere would give NaN.
        visible = F.pad(visible, (0, 0, 0, more_queries), value=True) if visible.shape[2] > 1 else visible
    out = F.scaled_dot_product_attention(q, k, v, attn_mask=visible, scale=scale, enable_gqa=q.shape[1] != k.shape[1])
    return out[:, :, :queries]


def key_widths(dtype: torch.dtype, width: int) -> KeyWidths:
    """The widths for heads of this size on this machine; raises UserError if its kernels agree on none."""
    return _agreed_widths(dtype, width, torch.get_num_threads())


@cache
@torch.inference_mode()
def _agreed_widths(dtype: torch.dtype, width: int, threads: int) -> KeyWidths:
    for fine in FINE:
        if _attention_agrees(dtype, width, KeyWidths(fine)):
            return KeyWidths(fine)
    raise UserError(_disagree(f"attention over heads of {width}", dtype))


def _attention_agrees(dtype: torch.dtype, width: int, widths: KeyWidths) -> bool:
    """Compares causal attention, as for a prompt, with one query at a time, as when decoding."""
    lengths = (1, 7, 15, 16, 29, 64, 80, 100, 177, 192, 193, 255, 256, 274, 500, 512, 513, 662, 704, 767, 1040)
    q, k, v = _normal(dtype, 3, 1, 1, max(lengths), width)
    visible_11LS = torch.ones(max(lengths), max(lengths), dtype=torch.bool).tril()[None, None]
    whole = _attend(q, k, v, visible_11LS, width**-0.5, widths)
    for count in lengths:
        keys, values, seen = k[:, :, :count], v[:, :, :count], visible_11LS[:, :, :count, :count]
        prompt = _attend(q[:, :, :count], keys, values, seen, width**-0.5, widths)
        one = _attend(q[:, :, count - 1 : count], keys, values, seen[:, :, -1:], width**-0.5, widths)
        if not (torch.equal(prompt, whole[:, :, :count]) and torch.equal(one, prompt[:, :, -1:])):
            return False
    return True


class InvariantLinear(nn.Linear):
    """A linear layer whose results do not depend on the number of rows."""

    def forward(self, input: Tensor) -> Tensor:
        """[…, N] of […, K]."""
        return product(input.flatten(0, -2), self.weight, self.bias).view(*input.shape[:-1], -1)


class InvariantActivation(nn.Module):
    """An elementwise function whose results do not depend on the number of elements."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        """Of the same shape."""
        count = x.numel()
        missing = tiled(count, VECTORS) - count
        flat = F.pad(x.reshape(-1), (0, missing)) if missing else x.reshape(-1)
        if count >= SERIAL and torch.get_num_threads() > 1:
            flat = torch.cat([self.function(part) for part in torch.split(flat, SERIAL - VECTORS)])
        else:
            flat = self.function(flat)
        return flat[:count].view(x.shape)


def make_invariant(model: Any) -> None:
    """Make a model of the Llama family batch-invariant, except for its attention, which the caller chooses.

    Raises UserError for another model, or if this machine's kernels do not agree.
    """
    refuse(model.config)
    for module in model.modules():
        if type(module) is nn.Linear:
            module.__class__ = InvariantLinear
    for layer in model.model.layers:
        layer.mlp.act_fn = InvariantActivation(layer.mlp.act_fn)
    check_products(model)
    key_widths(model.dtype, model.model.layers[0].self_attn.head_dim)


def enable_causal(model: PreTrainedModel) -> None:
    """Make this model use `attention`, causally."""
    AttentionInterface.register(CAUSAL, _attend_causal)
    model.set_attn_implementation(CAUSAL)


def _attend_causal(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float,
    **_: Any,
) -> tuple[Tensor, None]:
    """A transformers attention function: query [B, H, L, D] → [B, L, H, D]."""
    return attention(query, key, value, None, scaling).transpose(1, 2), None


def refuse(config: Any) -> None:
    """Raises UserError for a model that is not known to compute every row independently."""
    why = unsupported(config.to_dict())
    if why:
        raise UserError(f"{WHERE}: {why}")


@torch.inference_mode()
def check_products(model: Any) -> None:
    """Raises UserError if products with matrices of this model's shapes depend on the number of rows."""
    linears = {tuple(m.weight.shape): m for m in model.modules() if isinstance(m, InvariantLinear)}
    for (outs, ins), linear in linears.items():
        rows = max(1, min(outs, MOST_CHECKED // ins))
        bias = None if linear.bias is None else _normal(model.dtype, rows)
        if not _products_agree(_normal(model.dtype, 9 * ROW_TILE, ins), _normal(model.dtype, rows, ins), bias):
            raise UserError(_disagree(f"products with {(outs, ins)}", model.dtype))


def _products_agree(x_MK: Tensor, weight_NK: Tensor, bias_N: Tensor | None) -> bool:
    whole_MN = product(x_MK, weight_NK, bias_N)
    parts = [(0, 1), (1, 3), (5, 12), (40, 40 + ROW_TILE), (100, 100 + 3 * ROW_TILE + 1), (3, x_MK.shape[0])]
    return all(torch.equal(product(x_MK[a:b], weight_NK, bias_N), whole_MN[a:b]) for a, b in parts)


def _normal(dtype: torch.dtype, *shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(dtype)


def _disagree(what: str, dtype: torch.dtype) -> str:
    return (
        f"{WHERE}: on this machine {what} in {str(dtype).removeprefix('torch.')} and {torch.get_num_threads()} threads "
        "depend on the rest of the batch — set models.NAME.dtype=float32 or fewer threads per worker, or leave "
        "run.deterministic out"
    )
