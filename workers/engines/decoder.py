"""What the torch engine asks of a model: next-token logits for new prompts and running samples, over a slot cache.

Shapes: S slots, C tokens of capacity per slot, K key or value heads, D head width, X numbers of a token, P prompts, L
tokens of the longest prompt, N samples, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Heads:
    """Keys and values of one token in one layer: how many heads of which width each."""

    keys: int
    key_width: int
    values: int
    value_width: int
    dtype: torch.dtype

    @property
    def size(self) -> int:
        """Numbers of a token: its keys, then its values."""
        return self.keys * self.key_width + self.values * self.value_width


StateName = tuple[int, str, int]
"""Layer, `conv` or `recurrent`, and which of the layer's states of that kind."""


@dataclass(frozen=True, slots=True)
class CacheShape:
    """What a model keeps of the tokens of a sample."""

    heads: Mapping[int, Heads]
    """By layer; layers that are recurrent, or read the keys of others, have none."""
    states: Mapping[StateName, tuple[tuple[int, ...], torch.dtype]] = field(default_factory=dict)
    """The states of recurrent layers, which are of one size however long a sample is."""

    @classmethod
    def of_attention(cls, model: Any) -> CacheShape:
        """All layers alike, as the model's configuration says."""
        config = model.config.get_text_config()
        count = config.num_attention_heads
        width = config.head_dim if hasattr(config, "head_dim") and config.head_dim else config.hidden_size // count
        shared = config.num_key_value_heads if hasattr(config, "num_key_value_heads") else count
        alike = Heads(shared, width, shared, width, model.dtype)
        return cls(dict.fromkeys(range(config.num_hidden_layers), alike))


