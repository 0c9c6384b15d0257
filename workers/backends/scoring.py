"""Log-probs of response tokens from a transformers causal model, computed at the response positions only.

Where the model allows it, tokens are packed: no padding is computed, and the prompt shared by the samples of a group is
computed once. All tokens of a micro-batch form one row: first every distinct prompt, then the responses. Linear layers
see just that row; attention alone spreads the tokens out: prompts attend to themselves, responses to their prompt and
to themselves. With G samples per prompt this saves up to (G - 1)/G of the work on prompts.

Otherwise, and for rows so long that the masks of packed attention would be too large (`distflow.parts`), each row
is prompt + response, padded on the right: a causal model never attends to that padding, so no
attention mask is needed and no result depends on it.

Shapes: B samples, U distinct prompts, N packed tokens (or response tokens of all rows), M response tokens to score,
K candidates for each token,
L tokens of the longest row, T response tokens of the longest row, P longest prompt, R longest response without its last
token, S longest prompt + response without the last token, H key heads, Q = H · rep query heads, D head width, W model
width, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from torch.utils.checkpoint import checkpoint
from transformers import AttentionInterface, PreTrainedModel

from distflow.algorithms.logprobs import candidate_scores
from distflow.data.batch import Batch, Ragged, part_lengths
from distflow.flow.estimate import LOGITS_CHUNK
from distflow.parts import part_of
from distflow.runtime.protocols import TokenScores, TokenValues
from distflow.workers import batch_invariant
from distflow.workers.batch_invariant import enable_causal
from distflow.workers.heads import has_value_head, output_layer


class Scorer:
    """Computes log-probs with one model; `packed`: with packed tokens, if the model can.

    `deterministic`: for a model that was built so, the scores of a row do not depend on the other rows.
    """

    def __init__(
        self, model: PreTrainedModel, device: torch.device, *, packed: bool, deterministic: bool = False
    ) -> None:
        self.device = device
        """Where the model computes; may be set again when the model was moved."""
        self._model = model
        self._head: nn.Module = output_layer(model)
        self._vocabulary = int(self._model.get_input_embeddings().num_embeddings)
        self._plain_head = has_value_head(model) or self._probe()
        self.packs = packed and self._plain_head and can_pack(model)
        """Whether it packs the rows whose masks are not too large."""
        if self.packs:
            enable(model, invariant=deterministic)
        elif deterministic:
            enable_causal(model)

    def use_head(self, head: nn.Module) -> None:
        """From now on compute logits with this module, which is equivalent to the model's own output layer."""
        self._head = head

    def score(self, batch: Batch, *, temperature: float, entropy: bool, candidates: int | Ragged = 0) -> TokenScores:
        """Scores [B, T] of the response tokens, and [B, T, K] of the likeliest K or the given ones in their places.

        Raises ValueError for an empty prompt.
        """
        responses = batch.ragged("response_ids")
        mask_BT = responses.mask().to(self.device)
        states_NW, head = self._states(batch)
        asked = _Asked(temperature, entropy, 0 if isinstance(candidates, Ragged) else candidates)
        given_NK = candidates.values.to(self.device, torch.int64) if isinstance(candidates, Ragged) else None
        found = self._in_chunks(states_NW, head, responses.values.to(self.device), given_NK, asked)
        logprobs_BT, *others = [None if part is None else _spread(part, mask_BT) for part in found]
        assert logprobs_BT is not None, "log-probs are what was asked for"
        return TokenScores(logprobs_BT, others[0], mask_BT, *others[1:])

    def values(self, batch: Batch) -> TokenValues:
        """Values [B, T] of the states before each response token; raises ValueError for an empty prompt."""
        mask_BT = batch.ragged("response_ids").mask().to(self.device)
        states_NW, head = self._states(batch)
        values_N = head(states_NW)[:, 0]
        wide_N = values_N if values_N.dtype == torch.float64 else values_N.float()
        return TokenValues(_spread(wide_N, mask_BT), mask_BT)

    def _states(self, batch: Batch) -> tuple[Tensor, nn.Module]:
        """Hidden states at the positions that predict response tokens, and the module that turns them into logits."""
        rows = batch.only(["prompt_ids", "response_ids"])
        packed = self.packs and part_of(part_lengths(rows)).fits_masks
        states = self._packed_states if packed else self._padded_states
        return states(batch.ragged("prompt_ids"), batch.ragged("response_ids"))

    def _packed_states(self, prompts: Ragged, responses: Ragged) -> tuple[Tensor, nn.Module]:
        layout = pack(prompts, responses).to(self.device)
        hidden_1NW = self._model.base_model(
            input_ids=layout.ids_N[None], position_ids=layout.positions_N[None], use_cache=False, packed=layout
        ).last_hidden_state
        return hidden_1NW[0].index_select(0, layout.scored_M), self._head

    def _padded_states(self, prompts: Ragged, responses: Ragged) -> tuple[Tensor, nn.Module]:
        ids_BL, response_BL = join(prompts, responses)
        # The token at position l is predicted at position l - 1; the last position predicts nothing that is scored.
        chosen_N = response_BL[:, 1:].flatten().nonzero().flatten().to(self.device)
        input_BL = ids_BL[:, :-1].to(self.device)
        if self._plain_head:
            hidden_BLW = self._model.base_model(input_ids=input_BL, use_cache=False).last_hidden_state
            return hidden_BLW.flatten(0, 1).index_select(0, chosen_N), self._head
        logits_BLV = self._model(input_ids=input_BL, use_cache=False).logits
        return logits_BLV.flatten(0, 1).index_select(0, chosen_N), nn.Identity()

    def _in_chunks(
        self, states_NW: Tensor, head: nn.Module, targets_N: Tensor, given_NK: Tensor | None, asked: _Asked
    ) -> _Found:
        def scores(states_NW: Tensor, targets_N: Tensor, given_NK: Tensor | None) -> _Found:
            return _scores(head(states_NW), targets_N, given_NK, asked)

        rows = max(1, LOGITS_CHUNK // self._vocabulary)
        if len(targets_N) <= rows:
            return scores(states_NW, targets_N, given_NK)
        targets = torch.split(targets_N, rows)
        given = [None] * len(targets) if given_NK is None else torch.split(given_NK, rows)
        pieces = zip(torch.split(states_NW, rows), targets, given, strict=True)
        parts = [checkpoint(scores, *piece, use_reentrant=False) for piece in pieces]
        logprobs, *others = zip(*parts, strict=True)
        entropy, ids, of_candidates = (None if same[0] is None else torch.cat(same) for same in others)
        return torch.cat(logprobs), entropy, ids, of_candidates

    @torch.no_grad()
    def _probe(self) -> bool:
        """Whether logits are exactly head(last hidden state): some models scale or cap them afterwards."""
        if self._model.base_model is self._model:
            return False  # as of llama4, whose body has another name than its class says
        ids = torch.arange(4, device=self.device)[None] % self._vocabulary
        whole = self._model(input_ids=ids, use_cache=False).logits
        direct = self._head(self._model.base_model(input_ids=ids, use_cache=False).last_hidden_state)
        return direct.shape == whole.shape and torch.allclose(direct, whole)


@dataclass(frozen=True, slots=True)
class _Asked:
    """What to compute of the logits besides the log-probs of the tokens that are there."""

    temperature: float
    entropy: bool
    likeliest: int
    """How many of the likeliest tokens; 0 if candidates are given, or none wanted."""


_Found = tuple[Tensor, Tensor | None, Tensor | None, Tensor | None]
"""Log-probs [N], entropies [N], candidates [N, K], and their log-probs [N, K]."""


def _scores(logits_NV: Tensor, targets_N: Tensor, given_NK: Tensor | None, asked: _Asked) -> _Found:
    candidates_NK = given_NK
    if asked.likeliest:
        candidates_NK = logits_NV.topk(min(asked.likeliest, logits_NV.shape[-1])).indices
    # Models of one tokenizer may have more ids than that, not all as many.
    unknown_NK = None if given_NK is None else given_NK >= logits_NV.shape[-1]
    known_NK = candidates_NK if given_NK is None or unknown_NK is None else given_NK.masked_fill(unknown_NK, 0)
    logprobs_N, entropy_N, logprobs_NK = candidate_scores(
        logits_NV, targets_N, known_NK, temperature=asked.temperature, entropy=asked.entropy
    )
    if unknown_NK is not None and logprobs_NK is not None:
        logprobs_NK = logprobs_NK.masked_fill(unknown_NK, torch.finfo(logprobs_NK.dtype).min)
    return logprobs_N, entropy_N, candidates_NK, logprobs_NK


def join(prompts: Ragged, responses: Ragged) -> tuple[Tensor, Tensor]:
    """Rows of prompt + response, [B, L], right-padded with 0, and where they hold response tokens, [B, L] bool."""
    prompt_lengths, lengths = prompts.lengths, prompts.lengths + responses.lengths
    if len(prompts) and int(prompt_lengths.min()) == 0:
        row = int(prompt_lengths.argmin())
        raise ValueError(f"row {row} has an empty prompt: the first response token needs at least one token before it")
    place_L = torch.arange(int(lengths.max()) if len(prompts) else 1)
    prompt_BL = place_L < prompt_lengths[:, None]
    response_BL = (place_L < lengths[:, None]) & ~prompt_BL
    ids_BL = torch.zeros(prompt_BL.shape, dtype=torch.int64)
    ids_BL[prompt_BL] = prompts.values
    ids_BL[response_BL] = responses.values
    return ids_BL, response_BL


def _spread(values_N: Tensor, mask_BT: Tensor) -> Tensor:
    """[B, T], or [B, T, K]: the values at the True positions of the mask, in order, and zeros elsewhere."""
    if values_N.dim() > 1:
        mask_BT = mask_BT[..., None].expand(*mask_BT.shape, values_N.shape[1])
    return values_N.new_zeros(mask_BT.shape).masked_scatter(mask_BT, values_N)


NAME = "distflow_packed"
Kernel = Callable[[Tensor, Tensor, Tensor, Tensor | None, float], Tensor]
"""Attention of queries, keys, values, visibility mask (None: causal) and scale."""
# Their attention passes unknown keywords on to the function that computes it, and masks nothing but the future.
MODEL_TYPES = ("llama", "mistral", "qwen2", "qwen3")


@dataclass(frozen=True, slots=True)
class PackedLayout:
    """The positions of a micro-batch's tokens in the packed row; all tensors are on the model's device."""

    ids_N: Tensor
    positions_N: Tensor
    scored_M: Tensor
    """For each response token, the packed position that predicts it."""
    prompt_places_UP: Tensor
    prompt_visible_UPP: Tensor
    prompt_kept: Tensor
    """Which of the U · P positions are tokens, as row numbers."""
    query_places_BR: Tensor
    query_kept: Tensor
    key_places_BS: Tensor
    """The sample's prompt, then its response, without a gap."""
    visible_BRS: Tensor

    def to(self, device: torch.device) -> PackedLayout:
        """The same on another device."""
        return PackedLayout(**{field.name: getattr(self, field.name).to(device) for field in fields(self)})


def pack(prompts: Ragged, responses: Ragged) -> PackedLayout:
    """Lay out a micro-batch; adjacent rows with the same prompt share it. Raises ValueError for an empty prompt."""
    lengths_B = prompts.lengths
    if int(lengths_B.min()) == 0:
        row = int(lengths_B.argmin())
        raise ValueError(f"row {row} has an empty prompt: the first response token needs at least one token before it")
    prompt_BP = prompts.padded(fill=-1)
    fresh_B = torch.ones(len(prompts), dtype=torch.bool)
    fresh_B[1:] = (prompt_BP[1:] != prompt_BP[:-1]).any(1)
    shared_B = fresh_B.cumsum(0) - 1
    prompt_UP = prompt_BP[fresh_B]
    prompt_real_UP = prompt_UP >= 0
    inputs_B = (responses.lengths - 1).clamp(min=0)
    place_R = torch.arange(int(inputs_B.max()))
    place_S = torch.arange(int((lengths_B + inputs_B).max()))
    query_real_BR = place_R < inputs_B[:, None]
    # Packed positions: prompts first, then responses, both row by row.
    prompt_places_UP = _numbered(prompt_real_UP, 0)
    prompt_tokens = int(prompt_real_UP.sum())
    query_places_BR = _numbered(query_real_BR, prompt_tokens)
    last_B = prompt_places_UP.gather(1, lengths_B[fresh_B][:, None] - 1)[shared_B]
    predicting_BT = torch.cat([last_B, query_places_BR], 1)
    # A sample's keys are contiguous, as during generation: its prompt, then its response.
    response_first_B = prompt_tokens + inputs_B.cumsum(0) - inputs_B
    key_places_BS = torch.where(
        place_S < lengths_B[:, None],
        prompt_places_UP[shared_B, :1] + place_S,
        (response_first_B - lengths_B)[:, None] + place_S,
    )
    return PackedLayout(
        ids_N=torch.cat([prompt_UP[prompt_real_UP], responses.padded()[:, : len(place_R)][query_real_BR]]),
        positions_N=torch.cat(
            [
                torch.arange(prompt_UP.shape[1]).expand_as(prompt_UP)[prompt_real_UP],
                (lengths_B[:, None] + place_R)[query_real_BR],
            ]
        ),
        scored_M=predicting_BT[responses.mask(predicting_BT.shape[1])],
        prompt_places_UP=prompt_places_UP,
        prompt_visible_UPP=_past(prompt_UP.shape[1]).expand(len(prompt_UP), -1, -1),
        prompt_kept=prompt_real_UP.flatten().nonzero().flatten(),
        query_places_BR=query_places_BR,
        query_kept=query_real_BR.flatten().nonzero().flatten(),
        # Past the sample's end are other tokens, which no query of this sample sees.
        key_places_BS=key_places_BS.clamp(max=prompt_tokens + int(inputs_B.sum()) - 1),
        visible_BRS=place_S <= (lengths_B[:, None] + place_R)[:, :, None],
    )


def _numbered(real: Tensor, start: int) -> Tensor:
    """Consecutive numbers from `start` at the True positions; other positions repeat one, and are masked or dropped."""
    return (real.flatten().cumsum(0) - 1).clamp(min=0).view(real.shape) + start


def _past(length: int) -> Tensor:
    return torch.ones(length, length, dtype=torch.bool).tril()


def attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float | None = None,
    packed: PackedLayout | None = None,
    kernel: Kernel,
    **_: Any,
) -> tuple[Tensor, None]:
    """A transformers attention function: query [1, Q, N, D], key and value [1, H, N, D] → [1, N, Q, D].

    Without a layout, of padded rows: query [B, Q, L, D], key and value [B, H, L, D] → [B, L, Q, D].
    """
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    if packed is None:
        return kernel(query, key, value, None, scale).transpose(1, 2), None
    places, keys = packed.prompt_places_UP, packed.prompt_places_UP
    q, k, v = _gathered((query, key, value), places, keys)
    out = kernel(q, k, v, packed.prompt_visible_UPP[:, None], scale)
    parts = [out.transpose(1, 2).flatten(0, 1).index_select(0, packed.prompt_kept)]
    if packed.query_places_BR.numel():
        places, keys = packed.query_places_BR, packed.key_places_BS
        q, k, v = _gathered((query, key, value), places, keys)
        out = kernel(q, k, v, packed.visible_BRS[:, None], scale)
        parts.append(out.transpose(1, 2).flatten(0, 1).index_select(0, packed.query_kept))
    return torch.cat(parts)[None], None


