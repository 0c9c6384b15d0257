"""Runs any dense causal language model of transformers through its own forward, on our cache.

Slower than `llama_decoder` by the module's Python overhead, but correct for every model whose layers attend to keys and
values of one shape, sliding windows included.

Shapes: P prompts, L prompt tokens, N samples, T tokens attended to, K key/value heads, D head width.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from distflow.errors import UserError
from distflow.workers.engines.decoder import PromptBatch, SlotCache, TokenBatch, unslotted

_DENSE = frozenset({"full_attention", "sliding_attention"})


class ModuleDecoder:
    """A `Decoder` for dense attention models. Raises UserError for models with other layers."""

    def __init__(self, model: Any, cache: SlotCache) -> None:
        config = model.config.get_text_config()
        layer_types = set(config.layer_types or ()) if hasattr(config, "layer_types") else set()
        if not layer_types <= _DENSE:
            raise UserError(
                f"engine torch: model_type {config.model_type!r} has layers of type "
                f"{', '.join(sorted(layer_types - _DENSE))}; only dense attention models are supported"
            )
        self.model = model
        self.by_type = "sliding_attention" in layer_types
        # Where the config lists layer types, a window that no layer uses may have any value: for Qwen2-MoE it is 0.
        windowed = hasattr(config, "sliding_window") and (self.by_type or not layer_types)
        self.window: int | None = config.sliding_window if windowed else None
        self.cache = cache

    def prefill(self, batch: PromptBatch) -> Tensor:
        """[N, V] logits after each new slot's prompt."""
        P, L = batch.tokens_PL.shape
        positions_L = torch.arange(L, device=batch.tokens_PL.device)
        # Logits are needed at the last token of each prompt only, and there are few distinct lengths.
        ends = sorted({length - 1 for length in batch.lengths})
        keep = torch.tensor(ends, device=positions_L.device)
        logits_PEV = self._forward(batch.tokens_PL, positions_L.expand(P, L), L, _PromptCache(self.cache, batch), keep)
        which_P = torch.tensor([ends.index(length - 1) for length in batch.lengths], device=positions_L.device)
        return logits_PEV[torch.arange(P, device=positions_L.device), which_P][batch.rows_N]

    def score(self, tokens_PL: Tensor) -> Tensor:
        """[P, L, V] logits after every token, of rows that belong to no slot."""
        P, L = tokens_PL.shape
        positions_L = torch.arange(L, device=tokens_PL.device)
        cache = _PromptCache(self.cache, unslotted(tokens_PL))
        return self._forward(tokens_PL, positions_L.expand(P, L), L, cache, positions_L)

    def decode(self, batch: TokenBatch) -> Tensor:
        """[N, V] logits after the newest token of each running sample."""
        places_N = self.cache.places(batch.positions_N)
        cache = _TokenCache(self.cache, batch, places_N)
        keep = torch.zeros(1, dtype=torch.int64, device=places_N.device)
        return self._forward(batch.tokens_N[:, None], batch.positions_N[:, None], batch.width, cache, keep)[:, 0]

    def forget(self) -> None:
        """Nothing is derived from the weights."""

    def _forward(self, tokens_NL: Tensor, positions_NL: Tensor, width: int, cache: Any, keep: Tensor) -> Tensor:
        output = self.model(
            input_ids=tokens_NL,
            position_ids=positions_NL,
            attention_mask=self._masks(positions_NL, width),
            past_key_values=cache,
            use_cache=True,
            logits_to_keep=keep,
        )
        logits: Tensor = output.logits
        return logits

    def _masks(self, positions_NL: Tensor, width: int) -> Tensor | dict[str, Tensor]:
        """Additive masks [N, 1, L, width]: the token at position p attends to 0 … p, or to the window ending at p."""
        keys_T = torch.arange(width, device=positions_NL.device)
        seen_N1LT = keys_T <= positions_NL[:, None, :, None]
        full = self._additive(seen_N1LT)
        if self.window is None:
            return full
        slid = self._additive(seen_N1LT & (keys_T > positions_NL[:, None, :, None] - self.window))
        return {"full_attention": full, "sliding_attention": slid} if self.by_type else slid

    def _additive(self, seen: Tensor) -> Tensor:
        dtype = self.cache.data.dtype
        zero = torch.zeros((), dtype=dtype, device=seen.device)
        return torch.where(seen, zero, torch.finfo(dtype).min)


class _PromptCache:
    """The cache passed to the module for prompts: stores their keys and values, and returns just those."""

    def __init__(self, cache: SlotCache, batch: PromptBatch) -> None:
        self.cache = cache
        self.batch = batch

    def update(self, k_PKLD: Tensor, v_PKLD: Tensor, layer: int, *_: object) -> tuple[Tensor, Tensor]:
        kv_PLKD = torch.cat([k_PKLD, v_PKLD], dim=1).transpose(1, 2)
        self.cache.store_prompts(layer, kv_PLKD, self.batch.rows_N, self.batch.start)
        return k_PKLD, v_PKLD

    def get_seq_length(self, *_: object) -> int:
        return 0


class _TokenCache:
    """The cache passed to the module for a decode step: stores one token per sample, and returns the whole slots."""

    def __init__(self, cache: SlotCache, batch: TokenBatch, places_N: Tensor) -> None:
        self.cache = cache
        self.batch = batch
        self.places_N = places_N

    def update(self, k_NK1D: Tensor, v_NK1D: Tensor, layer: int, *_: object) -> tuple[Tensor, Tensor]:
        samples = k_NK1D.shape[0]
        kv_NX = torch.cat([k_NK1D, v_NK1D], dim=1).view(samples, -1)
        self.cache.store_tokens(layer, kv_NX, self.places_N)
        return self.cache.read(layer, samples, self.batch.width)

    def get_seq_length(self, *_: object) -> int:
        return self.batch.width - 1
