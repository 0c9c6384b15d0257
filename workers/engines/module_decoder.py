"""Runs any causal language model of transformers through its own forward, on our cache.

Slower than `llama_decoder` by the module's Python overhead, but correct for every model whose layers attend to keys and
values, of a shape for each layer and within windows too, or keep states of one size, as convolutions and linear
attention do.

Shapes: P prompts, L prompt tokens, N samples, T tokens attended to, K key or value heads, D head width, C channels,
W width of a convolution.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from distflow.errors import UserError
from distflow.workers.engines.decoder import (
    CacheShape,
    Heads,
    PromptBatch,
    SlotCache,
    StateName,
    TokenBatch,
    unslotted,
)

CONV, RECURRENT = "conv", "recurrent"


class ModuleDecoder:
    """A `Decoder` for the models whose cache has a shape (`cache_shape`)."""

    def __init__(self, model: Any, cache: SlotCache) -> None:
        self.forward = _Forward(model)
        self.cache = cache

    def prefill(self, batch: PromptBatch) -> Tensor:
        """[N, V] logits after each new slot's prompt."""
        if not self.cache.states:
            return self._prefill(batch)
        # A recurrent layer would read the padding: prompts of one length at a time.
        parts = [(which, self._prefill(part)) for which, part in batch.by_length()]
        logits_NV = torch.cat([logits for _, logits in parts])
        return logits_NV[torch.cat([which for which, _ in parts]).argsort()]

    def _prefill(self, batch: PromptBatch) -> Tensor:
        P, L = batch.tokens_PL.shape
        positions_L = torch.arange(L, device=batch.tokens_PL.device)
        # Logits are needed at the last token of each prompt only, and there are few distinct lengths.
        ends = sorted({length - 1 for length in batch.lengths})
        keep = torch.tensor(ends, device=positions_L.device)
        logits_PEV = self.forward(batch.tokens_PL, positions_L.expand(P, L), L, _PromptCache(self.cache, batch), keep)
        which_P = torch.tensor([ends.index(length - 1) for length in batch.lengths], device=positions_L.device)
        return logits_PEV[torch.arange(P, device=positions_L.device), which_P][batch.rows_N]

    def score(self, tokens_PL: Tensor) -> Tensor:
        """[P, L, V] logits after every token, of rows that belong to no slot."""
        P, L = tokens_PL.shape
        positions_L = torch.arange(L, device=tokens_PL.device)
        cache = _PromptCache(self.cache, unslotted(tokens_PL))
        return self.forward(tokens_PL, positions_L.expand(P, L), L, cache, positions_L)

    def decode(self, batch: TokenBatch) -> Tensor:
        """[N, V] logits after the newest token of each running sample."""
        places_N = self.cache.places(batch.positions_N)
        cache = _TokenCache(self.cache, batch, places_N)
        keep = torch.zeros(1, dtype=torch.int64, device=places_N.device)
        return self.forward(batch.tokens_N[:, None], batch.positions_N[:, None], batch.width, cache, keep)[:, 0]

    def forget(self) -> None:
        """Nothing is derived from the weights."""


class _Forward:
    """The module's own forward, on a cache and with masks of ours."""

    def __init__(self, model: Any) -> None:
        config = model.config.get_text_config()
        self.types = set(config.layer_types or ()) if hasattr(config, "layer_types") else set()
        self.model = model
        self.by_type = bool(self.types - {"full_attention"})
        # Where the config lists layer types, a window that no layer uses may have any value: for Qwen2-MoE it is 0.
        windowed = hasattr(config, "sliding_window") and ("sliding_attention" in self.types or not self.types)
        self.window: int | None = config.sliding_window if windowed else None

    def __call__(self, tokens_NL: Tensor, positions_NL: Tensor, width: int, cache: Any, keep: Tensor) -> Tensor:
        """[N, kept, V] logits behind these tokens, of which the longest row ends `width` tokens after its beginning."""
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

    def _masks(self, positions_NL: Tensor, width: int) -> Tensor | dict[str, Tensor | None]:
        """Additive masks [N, 1, L, width]: the token at position p attends to 0 … p, or to the window ending at p."""
        keys_T = torch.arange(width, device=positions_NL.device)
        seen_N1LT = keys_T <= positions_NL[:, None, :, None]
        full = slid = self._additive(seen_N1LT)
        if self.window is not None:
            slid = self._additive(seen_N1LT & (keys_T > positions_NL[:, None, :, None] - self.window))
        if not self.by_type:
            return slid
        # Recurrent layers read no padding: they need no mask.
        return {**dict.fromkeys(self.types), "full_attention": full, "sliding_attention": slid}

    def _additive(self, seen: Tensor) -> Tensor:
        dtype = self.model.dtype
        zero = torch.zeros((), dtype=dtype, device=seen.device)
        return torch.where(seen, zero, torch.finfo(dtype).min)


@torch.inference_mode()
def cache_shape(model: Any) -> CacheShape:
    """Read what a model keeps of a sample from what its own forward gives to a cache, whatever its weights are.

    Raises UserError for a model with layers that keep something else.
    """
    forward, probe = _Forward(model), _Probe()
    first = torch.zeros((1, 1), dtype=torch.int64, device=model.device)
    try:
        forward(first, first, 1, probe, first[0])
    except (AttributeError, IndexError, TypeError, ValueError) as error:
        raise _unknown_cache(model, str(error)) from error
    if not probe.heads and not probe.states:
        raise _unknown_cache(model, "its layers use no cache")
    return CacheShape(probe.heads, probe.states)


