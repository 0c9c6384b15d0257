"""Predicts how long the responses to a prompt are, from those that an owner has seen: only their order is used.

Ridge regression of the logarithm of the length on the prompt's length and on those of its tokens and pairs of tokens
that several prompts have, but not nearly all: they tell what kind of task it is. A prompt that was seen before is
predicted from its own lengths, too, shrunk towards the regression, by as much as that was better at predicting than
they were (empirical Bayes: Efron and Morris, JASA 1973). Results count less and less, since the policy changes.
Everything is bounded: the regression by `WIDTH` and `TELLING`, counts by `COUNTED`, remembered prompts by `PAST`,
tokens looked at by `LOOKED_AT`. No clock, no randomness: equal results in equal order give equal predictions.

Nothing of it goes into checkpoints. It decides the order of leases and never which positions are trained on, one
training step of results teaches it again, and a change of the owners would have to merge what they know.

Example: learn(7, ids, 900.0); predict(7, ids) is about 900, and that of prompts that read alike higher than before.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Vector = NDArray[np.float64]
Hashes = NDArray[np.intp]


class Features(NamedTuple):
    """Those that a prompt has, of `WIDTH`."""

    at: Hashes
    values: Vector


WIDTH = 256
"""Features: a constant, the length of the prompt, and hashed pairs of and single tokens."""
TELLING = 32
"""Most hashed features of a prompt: those of the smallest hashes, which prompts that are alike have in common."""
COUNTED = 1 << 18
"""Hashes of tokens and pairs for which it counts the prompts that have them."""
FEWEST, LEAST, MOST = 3, 0.01, 0.9
"""Prompts that must have a token or pair for it to tell something, and the shares of all between which it does."""
LOOKED_AT = 256
"""Most tokens of a prompt that are looked at: half of them at its beginning, half at its end."""
PAST = 1 << 16
"""Most prompts whose own lengths are remembered."""
RIDGE = 0.5
ROUNDS = 6
"""Of conjugate gradients, from the former weights on: what is learned changes little from one time to the next."""
FORGET = 0.999
"""Weight of everything known, with each further result."""
EVERY = 16
"""Results after which the regression is solved anew when a length is predicted; of few results each counts."""
NEWEST = 0.5
"""Weight of a prompt's newest length beside its earlier ones."""
JUDGED = 0.99
"""Weight of former errors of the predictions, with each further one."""
ASSUMED = 1.0
"""So many errors are assumed before there are any."""
LEAST_OWN = 0.05
"""Variance of the prompts about the regression, at least, by that of a prompt's lengths about their mean."""
LONGEST = 0.2
"""Share of the groups whose recall is the figure of merit."""
_FIXED = 2
_MOST = 20.0
_EXACT = 1e-12
_RIDGES = np.full(WIDTH, RIDGE)
_RIDGES[0] = 0.01  # Of the constant: lengths are not drawn towards 1.
_MULTIPLIERS = (np.uint64(0x9E3779B97F4A7C15), np.uint64(0xC2B2AE3D27D4EB4F))


class MeanSquareError:
    """Of predictions, of the logarithm of a length; the latest weigh most."""

    def __init__(self) -> None:
        self._sum = self._count = 0.0

    def mean(self, assumed: float) -> float:
        """What it is as far as known; `assumed`: as long as hardly anything is."""
        return (self._sum + ASSUMED * assumed) / (self._count + ASSUMED)

    def add(self, error: float) -> None:
        """Count one more."""
        self._sum = JUDGED * self._sum + error * error
        self._count = JUDGED * self._count + 1.0


