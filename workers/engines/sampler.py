"""Draws tokens by inverse transform sampling, with uniform numbers that depend on the sample alone.

Everything is computed in float64: a given number then draws the same token in any batch, unless the logits themselves
differ. Filters apply in the order temperature, top-k, top-p (nucleus sampling, arXiv:1904.09751), min-p.

Shapes: S slots, N running samples (slots 0 … N - 1), T tokens, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from distflow.algorithms.logprobs import token_scores
from distflow.data.randomness import sample_stream, uniform_rows
from distflow.types import SampleRequest
from distflow.workers.engines.logit_shifts import LogitShifts


class Drawn(NamedTuple):
    """One token for each of N running samples, with its log-probs."""

    tokens_N: Tensor
    logprobs_N: Tensor
    """Over the whole vocabulary, at the sample's temperature: as training computes them."""
    filtered_N: Tensor
    """Of the distribution that the token was drawn from."""


class SlotSampler:
    """Sampling state of every slot: settings, uniform numbers, tokens drawn so far, the newest token, its position.

    `as_trained`: log-probs over the whole vocabulary are computed as training computes them, in the logits' own dtype,
    so that they agree to the last bit.
    """

    def __init__(self, slots: int, device: torch.device, *, as_trained: bool = False) -> None:
        self.as_trained = as_trained
        self.settings_S4 = torch.zeros((slots, 4), dtype=torch.float64, device=device)
        self.uniforms_ST = torch.zeros((slots, 0), dtype=torch.float64, device=device)
        self.counters_S3 = torch.zeros((slots, 3), dtype=torch.int64, device=device)
        self.shifts: LogitShifts | None = None

    @property
    def tokens_S(self) -> Tensor:
        """The newest token of each slot."""
        return self.counters_S3[:, 1]

    @property
    def positions_S(self) -> Tensor:
        """The position of that token in its sequence."""
        return self.counters_S3[:, 2]

    def place(self, start: int, samples: Sequence[tuple[SampleRequest, int]]) -> None:
        """Prepare slots `start` … for these samples: request, and how many tokens it goes on after.

        Where `SamplingParams.shifts`, `shift` prepares them too.
        """
        stop = start + len(samples)
        tokens = max(request.params.max_new_tokens - begun for request, begun in samples)
        self._widen(tokens)
        named = {(r.seed, r.position, r.stream) for r, _ in samples}
        streams = {name: sample_stream(*name) for name in named}
        keys = [streams[r.seed, r.position, r.stream] for r, _ in samples]
        firsts = [request.offset + begun for request, begun in samples]
        device = self.settings_S4.device
        uniforms = uniform_rows(keys, [request.sample for request, _ in samples], tokens, firsts)
        self.uniforms_ST[start:stop, :tokens] = torch.from_numpy(uniforms).to(device)
        settings = [[r.params.temperature, r.params.top_k, r.params.top_p, r.params.min_p] for r, _ in samples]
        self.settings_S4[start:stop] = torch.tensor(settings, dtype=torch.float64).to(device)
        # The first token drawn comes right after those that were read.
        counters = [[0, 0, len(request.prompt_ids) + begun - 1] for request, begun in samples]
        self.counters_S3[start:stop] = torch.tensor(counters).to(device)

    def shift(self, start: int, samples: Sequence[tuple[SampleRequest, Sequence[int], int]], vocabulary: int) -> None:
        """Prepare slots `start` … for samples of which some shift their logits: request, the tokens that were read, and
        how many of these are of the response."""
        if self.shifts is None:
            self.shifts = LogitShifts(len(self.settings_S4), vocabulary, self.settings_S4.device)
        for slot, sample in enumerate(samples, start):
            self.shifts.place(slot, *sample)

    def draw(self, logits_NV: Tensor, *, filtered: bool, greedy: bool, shifted: bool = False) -> Drawn:
        """Draw one token for each running sample.

        `filtered`: some sample uses top-k, top-p or min-p; `greedy`: some sample has temperature 0 (all mass on one
        token, log-probs 0); `shifted`: some sample has its logits shifted (`SamplingParams.shifts`).
        """
        N, given_NV = logits_NV.shape[0], logits_NV
        logits_NV = logits_NV.double()
        temperature_N1 = self.settings_S4[:N, :1]
        divisor_N1 = torch.where(temperature_N1 > 0, temperature_N1, 1.0) if greedy else temperature_N1
        whole_NV = probs_NV = (logits_NV / divisor_N1).softmax(dim=-1)
        if shifted:
            assert self.shifts is not None, "such a sample was placed"
            logits_NV = self.shifts.shifted(logits_NV, self.counters_S3[:N, :1])
            probs_NV = (logits_NV / divisor_N1).softmax(dim=-1)
        if filtered:
            probs_NV = keep_likeliest(probs_NV, *(self.settings_S4[:N, at : at + 1] for at in (1, 2, 3)))
        cumulative_NV = _cumulate(probs_NV)
        total_N1 = cumulative_NV[:, -1:]
        u_N1 = self.uniforms_ST[:N].gather(1, self.counters_S3[:N, :1])
        # u ≤ 1 - 2^-53, so u·total rounds to less than total: the search always finds a token of positive probability.
        tokens_N1 = torch.searchsorted(cumulative_NV, u_N1 * total_N1, right=True)
        filtered_N1 = logprobs_N1 = (probs_NV.gather(1, tokens_N1) / total_N1).log()
        if self.as_trained:
            logprobs_N1 = self._scored(given_NV, tokens_N1)
        elif filtered or shifted:
            logprobs_N1 = whole_NV.gather(1, tokens_N1).log()
        if greedy:
            draws_N1 = temperature_N1 > 0
            tokens_N1 = torch.where(draws_N1, tokens_N1, logits_NV.argmax(dim=-1, keepdim=True))
            logprobs_N1, filtered_N1 = (torch.where(draws_N1, each, 0.0) for each in (logprobs_N1, filtered_N1))
        if shifted and self.shifts is not None:
            self.shifts.note(tokens_N1)
        tokens_N = tokens_N1[:, 0]
        self.counters_S3[:N, 1] = tokens_N
        self.counters_S3[:N, ::2] += 1
        return Drawn(tokens_N, logprobs_N1[:, 0], filtered_N1[:, 0])

    def _scored(self, logits_NV: Tensor, tokens_N1: Tensor) -> Tensor:
        """Log-probs [N, 1] as `distflow.algorithms.logprobs` computes them in training."""
        wide_NV = logits_NV if logits_NV.dtype in (torch.float32, torch.float64) else logits_NV.float()
        temperature_N1 = self.settings_S4[: len(wide_NV), :1]
        scaled_NV = wide_NV / torch.where(temperature_N1 > 0, temperature_N1, 1.0).to(wide_NV.dtype)
        logprobs_N, _ = token_scores(scaled_NV, tokens_N1[:, 0])
        return logprobs_N[:, None].double()

    def move(self, target: Tensor, source: Tensor) -> None:
        """Copy the state of slots `source` to slots `target`."""
        for state in (self.settings_S4, self.uniforms_ST, self.counters_S3):
            state[target] = state[source]
        if self.shifts is not None:
            self.shifts.move(target, source)

    def _widen(self, tokens: int) -> None:
        slots, old = self.uniforms_ST.shape
        if tokens > old:
            wider_ST = self.uniforms_ST.new_zeros((slots, max(tokens, 2 * old)))
            wider_ST[:, :old] = self.uniforms_ST
            self.uniforms_ST = wider_ST