def _gathered(states: tuple[Tensor, Tensor, Tensor], query_BR: Tensor, key_BS: Tensor) -> Iterator[Tensor]:
    """Queries [B, Q, R, D] of the tokens at `query_BR`, keys and values [B, H, S, D] of those at `key_BS`."""
    for x, places in zip(states, (query_BR, key_BS, key_BS), strict=True):
        tokens = x[0].transpose(0, 1).index_select(0, places.flatten())
        yield tokens.view(*places.shape, x.shape[1], -1).transpose(1, 2)


def _attention(query: Tensor, key: Tensor, value: Tensor, visible: Tensor | None, scale: float) -> Tensor:
    """[B, Q, R, D]."""
    grouped = query.shape[1] != key.shape[1]
    if visible is None:
        return scaled_dot_product_attention(query, key, value, is_causal=True, scale=scale, enable_gqa=grouped)
    if grouped and query.is_cuda:
        # On a GPU only the unfused kernel shares keys under a mask, and it stores a score for every pair of tokens.
        key, value = (x.repeat_interleave(query.shape[1] // x.shape[1], dim=1) for x in (key, value))
        grouped = False
    return scaled_dot_product_attention(query, key, value, attn_mask=visible, scale=scale, enable_gqa=grouped)


def enable(model: PreTrainedModel, *, invariant: bool = False) -> None:
    """Make this model compute attention with `attend`: packed if its base model is called with the keyword `packed`.

    Nothing is switched afterwards: where activations are recomputed, a layer is called in the backward pass as it was
    called before, with the layout of its own micro-batch. `invariant`: with the batch-invariant kernel.
    """
    name, kernel = (f"{NAME}_invariant", batch_invariant.attention) if invariant else (NAME, _attention)
    AttentionInterface.register(name, partial(attend, kernel=kernel))
    model.set_attn_implementation(name)


def can_pack(model: PreTrainedModel) -> bool:
    """Whether every layer of this model attends to the whole past."""
    settings = model.config.to_dict()
    kinds = settings.get("layer_types") or ["full_attention"]
    windowed = settings["model_type"] == "mistral" and settings["sliding_window"] is not None
    return settings["model_type"] in MODEL_TYPES and set(kinds) == {"full_attention"} and not windowed