class SlotCache:
    """What the running samples' tokens have left: keys and values, and the states of recurrent layers.

    Layers of one shape share a block, [layers, S, C, X] with X numbers of a token: its keys, then its values. A state
    is [S, …]. Running samples always occupy slots 0 … n - 1, so attention reads plain views. Tokens come before heads,
    so that a decode step writes each layer with one copy of whole rows. C grows by doubling as `reserve` asks, up to
    `limit`.
    """

    def __init__(self, shape: CacheShape, slots: int, limit: int, device: torch.device) -> None:
        self.slots = slots
        self.limit = limit
        self.capacity = 0
        self.heads = shape.heads
        layers = {one: [n for n, other in shape.heads.items() if other == one] for one in shape.heads.values()}
        self._places = {layer: (one, index) for one, alike in layers.items() for index, layer in enumerate(alike)}
        self._blocks = {
            one: torch.empty((len(alike), slots, 0, one.size), dtype=one.dtype, device=device)
            for one, alike in layers.items()
        }
        self.states = {
            name: torch.zeros((slots, *sizes), dtype=dtype, device=device)
            for name, (sizes, dtype) in shape.states.items()
        }

    def tensors(self) -> list[Tensor]:
        """All that it holds."""
        return [*self._blocks.values(), *self.states.values()]

    def reserve(self, tokens: int) -> None:
        """Make room for `tokens` (at most `limit`) per slot, keeping what is stored."""
        if tokens <= self.capacity:
            return
        assert tokens <= self.limit, f"{tokens} tokens for slots of {self.limit}: requests are checked when submitted"
        old, self.capacity = self.capacity, min(max(tokens, 2 * self.capacity, 16), self.limit)
        for heads, block in self._blocks.items():
            grown = block.new_empty((block.shape[0], self.slots, self.capacity, heads.size))
            grown[:, :, :old] = block
            # Unwritten positions are read under the mask: they must hold numbers, not NaN.
            grown[:, :, old:] = 0
            self._blocks[heads] = grown

    def store_prompts(self, layer: int, kv_PLX: Tensor, batch: PromptBatch) -> None:
        """Copy the prompts' keys and values into the slots that continue them."""
        if batch.rows_N.numel():
            self._layer(layer)[batch.slots, : kv_PLX.shape[1]] = kv_PLX[batch.rows_N]

    def store_state(self, name: StateName, state_P: Tensor, batch: PromptBatch) -> None:
        """Copy what a recurrent layer has after the prompts into the slots that continue them."""
        if batch.rows_N.numel():
            self.states[name][batch.slots] = state_P[batch.rows_N]

    def places(self, positions_N: Tensor) -> Tensor:
        """[N] row numbers for `store_tokens`: token `positions_N[i]` of slot i."""
        return torch.arange(positions_N.numel(), device=positions_N.device) * self.capacity + positions_N

    def store_tokens(self, layer: int, kv_NX: Tensor, places_N: Tensor) -> None:
        """Write one token's keys and values for each running sample."""
        self._layer(layer).view(self.slots * self.capacity, kv_NX.shape[1]).index_copy_(0, places_N, kv_NX)

    def read(self, layer: int, samples: int, tokens: int) -> tuple[Tensor, Tensor]:
        """Keys and values [N, K, tokens, D] of the first `samples` slots, as views."""
        heads = self.heads[layer]
        kv_NTX, keys = self._layer(layer)[:samples, :tokens], heads.keys * heads.key_width
        k_NTKD = kv_NTX[..., :keys].view(samples, tokens, heads.keys, heads.key_width)
        v_NTKD = kv_NTX[..., keys:].view(samples, tokens, heads.values, heads.value_width)
        return k_NTKD.transpose(1, 2), v_NTKD.transpose(1, 2)

    def move(self, target: Tensor, source: Tensor, tokens: int) -> None:
        """Copy the first `tokens` tokens and the states of slots `source` to slots `target` (disjoint)."""
        for block in self._blocks.values():
            block[:, target, :tokens] = block[:, source, :tokens]
        for state in self.states.values():
            state[target] = state[source]

    @torch.no_grad()
    def cut(self, samples: int, tokens: int) -> None:
        """Keep the first `tokens` tokens of the first `samples` slots, and free the rest of the memory."""
        self._blocks = {heads: block[:, :samples, :tokens].clone() for heads, block in self._blocks.items()}
        self.states = {name: state[:samples].clone() for name, state in self.states.items()}
        if not samples:
            self.capacity = 0

    @torch.no_grad()
    def grow_back(self) -> None:
        """Restore the slots and the capacity from before `cut`; an empty cache grows with the next `reserve`."""
        for heads, block in self._blocks.items():
            layers, samples, tokens, size = block.shape
            grown = block.new_zeros((layers, self.slots, self.capacity, size))
            if self.capacity:
                grown[:, :samples, :tokens] = block
            self._blocks[heads] = grown
        for name, state in self.states.items():
            self.states[name] = state.new_zeros((self.slots, *state.shape[1:]))
            self.states[name][: len(state)] = state

    def _layer(self, layer: int) -> Tensor:
        heads, index = self._places[layer]
        return self._blocks[heads][index]


@dataclass(frozen=True, slots=True)
class PromptBatch:
    """Prompts to read, and the slots that continue them."""

    tokens_PL: Tensor
    """Right-padded with 0: causal attention never attends to the padding of its own row."""
    lengths: tuple[int, ...]
    """Tokens of each prompt."""
    rows_N: Tensor
    """The prompt that each of the slots continues."""
    slots: slice | Tensor
    """N of them."""

    def by_length(self) -> Iterator[tuple[Tensor, PromptBatch]]:
        """Batches of prompts of one length, without padding, each with the numbers of its slots within N."""
        lengths_P = torch.tensor(self.lengths, device=self.tokens_PL.device)
        first = self.slots.start if isinstance(self.slots, slice) else 0
        slots_N = torch.arange(first, first + len(self.rows_N), device=lengths_P.device)
        for length in sorted(set(self.lengths)):
            prompts = (lengths_P == length).nonzero().flatten()
            which = (lengths_P[self.rows_N] == length).nonzero().flatten()
            rows_N = torch.searchsorted(prompts, self.rows_N[which])
            tokens_PL = self.tokens_PL[prompts, :length]
            yield which, PromptBatch(tokens_PL, (length,) * len(prompts), rows_N, slots_N[which])


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
    return PromptBatch(tokens_PL, (length,) * rows, tokens_PL.new_empty(0), slice(0, 0))


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
