"""How many tokens rows are when they are computed together, what they cost, and which of them are.

Rows are told by their tokens, prompt and response, side by side with those that have the same prompt: the prompt of the
others is written 0. So [(512, 500), (0, 480)] are two samples of one prompt of 512 tokens.

A model that packs computes a shared prompt once and no padding: 512 + 500 + 480 tokens. Any other computes a rectangle,
2 · 1,012 tokens. So does a model that packs where the masks of its attention would be too large; so long rows are cut
like those of a model that does not pack, wherever that computes less.
"""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple

Lengths = Sequence[tuple[int, int]]
"""Tokens of the prompt and of the response of each row, as above."""
MOST_VISIBLE = 1 << 24
"""Elements of the masks of packed attention, those of prompts and of responses together."""
PADDING = 0.1
"""Share of tokens that may be padding rather than that micro-batches are smaller, and more."""


class PartSize(NamedTuple):
    """Rows that are computed together."""

    rows: int = 0
    prompts: int = 0
    """Different ones."""
    packed: int = 0
    """Tokens, each prompt once."""
    prompt: int = 0
    """Tokens of the longest one."""
    response: int = 0
    longest: int = 0
    """Tokens of the longest row, prompt and response."""

    @property
    def fits_masks(self) -> bool:
        """Tell whether a model that packs computes these rows packed."""
        inputs = max(0, self.response - 1)
        visible = self.prompts * self.prompt * self.prompt + self.rows * inputs * max(0, self.longest - 1)
        return visible <= MOST_VISIBLE

    def tokens(self, *, packs: bool) -> int:
        """Tokens that are computed; `packs`: by a model that packs."""
        return self.packed if packs and self.fits_masks else self.rows * self.longest

    def joined(self, other: PartSize) -> PartSize:
        """These rows and others, which have prompts of their own."""
        return PartSize(
            self.rows + other.rows,
            self.prompts + other.prompts,
            self.packed + other.packed,
            max(self.prompt, other.prompt),
            max(self.response, other.response),
            max(self.longest, other.longest),
        )


LEAST = PartSize(1, 1, 1, 1, 0, 1)
"""The smallest row."""


def part_of(lengths: Lengths) -> PartSize:
    """All these rows together."""
    part = PartSize()
    for prompt, response, shared in _spelled(lengths):
        new = 0 if shared else prompt
        part = part.joined(PartSize(1, 0 if shared else 1, new + response, prompt, response, prompt + response))
    return part


def tokens_of(lengths: Lengths, *, packs: bool) -> int:
    """Tokens that are computed if these rows are computed together; `packs`: by a model that packs."""
    return part_of(lengths).tokens(packs=packs)


def unshared(lengths: Iterable[int]) -> list[tuple[int, int]]:
    """Rows of so many tokens, which have nothing in common."""
    return [(tokens, 0) for tokens in lengths]


def whole_lengths(lengths: Lengths) -> list[int]:
    """Tokens of each row, prompt and response."""
    return [prompt + response for prompt, response, _ in _spelled(lengths)]


def _spelled(lengths: Lengths) -> Iterator[tuple[int, int, bool]]:
    """Prompt and response of each row, and whether the prompt is that of the row before."""
    before = 0
    for number, (own, response) in enumerate(lengths):
        shared = not own and bool(number)
        before = before if shared else own
        yield before, response, shared


@dataclass(frozen=True, slots=True)
class CostRule:
    """Rule of what rows cost, and of what a micro-batch holds."""

    budget: int
    """Tokens of a micro-batch, as they are computed."""
    quadratic: float = 0.0
    """q: a row of n tokens costs n + q·n²."""
    whole_groups: bool = False
    """The rows of a group are in the same micro-batch, since they are compared with each other."""
    packs: bool = False
    """The model packs: of rows with one prompt it computes the prompt once."""

    def tokens(self, lengths: Lengths) -> int:
        """Tokens of these rows together."""
        return tokens_of(lengths, packs=self.packs)

    def cost(self, lengths: Lengths) -> float:
        """Cost of these rows."""
        return self.costs(lengths)[-1] if lengths else 0.0

    def costs(self, lengths: Lengths) -> list[float]:
        """Cost of the first row, of the first two, and so on."""
        total, found = 0.0, []
        for prompt, response, shared in _spelled(lengths):
            whole, there = prompt + response, prompt if shared and self.packs else 0
            total += whole - there + self.quadratic * (whole * whole - there * there)
            found.append(total)
        return found


class RowPiece(NamedTuple):
    """Rows that lie together in a micro-batch as far as they fit."""

    part: PartSize
    size: int
    """Tokens that are computed if there is nothing else."""
    cost: float
    lengths: Lengths
    rows: tuple[int, ...]
    """Their numbers, by which equally large pieces are ordered."""

    @property
    def order(self) -> tuple[int, tuple[int, ...]]:
        """Sort key by which the largest comes first."""
        return -self.size, self.rows


