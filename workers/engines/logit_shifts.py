"""What some samples have done to their logits before the temperature: stop tokens ruled out, a penalty, a bias.

The state of a slot is as wide as the vocabulary, and there is none at all before the first sample that needs some.

Shapes: S slots, N running samples (slots 0 … N - 1), V vocabulary, K tokens that are named.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from distflow.types import SampleRequest


class LogitShifts:
    """`SamplingParams.min_new_tokens`, `repetition_penalty` and `logit_bias` of every slot. A slot without them has
    values that change no bit of its logits.
    """

    def __init__(self, slots: int, vocabulary: int, device: torch.device) -> None:
        self.bias_SV = torch.zeros((slots, vocabulary), dtype=torch.float64, device=device)
        self.there_SV = torch.zeros((slots, vocabulary), dtype=torch.bool, device=device)
        """Tokens of prompt and response."""
        self.penalty_S1 = torch.ones((slots, 1), dtype=torch.float64, device=device)
        self.ends_SV = torch.zeros((slots, vocabulary), dtype=torch.bool, device=device)
        self.held_S1 = torch.zeros((slots, 1), dtype=torch.int64, device=device)
        """How many tokens drawn here must not be any of `ends_SV`."""

    def place(self, slot: int, request: SampleRequest, read: Sequence[int], begun: int) -> None:
        """Prepare a slot for a sample that has read these tokens, `begun` of them of the response."""
        params = request.params
        for state in (self.bias_SV, self.there_SV, self.ends_SV):
            state[slot] = 0
        self.penalty_S1[slot] = params.repetition_penalty
        self.held_S1[slot] = max(0, params.min_new_tokens - begun)
        if not params.shifts:
            return
        vocabulary = self.bias_SV.shape[1]
        ends = [token for token in params.stop_token_ids if 0 <= token < vocabulary]
        self.ends_SV[slot, self._ids(ends)] = True
        self.there_SV[slot, self._ids(read)] = True
        tokens, values = [token for token, _ in params.biases], [value for _, value in params.biases]
        self.bias_SV[slot, self._ids(tokens)] = torch.tensor(values, dtype=torch.float64).to(self.bias_SV.device)

    def shifted(self, logits_NV: Tensor, drawn_N1: Tensor) -> Tensor:
        """Return the logits that tokens are drawn by; `drawn_N1`: how many were, in each slot, since it was placed."""
        N = len(logits_NV)
        penalty_N1 = self.penalty_S1[:N]
        lowered_NV = torch.where(logits_NV > 0, logits_NV / penalty_N1, logits_NV * penalty_N1)
        shifted_NV = torch.where(self.there_SV[:N], lowered_NV, logits_NV) + self.bias_SV[:N]
        held_NV = self.ends_SV[:N] & (drawn_N1 < self.held_S1[:N])
        return shifted_NV.masked_fill(held_NV, -torch.inf)

    def note(self, tokens_N1: Tensor) -> None:
        """Note that these tokens are there, too."""
        self.there_SV[: len(tokens_N1)].scatter_(1, tokens_N1, True)

    def move(self, target: Tensor, source: Tensor) -> None:
        """Copy the state of slots `source` to slots `target`."""
        for state in (self.bias_SV, self.there_SV, self.penalty_S1, self.ends_SV, self.held_S1):
            state[target] = state[source]

    def _ids(self, tokens: Sequence[int]) -> Tensor:
        return torch.tensor(list(tokens), dtype=torch.int64).to(self.bias_SV.device)
