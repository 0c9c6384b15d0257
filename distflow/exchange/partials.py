"""Tokens of running samples, sent from a holder to the owner, which keeps them for the next holder.

A holder sends each token once, in pieces with their offset; the owner appends them to its prefix, of which there is one
for each request of a sample. A piece after a gap (an earlier one was lost) changes nothing, and the request's tokens
are asked for again from the start; until they arrive, the prefix is shorter than it could be, but never wrong. Prefixes
of different workers are never mixed: their tokens may come from different weights. A longer prefix replaces a shorter
one as a whole, and one that follows something else (another digest) whatever was there.

Token ids are 4-byte integers, log-probs 8-byte floats, in the byte order of x86 and ARM (little endian).
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Literal

from distflow.exchange.messages import Piece
from distflow.types import FIRST_CALL, BegunSample, CallNumber, SampleOutput, Span, Version

TOKEN, LOGPROB = "i", "d"
TOKEN_BYTES, LOGPROB_BYTES = 4, 8
SPAN_BYTES = 32
"""Approximate size of a kept span."""
CALL_BYTES = 64
"""The same of each further request of a sample."""
ANSWER_BYTES = 64 << 10
"""Most bytes of what tools have answered in one sample: these are kept beside what is reserved for its tokens."""

Verdict = Literal["kept", "gap", "refused"]


def cut(output: SampleOutput, start: int, most: int) -> Piece:
    """Up to `most` tokens of a request from token `start` on; has the finish reason if it ends there."""
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
        output.call,
        output.digest,
        output.answer,
    )


@dataclass(slots=True)
class Prefix:
    """The first tokens of one request, from `source` (worker, incarnation) and what that worker continued."""

    source: tuple[str, int]
    digest: int = 0
    """Of what was asked for."""
    tokens: array[int] = field(default_factory=lambda: array(TOKEN))
    logprobs: array[float] = field(default_factory=lambda: array(LOGPROB))
    spans: list[Span] = field(default_factory=list)
    finish_reason: str = ""
    filtered: array[float] = field(default_factory=lambda: array(LOGPROB))
    """As many as tokens, or none: no part has any."""
    answer: bytes = b""
    """Of a tool."""

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
        self.spans, self.finish_reason, self.answer = spans, piece.finish_reason, piece.answer

    def begun(self, sample: int, call: CallNumber) -> BegunSample:
        """The prefix in the form for the next worker."""
        parts = (tuple(self.tokens), tuple(self.logprobs), tuple(self.spans), self.finish_reason, tuple(self.filtered))
        return BegunSample(sample, *parts, call, self.digest, self.answer)


class Kept:
    """The tokens that an owner has of one open group, in at most the bytes that its lease reserved."""

    def __init__(self) -> None:
        self._prefixes: dict[tuple[int, CallNumber], Prefix] = {}
        """By sample and call."""
        self.nbytes = 0

    @property
    def tokens(self) -> int:
        """Number of tokens of all samples."""
        return sum(len(prefix.tokens) for prefix in self._prefixes.values())

    def add(self, piece: Piece, source: tuple[str, int], limit_bytes: int) -> Verdict:
        """Add a piece. "gap": it would be new, but the tokens before it are missing."""
        key = (piece.sample, piece.call)
        had = self._prefixes.get(key)
        old = Prefix(source, piece.digest) if had is None or had.digest != piece.digest else had
        joins = piece.start <= len(old.tokens) and (old.source == source or piece.start == 0)
        if piece.end <= len(old.tokens) and (piece.finish_reason == "" or piece.finish_reason == old.finish_reason):
            return "refused"
        if not joins:
            return "gap"
        more = (piece.end - len(old.tokens)) * (TOKEN_BYTES + LOGPROB_BYTES) + len(piece.spans) * SPAN_BYTES
        if old.filtered or piece.filtered_logprobs:
            more += (piece.end - len(old.filtered)) * LOGPROB_BYTES
        known = 0 if had is None else had.nbytes
        call = CALL_BYTES if had is None and piece.call != FIRST_CALL else 0
        gone = 0 if had is old else known
        if self.nbytes + more + call - gone > limit_bytes or not self._has_room_for(piece):
            return "refused"
        old.source = source
        old.put(piece)
        self._prefixes[key] = old
        self.nbytes += old.nbytes - known + call
        return "kept"

    def _has_room_for(self, piece: Piece) -> bool:
        """Whether what tools have answered in the sample stays within its bound."""
        if not piece.answer:
            return True
        known = {call: len(prefix.answer) for (n, call), prefix in self._prefixes.items() if n == piece.sample}
        return sum((known | {piece.call: len(piece.answer)}).values()) <= ANSWER_BYTES

    def begun(self) -> tuple[BegunSample, ...]:
        """All of it, for the next worker."""
        return tuple(prefix.begun(*key) for key, prefix in sorted(self._prefixes.items(), key=lambda kept: kept[0]))


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
