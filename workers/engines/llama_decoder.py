"""A lean forward pass for models built like Llama (Llama, Qwen2, Qwen3, Mistral), on the module's own parameters.

A decode step of a small model is bound by the number of operations, so query, key and value projections are packed
into one matrix, as are gate and up. The module's parameters become views of the packed matrices: an update by name
reaches both. `module_decoder` serves all other models.

Shapes: P prompts, L prompt tokens, N samples, X model width, H query heads, K key/value heads, R = H / K, D head width.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from distflow.flow.deterministic import ROTATIONS
from distflow.workers.engines.decoder import PromptBatch, SlotCache, TokenBatch, unslotted
from distflow.workers.engines.kernels import Kernels, MatrixProduct

FAMILIES = frozenset({"llama", "mistral", "qwen2", "qwen3"})


def is_llama_like(model: Any) -> bool:
    """Whether this forward pass computes what the transformers module does."""
    config = model.config
    if config.model_type not in FAMILIES or config.rope_parameters["rope_type"] not in ROTATIONS:
        return False
    return not hasattr(config, "sliding_window") or config.sliding_window is None


class LlamaDecoder:
    """A `Decoder` for the models that `is_llama_like` accepts."""

    def __init__(self, model: Any, cache: SlotCache, kernels: Kernels) -> None:
        self.body = model.model
        self.kernels = kernels
        self.head = kernels.product(model.lm_head.weight, None)
        self.layers = [PackedLayer(layer, model.config.num_attention_heads, kernels) for layer in self.body.layers]
        self.cache = cache
        self.norm = _Norm(self.body.norm)
        self.cos_C1D = self.sin_C1D = torch.empty(0)

    def prefill(self, batch: PromptBatch) -> Tensor:
        """[N, V] logits after each new slot's prompt."""
        x_PLX = self._read(batch)
        last_P = torch.tensor(batch.lengths, device=x_PLX.device) - 1
        last_PX = x_PLX[torch.arange(len(x_PLX), device=x_PLX.device), last_P]
        return self._logits(last_PX)[batch.rows_N]

    def score(self, tokens_PL: Tensor) -> Tensor:
        """[P, L, V] logits after every token, of rows that belong to no slot."""
        return self._logits(self._read(unslotted(tokens_PL)).flatten(0, 1)).view(*tokens_PL.shape, -1)

    def _read(self, batch: PromptBatch) -> Tensor:
        """[P, L, X] hidden states of the prompts; stores their keys and values."""
        P, L = batch.tokens_PL.shape
        self._extend_rotation(L)
        cos_L1D, sin_L1D = self.cos_C1D[:L], self.sin_C1D[:L]

        def attend(index: int, layer: PackedLayer, q_MHD: Tensor, kv_MX: Tensor) -> Tensor:
            self.cache.store_prompts(index, kv_MX.view(P, L, -1), batch)
            kv_PLKD = kv_MX.view(P, L, 2 * layer.kv_heads, layer.width)
            k_PKLD, v_PKLD = torch.split(kv_PLKD.transpose(1, 2), layer.kv_heads, dim=1)
            q_PHLD = q_MHD.view(P, L, layer.heads, layer.width).transpose(1, 2)
            out_PHLD = self.kernels.read_prompts(q_PHLD, k_PKLD, v_PKLD, layer.scale)
            return out_PHLD.transpose(1, 2).reshape(P * L, -1)

        rotation = (cos_L1D.repeat(P, 1, 1), sin_L1D.repeat(P, 1, 1))
        return self._run(batch.tokens_PL.reshape(-1), rotation, attend).view(P, L, -1)

    def decode(self, batch: TokenBatch) -> Tensor:
        """[N, V] logits after the newest token of each running sample."""
        N = batch.tokens_N.numel()
        self._extend_rotation()
        places_N = self.cache.places(batch.positions_N)
        mask = self.kernels.mask(batch.positions_N, batch.width, even=batch.even, dtype=self.norm.weight.dtype)

        def attend(index: int, layer: PackedLayer, q_NHD: Tensor, kv_NX: Tensor) -> Tensor:
            self.cache.store_tokens(index, kv_NX, places_N)
            k_NKTD, v_NKTD = self.cache.read(index, N, batch.width)
            # The query heads that share a key head take the place of query positions: no key is copied.
            q_NKRD = q_NHD.view(N, layer.kv_heads, layer.heads // layer.kv_heads, layer.width)
            return self.kernels.read_tokens(q_NKRD, k_NKTD, v_NKTD, mask, layer.scale).reshape(N, -1)

        rotation = (self.cos_C1D[batch.positions_N], self.sin_C1D[batch.positions_N])
        return self._logits(self._run(batch.tokens_N, rotation, attend))

    def forget(self) -> None:
        """Drop the reordered weights: they change, or the memory is needed."""
        for product in (self.head, *(product for layer in self.layers for product in layer.products)):
            product.forget()

    def _run(
        self,
        tokens_M: Tensor,
        rotation: tuple[Tensor, Tensor],
        attend: Callable[[int, PackedLayer, Tensor, Tensor], Tensor],
    ) -> Tensor:
        """[M, X] hidden states before the last norm, for M tokens of any number of samples."""
        x_MX = F.embedding(tokens_M, self.body.embed_tokens.weight)
        for index, layer in enumerate(self.layers):
            q_MHD, kv_MX = layer.project(x_MX, rotation)
            x_MX = layer.finish(x_MX, attend(index, layer, q_MHD, kv_MX))
        return x_MX

    def _logits(self, x_NX: Tensor) -> Tensor:
        return self.head(self.norm(x_NX))

    def _extend_rotation(self, tokens: int = 0) -> None:
        """Extend the rotary tables (arXiv:2104.09864) to `tokens` positions and all that the cache can hold."""
        length = max(tokens, self.cache.capacity)
        if self.cos_C1D.shape[0] >= length:
            return
        positions = torch.arange(length, device=self.norm.weight.device)[None]
        cos_1CD, sin_1CD = self.body.rotary_emb(self.norm.weight[None], positions)
        half = sin_1CD.shape[-1] // 2
        # x·cos + rotate_half(x)·sin, with rotate_half written as a roll: the sign moves into the table.
        sin_1CD = torch.cat([-sin_1CD[..., :half], sin_1CD[..., half:]], dim=-1)
        self.cos_C1D, self.sin_C1D = cos_1CD[0, :, None], sin_1CD[0, :, None]


class PackedLayer:
    """One layer's parameters, with its projections packed."""

    def __init__(self, layer: Any, heads: int, kernels: Kernels) -> None:
        attention, mlp = layer.self_attn, layer.mlp
        self.rotate = kernels.rotate
        self.scale: float = attention.scaling
        self.heads: int = heads
        self.width: int = attention.head_dim
        self.kv_heads: int = attention.k_proj.weight.shape[0] // self.width
        self.qkv = _pack([attention.q_proj, attention.k_proj, attention.v_proj], kernels)
        self.gate_up = _pack([mlp.gate_proj, mlp.up_proj], kernels)
        self.out = kernels.product(attention.o_proj.weight, attention.o_proj.bias)
        self.down = kernels.product(mlp.down_proj.weight, mlp.down_proj.bias)
        self.products = (self.qkv, self.gate_up, self.out, self.down)
        self.activation: Callable[[Tensor], Tensor] = mlp.act_fn
        self.before_attention = _Norm(layer.input_layernorm)
        self.before_mlp = _Norm(layer.post_attention_layernorm)
        # Qwen3 normalizes the query and key of each head.
        normed = hasattr(attention, "q_norm")
        self.head_norms = (_Norm(attention.q_norm), _Norm(attention.k_norm)) if normed else None

    def project(self, x_MX: Tensor, rotation: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        """Rotated queries [M, H, D], and rotated keys with values, flattened [M, 2·K·D]."""
        packed_MX = self.qkv(self.before_attention(x_MX))
        packed_MAD = packed_MX.view(x_MX.shape[0], -1, self.width)
        rotated = self.heads + self.kv_heads
        qk_MAD = packed_MAD[:, :rotated]
        if self.head_norms is not None:
            q_norm, k_norm = self.head_norms
            qk_MAD = torch.cat([q_norm(qk_MAD[:, : self.heads]), k_norm(qk_MAD[:, self.heads :])], dim=1)
        qk_MAD = self.rotate(qk_MAD, *rotation)
        kv_MKD = torch.cat([qk_MAD[:, self.heads :], packed_MAD[:, rotated:]], dim=1)
        return qk_MAD[:, : self.heads].contiguous(), kv_MKD.view(x_MX.shape[0], -1)

    def finish(self, x_MX: Tensor, attended_MX: Tensor) -> Tensor:
        """The rest of the layer, after attention."""
        x_MX = x_MX + self.out(attended_MX)
        gate_MX, up_MX = self.gate_up(self.before_mlp(x_MX)).chunk(2, dim=-1)
        return x_MX + self.down(self.activation(gate_MX) * up_MX)


class _Norm:
    """Root-mean-square norm with the module's weight (arXiv:1910.07467)."""

    def __init__(self, module: Any) -> None:
        self.weight: Tensor = module.weight
        self.eps: float = module.variance_epsilon

    def __call__(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, self.weight.shape, self.weight, self.eps)


def _pack(projections: Sequence[nn.Linear], kernels: Kernels) -> MatrixProduct:
    """A product with the stacked weights and biases of several projections, whose parameters become views of them."""
    weight = _stack([projection.weight for projection in projections])
    biases = [projection.bias for projection in projections if projection.bias is not None]
    rows = [projection.out_features for projection in projections]
    return kernels.product(weight, _stack(biases) if biases else None, rows)


def _stack(parameters: Sequence[Tensor]) -> Tensor:
    stacked = torch.cat([parameter.detach() for parameter in parameters])
    start = 0
    for parameter in parameters:
        parameter.data = stacked[start : start + parameter.shape[0]]
        start += parameter.shape[0]
    return stacked