def keep_likeliest(probs_NV: Tensor, top_k_N1: Tensor, top_p_N1: Tensor, min_p_N1: Tensor) -> Tensor:
    """Zero all but the `top_k` likeliest tokens (0: all), of these all but the smallest set with mass `top_p`, and what
    is less than `min_p` times as likely as the likeliest.

    Ties are broken by token id. The result is not normalised.
    """
    V = probs_NV.shape[-1]
    sorted_NV, order_NV = probs_NV.sort(dim=-1, descending=True, stable=True)
    ranks_V = torch.arange(V, device=probs_NV.device)
    in_k_NV = ranks_V < torch.where(top_k_N1 > 0, top_k_N1, V)
    sorted_NV = torch.where(in_k_NV, sorted_NV, 0.0)
    cumulative_NV = _cumulate(sorted_NV)
    before_NV = cumulative_NV - sorted_NV
    in_p_NV = (before_NV < top_p_N1 * cumulative_NV[:, -1:]) | (top_p_N1 >= 1.0)
    kept_NV = in_p_NV & (sorted_NV >= min_p_N1 * sorted_NV[:, :1])
    return torch.zeros_like(probs_NV).scatter(1, order_NV, torch.where(kept_NV, sorted_NV, 0.0))


def _cumulate(probs_NV: Tensor) -> Tensor:
    """Cumulative sums along each row; on the CPU if they must be repeatable: a GPU's order of addition varies."""
    if probs_NV.is_cuda and torch.are_deterministic_algorithms_enabled():
        return probs_NV.cpu().cumsum(dim=-1).to(probs_NV.device)
    return probs_NV.cumsum(dim=-1)