class LengthRanker:
    """What one owner knows of the lengths of responses."""

    def __init__(self) -> None:
        self.learned = 0
        """Results so far."""
        self._weights = np.zeros(WIDTH)
        self._unsolved = 0
        """Results that are not in the weights."""
        self._squares = np.zeros((WIDTH, WIDTH))
        """Weighted sum of the features' outer products."""
        self._products = np.zeros(WIDTH)
        """And of features times logarithm of the length."""
        self._having = np.zeros(COUNTED, np.float32)
        """By hash: how many prompts had it."""
        self._past: OrderedDict[int, tuple[float, int]] = OrderedDict()
        """By prompt, the last one used at the end: smoothed logarithm of its lengths, and how many there were."""
        self._of_regression, self._of_past = MeanSquareError(), MeanSquareError()
        """The latter as if there were no noise in what is predicted from."""

    def predict(self, prompt: int, prompt_ids: Sequence[int]) -> float:
        """Tokens of a response to this prompt (its index in the data order), roughly: their order is what counts."""
        if self._unsolved >= min(EVERY, 1 + self.learned // EVERY):
            self._solve()
        past = self._past.get(prompt)
        guess = self._guess(self._features(prompt_ids, hashes(prompt_ids)))
        if past is None:
            return math.exp(guess)
        mean, own = past[0], 1.0 / noise_of(past[1])
        prior = self._prior()
        return math.exp((own * mean + prior * guess) / (own + prior))

    def learn(self, prompt: int, prompt_ids: Sequence[int], tokens: float) -> None:
        """The responses to this prompt had so many tokens, in the mean."""
        length = math.log(max(1.0, tokens))
        self.learned += 1
        found = hashes(prompt_ids)
        self._having[found] += 1.0
        at, values = features = self._features(prompt_ids, found)
        if self.learned > EVERY:
            self._of_regression.add(length - self._guess(features))
        if prompt in self._past:
            mean, count = self._past[prompt]
            self._of_past.add((length - mean) / math.sqrt(1.0 + noise_of(count)))
        self._remember(prompt, length)
        self._squares[at[:, None], at] += values[:, None] * values
        self._products[at] += values * length
        self._unsolved += 1

    def _guess(self, features: Features) -> float:
        """By the regression alone."""
        return min(_MOST, float(self._weights[features.at] @ features.values))

    def _prior(self) -> float:
        """Weight of the regression beside one length of the prompt itself: the variance of lengths about their prompt's
        mean, by that of these means about the regression, whose errors have both."""
        both = self._of_regression.mean(1.0)
        within = self._of_past.mean(both / 2.0)
        return within / max(both - within, LEAST_OWN * within)

    def _solve(self) -> None:
        """Conjugate gradients (Hestenes and Stiefel, 1952); einsum starts no threads, as a solver of LAPACK does."""
        kept = FORGET**self._unsolved
        self._squares *= kept
        self._products *= kept
        self._unsolved = 0
        weights = self._weights
        rest = self._products - self._times(weights)
        along, size = rest, float(rest @ rest)
        for _ in range(ROUNDS):
            if size < _EXACT:
                break
            product = self._times(along)
            step = size / float(along @ product)
            weights += step * along
            rest = rest - step * product
            before, size = size, float(rest @ rest)
            along = rest + size / before * along

    def _times(self, vector: Vector) -> Vector:
        """The ridge regression's matrix times a vector."""
        product: Vector = np.einsum("ij,j->i", self._squares, vector)
        return product + _RIDGES * vector

    def _features(self, prompt_ids: Sequence[int], found: Hashes) -> Features:
        """A constant, the logarithm of the prompt's length, then what tells the task, hashed again with signs
        (Weinberger and others, Feature Hashing, arXiv:0902.2206), each by the logarithm of how rare it is, of norm 1.
        """
        having = self._having[found]
        telling = (having >= max(FEWEST, LEAST * self.learned)) & (having <= MOST * self.learned)
        first = np.flatnonzero(telling)[:TELLING]
        kept = found[first]
        rarity = np.log((1.0 + self.learned) / having[first])
        x = np.zeros(WIDTH)
        x[0], x[1] = 1.0, math.log1p(len(prompt_ids)) / 4.0
        x[_FIXED + kept % (WIDTH - _FIXED)] = (
            (1.0 - 2.0 * (kept >> 17 & 1)) * rarity / max(1.0, math.sqrt(rarity @ rarity))
        )
        at = np.flatnonzero(x)
        return Features(at, x[at])

    def _remember(self, prompt: int, length: float) -> None:
        mean, count = self._past.pop(prompt, (length, 0))
        self._past[prompt] = (mean + NEWEST * (length - mean), count + 1)
        if len(self._past) > PAST:
            self._past.popitem(last=False)


def noise_of(count: int) -> float:
    """The variance of a prompt's smoothed length, after so many lengths, by that of one."""
    limit = NEWEST / (2.0 - NEWEST)
    return limit + (1.0 - limit) * (1.0 - NEWEST) ** (2 * (count - 1))


def hashes(prompt_ids: Sequence[int]) -> Hashes:
    """Those of its tokens and of its pairs of tokens, each once."""
    half = LOOKED_AT // 2
    seen = prompt_ids if len(prompt_ids) <= LOOKED_AT else (*prompt_ids[:half], *prompt_ids[-half:])
    ids = np.fromiter(seen, np.uint64, len(seen)) + np.uint64(1)
    single = ids * _MULTIPLIERS[0]
    mixed = np.concatenate([single, (single[:-1] + ids[1:]) * _MULTIPLIERS[1]])
    mixed ^= mixed >> np.uint64(29)
    mixed *= _MULTIPLIERS[0]
    found: Hashes = np.unique((mixed >> np.uint64(46)).astype(np.intp))
    return found


def recall(predicted: Sequence[float], true: Sequence[float]) -> float:
    """Of the longest 20% (at least one) the share among as many that were predicted to be the longest; 0 for none."""
    most = max(1, round(LONGEST * len(true)))
    found, longest = (sorted(range(len(true)), key=lambda i: lengths[i])[-most:] for lengths in (predicted, true))
    return len({*found} & {*longest}) / most
