"""Attention over packed tokens: no padding is computed, and the prompt that the samples of a group share only once.

All tokens of a micro-batch stand in one row: first every distinct prompt, then the responses. Linear layers see just
that row. Only inside the attention the tokens are spread out: prompts look at themselves, responses at their prompt and
at themselves. With G samples a prompt this saves up to (G - 1)/G of the work on prompts.

Shapes: B samples, U distinct prompts, N packed tokens, M response tokens (what is scored), P longest prompt, R longest
response without its last token, S longest prompt with such a response, H key heads, Q = H · rep query heads, D head
width.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, PreTrainedModel

from distflow.data.batch import Ragged
from distflow.workers import batch_invariant

NAME = "distflow_packed"
Kernel = Callable[[Tensor, Tensor, Tensor, Tensor, float], Tensor]
"""Queries, keys, values, who sees what, scale: attention."""
# Their attention passes unknown keywords on to the function that computes it, and masks nothing but the future.
MODEL_TYPES = ("llama", "mistral", "qwen2", "qwen3")


@dataclass(frozen=True, slots=True)
class PackedLayout:
    """Where the tokens of a micro-batch lie; all tensors on the model's device."""

    ids_N: Tensor
    positions_N: Tensor
    scored_M: Tensor
    """For each response token, the packed place at which it is predicted."""
    prompt_places_UP: Tensor
    prompt_visible_UPP: Tensor
    prompt_kept: Tensor
    """Which of the U · P places are tokens, as row numbers."""
    query_places_BR: Tensor
    query_kept: Tensor
    key_places_BS: Tensor
    """S: the sample's prompt, then its response, with nothing in between."""
    visible_BRS: Tensor

    def to(self, device: torch.device) -> PackedLayout:
        """The same on another device."""
        return PackedLayout(**{field.name: getattr(self, field.name).to(device) for field in fields(self)})


def pack(prompts: Ragged, responses: Ragged) -> PackedLayout:
    """Lay out a micro-batch; neighbouring rows with the same prompt share it. Raises ValueError for an empty prompt."""
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
    # Packed numbers: prompts first, then responses, both row by row.
    prompt_places_UP = _numbered(prompt_real_UP, 0)
    prompt_tokens = int(prompt_real_UP.sum())
    query_places_BR = _numbered(query_real_BR, prompt_tokens)
    last_B = prompt_places_UP.gather(1, lengths_B[fresh_B][:, None] - 1)[shared_B]
    predicting_BT = torch.cat([last_B, query_places_BR], 1)
    # A sample's keys stand in one run, as they do while it is generated: its prompt, then its response.
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
        # Behind the sample's end is some other token, which no query of this sample sees.
        key_places_BS=key_places_BS.clamp(max=prompt_tokens + int(inputs_B.sum()) - 1),
        visible_BRS=place_S <= (lengths_B[:, None] + place_R)[:, :, None],
    )


def _numbered(real: Tensor, start: int) -> Tensor:
    """Consecutive numbers from `start` on the True places; the others repeat some number, and are masked or dropped."""
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
    """A transformers attention function: query [1, Q, N, D], key and value [1, H, N, D] → [1, N, Q, D]."""
    if packed is None:
        raise ValueError(
            f"{type(module).__name__} does not hand the keyword `packed` to its attention; set the pool's "
            "backend_options: {packed: false}"
        )
    places, keys = packed.prompt_places_UP, packed.prompt_places_UP
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
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
    """Queries [B, Q, R, D] of the tokens at places `query_BR`, keys and values [B, H, S, D] of those at `key_BS`."""
    for x, places in zip(states, (query_BR, key_BS, key_BS), strict=True):
        tokens = x[0].transpose(0, 1).index_select(0, places.flatten())
        yield tokens.view(*places.shape, x.shape[1], -1).transpose(1, 2)


def _attention(query: Tensor, key: Tensor, value: Tensor, visible: Tensor, scale: float) -> Tensor:
    """[B, Q, R, D]."""
    grouped = query.shape[1] != key.shape[1]
    if grouped and query.is_cuda:
        # With a mask, only the plain kernel there shares keys, and it keeps a score for every pair of tokens.
        key, value = (x.repeat_interleave(query.shape[1] // x.shape[1], dim=1) for x in (key, value))
        grouped = False
    return scaled_dot_product_attention(query, key, value, attn_mask=visible, scale=scale, enable_gqa=grouped)


def enable(model: PreTrainedModel, *, invariant: bool = False) -> None:
    """Make this model compute attention by `attend`; its base model then needs the keyword `packed`.

    `invariant`: batch-invariantly.
    """
    name, kernel = (f"{NAME}_invariant", batch_invariant.attention) if invariant else (NAME, _attention)
    AttentionInterface.register(name, partial(attend, kernel=kernel))
    model.set_attn_implementation(name)


def can_pack(model: PreTrainedModel) -> bool:
    """Whether every layer of this model looks at the whole past."""
    settings = model.config.to_dict()
    kinds = settings.get("layer_types") or ["full_attention"]
    windowed = settings["model_type"] == "mistral" and settings["sliding_window"] is not None
    return settings["model_type"] in MODEL_TYPES and set(kinds) == {"full_attention"} and not windowed
