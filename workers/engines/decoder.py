"""What the engine asks of a model: logits for new prompts and for running samples, over a slot cache.

Shapes: P prompts, L tokens of the longest of them, N samples, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from distflow.workers.engines.kv_cache import SlotCache


@dataclass(frozen=True, slots=True)
class PromptBatch:
    """Prompts to be read, and the slots that continue them."""

    tokens_PL: Tensor
    """Right-padded with 0: causal attention never looks at the padding of its own row."""
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
    """Place of that token in its sequence = number of tokens cached before it."""
    width: int
    """Longest sequence, this token included."""
    even: bool
    """All sequences are `width` long: attention needs no mask."""


def unslotted(tokens_PL: Tensor) -> PromptBatch:
    """Rows of one length that no slot continues: nothing of them is stored."""
    rows, length = tokens_PL.shape
    return PromptBatch(tokens_PL, (length,) * rows, tokens_PL.new_empty(0), 0)


class Decoder(Protocol):
    """A model over a cache. `prefill` and `decode` store keys and values and return float logits for the next token."""

    cache: SlotCache

    def prefill(self, batch: PromptBatch) -> Tensor:
        """[N, V], one row for each new slot."""
        ...

    def score(self, tokens_PL: Tensor) -> Tensor:
        """[P, L, V] logits behind every token, of rows that stand in no slot."""
        ...

    def decode(self, batch: TokenBatch) -> Tensor:
        """[N, V], one row for each running sample."""
        ...

    def forget(self) -> None:
        """The weights change, or their memory is wanted: let go of what was made of them."""
        ...
