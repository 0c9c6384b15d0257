"""Tokens of running samples, sent from a holder to the owner, which keeps them for the next holder.

A holder sends each token once, in pieces with their offset; the owner appends them to its prefix. A piece after a gap
(an earlier one was lost) changes nothing, and the sample is requested again from the start; until it arrives, the
prefix is shorter than it could be, but never wrong. Prefixes of different workers are never mixed: their tokens may
come from different weights. A longer prefix replaces a shorter one as a whole.

Token ids are 4-byte integers, log-probs 8-byte floats, in the byte order of x86 and ARM (little endian).
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Literal

from distflow.exchange.messages import Piece
from distflow.types import BegunSample, SampleOutput, Span, Version

TOKEN, LOGPROB = "i", "d"
TOKEN_BYTES, LOGPROB_BYTES = 4, 8
SPAN_BYTES = 32
"""Approximate size of a kept span."""

Verdict = Literal["kept", "gap", "refused"]


def cut(output: SampleOutput, start: int, most: int) -> Piece:
    """Up to `most` tokens of a sample from token `start` on; has the finish reason if the sample ends there."""
    end = min(len(output.token_ids), start + most)
    finished = output.finish_reason != "abort" and end == len(output.token_ids)
    return Piece(
        output.position,
        output.sample,
        start,
        array(TOKEN, output.token_ids[start:end]).tobytes(),
        array(LOGPROB, output.logprobs[start:end]).tobytes(),
        clipped(output.spans, start, end),
        output.finish_reason if finished else "",
        array(LOGPROB, output.filtered_logprobs[start:end]).tobytes(),
    )


@dataclass(slots=True)
class Prefix:
    """The first tokens of one sample, from `source` (worker, incarnation) and what that worker continued."""

    source: tuple[str, int]
    tokens: array[int] = field(default_factory=lambda: array(TOKEN))
    logprobs: array[float] = field(default_factory=lambda: array(LOGPROB))
    spans: list[Span] = field(default_factory=list)
    finish_reason: str = ""
    filtered: array[float] = field(default_factory=lambda: array(LOGPROB))
    """As many as tokens, or none: no part has any."""

    @property
    def nbytes(self) -> int:
        """Bytes of memory."""
        values = len(self.logprobs) + len(self.filtered)
        return len(self.tokens) * TOKEN_BYTES + values * LOGPROB_BYTES + len(self.spans) * SPAN_BYTES

    def put(self, piece: Piece) -> None:
        """Append a piece that begins within the prefix or at its end; it replaces what was there from its offset on."""
        del self.tokens[piece.start :], self.logprobs[piece.start :], self.filtered[piece.start :]
        if piece.filtered_logprobs and not self.filtered:
            self.filtered = self.logprobs[:]
        if piece.filtered_logprobs or self.filtered:
            self.filtered.frombytes(piece.filtered_logprobs or piece.logprobs)
        self.tokens.frombytes(piece.token_ids)
        self.logprobs.frombytes(piece.logprobs)
        spans = list(clipped(self.spans, 0, piece.start))
        for span in piece.spans:
            if spans and spans[-1][:2] == span[:2]:
                spans[-1] = spans[-1]._replace(end=span.end)
            else:
                spans.append(span)
        self.spans, self.finish_reason = spans, piece.finish_reason

    def begun(self, sample: int) -> BegunSample:
        """The prefix in the form for the next worker."""
        parts = (tuple(self.tokens), tuple(self.logprobs), tuple(self.spans), self.finish_reason, tuple(self.filtered))
        return BegunSample(sample, *parts)


class Kept:
    """The tokens that an owner has of one open group, in at most the bytes that its lease reserved."""

    def __init__(self) -> None:
        self._prefixes: dict[int, Prefix] = {}
        self.nbytes = 0

    @property
    def tokens(self) -> int:
        """Number of tokens of all samples."""
        return sum(len(prefix.tokens) for prefix in self._prefixes.values())

    def add(self, piece: Piece, source: tuple[str, int], limit_bytes: int) -> Verdict:
        """Add a piece. "gap": it would be new, but the tokens before it are missing."""
        old = self._prefixes[piece.sample] if piece.sample in self._prefixes else Prefix(source)
        joins = piece.start <= len(old.tokens) and (old.source == source or piece.start == 0)
        if piece.end <= len(old.tokens) and (piece.finish_reason == "" or piece.finish_reason == old.finish_reason):
            return "refused"
        if not joins:
            return "gap"
        more = (piece.end - len(old.tokens)) * (TOKEN_BYTES + LOGPROB_BYTES) + len(piece.spans) * SPAN_BYTES
        if old.filtered or piece.filtered_logprobs:
            more += (piece.end - len(old.filtered)) * LOGPROB_BYTES
        if self.nbytes + more > limit_bytes:
            return "refused"
        before = old.nbytes if piece.sample in self._prefixes else 0
        old.source = source
        old.put(piece)
        self._prefixes[piece.sample] = old
        self.nbytes += old.nbytes - before
        return "kept"

    def begun(self) -> tuple[BegunSample, ...]:
        """All samples, for the next worker."""
        return tuple(prefix.begun(sample) for sample, prefix in sorted(self._prefixes.items()))


def of_lineage(piece: Piece, term: int, begins: Mapping[int, int], min_version: int) -> bool:
    """Whether tokens of these versions may be trained on under a lease of this term and minimum version.

    `begins`: the training steps at which terms began since the run was launched, by number.
    """
    known = {term, *([] if term not in begins else range(term))}
    versions = [Version(span.term, span.version) for span in piece.spans]
    return all(v.term in known and v.number >= min_version and v.survives(begins) for v in versions)


def clipped(spans: Iterable[Span], start: int, end: int) -> tuple[Span, ...]:
    """The parts of spans that cover tokens `start` … `end` - 1."""
    inside = (span._replace(start=max(span.start, start), end=min(span.end, end)) for span in spans)
    return tuple(span for span in inside if span.end > span.start)
