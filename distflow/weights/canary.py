"""The canary of a version: log-probs of fixed tokens, sent by the trainer and recomputed by each engine.

Digests show that the bytes of a version arrived; the canary shows that the engine computes with them.
Example, a vocabulary of 13 and samples of at most 20 tokens: four rows of 19 tokens, 72 log-probs.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterable, Mapping, Sequence
from typing import Annotated, Protocol, runtime_checkable

import msgspec

from distflow.data.decoding import Row

TOKENS = 64
"""Fewest log-probs that are compared."""
LIMIT = 4096
"""Most tokens, and most rows, of a received canary."""
TOLERANCE: Mapping[str, float] = {"float64": 1e-5, "float32": 2e-3, "float16": 0.1, "bfloat16": 0.5, "fp8": 1.0}
"""Largest mean difference (nats) by the coarsest of the types that trainer and engine compute in, and weights were
rounded to on their way.

Generous where logits are rounded: those of improbable tokens are large, and one rounding step of bfloat16 is 1/8 there.
"""

Rows = Sequence[Sequence[int]]
_TokenIds = Annotated[tuple[Annotated[int, msgspec.Meta(ge=0, lt=1 << 31)], ...], msgspec.Meta(max_length=LIMIT)]


@runtime_checkable
class Scoring(Protocol):
    """An engine that can score given tokens. Engines without it do not check versions."""

    @property
    def precision(self) -> str:
        """The type it computes in: a key of TOLERANCE."""
        ...

    def logprobs(self, rows: Rows) -> Sequence[Sequence[float]] | None:
        """Log-prob (nats, temperature 1) of every token but the first of each row, under the weights in use.

        Called after `end_update`, while samples may be running. None if there is no room for it now.
        """
        ...


@runtime_checkable
class ScoringLater(Protocol):
    """A Scoring engine that goes on with what `logprobs` had no room for, until the next update."""

    @property
    def precision(self) -> str:
        """As in Scoring."""
        ...

    @property
    def scoring(self) -> bool:
        """Whether it does so still; does not wait."""
        ...

    def late_logprobs(self) -> Sequence[Sequence[float]] | None:
        """What was found, once it is no longer `scoring`; None if there was never any room."""
        ...


class Canary(Row, frozen=True):
    """Rows of token ids, and the log-prob of every token but the first of each.

    A log-prob may be nan or infinite: then so are weights, and the trainer does not publish them.
    """

    rows: Annotated[tuple[_TokenIds, ...], msgspec.Meta(max_length=LIMIT)]
    logprobs: Annotated[tuple[tuple[float, ...], ...], msgspec.Meta(max_length=LIMIT)]
    precision: str
    """The type the trainer computes in: a key of TOLERANCE."""

    def __post_init__(self) -> None:
        """Raises ValueError, which a reader of the announcement passes on as ProtocolError."""
        if sum(map(len, self.rows)) > LIMIT:
            raise ValueError(f"a canary of more than {LIMIT} tokens")
        if [len(row) - 1 for row in self.rows] != list(map(len, self.logprobs)) or not any(self.logprobs):
            raise ValueError("a canary without a log-prob for every token but the first of each row")
        if self.precision not in TOLERANCE:
            raise ValueError(f"a canary of unknown precision {self.precision!r}")

    @property
    def finite(self) -> bool:
        """Whether all log-probs are finite, as they are under finite weights."""
        return all(math.isfinite(value) for row in self.logprobs for value in row)

    def difference(self, found: Sequence[Sequence[float]]) -> float:
        """Mean absolute difference of the log-probs (nats); nan or infinite if one of them is."""
        pairs = [pair for own, other in zip(self.logprobs, found, strict=True) for pair in zip(own, other, strict=True)]
        return math.fsum(abs(own - other) for own, other in pairs) / len(pairs)

    def tolerance(self, engine: str, weights: Iterable[str] = ()) -> float:
        """The tolerance for an engine that computes in this precision, and for weights in these."""
        return max(TOLERANCE[one] for one in (self.precision, engine, *weights))


def canary_rows(vocabulary: int, longest: int) -> tuple[tuple[int, ...], ...]:
    """Token ids, the same for every version: one row of TOKENS + 1, or several if samples are shorter than that.

    Rows are one token shorter than a sample may be, since engines need room to draw one.
    """
    length = max(2, min(longest - 1, TOKENS + 1))
    drawn = random.Random(0)
    count = -(-TOKENS // (length - 1))
    return tuple(tuple(drawn.randrange(vocabulary) for _ in range(length)) for _ in range(count))