def sorted_pieces(groups: Sequence[Lengths], rule: CostRule) -> list[RowPiece]:
    """Return what is cut into micro-batches, the largest first: groups, or rows with one prompt, or single rows.

    Rows are numbered through all groups.
    """
    begins = accumulate(map(len, groups), initial=0)
    pieces = [piece for begin, rows in zip(begins, groups, strict=False) for piece in _pieces_of(rows, rule, begin)]
    return sorted(pieces, key=lambda piece: piece.order)


def _pieces_of(lengths: Lengths, rule: CostRule, first: int) -> list[RowPiece]:
    if rule.whole_groups:
        return [_piece(lengths, rule, range(first, first + len(lengths)))]
    if not rule.packs:
        return [_piece([(n, 0)], rule, [first + row]) for row, n in enumerate(whole_lengths(lengths))]
    begins = [row for row, (own, _) in enumerate(lengths) if own or not row]
    ends = [*begins[1:], len(lengths)]
    return [
        piece
        for a, b in zip(begins, ends, strict=True)
        for piece in _of_prompt(lengths[a:b], rule, range(first + a, first + b))
    ]


def _of_prompt(lengths: Lengths, rule: CostRule, rows: range) -> list[RowPiece]:
    """Return rows with one prompt together; or one by one, if they are so long that they would seldom be packed."""
    together, whole = _piece(lengths, rule, rows), whole_lengths(lengths)
    if together.part.fits_masks:
        return [together]
    computed = 0
    rest: RowPiece | None = together
    while rest is not None:
        first, rest = _cut(rest, rule, math.inf)
        computed += first.size
    if computed <= (1 - PADDING) * sum(whole):
        return [together]
    return [_piece([(tokens, 0)], rule, [row]) for row, tokens in zip(rows, whole, strict=True)]


def take(pieces: list[RowPiece], rule: CostRule, most: float = math.inf) -> list[RowPiece]:
    """Remove a micro-batch from pieces in their order: the largest, then the largest that still fit, up to cost `most`.

    Of rows with one prompt that do not fit together, as many as do; the others stay.
    """
    first, rest = _cut(pieces.pop(0), rule, most)
    if rest is not None:
        insort(pieces, rest, key=lambda piece: piece.order)
    taken, part, left = [first], first.part, most - first.cost

    def fits(piece: RowPiece) -> bool:
        joined = part.joined(piece.part)
        within = piece.cost <= left and joined.tokens(packs=rule.packs) <= rule.budget
        return within and not (rule.packs and _spreads(part, joined, piece.size))

    while pieces and part.joined(LEAST).tokens(packs=rule.packs) <= rule.budget:
        place = 0 if fits(pieces[0]) else bisect_left(pieces, True, lo=1, key=fits)
        if place == len(pieces):
            break
        piece = pieces.pop(place)
        taken.append(piece)
        part, left = part.joined(piece.part), left - piece.cost
    return taken


def _piece(lengths: Lengths, rule: CostRule, rows: Iterable[int]) -> RowPiece:
    part = part_of(lengths)
    return RowPiece(part, part.tokens(packs=rule.packs), rule.cost(lengths), lengths, tuple(rows))


def _spreads(part: PartSize, joined: PartSize, added: int) -> bool:
    """Tell whether a part is packed, and with `added` more tokens would be a rectangle with much padding."""
    if not part.fits_masks or joined.fits_masks:
        return False
    return joined.tokens(packs=True) > (1 + PADDING) * (part.packed + added)


def _cut(piece: RowPiece, rule: CostRule, most: float) -> tuple[RowPiece, RowPiece | None]:
    """The first rows of a piece that fit, at least one, and the others."""
    if rule.whole_groups or len(piece.rows) == 1:
        return piece, None
    if piece.cost <= most and piece.size <= rule.budget and (not rule.packs or piece.part.fits_masks):
        return piece, None
    costs, whole, count = rule.costs(piece.lengths), whole_lengths(piece.lengths), 1
    part = part_of(piece.lengths[:1])
    while count < len(piece.rows):
        joined = part_of(piece.lengths[: count + 1])
        if costs[count] > most or joined.tokens(packs=rule.packs) > rule.budget:
            break
        if rule.packs and _spreads(part, joined, whole[count]):
            break
        part, count = joined, count + 1
    if count == len(piece.rows):
        return piece, None
    (_, response), *others = piece.lengths[count:]
    rest = [(piece.lengths[0][0], response), *others]
    return _piece(piece.lengths[:count], rule, piece.rows[:count]), _piece(rest, rule, piece.rows[count:])
