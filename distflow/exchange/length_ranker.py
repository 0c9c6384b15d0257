"""Predicts how long the responses to a prompt are, from those that an owner has seen: only their order is used.

A prompt that was seen before is predicted from its own lengths, any other by ridge regression of the logarithm of the
length on features of its tokens. The regression is solved recursively, result by result, and forgets slowly, since the
policy changes (recursive least squares: Haykin, Adaptive Filter Theory, chapter 10). Everything is bounded: the matrix
by `WIDTH`, remembered prompts by `PAST`, tokens looked at by `LOOKED_AT`. No clock, no randomness: equal results in
equal order give equal predictions.

Nothing of it goes into checkpoints. It decides the order of leases and never which positions are trained on, one
training step of results teaches it again, and a change of the owners would have to merge what they know.

Example: learn(7, ids, 900.0); predict(7, ids) is about 900, and that of prompts that read alike higher than before.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

Vector = NDArray[np.float64]

WIDTH = 128
"""Features: a constant, the length of the prompt, and hashed pairs of and single tokens."""
LOOKED_AT = 256
"""Most tokens of a prompt that are looked at: half of them at its beginning, half at its end."""
PAST = 1 << 16
"""Most prompts whose own lengths are remembered."""
RIDGE = 0.3
FORGET = 0.999
"""Weight of everything known, with each further result."""
NEWEST = 0.5
"""Weight of a prompt's newest length beside its earlier ones."""
PRIOR = 0.3
"""Weight of the regression beside lengths of the prompt itself, each of which counts as 1."""
LONGEST = 0.2
"""Share of the groups whose recall is the figure of merit."""
_FIXED = 2
_MOST = 20.0
_MULTIPLIERS = (np.uint64(0x9E3779B97F4A7C15), np.uint64(0xC2B2AE3D27D4EB4F))


class LengthRanker:
    """What one owner knows of the lengths of responses."""

    def __init__(self) -> None:
        self.learned = 0
        """Results so far."""
        self._weights = np.zeros(WIDTH)
        self._inverse = np.eye(WIDTH) / RIDGE
        """Of the weighted sum of the features' outer products, and the ridge."""
        self._past: OrderedDict[int, tuple[float, int]] = OrderedDict()
        """By prompt, the last one used at the end: smoothed logarithm of its lengths, and how many there were."""

    def predict(self, prompt: int, prompt_ids: Sequence[int]) -> float:
        """Tokens of a response to this prompt (its index in the data order), roughly: their order is what counts."""
        past = self._past.get(prompt)
        guess = min(_MOST, float(self._weights @ features(prompt_ids)))
        if past is None:
            return math.exp(guess)
        mean, count = past
        return math.exp((count * mean + PRIOR * guess) / (count + PRIOR))

    def learn(self, prompt: int, prompt_ids: Sequence[int], tokens: float) -> None:
        """The responses to this prompt had so many tokens, in the mean."""
        length = math.log(max(1.0, tokens))
        self.learned += 1
        self._remember(prompt, length)
        x = features(prompt_ids)
        projected = self._inverse @ x
        # Without news in a direction forgetting would let its variance grow without bound.
        forget = FORGET if np.trace(self._inverse) < WIDTH / RIDGE else 1.0
        gain = projected / (forget + x @ projected)
        self._weights += gain * (length - self._weights @ x)
        self._inverse -= np.outer(gain, projected)
        self._inverse /= forget

    def _remember(self, prompt: int, length: float) -> None:
        mean, count = self._past.pop(prompt, (length, 0))
        self._past[prompt] = (mean + NEWEST * (length - mean), count + 1)
        if len(self._past) > PAST:
            self._past.popitem(last=False)


def features(prompt_ids: Sequence[int]) -> Vector:
    """[WIDTH]: a constant, the logarithm of the prompt's length, then signed hashes of tokens and pairs, of norm 1
    (Weinberger and others, Feature Hashing, arXiv:0902.2206).
    """
    x = np.zeros(WIDTH)
    x[0], x[1] = 1.0, math.log1p(len(prompt_ids)) / 4.0
    half = LOOKED_AT // 2
    seen = prompt_ids if len(prompt_ids) <= LOOKED_AT else (*prompt_ids[:half], *prompt_ids[-half:])
    if not seen:
        return x
    ids = np.fromiter(seen, np.uint64, len(seen)) + np.uint64(1)
    single = ids * _MULTIPLIERS[0]
    pairs = (single[:-1] + ids[1:]) * _MULTIPLIERS[1]
    mixed = np.concatenate([single, pairs])
    mixed ^= mixed >> np.uint64(29)
    mixed *= _MULTIPLIERS[0]
    places = (mixed >> np.uint64(40)) % np.uint64(WIDTH - _FIXED)
    signs = 1.0 - 2.0 * ((mixed >> np.uint64(39)) & np.uint64(1))
    hashed = np.bincount(places.astype(np.intp), signs, WIDTH - _FIXED)
    x[_FIXED:] = hashed / max(1.0, math.sqrt(hashed @ hashed))
    return x


def recall(predicted: Sequence[float], true: Sequence[float]) -> float:
    """Of the longest 20% (at least one) the share among as many that were predicted to be the longest; 0 for none."""
    most = max(1, round(LONGEST * len(true)))
    found, longest = (sorted(range(len(true)), key=lambda i: lengths[i])[-most:] for lengths in (predicted, true))
    return len({*found} & {*longest}) / most