def _unknown_cache(model: Any, why: str) -> UserError:
    family = model.config.get_text_config().model_type
    return UserError(
        f"engine torch: model_type {family!r} keeps something else of past tokens than keys and values, or states of "
        f"linear attention and convolutions ({why}); use engine sglang or vllm, or a model of another family"
    )


class _Probe:
    """The cache passed to the module to learn what it stores."""

    def __init__(self) -> None:
        self.heads: dict[int, Heads] = {}
        self.states: dict[StateName, tuple[tuple[int, ...], torch.dtype]] = {}

    def update(self, key_states: Tensor, value_states: Tensor, layer_idx: int, *_: object) -> tuple[Tensor, Tensor]:
        k_NKLD, v_NKLD = key_states, value_states
        sizes = (k_NKLD.shape[1], k_NKLD.shape[3], v_NKLD.shape[1], v_NKLD.shape[3])
        self.heads[layer_idx] = Heads(*sizes, k_NKLD.dtype)
        return k_NKLD, v_NKLD

    def has_previous_state(self, *_: object, **__: object) -> bool:
        return False

    def update_conv_state(
        self, conv_states: Tensor, layer_idx: int, state_idx: int = 0, conv_kernel_size: int = 0, **_: object
    ) -> Tensor:
        width = conv_kernel_size or conv_states.shape[-1]
        self.states[layer_idx, CONV, state_idx] = ((*conv_states.shape[1:-1], width), conv_states.dtype)
        return conv_states

    def update_recurrent_state(
        self, recurrent_states: Tensor, layer_idx: int, state_idx: int = 0, **_: object
    ) -> Tensor:
        self.states[layer_idx, RECURRENT, state_idx] = (tuple(recurrent_states.shape[1:]), recurrent_states.dtype)
        return recurrent_states

    def get_seq_length(self, *_: object) -> int:
        return 0


class _PromptCache:
    """The cache passed to the module for prompts: stores what they leave, and returns just their own."""

    def __init__(self, cache: SlotCache, batch: PromptBatch) -> None:
        self.cache = cache
        self.batch = batch

    def update(self, key_states: Tensor, value_states: Tensor, layer_idx: int, *_: object) -> tuple[Tensor, Tensor]:
        kv_PLX = torch.cat([x_PKLD.transpose(1, 2).flatten(2) for x_PKLD in (key_states, value_states)], dim=-1)
        self.cache.store_prompts(layer_idx, kv_PLX, self.batch)
        return key_states, value_states

    def has_previous_state(self, *_: object, **__: object) -> bool:
        return False

    def update_conv_state(self, conv_states: Tensor, layer_idx: int, state_idx: int = 0, **_: object) -> Tensor:
        name = (layer_idx, CONV, state_idx)
        width = self.cache.states[name].shape[-1]
        padded_PCL = pad(conv_states, (max(0, width - conv_states.shape[-1]), 0))
        self.cache.store_state(name, padded_PCL[..., -width:], self.batch)
        return padded_PCL

    def update_recurrent_state(
        self, recurrent_states: Tensor, layer_idx: int, state_idx: int = 0, **_: object
    ) -> Tensor:
        self.cache.store_state((layer_idx, RECURRENT, state_idx), recurrent_states, self.batch)
        return recurrent_states

    def get_seq_length(self, *_: object) -> int:
        return 0


@dataclass(frozen=True, slots=True)
class _LayerStates:
    """What a module reads and overwrites in a recurrent layer of transformers' caches."""

    conv_states: dict[int, Tensor] = field(default_factory=dict)
    recurrent_states: dict[int, Tensor] = field(default_factory=dict)
    record_past: bool = False


class _TokenCache:
    """The cache passed to the module for a decode step: stores one token per sample, and returns the whole slots."""

    def __init__(self, cache: SlotCache, batch: TokenBatch, places_N: Tensor) -> None:
        self.cache = cache
        self.batch = batch
        self.places_N = places_N
        self.layers = _states_by_layer(cache.states, places_N.numel())
        """Views of the states of the running samples."""

    def update(self, key_states: Tensor, value_states: Tensor, layer_idx: int, *_: object) -> tuple[Tensor, Tensor]:
        kv_NX = torch.cat([x_NK1D.flatten(1) for x_NK1D in (key_states, value_states)], dim=1)
        self.cache.store_tokens(layer_idx, kv_NX, self.places_N)
        return self.cache.read(layer_idx, len(kv_NX), self.batch.width)

    def has_previous_state(self, *_: object, **__: object) -> bool:
        return True

    def update_conv_state(self, conv_states: Tensor, layer_idx: int, state_idx: int = 0, **_: object) -> Tensor:
        state_NCW = self.layers[layer_idx].conv_states[state_idx]
        whole_NCL = torch.cat([state_NCW, conv_states], dim=-1)
        state_NCW.copy_(whole_NCL[..., -state_NCW.shape[-1] :])
        return whole_NCL

    def update_recurrent_state(
        self, recurrent_states: Tensor, layer_idx: int, state_idx: int = 0, **_: object
    ) -> Tensor:
        return self.layers[layer_idx].recurrent_states[state_idx].copy_(recurrent_states)

    def get_seq_length(self, *_: object) -> int:
        return self.batch.width - 1


def _states_by_layer(states: Mapping[StateName, Tensor], samples: int) -> dict[int, _LayerStates]:
    found: dict[int, _LayerStates] = {}
    for (layer, kind, index), state in states.items():
        of_layer = found.setdefault(layer, _LayerStates())
        (of_layer.conv_states if kind == CONV else of_layer.recurrent_states)[index] = state[:samples]
    return found
