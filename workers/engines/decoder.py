"""What the torch engine asks of a model: next-token logits for new prompts and running samples, over a slot cache.

Shapes: S slots, C tokens of capacity per slot, K key/value heads, D head width, P prompts, L tokens of the longest
prompt, N samples, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor


class SlotCache:
    """Keys and values of the running samples: `data` is [layers, S, C, 2·K, D], heads 0 … K - 1 hold the keys.

    Running samples always occupy slots 0 … n - 1, so attention reads plain views. Tokens come before heads, so that a
    decode step writes each layer with one copy of whole rows. C grows by doubling as `reserve` asks, up to `limit`.
    """

    def __init__(self, model: Any, slots: int, limit: int) -> None:
        config = model.config.get_text_config()
        heads = config.num_attention_heads
        width = config.head_dim if hasattr(config, "head_dim") and config.head_dim else config.hidden_size // heads
        self.slots = slots
        self.limit = limit
        self.heads: int = config.num_key_value_heads if hasattr(config, "num_key_value_heads") else heads
        self.capacity = 0
        shape = (config.num_hidden_layers, slots, 0, 2 * self.heads, width)
        self.data = torch.empty(shape, dtype=model.dtype, device=model.device)

    def reserve(self, tokens: int) -> None:
        """Make room for `tokens` (at most `limit`) per slot, keeping what is stored."""
        if tokens <= self.capacity:
            return
        assert tokens <= self.limit, f"{tokens} tokens for slots of {self.limit}: requests are checked when submitted"
        layers, slots, old, heads, width = self.data.shape
        capacity = min(max(tokens, 2 * old, 16), self.limit)
        grown = self.data.new_empty((layers, slots, capacity, heads, width))
        grown[:, :, :old] = self.data
        # Unwritten positions are read under the mask: they must hold numbers, not NaN.
        grown[:, :, old:] = 0
        self.data, self.capacity = grown, capacity

    def store_prompts(self, layer: int, kv_PLKD: Tensor, rows_N: Tensor, start: int) -> None:
        """Copy the prompts' keys and values into slots `start` …: slot start + i gets prompt `rows_N[i]`."""
        if not rows_N.numel():
            return
        self.data[layer, start : start + rows_N.numel(), : kv_PLKD.shape[1]] = kv_PLKD[rows_N]

    def places(self, positions_N: Tensor) -> Tensor:
        """[N] row numbers for `store_tokens`: token `positions_N[i]` of slot i."""
        return torch.arange(positions_N.numel(), device=positions_N.device) * self.capacity + positions_N

    def store_tokens(self, layer: int, kv_NX: Tensor, places_N: Tensor) -> None:
        """Write one token's keys and values (flattened, X = 2·K·D) for each running sample."""
        self.data[layer].view(self.slots * self.capacity, kv_NX.shape[1]).index_copy_(0, places_N, kv_NX)

    def read(self, layer: int, samples: int, tokens: int) -> tuple[Tensor, Tensor]:
        """Keys and values [N, K, tokens, D] of the first `samples` slots, as views."""
        kv_NKTD = self.data[layer, :samples, :tokens].transpose(1, 2)
        return kv_NKTD[:, : self.heads], kv_NKTD[:, self.heads :]

    def move(self, target: Tensor, source: Tensor, tokens: int) -> None:
        """Copy the first `tokens` tokens of slots `source` to slots `target` (disjoint)."""
        self.data[:, target, :tokens] = self.data[:, source, :tokens]

    @torch.no_grad()
    def cut(self, samples: int, tokens: int) -> None:
        """Keep the first `tokens` tokens of the first `samples` slots, and free the rest of the memory."""
        self.data = self.data[:, :samples, :tokens].clone()
        if not samples:
            self.capacity = 0

    @torch.no_grad()
    def grow_back(self) -> None:
        """Restore the slots and the capacity from before `cut`; an empty cache grows with the next `reserve`."""
        layers, samples, tokens, heads, width = self.data.shape
        grown = self.data.new_zeros((layers, self.slots, self.capacity, heads, width))
        if self.capacity:
            grown[:, :samples, :tokens] = self.data
        self.data = grown


@dataclass(frozen=True, slots=True)
class PromptBatch:
    """Prompts to read, and the slots that continue them."""

    tokens_PL: Tensor
    """Right-padded with 0: causal attention never attends to the padding of its own row."""
    lengths: tuple[int, ...]
    """Tokens of each prompt."""
    rows_N: Tensor
    """The prompt that slot `start` + i continues."""
    start: int


@dataclass(frozen=True, slots=True)
class TokenBatch:
    """The newest token of each running sample, not yet in the cache; sample i lives in slot i."""

    tokens_N: Tensor
    positions_N: Tensor
    """Position of that token in its sequence = number of tokens cached before it."""
    width: int
    """Longest sequence, this token included."""
    even: bool
    """Whether all sequences are `width` long, so that attention needs no mask."""


def unslotted(tokens_PL: Tensor) -> PromptBatch:
    """Rows of one length that no slot continues: nothing is stored for them."""
    rows, length = tokens_PL.shape
    return PromptBatch(tokens_PL, (length,) * rows, tokens_PL.new_empty(0), 0)


class Decoder(Protocol):
    """A model over a cache. `prefill` and `decode` store keys and values and return float logits for the next token."""

    cache: SlotCache

    def prefill(self, batch: PromptBatch) -> Tensor:
        """[N, V], one row for each new slot."""
        ...

    def score(self, tokens_PL: Tensor) -> Tensor:
        """[P, L, V] logits after every token, of rows that belong to no slot."""
        ...

    def decode(self, batch: TokenBatch) -> Tensor:
        """[N, V], one row for each running sample."""
        ...

    def forget(self) -> None:
        """Drop whatever was derived from the weights: they change, or the memory is needed."""
        ...
